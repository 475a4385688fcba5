"""The shard ops, `pass_ext.distributed.shard_local`, `shard_combine` and `shard_best`, against PyTorch: one rank's
part of an accept step by rejection, on its columns of the logits. `python -m benchmarks.ops.shard --help`.

A round is a line. "peaks", "masses" and "races" are `shard_local`'s sweeps over the columns; "combine" is `shard_combine`
after "masses", for 8 ranks; "best" drafts 4 tokens of each row with `shard_best`. What ranks exchange, and when gathering is
faster: `python -m benchmarks.pages.shards`.

* torch: peaks: `max` of both rows, the drafted tokens' logits gathered. masses: `exp(z - max)` in float32, summed over slices
  of 8,192. races: argmax of logits over exponential noise. best: `topk` over the same. It has no program for "combine".
* accept_tree: the op on these columns alone, as if they were all: the whole step, for comparison.

Peaks must be equal; masses equal to 1e-5; the races draw other noise, so that their tokens are only checked to be columns.
Fewest bytes: the rows once; for races the target's rows of one node a request.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import pass_ext
from benchmarks.harness.aims import at_least, times_of
from benchmarks.harness.cases import OURS, Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import line_name, lines_of
from benchmarks.ops.contenders.inputs.distributions import require
from pass_ext.ops.shard import SLICE_COLUMNS

TORCH, WHOLE = "torch", "accept_tree"
ROUNDS = ("peaks", "masses", "races", "combine", "best")
NODES, RANKS, DRAFTS = 4, 8, 4


@dataclass
class Step:
    """A step on one rank, and its state after each round."""

    tree: dict[str, Any]
    local: dict[str, Any]
    combine: dict[str, Any]
    states: dict[str, Tensor | None]
    answers: dict[str, Tensor]

    @property
    def columns(self) -> int:
        """Columns of this rank."""
        return int(self.tree["target_logits"].shape[1])


def make_step(requests: int, columns: int, dtype: torch.dtype, device: str) -> Step:
    """Chains of three drafts, all drawn at random."""
    generator, nodes = torch.Generator().manual_seed(0), requests * NODES
    logits = [(torch.randn(nodes, columns, generator=generator) * 3).to(dtype).to(device) for _ in range(2)]
    integers = dict(dtype=torch.int32, device=device)
    tree = dict(
        target_logits=logits[0],
        tokens=torch.randint(0, columns, (nodes,), generator=generator).to(device),
        parents=torch.arange(-1, NODES - 1, **integers).repeat(requests),
        cu_nodes=torch.arange(requests + 1, **integers) * NODES,
        rule="rejection",
        draft_logits=logits[1],
    )
    seeds = torch.arange(requests, device=device)
    local = dict(vocab_start=0, slices=-(-columns // SLICE_COLUMNS), seeds=seeds)
    warm = torch.full((requests,), 0.8, device=device)
    combine = dict(
        max_depth=NODES - 1, vocab_size=columns, temperature=warm, draft_temperature=warm, seeds=seeds, positions=seeds
    )
    step = Step(tree, local, combine, {"peaks": None}, {})
    for this, following in (("peaks", "masses"), ("masses", "races")):
        mine = pass_ext.distributed.shard_local(**tree, **local, round=this, state=step.states[this])
        others = torch.zeros_like(mine)
        if this == "peaks":
            others[:] = torch.tensor([-(1 << 23), -1, -(1 << 23)], **integers)
        step.answers[this] = torch.stack([mine, *[others] * (RANKS - 1)])
        step.states[following], _ = pass_ext.distributed.shard_combine(
            **tree, **combine, answers=step.answers[this], round=this, next=following, state=step.states[this]
        )
    return step


def ours(name: str, step: Step) -> Any:
    """pass_ext."""
    if name == "combine":
        return pass_ext.distributed.shard_combine(
            **step.tree, **step.combine, answers=step.answers["masses"], round="masses", next="races",
            state=step.states["masses"],
        )  # fmt: skip
    if name == "best":
        state = step.states["races"]
        return pass_ext.distributed.shard_best(
            step.tree["target_logits"], state, DRAFTS, mode="without", vocab_start=0, seeds=row_seeds(step),
            positions=row_seeds(step),
        )  # fmt: skip
    return pass_ext.distributed.shard_local(**step.tree, **step.local, round=name, state=step.states[name])


def row_seeds(step: Step) -> Tensor:
    """A seed for each row."""
    return torch.arange(len(step.tree["tokens"]), device=step.tree["tokens"].device)


def plain(name: str, step: Step) -> Any:
    """PyTorch."""
    logits = step.tree["target_logits"], step.tree["draft_logits"]
    if name == "peaks":
        return [(z.max(1), z[:-1].gather(1, step.tree["tokens"][1:, None])) for z in logits]
    if name == "masses":
        wide = [((z.float() - z.max(1, keepdim=True).values.float()) / 0.8).exp() for z in logits]
        return [torch.stack([part.sum(1) for part in z.split(SLICE_COLUMNS, 1)], 1) for z in wide]
    rows = logits[0][:: NODES if name == "races" else 1].float()
    scores = rows / 0.8 - torch.empty_like(rows).exponential_().log()
    return scores.argmax(1) if name == "races" else scores.topk(DRAFTS, 1)


def whole(name: str, step: Step) -> Any:
    """The op on these columns."""
    law = {key: value for key, value in step.combine.items() if key not in ("vocab_size", "max_depth")}
    return pass_ext.accept_tree(**step.tree, max_depth=NODES - 1, **law)


def check(name: str, case: Case) -> None:
    """Raises unless both contenders do the same job."""
    (step,) = case.inputs[0]
    words = ours(name, step)
    if name == "combine":
        require(bool(torch.equal(words[0], step.states["races"])), "the state is another than before")
        return
    floats = words.view(torch.float32)
    expected = plain(name, step)
    if name == "peaks":
        largest = torch.cat([z.values.float() for z, _ in expected])
        require(bool(torch.equal(floats[:, 0], largest)), "the maxima differ")
    elif name == "masses":
        require(torch.allclose(floats, torch.cat(expected), rtol=1e-5), "the masses differ")
    else:
        ids = words[..., 1]
        require(bool(((ids >= 0) & (ids < step.columns)).all()), "a token is no column")


def contenders(name: str) -> list[Contender]:
    """Those of a round; ours first."""
    functions: list[tuple[str, Callable[..., Any]]] = [(OURS, ours)]
    if name != "combine":
        functions.append((TORCH, plain))
    made = [Contender(label, functools.partial(function, name)) for label, function in functions]
    return [*made, Contender(WHOLE, functools.partial(whole, name), same_job=False)]


def make_plan(options: argparse.Namespace) -> Plan:
    """Every round at few and at many rows, of a shard of two slices and of eight."""
    sizes = [(1, 16384)] if options.quick else [(1, 16384), (16, 16384), (1, 65536), (16, 65536)]
    lines = [(name, *size) for size in sizes for name in ROUNDS]
    return Plan(
        [f"{name}, {requests * NODES} rows of {columns}" for name, requests, columns in lines],
        make_cases(options, lines),
    )


def make_cases(options: argparse.Namespace, lines: list[tuple[str, int, int]]) -> Iterator[Case]:
    """The cases."""
    dtype = DTYPES[options.dtype]
    steps = functools.cache(lambda requests, columns: make_step(requests, columns, dtype, options.device))
    for name, requests, columns in lines:
        rows = {"peaks": 2 * NODES, "masses": 2 * NODES, "races": 1, "combine": 0, "best": NODES}[name] * requests
        labels: dict[str, str | int] = {"round": name, "rows": requests * NODES, "columns": columns}
        moved = rows * columns * dtype.itemsize or None
        yield Case(
            labels, contenders(name), [(steps(requests, columns),)], fewest_bytes=moved,
            check=functools.partial(check, name), reads=moved is not None,
        )  # fmt: skip


def judge(rows: list[Row]) -> list[Aim]:
    """Faster than PyTorch in every round."""
    lines = [line for line in lines_of({"rows": rows}) if line[0]["labels"]["round"] != "combine"]
    return [at_least(f"faster than {TORCH}", 1.0, times_of(lines, TORCH, name))]


def name(line: list[Row]) -> str:
    """A line in a few words."""
    labels = line[0]["labels"]
    return line_name(line, labels["round"], f"{labels['rows']} rows of {labels['columns']}")


if __name__ == "__main__":
    run("shard", parse(__doc__ or ""), make_plan, judge)
