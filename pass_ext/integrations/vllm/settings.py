"""``Settings``: what a user writes for pass_ext into vLLM's ``additional_config``, and the options that pass_ext cannot honour.

vllm serve MODEL --additional-config '{"pass_ext": {"rule": "coupled", "slots": "smollm2-135m-instruct-slots"}}'
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Any

from pass_ext.modules.files import check_model
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.ops.common.rules import RULES

TESTED = ("0.32.0", "0.33.0")
"""Runner V1 runs in the tests with the first. In the others the functions that are replaced or called were compared with it."""

LOG = logging.getLogger("vllm.pass_ext")  # vLLM shows the loggers below its own name only
KEY = "pass_ext"
PROPOSER = "pass_ext.integrations.vllm.PaSS"
"""PaSS's name in ``speculative_config``."""


@dataclass(frozen=True)
class Settings:
    """The settings of one engine.

    Args:
        rule: of the accept step, one of ``pass_ext.RULES``.
        slots: PaSS's look-ahead embeddings, the name of shipped ones or a file.
        pause: True: PaSS stops proposing while proposals do not pay.
    """

    rule: str = "coupled"
    slots: str = ""
    pause: bool = True

    @classmethod
    def of(cls, config: Any) -> Settings:
        """The settings in a ``VllmConfig`` or ``EngineArgs``; ValueError for a name or value that is not known."""
        additional = config.additional_config
        values = additional.get(KEY, {}) if isinstance(additional, dict) else {}
        if not isinstance(values, dict):
            raise ValueError(f"additional_config[{KEY!r}] must be an object, got {values!r}")
        types = {field.name: type(field.default) for field in fields(cls)}
        for name, value in values.items():
            if name not in types:
                raise ValueError(f"additional_config[{KEY!r}]: {name!r} is not one of {', '.join(types)}")
            if not isinstance(value, types[name]):
                raise ValueError(f"additional_config[{KEY!r}]: {name} must be a {types[name].__name__}, got {value!r}")
        settings = cls(**values)
        if settings.rule not in RULES:
            raise ValueError(
                f"additional_config[{KEY!r}]: rule must be one of {', '.join(RULES)}, got {settings.rule!r}"
            )
        return settings


def refuse_options(vllm_config: Any) -> Settings:
    """The settings of an engine; ValueError with the name of an option that the accept step cannot honour, and why."""
    settings = Settings.of(vllm_config)
    speculative = vllm_config.speculative_config
    method = "standard" if speculative is None else speculative.rejection_sample_method
    for option, is_given, reason in (
        (
            f"speculative_config.rejection_sample_method={method!r}",
            method not in ("standard", "synthetic"),
            "pass_ext decides by its own rule, which additional_config names",
        ),
        (
            "speculative_config.enable_adaptive_verification",
            getattr(speculative, "enable_adaptive_verification", False),
            "the rows of such a step are packed in a way that pass_ext does not read",
        ),
        (
            "watermark_config",
            getattr(vllm_config, "watermark_config", None) is not None,
            "pass_ext's noise carries no watermark",
        ),
        ("use_fp64_gumbel", vllm_config.model_config.use_fp64_gumbel, "pass_ext's noise has single precision"),
    ):
        if is_given:
            raise ValueError(f"pass_ext cannot replace vLLM's sampler: {option}: {reason}")
    return settings


def check(vllm_config: Any) -> None:
    """Raises ValueError for the first option of an engine that the accept step, or PaSS if it drafts, cannot honour."""
    settings = refuse_options(vllm_config)
    speculative = vllm_config.speculative_config
    proposer = speculative.model if speculative is not None and speculative.method == "custom_class" else ""
    if proposer == PROPOSER:
        checked_slots(vllm_config, settings)
    elif proposer.startswith("pass_ext."):
        raise ValueError(f"speculative_config.model: pass_ext's proposer is {PROPOSER}, got {proposer!r}")


def checked_slots(vllm_config: Any, settings: Settings) -> LookaheadEmbedding:
    """PaSS's slots; ValueError for the first option that PaSS cannot honour, and for slots of another model."""
    for option, (is_given, reason) in _not_with(vllm_config, settings).items():
        if is_given:
            raise ValueError(f"PaSS: not with {option}: {reason}")
    lookahead = LookaheadEmbedding.from_pretrained(settings.slots)
    slots, drafts = lookahead.num_lookahead, vllm_config.speculative_config.num_speculative_tokens
    if drafts > 2 * slots:
        raise ValueError(
            f"PaSS: num_speculative_tokens must be at most {2 * slots}, a guess and a place for each slot of "
            f"{settings.slots!r}, got {drafts}"
        )
    if lookahead.adapters is not None:
        raise ValueError(
            "PaSS: these look-ahead slots have adapters, which pass_ext does not add to vLLM's layers: use slots without"
        )
    model = vllm_config.model_config
    check_model(
        "look-ahead embedding",
        {
            "hidden size": (lookahead.dim, model.get_hidden_size()),
            "vocabulary": (lookahead.vocabulary, model.get_vocab_size()),
            "layers": (lookahead.deep_layers, model.hf_text_config.num_hidden_layers),
        },
    )
    return lookahead


def _not_with(vllm_config: Any, settings: Settings) -> dict[str, tuple[bool, str]]:
    """Option -> whether it is given, and why PaSS cannot honour it."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return {
        f"an empty additional_config[{KEY!r}]['slots']": (
            not settings.slots,
            "they name look-ahead embeddings or a file",
        ),
        "pipeline_parallel_size": (
            parallel.pipeline_parallel_size > 1,
            "slots enter on the first stage and guess on the last",
        ),
        "enable_dbo": (parallel.use_ubatching, "both halves of a batch would note their slots in one place"),
        "num_speculative_tokens_per_batch_size": (
            vllm_config.speculative_config.num_speculative_tokens_per_batch_size is not None,
            "PaSS chooses its lengths itself",
        ),
        "lora_config": (vllm_config.lora_config is not None, "slots belong to one model, and an adapter makes another"),
        "enable_prompt_embeds": (model.enable_prompt_embeds, "slots are ids, and embeddings have none"),
        "encoder-decoder models": (model.is_encoder_decoder, "slots were never trained for them"),
        "models with recurrent layers": (
            model.is_hybrid or model.is_attention_free,
            "a slot would change the state that later tokens read",
        ),
    }
