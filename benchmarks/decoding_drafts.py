"""With a draft model: who is raced in that part of bench_decoding.py, and the rows and the aim that follow from its runs.

    acceptance rate = accepted tokens / (steps × levels of the largest tree)
    tokens per step = (tokens - 1) / (calls of the model - 1), the prompt's own call and its token left out

With rule "longest_branch" the first level, which is the model's own, counts as accepted, and the prompt's call gives no token.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.aims import NOT_MEASURED
from benchmarks.command import DTYPES, Aim
from benchmarks.decoding_contenders import GREEDY, PLAIN, Contender, Outcome, Setting, method_contender
from benchmarks.decoding_summary import ALL, RESAMPLED, Row, summarise_set

DRAFT = "exit:smollm2-135m-instruct"
DECISION = "smollm2-135m-instruct-decision-entropy"
CHAIN = 4
BRANCHING, DEEPER = (3, 2, 1), (3, 2, 1, 1, 1)
LONGEST_BRANCH = "longest_branch"
SPECULATIVE, MCSD = "Speculative", "MCSD"
TARGET, SLICE, MODEL = "target-initialised", "slice", "decision model"
WITHIN = 0.1
"""How far planned and measured tokens per call may lie apart, as a share of what was planned."""


def confident(level: Any) -> torch.Tensor:
    """A decision of one's own: a row goes on while the draft is sure enough of its best token."""
    return level.logits.float().softmax(-1).amax(-1)


confident.threshold = 0.4  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Drafts:
    """What drafts in this run."""

    of: Callable[[Any], Any] | None = None
    """Target -> draft model."""
    decision: Any = None
    names: Mapping[str, str] = field(default_factory=dict)
    """What was taken, for the record."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """What is not there, and why."""


def load_drafts(options: argparse.Namespace, model: Any, tokenizer: Any) -> Drafts:
    """As `--draft` and `--decision` say. What nobody asked for by name may be missing."""
    from pass_ext.modules.decision import DecisionModel

    missing: dict[str, str] = {}

    def loaded(what: str, given: str | None, usual: str, load: Callable[[str], Any]) -> Any:
        try:
            return load(given or usual)
        except (OSError, ValueError) as error:
            if given is not None:
                raise SystemExit(f"--{what.split()[0]} {given}: {error}") from error
            missing[what] = str(error)

    of = loaded("draft model", options.draft, DRAFT, lambda name: _draft(name, options, model, tokenizer))
    decision = loaded("decision model", options.decision, DECISION, DecisionModel.from_pretrained)
    if decision is not None:
        decision = decision.to(model.device)
    found = {
        "draft model": (of, options.draft or DRAFT),
        "decision model": (decision, options.decision or DECISION),
    }
    names = {what: Path(name).name for what, (value, name) in found.items() if value is not None}
    return Drafts(of, decision, names, missing)


def _draft(name: str, options: argparse.Namespace, model: Any, tokenizer: Any) -> Callable[[Any], Any]:
    kind, _, what = name.partition(":")
    if kind == "exit":
        from pass_ext.decoding.models.early_exit_draft import EarlyExitDraft

        how: dict[str, Any] = {"layers": int(what)} if what.isdigit() else {"adapter": what}
        EarlyExitDraft(model, **how)  # what does not fit is refused now
        return lambda target: EarlyExitDraft(target, **how)
    from pass_ext.checkpoint import load_checkpoint
    from pass_ext.decoding.models.vocabulary import check_tokenizers

    draft, its_tokenizer = load_checkpoint(name, DTYPES[options.dtype])
    check_tokenizers(tokenizer, its_tokenizer)
    draft = draft.to(options.device)
    return lambda target: draft


# ---- who is raced ----


@dataclass(frozen=True)
class Entrant:
    """A method, and how its drafts are judged where tokens are sampled."""

    kind: str
    """What it adds to what: the same in all settings."""
    method: Any
    rule: str = "coupled"
    name: str = ""


def entrants(
    setting: Setting, lookahead: Any, draft: Any, decision: Any, rates: Mapping[int, Any] | None = None
) -> list[Entrant]:
    """All of one setting, Plain first; those that need what is None are left out.

    rates: number of candidates of one parent (1: chains) -> hit rates for "auto", where the draft brings none.
    """
    import pass_ext
    from pass_ext import MultiCandidate, PaSS, Plain, Speculative

    greedy, known = setting.temperature == 0, rates or {}
    in_slots = pass_ext.Tree.from_branching(BRANCHING[: lookahead.num_lookahead])

    def by(*rules: str) -> Sequence[str]:
        """Greedy candidates are the draft's best, whatever the exact rule."""
        return ("coupled",) if greedy else rules

    found = [Entrant(PLAIN, Plain())]
    if draft is not None:
        found += [
            Entrant(f"{SPECULATIVE}, chain of {CHAIN}", Speculative(draft, CHAIN), rule)
            for rule in by("rejection", "coupled")
        ]
        found.append(Entrant(f"{SPECULATIVE}, auto", Speculative(draft, "auto", known.get(1))))
        if not greedy:
            drawn_again = MultiCandidate(draft, BRANCHING, replacement=True)
            found += [
                Entrant(f"{MCSD} with replacement", drawn_again, rule)
                for rule in ("rejection_with_replacement", "kseq")
            ]
        found += [Entrant(MCSD, MultiCandidate(draft, BRANCHING), rule) for rule in by("rejection", "traversal")]
        sliced: list[tuple[str, Any]] = [(f" + {SLICE}", MultiCandidate(draft, DEEPER, decision=confident))]
        if decision is not None:
            sliced.append((f" + {SLICE} + {MODEL}", MultiCandidate(draft, DEEPER, decision=decision)))
        found += [Entrant(MCSD + step, method, rule) for step, method in sliced for rule in by("traversal")]
        found += [
            Entrant(f"{MCSD} + {TARGET}{step}", method, LONGEST_BRANCH)
            for step, method in [("", MultiCandidate(draft, BRANCHING)), *sliced]
        ]
        found.append(Entrant(f"{MCSD}, auto", MultiCandidate(draft, "auto", hit_rates=known.get(0))))
    found.append(Entrant("PaSS", PaSS(lookahead)))
    multi = PaSS(lookahead, tree=in_slots)
    found += [Entrant("PaSS + multi-candidate", multi, rule) for rule in by("rejection", "traversal")]
    if draft is not None:
        found.append(Entrant(f"{MCSD} + PaSS", MultiCandidate(draft, BRANCHING, lookahead=PaSS(lookahead))))
    return [replace(one, name=_name(one, greedy)) for one in found]


