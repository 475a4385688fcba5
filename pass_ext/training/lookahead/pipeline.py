"""A whole run of ``train``: texts, steps with checkpoints, the evaluation on held-out text, and its files and card."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from pathlib import Path
from typing import Any

import torch

from pass_ext.checkpoint import with_dtype
from pass_ext.modules.files import fingerprint_of, pretrained_path
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.modules.slot_adapters import SlotAdapters
from pass_ext.training.common.documents import is_held_out
from pass_ext.training.common.frozen_model import check_head, is_one_piece, shard_layers
from pass_ext.training.common.options import settings_from
from pass_ext.training.common.own_texts import Sample
from pass_ext.training.common.record import card_of, facts_of, held_out, save_before_evaluation, save_result, table
from pass_ext.training.common.run import Run, Texts, Windows, windows_of
from pass_ext.training.common.steps import Checkpoint, HeldOut, take_steps, watched
from pass_ext.training.lookahead.adapters import adapter_sizes
from pass_ext.training.lookahead.dry_run import plan_of
from pass_ext.training.lookahead.evaluation import evaluate
from pass_ext.training.lookahead.loop import LookaheadTrainer, Settings
from pass_ext.training.lookahead.states import with_states

_FREQUENT = 1000  # slots start at the mean of this many most frequent tokens' embeddings
_SHAPE = (
    *("lookahead", "transition_rank", "deep", "adapter_rank", "adapter_kinds", "adapter_by_slot", "start"),
    *("seed", "length", "batch", "step_dtype"),
)
_OF_RUN = ("command", "date", "machine", "steps", "data")  # what a card tells of the runs before this one


def train(run: Run) -> Path | None:
    """The path of the safetensors file, beside which the record, the card and the curve lie; None for a dry run."""
    options = run.options
    if run.ranks.count > (most := options.batch * options.anchors):
        raise SystemExit(f"{run.ranks.count} ranks cannot share a step of --batch × --anchors = {most} groups")
    if options.fsdp:
        shard_layers(run.model, run.ranks)
    texts = _unwritten(run) if options.dry_run else run.texts()
    options.step_dtype = options.step_dtype or options.dtype
    if options.step_dtype != options.dtype and not is_one_piece(run.model):
        raise SystemExit(
            f"--step-dtype must be --dtype, {options.dtype}, where --model-args quantises, offloads or divides the model"
        )
    model = (
        run.model if options.step_dtype == options.dtype else with_dtype(run.model, getattr(torch, options.step_dtype))
    )
    windows = windows_of(run, texts, batch=options.batch, anchors=options.anchors, lookahead=options.lookahead)
    options.slot_weights = tuple(options.slot_weights)
    settings = settings_from(options, Settings)
    described = {**dataclasses.asdict(settings), **{name: getattr(options, name) for name in _SHAPE}}
    if options.start:
        described["start"] = f"{options.start}, SHA-256 {_digest(options.start)}"  # another file is another run
    check_head(model, windows.at(0).ids[:1].to(options.device))
    model = with_states(model, options.length + options.anchors * options.lookahead)
    embedding, earlier = _start(run, windows)
    if options.dry_run:
        sizes = {name: getattr(options, name) for name in ("batch", "length", "anchors", "loss")}
        count = sum(len(batch.names) for batches in run.planned() for batch in batches)
        trainer = LookaheadTrainer(model, embedding, windows, settings, run.ranks)
        run.console.print(plan_of(trainer, model, **sizes, texts=count), markup=False, soft_wrap=True)
        return None
    identity = run.identity(texts, **described, anchors=options.anchors, share=options.sample_share)
    trainer = LookaheadTrainer(model, embedding, windows, settings, run.ranks)
    checkpoint = Checkpoint(run.out / "checkpoint.pt", identity)
    seconds = take_steps(
        trainer,
        run.console,
        every=options.checkpoint_every,
        checkpoint=checkpoint,
        minutes=options.minutes,
        held_out=_early_stopping(run, model, embedding, texts) if options.patience else None,
        logs=run.logs(),
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
    embedding.to(model.get_input_embeddings().weight.dtype)
    mine = run.readers.share_of(texts.held_out)
    held_out = watched(run.console, "evaluating, held-out texts", mine, len(mine))
    evaluation = evaluate(model, embedding, held_out, options.evaluation_anchors, run.readers)
    if evaluation["places"]:
        embedding.hit_rates, embedding.greedy_hit_rates = evaluation["hit_rates"], evaluation.get("greedy_hit_rates")
    facts |= {"evaluation": evaluation}
    return save_result(run, embedding.to(torch.bfloat16), facts, trainer.losses, card)


def _unwritten(run: Run) -> Texts:
    """The documents, and one random text in place of samples."""
    documents = [document for document in run.documents if not is_held_out(document.name)]
    chooser = random.Random(run.options.seed)
    tokens = [chooser.randrange(len(run.model.get_input_embeddings().weight)) for _ in range(run.options.length)]
    return Texts(documents, [Sample("random", "chat", 0.0, 1, tokens)], [], {})


def _early_stopping(run: Run, model: Any, embedding: LookaheadEmbedding, texts: Texts) -> HeldOut:
    """By the tokens that a call of eight rows is expected to give on held-out texts."""
    options, mine = run.options, run.readers.share_of(texts.held_out)
    if not texts.held_out:
        raise SystemExit("--patience needs held-out texts: give --held-out a number, or more text")

    def score() -> float:
        found = evaluate(model, embedding, mine, options.evaluation_anchors, run.readers)
        return 1 + float(found["accepted"]["tree 8"]) if found["places"] else 0.0

    return HeldOut(score, options.evaluate_every, options.patience)


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
    elif embedding.adapters is not None:
        embedding.adapters = _widened(embedding.adapters, options.adapter_rank)
    return embedding, earlier


def _widened(adapters: SlotAdapters, rank: int) -> SlotAdapters:
    """Adapters of this rank at least, with the same products: what is new is fresh."""
    sizes = {place: size._replace(rank=max(size.rank, rank)) for place, size in adapters.sizes.items()}
    if sizes == adapters.sizes:
        return adapters
    wide = SlotAdapters(sizes, adapters.count, scale=adapters.scale, dtype=torch.float32)
    wide = wide.to(next(adapters.parameters()).device)
    with torch.no_grad():
        for place, *narrow in adapters.pairs():
            for new, old in zip(wide.pair(place), narrow, strict=True):
                new[:, : old.shape[1]] = old
    return wide


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
    """Slots at the mean embedding of the tokens that are frequent in the training text, as the first layer reads it: Gemma
    multiplies its table's rows."""
    options, model = run.options, run.model
    embed = model.get_input_embeddings()
    table = embed.weight
    seen = torch.cat([windows.at(step).ids.flatten() for step in range(20)])
    counts = torch.bincount(seen, minlength=table.shape[0])
    ids = counts.topk(min(_FREQUENT, table.shape[0])).indices
    ids = ids[counts[ids] > 0].to(table.device)
    embedding = LookaheadEmbedding.from_table(
        options.lookahead,
        table,
        rank=options.transition_rank,
        deep_layers=model.config.get_text_config().num_hidden_layers if options.deep else 0,
        base_model=run.base_model,
        ids=ids,
        dtype=torch.float32,
    )
    with torch.no_grad():
        embedding.weight.mul_(embed(ids).float().norm() / table[ids].float().norm())
    return embedding


def card(name: str, facts: dict[str, Any], picture: str) -> str:
    """The record as Markdown."""
    return card_of(
        name,
        facts,
        picture,
        opening=f"Look-ahead embeddings for {facts['base_model']}",
        command="train",
        record="LookaheadEmbedding.training_record",
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


def _evaluation(evaluation: dict[str, Any]) -> str:
    tops, overlaps = list(evaluation["slots"][0]), ", ".join(f"{share:.3f}" for share in evaluation["overlap"])
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
            f"\nMean overlap Σ min(p, q) of a slot's distribution with the model's, at temperature 1, by slot: {overlaps}.",
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
