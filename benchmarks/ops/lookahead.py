"""Look-ahead injection, `pass_ext.lookahead_embed`, against the ways to write it in plain PyTorch: forward, and forward
with the gradient to the look-ahead rows. `python -m benchmarks.ops.lookahead --help`.

Rows come in groups of eight, four tokens and then look-ahead slots 0 to 3, as in a step that verifies and drafts at
once; a single row is a token where only the forward runs, and a slot where the gradient does too.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import pass_ext
from benchmarks.harness.cases import Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import gain, lines_of, noise

SLOTS = 4
ROWS = (1, 8, 64, 4096)
VOCABULARY = {576: 49152, 4096: 131072, 8192: 65536}  # by width d; the wide tables hold 1 GiB in bfloat16
SETS = {"cpu": 16, "cuda": 64}
MOST_INPUT_BYTES = 2**28  # of one kind in all sets together; at least four sets
COLD_TABLE_BYTES = 256 * 2**20  # narrow tables come in several copies on a GPU, so that together they outgrow its L2

OURS = "pass_ext"
CAT = "cat, gather"


# ---- the contenders; `extended` is the table with every set's slots appended, `base` where this set's begin ----


def fused(ids: Tensor, table: Tensor, lookahead: Tensor, *rest: Any) -> Tensor:
    """Ours."""
    return pass_ext.lookahead_embed(ids, table, lookahead)


def cat_gather(ids: Tensor, table: Tensor, lookahead: Tensor, *rest: Any) -> Tensor:
    """The usual way: embed, put the slots behind, pick by position."""
    count = ids.numel()
    rows = torch.cat([F.embedding(ids.clamp(min=0), table), lookahead])
    return rows[torch.where(ids >= 0, torch.arange(count, device=ids.device), count - 1 - ids)]


def choose(ids: Tensor, table: Tensor, lookahead: Tensor, *rest: Any) -> Tensor:
    """Embed from both sources, choose with a mask."""
    slots = F.embedding((-1 - ids).clamp(min=0), lookahead)
    return torch.where((ids >= 0).unsqueeze(1), F.embedding(ids.clamp(min=0), table), slots)


def overwrite(ids: Tensor, table: Tensor, lookahead: Tensor, *rest: Any) -> Tensor:
    """Embed all as tokens, then overwrite the slots' rows. On a GPU the mask makes the host wait."""
    out = F.embedding(ids.clamp(min=0), table)
    is_slot = ids < 0
    out[is_slot] = lookahead[-1 - ids[is_slot]]
    return out


def extended_table(ids: Tensor, table: Tensor, lookahead: Tensor, extended: Tensor, base: int, *rest: Any) -> Tensor:
    """One lookup in a copy of the table with the slots behind it: a second table, and training would touch it all."""
    return F.embedding(torch.where(ids >= 0, ids, base - 1 - ids), extended)


def mapped_ahead(ids: Tensor, table: Tensor, lookahead: Tensor, extended: Tensor, base: int, mapped: Tensor) -> Tensor:
    """The same with ids mapped by somebody else, not timed: what one torch lookup costs at least."""
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
    """The forward, then the gradient to the look-ahead rows; the table is frozen."""

    def forward_backward(ids: Tensor, table: Tensor, lookahead: Tensor, out_gradient: Tensor) -> Tensor:
        return torch.autograd.grad(forward(ids, table, lookahead), lookahead, out_gradient)[0]

    return forward_backward


FORWARD_BACKWARD = tuple(Contender(c.name, with_gradient(c.function), c.capturable) for c in FORWARD[:4])


# ---- the cases ----


def make_plan(options: argparse.Namespace) -> Plan:
    """Every width, number of rows and direction; two small forward and backward cases with --quick."""
    widths = (576,) if options.quick else tuple(VOCABULARY)
    counts = (1, 64) if options.quick else ROWS
    labels = [f"{way}, {n} × {d}" for d in widths for n in counts for way in ("forward", "forward + backward")]
    return Plan(labels, make_cases(options, widths, counts))


def make_cases(options: argparse.Namespace, widths: tuple[int, ...], counts: tuple[int, ...]) -> Iterator[Case]:
    """The cases in the order of the plan's labels; one width's tables are in memory at a time."""
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
        for one in extended:
            one[vocabulary:] = lookaheads.flatten(0, 1)
        tables = [one[:vocabulary] for one in extended]  # ours and the others' read the same memory
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
    """Fewest bytes: the ids, each row that is used once, and the result."""
    tokens, slots = count_sources(inputs[0][0])
    row_bytes = dim * dtype.itemsize
    moved = count * 8 + (tokens + min(slots, SLOTS)) * row_bytes + count * row_bytes
    labels: dict[str, str | int] = {"pass": "forward", "rows": count, "d": dim}
    return Case(labels, FORWARD, inputs, fewest_bytes=moved)


