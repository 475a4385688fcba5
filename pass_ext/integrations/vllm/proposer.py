"""``PaSS``: the proposer that lets a vLLM model guess its own next tokens, through vLLM's own scheduler, cache and sampler.

    drafts of a request = guesses g_1 … g_m, then slots V, V + 1, …     (m + slots <= num_speculative_tokens)

The accept step verifies the guesses and always rejects slots. Where all m guesses were accepted, the logits of the slots' rows
guess after the token that the step ended with: m + 1 tokens and new guesses from one call. Where a guess was rejected, the
slots stood after a wrong text, and the next step has slots alone: the published cycle of two calls.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "model": "pass_ext.integrations.vllm.PaSS",
                                            "num_speculative_tokens": 4}'
                     --additional-config '{"pass_ext": {"slots": "smollm2-135m-instruct-slots"}}'

``DraftLength`` chooses how many tokens to draft for a batch, by measured time:

    rate(length) = sum of tokens / sum of seconds, over the recent steps of batches of this size

The best rate wins. Lengths start with a trial each, the longest first; those that lost are tried again, more and more rarely.
Batches of 1, 2–3, 4–7, … requests are measured apart: a call with many requests has no idle arithmetic left to draft with.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from pass_ext.decoding.drafting.slot_tokens import TreeFiller
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.integrations.vllm.sampling.chains import SampledStep
from pass_ext.integrations.vllm.sampling.runner_v1 import is_replaced
from pass_ext.integrations.vllm.settings import LOG, Settings, checked_slots
from pass_ext.integrations.vllm.slot_rows import SlotRows
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.ops.common.uploaded import sent, uploaded
from pass_ext.tree import Tree

_TRIAL = 24  # steps; even, so that cycles of two calls are whole
_MEMORY = 96  # steps
_SHORTEST_STAY, _LONGEST_STAY = 192, 3072  # steps
_GREEDY = BatchSampling(None, None, None, None, None)


class DraftLength:
    """The choice among some lengths, for batches of every size.

    Args:
        lengths: tokens to draft, 0 among them.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = sorted(lengths, reverse=True)
        self._sizes: dict[int, _OfSize] = {}

    def choose(self, requests: int) -> int:
        """The length for the next step of a batch."""
        return self._of(requests).current

    def add(self, requests: int, length: int, seconds: float, tokens: int) -> None:
        """Counts a step that drafted ``length`` tokens for each request, took so long and gave so many tokens in all."""
        self._of(requests).add(length, seconds, tokens)

    def _of(self, requests: int) -> _OfSize:
        return self._sizes.setdefault(requests.bit_length(), _OfSize(self._lengths))


