"""Kernels for decoders that want more than one token per model call.

Functions here are thin, typed wrappers over ``torch.ops.pass_ext.*``; ``python -m pass_ext info`` shows what is loaded.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from pass_ext._library import set_debug, status
from pass_ext.decoding.generation import Generation, generate
from pass_ext.decoding.methods import NGram, PaSS, Plain
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.lookahead import LookaheadEmbedding
from pass_ext.ops.accept import RULES, AcceptResult, accept_chain, accept_tree
from pass_ext.ops.attention import attention_merge, attention_tree
from pass_ext.ops.cache import cache_commit_
from pass_ext.ops.draft import draft_sample
from pass_ext.ops.linear import linear_rows
from pass_ext.ops.lookahead import lookahead_embed
from pass_ext.ops.tree import tree_mask, tree_prepare
from pass_ext.tree import PackedTrees, Tree, pack_trees

if TYPE_CHECKING:
    from pass_ext.integrations.transformers_generate import custom_generate

try:
    __version__ = version("pass_ext")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "RULES",
    "AcceptResult",
    "Generation",
    "LookaheadEmbedding",
    "NGram",
    "PaSS",
    "PackedTrees",
    "Plain",
    "SamplingParams",
    "Tree",
    "__version__",
    "accept_chain",
    "accept_tree",
    "attention_merge",
    "attention_tree",
    "cache_commit_",
    "custom_generate",
    "draft_sample",
    "generate",
    "linear_rows",
    "lookahead_embed",
    "pack_trees",
    "set_debug",
    "status",
    "tree_mask",
    "tree_prepare",
]


def __getattr__(name: str) -> Any:
    """What belongs to another library is imported when it is asked for."""
    if name == "custom_generate":
        from pass_ext.integrations.transformers_generate import custom_generate

        return custom_generate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
