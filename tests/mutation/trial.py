"""``Trial``: a copy of the tree in which a fault is planted, built and run against its tests, in a process forked from one
that has imported torch already. The tree that the copy was made of is never touched.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import resource
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
_PARTS = ("csrc", "pass_ext", "tests", "examples", "pyproject.toml")
_ONE_ISA = ("each_isa.h", "isa.h", "isa.cpp", "core.cpp")  # in which x86's instruction sets are switched off
_PYTEST = ["-x", "-q", "--device", "cpu", "-m", "not slow", "-p", "no:cacheprovider", "--no-header"]


class QuickestFirst:
    """A plugin of pytest: tests run in the order of what they took when nothing was planted, in steps of a factor of two. So
    most faults are noticed at once, and tests of a file that take as long stay together, with what their file sets up once.

    Args:
        file: of the seconds of each test. learn: write them.
    """

    def __init__(self, file: Path, learn: bool) -> None:
        self._file, self._learn = file, learn
        self._seconds: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Those that are new come first."""
        items.sort(key=lambda item: math.frexp(self._seconds.get(item.nodeid, 1e-9))[1])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, Any, Any]:
        """Processor time: others share the machine."""
        begun = time.process_time()
        result = yield
        self._seconds[item.nodeid] = time.process_time() - begun
        return result

    def pytest_sessionfinish(self) -> None:
        """See the class."""
        if self._learn:
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

    def run(self, name: str, fault: Fault | None, seconds: float) -> tuple[str, str, float]:
        """What became of a fault in this file, or of the file as it is: killed, survived, timed out, does not compile or same
        code; the first test that failed; and the processor time of the tests, which get so many seconds of it."""
        path, (sources, tests) = self.tree / name, TARGETS[name]
        source, status = path.read_text(), path.stat()
        try:
            if fault is not None:
                path.write_text(fault.planted(source))
            if fault is not None and sources:
                built = {stem: self._compile(f"cpu/{stem}.cpp", "-faulty") for stem in sources}
                if all(out.read_bytes() == self._built[stem].read_bytes() for stem, out in built.items()):
                    return "same code", "", 0.0
                self._link(self._built | built)
            return self._tested(tests, seconds, learn=fault is None)
        except subprocess.CalledProcessError:
            return "does not compile", "", 0.0
        finally:
            path.write_text(source)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # nothing is to be built again
            if fault is not None and sources:
                self._link(self._built)

    def _tested(self, tests: list[str], seconds: float, learn: bool) -> tuple[str, str, float]:
        log, order = self._objects / "log.txt", QuickestFirst(self._times, learn)
        child = os.fork()
        if child == 0:
            self._test(tests, seconds, log, order)
        asleep = 0.0
        while (done := os.wait4(child, os.WNOHANG))[0] == 0:
            asleep += 0.1 * _sleeps(child)
            if asleep > 20 * seconds:  # a deadlock uses no processor; who waits for one is no deadlock
                os.kill(child, signal.SIGKILL)
            time.sleep(0.1)
        code, used = os.waitstatus_to_exitcode(done[1]), round(done[2].ru_utime + done[2].ru_stime, 1)
        if code in (-signal.SIGKILL, -signal.SIGXCPU):
            return "timed out", "", used
        why = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", log.read_text(errors="replace"), re.MULTILINE)
        return ("killed", why[1] if why else f"exit {code}", used) if code else ("survived", "", used)

    def _test(self, tests: list[str], seconds: float, log: Path, order: QuickestFirst) -> None:
        """In the child: never returns."""
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
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
