"""``Worker``: a contender in its own process, started once: a JSON line to it, a JSON line back."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import CORES, ROOT

SHORTEST_LOOK, IDLE_SHARE, LONGEST_WAIT = 0.05, 0.1, 2.0
"""A worker rests when it used less than this share of a core for so many seconds; it is awaited no longer than the last."""


class WorkerFailed(RuntimeError):
    """The worker ended, or gave no answer in time."""


class Worker:
    """The process of one contender.

    Args:
        python: of the contender's environment.
        module: a module of `benchmarks.contenders.workers`.
        options: its options.
        environment: variables beside this process's.
        log: the file of its output.
    """

    def __init__(
        self, python: Path, module: str, options: Mapping[str, Any], environment: Mapping[str, str], log: Path
    ) -> None:
        self._log = log
        command = [str(python), "-m", f"benchmarks.contenders.workers.{module}", json.dumps(options)]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=_on_all_cores if CORES else None,
            )

    def answer(self, most_seconds: float) -> dict[str, Any]:
        """The next line of the worker; WorkerFailed with the log's end if none comes."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], most_seconds)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            if ready:  # its end is at hand, with its last words
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(LONGEST_WAIT)
            self.stop()
            why = "ended" if ready else f"no answer in {most_seconds:.0f} s"
            raise WorkerFailed(f"{why}: {' | '.join(self._last_words())}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, request: Mapping[str, Any], most_seconds: float) -> dict[str, Any]:
        """The answer to one request; then waits until the worker's threads rest."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerFailed(f"ended: {' | '.join(self._last_words())}") from error
        answer = self.answer(most_seconds)
        self._settle()
        return answer

    def cpu_seconds(self) -> float:
        """CPU time of the process so far, all threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Ends the process and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _settle(self) -> None:
        """Some OpenMP libraries spin for a while after their work, on the next contender's time."""
        deadline = time.monotonic() + LONGEST_WAIT
        while time.monotonic() < deadline:
            before = self.cpu_seconds()
            time.sleep(SHORTEST_LOOK)
            if self.cpu_seconds() - before <= IDLE_SHARE * SHORTEST_LOOK:
                return

    def _last_words(self) -> list[str]:
        return self._log.read_text(errors="replace").strip().splitlines()[-3:]


def _on_all_cores() -> None:
    os.sched_setaffinity(0, CORES)
