"""pass_ext inside Hugging Face transformers (4.57, 5.17, 5.23): attention over trees, and what a decoding loop needs.

``register()`` makes ``attn_implementation="pass_ext"`` known; ``use(model)`` switches a model to it and checks that it did.
``TreeStep`` makes one forward a tree step; ``read_cache`` and ``write_cache`` exchange keys and values with its caches;
``custom_generate(method)`` is the decoding method for ``model.generate(custom_generate=...)``.
"""

from __future__ import annotations

from typing import Any

from pass_ext.integrations.transformers.attention import NAME, attention
from pass_ext.integrations.transformers.cache import cache_length, read_cache, write_cache
from pass_ext.integrations.transformers.generate import custom_generate
from pass_ext.integrations.transformers.masks import TreeStep, causal_rows

__all__ = ["TreeStep", "cache_length", "custom_generate", "read_cache", "register", "use", "write_cache"]


def register() -> None:
    """Makes ``attn_implementation="pass_ext"`` available in this process. Calling it again changes nothing.

    What differs from "sdpa": it runs trees, and honours ``softcap``; it has no gradients. Refused by name: attention sinks,
    dropout in training, ``output_attentions``, additive biases, bidirectional models, head dimensions above 256 (others than
    64, 80, 96, 128 and 256 cost a padded copy of the keys in each layer), padding between a request's tokens.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, causal_rows)


def use(model: Any) -> Any:
    """Registers, switches ``model`` to pass_ext's attention, and returns it; raises where its architecture does not take it.

    ``set_attn_implementation`` writes to ``model.config``: every model built from the same config object switches too.
    Models that have attention of their own (bloom, mpt, gptj) only warn and stay as they are, and some (stablelm, falcon)
    do not pass a ``pass_ext_tree`` down to their layers: both raise here.
    """
    register()
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    taken = model.config._attn_implementation
    if taken == NAME and getattr(model, "_supports_attention_backend", False):
        return model
    if taken == NAME:
        model.set_attn_implementation(before)
    architecture = f"{type(model).__name__} ({model.config.model_type})"
    why = "has its own attention" if taken != NAME else "does not hand arguments down to its attention"
    raise ValueError(
        f"pass_ext attention: {architecture} {why}, in this version of transformers; it stays with {before!r}. Tree steps "
        "still work there with a dense mask: pass_ext.tree_mask"
    )
