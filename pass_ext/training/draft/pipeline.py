"""A whole run of ``train-draft``: the model's own texts, hidden states of all texts, an adapter for each exit, and its files.

Where several exits are given, the one with the best expected speed is kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pass_ext.decoding.models.early_exit_draft import exit_parts
from pass_ext.modules.exit_adapter import ExitAdapter
from pass_ext.training.common import record
from pass_ext.training.common.documents import Document, is_held_out
from pass_ext.training.common.frozen_model import check_head
from pass_ext.training.common.samples import described, own_samples
from pass_ext.training.draft.data import Hidden, collect_hidden, document_windows, load_hidden, save_hidden
from pass_ext.training.draft.evaluation import evaluate_draft
from pass_ext.training.draft.loop import DraftSettings, DraftTrainer, frequent_tokens
from pass_ext.training.draft.record import draft_card, write_draft


def train_draft(
    options: argparse.Namespace,
    command: str,
    model: Any,
    tokenizer: Any,
    documents: list[Document],
    instructions: list[str],
    console: Any,
) -> Path:
    """The path of the safetensors file, beside which the record, the card and the curve lie."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    layers = sorted(set(options.layers))
    parts = exit_parts(model)
    if layers[0] < 1 or layers[-1] > len(parts.layers):
        raise SystemExit(f"--layers must be from 1 to {len(parts.layers)}, the model's own, got {options.layers}")
    samples = own_samples(options, model, tokenizer, documents, instructions, console)
    kept = [one for one in samples if is_held_out(one.name)]
    used = [one for one in samples if not is_held_out(one.name)]
    texts = [document for document in documents if not is_held_out(document.name)]
    windows = document_windows(tokenizer, texts, options.document_tokens, options.length, options.seed)
    training = [one.ids for one in used] + windows
    if not training:
        raise SystemExit("nothing to train on: no training text in --data and no samples")
    check_head(model, torch.tensor([training[0]], device=parts.head.weight.device))
    data = described(documents, samples)
    data["read"] = f"{sum(map(len, training)):,} tokens: the samples with their prompts, and windows of documents"
    settings = DraftSettings(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(DraftSettings)}
    )
    identity = json.dumps(
        {
            "model": Path(options.model).name,
            "dtype": options.dtype,
            "data": data,
            "length": options.length,
            "seed": options.seed,
        }
    )
    hidden = _hidden(model, training, layers, out / "hidden.safetensors", identity, console)
    held = collect_hidden(model, [one.ids for one in kept], layers) if kept else None
    vocabulary = None
    if options.vocabulary:
        vocabulary = frequent_tokens(hidden.tokens, options.vocabulary, parts.head.out_features)
    started = time.monotonic()
    trained = [(k, *_trained(options, model, k, vocabulary, hidden, settings, console)) for k in layers]
    seconds = time.monotonic() - started
    exits: dict[str, dict[str, Any]] = {}
    for k, adapter, _ in trained:
        # What the file will hold is what is measured.
        rounded = adapter.to(torch.bfloat16).to(parts.head.weight.dtype)
        exits[str(k)] = {"places": 0} if held is None else evaluate_draft(model, rounded, kept, held)
    chosen, adapter, losses = max(trained, key=lambda one: exits[str(one[0])].get("speedup", 0.0))
    evaluation = exits[str(chosen)]
    count = adapter.down.weight.numel() + adapter.up.weight.numel()
    facts: dict[str, Any] = {
        "command": command,
        "base_model": adapter.base_model,
        "parameters": f"{count:,} parameters ({adapter.extra_repr()})",
        "layers": chosen,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": record.machine(options.device),
        "versions": record.versions(),
        "data": data,
        "settings": {**dataclasses.asdict(settings), "rank": options.rank, "length": options.length},
        "steps": settings.steps,
        "seconds": round(seconds, 1),
        "evaluation": evaluation,
        "exits": exits,
    }
    if evaluation["places"]:
        adapter.hit_rates = evaluation["hit_rates"]
    adapter.training_record = facts
    result = out / f"{options.name}.safetensors"
    adapter.to(torch.bfloat16).save(result)
    write_draft(out, options.name, facts, losses)
    console.print(draft_card(options.name, facts, f"{options.name}.svg"), markup=False)
    console.print(f"written: {result}")
    return result


def _hidden(
    model: Any, texts: Sequence[Sequence[int]], layers: Sequence[int], path: Path, identity: str, console: Any
) -> Hidden:
    """From the file if it is this run's, else computed and kept there."""
    found = None
    try:
        found = load_hidden(path, identity, layers)
    except ValueError as error:
        console.print(f"{error}: computing the hidden states again", markup=False)
    if found is not None:
        console.print(f"hidden states of {len(found.tokens):,} tokens are in {path}")
        return found
    with _progress(console) as progress:
        task = progress.add_task("hidden states", total=sum(map(len, texts)), shown="")
        found = collect_hidden(model, texts, layers, lambda count: progress.advance(task, count))
    try:
        save_hidden(found, path, identity)
    except Exception as error:  # a full disk is a SafetensorError here; a run that stopped computes them again
        console.print(f"the hidden states are not kept in {path}: {error}", markup=False)
    return found


def _trained(
    options: argparse.Namespace,
    model: Any,
    layers: int,
    vocabulary: torch.Tensor | None,
    hidden: Hidden,
    settings: DraftSettings,
    console: Any,
) -> tuple[ExitAdapter, list[float]]:
    """The adapter behind layer ``layers``, in float32, and the losses."""
    table = model.get_input_embeddings().weight
    torch.manual_seed(settings.seed)
    adapter = ExitAdapter(
        layers,
        table.shape[1],
        options.rank,
        vocabulary=vocabulary,
        base_model=Path(options.model).name.removesuffix(".gguf"),
        base_vocabulary=table.shape[0],
    ).to(table.device)
    trainer = DraftTrainer(model, adapter, hidden, settings)
    with _progress(console) as progress:
        task = progress.add_task(f"{layers} layers", total=settings.steps, shown="")

        def after_step(step: int, loss: float) -> None:
            recent = trainer.losses[-25:]
            shown = f"loss {sum(recent) / len(recent):.3f}"
            progress.update(task, completed=step, shown=shown)
            if not console.is_terminal and step % 50 == 0:
                console.print(f"{layers} layers, step {step}: {shown}")

        trainer.run(after_step)
    return adapter, trainer.losses


def _progress(console: Any) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[shown]}"), console=console)
