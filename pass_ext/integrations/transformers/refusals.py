"""What ``model.generate`` has for a decoding loop and pass_ext's does not read: refused by its name, whatever its type.

given       what the caller wrote; transformers computes with some of it (pictures, say) and leaves some in its frame
prepared    what transformers hands to the loop for the model
config      the generation config: a field that another version of transformers adds is refused unless it is at its default
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Set
from typing import Any

from pass_ext.decoding.models.whole_prompts import is_nothing

_LEFT = (
    "inputs",
    "streamer",
    "assistant_model",
    "synced_gpus",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
)
# Of the model's inputs: pass_ext reads them, computes its own, or gives no output that they ask for.
_INPUTS = {
    *("input_ids", "attention_mask", "position_ids", "past_key_values", "cache"),
    *("logits_to_keep", "use_cache", "return_dict", "output_attentions", "output_hidden_states"),
}
# What selects transformers' assisted decoding -> what says the same here.
_ASSISTED = {
    "assistant_model": "custom_generate(pass_ext.Speculative(assistant_model))",
    "prompt_lookup_num_tokens": "custom_generate(pass_ext.NGram(tokens=…))",
    "assistant_early_exit": "custom_generate(pass_ext.Speculative(pass_ext.EarlyExitDraft(model, layers=…)))",
    "use_mtp": "custom_generate(pass_ext.load_drafter(folder, model))",
}
# Its settings, which lie unused in the configs of many models: refused where a caller writes them.
_OF_ASSISTED = {
    "max_matching_ngram_size": "custom_generate(pass_ext.NGram(longest=…))",
    "num_assistant_tokens": "custom_generate(pass_ext.Speculative(assistant_model, length=…))",
    "num_assistant_tokens_schedule": 'custom_generate(pass_ext.Speculative(assistant_model, length="auto"))',
    "assistant_confidence_threshold": "custom_generate(pass_ext.MultiCandidate(assistant_model, decision=…))",
    **dict.fromkeys(
        ("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type"),
        "custom_generate(pass_ext.Speculative(assistant_model))",
    ),
}
_OUTPUTS = ("output_attentions", "output_hidden_states")
# Fields of a generation config that transformers reads before the loop: of lengths, tokens, processors, criteria and the cache;
# that the loop reads; and that mean nothing for a text without beams and without a draft of transformers'.
_FIELDS = {
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "token_healing"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "num_return_sequences"),
    *("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "do_sample"),
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id"),
    *("forced_eos_token_id", "exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits"),
    *("watermarking_config", "guidance_scale"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache"),
    *("return_dict_in_generate", "output_scores", "output_logits", *_OUTPUTS),
    *("num_beams", "num_beam_groups", "early_stopping", "length_penalty", "diversity_penalty", "constraints"),
    *("force_words_ids", "penalty_alpha", "dola_layers", "low_memory", *_ASSISTED, *_OF_ASSISTED),
    *("continuous_batching_config", "disable_compile", "transformers_version"),
}


def given_arguments() -> dict[str, Any]:
    """What a caller gave ``model.generate`` by name, also what transformers does not pass on to a callable; {}: no
    ``model.generate`` is on the stack. It prepares its own loops' arguments and leaves the caller's in its frame."""
    from transformers import GenerationMixin

    generate = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not generate:
        frame = frame.f_back
    return {} if frame is None else {**frame.f_locals["kwargs"], **{name: frame.f_locals[name] for name in _LEFT}}


def refuse_unread(config: Any, prepared: Mapping[str, Any], given: Mapping[str, Any], whole: Set[str]) -> list[str]:
    """Raises for settings, arguments and model inputs that are not supported. whole: the inputs that the model's own forward
    reads of a prompt -> those of them that came."""
    for name, instead in {**_ASSISTED, **_OF_ASSISTED}.items():
        value = given.get(name)
        if value is None and name in _ASSISTED:
            value = getattr(config, name, None)
        if value is not None and value is not False:
            raise ValueError(f"custom_generate: {name} is not implemented, got {_came(value)}; give {instead}")
    if given.get("synced_gpus"):
        raise ValueError(
            "custom_generate: synced_gpus must be False: ranks call the model as often as their own texts need, got True"
        )
    for name in ("negative_prompt_ids", "negative_prompt_attention_mask"):
        if given.get(name) is not None:
            raise ValueError(f"custom_generate: {name} is not implemented, got {_came(given[name])}")
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        raise ValueError(f"custom_generate: the arguments must select greedy_search or sample, got {mode}")
    if (config.guidance_scale or 1) != 1:
        raise ValueError(f"custom_generate: guidance_scale is not implemented, got {config.guidance_scale}")
    for name in _OUTPUTS:
        if config.return_dict_in_generate and getattr(config, name, False):
            raise ValueError(f"custom_generate: {name} is not implemented; leave it out")
    _refuse_fields(config)
    inputs = {name: value for name, value in given.items() if name not in _LEFT and not hasattr(config, name)}
    came = [
        name for name, value in {**inputs, **prepared}.items() if not is_nothing(value)
    ]  # the caller's own words first
    for name in came:
        if name not in _INPUTS and name not in whole:
            raise ValueError(
                f"custom_generate: the model input {name} is not supported, got {_came({**prepared, **inputs}[name])}: leave "
                "it out, or call model.generate without custom_generate"
            )
    return [name for name in came if name in whole]


def _refuse_fields(config: Any) -> None:
    from transformers import GenerationConfig

    plain = GenerationConfig()
    usual = {**vars(plain), **getattr(plain, "_get_default_generation_params", dict)()}
    for name, value in vars(config).items():
        if name in _FIELDS or name.startswith("_") or name not in usual:  # transformers reads no other names either
            continue
        if value is not None and value is not False and value != usual[name]:
            raise ValueError(
                f"custom_generate: {name} of the generation config is not implemented, got {_came(value)}; leave it out"
            )


def _came(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else type(value).__name__
