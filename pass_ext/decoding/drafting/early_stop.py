"""``EarlyFlag``: flags on the device for requests that still draft.

    alive[b, 0] = 1,  alive[b, d] = alive[b, d - 1] and any row of b scored above the threshold for depth d

On a GPU the host reads a flag only if its copy has arrived. It never synchronises for it, and so may draft a level too many.
The levels that count are read once, with the tokens, so the timing of copies never changes the text.
"""

from __future__ import annotations

import torch
from torch import Tensor


class EarlyFlag:
    """The flags of one step.

    Args:
        requests: B.
        levels: the levels of the largest tree.
    """

    def __init__(self, requests: int, levels: int, device: torch.device) -> None:
        self._alive = torch.ones(requests, levels, dtype=torch.int64, device=device)
        self._arriving: list[tuple[int, Tensor, torch.cuda.Event | None]] = []
        self._dead: dict[int, int] = {}  # request -> the first depth at which its flag is 0

    def update(self, above: Tensor, requests: Tensor, depth: int) -> None:
        """Computes which requests draft on at this depth.

        Args:
            above: ``[R]`` bool, True for a row whose children at this depth score above the threshold.
            requests: ``[R]``, the request of each row. A request without rows stops.
        """
        any_above = torch.zeros_like(self._alive[:, 0])
        any_above.scatter_reduce_(0, requests, above.long(), "amax")
        self._alive[:, depth] = self._alive[:, depth - 1] * any_above
        flags, event = self._alive[:, depth], None
        if flags.is_cuda:
            flags = torch.empty(len(flags), dtype=torch.int64, pin_memory=True).copy_(flags, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._arriving.append((depth, flags, event))

    def may_go_on(self, request: int, depth: int) -> bool:
        """False if the host knows already that this request does not draft the children of this depth."""
        while self._arriving and (self._arriving[0][2] is None or self._arriving[0][2].query()):
            known, flags, _ = self._arriving.pop(0)
            for b, alive in enumerate(flags.tolist()):
                if not alive:
                    self._dead.setdefault(b, known)
        return depth < self._dead.get(request, depth + 1)

    def read(self, tokens: Tensor) -> tuple[list[list[int]], list[int]]:
        """``tokens [B, n]`` and the levels that count for each request, in one copy to the host."""
        rows = torch.cat([tokens, self._alive.cumprod(1)], dim=1).tolist()
        return [row[: tokens.shape[1]] for row in rows], [sum(row[tokens.shape[1] :]) for row in rows]
