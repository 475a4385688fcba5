"""``Trainer``: steps of an optimiser on a module's parameters, and a checkpoint to go on from.

rate of step t = the group's rate · schedule(t);   the gradient of a group of parameters is clipped together
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def rate_at(step: int, steps: int, warm_up: int) -> float:
    """The learning rate's factor: up in a straight line for ``warm_up`` steps, then down along a cosine."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(steps - warm_up, 1)))


class Trainer(ABC):
    """Trains ``module`` in place for ``steps`` steps; ``save`` and ``restore`` move a run through a file.

    ``losses`` holds the loss of every step so far. ``clip``: the largest gradient norm of a parameter group; None: not clipped.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        steps: int,
        schedule: Callable[[int], float] = lambda step: 1.0,
        clip: float | None = None,
    ) -> None:
        self.module, self.steps = module, steps
        self.losses: list[float] = []
        self._optimizer, self._schedule, self._clip = optimizer, schedule, clip
        self._rates = [group["lr"] for group in optimizer.param_groups]

    @abstractmethod
    def loss(self, step: int) -> Tensor:
        """The loss of one step's data, which the step's number alone decides; its graph reaches the module only."""

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self.losses)

    @torch.enable_grad()
    def run(self, until: int | None = None) -> None:
        """Steps until ``until`` of them are done; None: all."""
        while self.step < (self.steps if until is None else until):
            factor = self._schedule(self.step)
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
            loss = self.loss(self.step)
            self._optimizer.zero_grad()
            loss.backward()
            if self._clip is not None:
                for group in self._optimizer.param_groups:
                    nn.utils.clip_grad_norm_(group["params"], self._clip)
            self._optimizer.step()
            self.losses.append(loss.item())

    def save(self, path: Path, identity: str, seconds: float = 0.0) -> None:
        """Writes the state; ``identity`` says which run it belongs to, ``seconds`` how long it has trained."""
        state = {
            "identity": identity,
            "module": self.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
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
            state: dict[str, Any] = torch.load(path, weights_only=True)
            if state["identity"] != identity:
                raise SystemExit(
                    f"{path} belongs to a run with other settings or data: give the same ones, or another --out\n"
                    f"  there: {state['identity']}\n  now:   {identity}"
                )
            self.module.load_state_dict(state["module"])
            self._optimizer.load_state_dict(state["optimizer"])
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
