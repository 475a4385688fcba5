"""``Trial``: a copy of the tree in which a fault is planted, built and run against its tests, in a process forked from one
that has imported torch already. The tree that the copy was made of is never touched.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from .faults import Fault
from .table import TARGETS

ROOT = Path(__file__).parents[2]
_IMPORTS = ("numpy", "hypothesis", "torch", "torch.testing", "transformers.models.llama.modeling_llama")
_PARTS = ("csrc", "pass_ext", "tests", "benchmarks", "examples", "pyproject.toml")
_ONE_ISA = (
    "each_isa.h",
    "isa.h",
    "isa.cpp",
    "unit.cpp",
    "linear_packed.cpp",
    "core.cpp",
)  # x86's instruction sets are switched off there
_SECONDS_OF_NEW = 60  # of the processor, for a test that has never passed here
_SECONDS_ASLEEP = 300  # a deadlock uses no processor
_PYTEST = ["-x", "-q", "--device", "cpu", "-m", "not slow", "-p", "no:cacheprovider", "--no-header"]


class QuickestFirst:
    """A plugin of pytest: tests run in the order of what they took when they last passed, in steps of a factor of two. So most
    faults are noticed at once, and tests of a file that take as long stay together, with what their file sets up once.

    Args:
        file: of the seconds of each test, which it writes. running: takes the name of each test as it starts.
    """

    def __init__(self, file: Path, running: Path) -> None:
        self._file, self._running = file, running
        self._seconds: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Those that are new come first."""
        items.sort(key=lambda item: math.frexp(self._seconds.get(item.nodeid, 1e-9))[1])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, Any, Any]:
        """Processor time: others share the machine. A test that takes far more than before ends the process."""
        self._running.write_text(item.nodeid)
        begun, known = time.process_time(), self._seconds.get(item.nodeid)
        most = int(begun + (_SECONDS_OF_NEW if known is None else 3 * known + 10))
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        result = yield
        if not item.session.testsfailed:
            self._seconds[item.nodeid] = time.process_time() - begun
        return result

    def pytest_sessionfinish(self) -> None:
        """See the class."""
        self._file.write_text(json.dumps(self._seconds))


def _sleeps(process: int) -> bool:
    """Whether all of its threads wait for something other than a processor."""
    with suppress(OSError):  # a thread may end meanwhile
        return all(
            path.read_text().rpartition(")")[2].split()[0] == "S"
            for path in Path(f"/proc/{process}/task").glob("*/stat")
        )
    return False


