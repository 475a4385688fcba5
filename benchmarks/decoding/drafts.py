"""The part with a draft model: its entrants, the rows of their runs, and the aim.

    acceptance rate = accepted tokens / (steps × levels of the largest tree)
    tokens per step = (tokens - 1) / (calls of the model - 1)

The call on the prompt and its token are left out. With rule "longest_branch" the first level comes from the model's own
distribution and counts as accepted, and the call on the prompt gives no token.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.decoding.contenders import GREEDY, PLAIN, Outcome, Setting, method_contender
from benchmarks.decoding.summary import ALL, resampled, summarise_set
from benchmarks.harness.aims import NOT_MEASURED
from benchmarks.harness.cases import Contender, Row
from benchmarks.harness.plan import DTYPES, Aim

DRAFT = "exit:smollm2-135m-instruct"
DECISION = "smollm2-135m-instruct-decision-entropy"
CHAIN = 4
BRANCHING, DEEPER = (3, 2, 1), (3, 2, 1, 1, 1)
LONGEST_BRANCH = "longest_branch"
SPECULATIVE, MCSD = "Speculative", "MCSD"
TARGET, SLICE, MODEL = "target-initialised", "slice", "decision model"
WITHIN = 0.1
"""The most difference of planned and measured tokens per call, as a share of the planned."""


def confident(level: Any) -> torch.Tensor:
    """A decision for each row: the probability of the draft's best token. The row goes on while it exceeds the threshold."""
    return level.logits.float().softmax(-1).amax(-1)


confident.threshold = 0.4  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Drafts:
    """The draft model and the decision model of a run."""

    of: Callable[[Any], Any] | None = None
    """Target -> draft model."""
    decision: Any = None
    names: Mapping[str, str] = field(default_factory=dict)
    """Part -> the name of the model in use."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Part -> the reason why there is no model."""


def load_drafts(options: argparse.Namespace, model: Any, tokenizer: Any) -> Drafts:
    """Loads the models of `--draft` and `--decision`. A default model may be missing, a named one may not."""
    from pass_ext.modules.decision import DecisionModel

    missing: dict[str, str] = {}

    def loaded(part: str, name: str | None, default: str, load: Callable[[str], Any]) -> Any:
        try:
            return load(name or default)
        except (OSError, ValueError) as error:
            if name is not None:
                raise SystemExit(f"--{part.split()[0]} {name}: {error}") from error
            missing[part] = str(error)

    of = loaded("draft model", options.draft, DRAFT, lambda name: _draft(name, options, model, tokenizer))
    decision = loaded("decision model", options.decision, DECISION, DecisionModel.from_pretrained)
    if decision is not None:
        decision = decision.to(model.device)
    models = {
        "draft model": (of, options.draft or DRAFT),
        "decision model": (decision, options.decision or DECISION),
    }
    names = {part: Path(name).name for part, (value, name) in models.items() if value is not None}
    return Drafts(of, decision, names, missing)


def _draft(name: str, options: argparse.Namespace, model: Any, tokenizer: Any) -> Callable[[Any], Any]:
    kind, _, exit_of = name.partition(":")
    if kind == "exit":
        from pass_ext.decoding.models.early_exit import EarlyExitDraft

        how: dict[str, Any] = {"layers": int(exit_of)} if exit_of.isdigit() else {"adapter": exit_of}
        EarlyExitDraft(model, **how)  # refuses now what does not fit the model
        return lambda target: EarlyExitDraft(target, **how)
    from pass_ext.checkpoint import load_checkpoint
    from pass_ext.decoding.models.vocabulary import check_tokenizers

    draft, draft_tokenizer = load_checkpoint(name, DTYPES[options.dtype], weights="dense")
    check_tokenizers(tokenizer, draft_tokenizer)
    draft = draft.to(options.device)
    return lambda target: draft


# ---- the entrants ----


@dataclass(frozen=True)
class Entrant:
    """A method, and the accept rule for sampled texts."""

    kind: str
    """The method's name without its rule, the same in all settings."""
    method: Any
    rule: str = "coupled"
    name: str = ""


