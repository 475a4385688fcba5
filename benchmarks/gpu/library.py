"""The CUDA library of a run: the one that was carried here where it fits, else built: `python -m benchmarks.gpu.library 9.0`.

A library that was built elsewhere is used if it loads and has machine code for this GPU: so no minute of a lent one goes into
compilers. It is tried in a process of its own, which it may kill. Otherwise, and where its objects lie in build/inplace,
setup.py builds it for this GPU alone; quick if nothing changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import ROOT

OBJECTS = Path("build") / "inplace" / "cuda" / "build.ninja"
"""Where it exists, the library was built here."""
LOAD_SECONDS = 60.0


def trouble(architecture: str, loaded: bool, reason: str, built: Sequence[str]) -> str:
    """A sentence about why the library cannot be used; empty if it can."""
    if not loaded:
        return f"it does not load: {reason}"
    if architecture in (name.removesuffix("+PTX") for name in built):
        return ""
    if any(name.endswith("+PTX") for name in built):
        return f"it has only PTX for {architecture}, which each process would compile"
    return f"it must have machine code for {architecture}, it has {', '.join(built)}"


def tried(architecture: str, root: Path = ROOT) -> str:
    """`trouble` of the library in pass_ext/, by another process; the end of its output if it has died, or hangs."""
    command = [sys.executable, "-m", "benchmarks.gpu.library", architecture]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, errors="replace", timeout=LOAD_SECONDS)
    except subprocess.TimeoutExpired:
        return f"it does not load within {LOAD_SECONDS:g} s"
    words = " ".join((done.stdout + done.stderr).split())[-300:]
    return "" if done.returncode == 0 else words or f"loading it ends with status {done.returncode}"


def build(architecture: str, root: Path = ROOT, seconds: float | None = None) -> None:
    """Builds for one architecture."""
    environment = {**os.environ, "TORCH_CUDA_ARCH_LIST": architecture, "PASS_EXT_CUDA": "1"}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(command, cwd=root, env=environment, timeout=seconds, check=True)


def made_ready(architecture: str, root: Path = ROOT, seconds: float | None = None) -> str:
    """Carried or built, in words: from here on pass_ext may be imported. SystemExit if there is no way."""
    reason = "its objects lie here" if (root / OBJECTS).exists() else tried(architecture, root)
    if not reason:
        return "carried here"
    print(f"library: {reason}; setup.py builds it", flush=True)
    try:
        build(architecture, root, seconds)
    except (subprocess.SubprocessError, OSError) as error:
        raise SystemExit(f"library: {reason}; and building it: {error}") from error
    if still := tried(architecture, root):
        raise SystemExit(f"library: built here, {still}")
    return f"built here: {reason}"


def main() -> int:
    """Entry point of `python -m benchmarks.gpu.library`: exit status 0 if the library in pass_ext/ can be used."""
    import pass_ext

    status = pass_ext.status()
    found = trouble(sys.argv[1], status.cuda_loaded, status.cuda_reason or "", status.cuda_architectures)
    print(found or "it fits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