def gradient_case(
    count: int, dim: int, dtype: torch.dtype, inputs: list[tuple[Any, ...]], generator: torch.Generator
) -> Case:
    """Fewest bytes: those of the forward, the gradient's rows that belong to slots, and the slots' gradient."""
    ids, table, lookahead, out_gradient = inputs[0]
    tokens, slots = count_sources(ids)
    row_bytes = dim * dtype.itemsize
    moved = 2 * count * 8 + (tokens + min(slots, SLOTS) + count + slots + SLOTS) * row_bytes
    # Sums of small whole numbers are exact in any order and any precision, so all contenders must agree to the bit.
    whole = torch.randint(-1, 2, out_gradient.shape, generator=generator, device=ids.device).to(dtype)
    labels: dict[str, str | int] = {"pass": "forward + backward", "rows": count, "d": dim}
    check = (ids, table, lookahead, whole)
    return Case(labels, FORWARD_BACKWARD, inputs, fewest_bytes=moved, grad=True, check_inputs=check)


def count_sources(ids: Tensor) -> tuple[int, int]:
    """How many rows are tokens, and how many slots."""
    slots = int((ids < 0).sum())
    return ids.numel() - slots, slots


# ---- what was promised ----


def judge(rows: list[Row]) -> list[Aim]:
    """The aims, from these rows alone."""
    on_gpu = any(row["how"] == "graph" for row in rows)
    return judge_gpu(rows) if on_gpu else judge_cpu(rows)


def judge_cpu(rows: list[Row]) -> list[Aim]:
    """At least twice as fast up to 64 rows; never slower."""
    lines = lines_of({"rows": rows})
    forward = [line for line in lines if line[0]["labels"]["pass"] == "forward"]
    few = [line for line in forward if line[0]["labels"]["rows"] <= 64]
    usual = {name(line): next(row["times_ours"] for row in line if row["contender"] == CAT) for line in few}
    fastest = {name(line): gain(line) or 0.0 for line in few}
    return [
        at_least_twice("forward, at most 64 rows: at least 2 × faster than the usual way (cat, gather)", usual),
        at_least_twice("forward, at most 64 rows: at least 2 × faster than the fastest plain way", fastest),
        never_slower(lines),
    ]


def at_least_twice(aim: str, times: dict[str, float]) -> Aim:
    """Met if the smallest gain is 2 or more."""
    worst = min(times, key=times.__getitem__)
    short = sum(value < 2 for value in times.values())
    return Aim(aim, not short, f"least {times[worst]:.2f} × ({worst}); below 2 × on {short} of {len(times)} lines")


def never_slower(lines: list[list[Row]]) -> Aim:
    """Met if no plain way is faster by more than the noise of its line."""
    slower = [f"{name(line)}: {gain(line):.2f} ×" for line in lines if (gain(line) or 1) < 1 - noise(line)]
    return Aim("never slower than any plain way, beyond the noise", not slower, "; ".join(slower) or "on no line")


def judge_gpu(rows: list[Row]) -> list[Aim]:
    """One launch; 4 µs up to 64 rows; 85 % of copy bandwidth at 4096 rows; never slower."""
    ours = [row for row in rows if row["contender"] == OURS and row["how"] == "graph"]
    forward = [row for row in ours if row["labels"]["pass"] == "forward"]
    few = [row for row in forward if row["labels"]["rows"] <= 64]
    many = [row for row in forward if row["labels"]["rows"] == 4096 and row["cache"] == "cold"]
    launches, slowest = count_launches(), max(few, key=lambda row: row["median_us"])
    one = None if launches is None else launches == 1
    aims = [Aim("one launch per forward", one, f"{launches or 'not seen'} launched")]
    measured = f"at most {slowest['median_us']:.2f} µs ({name([slowest])})"
    aims.append(Aim("forward, at most 64 rows: at most 4 µs", slowest["median_us"] <= 4, measured))
    if many:
        least = min(many, key=lambda row: row["of_copy"])
        measured = f"least {least['of_copy']:.0%} ({name([least])})"
        aims.append(Aim("forward, 4096 rows, cold: at least 85 % of a copy", least["of_copy"] >= 0.85, measured))
    return [*aims, never_slower(lines_of({"rows": rows}))]


def count_launches() -> int | None:
    """Kernels that one forward of 64 rows launches, as the profiler sees them."""
    from benchmarks.harness.gpu_timing import count_kernels

    table, lookahead = torch.randn(4096, 576, device="cuda"), torch.randn(SLOTS, 576, device="cuda")
    ids = make_ids(64, 4096, torch.Generator("cuda").manual_seed(0), table.device)
    with torch.inference_mode():
        return count_kernels(fused, (ids, table, lookahead))


def name(line: list[Row]) -> str:
    """A line of the table in few words."""
    labels, how = line[0]["labels"], line[0]["how"]
    way = "" if how == "call" else f", {how}"
    return f"{labels['pass']}, {labels['rows']} × {labels['d']}, {line[0]['cache']}{way}"


if __name__ == "__main__":
    run("lookahead", parse(__doc__ or ""), make_plan, judge)
