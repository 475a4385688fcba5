"""Look-ahead injection, `pass_ext.lookahead_embed`, against plain PyTorch: forward, and forward with the gradient to the
look-ahead rows. `python -m benchmarks.ops.lookahead --help`.

Rows come in groups of eight, four tokens and then look-ahead slots 0 to 3, as in a step that verifies and drafts at once. A
single row is a token for the forward and a slot for the gradient.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import pass_ext
from benchmarks.harness.aims import (
    at_least,
    at_most,
    fastest_of,
    launches,
    never_slower,
    rows_of_ours,
    share_of,
    times_of,
)
from benchmarks.harness.cases import OURS, Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import line_name, lines_of

SLOTS = 4
ROWS = (1, 8, 64, 4096)
VOCABULARY = {576: 49152, 4096: 131072, 8192: 65536}  # by width d; the wide tables hold 1 GiB in bfloat16
SETS = {"cpu": 16, "cuda": 64}
MOST_INPUT_BYTES = 2**28  # of one tensor in all sets; at least four sets
COLD_TABLE_BYTES = 256 * 2**20  # a narrow table comes in several copies, which together outgrow a GPU's L2

CAT = "cat, gather"


# ---- the contenders; `extended`: the table with the slots of all sets after it, `base`: the row where this set's begin ----


def fused(ids: Tensor, table: Tensor, lookahead: Tensor, *rest: Any) -> Tensor:
    """pass_ext."""
    return pass_ext.lookahead_embed(ids, table, lookahead)


def cat_gather(ids: Tensor, table: Tensor, lookahead: Tensor, *rest: Any) -> Tensor:
    """The usual way: embeds all rows, puts the slots after them, picks rows by position."""
    count = ids.numel()
    rows = torch.cat([F.embedding(ids.clamp(min=0), table), lookahead])
    return rows[torch.where(ids >= 0, torch.arange(count, device=ids.device), count - 1 - ids)]


def choose(ids: Tensor, table: Tensor, lookahead: Tensor, *rest: Any) -> Tensor:
    """Embeds from both tables and chooses with a mask."""
    slots = F.embedding((-1 - ids).clamp(min=0), lookahead)
    return torch.where((ids >= 0).unsqueeze(1), F.embedding(ids.clamp(min=0), table), slots)


def overwrite(ids: Tensor, table: Tensor, lookahead: Tensor, *rest: Any) -> Tensor:
    """Embeds all as tokens, then overwrites the slots' rows. On a GPU the mask makes the host wait."""
    out = F.embedding(ids.clamp(min=0), table)
    is_slot = ids < 0
    out[is_slot] = lookahead[-1 - ids[is_slot]]
    return out


def extended_table(ids: Tensor, table: Tensor, lookahead: Tensor, extended: Tensor, base: int, *rest: Any) -> Tensor:
    """One lookup in a copy of the table with the slots after it: a second table, all of which training would write."""
    return F.embedding(torch.where(ids >= 0, ids, base - 1 - ids), extended)


def mapped_ahead(ids: Tensor, table: Tensor, lookahead: Tensor, extended: Tensor, base: int, mapped: Tensor) -> Tensor:
    """One lookup with ids that are mapped before, untimed: the least cost of a lookup by torch."""
    return F.embedding(mapped, extended)


FORWARD = (
    Contender(OURS, fused),
    Contender(CAT, cat_gather),
    Contender("where", choose),
    Contender("overwrite", overwrite, capturable=False),
    Contender("extended table", extended_table),
    Contender("lookup alone", mapped_ahead, same_job=False),
)


