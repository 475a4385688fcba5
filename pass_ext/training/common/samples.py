"""``own_samples``: the texts that a model writes itself, made once and read from the folder afterwards."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from pass_ext.training.common.documents import Document, fingerprint, is_held_out
from pass_ext.training.common.own_texts import Sample, collect, plan_batches


def described(documents: list[Document], samples: list[Sample]) -> dict[str, str]:
    """What is trained on and what is held out, with digests."""
    kept = [one for one in samples if is_held_out(one.name)]
    used = [one for one in samples if not is_held_out(one.name)]
    texts = [document for document in documents if not is_held_out(document.name)]
    return {
        "documents": f"{len(texts)} ({sum(len(one.text) for one in texts):,} characters), SHA-256 {fingerprint(texts)}",
        "own samples": f"{len(used)} ({sum(len(one.ids) - one.prompt_tokens for one in used):,} tokens), SHA-256 "
        f"{_digest([dataclasses.asdict(one) for one in used])}",
        "held out": f"{len(documents) - len(texts)} documents and {len(kept)} samples "
        f"({sum(len(one.ids) - one.prompt_tokens for one in kept):,} tokens), by the SHA-256 of their names",
    }


def own_samples(
    options: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    documents: list[Document],
    instructions: list[str],
    console: Any,
) -> list[Sample]:
    """The model's own texts, all of them: those that are on disk, and the rest sampled now."""
    from rich.progress import track

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
    found = collect(
        model,
        tokenizer,
        batches,
        path,
        name=Path(options.model).name,
        new_tokens=options.sample_tokens,
        seed=options.seed,
    )
    shown = track(found, description="sampling", total=len(batches), console=console)
    return [sample for batch in shown for sample in batch]


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
