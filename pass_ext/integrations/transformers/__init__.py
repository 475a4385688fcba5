"""pass_ext inside Hugging Face transformers (4.57, 5.17, 5.23, 5.24): attention over trees, and parts of a decoding loop.

``register()`` adds ``attn_implementation="pass_ext"``; ``use(model)`` switches a model to it and checks the switch.
``TreeStep`` turns a forward pass into a tree step; ``read_cache`` and ``write_cache`` read and write keys and values of caches;
``custom_generate(method)`` decodes in ``model.generate(custom_generate=...)``; ``hub_folder()`` is a path that does so, too.
"""

from __future__ import annotations

from typing import Any

from pass_ext.decoding.models.cache import cache_length, read_cache, write_cache
from pass_ext.integrations.transformers.attention import NAME, attention
from pass_ext.integrations.transformers.generate import custom_generate
from pass_ext.integrations.transformers.hub_generate import hub_folder
from pass_ext.integrations.transformers.masks import TreeStep, causal_rows

__all__ = ["TreeStep", "cache_length", "custom_generate", "hub_folder", "read_cache", "register", "use", "write_cache"]


def register() -> None:
    """Registers ``attn_implementation="pass_ext"`` with transformers in this process. Calling it again changes nothing.

    Unlike "sdpa" it runs trees and applies ``softcap`` and sinks, and it has no gradients. It raises for dropout in training,
    ``output_attentions``, additive biases, bidirectional models, keys above 576 numbers and values above 512, and padding
    between a request's tokens. Head dimensions that are no multiples of 16, and on CUDA those below 256 without a kernel of
    their own, need a padded copy of the keys in each layer.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, causal_rows)


def use(model: Any) -> Any:
    """Switches a transformers model to pass_ext's attention and returns it; raises if its architecture cannot be switched.

    The switch writes to ``model.config``: every model built from the same config object switches too. Two kinds of models
    raise ValueError: those with attention code of their own (bloom, mpt, before 5.24 gptj), for which transformers only warns,
    and those that do not pass ``pass_ext_tree`` to their layers (stablelm, falcon).
    """
    register()
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    after = model.config._attn_implementation
    if after == NAME and getattr(model, "_supports_attention_backend", False):
        return model
    if after == NAME:
        model.set_attn_implementation(before)
    architecture = f"{type(model).__name__} ({model.config.model_type})"
    reason = "has its own attention" if after != NAME else "does not pass arguments to its attention"
    raise ValueError(
        f"pass_ext attention: {architecture} {reason} in this version of transformers; it stays with {before!r}. Tree steps "
        "still work with a dense mask: pass_ext.tree_mask"
    )