def with_gradient(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A forward followed by the gradient to the look-ahead rows; the table is frozen."""

    def forward_backward(ids: Tensor, table: Tensor, lookahead: Tensor, out_gradient: Tensor) -> Tensor:
        return torch.autograd.grad(forward(ids, table, lookahead), lookahead, out_gradient)[0]

    return forward_backward


FORWARD_BACKWARD = tuple(replace(c, function=with_gradient(c.function)) for c in FORWARD[:4])


# ---- the cases ----


def make_plan(options: argparse.Namespace) -> Plan:
    """Every width, number of rows and direction; two small forward and backward cases with --quick."""
    widths = (576,) if options.quick else tuple(VOCABULARY)
    counts = (1, 64) if options.quick else ROWS
    labels = [f"{way}, {n} × {d}" for d in widths for n in counts for way in ("forward", "forward + backward")]
    return Plan(labels, make_cases(options, widths, counts))


def make_cases(options: argparse.Namespace, widths: tuple[int, ...], counts: tuple[int, ...]) -> Iterator[Case]:
    """The cases in the order of the labels; the tables of one width are in memory at a time."""
    dtype, device = DTYPES[options.dtype], torch.device(options.device)
    generator = torch.Generator(device).manual_seed(0)
    for dim in widths:
        vocabulary = 4096 if options.quick else VOCABULARY[dim]
        sets = 4 if options.quick else SETS[options.device]
        table_bytes = vocabulary * dim * dtype.itemsize
        copies = -(-COLD_TABLE_BYTES // table_bytes) if device.type == "cuda" and not options.quick else 1
        lookaheads = torch.randn(sets, SLOTS, dim, generator=generator, device=device).to(dtype)
        extended = [
            torch.empty(vocabulary + sets * SLOTS, dim, dtype=dtype, device=device).uniform_(-1, 1, generator=generator)
            for _ in range(copies)
        ]
        for table in extended:
            table[vocabulary:] = lookaheads.flatten(0, 1)
        tables = [table[:vocabulary] for table in extended]  # so that all contenders read the same memory
        for count in counts:
            inputs, gradients = [], []
            for index in range(max(4, min(sets, MOST_INPUT_BYTES // (count * dim * dtype.itemsize)))):
                ids = make_ids(count, vocabulary, generator, device)
                base = vocabulary + index * SLOTS
                mapped = torch.where(ids >= 0, ids, base - 1 - ids)
                inputs.append((ids, tables[index % copies], lookaheads[index], extended[index % copies], base, mapped))
                rows = ids if count > 1 else torch.full_like(ids, -1)
                out_gradient = torch.randn(count, dim, generator=generator, device=device).to(dtype)
                slots = lookaheads[index].clone().requires_grad_()
                gradients.append((rows, tables[index % copies], slots, out_gradient))
            yield forward_case(count, dim, dtype, inputs)
            yield gradient_case(count, dim, dtype, gradients, generator)


def make_ids(count: int, vocabulary: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Random tokens, with slots 0 to 3 as the last four of every eight rows."""
    ids = torch.randint(vocabulary, (count,), generator=generator, device=device)
    place = torch.arange(count, device=device) % (2 * SLOTS)
    return torch.where(place < SLOTS, ids, SLOTS - 1 - place)


def forward_case(count: int, dim: int, dtype: torch.dtype, inputs: list[tuple[Any, ...]]) -> Case:
    """The forward. Fewest bytes: the ids, each row in use once, and the result."""
    tokens, slots = count_sources(inputs[0][0])
    row_bytes = dim * dtype.itemsize
    moved = count * 8 + (tokens + min(slots, SLOTS)) * row_bytes + count * row_bytes
    labels: dict[str, str | int] = {"pass": "forward", "rows": count, "d": dim}
    return Case(labels, FORWARD, inputs, fewest_bytes=moved)


def gradient_case(
    count: int, dim: int, dtype: torch.dtype, inputs: list[tuple[Any, ...]], generator: torch.Generator
) -> Case:
    """Forward and gradient. Fewest bytes: the forward's, the gradient's rows of slots, and the slots' gradient."""
    ids, table, lookahead, out_gradient = inputs[0]
    tokens, slots = count_sources(ids)
    row_bytes = dim * dtype.itemsize
    moved = 2 * count * 8 + (tokens + min(slots, SLOTS) + count + slots + SLOTS) * row_bytes
    # Sums of small whole numbers are exact in any order and precision, so contenders must agree to the bit.
    whole = torch.randint(-1, 2, out_gradient.shape, generator=generator, device=ids.device).to(dtype)
    labels: dict[str, str | int] = {"pass": "forward + backward", "rows": count, "d": dim}
    check = (ids, table, lookahead, whole)
    return Case(labels, FORWARD_BACKWARD, inputs, fewest_bytes=moved, grad=True, check_inputs=check)


def count_sources(ids: Tensor) -> tuple[int, int]:
    """The numbers of tokens and of slots."""
    slots = int((ids < 0).sum())
    return ids.numel() - slots, slots


# ---- the aims ----


def judge(rows: list[Row]) -> list[Aim]:
    """The aims of the device."""
    on_gpu = any(row["how"] == "graph" for row in rows)
    return judge_gpu(rows) if on_gpu else judge_cpu(rows)


def judge_cpu(rows: list[Row]) -> list[Aim]:
    """At least twice as fast up to 64 rows; never slower."""
    lines = lines_of({"rows": rows})
    few = [line for line in lines if line[0]["labels"]["pass"] == "forward" and line[0]["labels"]["rows"] <= 64]
    aim = "forward, at most 64 rows: at least 2 × faster than the"
    return [
        at_least(f"{aim} usual way (cat, gather)", 2, times_of(few, CAT, name)),
        at_least(f"{aim} fastest plain way", 2, fastest_of(few, name)),
        never_slower(lines, name),
    ]


def judge_gpu(rows: list[Row]) -> list[Aim]:
    """One launch; 4 µs up to 64 rows; 85 % of copy bandwidth at 4096 rows; never slower."""
    forward = [row for row in rows_of_ours(rows, ("graph",)) if row["labels"]["pass"] == "forward"]
    few = [row for row in forward if row["labels"]["rows"] <= 64]
    many = [row for row in forward if row["labels"]["rows"] == 4096 and row["cache"] == "cold"]
    table, lookahead = torch.randn(4096, 576, device="cuda"), torch.randn(SLOTS, 576, device="cuda")
    ids = make_ids(64, 4096, torch.Generator("cuda").manual_seed(0), table.device)
    return [
        launches("one launch per forward", 1, fused, (ids, table, lookahead)),
        at_most("forward, at most 64 rows: at most 4 µs", 4, few, name),
        share_of("forward, 4096 rows, cold: at least 85 % of a copy", "of_copy", 0.85, many, name),
        never_slower(lines_of({"rows": rows}), name),
    ]


def name(line: list[Row]) -> str:
    """A line in a few words."""
    labels = line[0]["labels"]
    return line_name(line, labels["pass"], f"{labels['rows']} × {labels['d']}")


if __name__ == "__main__":
    run("lookahead", parse(__doc__ or ""), make_plan, judge)
