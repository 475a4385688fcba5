"""The least time that an H200 needs to scan an accept step's rows, by their bytes and by the instructions of the scan.

    bytes         rows · V · 2 / bandwidth
    instructions  (warps · way in + chunks · work) / (multiprocessors · 4 a clock · clock)

The time is at least the longer of the two. The bound leaves out launches, the latency of loads that depend on each other, and
the walk; these decide at one request. A GPU run should confirm these numbers or contradict them.
"""

from __future__ import annotations

from typing import Any

MULTIPROCESSORS, CLOCK, BANDWIDTH = 132, 1.98e9, 4.3e12
"""An H200. The first two are from its data sheet; the bandwidth is assumed, nine tenths of the data sheet's 4.8 TB/s."""
ISSUED = 4
"""Instructions that a multiprocessor starts per clock, each for a warp of 32 lanes."""
VOCABULARY, BYTES_OF_LOGIT, CHUNK = 128_256, 2, 1_024
SCAN = "scan_rows_kernel<AcceptSource>"
STEPS = ((1, 4), (8, 4), (64, 4), (1, 63))
"""(requests, drafts of each request): steps whose rows are all scanned before the walk."""


def turns_of(rows: int) -> int:
    """The number of chunks that a warp scans; scan_blocks_of in cuda/rows_plan.cuh computes the same."""
    blocks = rows * -(-VOCABULARY // CHUNK // 4)
    return min(max(blocks // (4 * 6 * MULTIPROCESSORS), 1), 4)


def least_times(result: dict[str, Any]) -> list[tuple[str, int, float, float]]:
    """(name, rows, µs of the rows' bytes, µs of the scan's instructions) of each step."""
    scan = result["kernels"].get(SCAN, {}).get("scan", {})
    if not scan:
        return []
    times = []
    for requests, drafts in STEPS:
        rows = requests * (2 * drafts + 1)  # a target row for each node, a draft row for each draft
        chunks = rows * -(-VOCABULARY // CHUNK)
        instructions = chunks * (scan["work"] + scan["way_in"] / turns_of(rows))
        name = f"{requests} {'request' if requests == 1 else 'requests'}, 1 + {drafts}"
        byte_time = rows * VOCABULARY * BYTES_OF_LOGIT / BANDWIDTH
        times.append((name, rows, 1e6 * byte_time, 1e6 * instructions / (MULTIPROCESSORS * ISSUED * CLOCK)))
    return times
