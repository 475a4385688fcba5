"""The card of a decision model: does it rank and foretell acceptance, and what stopping saves; and the picture of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pass_ext.training.common.record import card_of, held_out, table

_READS = {
    "hidden": "the input of the draft's output layer",
    "entropy": "the entropy of the draft's distribution and its ten largest probabilities",
}


def card(name: str, facts: dict[str, Any], picture: str) -> str:
    """The record as Markdown."""
    settings, evaluation = facts["settings"], facts["evaluation"]
    sections = [part(settings, evaluation) for part in (_places, _calibration, _chains)] if evaluation["places"] else []
    return card_of(
        name,
        facts,
        picture,
        opening=f"Decides after each level of drafting whether {facts['draft_model']} drafts on for {facts['base_model']}, "
        f"from {_READS[settings['kind']]}",
        command="train-decision",
        module="DecisionModel",
        effort=f"{facts['seconds'] / 60:.1f} minutes for samples, places, {facts['steps']} steps and the evaluation",
        caption="loss, and what stopping saves",
        sections=sections,
    )


def _label(settings: dict[str, Any]) -> str:
    if settings["temperature"] == 0:
        return "the draft's most probable token is the target's"
    return f"Σ min(p, q) at temperature {settings['temperature']:g}, the chance that a token drawn from the draft is accepted"


def _places(settings: dict[str, Any], evaluation: dict[str, Any]) -> str:
    kinds = [("all", evaluation), *evaluation["by_kind"].items()]
    rows = (
        [kind, str(numbers["places"]), *map(_number, (numbers["accepted"], numbers["auc"], numbers["accuracy"]))]
        for kind, numbers in kinds
    )
    return (
        f"{held_out(evaluation, 'target')} Accepted: {_label(settings)}. AUC: how often a place that is accepted scores above "
        "one that is not. Accuracy: the share of places on whose side of the threshold they belong.\n\n"
        + table(["text", "places", "accepted", "AUC", "accuracy"], rows)
    )


def _calibration(settings: dict[str, Any], evaluation: dict[str, Any]) -> str:
    why = (
        " Both classes weighed the same in training, so where one is rarer scores are no frequencies."
        if settings["kind"] == "entropy"
        else ""
    )
    rows = (
        [
            f"{tenth['from']:.1f}–{tenth['to']:.1f}",
            str(tenth["places"]),
            _number(tenth["score"]),
            _number(tenth["accepted"]),
        ]
        for tenth in evaluation["calibration"]
    )
    return (
        f"## Calibration\n\nMean score and mean acceptance of the places whose score lies in each tenth.{why}\n\n"
        + table(["score", "places", "mean score", "accepted"], rows)
    )


def _chains(settings: dict[str, Any], evaluation: dict[str, Any]) -> str:
    chains = evaluation["chains"]
    drawn = "the most probable tokens" if settings["temperature"] == 0 else "tokens drawn from the draft's distribution"
    outcomes = [(f"always {count}", outcome) for count, outcome in enumerate(chains["fixed"], 1)]
    outcomes += [(f"score > {outcome['threshold']:g}", outcome) for outcome in chains["thresholds"]]
    rows = (
        [
            rule,
            f"{outcome['levels']:.2f}",
            f"{outcome['tokens']:.3f}",
            f"{outcome['levels_saved']:.1%}",
            "—" if outcome["tokens_lost"] is None else f"{outcome['tokens_lost']:.1%}",
            f"{outcome['speed']:.3f}",
        ]
        for rule, outcome in outcomes
    )
    return (
        f"## What stopping saves\n\nChains of {chains['levels']} levels at {chains['count']} held-out places, {drawn}. "
        "A level is drafted while the score of the one before is above the threshold; a decision is worth something "
        "where it loses fewer tokens than a shorter chain with as many levels. Speed: tokens per time of a "
        f"target call, if a draft call costs {chains['draft_cost']:g} of it (an assumption, `--draft-cost`).\n\n"
        + table(["rule", "levels drafted", "tokens accepted", "levels saved", "tokens lost", "speed"], rows)
    )


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.3f}"


def chains_panel(evaluation: dict[str, Any]) -> Callable[[Any], None]:
    """Draws tokens accepted over levels drafted: by thresholds, and by chains of a fixed length."""

    def draw(axes: Any) -> None:
        axes.set(xlabel="levels drafted", ylabel="tokens accepted")
        if not evaluation["places"]:
            return
        chains = evaluation["chains"]
        for rows, color, label in (("fixed", "0.6", "fixed length"), ("thresholds", "tab:blue", "by the decision")):
            points = sorted((outcome["levels"], outcome["tokens"]) for outcome in chains[rows])
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=color, label=label)
        chosen = chains["chosen"]
        axes.plot(chosen["levels"], chosen["tokens"], "o", color="tab:red", label=f"threshold {chosen['threshold']:g}")
        axes.legend(frameon=False)

    return draw
