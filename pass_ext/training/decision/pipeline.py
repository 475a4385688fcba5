"""A whole run of ``train-decision``: texts, places in them, epochs, the threshold, the evaluation, and its files and card."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pass_ext.modules.decision import DecisionModel
from pass_ext.training.common.own_texts import Sample
from pass_ext.training.common.record import card_of, facts_of, held_out, save_before_evaluation, save_result, table
from pass_ext.training.common.run import Run, Windows, even_places, windows_of
from pass_ext.training.common.steps import take_steps, watched
from pass_ext.training.decision.command import draft_name, load_draft
from pass_ext.training.decision.evaluation import (
    Chains,
    best_threshold,
    chains_report,
    places_report,
    read_chains,
    summary,
)
from pass_ext.training.decision.loop import (
    DecisionTrainer,
    Pair,
    Places,
    Text,
    fresh,
    hidden_width,
    read_places,
    reading,
    scores_of,
)
from pass_ext.tree import MAX_TREE_NODES

_THRESHOLD_TEXTS = 32  # training texts whose chains --threshold auto looks at
_SETTINGS = ("kind", "temperature", "epochs", "batch", "learning_rate", "threshold", "seed", "length")
_READS = {
    "hidden": "the input of the draft's output layer",
    "entropy": "the entropy of the draft's distribution and its ten largest probabilities",
}


def train(run: Run) -> Path:
    """The path of the safetensors file, beside which the record, the card and the picture lie."""
    options = run.options
    draft = load_draft(options.draft, run.model, run.tokenizer, getattr(torch, options.dtype))
    return train_for(draft.to(options.device) if hasattr(draft, "to") else draft, run)


def train_for(draft_model: Any, run: Run) -> Path:
    """``train`` with this draft."""
    started = time.monotonic()
    options, texts = run.options, run.texts()
    windows = windows_of(run, texts, batch=1, anchors=options.places, lookahead=0)
    with reading(run.model, draft_model, hidden=options.kind == "hidden") as pair:
        decision = fresh(
            options.kind,
            hidden_width(pair.draft) if options.kind == "hidden" else 0,
            seed=options.seed,
            threshold=0.0 if options.threshold == "auto" else options.threshold,  # auto: found later
            base_model=run.base_model,
            draft_model=draft_name(options.draft),
        )
        mine = run.ranks.share_of(list(_training_texts(windows, options.texts)))
        shown = watched(run.console, "reading, texts", mine, len(mine))
        places = _of_all_ranks(
            run, [read_places(pair, [text], decision.features, options.temperature) for text in shown]
        )
        trainer = _trainer(run, decision, places)
        take_steps(trainer, run.console, logs=run.logs())
        trainer.finish()
        if options.threshold == "auto":
            some = _chain_texts(options, map(_whole_sample, texts.samples[:_THRESHOLD_TEXTS])) or _chain_texts(
                options, [(text.ids, 0, text.kind) for text in _training_texts(windows, _THRESHOLD_TEXTS)]
            )
            decision.threshold = run.ranks.first(
                lambda: best_threshold(_chains(options, pair, some, decision), options.draft_cost)
            )
        texts.description["places"] = (
            f"{len(places.labels):,} of {options.texts} texts, mean label {float(places.labels.mean()):.3f}"
        )
        facts = facts_of(
            run,
            decision,
            texts.description,
            draft_model=decision.draft_model,
            settings={name: getattr(options, name) for name in _SETTINGS},
            steps=trainer.step,
            evaluation={"places": 0},
        )
        save_before_evaluation(run, decision, facts)
        evaluation = run.ranks.first(lambda: _evaluation(run, pair, decision, texts.held_out))
    seconds = round(time.monotonic() - started, 1)
    facts |= {"seconds": seconds, "evaluation": evaluation, "summary": summary(evaluation)}
    return save_result(run, decision, facts, trainer.losses, card, chains_panel(evaluation))


def _of_all_ranks(run: Run, texts: list[Places]) -> Places:
    """The places of all ranks' texts, in the texts' order."""
    whole = run.ranks.joined(texts)
    kinds = [kind for places in whole for kind in places.kinds]
    return Places(
        torch.cat([places.features for places in whole]), torch.cat([places.labels for places in whole]), kinds
    )


def _trainer(run: Run, decision: DecisionModel, places: Places) -> DecisionTrainer:
    options = run.options
    try:
        return DecisionTrainer(
            decision,
            places.features,
            places.labels,
            epochs=options.epochs,
            learning_rate=options.learning_rate,
            batch=options.batch,
            seed=options.seed,
            balanced=options.kind == "entropy",
            ranks=run.ranks,
        )
    except ValueError as error:
        raise SystemExit(str(error)) from error


def _training_texts(windows: Windows, count: int) -> Iterator[Text]:
    for step in range(count):
        window = windows.at(step)
        yield Text(window.ids[0], window.anchors[0].unique(), "")


def _whole_sample(sample: Sample) -> tuple[torch.Tensor, int, str]:
    return torch.tensor(sample.ids), sample.prompt_tokens, sample.kind


def _chain_texts(options: argparse.Namespace, texts: Iterable[tuple[torch.Tensor, int, str]]) -> list[Text]:
    """Even places in what was written after each text's prompt; the text cut so that its chains fit in one tree."""
    chain_texts = []
    for ids, prompt_tokens, kind in texts:
        ids = ids[: MAX_TREE_NODES - options.levels * options.evaluation_places]
        first, after = max(prompt_tokens - 1, 0), len(ids) - 1
        if first < after:
            places = torch.arange(first, after)
            chain_texts.append(Text(ids, even_places(places, options.evaluation_places), kind))
    return chain_texts


