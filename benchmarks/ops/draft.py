"""Drafting, `pass_ext.draft_sample`, against PyTorch: k candidates per row of logits, with their log probabilities.
`python -m benchmarks.ops.draft --help`.

* torch: the usual way. Softmax in float32 (after one sort for top-k and top-p), `multinomial` with or without replacement,
  `topk`; the log probabilities gathered.
* torch, lean: the fastest plain way. Several without replacement: a race, `topk` of probabilities over exponential noise. One,
  or several with replacement: the cumulative sum inverted at uniform numbers. Top: `topk` of the logits as they are, and one
  log-sum-exp. Top-k without a sort, top-p among its tokens alone, min-p from the maximum.

They draw different random numbers, so what is compared is the law, on 16,384 small rows: that the first token has the row's,
and every further one the same as ours; mode "top" and greedy draw nothing, and must give the same logits to the bit. Log
probabilities must be those of the tokens that they stand by.

Logits: laws.py; temperature 0.8. Bytes needed: the rows once.
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
from benchmarks.harness.cases import Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import lines_of
from benchmarks.ops.inputs.distributions import (
    FILTERS,
    TEMPERATURE,
    as_columns,
    lean_law,
    make_logits,
    require,
    require_law,
    require_same_law,
    usual_law,
)

OURS, TORCH, LEAN = "pass_ext", "torch", "torch, lean"
SETS = {"cpu": 16, "cuda": 64}
INPUT_BYTES = {"cpu": 2**28, "cuda": 2**30}  # of logits in all sets; but at least FEWEST_SETS
FEWEST_SETS = 3
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
    law: dict[str, Tensor]  # our sampling parameters
    seeds: Tensor
    positions: Tensor


# ---- the contenders ----


def ours(draft: Draft) -> Drawn:
    """With seeds and positions of each row's own, as a decoder does."""
    spec = draft.spec
    mode = "coupled" if spec.mode == "greedy" else spec.mode
    return pass_ext.draft_sample(
        draft.logits, spec.count, mode=mode, seeds=draft.seeds, positions=draft.positions, **draft.law
    )


def with_log(probs: Tensor, tokens: Tensor) -> Drawn:
    """The tokens and what they are worth."""
    return tokens, probs.gather(1, tokens).log()


def usual_multinomial(draft: Draft) -> Drawn:
    """Softmax and multinomial."""
    probs = usual_law(draft.logits, TEMPERATURE, draft.spec.filters)
    return with_log(probs, torch.multinomial(probs, draft.spec.count, replacement=draft.spec.mode == "with"))


def usual_top(draft: Draft) -> Drawn:
    """The best of the probabilities."""
    probs, tokens = usual_law(draft.logits, TEMPERATURE, draft.spec.filters).topk(draft.spec.count, dim=1)
    return tokens, probs.log()


def greedy(draft: Draft) -> Drawn:
    """The arg-max has all the probability."""
    tokens = draft.logits.argmax(1, keepdim=True)
    return tokens, torch.zeros(tokens.shape, device=tokens.device)


def lean_race(draft: Draft) -> Drawn:
    """An exponential race: the k that come in first. On a CPU `log_` of uniform numbers is far faster than `exponential_`."""
    probs = lean_law(draft.logits, TEMPERATURE, draft.spec.filters)
    return with_log(probs, (probs / torch.rand_like(probs).log_().neg_()).topk(draft.spec.count, dim=1).indices)


def lean_inverse(draft: Draft) -> Drawn:
    """The cumulative sum, inverted at k uniform numbers."""
    probs = lean_law(draft.logits, TEMPERATURE, draft.spec.filters)
    sums = probs.cumsum(1)
    bounds = torch.rand(len(probs), draft.spec.count, device=probs.device) * sums[:, -1:]
    return with_log(probs, torch.searchsorted(sums, bounds, right=True).clamp_(max=probs.shape[1] - 1))


def lean_top(draft: Draft) -> Drawn:
    """The best of the logits, and one log-sum-exp; without filters only."""
    best, tokens = draft.logits.topk(draft.spec.count, dim=1)
    total = (draft.logits.float() / TEMPERATURE).logsumexp(1, keepdim=True)
    return tokens, best.float() / TEMPERATURE - total


def contenders_of(spec: Spec) -> list[Contender]:
    """Ours, the usual way, the lean one. `multinomial` makes the host wait for what it checks."""
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
    """Tokens and log probabilities must belong together on the timed inputs, and have the right law on small ones."""
    for (draft,) in (case.inputs[0], case.inputs[-1]):
        expected = ours(draft)
        for contender in case.contenders:
            require_consistent(contender.name, draft, contender.function(draft), expected)
    spec = case.inputs[0][0].spec
    if spec.mode not in RANKED:
        check_law(spec.mode, spec.count, spec.logits, spec.filters, case.inputs[0][0].logits.device.type)


