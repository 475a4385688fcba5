"""``Layout``: the columns of the vocabulary that each rank of a group holds; ``Columns``: those of this rank, from plain
tensors or DTensors.

Sums over the vocabulary have the same bits on any number of ranks if they are made of the same slices. So before anything is
summed, columns move to the rank that holds the greater part of their slice, unless every rank's columns begin with a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from pass_ext.ops.shard import SLICE_COLUMNS


@dataclass(frozen=True)
class Layout:
    """Rank r holds the columns ``starts[r] : ends[r]``, in ascending order; all together are ``vocab_size``."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        """The columns of all ranks."""
        return self.ends[-1]

    @property
    def is_aligned(self) -> bool:
        """True if every rank that has columns begins with a slice."""
        pairs = zip(self.starts, self.ends, strict=True)
        return all(start % SLICE_COLUMNS == 0 or start == end for start, end in pairs)

    @property
    def slices(self) -> int:
        """The most slices that a rank holds, at least 1."""
        widths = (end - start for start, end in zip(self.starts, self.ends, strict=True))
        return max(1, -(-max(widths) // SLICE_COLUMNS))

    def aligned(self) -> Layout:
        """The layout with each border at the nearest begin of a slice."""
        borders = [round(start / SLICE_COLUMNS) * SLICE_COLUMNS for start in self.starts]
        borders = [min(border, self.vocab_size) for border in [0, *borders[1:], self.vocab_size]]
        borders[-1] = self.vocab_size
        return Layout(tuple(borders[:-1]), tuple(borders[1:]))


def equal_parts(vocab_size: int, ranks: int) -> Layout:
    """The layout of torch.chunk, and of DTensors: equal parts, the last ones fewer or none."""
    width = -(-vocab_size // ranks)
    borders = [min(rank * width, vocab_size) for rank in range(ranks + 1)]
    return Layout(tuple(borders[:-1]), tuple(borders[1:]))


def checked_layout(shards: list[tuple[int, int, int]]) -> Layout:
    """The layout of all ranks' (first column, columns, vocabulary). Raises ValueError, which names the rank and the
    argument, if they do not divide one vocabulary. Columns after the vocabulary are padding and left out."""
    vocabulary, expected = shards[0][2], 0
    starts, ends = [], []
    for rank, (start, columns, said) in enumerate(shards):
        if said != vocabulary:
            raise ValueError(
                f"pass_ext.distributed: vocab_size must be the same on all ranks, rank 0 has {vocabulary}, got {said} on "
                f"rank {rank}"
            )
        if min(start, vocabulary) != expected:
            raise ValueError(
                f"pass_ext.distributed: vocab_start must be {expected} on rank {rank}, where the columns of the ranks before "
                f"it end, got {start}"
            )
        end = min(start + columns, vocabulary)
        starts.append(expected)
        ends.append(max(expected, end))
        expected = ends[-1]
    if expected != vocabulary:
        raise ValueError(
            f"pass_ext.distributed: target_logits must have {vocabulary} columns on all ranks together (vocab_size), got "
            f"{expected}"
        )
    return Layout(tuple(starts), tuple(ends))


@dataclass(frozen=True)
class Columns:
    """This rank's columns of the target's logits, and the group that holds all."""

    local: Tensor
    group: dist.ProcessGroup
    rank: int
    start: int | Sequence[int] | None
    vocab_size: int | None

    def of(self, op: str, argument: str, logits: Tensor) -> Tensor:
        """The local columns of another argument, a plain tensor or a DTensor that is divided as the target's logits are."""
        if not isinstance(logits, DTensor):
            return logits
        other = _columns_of_dtensor(op, argument, logits)
        if other.group != self.group or other.vocab_size != self.vocab_size:
            raise ValueError(
                f"pass_ext.distributed.{op}: {argument} must be divided as target_logits, {self.vocab_size} columns over one "
                f"group, got {other.vocab_size} columns with placements {logits.placements}"
            )
        return other.local


