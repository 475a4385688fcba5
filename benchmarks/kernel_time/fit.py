"""Microseconds of a step by three constants, fitted to what a GPU has measured.

    draft, accept   launches, thousands of instructions, rounds of loads from L2 or memory
    attention       launches and rounds at the same constants, and the bytes at the read speed that the GPU showed; the
                    instructions run while the bytes come

The constants have the least squares of relative errors over the steps of draft and accept, with the paths of the kernels that
the GPU ran (`PATHS`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.kernel_time.inputs import KEY_HEADS

FITTED = ("draft_sample", "accept")
"""One block's steps in turn. Products keep all warps of a GPU busy, whose time these constants do not describe."""
PATHS = Path("benchmarks/results/kernel-time/measured-paths.json")


class Counts(NamedTuple):
    """What a step's launches do on their longest paths together, and the bytes that attention reads."""

    launches: float
    thousand_instructions: float
    rounds: float
    bytes: float


class Constants(NamedTuple):
    """Microseconds of one of each; ``bytes_per_us`` as the GPU read them."""

    launch: float
    thousand_instructions: float
    round: float
    bytes_per_us: float


def counts_of(step: dict[str, Any]) -> Counts:
    """The counts of a recorded step."""

    def total(*events: str) -> int:
        return sum(launch["path"].get(event, 0) for launch in step["launches"] for event in events)

    read = KEY_HEADS * sum(launch["bytes"] for launch in step["launches"]) if step["kind"] == "attention" else 0
    return Counts(len(step["launches"]), total("instruction") / 1000, total("memory_load", "l2_load"), read)


def save_measured_paths(result: dict[str, Any], root: Path) -> None:
    """Writes the counts of a result's steps: a GPU has measured these kernels."""
    known = [step for step in result["steps"] if step["kind"] in (*FITTED, "attention")]
    steps = [f"  {json.dumps([step['kind'], step['name'], *counts_of(step)])}" for step in known]
    text = "\n".join(
        ["{", f' "commit": {json.dumps(result["commit"])},', ' "steps": [', ",\n".join(steps), " ]", "}", ""]
    )
    (root / PATHS).write_text(text)


def read_measured_paths(root: Path) -> dict[tuple[str, str], Counts]:
    """(kind, name) -> the counts of the kernels that the GPU ran."""
    steps = json.loads((root / PATHS).read_text())["steps"]
    return {(kind, name): Counts(*counts) for kind, name, *counts in steps}


def fit(measured: dict[str, Any], paths: dict[tuple[str, str], Counts]) -> Constants:
    """The constants for a GPU's result, whose kernels had these paths."""
    rows = []
    for step in measured["steps"]:
        key = step["kind"], step["name"]
        if key in paths and step["kind"] in FITTED and "error" not in step:
            rows.append([count / step["warm_us"] for count in paths[key][:3]])
    counts = torch.tensor(rows, dtype=torch.float64)
    found = torch.linalg.lstsq(counts, torch.ones(len(rows), 1, dtype=torch.float64)).solution.flatten()
    launch, thousand_instructions, one_round = found.tolist()
    read = measured["constants"]["read_gb_per_s"] * 1e3
    return Constants(launch, thousand_instructions, one_round, read)


def fitted(kind: str, counts: Counts, constants: Constants) -> float:
    """Microseconds of a step by the constants."""
    time = counts.launches * constants.launch + counts.rounds * constants.round
    if kind == "attention":
        return time + counts.bytes / constants.bytes_per_us
    return time + counts.thousand_instructions * constants.thousand_instructions
