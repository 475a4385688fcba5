"""``take_steps``: a trainer's steps, from a checkpoint on and with checkpoints between them.

``Phase`` shows how far a part of a run is; ``ended_by_ctrl_c`` ends a command that is stopped.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pass_ext.training.common.trainer import Trainer

_RECENT = 25  # steps whose mean loss is shown
_SILENT = 30.0  # seconds at most between two lines of a log, if the parts of the work are not longer
_Item = TypeVar("_Item")


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
        """Shows that so much more is done, with a text behind it."""
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
    """A bar with a description, counts, the time left, and a text ``shown`` behind them."""
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
    if seconds is None:
        console.print(f"{checkpoint.path} does not say how long it was trained: time is counted from now on")
    return seconds or 0.0
