"""The sanitized builds must find every planted fault, and nothing in what is right beside it.

The faults are planted in a copy of the sources, in one kernel file, which is built by setup.py as ``make sanitize`` builds all.
"""

import re
import shutil

import pytest

import sanitize

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Without lookahead.cpp and layer_pack.cpp, which it looks for, the package does not load.
SOURCES = ("isa.cpp", "layer_pack.cpp", "lookahead.cpp", "tree.cpp", "workers.cpp")
KERNELS, OP = "csrc/cpu/tree_kernels-inl.h", "csrc/cpu/tree.cpp"
# (file, what it says, what is planted there): each at one number only, so that the same build shows what is right, too.
OVERRUN = (
    KERNELS,
    "hidden, problem.kv_len - row.prefix - row.nodes);",
    "hidden, problem.kv_len - row.prefix - row.nodes + (problem.kv_len == 13));",
)
SHIFT = (
    OP,
    "row[i / 64] |= static_cast<int64_t>(uint64_t{1} << (i % 64));",
    "row[i / 64] |= static_cast<int64_t>(uint64_t{1} << (problem.max_nodes == 13 ? i + 60 : i % 64));",
)
RACE = (
    OP,
    "const int64_t malformed = prepare_requests(problem, begin, end);",
    "static int64_t done = 0;\n"
    "    if (problem.max_nodes == 13) done += end - begin;\n"
    "    const int64_t malformed = prepare_requests(problem, begin, end);",
)
MASK = """
import torch, pass_ext
bounds, lengths = torch.tensor([0, 1, 2]).int(), torch.tensor([3, 5]).int()
pass_ext.tree_mask(torch.ones(2, 1).long(), bounds, 1, lengths, NUMBER, torch.float32)
print('done')
"""
TREES = """
import torch, pass_ext
parents = torch.arange(-1, 7).int().repeat(6000)  # enough for several threads
pass_ext.tree_prepare(parents, torch.arange(0, 48001, 8).int(), NUMBER)
print('done')
"""


def build_with(sanitizer, faults, folder):
    """A checkout with these faults, of which only the trees' kernels are compiled, built with the sanitizer."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "_build_info.py", "pretrained")
    for name in ("csrc", "pass_ext"):
        shutil.copytree(sanitize.ROOT / name, folder / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(sanitize.ROOT / name, folder / name)
    for source in (folder / "csrc" / "cpu").glob("*.cpp"):
        if source.name not in SOURCES:
            source.unlink()
    for name, right, wrong in faults:
        source = folder / name
        assert source.read_text().count(right) == 1, f"{name} no longer says {right}"
        source.write_text(source.read_text().replace(right, wrong))
    sanitize.build(sanitizer, folder)
    return folder


def check(sanitizer, root, code, words, threads=1):
    """With another number than 13 the code runs to its end in silence; with 13, a report with these words ends it."""

    def call(number):
        arguments = ("-W", "ignore", "-c", code.replace("NUMBER", str(number)))
        with (root / "said.txt").open("w") as said:
            status = sanitize.run(sanitizer, *arguments, root=root, threads=threads, output=said)
        return status, (root / "said.txt").read_text()

    assert call(12) == (0, "done\n")
    status, said = call(13)
    assert status != 0
    assert re.search(words, said), said


def test_an_overrun_and_undefined_behaviour_are_found(tmp_path):
    root = build_with("address,undefined", [OVERRUN, SHIFT], tmp_path / "checkout")
    check("address,undefined", root, MASK, r"heap-buffer-overflow[^#]*WRITE of size (.|\n)*tree_kernels-inl.h")
    check("address,undefined", root, TREES, r"tree.cpp:\d+:\d+: runtime error: shift exponent 64 is too large")


def test_a_race_between_threads_is_found_and_openmp_is_none(tmp_path):
    root = build_with("thread", [RACE], tmp_path / "checkout")
    check("thread", root, TREES, r"data race(.|\n)*tree.cpp", threads=4)
