"""The columns that this rank holds, from plain tensors or DTensors, and the layout of the whole group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from pass_ext.distributed.exchange import waiting
from pass_ext.distributed.layout import Layout, checked_layout, equal_parts


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
