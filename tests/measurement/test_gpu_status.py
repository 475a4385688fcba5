"""benchmarks/results/gpu-status.md claims nothing about a GPU without a record: tried on a copy of the tree."""

import json
import re
import shutil
import sys

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


def write_record(root, record, cases, date="2031-02-03T04:05:06Z", gpu="Some GPU"):
    """Writes the record of a run with these tests: (module, test, outcome)."""
    run = dict(kind="run", date=date, commit="0123456789ab", machine={"gpu": {"name": gpu}}, versions={})
    facts = [{**run, "kernels": record.describe_kernels(root)}]
    for module, test, outcome in cases:
        for stage in ("tests", "memcheck", "racecheck"):
            test_id = f"tests/test_{module}.py::{test}"
            facts.append(dict(kind="test", stage=stage, id=test_id, outcome=outcome))
    for family in {module.partition("_")[0] for module, _, _ in cases}:
        facts.append(dict(kind="job", stage="memcheck", name=family, state="passed"))
        facts.append(dict(kind="job", stage="racecheck", name=family, state="failed with status 86"))
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
