"""``Ranks``: the processes of one run, which share its work and add up its gradients. One process is a rank of one.

A launcher (torchrun, Ray, or one that sets torch.distributed's variables RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) starts the
same command several times. What a step reads is drawn alike by all of them, from the seed and the step's number, and each takes
its share: so the number of ranks changes sums of float32 by their rounding, and nothing else.

A rank that fails says why in the launcher's store and closes its connections, so the others' next exchange fails, and they end
with that sentence.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Its functions keep the group that there is when they are defined, and with it the connections of a rank that has ended.
import torch.distributed.nn.functional
from torch import Tensor

_FAILED = "pass_ext/failed"  # key of the store: why the first rank that failed did
_ENDED = "pass_ext/ended"  # how many ranks have
_ANSWER = timedelta(seconds=5)  # of the store, at most
_OTHERS_END = 60.0  # seconds that the first rank gives the others to read the store
_Value = TypeVar("_Value")


class Ranks:
    """This process's number among ``count``, and what all of them do together.

    Every method but ``share_of`` and ``did`` waits for all ranks, and ends the program with a sentence if one is gone.
    """

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count
        self.reader, self.readers = rank, count
        """This process's number among those that read different texts."""
        self._done: dict[str, int] = {}

    def alike(self) -> Ranks:
        """The same ranks, who all read all texts: a model whose layers are divided is called by all of them together."""
        same = Ranks(self.rank, self.count)
        same.reader, same.readers, same._done = 0, 1, self._done
        return same

    @property
    def is_first(self) -> bool:
        """True for the rank that writes files and prints."""
        return self.rank == 0

    def share_of(self, items: Sequence[_Value]) -> Sequence[_Value]:
        """This rank's part of a list: every item is in one part."""
        return items[self.reader :: self.readers]

    def total_(self, tensors: Sequence[Tensor]) -> None:
        """Makes each tensor, float32, the sum over the ranks; one exchange for all."""
        if self.count == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        with _together(self.rank):
            dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def gather(self, value: _Value) -> list[_Value]:
        """Every rank's value, by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        with _together(self.rank):
            dist.all_gather_object(values, value)
        return values

    def first(self, call: Callable[[], _Value]) -> _Value:
        """What the first rank's call returns; the others do not call."""
        if self.count == 1:
            return call()
        parcel: list[Any] = [call() if self.is_first else None]
        with _together(self.rank):
            dist.broadcast_object_list(parcel, src=0)
        return parcel[0]

    def any(self, flag: bool) -> bool:
        """True if it is for any rank."""
        return any(self.gather(flag))

    def joined(self, parts: Sequence[_Value]) -> list[_Value]:
        """All ranks' parts of a list that ``share_of`` divided, in its order."""
        if self.readers == 1:
            return list(parts)
        shares = self.gather(list(parts))
        return [share[at] for at in range(max(map(len, shares))) for share in shares if at < len(share)]

    def did(self, what: str, count: int) -> None:
        """Adds to what this rank has done, for the record."""
        self._done[what] = self._done.get(what, 0) + count

    def report(self) -> list[dict[str, Any]]:
        """What each rank did in this call of the command."""
        return self.gather({"rank": self.rank, "host": socket.gethostname(), **self._done})


class _Gone(SystemExit):
    """An exchange failed: another rank has ended, or does not come."""


@contextmanager
def _together(rank: int) -> Iterator[None]:
    """An exchange that fails ends the program."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed's are of this kind
        raise _Gone(f"rank {rank} stops, because another rank is gone: {str(error).splitlines()[0]}") from error


def local_device(name: str) -> str:
    """The device of this process: of several on a machine, each has its own GPU."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" else name


@contextmanager
def launched(minutes: float) -> Iterator[Ranks]:
    """The ranks of the launcher that started this process; without one, a rank of one. ``minutes``: how long a rank waits for
    the others before it ends."""
    was_there = dist.is_initialized()  # Ray does it
    if not was_there and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    if not was_there:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(local_device("cuda"))
        dist.init_process_group(backend, timeout=timedelta(minutes=minutes))
    ranks, store = Ranks(dist.get_rank(), dist.get_world_size()), dist.distributed_c10d._get_default_store()
    is_heard = False  # by the others, who can still reach the store
    try:
        yield ranks
        is_heard = True
    except (Exception, SystemExit) as error:
        reason = _reason(store, ranks.rank, error)
        is_heard = reason is not None
        _let_go(error)
        if reason is None or reason.startswith(f"rank {ranks.rank} "):
            raise
        here = "" if isinstance(error, _Gone) else f"; here {type(error).__name__}: {error}"
        raise SystemExit(f"rank {ranks.rank} stops, because {reason}{here}") from error
    finally:
        if not was_there:
            dist.destroy_process_group()
            if is_heard and not dist.is_torchelastic_launched():
                _end_in_order(store, ranks)


def _reason(store: Any, rank: int, error: BaseException) -> str | None:
    """Why the first rank that failed did: this one, if no other has said so; None: that rank could not say it."""
    with suppress(Exception):  # the store's own process is the one that is gone
        store.set_timeout(_ANSWER)
        if not isinstance(error, _Gone):
            own = str(error.code) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
            store.compare_set(_FAILED, "", f"rank {rank} ended: {own}")
        if store.check([_FAILED]):
            return str(store.get(_FAILED).decode())
    return None


def _let_go(error: BaseException | None) -> None:
    """Clears the frames that an exception keeps: with a group in one of them, its connections stay open, and who waits at their
    other ends does not hear that this rank ends."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _end_in_order(store: Any, ranks: Ranks) -> None:
    """The first rank waits until all have ended: where no launcher keeps the store, it ends with this rank, and the others may
    not have read it yet."""
    latest = time.monotonic() + _OTHERS_END
    with suppress(Exception):
        ended = store.add(_ENDED, 1)
        while ranks.is_first and ended < ranks.count and time.monotonic() < latest:
            time.sleep(0.05)
            ended = store.add(_ENDED, 0)
