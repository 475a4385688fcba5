"""``custom_generate``: pass_ext as the decoding method of transformers' ``model.generate``.

transformers prepares everything as usual (prompts, lengths, processors, criteria, a cache) and calls us in the place of its own
loop; this translates to ``pass_ext.generate`` and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.drafting.drafter import DraftingMethod
from pass_ext.decoding.generation import Generation, generate
from pass_ext.decoding.methods import Method, Plain
from pass_ext.decoding.models.adapt import packed_model
from pass_ext.decoding.requests.node_processor import NodeProcessor
from pass_ext.decoding.stats import GenerationStats
from pass_ext.integrations.transformers.cache import cache_length, read_cache, write_cache
from pass_ext.integrations.transformers.processors import NodeCriteria, sampling_parameters

# What transformers prepares for a decoding loop, and we make ourselves or do not need.
_KNOWN = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "logits_to_keep",
    "use_cache",
    "cache_position",
    "return_dict",
}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_FULL_LAYERS = {"DynamicLayer", "StaticLayer"}
_SLIDING_LAYERS = {"DynamicSlidingWindowLayer", "StaticSlidingWindowLayer"}


class CustomGenerate:
    """``model.generate(..., custom_generate=pass_ext.custom_generate(method))``: the usual arguments, the same result.

    ``stats`` is that of the latest call. Greedy results are those of transformers to the token, in float32. Sampled ones have
    its distribution, but draw by ``seeds``: fresh ones without, which ``torch.manual_seed`` makes repeatable.

    Args:
        method: as ``pass_ext.generate`` takes it.
        rule: how drafts are judged, as there.
        seeds: one for all prompts, where the k-th of ``num_return_sequences`` gets ``seeds + k``; or one for each row.
            ``model.generate(..., seeds=...)`` overrides it.
        generator: where fresh seeds come from.
        streamer: told of new tokens. transformers drops the ``streamer=`` of a ``generate`` with custom_generate, without a
            word and after the prompt: give it here, or as ``model.generate(..., pass_ext_streamer=...)``.

    transformers also drops ``tokenizer=``, so instead of ``stop_strings=`` give
    ``stopping_criteria=[StopStringCriteria(tokenizer, [...])]``. Criteria are asked after each token, of one text at a time;
    logits processors of every candidate, so they must keep no state between calls.
    """

    def __init__(
        self,
        method: Method | DraftingMethod | None = None,
        *,
        rule: str = "coupled",
        seeds: int | Sequence[int] | Tensor | None = None,
        generator: torch.Generator | None = None,
        streamer: Any = None,
    ) -> None:
        self.method: Method | DraftingMethod = Plain() if method is None else method
        self.stats: GenerationStats | None = None
        self._rule, self._seeds, self._generator, self._streamer = rule, seeds, generator, streamer

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any] = (),
        stopping_criteria: Sequence[Any] = (),
        generation_config: Any = None,
        seeds: int | Sequence[int] | Tensor | None = None,
        pass_ext_streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """What transformers calls. Names that its own loop does not have are taken from the arguments of ``generate``."""
        from transformers import GenerationConfig

        packed_model(model)  # refuses the model before its cache
        _refuse(generation_config, model_kwargs)
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else (mask != 0).to(input_ids)
        _check_prompt(input_ids, mask, model_kwargs.get("position_ids"), generation_config)
        cache = model_kwargs.get("past_key_values")
        most, ends, criteria = _split_criteria(stopping_criteria, generation_config)
        otherwise = _cached_otherwise(model)
        wants_cache = cache is not None and _is_to_be_filled(cache, most - 1, generation_config, not otherwise)
        past = None if cache is None else _past(cache, mask)
        if otherwise and (wants_cache or past is not None):
            raise ValueError(
                f"custom_generate: {model.config.model_type} caches {otherwise}, which cannot be exchanged: give no "
                "past_key_values, and with return_dict_in_generate use_cache=False"
            )
        parameters, processors = sampling_parameters(logits_processor, sample=bool(generation_config.do_sample))
        padding = _padding(input_ids, mask)
        pad = generation_config._pad_token_tensor
        result = generate(
            model,
            input_ids,
            self.method,
            max_new_tokens=most - input_ids.shape[1],
            attention_mask=mask,
            **parameters,
            seeds=_seeds(
                self._seeds if seeds is None else seeds, len(input_ids), generation_config.num_return_sequences
            ),
            rule=self._rule,
            eos_token_id=sorted(ends),
            pad_token_id=None if pad is None else int(pad),
            streamer=self._streamer if pass_ext_streamer is None else pass_ext_streamer,
            stopping=NodeCriteria(criteria, padding) if criteria else None,
            logits_processor=NodeProcessor(processors, padding) if processors else None,
            generation_config=GenerationConfig(),  # transformers has put what its own asks for among the processors
            generator=self._generator,
            past=past,
            keep_cache=wants_cache,
        )
        self.stats = result.stats
        if wants_cache:
            cache = _written(cache, result, mask)
        if not generation_config.return_dict_in_generate:
            return result.sequences
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=result.sequences, past_key_values=cache)  # type: ignore[arg-type]


custom_generate = CustomGenerate


def _refuse(config: Any, model_kwargs: dict[str, Any]) -> None:
    """Raises for what this decoder does not do."""
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        raise ValueError(f"custom_generate: greedy search and sampling are decoded, got the arguments of {mode}")
    if (config.guidance_scale or 1) != 1:
        raise ValueError(f"custom_generate: guidance_scale is not implemented, got {config.guidance_scale}")
    for name in _OUTPUTS:
        if config.return_dict_in_generate and getattr(config, name, False):
            raise ValueError(f"custom_generate: {name} is not kept; leave it out")
    for name, given in model_kwargs.items():
        if name not in _KNOWN and isinstance(given, Tensor):
            raise ValueError(f"custom_generate: {name} goes to no model call; decoding starts from input_ids alone")


def _check_prompt(input_ids: Tensor, mask: Tensor, positions: Tensor | None, config: Any) -> None:
    told = getattr(config, "_mask_length", None)  # transformers 5 drops masks of ones, and leaves their length
    tokens = mask.shape[1] if told is None else max(told, mask.shape[1])
    if tokens != input_ids.shape[1]:
        raise ValueError(
            f"custom_generate: input_ids must hold the whole text, that in the cache included: attention_mask is of {tokens} "
            f"tokens, got {input_ids.shape[1]}"
        )
    if positions is not None and positions.shape == input_ids.shape:
        expected = mask.cumsum(1) - 1
        if bool(((positions != expected) & (mask != 0)).any()):
            raise ValueError(
                "custom_generate: position_ids must count a text's tokens from 0; other ones are not implemented"
            )


def _split_criteria(criteria: Sequence[Any], config: Any) -> tuple[int, set[int], list[Any]]:
    """The longest text with padding and prompt, the tokens that end a text, and the other criteria."""
    most, ends, others = config.max_length, set(), []
    for criterion in criteria:
        kind = type(criterion).__name__
        if kind == "MaxLengthCriteria":
            most = criterion.max_length
        elif kind == "EosTokenCriteria":
            ends |= set(torch.as_tensor(criterion.eos_token_id).flatten().tolist())
        else:
            others.append(criterion)
    return most, ends, others


def _seeds(seeds: Any, rows: int, copies: int | None) -> Any:
    """Copies of a prompt must not all get the same text."""
    return [seeds + row % (copies or 1) for row in range(rows)] if isinstance(seeds, int) else seeds


def _padding(input_ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [ids[seen == 0].tolist() for ids, seen in zip(input_ids, mask, strict=True)]


def _starts(mask: Tensor) -> Tensor:
    return (mask.shape[1] - mask.sum(1)).long()


def _cached_otherwise(model: Any) -> str:
    """What the model's cache holds, where that is not the keys and values that its attention is given; else ""."""
    if getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None):
        return "latent keys and values (kv_lora_rank)"
    if model.config.model_type == "jetmoe":
        return "keys and values before they are repeated for its experts"
    return ""