class _OfSize:
    """The lengths' rates at one size of batch: trials of all lengths, then the best one for a while, and again."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._rates = dict.fromkeys(lengths, (0.0, 0.0))  # tokens and seconds, fading
        self._queue = [(length, _TRIAL) for length in lengths]
        self._best = lengths[0]
        self._stay = _SHORTEST_STAY

    @property
    def current(self) -> int:
        return self._queue[0][0]

    def add(self, length: int, seconds: float, tokens: int) -> None:
        current, steps = self._queue.pop(0)
        if length != current:  # the step was chosen at another size
            self._queue.insert(0, (current, steps))
            return
        fade = 1 - 1 / _MEMORY
        before = self._rates[length]
        self._rates[length] = fade * before[0] + tokens, fade * before[1] + seconds
        if steps > 1:
            self._queue.insert(0, (current, steps - 1))
        elif not self._queue:
            self._decide()

    def _decide(self) -> None:
        best = max(self._rates, key=lambda length: self._rates[length][0] / self._rates[length][1])
        self._stay = min(2 * self._stay, _LONGEST_STAY) if best == self._best else _SHORTEST_STAY
        self._best = best
        others = [length for length in self._rates if length != best]
        self._queue = [(best, self._stay), *((length, _TRIAL) for length in others)]


class PaSS:
    """vLLM's proposer interface (``custom_class``): ``load_model``, ``observe`` after each sampled step, ``propose``.

    Args:
        vllm_config: a ``VllmConfig``. ValueError names an option that PaSS cannot honour.
    """

    def __init__(self, vllm_config: Any) -> None:
        if not is_replaced():
            raise ValueError(
                "PaSS: needs PASS_EXT_VLLM=on: pass_ext's accept step rejects its slots, and hands over the logits after them"
            )
        self._settings = Settings.of(vllm_config)
        self._lookahead = checked_slots(vllm_config, self._settings)
        self._vocabulary: int = vllm_config.model_config.get_vocab_size()
        self._most_rows: int = vllm_config.scheduler_config.max_num_batched_tokens
        self._layers: int = vllm_config.model_config.hf_text_config.num_hidden_layers
        self._most_drafts: int = vllm_config.speculative_config.num_speculative_tokens
        # Part of vLLM's key of compiled code, which may have the slots' vectors in it.
        vllm_config.additional_config["pass_ext_slots"] = _digest(self._lookahead)
        lengths = {0, *(max(2, self._most_drafts >> halvings) for halvings in range(5)), self._most_drafts}
        self._length = (
            DraftLength([length for length in lengths if length <= self._most_drafts]) if self._settings.pause else None
        )
        self._step: SampledStep | None = None
        self._chosen: tuple[float, list[str], int] | None = None

    def load_model(self, model: nn.Module) -> None:
        """Attaches the slots to the target model."""
        rows = SlotRows(model, self._lookahead, self._vocabulary, self._most_rows, self._layers)
        self._table = rows.table
        self._lookahead = self._lookahead.to(rows.table.device)
        LOG.info("pass_ext: PaSS drafts with %d slots of %s", self._lookahead.num_lookahead, self._settings.slots)

    def observe(self, step: SampledStep) -> None:
        """Keeps what a step sampled, until ``propose``."""
        self._step = step

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """The drafts of every request of the batch; none where a request is still reading its prompt.

        Args:
            sampled_token_ids: the tokens that the step gave each request.
            token_ids_cpu: ``[requests or more, longest]``, the texts in front of them.
            num_tokens_no_spec, slot_mappings: vLLM's own, not needed here.
        """
        step, self._step = self._step, None
        if step is None:
            raise RuntimeError("PaSS: propose was called without a step that pass_ext sampled")
        length = self._most_drafts if self._length is None else self._measured_length(step, sampled_token_ids)
        if length == 0:
            return [[] for _ in sampled_token_ids]
        guesses = self._guesses(step, sampled_token_ids, token_ids_cpu, length)
        slots = self._lookahead.num_lookahead
        drafts = []
        for b, emitted in enumerate(sampled_token_ids):
            known = guesses.get(b, [])[:length]
            count = min(slots, length - len(known)) if emitted else 0
            drafts.append([*known, *range(self._vocabulary, self._vocabulary + count)])
        return drafts

    def _guesses(
        self, step: SampledStep, sampled: list[list[int]], texts: np.ndarray, length: int
    ) -> dict[int, list[int]]:
        """Request -> guesses, where the step's slots stood after its whole text."""
        tokens, positions = step.tokens.tolist(), step.positions.tolist()
        groups: dict[int, list[tuple[int, range]]] = {}  # number of slots -> requests and their slots' rows
        first = 0
        for b, drafts in enumerate(step.drafts):
            last, end = first + len(sampled[b]) - 1, first + drafts + 1
            # Slots follow the guesses; all guesses were accepted if the row after the last accepted one is a slot.
            if sampled[b] and last + 1 < end and tokens[last + 1] >= self._vocabulary:
                count = min(end - last - 1, length)
                groups.setdefault(count, []).append((b, range(last + 1, last + 1 + count)))
            first = end
        sampling = step.sampling if self._settings.rule == "coupled" else _GREEDY
        guesses: dict[int, list[int]] = {}
        for count, members in groups.items():
            requests = [b for b, _ in members]
            rows = uploaded([row for _, rows in members for row in rows], step.logits.device)
            filler = TreeFiller(self._lookahead, Tree.chain(count), self._table, sampling, "coupled", recalls=True)
            roots = [positions[b] + len(sampled[b]) - 1 for b in requests]
            known = torch.zeros(len(members), max(roots) + 1, dtype=torch.int64)
            for text, b, root in zip(known, requests, roots, strict=True):
                text[: positions[b]] = torch.from_numpy(texts[b, : positions[b]])
                text[positions[b] : root + 1] = torch.tensor(sampled[b])
            filled = filler.fill(
                step.logits[rows].view(len(members), count, -1),
                requests,
                [sampled[b][-1] for b in requests],
                roots,
                sent(known, rows.device),
            )
            guesses |= {b: part.chains[0] for b, part in zip(requests, filled.candidates, strict=True) if part}
        return guesses

    def _measured_length(self, step: SampledStep, sampled: list[list[int]]) -> int:
        """The length that measured times recommend. Steps count where the same requests were decoded before and since."""
        assert self._length is not None
        now, requests = time.perf_counter(), list(step.request_ids)
        if self._chosen is not None:
            before, same, length = self._chosen
            if same == requests and all(sampled):
                self._length.add(len(requests), length, now - before, sum(map(len, sampled)))
        length = self._length.choose(len(requests))
        self._chosen = now, requests, length
        return length


def _digest(lookahead: LookaheadEmbedding) -> str:
    """The same for equal slots, another for others."""
    digest = hashlib.sha256()
    for parameter in lookahead.parameters():
        digest.update(parameter.detach().float().numpy().tobytes())
    return digest.hexdigest()
