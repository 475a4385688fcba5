"""A whole run of ``train-head``: texts, their hidden states, a head in the speculators form, the evaluation, files and card."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.drafting.heads.eagle3 import Eagle3Head, save_eagle3
from pass_ext.decoding.drafting.heads.head import target_facts
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.training.common.frozen_model import check_head
from pass_ext.training.common.options import settings_from
from pass_ext.training.common.record import card_of, facts_of, save_before_evaluation, save_result, table
from pass_ext.training.common.run import Run
from pass_ext.training.common.steps import Checkpoint, take_steps
from pass_ext.training.draft.loop import document_windows, frequent_tokens
from pass_ext.training.draft.pipeline import hidden_of
from pass_ext.training.head.evaluation import evaluate_head
from pass_ext.training.head.loop import HeadSettings, HeadTrainer
from pass_ext.training.head.start import begin_linear


class TrainedHead:
    """A head as the record of a run takes a trained module."""

    def __init__(self, head: Eagle3Head, base_model: str) -> None:
        self.head, self.base_model = head, base_model
        self.training_record: dict[str, Any] | None = None
        self.parameters = head.parameters

    def extra_repr(self) -> str:
        """For the card."""
        drafted = self.head.lm_head.out_features
        return f"states in front of layers {', '.join(map(str, self.head.taps))}, {drafted:,} tokens"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file of weights, and config.json beside it."""
        file, notes = Path(path), {"training_record": json.dumps(self.training_record)}
        save_eagle3(self.head, file.parent, file.name, notes)


