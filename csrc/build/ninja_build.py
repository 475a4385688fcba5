"""build.ninja for one library: one rule that compiles, one that links; and the ninja that runs it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


def quote(path: object) -> str:
    """A path quoted for a command of build.ninja."""
    return shlex.quote(str(path)).replace("$", "$$")


def escape(path: object) -> str:
    """A path escaped as an input or output file of build.ninja."""
    return re.sub(r"[$ :]", r"$\g<0>", str(path))


def build_file(
    root: Path,
    compile_command: str,
    link_command: str,
    sources: list[str],
    library: Path,
    *,
    joined: Sequence[str] = (),
) -> str:
    """The text of build.ninja for one library.

    Each of ``joined`` names sources that are compiled as one, by their stems: $before of the command includes all but the last,
    whose name the object has.
    """
    units = units_of(sources, joined)
    rules = (
        f"rule compile\n  deps = gcc\n  depfile = $out.d\n  description = compile $in\n  command = {compile_command}\n"
        f"rule link\n  description = link $out\n  command = {link_command}\n"
    )
    edges = []
    for *first, last in units:
        edges.append(f"build {last}.o: compile {escape(root / last)}\n")
        if first:
            edges.append(f"  before = {' '.join(f'-include {quote(root / source)}' for source in first)}\n")
    objects = " ".join(f"{unit[-1]}.o" for unit in units)
    return f"{rules}{''.join(edges)}build {escape(library)}: link {objects}\n"


def units_of(sources: list[str], joined: Sequence[str]) -> list[list[str]]:
    """The sources, those that are compiled as one together."""
    stems = {stem: number for number, names in enumerate(joined) for stem in names.split()}
    units: dict[object, list[str]] = {}
    for source in sources:
        units.setdefault(stems.get(Path(source).stem, source), []).append(source)
    return list(units.values())


def find_ninja() -> str:
    """The ninja beside this Python, or on PATH."""
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if ninja is None:
        raise SystemExit("pass_ext: building needs ninja: pip install ninja")
    return ninja


@dataclass
class Ninja:
    """A ninja and the folder in which it builds one library."""

    program: str
    folder: Path
    jobs: int

    def is_current(self, text: str) -> bool:
        """True if a build by this build.ninja would change nothing."""
        file = self.folder / "build.ninja"
        if not file.exists() or file.read_text() != text:
            return False
        output = subprocess.run([self.program, "-C", self.folder, "-n"], capture_output=True, text=True).stdout
        return "ninja: no work to do" in output

    def run(self, text: str, **environment: str) -> None:
        """Writes build.ninja and runs it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "build.ninja").write_text(text)
        command = [self.program, "-C", self.folder, f"-j{self.jobs}"]
        subprocess.run(command, check=True, env=os.environ | environment)
