"""The specification of every op in plain PyTorch, written to be read, not to be fast. Tests compare all devices with it."""

from pass_ext.reference.accept import accept_chain, accept_tree
from pass_ext.reference.accept_logprobs import accept_logprobs, accept_support
from pass_ext.reference.adapter import adapter_rows_
from pass_ext.reference.attention import attention_merge, attention_tree
from pass_ext.reference.cache import cache_commit_
from pass_ext.reference.convolution import convolution_tree
from pass_ext.reference.draft import draft_sample
from pass_ext.reference.layer import layer_after_attention, layer_before_attention, layer_pack, layer_stack
from pass_ext.reference.linear import linear_packed, linear_rows
from pass_ext.reference.lookahead import lookahead_embed
from pass_ext.reference.next import next_tree_
from pass_ext.reference.quantize import quantize_rows
from pass_ext.reference.recall import recall_scores
from pass_ext.reference.recurrent import recurrent_tree, recurrent_tree_algebra
from pass_ext.reference.shard import shard_best, shard_local
from pass_ext.reference.state import state_commit_
from pass_ext.reference.step import step_gate, step_rms_norm, step_rotary
from pass_ext.reference.tree import tree_mask, tree_prepare

__all__ = [
    "accept_chain",
    "accept_logprobs",
    "accept_support",
    "accept_tree",
    "adapter_rows_",
    "attention_merge",
    "attention_tree",
    "cache_commit_",
    "convolution_tree",
    "draft_sample",
    "layer_after_attention",
    "layer_before_attention",
    "layer_pack",
    "layer_stack",
    "linear_packed",
    "linear_rows",
    "lookahead_embed",
    "next_tree_",
    "quantize_rows",
    "recall_scores",
    "recurrent_tree",
    "recurrent_tree_algebra",
    "shard_best",
    "shard_local",
    "state_commit_",
    "step_gate",
    "step_rms_norm",
    "step_rotary",
    "tree_mask",
    "tree_prepare",
]
