"""Drafting, `pass_ext.draft_sample`, against PyTorch: k candidates per row of logits, with their log probabilities.
`python -m benchmarks.ops.draft --help`.

* torch: the obvious program. Softmax in float32 (after one sort for top-k and top-p), `multinomial` with or without
  replacement, `topk`; the log probabilities gathered.
* torch, lean: the fastest plain program. Several without replacement: a race, `topk` of probabilities over exponential noise.
  One, or several with replacement: the cumulative sum inverted at uniform numbers. Top: `topk` of the logits as they are, and
  one log-sum-exp. Top-k without a sort, top-p among its tokens alone, min-p from the maximum.

The contenders draw different random numbers, so distributions are compared, on 16,384 small rows: the first token must have the
row's distribution, and every further token the same shares as ours. Mode "top" and greedy draw nothing and must give the same
logits to the bit. Log probabilities must be those of their tokens.

Logits: distributions.py; temperature 0.8. Fewest bytes: the rows once.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import pass_ext
from benchmarks.harness.aims import at_least, fastest_of, filters_cost, share_of, times_of
from benchmarks.harness.cases import OURS, Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import line_name, lines_of
from benchmarks.ops.contenders.inputs.distributions import (
    FILTERS,
    TEMPERATURE,
    lean_probs,
    make_logits,
    per_row,
    require,
    require_drawn_from,
    require_same_shares,
    sets_of_inputs,
    usual_probs,
)

TORCH, LEAN = "torch", "torch, lean"
RANKED = ("top", "greedy")  # without noise
ROWS_CHECKED, VOCABULARY_CHECKED = 16384, 160
TOLERANCE = 2e-4  # of a log probability: two ways to sum a row in float32

Drawn = tuple[Tensor, Tensor]  # tokens [R, k], log probabilities [R, k]


@dataclass(frozen=True)
class Spec:
    """One line of the table. Mode "greedy" is mode "coupled" at temperature 0."""

    mode: str
    count: int
    rows: int
    vocabulary: int
    logits: str = "peaked"
    filters: str = "off"


@dataclass
class Draft:
    """One set of inputs."""

    spec: Spec
    logits: Tensor  # [R, V]
    sampling: dict[str, Tensor]  # temperature and filters as pass_ext takes them
    seeds: Tensor
    positions: Tensor


# ---- the contenders ----


def ours(draft: Draft) -> Drawn:
    """pass_ext, with seeds and positions per row."""
    spec = draft.spec
    mode = "coupled" if spec.mode == "greedy" else spec.mode
    return pass_ext.draft_sample(
        draft.logits, spec.count, mode=mode, seeds=draft.seeds, positions=draft.positions, **draft.sampling
    )


def with_log(probs: Tensor, tokens: Tensor) -> Drawn:
    """The tokens and their log probabilities."""
    return tokens, probs.gather(1, tokens).log()


def usual_multinomial(draft: Draft) -> Drawn:
    """Softmax and multinomial."""
    probs = usual_probs(draft.logits, TEMPERATURE, draft.spec.filters)
    return with_log(probs, torch.multinomial(probs, draft.spec.count, replacement=draft.spec.mode == "with"))


def usual_top(draft: Draft) -> Drawn:
    """The k largest probabilities."""
    probs, tokens = usual_probs(draft.logits, TEMPERATURE, draft.spec.filters).topk(draft.spec.count, dim=1)
    return tokens, probs.log()


def greedy(draft: Draft) -> Drawn:
    """The arg-max, with probability 1."""
    tokens = draft.logits.argmax(1, keepdim=True)
    return tokens, torch.zeros(tokens.shape, device=tokens.device)


def lean_race(draft: Draft) -> Drawn:
    """An exponential race: its first k tokens. On a CPU `log_` of uniform numbers is far faster than `exponential_`."""
    probs = lean_probs(draft.logits, TEMPERATURE, draft.spec.filters)
    return with_log(probs, (probs / torch.rand_like(probs).log_().neg_()).topk(draft.spec.count, dim=1).indices)


def lean_inverse(draft: Draft) -> Drawn:
    """The cumulative sum, inverted at k uniform numbers."""
    probs = lean_probs(draft.logits, TEMPERATURE, draft.spec.filters)
    sums = probs.cumsum(1)
    bounds = torch.rand(len(probs), draft.spec.count, device=probs.device) * sums[:, -1:]
    return with_log(probs, torch.searchsorted(sums, bounds, right=True).clamp_(max=probs.shape[1] - 1))


def lean_top(draft: Draft) -> Drawn:
    """The k largest logits, and one log-sum-exp; without filters only."""
    best, tokens = draft.logits.topk(draft.spec.count, dim=1)
    total = (draft.logits.float() / TEMPERATURE).logsumexp(1, keepdim=True)
    return tokens, best.float() / TEMPERATURE - total


def contenders_of(spec: Spec) -> list[Contender]:
    """Ours, the obvious program, the lean one. `multinomial` waits for the GPU, so no graph can record it."""
    usual: Callable[[Draft], Drawn] = {"top": usual_top, "greedy": greedy}.get(spec.mode, usual_multinomial)
    contenders = [Contender(OURS, ours), Contender(TORCH, usual, capturable=usual is not usual_multinomial)]
    if spec.mode == "top":
        contenders.append(Contender(LEAN, lean_top))
    elif spec.mode != "greedy":
        is_race = spec.mode == "without" and spec.count > 1
        contenders.append(Contender(LEAN, lean_race if is_race else lean_inverse))
    return contenders


# ---- the checks ----


def check(case: Case) -> None:
    """Checks that tokens and log probabilities agree on the timed inputs, and that distributions are right on small ones."""
    for (draft,) in (case.inputs[0], case.inputs[-1]):
        expected = ours(draft)
        for contender in case.contenders:
            require_consistent(contender.name, draft, contender(draft), expected)
    spec = case.inputs[0][0].spec
    if spec.mode not in RANKED:
        check_distribution(spec.mode, spec.count, spec.logits, spec.filters, case.inputs[0][0].logits.device.type)


def require_consistent(name: str, draft: Draft, drawn: Drawn, expected: Drawn) -> None:
    """Raises unless tokens are in the vocabulary with their log probabilities and, without noise, have the logits of ours."""
    spec, (tokens, logprobs) = draft.spec, drawn
    inside = tokens >= 0  # a filter leaves fewer than k: ours gives -1, torch tokens of probability 0
    require(inside[:, 0].all() and (tokens < spec.vocabulary).all(), f"{name} draws ids outside the vocabulary")
    if spec.mode != "greedy":
        probs = usual_probs(draft.logits, TEMPERATURE, spec.filters)
        exact = probs.gather(1, tokens.clamp(min=0)).log().where(inside, -torch.inf)
        same = torch.isclose(logprobs, exact, rtol=TOLERANCE, atol=TOLERANCE)
        # Of equal logits at a filter's edge torch's sort keeps any, ours the first.
        ties = 0.05 if spec.filters != "off" else 0.0
        agree = same | ((logprobs - exact).abs() < ties) | (inside & (exact.isinf() | logprobs.isinf()) & bool(ties))
        require(agree.all(), f"{name}: log probabilities are not those of its tokens")
    if spec.mode in RANKED:
        logits, expected_logits = (draft.logits.gather(1, ids.clamp(min=0)) for ids in (tokens, expected[0]))
        require(torch.equal(logits, expected_logits), f"{name} and {OURS} choose other tokens")


@functools.cache
def check_distribution(mode: str, count: int, logits: str, filters: str, device: str) -> None:
    """Raises unless, on rows of the same logits, first tokens have their distribution and others the shares of ours."""
    spec = Spec(mode, count, ROWS_CHECKED, VOCABULARY_CHECKED, logits, filters)
    generator = torch.Generator(device).manual_seed(3)
    row = make_logits(logits, 1, VOCABULARY_CHECKED, generator)
    draft = make_draft(spec, row.expand(ROWS_CHECKED, VOCABULARY_CHECKED).contiguous(), generator)
    probs = usual_probs(row[0].double(), TEMPERATURE, filters)
    expected, _ = ours(draft)
    for contender in contenders_of(spec):
        tokens, logprobs = contender(draft)
        tokens = tokens.where(logprobs > -torch.inf, VOCABULARY_CHECKED)  # after the last token of the support
        require_drawn_from(f"{contender.name}, {mode}, {filters}", tokens[:, 0], probs)
        for place in range(1, count):
            pair = (tokens[:, place], expected[:, place].where(expected[:, place] >= 0, VOCABULARY_CHECKED))
            require_same_shares(
                f"{contender.name} and {OURS}, {mode}, {filters}, {place}", pair, VOCABULARY_CHECKED + 1
            )


# ---- the cases ----


def specs_for(options: argparse.Namespace) -> list[Spec]:
    """The lines of the table, the most important first."""
    if options.quick:
        specs = [Spec(mode, 4, 2, 4096) for mode in ("without", "with", "top")]
        return [*specs, Spec("coupled", 1, 2, 4096), Spec("without", 4, 2, 4096, filters="top-k 50, top-p 0.9")]
    usual, on_cpu = 128256, options.device == "cpu"
    many, filtered = (8, 1) if on_cpu else (64, 16)  # on a GPU a single row takes less than a launch
    specs = [Spec("without", count, 1, usual) for count in (4, 1, 16)]
    specs += [Spec("coupled", 1, 1, usual), Spec("greedy", 1, 1, usual)]
    specs += [Spec("without", 4, many, usual), Spec("coupled", 1, many, usual)]
    specs += [Spec(mode, count, 1, usual) for mode in ("with", "top") for count in (4, 16)]
    if not on_cpu:
        specs += [Spec(mode, count, 1024, usual) for mode, count in (("without", 4), ("coupled", 1))]
        specs += [Spec("without", 4, filtered, usual), Spec("coupled", 1, filtered, usual)]
    specs += [Spec("without", 4, filtered, usual, filters=filters) for filters in FILTERS if filters != "off"]
    specs += [Spec("without", 4, filtered, usual, "flat", filters) for filters in FILTERS]
    specs += [Spec("coupled", 1, filtered, usual, filters="top-k 50, top-p 0.9")]
    return specs + [Spec("without", 4, 1, vocabulary) for vocabulary in (32000, 49152, 151936, 262144)]


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan of the lines."""
    specs = specs_for(options)
    labels = [f"{s.mode} {s.count}, {s.rows} × {s.vocabulary}, {s.logits}, filters {s.filters}" for s in specs]
    return Plan(labels, make_cases(options, specs))


