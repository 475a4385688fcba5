"""Records the steps of inputs.py: the real kernels run on the emulator, which records the critical path of each launch.

Attention: the emulator runs one key head on an eighth of the GPU, for key heads are equal and share nothing. In one order, and
to keys and values in 8 bits, all of them on a whole GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ROOT
from benchmarks.kernel_code.bounds import MULTIPROCESSORS
from benchmarks.kernel_time.cycles import CYCLES
from benchmarks.kernel_time.host_code import weights_of
from benchmarks.kernel_time.inputs import (
    ATTENTION,
    KEY_HEADS,
    LATENT_HEADS,
    LATENT_VALUES,
    Call,
    accept_calls,
    attention_call,
    codes_calls,
    draft_calls,
    latent_call,
    layer_calls,
    one_order_calls,
)
from pass_ext import testing

sys.path.append(str(ROOT / "tests"))  # at the end: an installed pass_ext stays

import emulator
from emulator.ops import KERNELS, launching
from emulator.ops.attention import attention_tree

RESIDENT_BLOCKS = 2
"""Blocks of the attention kernel on a multiprocessor: kResidentBlocks of cuda/attention_tile.cuh."""

HEADS_OF_BLOCK = 32
"""Of attention to latents: the rows of GroupShape, cuda/attention_group_tile.cuh."""

NOTHING_ELSE: dict[str, Any] = dict(k_new=None, v_new=None, block_table=None, scale=None, softcap=0.0)
WITHOUT_REACH: dict[str, Any] = NOTHING_ELSE | dict(depths=None, window=-1)


class Step(NamedTuple):
    """A named call on the emulator, and the check of its result."""

    kind: str
    name: str
    run: Callable[[], Any]
    is_right: Callable[[Any], bool]


class Machine:
    """The emulator, set up to record critical paths."""

    def __init__(self) -> None:
        self.module = emulator.load()
        self.weights = weights_of(Path(self.module.__file__))

    def record(self, step: Step) -> list[dict[str, Any]]:
        """The step's launches, each with its path."""
        self.module.record_paths(CYCLES, self.weights)
        try:
            result = step.run()
        finally:
            launches = self.module.taken_paths()
        if not step.is_right(result):
            raise AssertionError(f"{step.kind}, {step.name}: the step's result is not the planned one")
        return [
            {**launch, "path": {event: count for event, count in launch["path"].items() if count}}
            for launch in launches
        ]


def record_all(only: str = "") -> list[dict[str, Any]]:
    """Every step whose name contains ``only``."""
    machine = Machine()
    launching.multiprocessors = lambda: MULTIPROCESSORS
    blocks = RESIDENT_BLOCKS * MULTIPROCESSORS // KEY_HEADS
    steps = [emulated(call) for call in (*draft_calls(), *accept_calls(), *layer_calls())]
    steps += [attention_step(name, *shape, blocks) for name, shape in ATTENTION.items()]
    steps += [latent_step(), *(whole_gpu_step(call) for call in (*one_order_calls(), *codes_calls()))]
    records = []
    for step in steps:
        if only in f"{step.kind}, {step.name}":
            print(f"{step.kind}, {step.name}", flush=True)
            records.append({"kind": step.kind, "name": step.name, "launches": machine.record(step)})
    return records


def emulated(call: Call) -> Step:
    """The call, on the emulator."""

    def run() -> Any:
        with testing.rerouted_backend("emulated", KERNELS).active():
            return call.run()

    return Step(call.kind, call.name, run, call.is_right)


def attention_step(name: str, keys: int, rows: int, window: int, blocks: int) -> Step:
    """A step of attention with one key head on `blocks` blocks, `RESIDENT_BLOCKS` on a multiprocessor."""
    call = attention_call(name, keys, rows, window, key_heads=1)
    grid = dict(blocks=blocks, multiprocessors=blocks // RESIDENT_BLOCKS)
    return Step(call.kind, name, lambda: attention_tree(**call.arguments, **NOTHING_ELSE, **grid), call.is_right)


def latent_step() -> Step:
    """A row of attention to latents: the heads of one tile, on their share of a GPU. Other heads do the same beside them."""
    call = latent_call(1, 1, heads=HEADS_OF_BLOCK)
    rest = {name: value for name, value in call.arguments.items() if name != "latents"}
    latents = call.arguments["latents"]
    caches = dict(k_cache=latents, v_cache=latents[..., :LATENT_VALUES])
    multiprocessors = MULTIPROCESSORS * HEADS_OF_BLOCK // LATENT_HEADS
    run = lambda: attention_tree(**rest, **caches, **WITHOUT_REACH, multiprocessors=multiprocessors)  # noqa: E731
    return Step(call.kind, call.name, run, call.is_right)


def whole_gpu_step(call: Call) -> Step:
    """A step of attention on a whole GPU, all of its key heads."""
    grid = dict(blocks=RESIDENT_BLOCKS * MULTIPROCESSORS, multiprocessors=MULTIPROCESSORS)
    run = lambda: attention_tree(**call.arguments, **NOTHING_ELSE, **grid)  # noqa: E731
    return Step(call.kind, call.name, run, call.is_right)
