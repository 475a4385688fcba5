"""Python on a library that was built with sanitizers: setup.py with SANITIZE, the runtime preloaded.

``make sanitize`` (``__main__.py``) runs the op tests and ``fuzz_ops.py`` so; ``test_planted.py`` shows that faults are found.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SANITIZERS = ("address,undefined", "thread")
RUNTIMES = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
# detect_leaks=0: Python and torch keep what they have until the end. allocator_may_return_null: a test may ask for too much.
OPTIONS = "halt_on_error=1:print_stacktrace=1:detect_leaks=0:allocator_may_return_null=1"


def folder_of(sanitizer: str, root: Path = ROOT) -> Path:
    """Where setup.py puts such a library, in a folder pass_ext."""
    return root / "build" / f"sanitize-{sanitizer.replace(',', '-')}"


def build(sanitizer: str, root: Path = ROOT) -> Path:
    """Builds the library from the sources in `root`; returns the folder from which `import pass_ext` takes it."""
    folder = folder_of(sanitizer, root)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=root, env=os.environ | {"SANITIZE": sanitizer}, check=True)
    for old in filter(Path.is_symlink, (folder / "pass_ext").iterdir()):
        old.unlink()
    for source in (root / "pass_ext").iterdir():
        if source.suffix != ".so" and source.name not in ("_build_info.py", "__pycache__"):
            (folder / "pass_ext" / source.name).symlink_to(source)
    if sanitizer == "thread":
        flags = ["-shared", "-fPIC", "-std=c++17", "-Wall", "-Wextra", "-o", folder / "libordering.so"]
        subprocess.run([compiler(), *flags, HERE / "ordering.cpp", "-ldl"], check=True)
    return folder


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def run(sanitizer: str, *arguments: object, root: Path = ROOT, threads: int = 1, output: IO[str] | None = None) -> int:
    """This Python on `arguments` with the sanitized pass_ext; its exit status. A report goes to stderr and ends the process."""
    folder = folder_of(sanitizer, root)
    command = [sys.executable, *map(str, arguments)]
    if sanitizer == "thread" and shutil.which("setarch"):
        command = ["setarch", "-R", *command]  # GCC 12's runtime does not start where addresses are too random
    there = environment(sanitizer, folder, threads)
    return subprocess.run(command, cwd=folder, env=there, stdout=output, stderr=output).returncode


def environment(sanitizer: str, folder: Path, threads: int) -> dict[str, str]:
    """What the process needs: the runtimes before everything else, their options, and enough threads to race."""
    preloaded = [file_of(name) for name in (*RUNTIMES[sanitizer], "libstdc++.so")]  # the latter, for exceptions
    options = OPTIONS
    if sanitizer == "thread":
        preloaded.append("libordering.so")
        # What torch and Python do, which are not built so, is not judged; what they order (locks, threads) counts.
        options += ":ignore_noninstrumented_modules=1"
    return os.environ | {
        "LD_PRELOAD": " ".join(preloaded),
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",  # a path in LD_PRELOAD may hold no space
        "ASAN_OPTIONS": options,
        "UBSAN_OPTIONS": options,
        "TSAN_OPTIONS": options,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",  # more threads than cores: one that spins keeps another from working
        "PYTHONPATH": str(folder),
    }


def file_of(library: str) -> str:
    """The compiler's own copy of a runtime library."""
    command = [compiler(), f"-print-file-name={library}"]
    path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    if not path.is_absolute():
        raise SystemExit(f"make sanitize: {compiler()} has no {library}: install its sanitizer runtimes")
    return str(path.resolve())
