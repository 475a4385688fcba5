"""``custom_generate``: runs ``pass_ext.generate`` inside transformers' ``model.generate``.

transformers prepares prompts, lengths, processors, criteria and a cache as usual, then calls a ``CustomGenerate`` in place of
its own loop. It translates the arguments for ``pass_ext.generate`` and the result back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.drafting.drafter import DraftingMethod
from pass_ext.decoding.generation import Generation, generate
from pass_ext.decoding.methods import Method, Plain
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.models.cache import (
    FULL_LAYERS,
    SLIDING_LAYERS,
    STATE_LAYERS,
    cache_length,
    gathered,
    indexed_layers,
    layers_that_attend,
    other_format,
    read_states,
    texts_in_cache,
    write_cache,
    write_states,
)
from pass_ext.decoding.models.encoders import ENCODER_INPUTS, EncoderInputs
from pass_ext.decoding.models.features.table import FEATURES, places_of
from pass_ext.decoding.models.limits import position_taker
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.models.parts import cache_name, given_cache, unwrapped
from pass_ext.decoding.models.whole_prompts import WholePrompts, check_embeddings, ids_of, inputs_of
from pass_ext.decoding.requests.processors import NodeProcessor
from pass_ext.decoding.session.session import Past, Session
from pass_ext.decoding.stats import GenerationStats
from pass_ext.integrations.grammar import grammars_of
from pass_ext.integrations.transformers.encoders import after_listening, prepared_inputs, with_cross
from pass_ext.integrations.transformers.processors import NodeCriteria, NotedRows, sampling_parameters, step_scores
from pass_ext.integrations.transformers.refusals import given_arguments, refuse_unread
from pass_ext.ops.common.uploaded import uploaded


class Continued:
    """A streamer that has the prompt already, from transformers: the first ``put`` is left out."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self._has_prompt = streamer, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streamer, name)

    def put(self, tokens: Any) -> None:
        """Passes new tokens on."""
        if self._has_prompt:
            self._streamer.put(tokens)
        self._has_prompt = True


