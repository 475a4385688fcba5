"""``train --dry-run``: the plan of a run, with times and memory from two steps that change nothing. No text is written.

memory of a device = model + 16 bytes a trained parameter (itself, gradient, Adam's two moments) + what the slots' pass keeps
for its gradient + a chunk of the loss: logits of rows and of teachers, and three times as many numbers in float32; with
--loss cross-entropy logits of rows, and as many. Quantised and offloaded weights come in full one by one: the model has the
largest of them besides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.models.module_ops import is_plain
from pass_ext.training.common.frozen_model import bytes_of
from pass_ext.training.common.loss import chunk_bytes
from pass_ext.training.lookahead.loop import LookaheadTrainer


def plan_of(
    trainer: LookaheadTrainer, model: Any, *, batch: int, length: int, anchors: int, loss: str, texts: int
) -> str:
    """The plan, a fact a line; ``texts``: how many the model is still to write."""
    ranks, module = trainer.ranks, trainer.module
    trained = sum(parameter.numel() for parameter in module.parameters())
    weights = list(model.parameters())
    slots = getattr(module, "num_lookahead", 0)
    parts, seconds = memory_of(trainer, model, rows=batch * anchors * slots, loss=loss), []
    for step in range(2):
        started = time.perf_counter()
        trainer.loss(step).backward()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    module.zero_grad()
    each, left = min(seconds), trainer.steps - trainer.step
    lines = {
        "model": f"{sum(weight.numel() for weight in weights):,} parameters, frozen, {str(weights[0].dtype)[6:]}",
        "trained": f"{trained:,} parameters in float32",
        "ranks": str(ranks.count),
        "memory of a device": f"{_size(sum(parts.values()))}: {', '.join(f'{name} {_size(n)}' for name, n in parts.items())}",
        "texts to write": f"{texts:,}, whose time is not in this plan",
        "a step": f"{batch} texts of up to {length} tokens, {batch * anchors} groups of {slots} slots",
        "steps": f"{left:,}, at most {left * batch * (length + anchors * slots):,} rows",
        "time": f"{each:.2f} s a step, {left * each / 3600:.2f} hours",
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def memory_of(trainer: LookaheadTrainer, model: Any, *, rows: int, loss: str) -> dict[str, int]:
    """Bytes that a step of so many rows of slots takes, by what they are for."""
    trained, weights = list(trainer.module.parameters()), list(model.parameters())
    head = model.get_output_embeddings().weight
    in_full = [weight.numel() * head.element_size() for weight in weights if not is_plain(weight)]
    return {
        "model": sum(map(bytes_of, weights)) + max(in_full, default=0),
        "trained": 16 * sum(parameter.numel() for parameter in trained),
        "kept for the gradient": kept_bytes(lambda: trainer.loss(0), [*weights, *trained]),
        "loss": chunk_bytes(head, rows, loss),
    }


def kept_bytes(forward: Callable[[], Any], parameters: Iterable[Tensor]) -> int:
    """Bytes of the tensors that a forward keeps for its gradient beside the parameters; shared memory is counted once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters if is_plain(parameter)}
    sizes: dict[int, int] = {}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        if not is_plain(tensor):  # a quantised weight
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept.append(tensor)  # alive, so that no other tensor gets its address
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(sizes.values())


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
