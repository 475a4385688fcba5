"""benchmarks/results/gpu-status.md claims nothing about a GPU without a record: tried on a copy of the tree."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from support.paths import ROOT


def run_command(root, *options):
    with pytest.MonkeyPatch.context() as patch:
        from benchmarks.pages import gpu_status

        patch.setattr(sys, "argv", ["gpu_status", "--root", str(root), *options])
        return gpu_status.main()


def is_honest(root):
    return run_command(root, "--check") == 0


@pytest.fixture
def tree(tmp_path):
    """A copy of csrc/ without records, and its page."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    assert run_command(tmp_path) == 0
    return tmp_path


@pytest.fixture
def record():
    from benchmarks.gpu import record

    return record


def write_record(root, record, cases, date="2031-02-03T04:05:06Z", gpu="Some GPU", capability="9.0"):
    """Writes the record of a run with these tests: (module, test, outcome)."""
    run = dict(
        kind="run",
        date=date,
        commit="0123456789ab",
        machine={"gpu": {"name": gpu, "compute_capability": capability}},
        versions={},
    )
    facts = [{**run, "kernels": record.describe_kernels(root)}]
    for module, test, outcome in cases:
        for stage in ("tests", "memcheck", "racecheck"):
            test_id = f"tests/test_{module}.py::{test}"
            facts.append(dict(kind="test", stage=stage, id=test_id, outcome=outcome))
    for module in {module for module, _, _ in cases}:
        facts.append(dict(kind="job", stage="memcheck", name=module, state="passed"))
        facts.append(dict(kind="job", stage="racecheck", name=module, state="failed with status 86"))
    folder = root / "benchmarks/results" / gpu.lower().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "verified-0123456789ab.json").write_text(json.dumps(record.make_record([facts])))


def state_of(name, root):
    assert run_command(root) == 0
    assert is_honest(root)
    return re.search(
        rf"\| csrc/cuda/{name} \| \w+ \| (.*) \|", (root / "benchmarks/results/gpu-status.md").read_text()
    )[1]


def test_the_page_is_honest():
    assert is_honest(ROOT), "run: python -m benchmarks.pages.gpu_status"


def test_a_part_of_a_family_is_verified_by_its_tests(tree, record):
    """Only the checks in front of the kernels, a .cu, include the kernel of the second launch."""
    write_record(tree, record, [("attention_masks", "test_a[cuda]", "passed"), ("tree", "test_a[cuda]", "failed")])
    assert state_of("attention_combine.cuh", tree).endswith(": 1 tests, 1 under memcheck")
    assert state_of("tree.cuh", tree) == state_of("lookahead.cuh", tree) == "not verified on a GPU"


def test_a_run_names_the_commit_that_it_was_told(monkeypatch):
    """A copy's git knows another commit than the one that was copied."""
    from benchmarks.harness import machine

    monkeypatch.setenv("PASS_EXT_COMMIT", "0123456789ab")
    assert machine.commit() == "0123456789ab"
    monkeypatch.delenv("PASS_EXT_COMMIT")
    assert re.fullmatch(r"(?!0123456789ab)[0-9a-f]{12}(-dirty)?|unknown", machine.commit())


def test_without_a_record_nothing_is_verified(tree):
    assert is_honest(tree)
    assert state_of("lookahead.cuh", tree) == "not verified on a GPU"


@pytest.mark.parametrize("changed", ["cuda/lookahead.cuh", "cuda/primitives.cuh", "core/platform.h"])
def test_a_changed_kernel_or_header_ends_the_claim(tree, record, changed):
    write_record(tree, record, [("lookahead", "test_a[cuda]", "passed")])
    before = state_of("lookahead.cuh", tree)
    assert before == "2031-02-03, Some GPU, commit 0123456789ab: 1 tests, 1 under memcheck"
    file = tree / "csrc" / changed
    file.write_text(file.read_text() + "\n// changed\n")
    assert not is_honest(tree)
    assert state_of("lookahead.cuh", tree) == "not verified on a GPU since 2031-02-03 (0123456789ab)"