def _name(one: Entrant, greedy: bool) -> str:
    if one.kind == PLAIN or (greedy and one.rule != LONGEST_BRANCH):
        return one.kind
    return f"{one.kind} ({one.rule})"


def draft_contender(model: Any, one: Entrant) -> Contender:
    """`method_contender`, with the draft's calls counted."""
    inner = method_contender(one.name, model, one.method, rule=one.rule)

    def write(ids: Sequence[int], setting: Setting, seed: int, most: int) -> Outcome:
        with watched_drafters() as made:
            outcome = inner.write(ids, setting, seed, most)
        return replace(outcome, draft_calls=made[-1].levels_asked if made else 0)

    return Contender(one.name, write)


@contextmanager
def watched_drafters() -> Iterator[list[Any]]:
    """The drafters of draft models that are made meanwhile: of a batch of one each level is a call."""
    from pass_ext.decoding.drafting import from_draft_model

    made: list[Any] = []
    before = from_draft_model.model_drafter

    def watched(*arguments: Any, **named: Any) -> Any:
        drafter = before(*arguments, **named)
        if drafter is not None:
            made.append(drafter)
        return drafter

    from_draft_model.model_drafter = watched
    try:
        yield made
    finally:
        from_draft_model.model_drafter = before


def plans_of(some: Sequence[Entrant], model: Any) -> dict[str, Any]:
    """Name -> the plan of each that plans ("auto")."""
    from pass_ext.decoding.models.adapt import packed_model
    from pass_ext.decoding.planning.for_draft_model import draft_plan

    target, graphs = packed_model(model), model.device.type == "cuda"
    return {
        one.name: draft_plan(one.method, target, packed_model(one.method.draft_model), 1, graphs=graphs)
        for one in some
        if one.kind.endswith(", auto")
    }


def measured_rates(model: Any, draft: Any, texts: Sequence[Sequence[int]], prompts: Sequence[int]) -> dict[int, Any]:
    """Hit rates as `entrants` takes them, of texts that Plain wrote: of chains, and of trees. prompts: their lengths."""
    import pass_ext

    return {
        key: pass_ext.calibrate(model, draft, texts, ranks=ranks, prompt_lengths=prompts)
        for key, ranks in ((1, 1), (0, 8))
    }


