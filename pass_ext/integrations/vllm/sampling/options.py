"""``refuse_options``: the engine options that the accept step of pass_ext cannot honour, refused when an engine starts."""

from __future__ import annotations

from typing import Any

from pass_ext.integrations.vllm.settings import Settings


def refuse_options(vllm_config: Any) -> Settings:
    """The settings of an engine; ValueError with the name of an option that the accept step cannot honour, and why."""
    settings = Settings.of(vllm_config)
    for option, reason in _refused(vllm_config):
        raise ValueError(f"pass_ext cannot replace vLLM's sampler: {option}: {reason}")
    return settings


def _refused(vllm_config: Any) -> list[tuple[str, str]]:
    refused = []
    speculative = vllm_config.speculative_config
    if speculative is not None:
        method = speculative.rejection_sample_method
        if method not in ("standard", "synthetic"):
            reason = "pass_ext decides by its own rule, which additional_config names"
            refused.append((f"speculative_config.rejection_sample_method={method!r}", reason))
        if getattr(speculative, "enable_adaptive_verification", False):
            reason = "the rows of such a step are packed in a way that pass_ext does not read"
            refused.append(("speculative_config.enable_adaptive_verification", reason))
    if getattr(vllm_config, "watermark_config", None) is not None:
        refused.append(("watermark_config", "pass_ext's noise carries no watermark"))
    if vllm_config.model_config.use_fp64_gumbel:
        refused.append(("use_fp64_gumbel", "pass_ext's noise has single precision"))
    return refused
