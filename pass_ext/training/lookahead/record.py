"""The card of look-ahead embeddings: at which rank their slots hold the right token, and how far candidates get."""

from __future__ import annotations

from typing import Any

from pass_ext.training.common.record import card_of, held_out, table


def card(name: str, facts: dict[str, Any], picture: str) -> str:
    """The record as Markdown."""
    return card_of(
        name,
        facts,
        picture,
        opening=f"Look-ahead embeddings for {facts['base_model']}",
        command="train",
        module="LookaheadEmbedding",
        effort=f"{facts['seconds'] / 60:.0f} minutes of training for {facts['steps']} steps",
        sections=[
            *([_earlier(facts["earlier_runs"])] if "earlier_runs" in facts else []),
            *([_adapters(facts["adapters"])] if "adapters" in facts else []),
            *([_evaluation(facts["evaluation"])] if facts["evaluation"]["places"] else []),
        ],
    )


def _earlier(runs: list[dict[str, Any]]) -> str:
    lines = [f"{run['steps']} steps, {run['date']}, {run['machine']}:\n\n```\n{run['command']}\n```" for run in runs]
    return "\n\n".join(["Before it, the file that `--start` names was made by:", *lines])


def _adapters(adapters: dict[str, Any]) -> str:
    return (
        f"Adapters for the rows of slots: {adapters['parameters']:,} parameters, {adapters['share']:.2%} of the model's, "
        f"{adapters['bytes'] / 1e6:.1f} MB in bfloat16. Rows of tokens have none."
    )


def _overlaps(evaluation: dict[str, Any]) -> list[str]:
    """The overlaps, where the record has them."""
    if "overlap" not in evaluation:
        return []
    shares = ", ".join(f"{share:.3f}" for share in evaluation["overlap"])
    return [
        f"\nMean overlap Σ min(p, q) of a slot's distribution with the model's, at temperature 1, by slot: {shares}."
    ]


def _evaluation(evaluation: dict[str, Any]) -> str:
    tops = list(evaluation["slots"][0])
    accepted = [("all", evaluation["places"], evaluation["accepted"])]
    accepted += [
        (kind, evaluation["places_by_kind"][kind], lengths) for kind, lengths in evaluation["accepted_by_kind"].items()
    ]
    return "\n".join(
        [
            f"{held_out(evaluation)} Share of places where slot i (0-based) held the token "
            "among its first candidates, the tokens before it given:\n",
            table(
                ["slot", *tops],
                ([str(i), *(f"{slot[top]:.3f}" for top in tops)] for i, slot in enumerate(evaluation["slots"])),
            ),
            *_overlaps(evaluation),
            "\nCandidates accepted a step, as a chain and with the best trees of n nodes; a one-pass step gives one token "
            "more:\n",
            table(
                ["text", "places", *evaluation["accepted"]],
                (
                    [kind, str(places), *(f"{value:.2f}" for value in lengths.values())]
                    for kind, places, lengths in accepted
                ),
            ),
        ]
    )
