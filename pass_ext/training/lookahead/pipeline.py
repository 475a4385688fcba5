"""A whole training run: samples from the model, steps with checkpoints, the evaluation on held-out text, and its files."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import time
from pathlib import Path
from typing import Any

import torch

from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.training.common.documents import Document, is_held_out
from pass_ext.training.common.frozen_model import check_head, weights_digest
from pass_ext.training.common.record import machine, versions
from pass_ext.training.common.samples import described, own_samples
from pass_ext.training.common.windows import Windows
from pass_ext.training.lookahead import record
from pass_ext.training.lookahead.evaluation import evaluate
from pass_ext.training.lookahead.loop import Settings, Trainer

_FREQUENT = 1000  # slots start at the mean of this many most frequent tokens' embeddings


def train(
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
    samples = own_samples(options, model, tokenizer, documents, instructions, console)
    kept = [one for one in samples if is_held_out(one.name)]
    used = [one for one in samples if not is_held_out(one.name)]
    texts = [document for document in documents if not is_held_out(document.name)]
    data = described(documents, samples)
    windows = Windows(
        tokenizer,
        texts,
        used,
        options.sample_share,
        options.length,
        options.batch,
        options.anchors,
        options.lookahead,
        options.seed,
    )
    settings = Settings(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)})
    shape = {
        name: getattr(options, name) for name in ("lookahead", "transition_rank", "deep", "seed", "length", "batch")
    }
    identity = json.dumps(
        {
            **dataclasses.asdict(settings),
            **shape,
            "model": Path(options.model).name,
            "weights": weights_digest(model),
            "dtype": options.dtype,
            "anchors": options.anchors,
            "share": options.sample_share,
            "data": data,
        }
    )
    check_head(model, windows.at(0).ids[:1].to(options.device))
    trainer = Trainer(model, _start(options, model, windows), windows, settings)
    checkpoint, earlier = out / "checkpoint.pt", 0.0
    if checkpoint.exists():
        known = trainer.restore(checkpoint, identity)
        console.print(f"going on from step {trainer.step} of {options.steps}")
        if known is None:
            console.print(f"{checkpoint} does not say how long it was trained: time is counted from now on")
        earlier = known or 0.0
    seconds = _steps(options, trainer, checkpoint, identity, earlier, console)

    embedding = trainer.embedding.to(torch.bfloat16).to(torch.float32)  # what the file will hold is what is measured
    console.print(f"evaluating on {len(kept)} held-out texts …")
    evaluation = evaluate(model, embedding.to(next(model.parameters()).dtype), kept, options.evaluation_anchors)
    count = sum(parameter.numel() for parameter in embedding.parameters())
    facts: dict[str, Any] = {
        "command": command,
        "base_model": embedding.base_model,
        "parameters": f"{count:,} parameters ({embedding.extra_repr()})",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(options.device),
        "versions": versions(),
        "data": data,
        "settings": {**dataclasses.asdict(settings), **shape},
        "steps": trainer.step,
        "seconds": round(seconds, 1),
        "evaluation": evaluation,
    }
    if evaluation["places"]:
        embedding.hit_rates = evaluation["hit_rates"]
    embedding.training_record = facts
    result = out / f"{options.name}.safetensors"
    embedding.to(torch.bfloat16).save(result)
    record.write(out, options.name, facts, trainer.losses)
    console.print(record.card(options.name, facts, f"{options.name}.svg"), markup=False)
    console.print(f"written: {result}")
    return result


def _start(options: argparse.Namespace, model: Any, windows: Windows) -> LookaheadEmbedding:
    """Slots at the mean embedding of the tokens that are frequent in the training text."""
    table = model.get_input_embeddings().weight
    torch.manual_seed(options.seed)
    seen = torch.cat([windows.at(step).ids.flatten() for step in range(20)])
    counts = torch.bincount(seen, minlength=table.shape[0])
    ids = counts.topk(min(_FREQUENT, table.shape[0])).indices
    return LookaheadEmbedding.from_table(
        options.lookahead,
        table,
        rank=options.transition_rank,
        deep_layers=model.config.get_text_config().num_hidden_layers if options.deep else 0,
        base_model=Path(options.model).name.removesuffix(".gguf"),
        ids=ids[counts[ids] > 0].to(table.device),
        dtype=torch.float32,
    )


def _steps(
    options: argparse.Namespace,
    trainer: Trainer,
    checkpoint: Path,
    identity: str,
    earlier: float,
    console: Any,
) -> float:
    """Runs the steps under a progress bar; seconds of training, those of earlier parts of the run counted in."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    started = time.monotonic()

    def spent() -> float:
        return earlier + time.monotonic() - started

    def keep() -> None:
        trainer.save(checkpoint, identity, spent())

    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=options.steps, completed=trainer.step, loss="")

        def after_step(step: int, loss: float) -> None:
            recent = trainer.losses[-25:]
            progress.update(task, completed=step, loss=f"loss {sum(recent) / len(recent):.3f}")
            if step % options.checkpoint_every == 0:
                keep()
                if not console.is_terminal:
                    console.print(f"step {step}: loss {sum(recent) / len(recent):.4f}, {spent():.0f} s")

        while trainer.step < options.steps:
            trainer.run(trainer.step + 1, after_step)
            if options.minutes and time.monotonic() - started > 60 * options.minutes:
                break
    keep()
    return spent()
