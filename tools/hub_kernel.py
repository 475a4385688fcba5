"""Writes the ops as a kernel of the Hugging Face Hub, which `kernels.get_kernel` loads without compiling anything.

`python -m tools.hub_kernel OWNER/pass-ext FOLDER`           what Hugging Face's kernel-builder reads: build.toml, flake.nix,
                                                            the sources, the Python of the ops, a benchmark, the card
`python -m tools.hub_kernel OWNER/pass-ext FOLDER --build`   also build/, compiled for this machine's CPU, from which
                                                            `kernels.get_local_kernel(FOLDER)` loads
"""

import argparse
import base64
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path

from tools.command import ROOT
from tools.release import version_of

sys.path.insert(0, str(ROOT / "csrc" / "build"))

from ninja_build import Ninja, build_file, find_ninja, quote
from toolkit import DEFAULT_ARCHITECTURES

SHIPPED = (
    "_library", "distributed", "huge_pages.py", "layers.py", "ops", "tree", "weights/__init__.py", "weights/form.py",
)  # fmt: skip
"""What the ops are in pass_ext/: they import torch, the standard library and each other."""
VERSION = int(version_of(ROOT).split(".")[0])  # 0: not stable yet, by the Hub's convention too
STABLE_ABI = "2.10"
CXX_FLAGS = ["-O3", "-ffp-contract=off", "-fvisibility=hidden"]  # setup.py says why
NVCC_FLAGS = ["-fmad=false", "-Xcompiler=-ffp-contract=off,-fvisibility=hidden"]
BUILD_TOML = """\
[general]
name = "pass-ext"
version = {version}
edition = 5
license = "Apache-2.0"
backends = ["cpu", "cuda"]

[general.hub]
repo-id = "{repo_id}"

[general.cuda]
minver = "12.8"

[torch]
include = ["csrc"]
cxx-flags = {cxx_flags}
src = {sources}

[torch.stable-abi]
cpu = "{abi}"
cuda = "{abi}"

[kernel.pass_ext]
backend = "cuda"
depends = ["torch"]
include = ["csrc"]
cuda-capabilities = {architectures}
cuda-flags = {nvcc_flags}
cxx-flags = {cxx_flags}
src = {cuda_sources}
"""


def write(folder: Path, repo_id: str) -> None:
    """Writes everything but build/."""
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"hub_kernel: FOLDER must be new or empty, got {folder}")
    shutil.copytree(ROOT / "csrc", folder / "csrc", ignore=lambda *_: ("build", "README.md"))
    package = folder / "torch-ext" / "pass_ext"
    for name in SHIPPED:
        for source in (ROOT / "pass_ext").glob(name if name.endswith(".py") else f"{name}/**/*.py"):
            module = source.relative_to(ROOT / "pass_ext")
            (package / module).parent.mkdir(parents=True, exist_ok=True)
            (package / module).write_text(relative_imports(source.read_text(), len(module.parts)))
    text, names = face()
    (package / "__init__.py").write_text(relative_imports(text, 1))
    values = {"repo_id": repo_id, "version": VERSION, "names": ", ".join(f"`{name}`" for name in names)}
    card = re.sub(r"@(\w+)@", lambda found: str(values[found[1]]), (ROOT / "tools/hub/CARD.md").read_text())
    for name in ("CARD.md", "README.md"):  # kernel-builder reads the first, the Hub shows the second
        (folder / name).write_text(card)
    (folder / "benchmarks").mkdir()
    shutil.copy(ROOT / "tools/hub/benchmark.py", folder / "benchmarks")
    shutil.copy(ROOT / "tools/hub/flake.nix", folder)

    def sources(*patterns: str) -> str:
        paths = sorted(str(path.relative_to(folder)) for each in patterns for path in folder.glob(f"csrc/{each}"))
        return json.dumps(paths, indent=2)

    filled = {
        "abi": STABLE_ABI,
        "cxx_flags": json.dumps(CXX_FLAGS),
        "nvcc_flags": json.dumps(NVCC_FLAGS),
        "architectures": json.dumps(DEFAULT_ARCHITECTURES.replace("+PTX", "").split()),
        "sources": sources("schema.cpp", "core/*", "host/*", "cpu/*"),
        "cuda_sources": sources("core/*", "host/*", "cuda/*"),
    }
    (folder / "build.toml").write_text(BUILD_TOML.format(**values, **filled))


