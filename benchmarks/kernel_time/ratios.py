"""GPU instructions per instruction of the emulator, for the two parts whose counts are known on both sides.

scan    SASS of a warp's path through one chunk of 1,024 logits, without noise / the emulator's instructions up to the hand-over
        to the last block
bounds  SASS of one turn of the loop that draws and bounds the groups of a race, four groups a lane / the emulator's
        instructions: the difference between two vocabularies, one with four more turns. Draws with replacement run the loop
        from the second draw on

Of attention's merge: SASS of one turn of the loop of attention_combine_kernel, in which a thread loads its columns and totals
of nine parts / the emulator's instructions for it: the difference between two numbers of blocks that share a tile of rows.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pass_ext
from benchmarks.kernel_code.bounds import SCAN
from benchmarks.kernel_code.control_flow import ControlFlow
from benchmarks.kernel_code.disassembler import disassemble, list_kernels
from benchmarks.kernel_code.instructions import Instruction, count_classes
from benchmarks.kernel_code.measure import DETAILED
from benchmarks.kernel_time.inputs import HEAD_DIM, Call
from benchmarks.kernel_time.steps import RESIDENT_BLOCKS, Machine, attention_step, emulated

DRAFT_SCAN = "scan_rows_kernel<DraftSource>"
GROUP, THREADS, AT_ONCE = 64, 128, 4
TURNS = 4
"""Turns of the loop by which the two vocabularies differ."""
SHAPES = {"16 rows": "attention_kernel<AttentionShape<bfloat16, 128, 1>>",
          "64 rows": "attention_kernel<AttentionShape<bfloat16, 128, 4>>"}  # fmt: skip
COMBINE = "attention_combine_kernel<bfloat16, 128>"
PARTS_OF_TURN = 9
"""Parts of a thread in a turn of the loop: kCombineAtOnce in cuda/attention_combine.cuh, two loads of 16 bytes each."""
BYTES_OF_TURN = 2 * PARTS_OF_TURN * 16 * THREADS
MEMBERS_OF_TURN = PARTS_OF_TURN * THREADS * 4 // HEAD_DIM


def measure_ratios(library: Path, kernel_code: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Part ("scan", "bounds") -> its instructions on the GPU and on the emulator."""
    scan = kernel_code["kernels"][SCAN]["scan"]
    machine = Machine()
    small, large = TURNS * THREADS * AT_ONCE * GROUP, 2 * TURNS * THREADS * AT_ONCE * GROUP
    to_atomic = _draft_of_one_sure_token(machine, small, 1, "top")["to_atomic"]["instruction"]
    per_turn = (_second_draw(machine, large) - _second_draw(machine, small)) / TURNS
    return {
        "scan": {"gpu": scan["way_in"] + scan["work"], "emulator": to_atomic},
        "bounds": {"gpu": len(_loop_of_bounds(library)), "emulator": per_turn},
    }


class Merge(NamedTuple):
    """How the results of blocks are merged, for one shape of the attention kernel.

    Attributes:
        gpu: instructions of a turn of the merge's loop.
        emulator: the same on the emulator.
        bytes: those that a block loads in a turn.
        in_flight: loads that the kernels have on their way before they use any, of any width and of 16 bytes.
    """

    gpu: float
    emulator: float
    bytes: int
    in_flight: tuple[int, int]


def measure_merges(library: Path) -> dict[str, Merge]:
    """Shape of attention -> its merge."""
    machine = Machine()
    combine = ControlFlow(_instructions_of(library, COMBINE))
    paths = [combine.work_path(loop) for loop in combine.loops()]
    loops = [path for path in paths if sum(i.is_wide_load for i in path) == 2 * PARTS_OF_TURN]
    if not loops:
        raise AssertionError(f"{COMBINE}: no loop with {2 * PARTS_OF_TURN} loads of 16 bytes")
    merges = {}
    for shape, rows in (("16 rows", 4), ("64 rows", 16)):
        few, many = (_merged(machine, rows, turns * MEMBERS_OF_TURN) for turns in (1, 2))
        flows = combine, ControlFlow(_instructions_of(library, SHAPES[shape]))
        in_flight = [max(flow.loads_in_flight(wide=wide)[1] for flow in flows) for wide in (False, True)]
        merges[shape] = Merge(min(map(len, loops)), many - few, BYTES_OF_TURN, (in_flight[0], in_flight[1]))
    return merges


def _merged(machine: Machine, rows: int, members: int) -> float:
    """The emulator's instructions to add the parts of so many blocks that share a tile of rows, two tiles of keys each."""
    step = attention_step("", 128 * members - rows, rows, -1, RESIDENT_BLOCKS * members)
    launch, combine = machine.record(step, most=False)
    if launch["multiplying"] != members:
        raise AssertionError(f"{members} blocks should share the unit, not {launch['multiplying']}")
    return float(combine["whole"]["instruction"])


def _second_draw(machine: Machine, vocabulary: int) -> float:
    """The emulator's instructions for a second draw with replacement; the scan draws noise for the first draw only."""
    single, double = (_draft_of_one_sure_token(machine, vocabulary, draws, "with") for draws in (1, 2))
    return float(double["whole"]["instruction"] - single["whole"]["instruction"])


def _draft_of_one_sure_token(machine: Machine, vocabulary: int, draws: int, mode: str) -> dict[str, Any]:
    logits = torch.zeros(1, vocabulary, dtype=torch.bfloat16)
    logits[0, 5] = 200.0
    arguments = {"logits": logits, "k": draws, "mode": mode, "temperature": 1.0, "seeds": 0, "positions": 0}
    call = Call(
        "draft_sample", "one sure token", pass_ext.draft_sample, arguments,
        lambda result: result[0].flatten().tolist() == [5] * draws,
    )  # fmt: skip
    return machine.record(emulated(call), most=False)[0]


def _instructions_of(library: Path, kernel: str) -> list[Instruction]:
    with tempfile.TemporaryDirectory() as folder:
        kernels = [k for k in list_kernels(library, Path(folder)) if (k.name, k.architecture) == (kernel, DETAILED)]
        (code,) = disassemble(kernels).values()
    return code.instructions


def _loop_of_bounds(library: Path) -> list[Any]:
    """The work path of the loop with most integer arithmetic (random numbers) among loops without barriers, shuffles,
    shared memory or wide loads."""
    flow = ControlFlow(_instructions_of(library, DRAFT_SCAN))
    paths = [flow.work_path(loop) for loop in flow.loops()]
    plain = [path for path in paths if not ({"barrier", "warp", "shared"} & count_classes(path).keys()
                                            or any(i.is_wide_load for i in path))]  # fmt: skip
    return max(plain, key=lambda path: count_classes(path).get("integer", 0))
