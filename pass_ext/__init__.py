"""Kernels for decoders that want more than one token per model call, and a decoder that uses them.

The ops are thin, typed wrappers over ``torch.ops.pass_ext.*``; ``python -m pass_ext info`` prints the loaded kernels.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from pass_ext._library import set_debug, status
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.ops.accept import STATUS, AcceptResult, TokenLogprobs, accept_chain, accept_tree
from pass_ext.ops.adapter import adapter_rows, adapter_rows_
from pass_ext.ops.attention import attention_merge, attention_tree
from pass_ext.ops.cache import cache_commit_
from pass_ext.ops.common.rules import RULES
from pass_ext.ops.draft import draft_sample
from pass_ext.ops.layer import (
    LayerWeights,
    PackedLayers,
    layer_after_attention,
    layer_before_attention,
    layer_pack,
    layer_stack,
)
from pass_ext.ops.linear import linear_rows
from pass_ext.ops.lookahead import lookahead_embed
from pass_ext.ops.next import next_rows_, next_tree_
from pass_ext.ops.recall import recall_scores
from pass_ext.ops.shard import shard_best, shard_combine, shard_local
from pass_ext.ops.step import step_gate, step_rms_norm, step_rotary
from pass_ext.ops.tree import tree_mask, tree_prepare
from pass_ext.tree import PackedTrees, Tree, pack_trees

if TYPE_CHECKING:
    from pass_ext.checkpoint import load_checkpoint
    from pass_ext.decoding.drafting.drafter import DraftContext, Drafter, DraftingMethod
    from pass_ext.decoding.drafting.step import Batch, Candidates, Proposal
    from pass_ext.decoding.generation import Generation, generate
    from pass_ext.decoding.methods import MultiCandidate, NGram, PaSS, Plain, Speculative
    from pass_ext.decoding.models.early_exit.draft import EarlyExitDraft
    from pass_ext.decoding.models.packed import PackedModel
    from pass_ext.decoding.planning.calibration import calibrate
    from pass_ext.decoding.planning.plan import plan
    from pass_ext.decoding.requests.corpus import Corpus
    from pass_ext.decoding.requests.grammar.protocol import Grammar, allow_tokens
    from pass_ext.decoding.sampling import SamplingParams
    from pass_ext.decoding.stats import GenerationStats
    from pass_ext.integrations.transformers.generate import custom_generate
    from pass_ext.modules.decision import DecisionModel, DraftLevel
    from pass_ext.modules.exit_adapter import ExitAdapter

try:
    __version__ = version("pass_ext")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "RULES",
    "STATUS",
    "AcceptResult",
    "Batch",
    "Candidates",
    "Corpus",
    "DecisionModel",
    "DraftContext",
    "DraftLevel",
    "Drafter",
    "DraftingMethod",
    "EarlyExitDraft",
    "ExitAdapter",
    "Generation",
    "GenerationStats",
    "Grammar",
    "LayerWeights",
    "LookaheadEmbedding",
    "MultiCandidate",
    "NGram",
    "PaSS",
    "PackedLayers",
    "PackedModel",
    "PackedTrees",
    "Plain",
    "Proposal",
    "SamplingParams",
    "Speculative",
    "TokenLogprobs",
    "Tree",
    "__version__",
    "accept_chain",
    "accept_tree",
    "adapter_rows",
    "adapter_rows_",
    "allow_tokens",
    "attention_merge",
    "attention_tree",
    "cache_commit_",
    "calibrate",
    "custom_generate",
    "draft_sample",
    "generate",
    "layer_after_attention",
    "layer_before_attention",
    "layer_pack",
    "layer_stack",
    "linear_rows",
    "load_checkpoint",
    "lookahead_embed",
    "next_rows_",
    "next_tree_",
    "pack_trees",
    "plan",
    "recall_scores",
    "set_debug",
    "shard_best",
    "shard_combine",
    "shard_local",
    "status",
    "step_gate",
    "step_rms_norm",
    "step_rotary",
    "tree_mask",
    "tree_prepare",
]


# Loaded at first use: users of the ops alone do not pay for importing the decoder, and custom_generate needs transformers.
_LATER = {
    "Batch": "decoding.drafting.step",
    "Candidates": "decoding.drafting.step",
    "DecisionModel": "modules.decision",
    "Corpus": "decoding.requests.corpus",
    "DraftContext": "decoding.drafting.drafter",
    "DraftLevel": "modules.decision",
    "Drafter": "decoding.drafting.drafter",
    "DraftingMethod": "decoding.drafting.drafter",
    "EarlyExitDraft": "decoding.models.early_exit.draft",
    "ExitAdapter": "modules.exit_adapter",
    "Generation": "decoding.generation",
    "GenerationStats": "decoding.stats",
    "Grammar": "decoding.requests.grammar.protocol",
    "MultiCandidate": "decoding.methods",
    "NGram": "decoding.methods",
    "PackedModel": "decoding.models.packed",
    "PaSS": "decoding.methods",
    "Plain": "decoding.methods",
    "Proposal": "decoding.drafting.step",
    "SamplingParams": "decoding.sampling",
    "Speculative": "decoding.methods",
    "allow_tokens": "decoding.requests.grammar.protocol",
    "calibrate": "decoding.planning.calibration",
    "custom_generate": "integrations.transformers.generate",
    "generate": "decoding.generation",
    "load_checkpoint": "checkpoint",
    "plan": "decoding.planning.plan",
}


def __getattr__(name: str) -> Any:
    """Loads the names of ``_LATER``."""
    if name == "distributed":
        return import_module("pass_ext.distributed")
    if name in _LATER:
        value = globals()[name] = getattr(import_module(f"pass_ext.{_LATER[name]}"), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
