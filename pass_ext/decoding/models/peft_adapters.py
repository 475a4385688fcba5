"""Finds peft adapters that a packed call would leave out.

LoRA and similar adapters change layers and work unchanged. Prompt, prefix and p-tuning change the inputs of every call, and
aLoRA reads token ids. A call on packed embeddings has neither, so the text would be another model's.
"""

from __future__ import annotations

from typing import Any


def lost_adapter(model: Any) -> str | None:
    """Describes the adapter that would be left out, to follow the model's name in a message; None: there is none."""
    model = getattr(model, "_orig_mod", model)
    # While PeftModel.generate runs, custom_generate gets the inner model; this replaced method leads back to the PeftModel.
    owner = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    for wrapper in (model, owner):
        config: Any = getattr(wrapper, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False) and not getattr(wrapper, "_adapters_disabled", False):
            kind = getattr(config.peft_type, "value", config.peft_type)
            return f"has a peft adapter of the kind {kind}, which puts learned tokens, keys or values before each text"
    for part in model.modules() if hasattr(model, "modules") else ():
        variants = vars(part).get("lora_variant")
        if not variants:
            continue
        active = [] if getattr(part, "disable_adapters", False) else getattr(part, "active_adapters", [])
        if any(type(variants.get(name)).__name__.startswith("ALora") for name in active):
            return "has a peft adapter of the kind aLoRA, which is active behind certain token ids only"
    return None
