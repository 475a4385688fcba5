"""``Reports``: a device's reports on their way to the host, which reads them later without a wait for newer work.

On CUDA a report is copied to pinned memory behind the work that wrote it, and an event marks that it has arrived. On the
CPU, with one report at a time, there is no copy: it is read before the next step writes.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class Reports:
    """Reports in the order of their steps.

    Args:
        report: the buffer that each step overwrites.
        most: how many may be on their way at once. If 1, each must be read before the next step.
    """

    def __init__(self, report: Tensor, most: int) -> None:
        self._report = report
        self._free = [report]
        if report.is_cuda or most > 1:
            self._free = [torch.empty(report.shape, dtype=report.dtype, pin_memory=report.is_cuda) for _ in range(most)]
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        """Reports that are sent and not read."""
        return len(self._sent)

    def send(self) -> None:
        """Sends the report as the work launched so far will leave it."""
        buffer = self._free.pop()
        if buffer is not self._report:
            buffer.copy_(self._report, non_blocking=True)
        event = torch.cuda.current_stream(self._report.device).record_event() if self._report.is_cuda else None
        self._sent.append((buffer, event))

    def read(self) -> list[list[int]]:
        """Waits for the oldest report and returns it."""
        buffer, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
        numbers: list[list[int]] = buffer.tolist()
        self._free.append(buffer)
        return numbers