def test_a_forged_page_is_found(tree):
    page = tree / "benchmarks/results/gpu-status.md"
    forged = "2031-02-03, Some GPU, commit 0123456789ab: 7 tests"
    page.write_text(page.read_text().replace("not verified on a GPU |", f"{forged} |"))
    assert forged in page.read_text()
    assert not is_honest(tree)


def test_a_kernel_left_out_is_found(tree):
    (tree / "csrc/cuda/new.cuh").write_text("#pragma once\n")
    assert not is_honest(tree)


@pytest.mark.parametrize(
    "cases",
    [
        [],
        [("lookahead", "test_a[cuda]", "skipped")],
        [
            ("lookahead", "test_a[emulated]", "passed"),
            ("lookahead", "test_b[cpu-avx2]", "passed"),
            ("lookahead", "test_c", "passed"),
        ],
        [("other", "test_a[cuda]", "passed")],
        [("lookahead", "test_a[cuda]", "passed"), ("lookahead", "test_b[cuda-3]", "failed")],
        [("lookahead", "test_a[cuda]", "passed"), ("lookahead_gradient", "test_b[cuda]", "begun")],
    ],
)
def test_outcomes_that_do_not_verify_a_kernel(tree, record, cases):
    write_record(tree, record, cases)
    assert state_of("lookahead.cuh", tree) == "not verified on a GPU"


def test_a_shared_header_needs_all_its_users(tree, record):
    (tree / "csrc/cuda/second.cuh").write_text('#include "cuda/primitives.cuh"\n')
    write_record(tree, record, [("lookahead", "test_a[cuda]", "passed"), ("second", "test_b[cuda]", "failed")])
    assert "1 tests" in state_of("lookahead.cuh", tree)
    assert state_of("primitives.cuh", tree) == "not verified on a GPU"
    write_record(tree, record, [("lookahead", "test_a[cuda]", "passed"), ("second", "test_b[cuda]", "passed")])
    assert "2 tests" in state_of("primitives.cuh", tree)


def test_every_gpu_has_its_claim(tree, record):
    write_record(tree, record, [("lookahead", "test_a[cuda]", "passed")])
    write_record(
        tree, record, [("lookahead", "test_a[1-cuda]", "passed")], date="2032-01-01T00:00:00Z", gpu="Other GPU"
    )
    assert [claim.split(", ")[1] for claim in state_of("lookahead.cuh", tree).split("; ")] == ["Some GPU", "Other GPU"]


# ---- a changed text with the same code ----

VERIFIED = "2031-02-03, Some GPU, commit 0123456789ab: 1 tests, 1 under memcheck"


def copy_of(tree, folder):
    shutil.copytree(tree / "csrc", folder / "csrc")
    return folder


def edit(file, old="", new="// a comment\n"):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new) if old else text + new)


def write_same_code(tree, base, found, commit="aaaaaaaaaaaa", architecture="sm_90", date="2031-03-01T00:00:00Z"):
    """Writes the record of a comparison that found these differences; those of other .cu are none."""
    from benchmarks.gpu import same_code
    from benchmarks.pages import gpu_status

    units = {path.name: [] for path in (tree / "csrc/cuda").glob("*.cu")} | found
    record = dict(date=date, commit=commit, base="bbbbbbbbbbbb", architecture=architecture)
    record["kernels"] = same_code.describe_files(tree, base, units)
    folder = tree / gpu_status.SAME_CODE
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"same-code-{commit}.json").write_text(json.dumps(record))
    return record["kernels"]


