"""``take_steps``: a trainer's steps under a progress bar, from a checkpoint on and with checkpoints between them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from pass_ext.training.common.trainer import Trainer

_RECENT = 25  # steps whose mean loss is shown


class Checkpoint(NamedTuple):
    """Where a run keeps its state, and which run it is."""

    path: Path
    identity: str


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
    ``minutes``: stop after this long; 0: never.
    """
    earlier = _resume(trainer, checkpoint, console)
    started = time.monotonic()

    def spent() -> float:
        return earlier + time.monotonic() - started

    def save() -> None:
        if checkpoint is not None:
            trainer.save(*checkpoint, spent())

    with progress_bar(console) as progress:
        task = progress.add_task(description, total=trainer.steps, completed=trainer.step, shown="")
        while trainer.step < trainer.steps:
            trainer.run(trainer.step + 1)
            recent = trainer.losses[-_RECENT:]
            loss = sum(recent) / len(recent)
            progress.update(task, completed=trainer.step, shown=f"loss {loss:.3f}")
            if trainer.step % every == 0:
                save()
                if not console.is_terminal:
                    console.print(f"{description}, step {trainer.step}: loss {loss:.4f}, {spent():.0f} s")
            if minutes and time.monotonic() - started > 60 * minutes:
                break
    save()
    return spent()


def progress_bar(console: Any) -> Any:
    """A bar with a description, counts, the time left, and a text ``shown`` behind them."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[shown]}"), console=console)


def _resume(trainer: Trainer, checkpoint: Checkpoint | None, console: Any) -> float:
    """Seconds that the run has trained before; 0 for a new one."""
    if checkpoint is None or not checkpoint.path.exists():
        return 0.0
    seconds = trainer.restore(*checkpoint)
    console.print(f"going on from step {trainer.step} of {trainer.steps}")
    if seconds is None:
        console.print(f"{checkpoint.path} does not say how long it was trained: time is counted from now on")
    return seconds or 0.0
