"""The card of an exit adapter: its hit rates, the chains that the model accepts, and every exit that was tried."""

from __future__ import annotations

from typing import Any

from pass_ext.training.common.record import card_of, held_out, table


def card(name: str, facts: dict[str, Any], picture: str) -> str:
    """The record as Markdown."""
    evaluation, layers, exits = facts["evaluation"], facts["layers"], facts["exits"]
    return card_of(
        name,
        facts,
        picture,
        opening=f"Exit adapter for {facts['base_model']}",
        command="train-draft",
        module="ExitAdapter",
        effort=f"{facts['seconds'] / 60:.0f} minutes of training, {facts['steps']} steps for each of {len(exits)} exits",
        sections=[_evaluation(evaluation, layers), _exits(exits, layers)] if evaluation["places"] else [],
    )


def _evaluation(evaluation: dict[str, Any], layers: int) -> str:
    rates = evaluation["hit_rates"]
    chains = [("all", evaluation["places"], evaluation["tops"]["top 1"], evaluation["chain"])]
    chains += [
        (kind, evaluation["places_by_kind"][kind], evaluation["top1_by_kind"][kind], chain)
        for kind, chain in evaluation["chain_by_kind"].items()
    ]
    return "\n".join(
        [
            f"{held_out(evaluation)} The draft leaves the model behind layer {layers}. The chance that the model's next token "
            "was the draft's of rank r, where the tokens before it had been within the ranks:\n",
            table(
                ["depth", *(f"rank {rank}" for rank in range(len(rates[0])))],
                ([str(depth), *(f"{rate:.3f}" for rate in line)] for depth, line in enumerate(rates, 1)),
            ),
            "\nDraft tokens that the model accepts of a chain of 4; a step gives one token more:\n",
            table(
                ["text", "places", "top 1", "chain of 4"],
                ([kind, str(places), f"{top:.3f}", f"{chain:.2f}"] for kind, places, top, chain in chains),
            ),
        ]
    )


def _exits(exits: dict[str, dict[str, Any]], chosen: int) -> str:
    tops = list(exits[str(chosen)]["tops"])
    rows = [
        [
            layers,
            f"{tried['weights_read']:.3f}",
            *(f"{tried['tops'][top]:.3f}" for top in tops),
            f"{tried['chain']:.2f}",
            str(tried["best_chain"]),
            f"{tried['speedup']:.2f}",
        ]
        for layers, tried in exits.items()
    ]
    return (
        "## Exits\n\nWeights read: by a call of the draft, as a share of those that a call of the model reads. Speed: tokens "
        "a step over what a step reads, 1 without a draft, for the best chain; an estimate from counts of weights, no "
        f"measurement. The exit with the best one is in the file: {chosen}.\n\n"
        + table(["layers", "weights read", *tops, "chain of 4", "best chain", "speed"], rows)
    )
