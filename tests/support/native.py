"""Builds a pybind11 module of the tests with ninja, under build/tests/, and imports it."""

import fcntl
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pybind11
from support.paths import ROOT


def build_module(name: str, sources: dict[Path, str], flags: str, libraries: str = "", place: str = "") -> ModuleType:
    """Compiles each source with ``flags`` and its own extra flags, links them, and imports the result; quick if unchanged.

    ``place``: the folder of build/tests/, the module's name unless it is built in several ways.
    """
    folder = ROOT / "build" / "tests" / (place or name)
    folder.mkdir(parents=True, exist_ok=True)
    include = " ".join(f"-isystem {quote(path)}" for path in (sysconfig.get_path("include"), pybind11.get_include()))
    compiler = os.environ.get("CXX", "g++")
    library = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    lines = [
        "rule compile\n  deps = gcc\n  depfile = $out.d\n  description = compile $in\n"
        f"  command = {compiler} -std=c++17 -fPIC -fvisibility=hidden {include} {flags} $extra -MMD -MF $out.d -c $in -o $out",
        f"rule link\n  description = link $out\n  command = {compiler} -shared $in -o $out {libraries}",
    ]
    objects = []
    for source, extra in sources.items():
        objects.append(f"{source.name}.o")
        lines.append(f"build {objects[-1]}: compile {escape(source)}\n  extra = {extra}")
    lines.append(f"build {escape(library)}: link {' '.join(objects)}\n")
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    with (folder / "lock").open("w") as lock:  # several test processes may build it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_if_changed(folder / "build.ninja", "\n".join(lines))
        result = subprocess.run([ninja or "ninja", "-C", str(folder)], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"building {name} failed:\n{result.stdout}\n{result.stderr}")
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def quote(path: object) -> str:
    """A path quoted for a command of build.ninja, also inside flags."""
    return shlex.quote(str(path)).replace("$", "$$")


def escape(path: object) -> str:
    """A path escaped as an input or output file of build.ninja."""
    return re.sub(r"[$ :]", r"$\g<0>", str(path))


def write_if_changed(path: Path, text: str) -> None:
    """Writes a file unless it holds this text already."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