def make_cases(options: argparse.Namespace, specs: Sequence[Spec]) -> Iterator[Case]:
    """The cases of the specs."""
    dtype, generator = DTYPES[options.dtype], torch.Generator(options.device).manual_seed(0)
    for spec in specs:
        moved = spec.rows * spec.vocabulary * dtype.itemsize
        inputs = []
        for _ in range(sets_of_inputs(moved, options.device, options.quick)):
            logits = make_logits(spec.logits, spec.rows, spec.vocabulary, generator).to(dtype)
            inputs.append((make_draft(spec, logits, generator),))
        labels: dict[str, str | int] = {
            "mode": spec.mode,
            "k": spec.count,
            "rows": spec.rows,
            "V": spec.vocabulary,
            "logits": spec.logits,
            "filters": spec.filters,
        }
        yield Case(labels, contenders_of(spec), inputs, moved, check=check, reads=True)


def make_draft(spec: Spec, logits: Tensor, generator: torch.Generator) -> Draft:
    """A set of inputs: random seeds, one position."""
    device = logits.device
    sampling: dict[str, Any] = {} if spec.mode == "greedy" else per_row(spec.rows, device, TEMPERATURE, spec.filters)
    seeds = torch.randint(2**62, (spec.rows,), generator=generator, device=device)
    return Draft(spec, logits, sampling, seeds, torch.full((spec.rows,), 100, device=device))


