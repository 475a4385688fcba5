"""``Trial``: a copy of the tree in which a fault is planted, built and run against its tests, in a process forked from one
that has imported torch already. The tree that the copy was made of is never touched.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from .faults import Fault
from .table import CPP, PYTHON

ROOT = Path(__file__).parents[2]
_IMPORTS = ("numpy", "hypothesis", "torch", "torch.testing", "pytest", "transformers", "transformers.models.llama.modeling_llama")
_ONE_ISA = ("each_isa.h", "isa.h", "isa.cpp")  # in which x86's instruction sets are switched off
PYTEST = ["-x", "-q", "--device", "cpu", "-m", "not slow", "-p", "no:cacheprovider", "--no-header", "--durations=0"]


def targets() -> dict[str, tuple[list[str], list[str]]]:
    """For each file the sources in csrc/cpu that are built again, and the tests."""
    python = {f"pass_ext/decoding/{name}.py": ([], tests) for name, tests in PYTHON.items()}
    return {f"csrc/{name}": both for name, both in CPP.items()} | python


class Trial:
    """See the module.

    Args:
        folder: of the copy; what was built there is used again where it is younger than its source.
    """

    def __init__(self, folder: Path) -> None:
        self.tree, self._objects = folder / "tree", folder / "objects"
        self._copy()
        for module in _IMPORTS:
            importlib.import_module(module)
        self._torch = Path(importlib.util.find_spec("torch").origin).parent
        self._objects.mkdir(parents=True, exist_ok=True)
        sources = ["schema.cpp", *sorted(f"cpu/{path.name}" for path in (self.tree / "csrc/cpu").glob("*.cpp"))]
        self._built = {Path(source).stem: self._compile(source, ".o") for source in sources}
        if not all(self._built.values()):
            raise RuntimeError(f"{self.tree} does not compile")
        self._link(self._built)

    def _copy(self) -> None:
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
        for name in listed.stdout.splitlines():
            text = (ROOT / name).read_bytes()
            if name.startswith("csrc/cpu/") and Path(name).name in _ONE_ISA:
                text = text.replace(b"defined(__x86_64__)", b"0")
            path = self.tree / name
            if not path.exists() or path.read_bytes() != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text)
        shutil.copy(ROOT / "pass_ext/_build_info.py", self.tree / "pass_ext")

    def _compile(self, source: str, suffix: str) -> Path | None:
        out = self._objects / (source.replace("/", "-") + suffix)
        newest = max(path.stat().st_mtime for path in (self.tree / "csrc").glob("*/*"))
        if suffix == ".o" and out.exists() and out.stat().st_mtime > newest:
            return out
        command = f"g++ -std=c++17 -DTORCH_TARGET_VERSION=0x020a000000000000 -Icsrc -isystem {self._torch}/include -O1 -DNDEBUG"
        command += f" -fPIC -fvisibility=hidden -ffp-contract=off -w -c csrc/{source} -o {out}"
        done = subprocess.run(command.split(), cwd=self.tree, capture_output=True)
        return out if done.returncode == 0 else None

    def _link(self, objects: dict[str, Path]) -> None:
        library = self.tree / "pass_ext/_C.so"
        library.unlink(missing_ok=True)
        names = [str(path) for path in objects.values()]
        options = [f"-L{self._torch}/lib", "-Wl,--exclude-libs,ALL", "-ltorch_cpu", "-o", str(library)]
        subprocess.run(["g++", "-shared", *names, *options], check=True)

    def run(self, name: str, fault: Fault | None, seconds: float) -> tuple[str, str, float]:
        """What became of a fault in this file, or of the file as it is: killed, survived, timed out, does not compile or same
        code; the line that says why; and the processor time of the tests, which get so many seconds of it."""
        path, (sources, tests) = self.tree / name, targets()[name]
        source = path.read_text()
        try:
            if fault is not None:
                path.write_text(fault.planted(source))
            built = {stem: self._compile(f"cpu/{stem}.cpp", ".faulty.o") for stem in sources}
            if not all(built.values()):
                return "does not compile", "", 0.0
            if sources and fault is not None:
                if all(out.read_bytes() == self._built[stem].read_bytes() for stem, out in built.items()):
                    return "same code", "", 0.0
                self._link(self._built | built)
            return self._tested(tests, seconds)
        finally:
            path.write_text(source)
            if sources:
                self._link(self._built)

    def _tested(self, tests: list[str], seconds: float) -> tuple[str, str, float]:
        log = self._objects / "log.txt"
        child = os.fork()
        if child == 0:
            self._test(tests, seconds, log)
        begun = time.monotonic()
        while (done := os.wait4(child, os.WNOHANG))[0] == 0:
            if time.monotonic() - begun > 20 * seconds:  # asleep: a deadlock uses no processor
                os.kill(child, signal.SIGKILL)
            time.sleep(0.1)
        code, lines = os.waitstatus_to_exitcode(done[1]), log.read_text(errors="replace")
        used = round(done[2].ru_utime + done[2].ru_stime, 1)
        if code in (-signal.SIGKILL, -signal.SIGXCPU):
            return "timed out", "", used
        why = re.search(r"^(?:FAILED|ERROR) (.*)", lines, re.MULTILINE)
        if code == 0:
            return "survived", "", used
        return "killed", why[1][:160] if why else f"exit {code}", used

    def _test(self, tests: list[str], seconds: float, log: Path) -> None:
        """In the child: never returns."""
        import resource

        import pytest

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
            code = int(pytest.main([*tests, *PYTEST]))
            sys.stdout.flush()
        except BaseException:
            code = 9
        os._exit(code)