class CustomGenerate:
    """A decoding method for transformers: ``model.generate(..., custom_generate=pass_ext.custom_generate(method))`` takes the
    usual arguments and gives the same result.

    In float32, greedy results equal those of transformers token for token. Sampled results have the same distribution, but
    depend on ``seeds``; without seeds, ``torch.manual_seed`` makes them repeatable. ``stats`` holds the statistics of the
    latest call. ``output_scores`` and ``output_logits`` give the rows that each new token was drawn from; those of texts that
    have ended are 0.

    Args:
        method: the decoding method, as in ``pass_ext.generate``.
        rule: the accept rule, as in ``pass_ext.generate``.
        seeds: one for all prompts (the k-th of ``num_return_sequences`` gets ``seeds + k``), one for each row, or a
            ``torch.Generator`` that draws them. ``model.generate(..., seeds=...)`` overrides it.

    transformers drops ``tokenizer=``: instead of ``stop_strings=`` give
    ``stopping_criteria=[StopStringCriteria(tokenizer, [...])]``. Criteria run after each token on one text at a time; logits
    processors run on every candidate, so they must not store state between calls. Those of xgrammar and outlines that hold a
    grammar are replaced by the grammar itself, as ``generate(grammar=...)`` takes it.
    """

    def __init__(
        self,
        method: Method | DraftingMethod | None = None,
        *,
        rule: str = "coupled",
        seeds: int | Sequence[int] | Tensor | torch.Generator | None = None,
    ) -> None:
        self.method: Method | DraftingMethod = Plain() if method is None else method
        self.stats: GenerationStats | None = None
        self._rule, self._seeds = rule, seeds

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any] = (),
        stopping_criteria: Sequence[Any] = (),
        generation_config: Any = None,
        seeds: int | Sequence[int] | Tensor | torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decodes with the arguments that transformers prepared; ``seeds`` come from ``generate``."""
        from transformers import GenerationConfig

        _refuse_shared_weights(model)
        adapted = packed_model(model)  # an unsupported model raises before its cache does
        given = given_arguments()
        known = ENCODER_INPUTS if adapted.has_encoder else inputs_of(unwrapped(model).config)
        names = refuse_unread(generation_config, model_kwargs, given, known)
        unnamed, embeds = 0, model_kwargs.get("inputs_embeds")  # columns that transformers has no ids for
        if embeds is not None and not input_ids.shape[1]:
            input_ids, unnamed = ids_of(embeds, adapted), embeds.shape[1]
        streamer = given.get("streamer")
        whole: WholePrompts | EncoderInputs | None = None
        mask = model_kwargs.get("decoder_attention_mask" if adapted.has_encoder else "attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else (mask != 0).to(input_ids)
        if adapted.has_encoder:
            whole, names, both = prepared_inputs(model, model_kwargs, given), [], given_cache(model_kwargs)
            cache = None if both is None else both.self_attention_cache
            held = 0 if cache is None else int(cache.get_seq_length())
            if held >= input_ids.shape[1]:
                raise ValueError(
                    f"custom_generate: decoder_input_ids must hold the whole text, the {held} cached tokens included, got "
                    f"{input_ids.shape[1]}"
                )
            logits_processor = after_listening(logits_processor, model, input_ids, model_kwargs)
        else:
            check_embeddings(input_ids, model_kwargs)
            _check_length(input_ids, mask, generation_config)
            cache = both = given_cache(model_kwargs)
        positions = model_kwargs.get("position_ids")
        if positions is not None and not _count_tokens(positions, mask):
            names.append("position_ids")
        max_length, end_tokens, criteria = _split_criteria(stopping_criteria, generation_config)
        max_length += unnamed
        cache_format = _other_cache_format(model, has_padding=bool((mask == 0).any()))
        is_users = getattr(both, "_is_user_defined", None)
        fills_cache = cache is not None and _must_be_filled(
            cache, max_length - 1, generation_config, not cache_format, is_users
        )
        copies = generation_config.num_return_sequences or 1
        if adapted.reads_whole and not names:
            names.append("input_ids")
        if names:
            whole = WholePrompts(input_ids, mask, generation_config, model_kwargs, names).once(copies, model.config)
        past = None if cache is None or isinstance(whole, WholePrompts) else _past(cache, mask, adapted)
        if isinstance(whole, EncoderInputs):
            whole.keeps_cross = fills_cache
        if cache_format and (fills_cache or past is not None):
            raise ValueError(
                f"custom_generate: {model.config.model_type} caches {cache_format}, which pass_ext cannot read or write: give "
                "no past_key_values, and with return_dict_in_generate use_cache=False"
            )
        grammars, others = grammars_of(logits_processor, len(input_ids))
        parameters, processors = sampling_parameters(others, sample=bool(generation_config.do_sample))
        if unnamed and (criteria or processors):
            raise ValueError(
                f"custom_generate: {type([*criteria, *processors][0]).__name__} reads the ids of a prompt: give input_ids with "
                "inputs_embeds, of as many rows"
            )
        padding = _padding(input_ids, mask)
        pad = generation_config._pad_token_tensor
        session = Session(adapted, past=past)
        session.wants_states = fills_cache
        logits = NotedRows() if _gives(generation_config, "output_logits") else None
        scores = NotedRows() if _gives(generation_config, "output_scores") else None
        nodes = NodeProcessor(processors, padding) if processors else None
        if grammars is not None and scores is not None:
            raise ValueError(
                "custom_generate: output_scores must be False with a grammar, whose masks act later, got True"
            )
        result = generate(
            adapted,
            input_ids,
            self.method,
            max_new_tokens=max_length - input_ids.shape[1],
            attention_mask=mask,
            prompt=whole,
            **parameters,
            seeds=_seeds(self._seeds if seeds is None else seeds, len(input_ids), copies),
            rule=self._rule,
            eos_token_id=sorted(end_tokens),
            streamer=None if streamer is None else Continued(streamer),
            stopping=NodeCriteria(criteria, padding) if criteria else None,
            logits_processor=[each for each in (logits, nodes, scores) if each is not None],
            grammar=grammars,
            # transformers has turned its own into processors
            generation_config=GenerationConfig(pad_token_id=None if pad is None else int(pad)),
            session=session,
        )
        self.stats = result.stats
        if fills_cache:
            cache = _filled(cache, session, result, mask)
            if isinstance(whole, EncoderInputs):
                cache = with_cross(both, cache, whole.cross)
        sequences = result.sequences[:, unnamed:]
        if not generation_config.return_dict_in_generate:
            return sequences
        from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

        kind = GenerateEncoderDecoderOutput if adapted.has_encoder else GenerateDecoderOnlyOutput
        warpers = list(logits_processor)[len(processors) :]
        outputs = {
            cache_name(kind): cache,
            "scores": None if scores is None else step_scores(scores.of(result), result, warpers),
            "logits": None if logits is None else tuple(logits.of(result)),
        }
        return kind(sequences=sequences, **outputs)  # type: ignore[arg-type]


custom_generate = CustomGenerate


def _gives(config: Any, output: str) -> bool:
    """True if the result is to have this output."""
    return bool(config.return_dict_in_generate and getattr(config, output, False))


def _refuse_shared_weights(model: Any) -> None:
    """Raises if processes share the weights and must call the model equally often (ZeRO-3, FSDP); otherwise they would hang."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    distributed = torch.distributed
    processes = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    if processes > 1 and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)):
        raise ValueError(
            f"custom_generate: the model's weights must lie in one process, got {processes} that share them (ZeRO-3 or FSDP): "
            "each calls the model as often as its own texts need, and synced_gpus is not implemented"
        )