class Trial:
    """See the module.

    Args:
        folder: of the copy; what was built there is used again where it is younger than its source.
    """

    def __init__(self, folder: Path) -> None:
        self.tree, self._objects, self._times = folder / "tree", folder / "objects", folder / "times.json"
        self._objects.mkdir(parents=True, exist_ok=True)
        self._sound: dict[str, bool] = {}  # of tests that have failed: whether they pass where nothing is planted
        self._copy()
        for module in _IMPORTS:
            importlib.import_module(module)
        self._torch = Path(str(sys.modules["torch"].__file__)).parent
        sources = ["schema.cpp", *sorted(f"cpu/{path.name}" for path in (self.tree / "csrc/cpu").glob("*.cpp"))]
        self._built = {Path(source).stem: self._compile(source) for source in sources}
        self._link(self._built)

    def _copy(self) -> None:
        found = [
            file for part in _PARTS for file in ((ROOT / part).rglob("*") if (ROOT / part).is_dir() else [ROOT / part])
        ]
        for file in found:
            if not file.is_file() or file.suffix in (".so", ".pyc"):
                continue
            name = str(file.relative_to(ROOT))
            text, path = file.read_bytes(), self.tree / name
            if name.startswith(("csrc/cpu/", "tests/")) and path.name in _ONE_ISA:
                text = text.replace(b"defined(__x86_64__)", b"0")
            if not path.exists() or path.read_bytes() != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text)

    def _compile(self, source: str, faulty: str = "") -> Path:
        out = self._objects / f"{source.replace('/', '-')}{faulty}.o"
        newest = max(path.stat().st_mtime for path in (self.tree / "csrc").glob("*/*"))
        if faulty or not out.exists() or out.stat().st_mtime < newest:
            command = (
                "g++ -std=c++17 -DTORCH_TARGET_VERSION=0x020a000000000000 -DTORCH_EXTENSION_NAME=pass_ext -Icsrc -O1"
            )
            command += " -DNDEBUG -fPIC -fvisibility=hidden -ffp-contract=off -w"
            command += f" -isystem {self._torch}/include -c csrc/{source} -o {out}"
            subprocess.run(command.split(), cwd=self.tree, capture_output=True, check=True)
        return out

    def _link(self, objects: dict[str, Path]) -> None:
        library = self.tree / "pass_ext/_C.so"
        library.unlink(missing_ok=True)
        options = ["-shared", f"-L{self._torch}/lib", "-Wl,--exclude-libs,ALL", "-ltorch_cpu", "-o", str(library)]
        subprocess.run(["g++", *map(str, objects.values()), *options], check=True)

    def run(self, name: str, fault: Fault) -> tuple[str, str, float]:
        """What became of a fault in this file: killed, survived, timed out, does not compile, same code, or not tried where the
        test that failed fails without the fault too; that test; and the processor time of the tests."""
        path, (sources, tests) = self.tree / name, TARGETS[name]
        source, status = path.read_text(), path.stat()
        try:
            path.write_text(fault.planted(source))
            if sources:
                built = {stem: self._compile(f"cpu/{stem}.cpp", "-faulty") for stem in sources}
                if all(out.read_bytes() == self._built[stem].read_bytes() for stem, out in built.items()):
                    return "same code", "", 0.0
                self._link(self._built | built)
            outcome, test, used = self._tested(tests)
        except subprocess.CalledProcessError:
            return "does not compile", "", 0.0
        finally:
            path.write_text(source)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # nothing is to be built again
            if sources:
                self._link(self._built)
            if name.startswith("csrc/"):
                shutil.rmtree(self.tree / "build", ignore_errors=True)  # modules of tests that have the fault
        is_sound = outcome == "survived" or self._is_sound([test] if "::" in test else [*tests, "--collect-only"])
        return outcome if is_sound else "not tried", test, used

    def _is_sound(self, tests: list[str]) -> bool:
        key = " ".join(tests)
        if key not in self._sound:
            self._sound[key] = self._tested(tests)[0] == "survived"
        return self._sound[key]

    def _tested(self, tests: list[str]) -> tuple[str, str, float]:
        log, running = self._objects / "log.txt", self._objects / "running.txt"
        running.unlink(missing_ok=True)
        order, child = QuickestFirst(self._times, running), os.fork()
        if child == 0:
            self._test(tests, log, order)
        asleep = 0.0
        while (done := os.wait4(child, os.WNOHANG))[0] == 0:
            asleep = asleep + 0.1 if _sleeps(child) else 0.0
            if asleep > _SECONDS_ASLEEP:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.1)
        code, used = os.waitstatus_to_exitcode(done[1]), round(done[2].ru_utime + done[2].ru_stime, 1)
        test = running.read_text() if running.exists() else f"exit {code}"  # before any test
        if code in (-signal.SIGKILL, -signal.SIGXCPU):
            return "timed out", test, used
        return ("killed", test, used) if code else ("survived", "", used)

    def _test(self, tests: list[str], log: Path, order: QuickestFirst) -> None:
        """In the child: never returns."""
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.chdir(self.tree)
            sys.dont_write_bytecode = True  # a fault may keep a file's size and second
            sys.path[:] = [str(self.tree), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
            for module in [name for name in sys.modules if name.split(".")[0] in ("pass_ext", "mutation")]:
                del sys.modules[module]
            code = int(pytest.main([*tests, *_PYTEST], plugins=[order]))
            sys.stdout.flush()
        except BaseException:
            code = 9
        os._exit(code)
