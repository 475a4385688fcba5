"""The optimisation: Adam on the look-ahead parameters alone, the model frozen, with checkpoints to go on from.

loss = sum over slots of decay^i * KL(teacher || slot i), averaged over groups and divided by the sum of decay^i.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.training.common.frozen_model import text_rows
from pass_ext.training.common.loss import distillation_loss
from pass_ext.training.common.schedule import rate_at
from pass_ext.training.common.windows import Window, Windows
from pass_ext.training.lookahead.forward import slot_rows, transition_hidden


@dataclass(frozen=True)
class Settings:
    """What decides the result of a run, beside the data."""

    steps: int
    learning_rate: float
    transition_learning_rate: float
    deep_learning_rate: float
    warm_up: int
    decay: float
    clip: float
    loss: str  # "kl" or "cross-entropy"


def step_loss(model: Any, embedding: LookaheadEmbedding, window: Window, decay: float, loss: str = "kl") -> Tensor:
    """The loss of one step's groups; its graph reaches the look-ahead parameters only."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    slots, (batch, count) = embedding.num_lookahead, window.anchors.shape
    ids, anchors = window.ids.to(table.device), window.anchors.to(table.device)
    text, past = text_rows(model, ids)
    rows = [slot_rows(model, embedding, anchors, past).flatten(0, 2)]
    tables = [head.weight]
    # Slot i stands where the ordinary row at a + 1 + i stands, which is its teacher and whose token precedes the one sought.
    place = anchors[..., None] + 1 + torch.arange(slots, device=anchors.device)
    flat = (place + ids.shape[1] * torch.arange(batch, device=anchors.device)[:, None, None]).flatten()
    if embedding.rank:
        score = transition_hidden(embedding, table, ids.flatten()[flat])
        if head.weight.data_ptr() == table.data_ptr():  # tied: one product for both
            rows = [rows[0] + score]
        else:
            rows, tables = [*rows, score], [*tables, table]
    powers = decay ** torch.arange(slots, dtype=torch.float32, device=table.device)
    weights = (powers / powers.sum() / (batch * count)).repeat(batch * count)
    if loss == "kl":
        return distillation_loss(rows, tables, weights, teacher_rows=text.flatten(0, 1), teacher=flat, bias=head.bias)
    labels = ids.flatten()[flat + 1]
    return distillation_loss(rows, tables, weights, bias=head.bias, labels=labels)


class Trainer:
    """Trains ``embedding`` in place; ``save`` and ``restore`` move a run through a file."""

    def __init__(self, model: Any, embedding: LookaheadEmbedding, windows: Windows, settings: Settings) -> None:
        self.model, self.embedding, self.windows, self.settings = model, embedding, windows, settings
        self.losses: list[float] = []
        speeds = {
            "weight": settings.learning_rate,
            "transition_left": settings.transition_learning_rate,
            "transition_right": settings.transition_learning_rate,
            "deep": settings.deep_learning_rate,
        }
        self.rates = [speeds[name] for name, _ in embedding.named_parameters()]
        groups = [{"params": [parameter]} for parameter in embedding.parameters()]
        self.optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self.losses)

    def run(self, until: int, after_step: Callable[[int, float], None] = lambda step, loss: None) -> None:
        """Steps until ``until`` of them are done; ``after_step(steps done, loss)`` is called behind each."""
        while self.step < until:
            settings = self.settings
            factor = rate_at(self.step, settings.steps, settings.warm_up)
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * factor
            loss = step_loss(self.model, self.embedding, self.windows.at(self.step), settings.decay, settings.loss)
            self.optimizer.zero_grad()
            loss.backward()
            for parameter in self.embedding.parameters():  # each by itself: their scales differ
                torch.nn.utils.clip_grad_norm_([parameter], settings.clip)
            self.optimizer.step()
            self.losses.append(loss.item())
            after_step(self.step, self.losses[-1])

    def save(self, path: Path, identity: str, seconds: float = 0.0) -> None:
        """Writes the state; ``identity`` says which run it belongs to, ``seconds`` how long it has trained."""
        state = {
            "identity": identity,
            "embedding": self.embedding.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
            "seconds": seconds,
        }
        fresh = path.with_suffix(".new")
        try:
            with fresh.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())  # else a power cut may leave the new name with nothing behind it
            fresh.replace(path)  # a run that is stopped here keeps the older checkpoint whole
        except Exception as error:  # a full disk is an OSError or a RuntimeError
            fresh.unlink(missing_ok=True)
            raise SystemExit(
                f"{path} cannot be written, the checkpoint before it stays: {_first_line(error)}"
            ) from error

    def restore(self, path: Path, identity: str) -> float | None:
        """Goes on where ``save`` was; the seconds until then, None if they are lost. Other runs' checkpoints are refused."""
        try:
            state = torch.load(path, weights_only=True)
            if state["identity"] != identity:
                raise SystemExit(
                    f"{path} belongs to a run with other settings or data: give the same ones, or another --out\n"
                    f"  there: {state['identity']}\n  now:   {identity}"
                )
            self.embedding.load_state_dict(state["embedding"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.losses = list(map(float, state["losses"]))
        except Exception as error:
            raise SystemExit(
                f"{path} is damaged or was cut off: delete it to train from the first step on, or give another --out\n"
                f"  {_first_line(error)}"
            ) from error
        seconds = state.get("seconds")
        return seconds if isinstance(seconds, float) and 0 <= seconds < math.inf else None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