def entrants(
    setting: Setting, lookahead: Any, draft: Any, decision: Any, rates: Mapping[int, Any] | None = None
) -> list[Entrant]:
    """The entrants of one setting, Plain first; without a model, those that need it are left out.

    rates: 1 -> hit rates of chains, 0 -> hit rates of trees, for "auto" where the draft has none.
    """
    import pass_ext
    from pass_ext import MultiCandidate, PaSS, Plain, Speculative

    greedy, known = setting.temperature == 0, rates or {}
    in_slots = pass_ext.Tree.from_branching(BRANCHING[: lookahead.num_lookahead])

    def by(*rules: str) -> Sequence[str]:
        """The rules; for greedy texts one of them, because all exact rules accept the same."""
        return ("coupled",) if greedy else rules

    some = [Entrant(PLAIN, Plain())]
    if draft is not None:
        some += [
            Entrant(f"{SPECULATIVE}, chain of {CHAIN}", Speculative(draft, CHAIN), rule)
            for rule in by("rejection", "coupled")
        ]
        some.append(Entrant(f"{SPECULATIVE}, auto", Speculative(draft, "auto", known.get(1))))
        if not greedy:
            with_replacement = MultiCandidate(draft, BRANCHING, replacement=True)
            some += [
                Entrant(f"{MCSD} with replacement", with_replacement, rule)
                for rule in ("rejection_with_replacement", "kseq")
            ]
        some += [Entrant(MCSD, MultiCandidate(draft, BRANCHING), rule) for rule in by("rejection", "traversal")]
        sliced: list[tuple[str, Any]] = [(f" + {SLICE}", MultiCandidate(draft, DEEPER, decision=confident))]
        if decision is not None:
            sliced.append((f" + {SLICE} + {MODEL}", MultiCandidate(draft, DEEPER, decision=decision)))
        some += [Entrant(MCSD + step, method, rule) for step, method in sliced for rule in by("traversal")]
        some += [
            Entrant(f"{MCSD} + {TARGET}{step}", method, LONGEST_BRANCH)
            for step, method in [("", MultiCandidate(draft, BRANCHING)), *sliced]
        ]
        some.append(Entrant(f"{MCSD}, auto", MultiCandidate(draft, "auto", hit_rates=known.get(0))))
    some.append(Entrant("PaSS", PaSS(lookahead)))
    multi = PaSS(lookahead, tree=in_slots)
    some += [Entrant("PaSS + multi-candidate", multi, rule) for rule in by("rejection", "traversal")]
    if draft is not None:
        some.append(Entrant(f"{MCSD} + PaSS", MultiCandidate(draft, BRANCHING, lookahead=PaSS(lookahead))))
    return [replace(entrant, name=_name(entrant, greedy)) for entrant in some]


def _name(entrant: Entrant, greedy: bool) -> str:
    if entrant.kind == PLAIN or (greedy and entrant.rule != LONGEST_BRANCH):
        return entrant.kind
    return f"{entrant.kind} ({entrant.rule})"


def draft_contender(model: Any, entrant: Entrant) -> Contender:
    """The contender of an entrant; it counts the draft model's calls."""
    inner = method_contender(entrant.name, model, entrant.method, rule=entrant.rule)

    def write(ids: Sequence[int], setting: Setting, seed: int, most: int) -> Outcome:
        with watched_drafters() as drafters:
            outcome = inner(ids, setting, seed, most)
        return replace(outcome, draft_calls=drafters[-1].levels_asked if drafters else 0)

    return Contender(entrant.name, write)


@contextmanager
def watched_drafters() -> Iterator[list[Any]]:
    """Collects the drafters of draft models that are made inside. In a batch of one each level is a call."""
    from pass_ext.decoding.drafting import from_draft_model

    drafters: list[Any] = []
    before = from_draft_model.model_drafter

    def watched(*arguments: Any, **named: Any) -> Any:
        drafter = before(*arguments, **named)
        if drafter is not None:
            drafters.append(drafter)
        return drafter

    from_draft_model.model_drafter = watched
    try:
        yield drafters
    finally:
        from_draft_model.model_drafter = before


def plans_of(some: Sequence[Entrant], model: Any) -> dict[str, Any]:
    """Name -> plan, for each entrant with "auto"."""
    from pass_ext.decoding.models.any_model import packed_model
    from pass_ext.decoding.planning.plan import draft_plan

    target, graphs = packed_model(model), model.device.type == "cuda"
    return {
        entrant.name: draft_plan(entrant.method, target, packed_model(entrant.method.draft_model), 1, graphs=graphs)
        for entrant in some
        if entrant.kind.endswith(", auto")
    }


