"""A whole run of ``train-draft``: texts, their hidden states, an adapter for each exit, the evaluation, and its files and card.

Where several exits are given, the one with the best expected speed is kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pass_ext.decoding.models.early_exit import exit_parts
from pass_ext.modules.exit_adapter import ExitAdapter
from pass_ext.modules.files import fingerprint_of
from pass_ext.training.common.frozen_model import check_head
from pass_ext.training.common.options import settings_from
from pass_ext.training.common.own_texts import Sample
from pass_ext.training.common.record import card_of, facts_of, held_out, save_before_evaluation, save_result, table
from pass_ext.training.common.run import Run
from pass_ext.training.common.steps import Checkpoint, Phase, take_steps, watched
from pass_ext.training.draft.evaluation import evaluate_draft
from pass_ext.training.draft.loop import (
    DraftSettings,
    DraftTrainer,
    Hidden,
    collect_hidden,
    document_windows,
    frequent_tokens,
    load_hidden,
    save_hidden,
)


def train(run: Run) -> Path:
    """The path of the safetensors file, beside which the record, the card and the curve lie."""
    options, model = run.options, run.model
    parts, layers = _parts(run), sorted(set(options.layers))
    if layers[0] < 1 or layers[-1] > len(parts.layers):
        raise SystemExit(f"--layers must be from 1 to {len(parts.layers)}, the model's own, got {options.layers}")
    texts = run.texts()
    windows = document_windows(run.tokenizer, texts.documents, options.document_tokens, options.length, options.seed)
    training = [sample.ids for sample in texts.samples] + windows
    if not training:
        raise SystemExit("nothing to train on: no training text in --data and no samples")
    check_head(model, torch.tensor([training[0]], device=parts.head.weight.device))
    texts.description["read"] = (
        f"{sum(map(len, training)):,} tokens: the samples with their prompts, and windows of documents"
    )
    settings = settings_from(options, DraftSettings)
    identity = run.identity(texts, length=options.length, seed=options.seed)
    ranks = run.ranks
    if len(training) < ranks.count:
        raise SystemExit(f"{ranks.count} ranks cannot share {len(training)} texts: each needs one")
    part = f"-{ranks.rank}-of-{ranks.count}" if ranks.count > 1 else ""
    hidden = hidden_of(run, ranks.share_of(training), layers, run.out / f"hidden{part}.safetensors", identity)
    vocabulary = None
    if options.vocabulary:
        tokens = torch.tensor([token for text in training for token in text])
        vocabulary = frequent_tokens(tokens, options.vocabulary, parts.head.out_features)

    trainers: dict[int, DraftTrainer] = {}
    seconds = 0.0
    for count in layers:
        trainer = DraftTrainer(
            model, _start(run, count, vocabulary), hidden, settings, ranks, [len(text) for text in training]
        )
        checkpoint = _checkpoint(run, identity, count, settings)
        seconds += take_steps(
            trainer, run.console, f"{count} layers, steps", checkpoint=checkpoint, logs=run.logs(f"-{count}")
        )
        trainers[count] = trainer
    adapters = {count: trainer.adapter.to(torch.bfloat16) for count, trainer in trainers.items()}

    def facts(count: int, exits: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return facts_of(
            run,
            adapters[count],
            texts.description,
            layers=count,
            settings={**dataclasses.asdict(settings), "rank": options.rank, "length": options.length},
            steps=settings.steps,
            seconds=round(seconds, 1),
            evaluation=exits.get(str(count), {"places": 0}),
            exits=exits,
        )

    save_before_evaluation(run, adapters[layers[0]], facts(layers[0], {}))
    exits = ranks.first(lambda: _evaluated(run, adapters, texts.held_out))
    best = max(layers, key=lambda count: exits[str(count)].get("speedup", 0.0))
    if exits[str(best)]["places"]:
        adapters[best].hit_rates = exits[str(best)]["hit_rates"]
    result = adapters[best].to(torch.bfloat16)
    return save_result(run, result, facts(best, exits), trainers[best].losses, card)


def _evaluated(run: Run, adapters: dict[int, ExitAdapter], samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """The evaluation of each exit."""
    texts, layers = [sample.ids for sample in samples], list(adapters)
    hidden = _collected(run, texts, layers, "held-out hidden states, tokens") if texts else None
    exits: dict[str, dict[str, Any]] = {}
    for count, adapter in watched(
        run.console, f"evaluating on {len(texts)} held-out texts, exits", adapters.items(), len(layers)
    ):
        exits[str(count)] = {"places": 0}
        if hidden is not None:  # what the file holds is what is measured
            adapter.to(exit_parts(run.model).head.weight.dtype)
            exits[str(count)] = evaluate_draft(run.model, adapter, samples, hidden)
    return exits


def _checkpoint(run: Run, identity: str, layers: int, settings: DraftSettings) -> Checkpoint:
    """Its name differs with the settings, so that the hidden states serve runs of several."""
    options = run.options
    described = json.dumps([identity, layers, options.rank, options.vocabulary, dataclasses.asdict(settings)])
    digest = hashlib.sha256(described.encode()).hexdigest()
    return Checkpoint(run.out / f"exit-{layers}-{digest[:8]}.pt", described)


def _parts(run: Run) -> Any:
    try:
        return exit_parts(run.model)
    except ValueError as error:
        raise SystemExit(f"--model {run.options.model!r}: {error}") from error


def hidden_of(run: Run, texts: Sequence[Sequence[int]], layers: Sequence[int], path: Path, identity: str) -> Hidden:
    """Hidden states from the file if they are this run's, else computed and kept there."""
    try:
        hidden = load_hidden(path, identity, layers)
    except ValueError as error:
        run.console.print(f"{error}: computing the hidden states again", markup=False)
        hidden = None
    if hidden is not None:
        run.console.print(f"hidden states of {len(hidden.tokens):,} tokens are in {path}")
        return hidden
    size = sum(map(len, texts)) * (len(layers) + 1) * 2 * run.model.get_input_embeddings().weight.shape[1]
    run.console.print(
        f"the hidden states take {size / 1e6:,.0f} MB, in memory and in {path}", markup=False, soft_wrap=True
    )
    hidden = _collected(run, texts, layers, "hidden states, tokens")
    try:
        save_hidden(hidden, path, identity)
    except Exception as error:  # a full disk is a SafetensorError here; a run that stopped computes them again
        run.console.print(f"the hidden states are not kept in {path}: {error}", markup=False)
    return hidden