def columns_of(
    op: str,
    logits: Tensor,
    group: dist.ProcessGroup | None,
    vocab_start: int | Sequence[int] | None,
    vocab_size: int | None,
) -> Columns:
    """The columns of this rank; a DTensor says itself where they lie."""
    if isinstance(logits, DTensor):
        return _columns_of_dtensor(op, "logits" if op == "draft_sample" else "target_logits", logits)
    if not dist.is_initialized():
        raise RuntimeError(
            f"pass_ext.distributed.{op}: group must be a process group, got none: call torch.distributed.init_process_group "
            "first (torchrun, SLURM and Ray start the processes)"
        )
    group = dist.group.WORLD if group is None else group
    assert group is not None
    if vocab_start is not None and vocab_size is None:
        raise ValueError(f"pass_ext.distributed.{op}: vocab_size must be given with vocab_start, got None")
    return Columns(logits, group, dist.get_rank(group), vocab_start, vocab_size)


def _columns_of_dtensor(op: str, argument: str, logits: DTensor) -> Columns:
    mesh, last = logits.device_mesh, logits.dim() - 1
    dims = [i for i, placement in enumerate(logits.placements) if isinstance(placement, Shard)]
    others = [p for p in logits.placements if not isinstance(p, Shard) and not p.is_replicate()]
    shards = [logits.placements[i].dim % logits.dim() for i in dims]  # type: ignore[attr-defined]
    if shards != [last] or others:
        raise ValueError(
            f"pass_ext.distributed.{op}: {argument} must be a DTensor sharded on its last dimension alone, got placements "
            f"{logits.placements}"
        )
    group = mesh.get_group(dims[0])
    return Columns(logits.to_local(), group, dist.get_rank(group), None, logits.shape[-1])


@contextmanager
def waiting(group: dist.ProcessGroup | None, described: str) -> Iterator[None]:
    """Says what this rank waited for, where the group reports an error."""
    try:
        yield
    except RuntimeError as error:  # torch's distributed errors are RuntimeErrors
        raise RuntimeError(
            f"pass_ext.distributed: rank {dist.get_rank(group)} of {dist.get_world_size(group)} waits in vain for "
            f"the others to exchange {described}: a rank has ended, or made another call, or was slower than the "
            f"group's timeout: {error}"
        ) from error


def layout_of(columns: Columns) -> Layout:
    """The layout of the group. One exchange of 24 bytes if only a rank itself knows its first column; else none."""
    ranks, width = dist.get_world_size(columns.group), columns.local.shape[-1]
    vocabulary = columns.vocab_size
    if columns.start is None and vocabulary is not None:
        layout = equal_parts(vocabulary, ranks)
    elif isinstance(columns.start, Sequence) and vocabulary is not None:
        if len(columns.start) != ranks:
            raise ValueError(
                f"pass_ext.distributed: vocab_start must have a first column for each of {ranks} ranks, got "
                f"{list(columns.start)}"
            )
        shards = zip(columns.start, [*columns.start[1:], vocabulary], strict=True)
        layout = checked_layout([(start, end - start, vocabulary) for start, end in shards])
    else:
        said = [-1 if n is None else n for n in (columns.start, width, columns.vocab_size)]
        mine = torch.tensor(said, device=columns.local.device)
        everyone = mine.new_empty(ranks, 3)
        with waiting(columns.group, "their first columns"):
            dist.all_gather(list(everyone), mine, group=columns.group)
        return checked_layout(_complete(everyone.tolist()))
    expected = layout.ends[columns.rank] - layout.starts[columns.rank]
    if width < expected:
        raise ValueError(
            f"pass_ext.distributed: target_logits must have {expected} columns on rank {columns.rank} of {ranks}, got {width}"
        )
    return layout


def _complete(shards: list[list[int]]) -> list[tuple[int, int, int]]:
    """Fills in first columns and vocabularies that were not given: the columns of the ranks before, and of all."""
    begin, total, complete = 0, sum(columns for _, columns, _ in shards), []
    for start, columns, vocabulary in shards:
        complete.append((begin if start < 0 else start, columns, total if vocabulary < 0 else vocabulary))
        begin += columns
    return complete
