"""Reads the clock stamps of accept steps at batch 1: `python -m benchmarks.gpu.stamps`, in build/variants/stamps.

    microseconds of a phase = its cycles / cycles of the whole step * the step's time on the GPU's own clock

of the block that finishes the last row and walks; the median of SAMPLES steps. A build that finishes each row twice
(build/variants/twice) has the phases "described again" and "finished again".
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

PHASES = ("begun", "scanned", "last of row", "described", "finished", "described again", "finished again", "last of step",
          "divided", "walked")  # fmt: skip
"""``Phase`` of csrc/cuda/rows.cuh; each is stamped where it ends."""
BLOCKS, SAMPLES = 1024, 50


def phases_of(stamps: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Phase -> microseconds of the block that walked, from the stamps (cycles, nanoseconds) of all blocks; 0 is unwritten."""
    blocks = [stamps[first : first + len(PHASES)] for first in range(0, len(stamps), len(PHASES))]
    walked = [block for block in blocks if block[-1][0]]
    if len(walked) != 1:
        raise ValueError(f"one block must have walked, {len(walked)} have")
    (block,) = walked
    begun, ended = block[0], block[-1]
    per_cycle = (ended[1] - begun[1]) / 1e3 / max(1, ended[0] - begun[0])
    found, before = {}, begun[0]
    for name, (cycles, _) in zip(PHASES[1:], block[1:], strict=True):
        if cycles:  # a phase that this step has
            found[name] = (cycles - before) * per_cycle
            before = cycles
    return found


def middle(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Phase -> the median over samples that all have the same phases."""
    return {name: round(median(sample[name] for sample in samples), 2) for name in samples[0]}


def take(library: Any) -> list[tuple[int, int]]:
    """The stamps since the last call."""
    memory = (ctypes.c_uint64 * (2 * BLOCKS * len(PHASES)))()
    if library.pass_ext_take_stamps(memory):
        raise RuntimeError("the stamps cannot be read")
    numbers = list(memory)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def main() -> int:
    """Entry point of `python -m benchmarks.gpu.stamps`."""
    from pathlib import Path

    import torch

    import pass_ext
    from benchmarks.gpu.profiled import ACCEPT, flat_accept, step
    from benchmarks.gpu.variants import check_imported
    from benchmarks.harness import evidence

    check_imported()
    library = ctypes.CDLL(str(Path(pass_ext.__file__).parent / "_C_cuda.so"))
    if not hasattr(library, "pass_ext_take_stamps"):
        print("stamps: this library has none: run it in build/variants/stamps", file=sys.stderr)
        return 1
    with torch.inference_mode():
        calls = {name: step("accept", long) for name, long in ACCEPT.items()}
        calls |= {f"flat, {rule}": flat_accept(1, rule=rule) for rule in ("coupled", "rejection")}
        for name, call in calls.items():
            samples = []
            for _ in range(SAMPLES + 3):
                call()
                torch.cuda.synchronize()
                samples.append(phases_of(take(library)))
            phases = middle(samples[3:])
            print(json.dumps({"case": name, "phases": phases}), flush=True)
            evidence.add_here("stamps", case=name, phases=phases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