def _collected(run: Run, texts: Sequence[Sequence[int]], layers: Sequence[int], what: str) -> Hidden:
    """The hidden states, shown as they are computed."""
    with Phase(run.console, what, sum(map(len, texts))) as phase:
        return collect_hidden(run.model, texts, layers, phase.advance)


def _start(run: Run, layers: int, vocabulary: torch.Tensor | None) -> ExitAdapter:
    """An untrained adapter after layer ``layers``, in float32."""
    table = run.model.get_input_embeddings().weight
    torch.manual_seed(run.options.seed)
    adapter = ExitAdapter(
        layers,
        table.shape[1],
        run.options.rank,
        vocabulary=vocabulary,
        base_model=run.base_model,
        base_vocabulary=table.shape[0],
    )
    adapter.fingerprint = fingerprint_of(table)
    return adapter.to(table.device)


def card(name: str, facts: dict[str, Any], picture: str) -> str:
    """The record as Markdown."""
    evaluation, layers, exits = facts["evaluation"], facts["layers"], facts["exits"]
    return card_of(
        name,
        facts,
        picture,
        opening=f"Exit adapter for {facts['base_model']}",
        command="train-draft",
        record="ExitAdapter.training_record",
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
            f"{held_out(evaluation)} The draft leaves the model after layer {layers}. The chance that the model's next token "
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
