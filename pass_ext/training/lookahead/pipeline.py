"""A whole run of ``train``: texts, steps with checkpoints, the evaluation on held-out text, and its files."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch

from pass_ext.checkpoint import with_dtype
from pass_ext.modules.files import pretrained_path
from pass_ext.modules.fingerprint import fingerprint_of
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.modules.slot_adapters import SlotAdapters
from pass_ext.training.common.frozen_model import check_head
from pass_ext.training.common.options import settings_from
from pass_ext.training.common.record import facts_of, save_before_evaluation, save_result
from pass_ext.training.common.run import Run
from pass_ext.training.common.steps import Checkpoint, take_steps, watched
from pass_ext.training.common.windows import Windows, windows_of
from pass_ext.training.lookahead import record
from pass_ext.training.lookahead.adapters import adapter_sizes
from pass_ext.training.lookahead.evaluation import evaluate
from pass_ext.training.lookahead.loop import LookaheadTrainer, Settings

_FREQUENT = 1000  # slots start at the mean of this many most frequent tokens' embeddings
_SHAPE = (
    *("lookahead", "transition_rank", "deep", "adapter_rank", "adapter_kinds", "adapter_by_slot", "start"),
    *("seed", "length", "batch", "step_dtype"),
)
_OF_RUN = ("command", "date", "machine", "steps", "data")  # what a card tells of the runs before this one


def train(run: Run) -> Path:
    """The path of the safetensors file, beside which the record, the card and the curve lie."""
    options, texts = run.options, run.texts()
    model = with_dtype(run.model, getattr(torch, options.step_dtype)) if options.step_dtype else run.model
    windows = windows_of(run, texts, batch=options.batch, anchors=options.anchors, lookahead=options.lookahead)
    options.slot_weights = tuple(options.slot_weights)
    settings = settings_from(options, Settings)
    described = {**dataclasses.asdict(settings), **{name: getattr(options, name) for name in _SHAPE}}
    if options.start:
        described["start"] = f"{options.start}, SHA-256 {_digest(options.start)}"  # another file is another run
    check_head(model, windows.at(0).ids[:1].to(options.device))
    embedding, earlier = _start(run, windows)
    # Runs from before there were these options go on.
    unused = ["loss_temperature"] if options.loss_temperature == 1 else []
    unused += ["step_dtype"] if options.step_dtype in (None, options.dtype) else []
    described = {name: value for name, value in described.items() if name not in unused}
    identity = run.identity(texts, **described, anchors=options.anchors, share=options.sample_share)
    trainer = LookaheadTrainer(model, embedding, windows, settings)
    checkpoint = Checkpoint(run.out / "checkpoint.pt", identity)
    seconds = take_steps(
        trainer, run.console, every=options.checkpoint_every, checkpoint=checkpoint, minutes=options.minutes
    )

    embedding.to(torch.bfloat16)  # what the file will hold is what is measured
    facts = facts_of(
        run,
        embedding,
        texts.description,
        settings=described,
        steps=trainer.step,
        seconds=round(seconds, 1),
        evaluation={"places": 0},
        **_share_of_adapters(model, embedding),
        **({"earlier_runs": earlier} if earlier else {}),
    )
    save_before_evaluation(run, embedding, facts)
    embedding.to(next(model.parameters()).dtype)
    held_out = watched(run.console, "evaluating, held-out texts", texts.held_out, len(texts.held_out))
    evaluation = evaluate(model, embedding, held_out, options.evaluation_anchors)
    if evaluation["places"]:
        embedding.hit_rates, embedding.greedy_hit_rates = evaluation["hit_rates"], evaluation.get("greedy_hit_rates")
    facts |= {"evaluation": evaluation}
    return save_result(run, embedding.to(torch.bfloat16), facts, trainer.losses, record.card)


def _digest(start: str) -> str:
    try:
        return hashlib.sha256(pretrained_path(start, LookaheadEmbedding.shipped()).read_bytes()).hexdigest()
    except ValueError as error:
        raise SystemExit(f"--start {start}: {error}") from error


def _share_of_adapters(model: Any, embedding: LookaheadEmbedding) -> dict[str, Any]:
    """The size of the adapters, for the card; empty without adapters."""
    if embedding.adapters is None:
        return {}
    count = sum(parameter.numel() for parameter in embedding.adapters.parameters())
    share = count / sum(parameter.numel() for parameter in model.parameters())
    return {"adapters": {"parameters": count, "share": round(share, 5), "bytes": 2 * count}}


def _start(run: Run, windows: Windows) -> tuple[LookaheadEmbedding, list[dict[str, Any]]]:
    """The embeddings of --start, or fresh ones; with adapters if the options ask for some and the file has none. And the
    records of the runs that made the file."""
    options, model = run.options, run.model
    torch.manual_seed(options.seed)
    embedding, earlier = _of_file(run) if options.start else (_fresh(run, windows), [])
    if options.adapter_rank and embedding.adapters is None:
        kinds = options.adapter_kinds
        ranks = dict.fromkeys(kinds, options.adapter_rank) if kinds else options.adapter_rank
        count = embedding.num_lookahead if options.adapter_by_slot else 1
        adapters = SlotAdapters(adapter_sizes(model, ranks), count, dtype=torch.float32)
        embedding.adapters = adapters.to(embedding.weight.device)
    return embedding, earlier


def _of_file(run: Run) -> tuple[LookaheadEmbedding, list[dict[str, Any]]]:
    options, table = run.options, run.model.get_input_embeddings().weight
    try:
        embedding = LookaheadEmbedding.from_pretrained(options.start, table=table)
    except ValueError as error:
        raise SystemExit(f"--start {options.start}: {error}") from error
    if embedding.num_lookahead != options.lookahead:
        raise SystemExit(
            f"--start {options.start} must have --lookahead {options.lookahead} slots, got {embedding.num_lookahead}"
        )
    made = embedding.training_record
    runs = list(made.get("earlier_runs", []))
    if made.keys() >= set(_OF_RUN):
        runs.append({key: made[key] for key in _OF_RUN})
    embedding.hit_rates, embedding.greedy_hit_rates, embedding.training_record = None, None, {}
    embedding.base_model, embedding.fingerprint = run.base_model, fingerprint_of(table)
    return embedding.float(), runs


def _fresh(run: Run, windows: Windows) -> LookaheadEmbedding:
    """Slots at the mean embedding of the tokens that are frequent in the training text."""
    options, model = run.options, run.model
    table = model.get_input_embeddings().weight
    seen = torch.cat([windows.at(step).ids.flatten() for step in range(20)])
    counts = torch.bincount(seen, minlength=table.shape[0])
    ids = counts.topk(min(_FREQUENT, table.shape[0])).indices
    return LookaheadEmbedding.from_table(
        options.lookahead,
        table,
        rank=options.transition_rank,
        deep_layers=model.config.get_text_config().num_hidden_layers if options.deep else 0,
        base_model=run.base_model,
        ids=ids[counts[ids] > 0].to(table.device),
        dtype=torch.float32,
    )
