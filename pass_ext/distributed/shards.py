"""``Shard``: one rank's columns of the logits, on their way from the caller to ``shard_local``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pass_ext.distributed.exchange import Gather, Move, Steps
from pass_ext.distributed.layout import Layout


@dataclass(frozen=True)
class Shard:
    """Columns that a rank of a group holds. ``logits`` are matrices: the target's, and the draft's if there are any; a mask of
    None allows all."""

    rank: int
    layout: Layout
    logits: tuple[Tensor, ...]
    allowed: tuple[Tensor | None, ...]

    @property
    def start(self) -> int:
        """The id of the first column."""
        return self.layout.starts[self.rank]

    @property
    def columns(self) -> int:
        """Columns of this rank."""
        return self.layout.ends[self.rank] - self.start

    def without_padding(self) -> Shard:
        """The shard without the columns behind the vocabulary."""
        logits = tuple(matrix[:, : self.columns] for matrix in self.logits)
        words = -(-self.columns // 32)
        masks = tuple(None if mask is None else mask[:, :words].contiguous() for mask in self.allowed)
        return Shard(self.rank, self.layout, logits, masks)

    def masked(self) -> tuple[Tensor, ...]:
        """The logits, -inf where the masks forbid a token."""
        return tuple(
            matrix if mask is None else matrix.where(_bits(mask, matrix.shape[1]), -torch.inf)
            for matrix, mask in zip(self.logits, self.allowed, strict=True)
        )

    def aligned(self) -> Steps[Shard]:
        """The shard with columns that begin with a slice; at most one exchange, none if they all do already."""
        if self.layout.is_aligned:
            return self
        layout = self.layout.aligned()
        logits = yield Move(self.masked(), self.layout, layout)
        return Shard(self.rank, layout, tuple(logits), (None,) * len(logits))

    def whole(self) -> Steps[tuple[Tensor, ...]]:
        """The masked logits with the columns of all ranks; one exchange."""
        widths = [end - start for start, end in zip(self.layout.starts, self.layout.ends, strict=True)]
        rows, dtypes = [len(matrix) for matrix in self.logits], [matrix.dtype for matrix in self.logits]
        padded = [torch.nn.functional.pad(matrix, (0, max(widths) - self.columns)) for matrix in self.masked()]
        flat = torch.cat([matrix.contiguous().view(-1).view(torch.uint8) for matrix in padded])
        parts = (yield Gather(flat)).split([matrix.numel() * matrix.element_size() for matrix in padded], dim=1)
        wholes = []
        for part, count, dtype in zip(parts, rows, dtypes, strict=True):
            matrices = part.contiguous().view(dtype).view(len(widths), count, max(widths))
            wholes.append(torch.cat([matrix[:, :width] for matrix, width in zip(matrices, widths, strict=True)], 1))
        return tuple(wholes)


def _bits(words: Tensor, columns: int) -> Tensor:
    """Mask words ``[rows, ceil(columns / 32)]`` as bools ``[rows, columns]``."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> places & 1).bool().flatten(1)[:, :columns]
