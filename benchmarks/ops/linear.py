"""A linear layer for the few rows of a decoding step, `pass_ext.layers.linear_rows`, against `torch.nn.functional.linear` in
the same type, and in float32 with float32 weights; on the CPU beside `linear_packed` with weights in 4 and 8 bits, whose bytes
are fewer. `python -m benchmarks.ops.linear --help`.

The shapes are those of SmolLM2-135M. Warm: the same weight every time, from the cache that holds it. Cold: the caches are
swept, as the layers between two uses of a weight sweep them. `of_read`: the share of the memory's read bandwidth, by the
fewest bytes.
"""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import pass_ext
from benchmarks.harness.aims import NOT_MEASURED, at_least, rows_of_ours, share_of, times_of
from benchmarks.harness.cases import OURS, Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.packed_weights import packed
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import line_name, lines_of
from pass_ext.testing import assert_error_within

SHAPES = ((192, 576), (576, 576), (1536, 576), (576, 1536), (49152, 576))  # out, in
LARGE = ((4096, 4096), (14336, 4096))  # of a model of 8 billion; on a GPU `generate` leaves such weights to PyTorch
ROWS = (1, 4, 8, 16, 24, 32, 64)
PROMPTS = (128, 256)  # rows of a prompt, which `generate` gives to the op too while PyTorch is not faster
LARGEST = "49152 × 576"
PLAIN = "F.linear"
FOUR, EIGHT = "linear_packed, 4 bits", "linear_packed, 8 bits"
FEWER_TIMES = {1: 2.5, 4: 2.2, 8: 2.2}  # rows -> how many times faster than bfloat16 weights 4 bits shall be


class Weights(NamedTuple):
    """One weight in several types, and rows in float32. four, eight: packed, None on a GPU."""

    wide_x: Tensor
    wide: Tensor
    four: Tensor | None
    eight: Tensor | None


def ours(x: Tensor, weight: Tensor, weights: Weights) -> Tensor:
    """pass_ext: reads the weight once, sums in fp32."""
    return pass_ext.layers.linear_rows(x, weight)


def plain(x: Tensor, weight: Tensor, weights: Weights) -> Tensor:
    """PyTorch."""
    return functional.linear(x, weight)


def wide(x: Tensor, weight: Tensor, weights: Weights) -> Tensor:
    """PyTorch in float32: twice the bytes, no conversion."""
    return functional.linear(weights.wide_x, weights.wide)


def four(x: Tensor, weight: Tensor, weights: Weights) -> Tensor:
    """pass_ext with 4 bits for each number, and scale and offset of 32 in float16."""
    assert weights.four is not None
    return pass_ext.layers.linear_packed(x, weights.four, outputs=len(weight))


def eight(x: Tensor, weight: Tensor, weights: Weights) -> Tensor:
    """pass_ext with 8 bits for each number."""
    assert weights.eight is not None
    return pass_ext.layers.linear_packed(x, weights.eight, outputs=len(weight))


CONTENDERS = (
    Contender(OURS, ours),
    Contender(PLAIN, plain),
    Contender("F.linear, float32", wide, same_job=False),
)
PACKED = (Contender(FOUR, four, same_job=False), Contender(EIGHT, eight, same_job=False))


def check_errors(case: Case) -> None:
    """Raises unless ours is as close to float64 as PyTorch is."""
    x, weight, weights = case.inputs[0]
    exact = functional.linear(x.double(), weight.double())
    assert_error_within(ours(*case.inputs[0]), plain(*case.inputs[0]), exact)
    for fewer in (weights.four, weights.eight):
        if fewer is not None:
            own = functional.linear(x.double(), pass_ext.layers.unpack_weight(fewer, len(weight)).double())
            got = pass_ext.layers.linear_packed(x.float(), fewer, outputs=len(weight)).double()
            assert (got - own).norm() < 3e-5 * own.norm()


def make_plan(options: argparse.Namespace) -> Plan:
    """Every shape with every number of rows; one small shape with --quick."""
    shapes = SHAPES + LARGE
    counts = ROWS + PROMPTS if options.device == "cpu" else ROWS
    sizes = [(rows, *shape) for shape in shapes[: 1 if options.quick else None] for rows in counts]
    return Plan([f"{outputs} × {width}, {rows} rows" for rows, outputs, width in sizes], make_cases(options, sizes))


