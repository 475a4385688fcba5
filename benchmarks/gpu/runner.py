"""Runs stages one after the other, and the jobs of a stage side by side, within the time of the run.

    seconds of a stage = min(its limit, the rest of the run)

Each job is a process group. Its output goes to the screen and to the log line by line. When its time is up it gets SIGINT, so
that pytest and Python can report, and SIGKILL some seconds later. A job that dies is started again where its stage allows
that, and tests with a recorded outcome are left out then (outcomes.py). If the runner is killed, the system kills its jobs,
and the evidence stays.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from benchmarks import CORES
from benchmarks.gpu.record import REST
from benchmarks.harness import evidence

_GRACE = 8.0  # seconds from SIGINT to SIGKILL
_LEAST = 5.0  # the least rest of a run in which a stage begins
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Stage:
    """One step of a run: commands and their limits."""

    name: str
    jobs: Mapping[str, Sequence[str]]
    """Commands by name; they run side by side."""
    seconds: float
    """The limit for all jobs together."""
    environment: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    """The number of times that a job that died is started again."""
    fine: tuple[int, ...] = (0,)
    """Exit statuses of a job that passed."""
    ended: tuple[int, ...] = (0, 1)
    """Exit statuses of a job that came to its end; with any other it died."""
    impossible: str = ""
    """The reason why this stage cannot run here; empty if it can."""
    keeps_output: bool = False
    """True if the output of the jobs is a result and goes into the evidence."""


class Runner:
    """Runs stages into one evidence file and one log.

    Args:
        path: the evidence file; it must hold its "run" fact.
        log: the file for the output of all jobs.
        until: time.monotonic() at which the run must be over.
        most_log: characters of the log; the screen shows the others too.
    """

    def __init__(self, path: Path, log: Path, until: float, most_log: int = 12 << 20) -> None:
        self._path, self._until = path, until
        self._log, self._most_log = log.open("a"), most_log
        self._lock = threading.Lock()

    def run(self, stages: Sequence[Stage]) -> bool:
        """Runs the stages; True if each passed or cannot run here. A stage without time does not begin and has not passed."""
        fine = [self._run(stage) for stage in stages]  # a list: every stage runs, also after a failure
        return all(fine)

    def say(self, text: str) -> None:
        """Prints a line to the screen and the log."""
        self._print(f"{time.strftime('%H:%M:%S', time.gmtime())}  {text}\n")

    def _print(self, line: str) -> None:
        with self._lock:
            self._most_log -= len(line)
            for file in (sys.stdout, *([self._log] if self._most_log > 0 else [])):
                print(line, end="", file=file, flush=True)

    def _run(self, stage: Stage) -> bool:
        left = self._until - time.monotonic()
        if stage.impossible:
            return self._end(stage, f"left out: {stage.impossible}", True)
        if left < _LEAST:
            return self._end(stage, "left out: no time", False)
        self._fact(stage, "begun")
        self.say(f"== {stage.name}: at most {min(stage.seconds, left):.0f} s")
        began = time.monotonic()
        until = began + min(stage.seconds, left)
        results: dict[str, str] = {}
        threads = [
            threading.Thread(target=self._job, args=(stage, name, list(command), until, results))
            for name, command in stage.jobs.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        bad = [f"{name}: {results[name]}" for name in stage.jobs if results[name] != "passed"]
        duration = f"{time.monotonic() - began:.0f} s"
        return self._end(stage, "; ".join(bad) if bad else "passed", not bad, duration)

    def _end(self, stage: Stage, state: str, fine: bool, duration: str = "0 s") -> bool:
        self._fact(stage, state)
        self.say(f"-- {stage.name}: {state}, {duration}")
        return fine

    def _fact(self, stage: Stage, state: str) -> None:
        evidence.add(self._path, "stage", name=stage.name, state=state)

    def _job(self, stage: Stage, name: str, command: list[str], until: float, results: dict[str, str]) -> None:
        """Runs a job until it ends, its time is up, or it has died too often."""
        for attempt in range(stage.restarts + 1):
            status, cut_off = self._process(stage, name, command, until)
            if status in stage.fine:
                results[name] = "passed"
            elif cut_off:
                results[name] = "cut off"
            else:
                results[name] = f"killed by signal {-status}" if status < 0 else f"failed with status {status}"
            evidence.add(self._path, "job", stage=stage.name.removesuffix(REST), name=name, state=results[name])
            if cut_off or status in stage.ended or until - time.monotonic() < _LEAST:
                return
            if attempt < stage.restarts:
                self.say(f"{stage.name} {name}: {results[name]}; it starts again after that test")

    def _process(self, stage: Stage, name: str, command: list[str], until: float) -> tuple[int, bool]:
        """Runs a command; its exit status, and True if its time was up."""
        environment = {**os.environ, **stage.environment, evidence.PATH: str(self._path.resolve())}
        environment["PASS_EXT_STAGE"] = stage.name.removesuffix(REST)
        environment.pop("OMP_PROC_BIND", None)  # this process pinned itself; jobs side by side would share its core
        try:
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                start_new_session=True, preexec_fn=_dies_with(os.getpid()),
            )  # fmt: skip
        except OSError as error:
            self.say(f"{stage.name} {name}: {error}")
            return 127, False
        assert process.stdout is not None
        lines: list[str] = []
        reader = threading.Thread(target=self._copy, args=(process.stdout, f"{name}: ", lines), daemon=True)
        reader.start()
        cut_off = not _wait(process, until)
        reader.join(timeout=2.0)  # a stray grandchild may hold the pipe
        if stage.keeps_output:
            evidence.add(self._path, "text", stage=stage.name, name=name, text="".join(lines)[-200_000:])
        return process.returncode, cut_off

    def _copy(self, output: IO[str], prefix: str, lines: list[str]) -> None:
        for line in output:
            lines.append(line)
            self._print(prefix + line)


def _wait(process: subprocess.Popen[str], until: float) -> bool:
    """True if the process ended by itself; else it is killed with everything that it started."""
    try:
        process.wait(max(0.0, until - time.monotonic()))
        return True
    except subprocess.TimeoutExpired:
        pass
    os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return False


def _dies_with(parent: int) -> Callable[[], None]:
    """Prepares a job: all cores of this process, death with it, and an interrupt that ends it: a shell's background ignores
    them."""
    libc = ctypes.CDLL(None)  # loaded before the fork: after it almost nothing is safe

    def ask() -> None:
        if CORES:
            os.sched_setaffinity(0, CORES)
        libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return ask
