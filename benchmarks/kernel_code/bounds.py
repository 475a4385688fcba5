"""The least time that an H200 needs to scan an accept step's rows, by their bytes and by the instructions of the scan.

    bytes         rows · V · 2 / bandwidth
    instructions  (warps · way in + chunks · work) / (multiprocessors · 4 a clock · clock)

The longer of the two bounds the time from below. What is not in it, and decides at one request: launches, the latency of
loads that wait for each other, and the walk. A GPU run is to contradict these numbers or to confirm them.
"""

from __future__ import annotations

from typing import Any

MULTIPROCESSORS, CLOCK, BANDWIDTH = 132, 1.98e9, 4.3e12
"""Of an H200: its data sheet's, and nine tenths of the 4.8 TB/s that it says: an assumption until a GPU has run this."""
ISSUED = 4
"""Instructions that a multiprocessor begins in a clock, each for a warp of 32 lanes."""
VOCABULARY, BYTES_OF_LOGIT, CHUNK = 128_256, 2, 1_024
SCAN = "scan_rows_kernel<AcceptSource>"
STEPS = ((1, 4), (8, 4), (64, 4), (1, 63))
"""Requests, and drafts of each: steps whose rows are all scanned beforehand."""


def turns_of(rows: int) -> int:
    """How many chunks a warp scans: as scan_blocks_of in cuda/rows.cuh."""
    blocks = rows * -(-VOCABULARY // CHUNK // 4)
    return min(max(blocks // (4 * 6 * MULTIPROCESSORS), 1), 4)


def least_times(result: dict[str, Any]) -> list[tuple[str, int, float, float]]:
    """Per step: its name, how many rows it scans, the microseconds of their bytes, and those of the scan's instructions."""
    scan = result["kernels"].get(SCAN, {}).get("scan", {})
    if not scan:
        return []
    found = []
    for requests, drafts in STEPS:
        rows = requests * (2 * drafts + 1)  # a target row for each node, a draft row for each draft
        chunks = rows * -(-VOCABULARY // CHUNK)
        instructions = chunks * (scan["work"] + scan["way_in"] / turns_of(rows))
        name = f"{requests} {'request' if requests == 1 else 'requests'}, 1 + {drafts}"
        of_bytes = rows * VOCABULARY * BYTES_OF_LOGIT / BANDWIDTH
        found.append((name, rows, 1e6 * of_bytes, 1e6 * instructions / (MULTIPROCESSORS * ISSUED * CLOCK)))
    return found
