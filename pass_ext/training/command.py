"""``python -m pass_ext train``: from a model and text to a file of look-ahead embeddings with the record of its making.

Reads data, samples from the model, trains with checkpoints, evaluates on held-out text, writes everything to ``--out``.
Called by ``pass_ext.__main__``.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pass_ext.training.data import Document, fingerprint, is_held_out, read_documents

INSTRUCTIONS = Path(__file__).parent / "instructions.txt"
_FREQUENT = 1000  # slots start at the mean of this many most frequent tokens' embeddings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add = parser.add_argument
    add("--model", required=True, help="a GGUF file, or a transformers model folder or name; it stays as it is")
    add("--out", required=True, help="folder for checkpoints, samples and results; a run that stopped goes on from it")
    add(
        "--data",
        nargs="+",
        default=[],
        metavar="PATH",
        help="files or folders of .py, .txt, .md, .rst text; stdlib: Python's own",
    )
    add(
        "--self-distill",
        metavar="PROMPTS",
        help=f"a file of instructions, one a line, that the model answers (one comes along: {INSTRUCTIONS})",
    )
    add("--continuations", type=int, default=0, metavar="N", help="prefixes from --data that the model continues")
    add("--own-chats", type=int, default=0, metavar="N", help="chats of which the model writes both sides")
    add("--sample-tokens", type=int, default=208, help="tokens sampled behind a prompt at most")
    add("--sample-share", type=float, default=0.75, help="part of the training windows that is sampled text")
    add("--lookahead", type=int, default=4, help="L, the number of slots")
    add("--transition-rank", type=int, default=0, help="width of the transition score; 0: none")
    add("--deep", action="store_true", help="a vector for every layer and slot beside the input embeddings")
    add("--steps", type=int, default=1000)
    add("--batch", type=int, default=2, help="texts a step")
    add("--length", type=int, default=256, help="tokens a text")
    add("--anchors", type=int, default=48, help="look-ahead groups a text")
    add("--loss", choices=("kl", "cross-entropy"), default="kl")
    add("--decay", type=float, default=0.8, help="weight of slot i: decay^i")
    add("--learning-rate", type=float, default=0.01)
    add("--transition-learning-rate", type=float, default=0.003)
    add("--deep-learning-rate", type=float, default=0.01)
    add("--warm-up", type=int, default=20, help="steps")
    add("--clip", type=float, default=1.0, help="largest gradient norm of a parameter")
    add("--seed", type=int, default=0)
    add("--minutes", type=float, default=0, help="stop after this long, with a checkpoint; 0: never")
    add(
        "--held-out",
        type=int,
        default=32,
        help="held-out prompts of a kind that the model continues for the evaluation",
    )
    add("--evaluation-anchors", type=int, default=64, help="places a held-out text")
    add("--checkpoint-every", type=int, default=50, help="steps")
    add("--device", default="cpu")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the frozen model; on most CPUs float32 is faster",
    )
    add("--name", default="lookahead", help="of the result: NAME.safetensors, .json, .md and .svg in --out")


def check_arguments(options: argparse.Namespace) -> None:
    """Says what cannot be done before anything is loaded."""
    for name in ("lookahead", "steps", "batch", "anchors", "sample_tokens", "checkpoint_every", "evaluation_anchors"):
        if getattr(options, name) < 1:
            raise SystemExit(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if not 0 <= options.sample_share <= 1:
        raise SystemExit(f"--sample-share must lie between 0 and 1, got {options.sample_share}")
    if not options.data and not options.self_distill and not options.own_chats:
        raise SystemExit("nothing to train on: give --data FILES, --self-distill PROMPTS or --own-chats N")
    if options.continuations and not options.data:
        raise SystemExit("--continuations takes its prefixes from --data, which is not given")
    if options.self_distill and not Path(options.self_distill).is_file():
        raise SystemExit(f"--self-distill names {options.self_distill!r}, and there is no such file")


def run(options: argparse.Namespace, command: Sequence[str]) -> Path:
    """Trains and evaluates; the path of the safetensors file."""
    check_arguments(options)
    from rich.console import Console

    from pass_ext.training.model import load_frozen

    console = Console(highlight=False)
    try:
        documents = read_documents(options.data)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from error
    if options.data and not documents:
        raise SystemExit(f"--data holds no .py, .txt, .md or .rst text: {' '.join(options.data)}")
    prompts = Path(options.self_distill).read_text().splitlines() if options.self_distill else []
    instructions = [line.strip() for line in prompts if line.strip()]
    model, tokenizer = load_frozen(options.model, getattr(torch, options.dtype))
    return train(options, shlex.join(command), model.to(options.device), tokenizer, documents, instructions, console)


def train(
    options: argparse.Namespace,
    command: str,
    model: Any,
    tokenizer: Any,
    documents: list[Document],
    instructions: list[str],
    console: Any,
) -> Path:
    """``run`` with everything loaded."""
    from pass_ext.training import record
    from pass_ext.training.evaluation import evaluate
    from pass_ext.training.loop import Settings, Trainer, check_head
    from pass_ext.training.self_distill import Sample
    from pass_ext.training.windows import Windows

    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    samples = _samples(options, model, tokenizer, documents, instructions, console)
    kept = [one for one in samples if is_held_out(one.name)]
    used: list[Sample] = [one for one in samples if not is_held_out(one.name)]
    texts = [document for document in documents if not is_held_out(document.name)]
    data = {
        "documents": f"{len(texts)} ({sum(len(one.text) for one in texts):,} characters), SHA-256 {fingerprint(texts)}",
        "own samples": f"{len(used)} ({sum(len(one.ids) - one.prompt_tokens for one in used):,} tokens), SHA-256 "
        f"{_digest([dataclasses.asdict(one) for one in used])}",
        "held out": f"{len(documents) - len(texts)} documents and {len(kept)} samples "
        f"({sum(len(one.ids) - one.prompt_tokens for one in kept):,} tokens), by the SHA-256 of their names",
    }
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
            "anchors": options.anchors,
            "share": options.sample_share,
            "data": data,
        }
    )
    check_head(model, windows.at(0).ids[:1].to(options.device))
    trainer = Trainer(model, _start(options, model, windows), windows, settings)
    checkpoint, clock = out / "checkpoint.pt", out / "seconds.txt"
    if checkpoint.exists():
        trainer.restore(checkpoint, identity)
        console.print(f"going on from step {trainer.step} of {options.steps}")
    earlier = float(clock.read_text()) if checkpoint.exists() and clock.exists() else 0.0
    seconds = _steps(options, trainer, checkpoint, clock, identity, earlier, console)

    embedding = trainer.embedding.to(torch.bfloat16).to(torch.float32)  # what the file will hold is what is measured
    console.print(f"evaluating on {len(kept)} held-out texts …")
    evaluation = evaluate(model, embedding.to(next(model.parameters()).dtype), kept, options.evaluation_anchors)
    count = sum(parameter.numel() for parameter in embedding.parameters())
    facts: dict[str, Any] = {
        "command": command,
        "base_model": embedding.base_model,
        "parameters": f"{count:,} parameters ({embedding.extra_repr()})",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": record.machine(),
        "versions": record.versions(),
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


def _samples(
    options: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    documents: list[Document],
    instructions: list[str],
    console: Any,
) -> list[Any]:
    from rich.progress import track

    from pass_ext.training.self_distill import collect, plan_batches

    batches = plan_batches(
        tokenizer,
        documents,
        instructions,
        continuations=options.continuations,
        own_chats=options.own_chats,
        held_out=options.held_out,
        prefix_tokens=min(48, options.length // 2),
        seed=options.seed,
    )
    if not batches:
        return []
    path = Path(options.out) / "samples.jsonl"
    found = collect(model, tokenizer, batches, path, new_tokens=options.sample_tokens, seed=options.seed)
    shown = track(found, description="sampling", total=len(batches), console=console)
    return [sample for batch in shown for sample in batch]


def _start(options: argparse.Namespace, model: Any, windows: Any) -> Any:
    """Slots at the mean embedding of the tokens that are frequent in the training text."""
    from pass_ext.lookahead import LookaheadEmbedding

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
    trainer: Any,
    checkpoint: Path,
    clock: Path,
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
        trainer.save(checkpoint, identity)
        clock.write_text(f"{spent():.1f}")

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


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
