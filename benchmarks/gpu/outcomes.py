"""A pytest plugin that records the beginning and the outcome of each test at once: ``pytest -p benchmarks.gpu.outcomes``.

Tests with a known outcome are left out: those that ended in this run, and those that passed or were skipped in an earlier run
of the same commit. So a process that died can be started again. A test that takes longer than PASS_EXT_TEST_SECONDS ends its
process, even if it hangs in a kernel, and stays "begun". A test that leaves the GPU unusable ends the process too: every test
after it would fail. A test of the CUDA kernels that passes without a tensor on the GPU shows nothing of them: its outcome is
"nothing".
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import evidence

STAGE, SECONDS = "PASS_EXT_STAGE", "PASS_EXT_TEST_SECONDS"
SOME_FAILED = 10
"""Exit status of a session that ran all its tests and had failures. pytest's own 1 is also that of a process that hung."""
_STDERR = os.fdopen(os.dup(2), "w")
"""The process's own stderr: pytest redirects 2 later, and what is there when a process ends is lost."""
_MOST_REASON = 4000  # characters, from the end of a traceback


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin inside of a run."""
    if os.environ.get(evidence.PATH):
        config.pluginmanager.register(Outcomes(Path(os.environ[evidence.PATH]), os.environ[STAGE]), "outcomes")


class Outcomes:
    """Records outcomes of tests into the evidence file."""

    def __init__(self, path: Path, stage: str) -> None:
        self._path, self._stage = path, stage
        self._seconds = float(os.environ.get(SECONDS, "60"))
        self._worst, self._seconds_taken, self._reason = "passed", 0.0, ""
        self._session: Any = None
        self._running: str | None = None
        self._used_gpu = True

    def _known(self) -> set[str]:
        known = set(evidence.outcomes(evidence.read(self._path), self._stage))
        for path in evidence.of_same_commit(self._path):
            ended = evidence.outcomes(evidence.read(path), self._stage)
            known |= {test for test, outcome in ended.items() if outcome in ("passed", "skipped", "nothing")}
        return known

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves out tests with a known outcome."""
        known = self._known()
        left_out = [item for item in items if item.nodeid in known]
        items[:] = [item for item in items if item.nodeid not in known]
        config.hook.pytest_deselected(items=left_out)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Remembers the session, to end it after a test that breaks the GPU."""
        self._session = session

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Records a module that cannot be imported as a failed test."""
        if report.failed:
            self._add(report.nodeid, "failed", reason=str(report.longrepr)[-_MOST_REASON:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Records that a test begins, and starts its timer."""
        self._worst, self._seconds_taken, self._reason = "passed", 0.0, ""
        self._running, self._used_gpu = nodeid, True
        self._add(nodeid, "begun")
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=_STDERR)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Notes whether a test of the CUDA kernels makes a tensor on the GPU."""
        backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        before = _gpu_tensors() if str(backend) == "cuda" else None
        result = yield
        self._used_gpu = before is None or _gpu_tensors() != before
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Records the outcome of a test after its tear-down."""
        self._seconds_taken += report.duration
        if report.failed or (report.skipped and self._worst == "passed"):
            self._worst = "failed" if report.failed else "skipped"
            self._reason = str(report.longrepr)[-_MOST_REASON:]
        if report.when != "teardown":
            return
        faulthandler.cancel_dump_traceback_later()
        self._running = None
        if self._worst == "passed" and not self._used_gpu:
            self._worst = "nothing"
        self._add(report.nodeid, self._worst, seconds=round(self._seconds_taken, 3), reason=self._reason)
        if self._worst == "failed" and not _gpu_answers():
            self._session.shouldstop = "the GPU does not answer after this test"

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Changes the exit status of a session that ended with failures."""
        if exitstatus == pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = SOME_FAILED

    def pytest_keyboard_interrupt(self) -> None:
        """Records the running test as cut off: the run's time is up."""
        if self._running is not None:
            self._add(self._running, "cut off")

    def _add(self, test: str, outcome: str, **more: Any) -> None:
        evidence.add(self._path, "test", stage=self._stage, id=test, outcome=outcome, **more)


def _gpu_tensors() -> int | None:
    """How many tensors were ever made on the GPU; None: torch does not count them."""
    torch: Any = sys.modules.get("torch")
    if torch is None or os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return None
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))


def _gpu_answers() -> bool:
    torch: Any = sys.modules.get("torch")
    if torch is None:  # no test has used the GPU
        return True
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            return bool(torch.ones(1, device="cuda").item() == 1)
    except RuntimeError:
        return False
    return True
