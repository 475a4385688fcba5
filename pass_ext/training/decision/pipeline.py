"""A whole training run of a decision model: texts, places, epochs, threshold, evaluation on held-out text, and its files."""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pass_ext.training.common.documents import Document, is_held_out
from pass_ext.training.common.own_texts import Sample
from pass_ext.training.common.record import machine, versions
from pass_ext.training.common.samples import described, own_samples
from pass_ext.training.common.windows import Windows
from pass_ext.training.decision import record
from pass_ext.training.decision.chains import read_chains
from pass_ext.training.decision.evaluation import best_threshold, chains_report, places_report, summary
from pass_ext.training.decision.loop import fit, fresh
from pass_ext.training.decision.rows import Pair, Text, hidden_width, read_places, reading, scores_of
from pass_ext.training.decision.which_draft import draft_name
from pass_ext.tree import MAX_TREE_NODES

_THRESHOLD_TEXTS = 32  # training texts whose chains --threshold auto looks at


def train(
    options: argparse.Namespace,
    command: str,
    model: Any,
    draft_model: Any,
    tokenizer: Any,
    documents: list[Document],
    instructions: list[str],
    console: Any,
) -> Path:
    """The path of the safetensors file, beside which the record, the card and the picture lie."""
    started = time.monotonic()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    samples = own_samples(options, model, tokenizer, documents, instructions, console)
    kept = [one for one in samples if is_held_out(one.name)]
    used = [one for one in samples if not is_held_out(one.name)]
    documents_used = [document for document in documents if not is_held_out(document.name)]
    windows = Windows(
        tokenizer, documents_used, used, options.sample_share, options.length, 1, options.places, 0, options.seed
    )
    console.print(f"the draft's rows of {options.texts} texts …")
    with reading(model, draft_model, hidden=options.kind == "hidden") as pair:
        decision = fresh(
            options.kind,
            hidden_width(pair.draft) if options.kind == "hidden" else 0,
            seed=options.seed,
            threshold=0.0 if options.threshold == "auto" else options.threshold,
            base_model=draft_name(options.model),
            draft_model=draft_name(options.draft),
        )
        texts = _shown(_training_texts(windows, options.texts), options.texts, "reading", console)
        with torch.no_grad():
            places = read_places(pair, texts, decision.features, options.temperature)
        try:
            with torch.enable_grad():
                losses = fit(
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
        if options.threshold == "auto":
            some = _chain_texts(options, [_whole_sample(one) for one in used[:_THRESHOLD_TEXTS]]) or _chain_texts(
                options, [(text.ids, 0, text.kind) for text in _training_texts(windows, _THRESHOLD_TEXTS)]
            )
            decision.to(pair.draft.device)
            chains = read_chains(
                pair, some, decision, levels=options.levels, temperature=options.temperature, seed=options.seed
            )
            decision.threshold = best_threshold(chains, options.draft_cost)
            decision.cpu()
        console.print(f"evaluating on {len(kept)} held-out texts …")
        evaluation = _evaluation(options, pair, decision, kept, console)
    facts: dict[str, Any] = {
        "command": command,
        "base_model": decision.base_model,
        "draft_model": decision.draft_model,
        "parameters": f"{sum(one.numel() for one in decision.parameters()):,} parameters ({decision.extra_repr()})",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(options.device),
        "versions": versions(),
        "data": {
            **described(documents, samples),
            "places": f"{len(places.labels):,} of {options.texts} texts, mean label {float(places.labels.mean()):.3f}",
        },
        "settings": {
            name: getattr(options, name)
            for name in ("kind", "temperature", "epochs", "batch", "learning_rate", "threshold", "seed", "length")
        },
        "steps": len(losses),
        "seconds": round(time.monotonic() - started, 1),
        "evaluation": evaluation,
        "summary": summary(evaluation),
    }
    decision.training_record = facts
    result = out / f"{options.name}.safetensors"
    decision.save(result)
    record.write(out, options.name, facts, losses)
    console.print(record.card(options.name, facts, f"{options.name}.svg"), markup=False)
    console.print(f"{facts['summary']}\nwritten: {result}")
    return result


def _training_texts(windows: Windows, count: int) -> Iterator[Text]:
    for step in range(count):
        window = windows.at(step)
        yield Text(window.ids[0], window.anchors[0].unique(), "")


def _whole_sample(sample: Sample) -> tuple[torch.Tensor, int, str]:
    return torch.tensor(sample.ids), sample.prompt_tokens, sample.kind


def _chain_texts(options: argparse.Namespace, texts: Iterable[tuple[torch.Tensor, int, str]]) -> list[Text]:
    """Even places in what was written behind each text's prompt; the text cut so that its chains fit in one tree."""
    found = []
    for ids, prompt_tokens, kind in texts:
        ids = ids[: MAX_TREE_NODES - options.levels * options.evaluation_places]
        places = torch.arange(max(prompt_tokens - 1, 0), len(ids) - 1)
        if len(places):
            even = torch.linspace(0, len(places) - 1, min(options.evaluation_places, len(places))).long()
            found.append(Text(ids, places[even], kind))
    return found


def _evaluation(
    options: argparse.Namespace, pair: Pair, decision: Any, kept: Sequence[Sample], console: Any
) -> dict[str, Any]:
    texts = _chain_texts(options, map(_whole_sample, kept))
    if not texts:
        return {"places": 0, "texts": 0}
    places = read_places(pair, texts, decision.features, options.temperature)
    scores = scores_of(decision, places.features)
    decision.to(pair.draft.device)
    shown = _shown(texts, len(texts), "drafting", console)
    chains = read_chains(
        pair, shown, decision, levels=options.levels, temperature=options.temperature, seed=options.seed
    )
    decision.cpu()
    return {
        "texts": len(texts),
        "temperatures": sorted({sample.temperature for sample in kept}),
        **places_report(scores, places.labels, places.kinds, decision.threshold),
        "chains": chains_report(chains, decision.threshold, options.draft_cost),
    }


def _shown(items: Iterable[Any], total: int, what: str, console: Any) -> Iterable[Any]:
    from rich.progress import track

    return track(items, description=what, total=total, console=console)