def face() -> tuple[str, list[str]]:
    """The kernel's __init__.py, and its public names: those of pass_ext/__init__.py that are ops, and what is beside them."""
    whole = (ROOT / "pass_ext/__init__.py").read_text()
    imports = re.findall(r"^from pass_ext\.(?:ops|tree)\b.* import .*$", whole, flags=re.MULTILINE)
    imports += ["from pass_ext import distributed, layers", "from pass_ext._library import set_debug"]
    names = sorted(name for line in imports for name in line.partition(" import ")[2].split(", "))
    text = '"""Ops for speculative decoding: tree attention, accept step, drafting, KV cache."""\n\n'
    return f"{text}{chr(10).join(imports)}\n\n__all__ = {json.dumps(names, indent=4)}\n", names


def relative_imports(text: str, depth: int) -> str:
    """The text of a module with imports of pass_ext relative, as the Hub wants them: a kernel has a name of its own there.

    ``depth``: how many names its path in the package has.
    """
    return re.sub(
        r"^( *from )pass_ext(?:\.(\S+))? import ", rf"\g<1>{'.' * depth}\g<2> import ", text, flags=re.MULTILINE
    )


def build(folder: Path) -> Path:
    """Compiles the folder for the CPU as its build.toml says, and returns the variant: what `kernels` loads on this machine."""
    shipped = sorted(path for part in ("csrc", "torch-ext") for path in (folder / part).rglob("*") if path.is_file())
    name = f"_pass_ext_cpu_{hashlib.sha256(b''.join(path.read_bytes() for path in shipped)).hexdigest()[:7]}"
    variant = folder / "build" / f"torch-stable-abi{STABLE_ABI.replace('.', '')}-cpu-{platform.machine()}-linux"
    shutil.copytree(folder / "torch-ext/pass_ext", variant, ignore=shutil.ignore_patterns("__pycache__"))
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("hub_kernel: --build needs torch: pip install torch")
    torch, compiler = Path(spec.origin).parent, os.environ.get("CXX", "g++")
    major, minor = map(int, STABLE_ABI.split("."))
    target = f"-DTORCH_TARGET_VERSION=0x{major:02x}{minor:02x}{0:012x} -DTORCH_EXTENSION_NAME={name}"
    with tempfile.TemporaryDirectory() as objects:
        text = build_file(
            folder,
            f"{compiler} -std=c++17 -fPIC -DNDEBUG {' '.join(CXX_FLAGS)} {target} -I{quote(folder)}/csrc"
            f" -isystem {quote(torch)}/include -MMD -MF $out.d -c $in -o $out",
            f"{compiler} -shared -L{quote(torch)}/lib -Wl,--exclude-libs,ALL $in -o $out -ltorch_cpu",
            ["csrc/schema.cpp", *sorted(str(path.relative_to(folder)) for path in folder.glob("csrc/cpu/*.cpp"))],
            variant / f"{name}.abi3.so",
        )
        Ninja(find_ninja(), Path(objects), int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)).run(text)
    files = [path for path in sorted(variant.rglob("*")) if path.is_file()]
    digests = [base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode() for path in files]
    names = [str(path.relative_to(variant)) for path in files]
    about = {
        "name": "pass-ext",
        "id": name,
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
        "digest": {"algorithm": "sha256", "files": dict(zip(names, digests, strict=True))},
    }
    (variant / "metadata.json").write_text(json.dumps(about, indent=2) + "\n")
    return variant


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo_id", metavar="OWNER/pass-ext", help="where the kernel will be on the Hub")
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--build", action="store_true", help="also compile it for this machine's CPU")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    write(folder, options.repo_id)
    if options.build:
        print(build(folder))


if __name__ == "__main__":
    main()
