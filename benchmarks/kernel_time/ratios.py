"""GPU instructions per instruction of the emulator, for the two parts whose counts are known on both sides.

scan    SASS of a warp's path through one chunk of 1,024 logits, without noise / the emulator's instructions up to the hand-over
        to the last block
bounds  SASS of one turn of the loop that draws and bounds the groups of a race, four groups a lane / the emulator's
        instructions: the difference between two vocabularies, one with four more turns. Draws with replacement run the loop
        from the second draw on

Of attention's merge, for each shape: SASS of one turn of its loop, in which a lane loads 16 bytes from 16 places / the
emulator's instructions for it, those for the weights of its parts included: the difference between two numbers of blocks
that share a unit.
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
LOADS_OF_TURN = 16
"""Loads of 16 bytes of a lane in a turn of the merge's loop: merge_slice in cuda/attention_parts.cuh."""
BYTES_OF_TURN = LOADS_OF_TURN * 16 * THREADS


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
    """What one shape of the attention kernel does.

    Attributes:
        gpu: instructions of a turn of the merge's loop.
        emulator: the same on the emulator.
        in_flight: loads that the kernel has on their way before it uses any, of any width and of 16 bytes.
    """

    gpu: float
    emulator: float
    in_flight: tuple[int, int]


def measure_merges(library: Path) -> dict[str, Merge]:
    """Shape of attention -> its merge."""
    machine = Machine()
    merges = {}
    for shape, rows, few, many in (("16 rows", 4, 8, 16), ("64 rows", 16, 4, 8)):
        flow = ControlFlow(_instructions_of(library, SHAPES[shape]))
        paths = [flow.work_path(loop) for loop in flow.loops()]
        loops = [path for path in paths if sum(i.is_wide_load for i in path) == LOADS_OF_TURN]
        if not loops:
            raise AssertionError(f"{SHAPES[shape]}: no loop with {LOADS_OF_TURN} loads of 16 bytes in a row")
        parts = {members: _merged(machine, rows, members) for members in (few, many)}
        lines = 16 * (1 if shape == "16 rows" else 4)  # rows of a part, all of them
        turns = (many - few) * lines * HEAD_DIM * 4 / BYTES_OF_TURN
        in_flight = flow.loads_in_flight(wide=False)[1], flow.loads_in_flight()[1]
        merges[shape] = Merge(min(map(len, loops)), (parts[many] - parts[few]) / turns, in_flight)
    return merges


def _merged(machine: Machine, rows: int, members: int) -> float:
    """The emulator's instructions behind the last product of a unit that so many blocks share, two tiles each."""
    step = attention_step("", 128 * members - rows, rows, -1, RESIDENT_BLOCKS * members)
    (launch,) = machine.record(step, most=False)
    if launch["multiplying"] != members:
        raise AssertionError(f"{members} blocks should share the unit, not {launch['multiplying']}")
    return float(launch["whole"]["instruction"] - launch["to_last_product"]["instruction"])


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
