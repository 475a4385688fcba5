"""Counts the bytes that the CUDA kernels of layers with a state move, on the emulator, and writes the page beside a design that
stores a state per node: `python -m benchmarks.kernel_time.state_bytes` (`--check` compares the page and writes nothing).

A step of one request: a binary tree, then the commit of the path to its last node. The emulator runs the heads of one key head
and multiplies, for key heads are equal and share nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional

import pass_ext
from benchmarks import ROOT
from benchmarks.harness.markdown import table
from benchmarks.harness.template import page

sys.path.append(str(ROOT / "tests"))  # at the end: an installed pass_ext stays

import emulator
from emulator.ops import EMULATED

PAGE = Path("benchmarks/results/kernel-time/state-bytes.md")
LAYERS = {  # heads, key heads, dk, dv, form
    "Qwen3-Next": (32, 16, 128, 128, "delta"),
    "Mamba-2": (128, 8, 128, 64, "additive"),
}
ROWS = (1, 4, 16, 64)


class Counts(NamedTuple):
    """Bytes of a layer's step and commit."""

    state: int
    state_loads: int
    other_loads: int
    stores: int
    commit_loads: int
    commit_stores: int
    commit_other_loads: int

    @property
    def states(self) -> int:
        """Of states alone, step and commit."""
        return self.state_loads + self.commit_loads + self.commit_stores

    def per_node(self, rows: int) -> int:
        """The same of a design that stores a state per node."""
        return (2 * rows + 2) * self.state


def parents_of(rows: int) -> list[int]:
    """A binary tree."""
    return [(i - 1) // 2 if i else -1 for i in range(rows)]


def count(layer: str, rows: int) -> Counts:
    """Runs a step and its commit on the emulator."""
    heads, key_heads, dk, dv, form = LAYERS[layer]
    group, random = heads // key_heads, torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    q, k = (functional.normalize(normal(rows, 1, dk), dim=-1).bfloat16() for _ in range(2))
    v, log_decay, beta = normal(rows, group, dv).bfloat16(), -normal(rows, group).abs(), normal(rows, group).sigmoid()
    state = normal(1, group, dk, dv)
    parents, bounds = parents_of(rows), torch.tensor([0, rows], dtype=torch.int32)
    path = [rows - 1]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    with EMULATED.active():
        _, update = pass_ext.layers.recurrent_tree(
            q, k, v, log_decay, beta, state, torch.tensor(parents, dtype=torch.int32), bounds, form=form
        )
        step = emulator.load().count_bytes()
        accepted = torch.tensor([path], dtype=torch.int32), torch.tensor([len(path) - 1], dtype=torch.int32)
        pass_ext.layers.state_commit_([state], [update], bounds, *accepted)
        commit = emulator.load().count_bytes()
    numbers = (
        4 * state.numel(),
        step["states"][0],
        sum(loaded for name, (loaded, _) in step.items() if name != "states"),
        sum(stored for _, stored in step.values()),
        *commit["states[0]"],
        sum(loaded for name, (loaded, _) in commit.items() if name != "states[0]"),
    )
    return Counts(*(number * key_heads for number in numbers))


def line(layer: str, rows: int) -> list[str]:
    """A row of the table, in KiB."""
    counts = count(layer, rows)
    shown = (
        counts.state,
        counts.state_loads,
        counts.other_loads,
        counts.stores,
        counts.commit_loads,
        counts.commit_stores,
        counts.commit_other_loads,
        counts.states,
        counts.per_node(rows),
    )
    ratio = counts.per_node(rows) / counts.states
    return [layer, str(rows), *(f"{number / 1024:,.0f}" for number in shown), f"{ratio:.1f} ×"]


def render() -> str:
    """The page."""
    head = [
        "layer", "nodes", "the state, KiB", "step: states loaded", "all other loads", "stores", "commit: states loaded",
        "states stored", "all other loads", "states, step and commit", "states, per node", "ratio",
    ]  # fmt: skip
    return page(__file__, {}, counts=table(head, [line(layer, rows) for layer in LAYERS for rows in ROWS]))


def main() -> int:
    """Entry point of `python -m benchmarks.kernel_time.state_bytes`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args()
    text = render()
    if not options.check:
        (ROOT / PAGE).write_text(text)
        return 0
    if (ROOT / PAGE).read_text() == text:
        return 0
    print(f"{PAGE} is out of date: run python -m benchmarks.kernel_time.state_bytes", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
