"""Records the steps of inputs.py: the real kernels run on the emulator, which records the critical path of each launch.

Attention: the emulator runs one key head on an eighth of the GPU, for key heads are equal and share nothing. In one order, and
to keys and values in 8 bits, all of them on a whole GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.kernel_time.cycles import CYCLES
from benchmarks.kernel_time.host_code import weights_of
from benchmarks.kernel_time.inputs import (
    KEY_HEADS,
    LATENT_HEADS,
    Call,
    accept_calls,
    attention_calls,
    codes_calls,
    draft_calls,
    latent_call,
    layer_calls,
    one_order_calls,
)

sys.path.append(str(ROOT / "tests"))  # at the end: an installed pass_ext stays

import emulator
from emulator.ops import EMULATED, on_gpu

MULTIPROCESSORS = 132
"""Of an H100 and an H200."""

RESIDENT_BLOCKS = 2
"""Blocks of the attention kernel on a multiprocessor: kResidentBlocks of cuda/attention_tile.cuh."""

HEADS_OF_BLOCK = 32
"""Of attention to latents: the rows of GroupShape, cuda/attention_group_tile.cuh."""


class Machine:
    """The emulator, set up to record critical paths."""

    def __init__(self) -> None:
        emulator.counts_instructions = True
        self.module = emulator.load()
        self.weights = weights_of(Path(self.module.__file__))

    def record(self, call: Call, multiprocessors: int) -> list[dict[str, Any]]:
        """The call's launches on a GPU of this size, each with its path."""
        gpu = on_gpu(multiprocessors=multiprocessors, resident_blocks=RESIDENT_BLOCKS)
        self.module.record_paths(CYCLES, self.weights)
        try:
            with gpu, EMULATED.active():
                result = call.run()
        finally:
            launches = self.module.taken_paths()
        if not call.is_right(result):
            raise AssertionError(f"{call.kind}, {call.name}: the step's result is not the planned one")
        return [
            {**launch, "path": {event: count for event, count in launch["path"].items() if count}}
            for launch in launches
        ]


def record_all(only: str = "") -> list[dict[str, Any]]:
    """Every step whose name contains ``only``."""
    machine, records = Machine(), []
    for call, multiprocessors in steps():
        if only in f"{call.kind}, {call.name}":
            print(f"{call.kind}, {call.name}", flush=True)
            records.append({"kind": call.kind, "name": call.name, "launches": machine.record(call, multiprocessors)})
    return records


def steps() -> Iterator[tuple[Call, int]]:
    """Each call, and the multiprocessors that it runs on."""
    for call in (*draft_calls(), *accept_calls(), *layer_calls()):
        yield call, MULTIPROCESSORS
    for call in attention_calls(key_heads=1):
        yield call, MULTIPROCESSORS // KEY_HEADS
    # A row of attention to latents: the heads of one tile. Other heads do the same beside them.
    yield latent_call(1, 1, heads=HEADS_OF_BLOCK), MULTIPROCESSORS * HEADS_OF_BLOCK // LATENT_HEADS
    for call in (*one_order_calls(), *codes_calls()):
        yield call, MULTIPROCESSORS