def train(run: Run) -> Path:
    """The path of the safetensors file, beside which config.json, the record, the card and the curve lie."""
    options, model, ranks = run.options, run.model, run.ranks
    target = target_facts(packed_model(model))
    layers = target.layers or 0
    taps = tuple(options.taps or (layers // 2, layers - 3, layers - 1))
    if len(set(taps)) != 3 or not 1 <= min(taps) <= max(taps) <= layers:
        raise SystemExit(f"--taps must be three different numbers from 1 to {layers}, the model's layers, got {taps}")
    texts = run.texts()
    windows = document_windows(run.tokenizer, texts.documents, options.document_tokens, options.length, options.seed)
    training = [sample.ids for sample in texts.samples] + windows
    if not training:
        raise SystemExit("nothing to train on: no training text in --data and no samples")
    if len(training) < ranks.count:
        raise SystemExit(f"{ranks.count} ranks cannot share {len(training)} texts: each needs one")
    check_head(model, torch.tensor([training[0]], device=target.device))
    texts.description["read"] = (
        f"{sum(map(len, training)):,} tokens: the samples with their prompts, and windows of documents"
    )
    settings = settings_from(options, HeadSettings)
    identity = run.identity(texts, length=options.length, seed=options.seed)
    part = f"-{ranks.rank}-of-{ranks.count}" if ranks.count > 1 else ""
    hidden = hidden_of(run, ranks.share_of(training), sorted(taps), run.out / f"hidden{part}.states", identity)
    vocabulary = None
    if options.vocabulary and options.vocabulary < target.vocabulary:
        every = torch.tensor([token for text in training for token in text])
        vocabulary = frequent_tokens(every, options.vocabulary, target.vocabulary)
    head, lengths = _start(run, target, taps, vocabulary), [len(text) for text in training]
    begin_linear(head, model, hidden, ranks.share_of(lengths), ranks)
    trainer = HeadTrainer(model, head, hidden, settings, ranks, lengths)
    described = json.dumps([identity, taps, options.vocabulary, options.inner, dataclasses.asdict(settings)])
    digest = hashlib.sha256(described.encode()).hexdigest()
    checkpoint = Checkpoint(run.out / f"head-{digest[:8]}.pt", described)
    seconds = take_steps(trainer, run.console, "steps", checkpoint=checkpoint, logs=run.logs())
    result = TrainedHead(head.requires_grad_(False).eval(), run.base_model)

    def facts(evaluation: dict[str, Any]) -> dict[str, Any]:
        return facts_of(
            run,
            result,
            texts.description,
            settings={**dataclasses.asdict(settings), "taps": list(taps)},
            steps=trainer.step,
            seconds=round(seconds, 1),
            evaluation=evaluation,
        )

    save_before_evaluation(run, result, facts({"places": 0}))
    own = head.to(target.dtype)
    evaluation = ranks.first(lambda: evaluate_head(model, own, texts.held_out))
    return save_result(run, result, facts(evaluation), trainer.losses, card)


def _start(run: Run, target: Any, taps: tuple[int, ...], vocabulary: Tensor | None) -> Eagle3Head:
    """A head in float32 whose output layer is the model's. Each tapped state has a norm of its own, because states of late
    layers are many times as large as those of early ones; and there are as many key heads as heads, because an embedding comes
    in by the values alone."""
    model, text = run.model, run.model.config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    layer = dict(
        model_type="llama",
        hidden_size=target.width,
        intermediate_size=run.options.inner or text.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=getattr(text, "head_dim", None) or target.width // heads,
        vocab_size=target.vocabulary,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-6,
        rope_theta=float((getattr(text, "rope_parameters", None) or {}).get("rope_theta") or 10_000.0),
        hidden_act="silu",
        max_position_embeddings=getattr(text, "max_position_embeddings", None) or 4096,
    )
    proposals = [{"proposal_type": "greedy", "speculative_tokens": run.options.unroll + 1}]
    config = dict(
        architectures=["Eagle3Speculator"],
        speculators_model_type="eagle3",
        draft_vocab_size=target.vocabulary if vocabulary is None else len(vocabulary),
        eagle_aux_hidden_state_layer_ids=list(taps),
        fc_norm=True,
        norm_before_residual=False,  # vLLM takes True where a config has none
        target_hidden_size=target.width,
        transformer_layer_config=layer,
        speculators_config=dict(
            algorithm="eagle3",
            default_proposal_method="greedy",
            proposal_methods=proposals,
            verifier=dict(name_or_path=run.base_model, architectures=[target.name]),
        ),
    )
    torch.manual_seed(run.options.seed)
    head = Eagle3Head(config, target, {"d2t", "t2d"} if vocabulary is not None else ())
    with torch.no_grad():
        table = model.get_output_embeddings().weight.detach().float().cpu()
        if vocabulary is not None:
            head.d2t = vocabulary - torch.arange(len(vocabulary))
            head.t2d = torch.zeros(target.vocabulary, dtype=torch.bool).index_fill_(0, vocabulary, True)
            table = table[vocabulary]
        head.lm_head.weight.copy_(table)
    return head.to(target.device)


def card(name: str, facts: dict[str, Any], picture: str) -> str:
    """The record as Markdown."""
    evaluation = facts["evaluation"]
    return card_of(
        name,
        facts,
        picture,
        opening=f"EAGLE-3 head for {facts['base_model']}, in the speculators form",
        command="train-head",
        record='safe_open(...).metadata()["training_record"]',
        effort=f"{facts['seconds'] / 60:.0f} minutes of training, {facts['steps']} steps",
        sections=[_evaluation(evaluation)] if evaluation["places"] else [],
    )


def _evaluation(evaluation: dict[str, Any]) -> str:
    rows = [["all", str(evaluation["texts"]), f"{evaluation['tokens_per_call']:.2f}"]]
    rows += [
        [kind, str(evaluation["texts_by_kind"][kind]), f"{rate:.2f}"] for kind, rate in evaluation["by_kind"].items()
    ]
    return (
        f"## Held-out evaluation\n\nGreedy continuations of held-out prompts, chains of {evaluation['length']} drafts:\n\n"
        + table(["text", "texts", "tokens a call"], rows)
    )
