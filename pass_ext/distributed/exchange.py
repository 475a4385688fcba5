"""The exchanges between ranks, apart from their arithmetic.

A step on shards is a generator that yields what a rank has to say and receives what the group makes of it:

    Gather(t)            [ranks, *t.shape], in the order of the ranks
    Add(t)               the sum over the ranks, with one dimension of size 1 in front
    Move(tensors, to)    the columns that this rank holds afterwards

``run`` exchanges them over a process group; ``run_together`` runs all ranks in one process, for tests and for counting.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pass_ext.distributed.layout import Layout, waiting


@dataclass(frozen=True)
class Gather:
    """Every rank gets the tensors of all ranks, which have one shape."""

    tensor: Tensor


@dataclass(frozen=True)
class Add:
    """Every rank gets the sum of the integers of all ranks."""

    tensor: Tensor


@dataclass(frozen=True)
class Move:
    """Columns go from the ranks that hold them to the ranks that shall hold them."""

    tensors: tuple[Tensor, ...]
    """``[rows, columns]`` each."""
    before: Layout
    after: Layout


Exchange = Gather | Add | Move
Result = TypeVar("Result")
Steps = Generator[Exchange, Any, Result]


def run(steps: Steps[Result], group: dist.ProcessGroup | None) -> Result:
    """Runs this rank's steps over a process group; None: the default one."""
    reply: Any = None
    while True:
        try:
            wish = steps.send(reply)
        except StopIteration as end:
            return end.value
        with waiting(group, _described(wish)):
            reply = _exchanged(wish, group)


def _described(wish: Exchange) -> str:
    tensor = wish.tensors[0] if isinstance(wish, Move) else wish.tensor
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _exchanged(wish: Exchange, group: dist.ProcessGroup | None) -> Any:
    if isinstance(wish, Gather):
        tensor = wish.tensor.contiguous()
        flat = tensor.view(-1).view(torch.uint8)  # every backend takes bytes
        out = flat.new_empty(dist.get_world_size(group), len(flat))
        dist.all_gather(list(out), flat, group=group)
        return out.view(-1).view(tensor.dtype).view(len(out), *tensor.shape)  # -1 has no meaning for an empty batch
    if isinstance(wish, Add):
        total = wish.tensor.clone()
        dist.all_reduce(total, group=group)
        return total[None]
    rank = dist.get_rank(group)
    parcels = _parcels(wish, rank)
    own = parcels[rank]
    parcels[rank] = own[:0]
    sent = torch.cat(parcels)
    sizes = [_parcel_size(wish, source, rank) if source != rank else 0 for source in range(len(parcels))]
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, [len(parcel) for parcel in parcels], group=group)
    arrived = list(received.split(sizes))
    arrived[rank] = own
    return _unpacked(wish, arrived, rank)


def run_together(ranks: Sequence[Steps[Result]]) -> tuple[list[Result], list[list[Exchange]]]:
    """Runs the steps of all ranks in turn; returns their results, and what each exchange was, rank by rank."""
    replies: list[Any] = [None] * len(ranks)
    exchanges: list[list[Exchange]] = []
    while True:
        wishes, results = [], []
        for steps, reply in zip(ranks, replies, strict=True):
            try:
                wishes.append(steps.send(reply))
            except StopIteration as end:
                results.append(end.value)
        if results:
            if wishes:
                raise RuntimeError(f"{len(results)} of {len(ranks)} ranks ended while the others exchange {wishes[0]}")
            return results, exchanges
        exchanges.append(wishes)
        replies = _replies(wishes)


def _replies(wishes: list[Exchange]) -> list[Any]:
    first = wishes[0]
    if isinstance(first, Gather):
        return [torch.stack([wish.tensor for wish in wishes])] * len(wishes)  # type: ignore[union-attr]
    if isinstance(first, Add):
        return [torch.stack([wish.tensor for wish in wishes]).sum(0, dtype=first.tensor.dtype)[None]] * len(wishes)  # type: ignore[union-attr]
    parcels = [_parcels(wish, rank) for rank, wish in enumerate(wishes)]  # type: ignore[arg-type]
    return [_unpacked(wish, [row[rank] for row in parcels], rank) for rank, wish in enumerate(wishes)]  # type: ignore[arg-type]


# ---- moving columns ----


def _parcels(wish: Move, rank: int) -> list[Tensor]:
    """The bytes that a rank sends to each: its columns of every tensor that the other shall hold."""
    start = wish.before.starts[rank]
    parcels = []
    for target in range(len(wish.before.starts)):
        begin, end = _overlap(wish, rank, target)
        parts = [
            tensor[:, begin - start : end - start].contiguous().view(-1).view(torch.uint8) for tensor in wish.tensors
        ]
        parcels.append(torch.cat(parts))
    return parcels


def _parcel_size(wish: Move, source: int, target: int) -> int:
    begin, end = _overlap(wish, source, target)
    return sum(tensor.shape[0] * (end - begin) * tensor.element_size() for tensor in wish.tensors)


def _overlap(wish: Move, source: int, target: int) -> tuple[int, int]:
    begin = max(wish.before.starts[source], wish.after.starts[target])
    end = min(wish.before.ends[source], wish.after.ends[target])
    return begin, max(begin, end)


def _unpacked(wish: Move, parcels: list[Tensor], rank: int) -> list[Tensor]:
    """The tensors with the columns that this rank holds afterwards, from the parcels of all ranks in order."""
    columns: list[list[Tensor]] = [[] for _ in wish.tensors]
    for source, parcel in enumerate(parcels):
        begin, end = _overlap(wish, source, rank)
        place = 0
        for tensor, pieces in zip(wish.tensors, columns, strict=True):
            size = tensor.shape[0] * (end - begin) * tensor.element_size()
            piece = parcel[place : place + size].clone().view(tensor.dtype)  # aligned to its dtype
            pieces.append(piece.view(tensor.shape[0], end - begin))
            place += size
    return [torch.cat(pieces, 1) for pieces in columns]