def _check_length(input_ids: Tensor, mask: Tensor, config: Any) -> None:
    mask_length = getattr(
        config, "_mask_length", None
    )  # transformers 5 drops a mask of ones, but stores its length here
    tokens = mask.shape[1] if mask_length is None else max(mask_length, mask.shape[1])
    if tokens != input_ids.shape[1]:
        raise ValueError(
            f"custom_generate: input_ids must hold the whole text, cached tokens included: {tokens} tokens as in "
            f"attention_mask, got {input_ids.shape[1]}"
        )


def _count_tokens(positions: Tensor, mask: Tensor) -> bool:
    """True if positions count each text's tokens from 0, so that nobody has to be given them."""
    columns = positions.shape[-1]  # [T], [1 or B, T], or for each of some axes; or of the last tokens
    fits = columns <= mask.shape[1] and (positions.dim() < 2 or positions.shape[-2] in (1, len(mask)))
    expected, is_text = (mask.cumsum(1) - 1)[:, -columns:], mask[:, -columns:] != 0
    return fits and not bool(((positions != expected) & is_text).any())


def _split_criteria(criteria: Sequence[Any], config: Any) -> tuple[int, set[int], list[Any]]:
    """The maximum length with prompt and padding, the tokens that end a text, and the other criteria."""
    max_length, end_tokens, rest = config.max_length, set(), []
    for criterion in criteria:
        kind = type(criterion).__name__
        if kind == "MaxLengthCriteria":
            max_length = criterion.max_length
        elif kind == "EosTokenCriteria":
            end_tokens |= set(torch.as_tensor(criterion.eos_token_id).flatten().tolist())
        else:
            rest.append(criterion)
    return max_length, end_tokens, rest


def _seeds(seeds: Any, rows: int, copies: int) -> Any:
    """One seed per row. A single seed is counted up, because copies of a prompt would otherwise get the same text."""
    return [seeds + row % copies for row in range(rows)] if isinstance(seeds, int) else seeds