def _is_to_be_filled(cache: Any, columns: int, config: Any, exchanges: bool) -> bool:
    """Whether somebody has the cache after the call. Refuses those that cannot take keys and values as they are."""
    if not hasattr(cache, "layers") or getattr(cache, "offloading", False):
        raise ValueError(
            f"custom_generate: past_key_values must be a DynamicCache or StaticCache without offloading, got "
            f"{type(cache).__name__}"
        )
    kinds = {type(layer).__name__ for layer in cache.layers}
    if not kinds <= _FULL_LAYERS | _SLIDING_LAYERS:
        raise ValueError(f"custom_generate: a cache of {', '.join(sorted(kinds))} is not supported; use a DynamicCache")
    for layer in cache.layers:
        room = getattr(layer, "max_cache_len", columns)
        if type(layer).__name__ == "StaticLayer" and room < columns:
            raise ValueError(f"custom_generate: the static cache must have room for {columns} tokens, got {room}")
    given = getattr(cache, "_is_user_defined", None)
    if kinds & _SLIDING_LAYERS:
        if given or int(cache.get_seq_length()):
            raise ValueError(
                "custom_generate: a cache whose layers keep a sliding window only cannot be filled; give DynamicCache(), "
                "without a config, which keeps all"
            )
        return bool(config.return_dict_in_generate)
    # transformers that do not mark their users' caches may have got this one from the user.
    return bool(config.return_dict_in_generate or given or (exchanges and given is None and not _marks_caches()))


