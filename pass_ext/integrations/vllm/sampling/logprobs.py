"""``logprobs_of``: the log-probabilities that requests asked for, gathered by vLLM's own functions for the tokens of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pass_ext.integrations.vllm.sampling.chains import PackedChains


def are_wanted(metadata: Any) -> bool:
    """Whether a request of the batch wants log-probabilities."""
    return metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)


def logprobs_of(sampler: Any, metadata: Any, chains: PackedChains, scores: Tensor, emitted: Tensor) -> Any:
    """vLLM's ``LogprobsTensors`` with a row for each place of ``emitted`` ``[B, width]``, also for those behind the end.

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
