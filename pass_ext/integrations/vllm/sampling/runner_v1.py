"""The accept step in vLLM's runner V1: ``GPUModelRunner._sample`` by one ``accept_tree`` call, with drafts and without.

rule "coupled": the token at text position t is a function of (seed, t, logits), whatever was drafted and whoever shares
the batch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.sampling import BatchSampling
from pass_ext.integrations.vllm.sampling.chains import (
    PackedChains,
    SampledStep,
    accept_by_coins,
    accept_chains,
    seed_of,
    synthetic_of,
)
from pass_ext.integrations.vllm.sampling.logits import are_wanted, constrained, logprobs_of, processed, scaled
from pass_ext.integrations.vllm.settings import refuse_options
from pass_ext.ops.common.uploaded import uploaded

_STEP = "_pass_ext_accept_step"


def replace_sampling() -> str:
    """Replaces ``GPUModelRunner._sample`` in this process, and says so in words. A second call changes nothing."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    GPUModelRunner._sample = sample
    return "GPUModelRunner._sample (runner V1)"


def is_replaced() -> bool:
    """Whether this process's runners sample with pass_ext."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return GPUModelRunner._sample is sample


def sample(runner: Any, logits: Tensor, spec_decode_metadata: Any) -> Any:
    """vLLM's ``SamplerOutput`` of one step: ``GPUModelRunner._sample``."""
    step = runner.__dict__.get(_STEP)
    if step is None:
        step = AcceptStep(runner)
        setattr(runner, _STEP, step)
    return step.sample(logits, spec_decode_metadata)


class AcceptStep:
    """The accept step of one runner: its rule, and what its steps share while the batch stays the same."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.rule = refuse_options(runner.vllm_config).rule
        self._synthetic = synthetic_of(runner.vllm_config)
        self._chains = PackedChains.of((), runner.device)
        self._seeds: tuple[Any, Tensor | None] = (None, None)

    def sample(self, logits: Tensor, spec_decode_metadata: Any) -> Any:
        from vllm.v1.outputs import SamplerOutput

        runner, batch = self.runner, self.runner.input_batch
        metadata = batch.sampling_metadata
        batch.update_async_output_token_ids()
        draft_ids = draft_probs = None
        drafts: Sequence[int] = (0,) * batch.num_reqs
        if spec_decode_metadata is not None:
            if runner.use_async_scheduling and runner._draft_token_req_ids is not None:
                batch.update_async_spec_token_ids(runner._get_draft_token_ids_cpu()[0])
            draft_ids, drafts = spec_decode_metadata.draft_token_ids, spec_decode_metadata.num_draft_tokens
            draft_probs = runner._get_spec_decode_draft_probs(spec_decode_metadata)
        chains = self._packed(drafts)
        tokens = chains.tokens(draft_ids)
        positions = runner.seq_lens[: len(drafts)].long() - chains.draft_counts

        rows = processed(runner, metadata, chains, logits, spec_decode_metadata)
        rows, temperature = scaled(runner, metadata, rows, logits)
        sampling = BatchSampling(temperature, metadata.top_k, metadata.top_p, None, self._seed_tensor(metadata))
        if sampling.is_greedy:
            sampling = BatchSampling(None, None, None, None, None)
        if self._synthetic is None:
            emitted = accept_chains(chains, rows, tokens, self.rule, sampling, positions, draft_probs)
        else:
            emitted = accept_by_coins(self._synthetic, chains, rows, tokens, sampling, positions)

        logprobs = None
        if are_wanted(metadata):
            is_raw = runner.sampler.logprobs_mode.startswith("raw")
            scores = logits if is_raw else constrained(metadata, chains, rows, temperature)
            logprobs = logprobs_of(runner.sampler, metadata, chains, scores, emitted)
        self._note_discarded()
        self._observe(SampledStep(list(batch.req_ids), logits, tokens, chains.drafts, emitted, positions, sampling))
        return SamplerOutput(sampled_token_ids=emitted.int(), logprobs_tensors=logprobs)

    def _packed(self, drafts: Sequence[int]) -> PackedChains:
        if self._chains.drafts != tuple(drafts):
            self._chains = PackedChains.of(drafts, self.runner.device)
        return self._chains

    def _seed_tensor(self, metadata: Any) -> Tensor | None:
        """The seeds ``[B]``; None if all requests are greedy. vLLM makes new metadata whenever its batch changes."""
        if metadata.temperature is None:
            return None
        if self._seeds[0] is not metadata:
            requests = self.runner.requests
            seeds = [seed_of(requests[name]) for name in self.runner.input_batch.req_ids]
            tensor = uploaded(seeds, self.runner.device)
            self._seeds = metadata, tensor
        return self._seeds[1]

    def _discarded(self) -> Any:
        """The requests in the middle of their prompt, bool ``[B]``: vLLM throws their tokens away."""
        return self.runner.discard_request_mask.np[: self.runner.input_batch.num_reqs]

    def _note_discarded(self) -> None:
        """Moves the generators of discarded requests on, because vLLM then moves them back by what its own sampler draws.

        A CPU generator cannot be moved back, and vLLM stops with an error. Nothing here draws from it, so it leaves the batch.
        """
        generators = self.runner.input_batch.generators
        for index in self._discarded().nonzero()[0].tolist():
            if index in generators and generators[index].device.type == "cpu":
                del generators[index]
            elif index in generators:
                generators[index].set_offset(generators[index].get_offset() + 4)

    def _observe(self, step: SampledStep) -> None:
        """Tells the step to a proposer that looks at steps. A discarded request gets no tokens in it."""
        observe = getattr(getattr(self.runner, "drafter", None), "observe", None)
        if observe is None:
            return
        discarded = self._discarded()
        if discarded.any():
            mask = torch.from_numpy(discarded.astype(bool)).to(step.emitted.device)
            step = step._replace(emitted=step.emitted.masked_fill(mask[:, None], -1))
        observe(step)
