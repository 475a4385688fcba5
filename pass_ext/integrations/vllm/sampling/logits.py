"""The logits that a step samples from: vLLM's own processors around the rows of a step with drafts; and ``logprobs_of``, the
log-probabilities that requests asked for, gathered by vLLM's own functions for the tokens of a step.

vLLM's order: allowed ids, bad words, processors, penalties, thinking budget; then temperature, processors such as min-p; then
top-k, top-p and the draw, which are pass_ext's. Rows are copied before they change: others read the model's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pass_ext.integrations.vllm.sampling.chains import PackedChains


class RowCounts(NamedTuple):
    """The part of vLLM's ``SpecDecodeMetadata`` that its logits processors read."""

    num_draft_tokens: list[int]


def processed(runner: Any, metadata: Any, chains: PackedChains, logits: Tensor, spec_decode_metadata: Any) -> Tensor:
    """The logits after the processors that change what a greedy request takes; ``logits`` itself if there are none."""
    holder = metadata.thinking_budget_state_holder
    holder = holder if holder is not None and holder.has_tracked_requests() else None
    if not (
        holder
        or not metadata.no_penalties
        or metadata.allowed_token_ids_mask is not None
        or metadata.bad_words_token_ids
        or any(map(_acts, metadata.logitsprocs.non_argmax_invariant))
    ):
        return logits
    rows = logits.float() if logits.dtype.itemsize < 4 else logits.clone()
    if spec_decode_metadata is None:
        return runner.sampler.apply_logits_processors(rows, metadata, predict_bonus_token=False)
    # Every row is a draft's row in the eyes of vLLM's processors: they then count the drafts before it, which the text would
    # hold. vLLM itself takes a request's last row for its first where min_tokens asks how long the text is.
    guesses = [[id if 0 <= id < logits.shape[-1] else -1 for id in ids] for ids in metadata.spec_token_ids or ()]
    rows = runner.rejection_sampler.apply_logits_processors(
        rows,
        replace(metadata, spec_token_ids=[[*ids, -1] for ids in guesses], thinking_budget_state_holder=None),
        RowCounts([count + 1 for count in chains.drafts]),
    )
    if holder:
        holder.update_state(metadata.output_token_ids, guesses, repeat_indices=None)
        for places, is_bonus in (
            (spec_decode_metadata.bonus_logits_indices, True),
            (spec_decode_metadata.target_logits_indices, False),
        ):
            rows[places] = holder.apply_to_logits(rows[places], is_bonus, guesses)
    return rows


def scaled(runner: Any, metadata: Any, logits: Tensor, model_logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """(logits, temperature) after the processors that follow the temperature, such as min-p.

    Without such processors the temperature stays for the accept step to apply. vLLM loads none under speculation, so each
    request has one row. ``model_logits`` stay as they are.
    """
    acting = [processor for processor in metadata.logitsprocs.argmax_invariant if _acts(processor)]
    temperature: Tensor | None = metadata.temperature
    if temperature is None or not acting:
        return logits, temperature
    rows = logits.float() if logits.dtype.itemsize < 4 else logits.clone() if logits is model_logits else logits
    rows = runner.sampler.apply_temperature(rows, temperature, metadata.all_random)
    for processor in acting:
        rows = processor.apply(rows)
    return rows, (temperature > 0).to(temperature.dtype)


def _acts(processor: Any) -> bool:
    """False for a processor of vLLM's own that no request of the batch uses."""
    for state in ("min_toks", "biases", "min_p_count"):
        if hasattr(processor, state):
            return bool(getattr(processor, state))
    return True


def are_wanted(metadata: Any) -> bool:
    """Whether a request of the batch wants log-probabilities."""
    return metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)


def logprobs_of(sampler: Any, metadata: Any, chains: PackedChains, scores: Tensor, emitted: Tensor) -> Any:
    """vLLM's ``LogprobsTensors`` with a row for each place of ``emitted`` ``[B, width]``, also for those after the end.

    Args:
        scores: ``[N, V]``: the model's own logits, or those that the tokens were drawn from.
    """
    width = emitted.shape[1]
    rows = chains.cu_nodes[:-1, None] + torch.arange(width, device=emitted.device)
    scores = scores[rows.clamp(max=len(scores) - 1).flatten()].float()
    if not sampler.logprobs_mode.endswith("logits"):
        scores = sampler.compute_logprobs(scores)
    tokens = emitted.clamp(min=0).flatten()
    if metadata.logprob_token_ids:
        ids_of_rows = {
            request * width + place: ids
            for request, ids in metadata.logprob_token_ids.items()
            for place in range(width)
        }
        return sampler.gather_specific_token_logprobs(scores, ids_of_rows, tokens)
    return sampler.gather_logprobs(scores, metadata.max_num_logprobs, tokens)


def constrained(metadata: Any, chains: PackedChains, logits: Tensor, temperature: Tensor | None) -> Tensor:
    """The logits ``[N, V]`` after temperature, top-k and top-p, by vLLM's own filter: for logprobs_mode "processed_…"."""
    if temperature is None:
        return logits
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    counts = chains.draft_counts + 1

    def each_row(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.repeat_interleave(counts, output_size=len(logits))

    divisor = each_row(temperature.where(temperature > 0, 1.0))
    assert divisor is not None
    return apply_top_k_top_p(logits.float() / divisor[:, None], each_row(metadata.top_k), each_row(metadata.top_p))
