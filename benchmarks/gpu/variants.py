"""Builds of the CUDA library with one switch changed, in build/variants/<name>/pass_ext: `python -m benchmarks.gpu.variants`.

Only csrc/cuda/accept.cu depends on these switches: it alone is compiled again, by the commands of the last build in place, and
linked with the other objects. The folder links to the rest of the package, so `import pass_ext` from build/variants/<name>
takes such a library.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks import ROOT

VARIANTS = {
    "stamps": "-DPASS_EXT_STAMPS",
    "twice": "-DPASS_EXT_STAMPS -DPASS_EXT_FINISH_TWICE",
}
"""Name -> options of nvcc; stamps.py reads what they stamp."""
SOURCE = "csrc/cuda/accept.cu"


def folder_of(name: str, root: Path = ROOT) -> Path:
    """The working folder of a process that imports the variant."""
    return root / "build" / "variants" / name


def build_text(text: str, options: str, objects: Path, library: Path) -> str:
    """build.ninja of a variant from that of the ordinary build, whose other objects it links."""
    lines = []
    for line in text.splitlines():
        if line.startswith("  command = ") and " -c $in" in line:
            line = line.replace(" -c $in", f" {options} -c $in")
        elif line.startswith("build ") and ": link " in line:
            parts = line.partition(": link ")[2].split(" ")
            linked = " ".join(part if part == f"{SOURCE}.o" else f"{objects}/{part}" for part in parts)
            line = f"build {library}: link {linked}"
        elif line.startswith(("build ", "  before = ")) and not line.startswith(f"build {SOURCE}.o:"):
            continue  # an object of the ordinary build
        lines.append(line)
    return "\n".join(lines) + "\n"


def link_package(package: Path, root: Path) -> None:
    """Links to everything in pass_ext but its CUDA library; relative ones, which hold wherever the tree is copied."""
    package.mkdir(parents=True, exist_ok=True)
    for old in filter(Path.is_symlink, package.iterdir()):
        old.unlink()
    for source in (root / "pass_ext").iterdir():
        if source.name not in ("_C_cuda.so", "__pycache__"):
            (package / source.name).symlink_to(os.path.relpath(source, package))


def check_imported() -> None:
    """SystemExit unless pass_ext came from the working folder. After a broken link Python would find the ordinary one, whose
    times would then be the variant's."""
    import pass_ext

    found, expected = Path(pass_ext.__file__).parent, Path.cwd() / "pass_ext"
    if found != expected:
        raise SystemExit(f"variants: pass_ext must come from {expected}, it comes from {found}")


def build(name: str, root: Path = ROOT) -> None:
    """Builds one variant; quick if nothing changed."""
    folder, objects = folder_of(name, root), root / "build" / "inplace" / "cuda"
    package = folder / "pass_ext"
    link_package(package, root)
    ordinary = objects / "build.ninja"
    if not ordinary.exists():
        raise SystemExit(f"variants: {ordinary} must exist: build first, by python setup.py build_ext --inplace")
    (folder / "build.ninja").write_text(
        build_text(ordinary.read_text(), VARIANTS[name], objects, package / "_C_cuda.so")
    )
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    subprocess.run([ninja or "ninja", "-C", folder], check=True)


def main() -> int:
    """Entry point of `python -m benchmarks.gpu.variants`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(VARIANTS)}; default: all")
    for name in parser.parse_args().names or VARIANTS:
        build(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
