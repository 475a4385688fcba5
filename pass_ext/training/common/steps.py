"""``Trainer``: steps of an optimiser on a module's parameters, and a checkpoint to go on from. ``take_steps`` runs them.

rate of step t = the group's rate · schedule(t);   the gradient of a group of parameters is clipped together

``Phase`` shows how far a part of a run is; ``ended_by_ctrl_c`` ends a command that is stopped.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

_RECENT = 25  # steps whose mean loss is shown
_SILENT = 30.0  # seconds at most between two lines of a log, if the parts of the work are not longer
_Item = TypeVar("_Item")


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
                os.fsync(file.fileno())  # else a power cut may leave the new name with nothing after it
            fresh.replace(path)  # a run that is stopped here keeps the older checkpoint whole
        except Exception as error:  # a full disk is an OSError or a RuntimeError
            fresh.unlink(missing_ok=True)
            raise SystemExit(
                f"{path} cannot be written, the checkpoint before it stays: {_first_line(error)}"
            ) from error

    def restore(self, path: Path, identity: str) -> float:
        """Goes on where ``save`` was; the seconds until then. Other runs' checkpoints are refused."""
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
            return float(state["seconds"])
        except Exception as error:
            raise SystemExit(
                f"{path} is damaged or was cut off: delete it to train from the first step on, or give another --out\n"
                f"  {_first_line(error)}"
            ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


class Checkpoint(NamedTuple):
    """Where a run keeps its state, and which run it is."""

    path: Path
    identity: str


class Phase:
    """A part of a run that goes from ``done`` to ``total``: a bar on a terminal, elsewhere lines with the time left."""

    def __init__(self, console: Any, description: str, total: int, *, done: int = 0) -> None:
        self._console, self._description, self._total = console, description, total
        self._begun_at = self._done = done
        self._bar = _bar(console) if console.is_terminal else None

    def __enter__(self) -> Phase:
        self._started = self._said = time.monotonic()
        if self._bar is None:
            self._say("")
        else:
            self._bar.start()
            self._task = self._bar.add_task(self._description, total=self._total, completed=self._done, shown="")
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int, shown: str = "", *, is_worth_a_line: bool = False) -> None:
        """Shows that so much more is done, with a text after it."""
        self._done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, shown=shown)
        elif is_worth_a_line or self._done == self._total or time.monotonic() - self._said >= _SILENT:
            self._say(shown)

    def _say(self, shown: str) -> None:
        self._said = time.monotonic()
        spent, done = self._said - self._started, self._done - self._begun_at
        parts = [f"{self._description}: {self._done:,} of {self._total:,}", shown]
        if done:
            left = spent * (self._total - self._done) / done
            parts.append(f"{_clock(left)} left" if self._done < self._total else f"in {_clock(spent)}")
        self._console.print(", ".join(filter(None, parts)), markup=False, soft_wrap=True)
        self._console.file.flush()  # a log shows how far a run is


def watched(console: Any, description: str, items: Iterable[_Item], total: int) -> Iterator[_Item]:
    """The items, shown as a phase."""
    with Phase(console, description, total) as phase:
        for item in items:
            yield item
            phase.advance(1)


def take_steps(
    trainer: Trainer,
    console: Any,
    description: str = "training",
    *,
    every: int = 50,
    checkpoint: Checkpoint | None = None,
    minutes: float = 0,
) -> float:
    """Runs the steps that are left; seconds of training, those of earlier parts of the run counted in.

    ``every`` so many steps, and at the end, the state goes into ``checkpoint``, and a line to a console that is no terminal.
    ``minutes``: stop after this long; 0: never. Ctrl-C ends the step that is going on, saves and raises KeyboardInterrupt.
    """
    earlier = _resume(trainer, checkpoint, console)
    started = time.monotonic()

    def save() -> None:
        if checkpoint is not None:
            trainer.save(*checkpoint, earlier + time.monotonic() - started)

    with _noted_interrupt() as interrupted, Phase(console, description, trainer.steps, done=trainer.step) as phase:
        while trainer.step < trainer.steps and not interrupted.is_set():
            trainer.run(trainer.step + 1)
            recent = trainer.losses[-_RECENT:]
            is_saved = trainer.step % every == 0
            phase.advance(1, f"loss {sum(recent) / len(recent):.3f}", is_worth_a_line=is_saved)
            if is_saved:
                save()
            if minutes and time.monotonic() - started > 60 * minutes:
                break
        save()
    if interrupted.is_set():
        raise KeyboardInterrupt
    return earlier + time.monotonic() - started


@contextmanager
def ended_by_ctrl_c(out: str) -> Iterator[None]:
    """Inside, Ctrl-C ends the program with a sentence."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(f"stopped: {out} keeps what was written, and the same command goes on from there") from None


@contextmanager
def _noted_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that a step is not cut in two; a second one interrupts at once."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread
        yield interrupted
        return

    def note(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        interrupted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _bar(console: Any) -> Any:
    """A bar with a description, counts, the time left, and a text ``shown`` after them."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[shown]}"), console=console)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _resume(trainer: Trainer, checkpoint: Checkpoint | None, console: Any) -> float:
    """Seconds that the run has trained before; 0 for a new one."""
    if checkpoint is None or not checkpoint.path.exists():
        return 0.0
    seconds = trainer.restore(*checkpoint)
    console.print(f"going on from step {trainer.step} of {trainer.steps}")
    return seconds
