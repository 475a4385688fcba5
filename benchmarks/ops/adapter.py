"""Gated adapters, `pass_ext.layers.adapter_rows_`: the product of low rank that rows of look-ahead slots add to a linear
layer's output, against the lines that a hook would have in PyTorch, and beside the layer.
`python -m benchmarks.ops.adapter --help`.

The layers are those of SmolLM2-135M and of Llama 3 8B; of the rows of a step, the last ones are slots. All slots share an
adapter. `the layer alone` is the linear layer on all rows: what the adapter's time is to be compared with.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

import pass_ext
from benchmarks.harness.aims import NOT_MEASURED, at_least, launches, times_of
from benchmarks.harness.cases import OURS, Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import line_name, lines_of
from pass_ext.testing import assert_error_within

LAYERS = {"135M q": (576, 576), "135M down": (1536, 576), "8B q": (4096, 4096), "8B down": (14336, 4096)}  # in, out
ROWS = ((8, 0), (8, 4), (16, 8), (32, 24))  # of a step, of these slots
RANKS = (8, 64)
PLAIN, LAYER = "PyTorch", "the layer alone"
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def ours(out: Tensor, x: Tensor, ids: Tensor, down: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """pass_ext: both products in one call, in place."""
    return pass_ext.layers.adapter_rows_(out, x, ids, down, up)


def plain(out: Tensor, x: Tensor, ids: Tensor, down: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """Both products of all rows, which needs no synchronisation, and those of tokens times 0."""
    product = functional.linear(x, down[0]) @ up[0]
    return out + torch.where((ids < 0)[:, None], product, 0)


def layer(out: Tensor, x: Tensor, ids: Tensor, down: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """The linear layer, as decoding computes it."""
    return functional.linear(x, weight) if x.is_cuda else pass_ext.layers.linear_rows(x, weight)


CONTENDERS = (
    Contender(OURS, ours),
    Contender(PLAIN, plain),
    Contender(LAYER, layer, same_job=False),
)


def check_errors(case: Case) -> None:
    """Raises unless ours is as close to float64 as PyTorch's lines are."""
    inputs: Inputs = case.inputs[0]  # type: ignore[assignment]
    out, x, ids, down, up, weight = inputs
    wide = (out.double(), x.double(), ids, down.double(), up.double(), weight)
    assert_error_within(ours(out.clone(), *inputs[1:]), plain(*inputs), plain(*wide))


def make_plan(options: argparse.Namespace) -> Plan:
    """Every layer with every number of rows and rank; the first of each with --quick."""
    layers = tuple(LAYERS)[: 1 if options.quick else None]
    rows = ROWS[1:2] if options.quick else ROWS
    sizes = [
        (name, *counts, rank) for name in layers for counts in rows for rank in RANKS[: 1 if options.quick else None]
    ]
    labels = [f"{name}, rank {rank}, {count} rows, {slots} slots" for name, count, slots, rank in sizes]
    return Plan(labels, make_cases(options, sizes))


def make_cases(options: argparse.Namespace, sizes: list[tuple[str, int, int, int]]) -> Iterator[Case]:
    """The cases. Fewest bytes: both sides of the adapter, and the rows of slots read and written; none without slots."""
    dtype, device = DTYPES[options.dtype], torch.device(options.device)
    for name, rows, slots, rank in sizes:
        generator = torch.Generator().manual_seed(0)
        width, outputs = LAYERS[name]
        shapes = (rows, outputs), (rows, width), (1, rank, width), (1, rank, outputs), (outputs, width)
        out, x, down, up, weight = (torch.randn(s, generator=generator).mul_(0.1).to(dtype).to(device) for s in shapes)
        ids = torch.arange(rows, device=device)
        ids[rows - slots :] = -1 - torch.arange(slots, device=device) % 4
        labels: dict[str, str | int] = {"layer": name, "rank": rank, "rows": rows, "slots": slots}
        moved = (rank * (width + outputs) + slots * (width + 2 * outputs)) * dtype.itemsize if slots else 8 * rows
        inputs = [(out, x, ids, down, up, weight)]
        yield Case(labels, CONTENDERS, inputs, fewest_bytes=moved, check=check_errors)


def judge(rows: list[Row]) -> list[Aim]:
    """Faster than PyTorch, and a small part of the layer's time with 4 slots; on a GPU one launch."""
    lines = lines_of({"rows": rows})
    aims = [at_least(f"faster than {PLAIN}", 1.0, times_of(lines, PLAIN, name))]
    shares = [
        times[OURS] / times[LAYER]
        for line in lines
        if (line[0]["labels"]["slots"], line[0]["labels"]["rank"]) == (4, 8)
        for times in [{row["contender"]: row["median_us"] for row in line}]
    ]
    worst = max(shares, default=None)
    measured = NOT_MEASURED if worst is None else f"at most {worst:.2f} ×"
    aims.append(Aim("rank 8, 4 slots: 0.05 × the layer's time", None if worst is None else worst <= 0.05, measured))
    if any(row["how"] == "graph" for row in rows):
        case = [
            torch.randn(8, 64, device="cuda"),
            torch.randn(8, 64, device="cuda"),
            torch.arange(-4, 4, device="cuda"),
        ]
        sides = [torch.randn(1, 8, 64, device="cuda") for _ in range(2)]
        aims.append(launches("one launch", 1, pass_ext.layers.adapter_rows_, (*case, *sides)))
    return aims


def name(line: list[Row]) -> str:
    """A line in a few words."""
    labels = line[0]["labels"]
    return line_name(
        line, labels["layer"], f"rank {labels['rank']}", f"{labels['rows']} rows", f"{labels['slots']} slots"
    )


if __name__ == "__main__":
    run("adapter", parse(__doc__ or ""), make_plan, judge)