def _chains(options: argparse.Namespace, pair: Pair, texts: Iterable[Text], decision: DecisionModel) -> Chains:
    decision.to(pair.draft.device)
    chains = read_chains(
        pair, texts, decision, levels=options.levels, temperature=options.temperature, seed=options.seed
    )
    decision.cpu()
    return chains


def _evaluation(run: Run, pair: Pair, decision: DecisionModel, held_out: Sequence[Sample]) -> dict[str, Any]:
    options = run.options
    texts = _chain_texts(options, map(_whole_sample, held_out))
    if not texts:
        return {"places": 0, "texts": 0}
    places = read_places(pair, texts, decision.features, options.temperature)
    scores = scores_of(decision, places.features)
    chains = _chains(options, pair, watched(run.console, "evaluating, held-out texts", texts, len(texts)), decision)
    return {
        "texts": len(texts),
        "temperatures": sorted({sample.temperature for sample in held_out}),
        **places_report(scores, places.labels, places.kinds, decision.threshold),
        "chains": chains_report(chains, decision.threshold, options.draft_cost),
    }


def card(name: str, facts: dict[str, Any], picture: str) -> str:
    """The record as Markdown."""
    settings, evaluation = facts["settings"], facts["evaluation"]
    sections = (
        [part(settings, evaluation) for part in (_places_section, _calibration_section, _chains_section)]
        if evaluation["places"]
        else []
    )
    return card_of(
        name,
        facts,
        picture,
        opening=f"Decides after each level of drafting whether {facts['draft_model']} drafts on for {facts['base_model']}, "
        f"from {_READS[settings['kind']]}",
        command="train-decision",
        record="DecisionModel.training_record",
        effort=f"{facts['seconds'] / 60:.1f} minutes for samples, places, {facts['steps']} steps and the evaluation",
        caption="loss, and what stopping saves",
        sections=sections,
    )


def _label(settings: dict[str, Any]) -> str:
    if settings["temperature"] == 0:
        return "the draft's most probable token is the target's"
    return f"Σ min(p, q) at temperature {settings['temperature']:g}, the chance that a token drawn from the draft is accepted"


def _places_section(settings: dict[str, Any], evaluation: dict[str, Any]) -> str:
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


def _calibration_section(settings: dict[str, Any], evaluation: dict[str, Any]) -> str:
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


def _chains_section(settings: dict[str, Any], evaluation: dict[str, Any]) -> str:
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