def measured_rates(model: Any, draft: Any, texts: Sequence[Sequence[int]], prompts: Sequence[int]) -> dict[int, Any]:
    """Hit rates of chains and of trees on texts by Plain, as `entrants` takes them. prompts: the lengths of the prompts."""
    import pass_ext

    return {
        key: pass_ext.drafting.calibrate(model, draft, texts, ranks=ranks, prompt_lengths=prompts)
        for key, ranks in ((1, 1), (0, 8))
    }


# ---- rows ----


def summarise_drafts(
    runs: Sequence[Row], some: Sequence[Entrant], profiles: Sequence[Row], plans: Mapping[str, Any]
) -> list[Row]:
    """A row per contender of one setting over all its prompts. profiles: rows of `steps.profile`."""
    from pass_ext.decoding.accept import DECODING_RULES

    summed = {row["contender"]: row for row in summarise_set(runs, ALL)}
    profiled = {row["contender"]: row for row in profiles}
    greedy = runs[0]["setting"] == GREEDY.name
    rows = []
    for entrant in some:
        texts = [run for run in runs if run["contender"] == entrant.name]
        longest = entrant.rule == LONGEST_BRANCH
        row = summed[entrant.name] | {
            "kind": entrant.kind,
            "rule": "greedy" if greedy and not longest else entrant.rule,
            "exactness": DECODING_RULES[entrant.rule].exactness,
            "acceptance_rate": acceptance_rate(texts, longest),
            "tokens_per_step": tokens_per_step(texts, longest),
            "draft_calls_per_step": sum(run["draft_calls"] for run in texts) / _steps(texts),
            "comparable_texts": greedy or entrant.rule == "coupled",
        }
        spread = resampled(texts, partial(tokens_per_step, longest_branch=longest))
        row["tokens_per_step_p10"], row["tokens_per_step_p90"] = spread
        times = profiled.get(entrant.name)
        if times is not None:
            row |= {f"{part}_ms_per_step": times[f"{part}_ms"] for part in ("draft", "verify")}
        plan = plans.get(entrant.name)
        if plan is not None:
            row |= {
                "planned_levels": [plan.tree.depths.count(depth + 1) for depth in range(plan.tree.max_depth)],
                "planned_tokens_per_step": plan.tokens_per_call,
                "planned_speed_up": plan.speedup,
            }
        rows.append(row)
    return rows


def acceptance_rate(runs: Sequence[Row], longest_branch: bool) -> float | None:
    """The acceptance rate above; None without drafts."""
    steps = sum(sum(run["histogram"]) for run in runs)
    levels = max(len(run["histogram"]) for run in runs) - 1
    if not steps or levels < 1:
        return None
    accepted = sum(i * count for run in runs for i, count in enumerate(run["histogram"]))
    return (accepted + steps * longest_branch) / (steps * levels)


def tokens_per_step(runs: Sequence[Row], longest_branch: bool) -> float:
    """The tokens per step above."""
    return sum(run["tokens"] - (not longest_branch) for run in runs) / _steps(runs)


def _steps(runs: Sequence[Row]) -> int:
    return max(1, sum(run["calls"] - 1 for run in runs))


def judge_drafts(rows: Sequence[Row]) -> list[Aim]:
    """The aim: planned tokens per step against measured ones, for greedy texts, as in calibration."""
    aim = f"drafts planned by auto: tokens per step within {WITHIN:.0%} of what was planned, greedy"
    planned = [row for row in rows if row["setting"] == GREEDY.name and "planned_tokens_per_step" in row]
    if not planned:
        return [Aim(aim, None, NOT_MEASURED)]
    some = [row for row in planned if row["planned_levels"]]
    if not some:
        return [Aim(aim, None, "every plan is plain decoding: the planner expects no gain from drafts here")]
    each = (
        f"{row['contender']}: {row['tokens_per_step']:.2f} ({row['tokens_per_step_p10']:.2f}–"
        f"{row['tokens_per_step_p90']:.2f}), planned {row['planned_tokens_per_step']:.2f}"
        for row in some
    )
    return [Aim(aim, all(map(_as_planned, some)), "; ".join([*each, f"{some[0]['prompts']} prompts"]))]


def _as_planned(row: Row) -> bool:
    """True if planned and measured differ by at most WITHIN, or by noise."""
    planned = row["planned_tokens_per_step"]
    return row["tokens_per_step_p90"] >= (1 - WITHIN) * planned and row["tokens_per_step_p10"] <= (1 + WITHIN) * planned