# ---- the aims ----


def judge(rows: list[Row]) -> list[Aim]:
    """The aims of drafting."""
    on_gpu = any(row["how"] == "graph" for row in rows)
    least, most = (10, 1.5) if on_gpu else (4, 2.0)
    every = lines_of({"rows": rows})
    lines = [line for line in every if line[0]["how"] in ("call", "graph")]
    eager = [
        line for line in every if line[0]["how"] in ("call", "eager")
    ]  # a contender that waits for the GPU is in no graph
    aims = [
        at_least(f"at least {least} × faster than torch", least, times_of(eager, TORCH, name)),
        at_least(
            f"at least {least} × faster than the fastest plain way", least, fastest_of(lines, name, (OURS, TORCH, LEAN))
        ),
    ]
    cold = [line[0] for line in lines if line[0]["labels"]["filters"] == "off" and line[0]["cache"] == "cold"]
    if on_gpu:
        aim = "cold, at least 256 MB, no filters: at least 80 % of the bandwidth of a copy"
        aims.append(share_of(aim, "of_copy", 0.8, [row for row in cold if row["fewest_bytes"] >= 256 * 10**6], name))
    return [*aims, filters_cost(most, lines, (), name)]


def name(line: list[Row]) -> str:
    """A line in a few words."""
    labels = line[0]["labels"]
    filters = "" if labels["filters"] == "off" else labels["filters"]
    sizes = f"{labels['rows']} × {labels['V']}"
    return line_name(line, f"{labels['mode']} {labels['k']}", sizes, labels["logits"], filters)


if __name__ == "__main__":
    run("draft", parse(__doc__ or ""), make_plan, judge)