def _padding(input_ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [ids[seen == 0].tolist() for ids, seen in zip(input_ids, mask, strict=True)]


def _starts(mask: Tensor) -> Tensor:
    return (mask.shape[1] - mask.sum(1)).long()


def _other_cache_format(model: Any, *, has_padding: bool) -> str:
    """The content of the model's cache if it is not what a session's is; else ""."""
    inner = unwrapped(model)
    if has_padding and position_taker(model) not in (None, inner):
        return "keys at places that count padding, for it takes no position_ids"
    return other_format(model)


def _must_be_filled(cache: Any, columns: int, config: Any, is_writable: bool, is_users: bool | None) -> bool:
    """True if the caller has the cache after the call. Raises for caches that cannot store keys and values unchanged. is_users:
    the caller gave it; None: transformers does not say."""
    from transformers import DynamicCache, StaticCache, cache_utils
    from transformers import __version__ as transformers_version

    if type(cache) not in (DynamicCache, StaticCache) or getattr(cache, "offloading", False):
        raise ValueError(
            "custom_generate: past_key_values must be a DynamicCache or StaticCache itself (keys and values do not go through "
            f"update), without offloading, got {type(cache).__name__}"
        )
    names = (*FULL_LAYERS, *SLIDING_LAYERS, *STATE_LAYERS)
    known = [*indexed_layers(), *(getattr(cache_utils, name, None) for name in names)]
    layers = cache.layers if is_writable else ()
    for layer in layers:
        if type(layer) not in known:
            raise ValueError(f"custom_generate: a cache of {type(layer).__name__} is not supported; use a DynamicCache")
        room = getattr(layer, "max_cache_len", columns)
        if type(layer).__name__ == "StaticLayer" and room < columns:
            raise ValueError(f"custom_generate: the static cache must have room for {columns} tokens, got {room}")
    if any(type(layer).__name__ in SLIDING_LAYERS for layer in layers):
        if is_users or int(cache.get_seq_length()):
            raise ValueError(
                "custom_generate: past_key_values must hold all keys, got layers that hold a sliding window only; give "
                "DynamicCache() without a config"
            )
        return bool(config.return_dict_in_generate)
    # transformers 4 does not mark caches that the caller gave: this may be one.
    may_be_users = is_users is None and int(transformers_version.split(".")[0]) < 5
    return bool(config.return_dict_in_generate or is_users or (is_writable and may_be_users))


def _past(cache: Any, mask: Tensor, model: Adapted) -> Past | None:
    """The cached keys and values ``[B, n, H, D]`` of the first n tokens of every prompt, and n, the smallest number cached.
    States cannot go back, so with them n is of each prompt, all that are cached."""
    if model.keeps_states:
        return _past_with_states(cache, mask, model)
    if not cache.layers or int(cache.get_seq_length()) == 0:
        return None
    starts = _starts(mask)
    common = min(cache_length(cache), mask.shape[1] - 1) - int(starts.max())
    if common < 1:
        return None
    return texts_in_cache(cache, layers_that_attend(cache), starts, common, model.model), common


def _past_with_states(cache: Any, mask: Tensor, model: Adapted) -> Past | None:
    attending, name = list(model.numbers or ()), model.name
    places = places_of(unwrapped(model.model))
    if not cache.layers or not cache.has_previous_state():
        return None
    if not attending:
        raise ValueError(
            f"custom_generate: caches of {name} do not tell how many tokens they are of: give the whole text"
        )
    starts, columns = _starts(mask), cache_length(cache, attending[0])
    lengths = (columns - starts).tolist()
    if columns >= mask.shape[1] or min(lengths) < 1:
        raise ValueError(
            f"custom_generate: {name} has layers that keep a state, so its cache must be of some tokens of each prompt and not "
            f"of all, got a cache of {columns} columns for {mask.shape[1]}, {int(starts.max())} of them padding"
        )
    return texts_in_cache(cache, attending, starts, max(lengths), model.model), lengths, read_states(cache, places)


def _filled(cache: Any, session: Session, result: Generation, mask: Tensor) -> Any:
    """The cache with every text but its last token, in the columns of ``sequences``. A sliding cache is replaced."""
    if session.model.attends_again:
        raise ValueError(
            f"custom_generate: {session.model.name} has layers that attend several times, and their caches cannot be written "
            "for transformers: give no past_key_values, and with return_dict_in_generate use_cache=False"
        )
    columns = mask.shape[1] + max(result.lengths) - 1
    lengths = mask.sum(1) + uploaded(result.lengths, mask.device) - 1
    # Padding repeats a token of the text, because transformers 4.57 takes a column of zeros for the end of a static cache.
    rows = torch.arange(columns, device=mask.device) - _starts(mask)[:, None]
    rows = rows.clamp(min=0).minimum(lengths[:, None] - 1)
    attending = range(len(session.caches)) if session.model.numbers is None else session.model.numbers
    inner = unwrapped(session.model.model)
    own = {layer: kind for feature in FEATURES for layer, kind in feature.new_layers(inner).items()}
    if any(type(layer).__name__ in SLIDING_LAYERS for layer in cache.layers):
        from transformers import cache_utils
        from transformers.cache_utils import DynamicCache, DynamicLayer

        if session.states or own:
            for layer in attending:
                states = getattr(cache.layers[layer], "number_of_states", 0)
                if states:
                    cache.layers[layer] = cache_utils.LinearAttentionAndFullAttentionLayer(states)
                else:
                    cache.layers[layer] = own.get(layer, DynamicLayer)()
        else:
            cache = DynamicCache()
    write_states(cache, session.state_places, session.states)
    pairs, stored = {}, {}
    for layer, tensors, dims in zip(attending, session.caches, session.head_dims, strict=True):
        keys, values = (
            gathered(tensor[..., :dim], rows).transpose(1, 2) for tensor, dim in zip(tensors, dims, strict=True)
        )
        pairs[layer], stored[layer] = (keys, values), tensors[0]
    for feature in FEATURES:
        pairs |= feature.to_theirs(inner, pairs)
    for layer, (keys, values) in pairs.items():
        write_cache(cache, layer, keys, values)
    for feature in FEATURES:
        feature.write_after(inner, cache, stored, rows)
    return cache
