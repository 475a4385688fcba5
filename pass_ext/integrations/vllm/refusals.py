"""Options that pass_ext cannot honour end an engine's start in its first process, when its configuration is made.

No model is loaded then, and no worker has started. The accept step's names and reasons: sampling/options.py.
"""

from __future__ import annotations

import functools
from typing import Any

from pass_ext.integrations.vllm.sampling.options import refuse_options
from pass_ext.integrations.vllm.settings import KEY, Settings
from pass_ext.modules.files import check_model
from pass_ext.modules.lookahead import LookaheadEmbedding

PROPOSER = "pass_ext.integrations.vllm.PaSS"
"""PaSS's name in ``speculative_config``."""


def refuse_at_start() -> None:
    """Wraps ``EngineArgs.create_engine_config``. A second call changes nothing."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config
    if hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def create_engine_config(engine: Any, *arguments: Any, **options: Any) -> Any:
        Settings.of(engine)  # first: vLLM looks at the model meanwhile, for as long as it takes to import vLLM again
        vllm_config = create(engine, *arguments, **options)
        check(vllm_config)
        return vllm_config

    EngineArgs.create_engine_config = create_engine_config


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
        "multimodal models": (model.is_multimodal_model, "slots are ids, and these models take embeddings"),
        "encoder-decoder models": (model.is_encoder_decoder, "slots were never trained for them"),
        "models with recurrent layers": (
            model.is_hybrid or model.is_attention_free,
            "a slot would change the state that later tokens read",
        ),
    }
