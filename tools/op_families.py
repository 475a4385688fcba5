"""Lists the files of each op of csrc/schema.cpp and names the missing ones: ``python -m tools.op_families [FAMILY ...]``.

An op's family is the first word of its name: ``tree_mask`` belongs to tree. A gradient, ``lookahead_embed_backward``, has the
reference and export of its forward op. Exit status 1: a file without an excuse is missing or does not mention the
op. ``CPU_ONLY`` of pass_ext/_library and ``EXCUSES`` below are the excuses. Needs no build.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Part:
    """A file of an op: its content, its possible paths, and a pattern of its text. ``{op}`` and ``{family}`` are filled in."""

    name: str
    paths: tuple[str, ...]
    pattern: str = ""
    on_gpu: bool = False
    """True if a CPU-only op does not need the file."""


QUOTED = '"{op}"'
FACES = ("pass_ext/__init__.py", "pass_ext/layers.py", "pass_ext/drafting.py", "pass_ext/distributed/__init__.py")
PARTS = (
    Part("schema", ("csrc/schema.cpp",), r'"{op}\('),
    Part("formula", ("csrc/core/{family}.h",), on_gpu=True),
    Part("reference", ("pass_ext/reference/{family}.py",), r"\ndef {forward}\("),
    Part("reference's export", ("pass_ext/reference/__init__.py",), '"{forward}"'),
    Part("argument checks", ("csrc/host/{family}.h",)),
    Part("CPU loops", ("csrc/cpu/{family}_kernels-inl.h",)),
    Part("CPU op", ("csrc/cpu/{family}.cpp", "csrc/cpu/{family}_*.cpp"), QUOTED),
    Part("CUDA kernels", ("csrc/cuda/{family}.cuh",), on_gpu=True),
    Part("CUDA op", ("csrc/cuda/{family}.cu",), QUOTED, on_gpu=True),
    Part("Python wrapper and fake kernel", ("pass_ext/ops/{family}.py",), r'fake_kernel\("{op}"\)'),
    Part("export", FACES, '"{forward}"'),
    Part("tests", ("tests/ops/test_{family}.py", "tests/ops/{family}/test_*.py"), r"\b{op}\b"),
    Part("samples", ("tests/support/samples.py",), r"\ndef {op}\("),
    Part("random calls", ("tests/sanitize/fuzz_ops.py",), r"\ndef {op}\("),
)
ROWS = "its loops over a row of logits are csrc/cpu/rows_kernels-inl.h"
WHOLE = "on all ranks together it is accept_tree: tests compare both to the bit, and enumerate its laws"
EXCUSES = {
    ("accept", "CPU loops"): ROWS,
    ("draft", "CPU loops"): ROWS,
    ("cache", "CPU loops"): "it copies rows with memcpy",
    ("layer", "CPU loops"): "it chains those of linear_rows and the step ops",
    ("shard", "CPU loops"): ROWS,
    ("shard_combine", "reference"): WHOLE,
    ("shard_combine", "reference's export"): WHOLE,
}
"""(family or op, part) -> reason why the file is missing, or does not mention the op."""


def ops_of(root: Path) -> list[str]:
    """The ops of the schema, in its order."""
    return re.findall(r'library\.def\(\s*"(\w+)\(', (root / "csrc/schema.cpp").read_text())


def family_of(op: str) -> str:
    """The op family: the first word of the op's name."""
    return op.partition("_")[0]


def cpu_only(root: Path) -> dict[str, str]:
    """``CPU_ONLY`` of pass_ext/_library, parsed: importing a package with half an op may fail."""
    for node in ast.parse((root / "pass_ext/_library/__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CPU_ONLY":
            reasons: dict[str, str] = ast.literal_eval(node.value)
            return reasons
    raise SystemExit("pass_ext/_library/__init__.py must assign CPU_ONLY, a dict of op -> reason, found none")


def find(op: str, part: Part, root: Path) -> tuple[str, str]:
    """(state, path) of a part: "there", "no file", or "no mention" of the op in the file."""
    names = {"op": op, "family": family_of(op), "forward": op.removesuffix("_backward")}
    files = [file for path in part.paths for file in sorted(root.glob(path.format(**names)))]
    if not files:
        return "no file", part.paths[0].format(**names)
    pattern = part.pattern.format(**names)
    for file in files:
        if re.search(pattern, file.read_text()):
            return "there", str(file.relative_to(root))
    return "no mention", str(files[0].relative_to(root))


def report(root: Path, families: list[str]) -> tuple[list[str], list[str]]:
    """(lines to print, complaints) about the ops of these families; of all ops for an empty list."""
    lines, complaints, cpu_reasons = [], [], cpu_only(root)
    for op in ops_of(root):
        if families and family_of(op) not in families:
            continue
        lines.append(op)
        for part in PARTS:
            state, where = find(op, part, root)
            excuse = (
                EXCUSES.get((family_of(op), part.name))
                or EXCUSES.get((op, part.name))
                or (cpu_reasons.get(op) if part.on_gpu and (part.pattern or state != "there") else None)
            )
            if state != "there" and not excuse:
                complaints.append(f"{op}: {part.name}: {where} {'is missing' if state == 'no file' else 'lacks it'}")
            if state == "there" and excuse:
                complaints.append(f"{op}: {part.name}: {where} is there, so it needs no excuse ({excuse})")
            shown = "yes" if state == "there" else f"none: {excuse}" if excuse else state.upper()
            lines.append(f"  {part.name:<30}  {where:<38}  {shown}")
    return lines, complaints


def main() -> int:
    """Entry point of `python -m tools.op_families`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="op families, such as tree; default: all")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    known = sorted({family_of(op) for op in ops_of(options.root)})
    if unknown := sorted(set(options.families) - set(known)):
        parser.error(
            f"FAMILY must be the first word of an op in csrc/schema.cpp ({', '.join(known)}), got {unknown[0]}"
        )
    lines, complaints = report(options.root, options.families)
    print("\n".join(lines))
    if complaints:
        print("\nmissing:", *complaints, sep="\n  ")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
