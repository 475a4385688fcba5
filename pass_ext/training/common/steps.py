"""``Trainer``: steps of an optimiser on a module's parameters, and a checkpoint to go on from. ``take_steps`` runs them.

rate of step t = the group's rate · schedule(t);   the gradient of a group of parameters is clipped together

Of several ranks each computes the gradient of its share of a step; the sum is the step's, and all take the same step.
``Phase`` shows how far a part of a run is; ``ended_by_signals`` ends a command that is stopped.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from pass_ext.training.common.logs import Log
from pass_ext.training.common.ranks import Ranks

_RECENT = 25  # steps whose mean loss is shown
_TIMED = 20  # of so many steps, one is timed in parts
_SILENT = 30.0  # seconds at most between two lines of a log, if the parts of the work are not longer
_Item = TypeVar("_Item")


def rate_at(step: int, steps: float, warm_up: int) -> float:
    """The learning rate's factor: up in a straight line for ``warm_up`` steps, then down along a cosine."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * min(1, (step - warm_up) / max(steps - warm_up, 1))))


class NotFinite(Exception):
    """A step whose loss or gradient is NaN or infinite; it changed nothing."""


class Trainer(ABC):
    """Trains ``module`` in place for ``steps`` steps; ``save`` and ``restore`` move a run through a file.

    ``losses`` holds the loss of every step so far. ``clip``: the largest gradient norm of a parameter group; None: not clipped.
    ``ranks``: the processes that share each step. ``time_budget``: minutes of training after which the steps end; 0: none.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        steps: int,
        schedule: Callable[[int], float] = lambda step: 1.0,
        clip: float | None = None,
        ranks: Ranks | None = None,
        time_budget: float = 0.0,
    ) -> None:
        self.module, self.steps, self.ranks = module, steps, ranks or Ranks()
        self.time_budget, self.minutes = time_budget, 0.0
        """The minutes of training so far, of all calls of the command; as ``take_steps`` counts them."""
        self.losses: list[float] = []
        self.scores: dict[int, float] = {}
        """Steps -> the held-out score after them, for early stopping."""
        self.best: dict[str, Tensor] | None = None
        """The module's state where the score was best."""
        self.tokens = 0
        """Of all ranks, read by the steps of this call."""
        self.seconds: dict[str, list[float]] = {}
        """Part of a step -> its seconds in some steps of this call."""
        self._optimizer, self._schedule, self._clip = optimizer, schedule, clip
        self._rates = [group["lr"] for group in optimizer.param_groups]

    @abstractmethod
    def loss(self, step: int) -> Tensor:
        """This rank's part of the loss of one step's data, which the step's number alone decides; the parts add up to the
        loss. Its graph reaches the module only."""

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self.losses)

    @property
    def is_over_budget(self) -> bool:
        """True if the minutes of the budget have passed."""
        return 0 < self.time_budget <= self.minutes

    def expected_steps(self, step: int) -> float:
        """How many steps there will be, of which so many took the minutes so far."""
        if not self.time_budget or not self.minutes:
            return self.steps
        return min(self.steps, step * self.time_budget / self.minutes)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times a part of a step, in every so many-th step: a GPU must be waited for."""
        if self.step % _TIMED:
            yield
            return
        started = _now()
        yield
        self.seconds.setdefault(name, []).append(_now() - started)

    def note_score(self, score: float) -> bool:
        """Keeps a held-out score of the parameters as they are; True if it is the best so far."""
        is_best = score > max(self.scores.values(), default=-math.inf)
        self.scores[self.step] = score
        if is_best:
            self.best = {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}
        return is_best

    @torch.enable_grad()
    def run(self, until: int | None = None) -> None:
        """Steps until ``until`` of them are done; None: all. Raises NotFinite."""
        while self.step < (self.steps if until is None else until):
            factor = self._schedule(self.step)
            for settings, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                settings["lr"] = rate * factor
            loss = self.loss(self.step)
            self._optimizer.zero_grad()
            with self.part("backward"):
                loss.backward()
            total = loss.detach().float()
            with self.part("exchange"):
                self.ranks.total_([total, *self._gradients()])
            groups: list[list[nn.Parameter]] = [group["params"] for group in self._optimizer.param_groups]
            norms = [nn.utils.get_total_norm([one.grad for one in group if one.grad is not None]) for group in groups]
            self._check_finite(total, norms)
            with self.part("optimiser"):
                if self._clip is not None:
                    for group, norm in zip(groups, norms, strict=True):
                        nn.utils.clip_grads_with_norm_(group, self._clip, norm)
                self._optimizer.step()
            self.losses.append(total.item())

    def _gradients(self) -> list[Tensor]:
        """One of each parameter that is trained, zeros where this rank's share has none."""
        for parameter in self.module.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def _check_finite(self, loss: Tensor, norms: list[Tensor]) -> None:
        if bool(torch.stack([loss, *norms]).isfinite().all()):
            return
        names = [
            f"the gradient of {name}"
            for name, parameter in self.module.named_parameters()
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all())
        ]
        where = [f"the loss ({loss.item()})"] * (not loss.isfinite()) + names
        raise NotFinite(f"step {self.step + 1} of {self.steps} is not finite: {', '.join(where[:4])}")

    def save(self, path: Path, identity: str, seconds: float = 0.0) -> None:
        """Writes the state, on the first rank; ``identity`` says which run it is, ``seconds`` how long it has trained."""
        if not self.ranks.is_first:
            return
        state = {
            "identity": identity,
            "module": self.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "losses": self.losses,
            "scores": self.scores,
            "best": self.best,
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
            state = self.ranks.first(lambda: _read(path, identity))
            self.module.load_state_dict(state["module"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.losses, self.scores, self.best = (
                list(map(float, state["losses"])),
                dict(state["scores"]),
                state["best"],
            )
            return float(state["seconds"])
        except Exception as error:
            raise SystemExit(
                f"{path} is damaged or was cut off: delete it to train from the first step on, or give another --out\n"
                f"  {_first_line(error)}"
            ) from error


def _read(path: Path, identity: str) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    if state["identity"] != identity:
        raise SystemExit(
            f"{path} belongs to a run with other settings or data: give the same ones, or another --out\n"
            f"  there: {state['identity']}\n  now:   {identity}"
        )
    return state


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _now() -> float:
    """Seconds, when what was given to a GPU is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class HeldOut(NamedTuple):
    """Early stopping: ``score()``, the larger the better, ``every`` so many steps; after ``patience`` scores below the best the
    steps end, and the module gets the parameters of the best one."""

    score: Callable[[], float]
    every: int
    patience: int


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

    def expect(self, total: int) -> None:
        """Changes where the part ends."""
        self._total = total
        if self._bar is not None:
            self._bar.update(self._task, total=total)

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
    held_out: HeldOut | None = None,
    logs: Callable[[int], Sequence[Log]] = lambda step: (),
) -> float:
    """Runs the steps that are left; seconds of training, those of earlier parts of the run counted in.

    ``every`` so many steps, and at the end, the state goes into ``checkpoint``, and a line to a console that is no terminal.
    ``minutes``: stop after this long; 0: never. Ctrl-C ends the step that is going on, saves and raises KeyboardInterrupt;
    SIGTERM raises Terminated. What any rank is told, all do after the same step. A step that is not finite, or a rank that is
    gone, ends the program with a sentence, after the steps before were saved. ``logs(step)`` gives where the numbers of the
    steps after ``step`` go.
    """
    earlier = _resume(trainer, checkpoint, console)
    trainer.minutes = earlier / 60
    started = time.monotonic()

    def save() -> None:
        if checkpoint is not None:
            trainer.save(*checkpoint, earlier + time.monotonic() - started)

    end, opened, began = "", logs(trainer.step), trainer.step

    def log(**values: float) -> None:
        for one in opened:
            one.add(trainer.step, values)

    if held_out and _is_stale(trainer, held_out):
        end = "PATIENCE"
    with (
        _noted_signals(trainer.ranks.count) as noted,
        Phase(console, description, trainer.steps, done=trainer.step) as phase,
    ):
        while trainer.step < trainer.steps and not end and not trainer.is_over_budget:
            try:
                trainer.run(trainer.step + 1)
            except NotFinite as error:
                save()
                raise SystemExit(
                    f"{error}; {_kept(trainer, checkpoint)}. Lower the learning rate, or --clip"
                ) from error
            except SystemExit:  # another rank is gone; this one's module is that of the last whole step
                save()
                raise
            recent = trainer.losses[-_RECENT:]
            rate = trainer.tokens / (time.monotonic() - started)
            is_saved, shown = trainer.step % every == 0, f"loss {sum(recent) / len(recent):.3f}, {rate:,.0f} tokens/s"
            log(loss=trainer.losses[-1], tokens_per_second=rate)
            if held_out and trainer.step % held_out.every == 0:
                trainer.note_score(score := held_out.score())
                log(held_out_score=score)
                shown += f", held out {score:.3f}"
                end = "PATIENCE" if _is_stale(trainer, held_out) else ""
            phase.expect(max(trainer.step, round(trainer.expected_steps(trainer.step))))
            phase.advance(1, shown, is_worth_a_line=is_saved)
            if is_saved:
                save()
            is_late = bool(minutes) and time.monotonic() - started > 60 * minutes
            # in the order of letters a signal is the last
            end = noted[-1] if noted else "MINUTES" if is_late else end
            told = trainer.ranks.gather((end, (earlier + time.monotonic() - started) / 60))
            end, trainer.minutes = max(each for each, _ in told), max(spent for _, spent in told)
        save()
    for one in opened:
        one.close()
    if end in _ENDED_BY:
        raise _ENDED_BY[end]
    if trainer.best is not None:
        best = max(trainer.scores, key=lambda step: trainer.scores[step])
        console.print(f"the parameters of step {best}, the best on held-out texts: {trainer.scores[best]:.3f}")
        trainer.module.load_state_dict(trainer.best)
    if trainer.seconds and trainer.step > began:
        console.print(f"a step: {parts_of_step(trainer)}", markup=False, soft_wrap=True)
    return earlier + time.monotonic() - started


def parts_of_step(trainer: Trainer) -> str:
    """The mean seconds of each part of a step."""
    return ", ".join(f"{name} {sum(each) / len(each):.3f} s" for name, each in trainer.seconds.items())


def _is_stale(trainer: Trainer, held_out: HeldOut) -> bool:
    """True if none of the last scores is the best."""
    scores = list(trainer.scores.values())
    return len(scores) > held_out.patience and max(scores) not in scores[-held_out.patience :]


def _kept(trainer: Trainer, checkpoint: Checkpoint | None) -> str:
    return f"{checkpoint.path} keeps step {trainer.step}" if checkpoint else "nothing is kept"


class Terminated(BaseException):
    """SIGTERM came, as from a scheduler that takes the machine back."""


_ENDED_BY: dict[str, type[BaseException]] = {"SIGINT": KeyboardInterrupt, "SIGTERM": Terminated}


@contextmanager
def ended_by_signals(out: str) -> Iterator[None]:
    """Inside, Ctrl-C ends the program with a sentence, and SIGTERM with the sentence and status 0."""

    def terminate(*_: object) -> None:
        raise Terminated

    is_main = threading.current_thread() is threading.main_thread()  # signals go to the main thread
    before = signal.signal(signal.SIGTERM, terminate) if is_main else None
    stopped = f"stopped: {out} keeps what was written, and the same command goes on from there"
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(stopped) from None
    except Terminated:
        print(stopped, file=sys.stderr)
        raise SystemExit(0) from None
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _noted_signals(ranks: int) -> Iterator[list[str]]:
    """SIGINT and SIGTERM are noted, so that a step is not cut in two. A second Ctrl-C interrupts at once, unless there are
    several ranks: these get one from the terminal and one from their launcher."""
    noted: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, _: object) -> None:
        noted.append(signal.Signals(number).name)
        if ranks == 1 and number == signal.SIGINT:
            signal.signal(signal.SIGINT, interrupt)

    interrupt, terminate = signal.signal(signal.SIGINT, note), signal.signal(signal.SIGTERM, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)


def _bar(console: Any) -> Any:
    """A bar with a description, counts, the time left, and a text ``shown`` after them."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[shown]}"), console=console)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _resume(trainer: Trainer, checkpoint: Checkpoint | None, console: Any) -> float:
    """Seconds that the run has trained before; 0 for a new one."""
    if checkpoint is None or not trainer.ranks.first(checkpoint.path.exists):
        return 0.0
    seconds = trainer.restore(*checkpoint)
    console.print(f"going on from step {trainer.step} of {trainer.steps}")
    return seconds
