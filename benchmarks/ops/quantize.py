"""Keys and values to 8 bits, `pass_ext.layers.quantize_rows`, against the same in PyTorch.
`python -m benchmarks.ops.quantize --help`.

The new keys and values of a layer: all rows of a step, K and V as one tensor.
"""

import argparse
from collections.abc import Iterator

import torch

import pass_ext
from benchmarks.harness.aims import launches, never_slower
from benchmarks.harness.cases import OURS, Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import Aim, Plan
from benchmarks.harness.results import line_name, lines_of
from pass_ext import reference
from pass_ext.ops.quantize import CODE_HEADER

SHAPES = ((8, 3, 64), (8, 8, 128), (256, 8, 128))  # rows, heads, width
TYPES = {"int8": torch.int8, "fp8 e4m3": torch.float8_e4m3fn}


CONTENDERS = (Contender(OURS, pass_ext.layers.quantize_rows), Contender("PyTorch", reference.quantize_rows))


def check_agreement(case: Case) -> None:
    """Raises unless both give the same bits."""
    ours, theirs = (contender(*case.inputs[0]).view(torch.uint8) for contender in case.contenders)
    assert torch.equal(ours, theirs), "quantize_rows has other bits than PyTorch's operations"


# ---- the cases ----


def make_plan(options: argparse.Namespace) -> Plan:
    """Every shape and type; the smallest alone with --quick."""
    shapes = SHAPES[: 1 if options.quick else None]
    labels = [f"{rows} × {heads} × {width}, {name}" for rows, heads, width in shapes for name in TYPES]
    return Plan(labels, make_cases(options, shapes))


def make_cases(options: argparse.Namespace, shapes: tuple[tuple[int, int, int], ...]) -> Iterator[Case]:
    """The cases. Fewest bytes: the numbers once, and the codes."""
    for shape in shapes:
        for name in TYPES:
            yield make_case(*shape, name, torch.device(options.device))


def make_case(rows: int, heads: int, width: int, name: str, device: torch.device) -> Case:
    """A case: keys and values in bf16."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(2, rows, heads, width, generator=generator).to(device, torch.bfloat16)
    moved = numbers.numel() * 2 + numbers.numel() // width * (CODE_HEADER + width)
    labels: dict[str, str | int] = {"rows": rows, "heads": heads, "width": width, "codes": name}
    return Case(labels, CONTENDERS, [(numbers, TYPES[name])], fewest_bytes=moved, check=check_agreement)


# ---- the aims ----


def judge(rows: list[Row]) -> list[Aim]:
    """Never slower than PyTorch's ops; on a GPU one launch."""
    aims = [never_slower(lines_of({"rows": rows}), name)]
    if any(row["how"] == "graph" for row in rows):
        case = make_case(8, 8, 128, "int8", torch.device("cuda"))
        aims.append(launches("one launch", 1, CONTENDERS[0], case.inputs[0]))
    return aims


def name(line: list[Row]) -> str:
    """A line in a few words."""
    labels = line[0]["labels"]
    return line_name(line, f"{labels['rows']} rows, {labels['heads']} × {labels['width']}, {labels['codes']}")


if __name__ == "__main__":
    run("quantize", parse(__doc__ or ""), make_plan, judge)