def _marks_caches() -> bool:
    from transformers import __version__

    return int(__version__.split(".")[0]) >= 5


def _past(cache: Any, mask: Tensor) -> tuple[list[tuple[Tensor, Tensor]], int] | None:
    """What ``generate`` starts from: as many tokens of every prompt as the cache has of all, ``[B, n, H, D]``."""
    if not cache.layers or int(cache.get_seq_length()) == 0:
        return None
    starts = _starts(mask)
    common = min(cache_length(cache), mask.shape[1] - 1) - int(starts.max())
    if common < 1:
        return None
    columns = starts[:, None] + torch.arange(common, device=mask.device)
    layers = []
    for layer in range(len(cache.layers)):
        keys, values = read_cache(cache, layer)
        layers.append((_gathered(keys.transpose(1, 2), columns), _gathered(values.transpose(1, 2), columns)))
    return layers, common


def _written(cache: Any, result: Generation, mask: Tensor) -> Any:
    """The cache with all of the texts but each one's last token, columns as in ``sequences``. A sliding one is replaced."""
    assert result.session is not None
    columns = mask.shape[1] + max(result.lengths) - 1
    lengths = mask.sum(1) + torch.tensor(result.lengths, device=mask.device) - 1
    # Padding repeats a token of the text: transformers 4.57 takes columns of zeros for the end of a static cache.
    rows = torch.arange(columns, device=mask.device) - _starts(mask)[:, None]
    rows = rows.clamp(min=0).minimum(lengths[:, None] - 1)
    if any(type(layer).__name__ in _SLIDING_LAYERS for layer in cache.layers):
        from transformers import DynamicCache

        cache = DynamicCache()
    for layer, (tensors, dims) in enumerate(zip(result.session.caches, result.session.head_dims, strict=True)):
        keys, values = (_gathered(own[..., :dim], rows).transpose(1, 2) for own, dim in zip(tensors, dims, strict=True))
        write_cache(cache, layer, keys, values)
    return cache


def _gathered(tensor: Tensor, rows: Tensor) -> Tensor:
    """``[B, n, H, D]`` -> ``[B, len, H, D]``, request b's rows ``rows[b]``."""
    return tensor[torch.arange(len(rows), device=tensor.device)[:, None], rows.to(tensor.device)]
