"""``step_logits``, ``step_scores``: ``output_logits`` and ``output_scores`` of transformers, a tensor ``[B, V]`` per new token.

logits   the model's, in float32          scores   the same behind all logits processors and warpers

Rows of texts that have ended are 0: transformers puts there what the model says behind padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.generation import Generation


def step_logits(result: Generation) -> tuple[Tensor, ...]:
    """The model's rows."""
    return tuple(_steps(result, 0))


def step_scores(result: Generation, warpers: Sequence[Any]) -> tuple[Tensor, ...]:
    """The rows behind the processors. warpers: those that ran as sampling parameters; they look at the scores alone."""
    scores = _steps(result, 1)
    first = result.sequences.shape[1] - len(scores)
    for step, rows in enumerate(scores):
        has_token = torch.tensor([length > step for length in result.lengths], device=rows.device)[:, None]
        for warper in warpers:
            rows = warper(result.sequences[:, : first + step], rows)
        scores[step] = rows.where(has_token, 0.0)
    return tuple(scores)


def _steps(result: Generation, kind: int) -> list[Tensor]:
    assert result.logits is not None
    texts = [rows[kind].float() for rows in result.logits]
    padded = torch.nn.utils.rnn.pad_sequence(texts)
    return list(padded.unbind(0))
