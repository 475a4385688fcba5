"""``TextStates``: the hidden states of the rows that have become text since they were last taken, request by request.

call      states of all rows [N, taps, d]
commit    + the accepted path of each request, which stays on the device
take      states[path], once the host may know the paths
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pass_ext.tree import PackedTrees


class TextStates:
    """The states of a batch of so many requests."""

    def __init__(self, requests: int) -> None:
        self._calls: list[tuple[Tensor, PackedTrees, Tensor, Tensor]] = []
        self._pieces: list[list[Tensor]] = [[] for _ in range(requests)]
        self._none: Tensor | None = None

    def add(self, states: Tensor, trees: PackedTrees, path: Tensor, num_accepted: Tensor) -> None:
        """Adds the rows ``path[b, :num_accepted[b] + 1]`` of each request in the call. No synchronisation."""
        if self._none is None:
            self._none = states[:0]
        self._calls.append((states, trees, path, num_accepted))

    def begin(self, states: Sequence[Tensor]) -> None:
        """Takes the states ``[n, taps, d]`` of each request that a call outside of the session has computed."""
        self._none = states[0][:0]
        for pieces, own in zip(self._pieces, states, strict=True):
            pieces.append(own)

    def copy(self, request: int, others: Sequence[int]) -> None:
        """Gives other requests, whose texts begin as a request's, the states that they lack."""
        self._sort()
        states = torch.cat(self._pieces[request])
        for other in others:
            self._pieces[other].append(states[sum(map(len, self._pieces[other])) :])

    def drop_last(self) -> None:
        """Drops the last state of each request, whose token is read again."""
        self._sort()
        for pieces in self._pieces:
            pieces[-1] = pieces[-1][:-1]

    def take(self) -> list[Tensor]:
        """The states ``[new, taps, d]`` of each request since the last time."""
        self._sort()
        assert self._none is not None
        taken = [torch.cat([self._none, *pieces]) for pieces in self._pieces]
        self._pieces = [[] for _ in taken]
        return taken

    def _sort(self) -> None:
        """Parts the calls into requests."""
        calls, self._calls = self._calls, []
        for states, trees, path, num_accepted in calls:
            if len(states) == len(self._pieces) == 1:  # the one text's root, which is text already
                self._pieces[0].append(states)
                continue
            counts = num_accepted.tolist()
            for b, (pieces, mine) in enumerate(zip(self._pieces, trees.slices(), strict=True)):
                if mine.start < mine.stop:
                    pieces.append(states[mine][path[b, : counts[b] + 1].long()])