# ---- rows ----


def summarise_drafts(
    runs: Sequence[Row], some: Sequence[Entrant], profiles: Sequence[Row], plans: Mapping[str, Any]
) -> list[Row]:
    """A row per contender of one setting, all its prompts together. profiles: as `decoding_steps.profile` gives them."""
    from pass_ext.decoding.rules import DECODING_RULES

    summed = {row["contender"]: row for row in summarise_set(runs, ALL)}
    profiled = {row["contender"]: row for row in profiles}
    greedy = runs[0]["setting"] == GREEDY.name
    rows = []
    for one in some:
        own = [run for run in runs if run["contender"] == one.name]
        waits = one.rule == LONGEST_BRANCH
        row = summed[one.name] | {
            "kind": one.kind,
            "rule": "greedy" if greedy and not waits else one.rule,
            "exactness": DECODING_RULES[one.rule].exactness,
            "acceptance_rate": acceptance_rate(own, waits),
            "tokens_per_step": tokens_per_step(own, waits),
            "draft_calls_per_step": sum(run["draft_calls"] for run in own) / _steps(own),
            "comparable_texts": greedy or one.rule == "coupled",
        }
        row["tokens_per_step_p10"], row["tokens_per_step_p90"] = _spread(own, waits)
        taken = profiled.get(one.name)
        if taken is not None:
            row |= {f"{part}_ms_per_step": taken[f"{part}_ms"] for part in ("draft", "verify")}
        plan = plans.get(one.name)
        if plan is not None:
            row |= {
                "planned_levels": [plan.tree.depths.count(depth + 1) for depth in range(plan.tree.max_depth)],
                "planned_tokens_per_step": plan.tokens_per_call,
                "planned_speed_up": plan.speedup,
            }
        rows.append(row)
    return rows


def acceptance_rate(runs: Sequence[Row], first_is_the_models: bool) -> float | None:
    """As said at the top; None where nothing was drafted."""
    steps = sum(sum(run["histogram"]) for run in runs)
    levels = max(len(run["histogram"]) for run in runs) - 1
    if not steps or levels < 1:
        return None
    accepted = sum(i * count for run in runs for i, count in enumerate(run["histogram"]))
    return (accepted + steps * first_is_the_models) / (steps * levels)


def tokens_per_step(runs: Sequence[Row], first_is_the_models: bool) -> float:
    """As said at the top."""
    return sum(run["tokens"] - (not first_is_the_models) for run in runs) / _steps(runs)


def _steps(runs: Sequence[Row]) -> int:
    return max(1, sum(run["calls"] - 1 for run in runs))


def _spread(runs: Sequence[Row], first_is_the_models: bool) -> tuple[float, float]:
    """10th and 90th percentile over prompts drawn with replacement."""
    draw = random.Random(0)
    drawn = sorted(tokens_per_step(draw.choices(runs, k=len(runs)), first_is_the_models) for _ in range(RESAMPLED))
    return drawn[RESAMPLED // 10], drawn[RESAMPLED * 9 // 10]


def judge_drafts(rows: Sequence[Row]) -> list[Aim]:
    """Planned against measured, where drafting follows a plan and tokens are the model's best, as in calibration."""
    aim = f"drafts planned by auto: tokens per step within {WITHIN:.0%} of what was planned, greedy"
    own = [row for row in rows if row["setting"] == GREEDY.name and "planned_tokens_per_step" in row]
    if not own:
        return [Aim(aim, None, NOT_MEASURED)]
    some = [row for row in own if row["planned_levels"]]
    if not some:
        return [Aim(aim, None, "every plan is plain decoding: no drafts are expected to pay here")]
    each = (
        f"{row['contender']}: {row['tokens_per_step']:.2f} ({row['tokens_per_step_p10']:.2f}–"
        f"{row['tokens_per_step_p90']:.2f}), planned {row['planned_tokens_per_step']:.2f}"
        for row in some
    )
    return [Aim(aim, all(map(_as_planned, some)), "; ".join([*each, f"{some[0]['prompts']} prompts"]))]


def _as_planned(row: Row) -> bool:
    """A difference within the noise fails no aim."""
    planned = row["planned_tokens_per_step"]
    return row["tokens_per_step_p90"] >= (1 - WITHIN) * planned and row["tokens_per_step_p10"] <= (1 + WITHIN) * planned