def require_consistent(name: str, draft: Draft, drawn: Drawn, expected: Drawn) -> None:
    """Tokens inside the vocabulary, with the log probabilities of their logits; without noise, the logits that ours has."""
    spec, (tokens, logprobs) = draft.spec, drawn
    inside = tokens >= 0  # fewer than k are left behind a filter: ours says -1, torch gives tokens of probability 0
    require(inside[:, 0].all() and (tokens < spec.vocabulary).all(), f"{name} draws what is no token")
    if spec.mode != "greedy":
        law = usual_law(draft.logits, TEMPERATURE, spec.filters)
        wanted = law.gather(1, tokens.clamp(min=0)).log().where(inside, -torch.inf)
        same = torch.isclose(logprobs, wanted, rtol=TOLERANCE, atol=TOLERANCE)
        # Equal logits at a filter's edge: torch's sort keeps any of them, ours the first.
        ties = 0.05 if spec.filters != "off" else 0.0
        agree = same | ((logprobs - wanted).abs() < ties) | (inside & (wanted.isinf() | logprobs.isinf()) & bool(ties))
        require(agree.all(), f"{name}: log probabilities are not those of its tokens")
    if spec.mode in RANKED:
        found, known = (draft.logits.gather(1, ids.clamp(min=0)) for ids in (tokens, expected[0]))
        require(torch.equal(found, known), f"{name} and {OURS} do not choose the same")


@functools.cache
def check_law(mode: str, count: int, logits: str, filters: str, device: str) -> None:
    """On many rows of the same logits: the first token's law is the row's, and the others' are the same as ours."""
    spec = Spec(mode, count, ROWS_CHECKED, VOCABULARY_CHECKED, logits, filters)
    generator = torch.Generator(device).manual_seed(3)
    row = make_logits(logits, 1, VOCABULARY_CHECKED, generator)
    draft = make_draft(spec, row.expand(ROWS_CHECKED, VOCABULARY_CHECKED).contiguous(), generator)
    law = usual_law(row[0].double(), TEMPERATURE, filters)
    expected, _ = ours(draft)
    for contender in contenders_of(spec):
        tokens, logprobs = contender.function(draft)
        tokens = tokens.where(logprobs > -torch.inf, VOCABULARY_CHECKED)  # behind the last of the support: nothing
        require_law(f"{contender.name}, {mode}, {filters}", tokens[:, 0], law)
        for place in range(1, count):
            pair = (tokens[:, place], expected[:, place].where(expected[:, place] >= 0, VOCABULARY_CHECKED))
            require_same_law(f"{contender.name} and {OURS}, {mode}, {filters}, {place}", pair, VOCABULARY_CHECKED + 1)


# ---- the cases ----


def specs_for(options: argparse.Namespace) -> list[Spec]:
    """The lines of the table, the most important first."""
    if options.quick:
        specs = [Spec(mode, 4, 2, 4096) for mode in ("without", "with", "top")]
        return [*specs, Spec("coupled", 1, 2, 4096), Spec("without", 4, 2, 4096, filters="top-k 50, top-p 0.9")]
    usual, on_cpu = 128256, options.device == "cpu"
    many, filtered = (8, 1) if on_cpu else (64, 16)  # on a GPU one row is over before the others begin
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
    """The lines of the table, and their cases one by one."""
    specs = specs_for(options)
    labels = [f"{s.mode} {s.count}, {s.rows} × {s.vocabulary}, {s.logits}, filters {s.filters}" for s in specs]
    return Plan(labels, make_cases(options, specs))


def make_cases(options: argparse.Namespace, specs: Sequence[Spec]) -> Iterator[Case]:
    """The cases of the specs."""
    dtype, generator = DTYPES[options.dtype], torch.Generator(options.device).manual_seed(0)
    for spec in specs:
        moved = spec.rows * spec.vocabulary * dtype.itemsize
        most = 4 if options.quick else SETS[options.device]
        sets = max(FEWEST_SETS, min(most, INPUT_BYTES[options.device] // moved))
        inputs = []
        for _ in range(sets):
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
    """Seeds at random, all at one position."""
    device = logits.device
    law: dict[str, Any] = {} if spec.mode == "greedy" else as_columns(spec.rows, device, TEMPERATURE, spec.filters)
    seeds = torch.randint(2**62, (spec.rows,), generator=generator, device=device)
    return Draft(spec, logits, law, seeds, torch.full((spec.rows,), 100, device=device))


# ---- what was promised ----


def judge(rows: list[Row]) -> list[Aim]:
    """The aims of drafting, from these rows alone."""
    on_gpu = any(row["how"] == "graph" for row in rows)
    least, most = (10, 1.5) if on_gpu else (4, 2.0)
    every = lines_of({"rows": rows})
    lines = [line for line in every if line[0]["how"] in ("call", "graph")]
    eager = [line for line in every if line[0]["how"] in ("call", "eager")]  # what waits for a GPU is in no graph
    aims = [
        at_least(f"at least {least} × faster than torch", least, times_of(eager, TORCH, name)),
        at_least(
            f"at least {least} × faster than the fastest plain way", least, fastest_of(lines, (OURS, TORCH, LEAN), name)
        ),
    ]
    cold = [line[0] for line in lines if line[0]["labels"]["filters"] == "off" and line[0]["cache"] == "cold"]
    if on_gpu:
        aim = "cold, at least 256 MB, no filters: at least 80 % of the bandwidth of a copy"
        aims.append(share_of(aim, "of_copy", 0.8, [row for row in cold if row["fewest_bytes"] >= 256 * 10**6], name))
    return [*aims, filters_cost(most, lines, (), name)]


def name(line: list[Row]) -> str:
    """A line of the table in few words."""
    labels, how = line[0]["labels"], line[0]["how"]
    way = "" if how == "call" else f", {how}"
    filters = "" if labels["filters"] == "off" else f", {labels['filters']}"
    sizes = f"{labels['rows']} × {labels['V']}"
    return f"{labels['mode']} {labels['k']}, {sizes}, {labels['logits']}{filters}, {line[0]['cache']}{way}"


if __name__ == "__main__":
    run("draft", parse(__doc__ or ""), make_plan, judge)