def make_cases(options: argparse.Namespace, sizes: list[tuple[int, int, int]]) -> Iterator[Case]:
    """The cases. Fewest bytes: the weight and the rows read, the results written."""
    dtype = DTYPES[options.dtype]
    for rows, outputs, width in sizes:
        generator = torch.Generator().manual_seed(0)
        wide_x, wide_weight = (torch.randn(n, width, generator=generator).to(options.device) for n in (rows, outputs))
        is_cpu = options.device == "cpu"
        forms = [packed(wide_weight, bits) for bits in (4, 8)] if is_cpu else [None, None]
        inputs = [(wide_x.to(dtype), wide_weight.to(dtype), Weights(wide_x, wide_weight, *forms))]
        labels: dict[str, str | int] = {"weight": f"{outputs} × {width}", "rows": rows}
        moved = (outputs * width + rows * (outputs + width)) * dtype.itemsize
        contenders = CONTENDERS + (PACKED if is_cpu else ())
        yield Case(labels, contenders, inputs, fewest_bytes=moved, check=check_errors, reads=True)


def judge(rows: list[Row]) -> list[Aim]:
    """One row at the memory's speed, further rows nearly free, faster than PyTorch up to 32 rows."""
    lines = lines_of({"rows": rows})
    cold = {
        row["labels"]["rows"]: row
        for row in rows_of_ours(rows)
        if row["cache"] == "cold" and row["labels"]["weight"] == LARGEST
    }
    few = [line for line in lines if line[0]["labels"]["rows"] <= 32]
    aims = [
        share_of("one row at 70 % of the read bandwidth or more", "of_read", 0.7, [cold[1]] if 1 in cold else [], name),
        at_least(f"faster than {PLAIN} up to 32 rows", 1.0, times_of(few, PLAIN, name)),
    ]
    for count, most in ((8, 1.15), (16, 1.5)):
        are_there = count in cold and 1 in cold  # a run that was cut short has some rows only
        times = cold[count]["median_us"] / cold[1]["median_us"] if are_there else None
        measured = NOT_MEASURED if times is None else f"{times:.2f} ×"
        aims.append(
            Aim(f"{count} rows in {most} × the time of one", None if times is None else times <= most, measured)
        )
    return aims + judge_packed(lines)


def judge_packed(lines: list[list[Row]]) -> list[Aim]:
    """Weights in 4 bits against those of 16, and eight rows against one, of weights that no cache holds."""
    large = {f"{outputs} × {width}" for outputs, width in (*LARGE, SHAPES[-1])}
    cold = [line for line in lines if line[0]["cache"] == "cold" and line[0]["labels"]["weight"] in large]
    medians = {
        (line[0]["labels"]["weight"], line[0]["labels"]["rows"], row["contender"]): row["median_us"]
        for line in cold
        for row in line
        if row["median_us"] is not None
    }
    aims = []
    for count, least in FEWER_TIMES.items():
        faster = {
            weight: medians[weight, count, OURS] / medians[weight, count, FOUR]
            for weight in large
            if (weight, count, FOUR) in medians and (weight, count, OURS) in medians
        }
        aims.append(at_least(f"4 bits against 16, {count} rows", least, faster))
    for kind in (FOUR, EIGHT):
        costs = [
            medians[weight, 8, kind] / medians[weight, 1, kind]
            for weight in large
            if (weight, 8, kind) in medians and (weight, 1, kind) in medians
        ]
        measured = f"most {max(costs):.2f} ×" if costs else NOT_MEASURED
        aims.append(Aim(f"{kind}: 8 rows in 1.6 × the time of one", max(costs) <= 1.6 if costs else None, measured))
    return aims


def name(line: list[Row]) -> str:
    """A line in a few words."""
    return line_name(line, line[0]["labels"]["weight"], f"{line[0]['labels']['rows']} rows")


if __name__ == "__main__":
    run("linear", parse(__doc__ or ""), make_plan, judge)
