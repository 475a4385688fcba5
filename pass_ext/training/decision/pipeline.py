"""A whole run of ``train-decision``: texts, places in them, epochs, the threshold, the evaluation, and its files."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pass_ext.modules.decision import DecisionModel
from pass_ext.training.common.own_texts import Sample
from pass_ext.training.common.record import facts_of, save_before_evaluation, save_result
from pass_ext.training.common.run import Run
from pass_ext.training.common.steps import take_steps, watched
from pass_ext.training.common.windows import Windows, even_places, windows_of
from pass_ext.training.decision import record
from pass_ext.training.decision.chains import Chains, read_chains
from pass_ext.training.decision.evaluation import best_threshold, chains_report, places_report, summary
from pass_ext.training.decision.loop import DecisionTrainer, fresh
from pass_ext.training.decision.rows import Pair, Places, Text, hidden_width, read_places, reading, scores_of
from pass_ext.training.decision.which_draft import draft_name
from pass_ext.tree import MAX_TREE_NODES

_THRESHOLD_TEXTS = 32  # training texts whose chains --threshold auto looks at
_SETTINGS = ("kind", "temperature", "epochs", "batch", "learning_rate", "threshold", "seed", "length")


def train(run: Run, draft_model: Any) -> Path:
    """The path of the safetensors file, beside which the record, the card and the picture lie."""
    started = time.monotonic()
    options, texts = run.options, run.texts()
    windows = windows_of(run, texts, batch=1, anchors=options.places, lookahead=0)
    with reading(run.model, draft_model, hidden=options.kind == "hidden") as pair:
        decision = _start(run, pair)
        shown = watched(run.console, "reading, texts", _training_texts(windows, options.texts), options.texts)
        places = read_places(pair, shown, decision.features, options.temperature)
        trainer = _trainer(options, decision, places)
        take_steps(trainer, run.console)
        trainer.finish()
        if options.threshold == "auto":
            some = _chain_texts(options, map(_whole_sample, texts.samples[:_THRESHOLD_TEXTS])) or _chain_texts(
                options, [(text.ids, 0, text.kind) for text in _training_texts(windows, _THRESHOLD_TEXTS)]
            )
            decision.threshold = best_threshold(_chains(options, pair, some, decision), options.draft_cost)
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
        evaluation = _evaluation(run, pair, decision, texts.held_out)
    seconds = round(time.monotonic() - started, 1)
    facts |= {"seconds": seconds, "evaluation": evaluation, "summary": summary(evaluation)}
    return save_result(run, decision, facts, trainer.losses, record.card, record.chains_panel(evaluation))


def _start(run: Run, pair: Pair) -> DecisionModel:
    """An untrained model; --threshold auto is found later."""
    options = run.options
    return fresh(
        options.kind,
        hidden_width(pair.draft) if options.kind == "hidden" else 0,
        seed=options.seed,
        threshold=0.0 if options.threshold == "auto" else options.threshold,
        base_model=run.base_model,
        draft_model=draft_name(options.draft),
    )


def _trainer(options: argparse.Namespace, decision: DecisionModel, places: Places) -> DecisionTrainer:
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
    """Even places in what was written behind each text's prompt; the text cut so that its chains fit in one tree."""
    chain_texts = []
    for ids, prompt_tokens, kind in texts:
        ids = ids[: MAX_TREE_NODES - options.levels * options.evaluation_places]
        first, behind = max(prompt_tokens - 1, 0), len(ids) - 1
        if first < behind:
            places = torch.arange(first, behind)
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
