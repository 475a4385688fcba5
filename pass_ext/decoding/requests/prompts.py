"""Reads padded prompts ``[B, T]`` into lists of tokens, and writes ``sequences``: the prompts with the new tokens behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompts:
    """The tokens of each request, the ids of its padding, and the caller's tensor."""

    texts: list[list[int]]
    padding: list[list[int]]
    input_ids: Tensor

    def repeated(self, times: int) -> Prompts:
        """Each prompt ``times`` times in a row."""
        texts, padding = ([list(row) for row in rows for _ in range(times)] for rows in (self.texts, self.padding))
        return Prompts(texts, padding, self.input_ids.repeat_interleave(times, dim=0))

    def extended(self, new: Sequence[Sequence[int]], pad: int) -> Tensor:
        """``[B, T + most new]``: the input, then each request's new tokens, then padding."""
        tail = torch.full((len(new), max(map(len, new))), pad, dtype=torch.int64)
        for row, tokens in zip(tail, new, strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        return torch.cat([self.input_ids.long(), tail.to(self.input_ids.device)], dim=1)


def read_prompts(input_ids: Tensor, attention_mask: Tensor | None, vocabulary: int) -> Prompts:
    """Checks the prompts and removes their padding, which may lie left, right, or on both sides."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.dtype not in (torch.int32, torch.int64):
        got = (
            f"{input_ids.dtype} {list(input_ids.shape)}" if isinstance(input_ids, Tensor) else type(input_ids).__name__
        )
        raise ValueError(f"input_ids must be integers [B, T], got {got}")
    if attention_mask is None:
        mask = [[True] * input_ids.shape[1]] * len(input_ids)
    else:
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
            came = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise ValueError(
                f"attention_mask must be a tensor [B, T] as input_ids, {list(input_ids.shape)}, got {came}"
            )
        mask = (attention_mask != 0).tolist()
    texts, padding = [], []
    for b, (row, seen) in enumerate(zip(input_ids.tolist(), mask, strict=True)):
        if True not in seen:
            raise ValueError(f"prompt {b} has no tokens")
        first, last = seen.index(True), len(seen) - seen[::-1].index(True)
        if False in seen[first:last]:
            raise ValueError(f"attention_mask of prompt {b} has a hole: padding belongs to the left or the right")
        texts.append(row[first:last])
        padding.append(row[:first] + row[last:])
        if min(texts[-1]) < 0 or max(texts[-1]) >= vocabulary:
            strange = next(token for token in texts[-1] if not 0 <= token < vocabulary)
            raise ValueError(f"prompt {b} holds the id {strange}; the model's ids are 0 to {vocabulary - 1}")
    if not texts:
        raise ValueError("input_ids must hold at least one prompt, got none")
    return Prompts(texts, padding, input_ids)