def test_a_changed_file_with_the_same_code_stays_verified(tree, record, tmp_path_factory):
    write_record(tree, record, [("lookahead", "test_a[cuda]", "passed")])
    base = copy_of(tree, tmp_path_factory.mktemp("base"))
    edit(tree / "csrc/cuda/lookahead.cuh")
    assert state_of("lookahead.cuh", tree).startswith("not verified on a GPU since")
    assert [*write_same_code(tree, base, {})] == ["lookahead.cuh"]
    assert state_of("lookahead.cuh", tree) == f"{VERIFIED}, the same machine code since (aaaaaaaaaaaa)"
    again = copy_of(tree, tmp_path_factory.mktemp("again"))
    edit(tree / "csrc/cuda/lookahead.cuh")
    assert state_of("lookahead.cuh", tree).startswith("not verified on a GPU since")
    write_same_code(tree, again, {}, commit="cccccccccccc", date="2031-04-01T00:00:00Z")
    assert state_of("lookahead.cuh", tree).startswith(f"{VERIFIED}, the same machine code since (aaaaaaaaaaaa), ")


@pytest.mark.parametrize("found", [["embed_kernel"], None])
def test_other_code_is_not_verified(tree, record, tmp_path_factory, found):
    """A difference in one .cu counts for each file that it includes, and for no other."""
    write_record(tree, record, [("lookahead", "test_a[cuda]", "passed"), ("tree", "test_a[cuda]", "passed")])
    base = copy_of(tree, tmp_path_factory.mktemp("base"))
    edit(tree / "csrc/cuda/lookahead.cuh")
    edit(tree / "csrc/cuda/tree.cuh")
    assert [*write_same_code(tree, base, {"lookahead.cu": found})] == ["tree.cuh"]
    assert state_of("lookahead.cuh", tree).startswith("not verified on a GPU since")
    assert "the same machine code" in state_of("tree.cuh", tree)


def test_code_for_another_architecture_says_nothing(tree, record, tmp_path_factory):
    write_record(tree, record, [("lookahead", "test_a[cuda]", "passed")], capability="8.0")
    base = copy_of(tree, tmp_path_factory.mktemp("base"))
    edit(tree / "csrc/cuda/lookahead.cuh")
    write_same_code(tree, base, {})
    assert state_of("lookahead.cuh", tree).startswith("not verified on a GPU since")


def test_code_that_no_record_verified_is_not_verified(tree, tmp_path_factory):
    base = copy_of(tree, tmp_path_factory.mktemp("base"))
    edit(tree / "csrc/cuda/lookahead.cuh")
    write_same_code(tree, base, {})
    assert state_of("lookahead.cuh", tree) == "not verified on a GPU"


def test_a_new_file_is_verified_as_part_of_all_that_include_it(tree, record, tmp_path_factory):
    write_record(tree, record, [("lookahead", "test_a[cuda]", "passed")])
    base = copy_of(tree, tmp_path_factory.mktemp("base"))
    (tree / "csrc/cuda/part.cuh").write_text("#pragma once\n")
    edit(tree / "csrc/cuda/lookahead.cuh", new='#include "cuda/part.cuh"\n')
    assert [*write_same_code(tree, base, {})] == ["lookahead.cuh", "part.cuh"]
    expected = f"{VERIFIED} as part of lookahead.cuh, the same machine code since (aaaaaaaaaaaa)"
    assert state_of("part.cuh", tree) == expected
    edit(tree / "csrc/cuda/tree.cuh", new='#include "cuda/part.cuh"\n')  # whose tests did not run
    write_same_code(tree, base, {})
    assert state_of("part.cuh", tree) == "not verified on a GPU"


def test_a_new_file_has_the_numbers_of_each_file_that_it_was_part_of(tree, record, tmp_path_factory):
    cases = [("lookahead", "test_a[cuda]", "passed"), ("tree", "test_a[cuda]", "passed")]
    write_record(tree, record, [*cases, ("tree", "test_b[cuda]", "passed")])
    base = copy_of(tree, tmp_path_factory.mktemp("base"))
    (tree / "csrc/cuda/part.cuh").write_text("#pragma once\n")
    edit(tree / "csrc/cuda/lookahead.cuh", new='#include "cuda/part.cuh"\n')
    edit(tree / "csrc/cuda/tree.cuh", new='#include "cuda/part.cuh"\n')
    write_same_code(tree, base, {})
    one, two = state_of("part.cuh", tree).split("; ")
    assert "1 tests" in one and "as part of lookahead.cuh, the same" in one
    assert "2 tests" in two and "as part of tree.cuh, the same" in two


