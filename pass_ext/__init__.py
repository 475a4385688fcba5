"""Speculative decoding: kernels for a loop of one's own, and ``generate`` for transformers models.

The ops are thin, typed wrappers over ``torch.ops.pass_ext.*``; ``python -m pass_ext info`` prints the loaded kernels.

Beside the names here: ``pass_ext.layers``, a decoder layer for few rows; ``pass_ext.distributed``, logits divided among ranks;
``pass_ext.drafting``, for a drafting method of one's own; ``pass_ext.integrations``.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from pass_ext._library import set_debug, status
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.ops.accept import AcceptResult, accept_chain, accept_tree
from pass_ext.ops.attention import attention_merge, attention_tree
from pass_ext.ops.cache import cache_commit_
from pass_ext.ops.common.rules import RULES
from pass_ext.ops.draft import draft_sample
from pass_ext.ops.lookahead import lookahead_embed
from pass_ext.ops.next import next_tree_
from pass_ext.ops.tree import tree_mask, tree_prepare
from pass_ext.tree import Tree, pack_trees

if TYPE_CHECKING:
    from pass_ext import distributed as distributed
    from pass_ext import drafting as drafting
    from pass_ext import layers as layers
    from pass_ext.checkpoint import load_checkpoint
    from pass_ext.decoding.drafting.drafter import Drafter
    from pass_ext.decoding.drafting.heads.load import load_drafter
    from pass_ext.decoding.generation import generate
    from pass_ext.decoding.methods import MultiCandidate, NGram, PaSS, Plain, Speculative
    from pass_ext.decoding.models.early_exit import EarlyExitDraft
    from pass_ext.decoding.models.packed import PackedModel
    from pass_ext.decoding.requests.grammar import Grammar
    from pass_ext.decoding.session.session import Session
    from pass_ext.integrations.transformers.generate import custom_generate

try:
    __version__ = version("pass_ext")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "RULES",
    "AcceptResult",
    "Drafter",
    "EarlyExitDraft",
    "Grammar",
    "LookaheadEmbedding",
    "MultiCandidate",
    "NGram",
    "PaSS",
    "PackedModel",
    "Plain",
    "Session",
    "Speculative",
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
    "load_checkpoint",
    "load_drafter",
    "lookahead_embed",
    "next_tree_",
    "pack_trees",
    "set_debug",
    "status",
    "tree_mask",
    "tree_prepare",
]

# Loaded at first use: users of the ops alone do not pay for importing the decoder, and custom_generate needs transformers.
_MODULES = ("distributed", "drafting", "layers")
_LATER = {
    "Drafter": "decoding.drafting.drafter",
    "EarlyExitDraft": "decoding.models.early_exit",
    "Grammar": "decoding.requests.grammar",
    "MultiCandidate": "decoding.methods",
    "NGram": "decoding.methods",
    "PackedModel": "decoding.models.packed",
    "PaSS": "decoding.methods",
    "Plain": "decoding.methods",
    "Session": "decoding.session.session",
    "Speculative": "decoding.methods",
    "custom_generate": "integrations.transformers.generate",
    "generate": "decoding.generation",
    "load_checkpoint": "checkpoint",
    "load_drafter": "decoding.drafting.heads.load",
}


def __getattr__(name: str) -> Any:
    """Loads the names of ``_MODULES`` and ``_LATER``."""
    if name in _MODULES:
        return import_module(f"pass_ext.{name}")
    if name in _LATER:
        value = globals()[name] = getattr(import_module(f"pass_ext.{_LATER[name]}"), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_MODULES})