def test_the_options_are_those_of_setup(monkeypatch):
    """Each way: no option of the build is missing, and none was made up."""
    import setuptools

    from benchmarks.gpu import same_code

    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("DEBUG", "SANITIZE"):
        monkeypatch.delenv(name, raising=False)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    torch = Path("torch")
    shared = {option for option in setup["shared_flags"](torch).split() if option.startswith(("-std", "-D", "-O"))}
    assert shared <= {*same_code.OPTIONS}
    of_host = {option for option in setup["host_flags"](torch) if not option.startswith(("-W", "-fmacro-prefix-map"))}
    assert of_host == {*same_code.HOST_OPTIONS.split(",")} - {"-S"}
    built = setup["cuda_build"](torch, Path("library"), "nvcc", ["9.0"]).replace("'", "")
    assert all(option in built for option in same_code.OPTIONS if not option.startswith("-arch"))


TINY = """
#include <cstdio>
__constant__ float factors[4] = {1.0f, 2.0f, 5.0f, 7.0f};
__device__ const int offsets[4] = {10, 20, 30, 40};
template <int kStep> __global__ void scale(float* x, int n) {
  for (int i = threadIdx.x; i < n; i += kStep) x[i] *= 3.0f * factors[n & 3] + offsets[(n >> 2) & 3];
}
namespace {
const int grids[4] = {8, 16, 24, 32};
inline const char* name_of(int n) { return n > 9 ? "many" : "few"; }
inline void launch_scale(float* x, int n) {
  std::printf("%s\\n", name_of(n));
  scale<64><<<grids[n & 3] + 8, 64>>>(x, n);
}
}  // namespace
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_planted_differences_are_seen_and_another_text_is_not(tmp_path):
    """Of the kernel, of the function that launches it, and of their tables."""
    from benchmarks.gpu import same_code
    from benchmarks.kernel_code import disassembler

    if missing := disassembler.missing_tools():
        pytest.skip(f"no {', '.join(missing)}: pip install pass_ext[dev]")

    def unit(name, *pairs):
        root = tmp_path / name
        (root / "csrc/cuda").mkdir(parents=True)
        text = TINY
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        (root / "csrc/cuda/tiny.cuh").write_text(text)
        entry = "namespace { void entry(float* x, int n) { launch_scale(x, n); } }"
        use = "void (*volatile pointer)(float*, int) = entry;"  # no function outside the anonymous namespace launches
        (root / "csrc/cuda/tiny.cu").write_text(f'#include "cuda/tiny.cuh"\n{entry}\n{use}\n')
        return same_code.compile_unit(root / "csrc/cuda/tiny.cu", root, tmp_path)

    base = unit("base")
    other = 'inline const char* other(int n) { return n > 5 ? "one more" : "text"; }\ninline void launch_scale'
    same = unit("same", ("kStep", "kDistance"), ("inline void launch_scale", other))
    assert same.differences(base) == []
    planted = {
        "kernel": ("3.0f *", "4.0f *", "scale"),
        "bounds": ("__global__ void", "__global__ void __launch_bounds__(128)", "scale"),
        "launch": ("+ 8, 64", "+ 9, 32", "entry"),
        "words": ("many", "lots", "entry"),
    }
    for name, (old, new, where) in planted.items():
        found = unit(name, (old, new)).differences(base)
        assert len(found) == 1 and where in found[0], (name, found)
    tables = unit("tables", ("5.0f", "6.0f"), ("30", "31"), ("24, 32", "25, 32")).differences(base)
    assert tables[:3] == [".nv.constant3", ".nv.global.init", "_ZL7offsets"]  # the last is the host's copy
    assert len(tables) == 4 and "grids" in tables[3]
    assert (tmp_path / "same").exists() and len([*tmp_path.glob("tiny-*.json")]) == 7
