"""The op benchmarks run, write full results, and refuse to time a wrong contender. Speed itself is not tested."""

import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support.paths import ROOT


@pytest.fixture
def harness():
    from benchmarks.harness import cases, measure

    return SimpleNamespace(**vars(cases), **{name: getattr(measure, name) for name in ("interleave", "half_split")})


def run_module(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def render_pages(monkeypatch):
    """Runs python -m benchmarks.pages in this process; its exit status."""
    from benchmarks.pages import __main__ as command

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["pages", *map(str, arguments)])
        return command.main()

    return run


def test_a_quick_bench_writes_a_full_result(tmp_path):
    done = run_module("benchmarks.ops.cache", "--quick", "--device", "cpu", PASS_EXT_OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "ops/cache.json").read_text()
    result = json.loads(text)
    assert result["quick"] and result["device"] == "cpu"
    assert result["copy_gb_per_s"] > 0 and set(result["load_average"]) == {"before", "after"}
    for group, entries in {
        "machine": ("cpu", "gpu", "kernels"),
        "versions": ("pass_ext", "torch", "python", "cuda"),
        "settings": ("seed", "fewest_rounds", "sweep_bytes", "dtype", "clock_overhead_us"),
    }.items():
        assert set(entries) <= set(result[group]), group
    if importlib.util.find_spec("transformers"):
        assert result["versions"]["transformers"] == importlib.metadata.version("transformers"), (
            "the versions of others"
        )
    contenders = {row["contender"] for row in result["rows"]}
    assert contenders == {"pass_ext", "index_select", "index_copy_", "assignment"}
    for row in result["rows"]:
        for measured in ("median_us", "p10_us", "p90_us", "gb_per_s", "of_copy", "times_ours"):
            assert math.isfinite(row[measured]) and row[measured] > 0, row
        assert row["p10_us"] <= row["median_us"] <= row["p90_us"]
        assert row["samples"] >= result["settings"]["fewest_rounds"]
    assert {(row["cache"], row["how"]) for row in result["rows"]} == {("warm", "call"), ("cold", "call")}
    assert all(aim["met"] in (True, False) and aim["measured"] for aim in result["aims"])
    assert str(ROOT) not in text and platform.node() not in text, "a result names no host and no path"
    assert "pass_ext" in done.stdout and "gain" in done.stdout


def test_quick_attention_bench_names_absent_contenders_and_reasons(tmp_path, render_pages, capsys):
    done = run_module("benchmarks.ops.attention", "--quick", PASS_EXT_OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "ops/attention.json").read_text())
    assert set(result["matmul_gflop_per_s"]) == {"bfloat16", "float32"}
    timed = [row for row in result["rows"] if row["median_us"] is not None]
    assert {"pass_ext", "SDPA", "SDPA, folded", "torch flash + merge"} <= {row["contender"] for row in timed}
    for row in timed:
        assert all(row[key] > 0 for key in ("gb_per_s", "gflop_per_s", "of_limit", "times_ours")), row
    absent = [row for row in result["rows"] if row["median_us"] is None]
    assert absent and all(row["reason"] for row in absent)
    assert render_pages(tmp_path / "ops/attention.json") == 0
    page = capsys.readouterr().out
    assert f"Not timed: {absent[0]['contender']}, on " in page and "of limit" in page


@pytest.mark.parametrize("window", [-1, 2048])
def test_attention_is_held_against_a_reference_that_sees_one_wrong_bit(harness, window):
    from benchmarks.ops.contenders.attention import ours, sdpa
    from benchmarks.ops.contenders.inputs import attention_steps as steps

    spec = steps.Spec(heads=4, kv_heads=2, head_dim=64, batch=2, prefix=8192, nodes=33, window=window)
    trees = steps.make_trees(spec, torch.bfloat16, "cpu")
    step = steps.make_step(trees, torch.bfloat16, "cpu", torch.Generator().manual_seed(0))
    expected = steps.reference(step)
    assert steps.excess(step, ours(step), expected) < 1 > steps.excess(step, sdpa(step), expected)
    assert spec.prefix_read == (8192 if window < 0 else 2047)
    trees.visible[-1] ^= 1  # the last node no longer sees the root
    trees.mask[0, 0, -1, spec.prefix] = float("-inf")  # nor does that of the first request
    assert steps.excess(step, ours(step), expected) > 1 < steps.excess(step, sdpa(step), expected)
    assert steps.excess(step, torch.full_like(step.q, float("nan")), expected) > 1


def test_wrong_slow_and_failing_contenders_are_absent_with_a_reason(harness, monkeypatch):
    from benchmarks.ops import attention as bench
    from benchmarks.ops.contenders import attention as ways
    from benchmarks.ops.contenders.inputs import attention_steps as steps

    def fail(step):
        raise NotImplementedError("no such kernel")

    contenders = [
        ways.AttentionContender(bench.OURS, ways.ours),
        ways.AttentionContender("wrong", lambda step: ways.ours(step)[0] * 1.2),
        ways.AttentionContender("fails", fail),
        ways.AttentionContender("right", ways.sdpa),
        ways.AttentionContender("not installed", ways.sdpa, package="no_such_package"),
        ways.AttentionContender("elsewhere", ways.sdpa, devices=ways.GPU),
    ]
    monkeypatch.setattr(bench, "CONTENDERS", contenders)
    monkeypatch.setattr(bench, "LIBRARIES", [])
    spec = steps.Spec(heads=4, kv_heads=2, head_dim=64, batch=1, prefix=100, nodes=5)
    monkeypatch.setitem(bench.MOST_SECONDS, "cpu", 60.0)
    case = bench.make_case(spec, torch.float32, "cpu", {})
    assert [contender.name for contender in case.contenders] == [bench.OURS, "right"]
    assert list(case.absent) == ["wrong", "fails", "not installed"]
    assert "differs" in case.absent["wrong"] and case.absent["fails"] == "NotImplementedError: no such kernel"
    monkeypatch.setitem(bench.MOST_SECONDS, "cpu", 0.0)
    assert "ms a call" in bench.make_case(spec, torch.float32, "cpu", {}).absent["right"]
    monkeypatch.setattr(
        bench, "CONTENDERS", [ways.AttentionContender(bench.OURS, lambda step: ways.ours(step)[0] * 1.2)]
    )
    with pytest.raises(AssertionError, match="differs from the reference"):
        bench.make_case(spec, torch.float32, "cpu", {})


def test_the_limit_is_the_longer_of_reading_and_computing(harness):
    rates = harness.Rates(copy=1.0, read=2.0, matmul={"bfloat16": 4.0, "float32": 8.0})
    assert rates.fewest_seconds(moved=10, flops=8) == 5
    assert rates.fewest_seconds(moved=10, flops=80) == 10


def test_rounds_are_interleaved_and_shuffled_alike(harness):
    settings = harness.settings_for("cpu", True, 0)

    def record():
        order = []

        def sampler(name):
            def sample():
                order.append(name)
                return 1.0 + 0.01 * len(order) % 0.05

            return sample

        taken = harness.interleave({name: sampler(name) for name in "abc"}, settings, budget_seconds=0.0)
        return order[6:], taken  # the first two rounds warm up

    order, taken = record()
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 1
    assert {len(samples) for samples in taken.values()} == {len(rounds)} == {settings.fewest_rounds}
    assert record()[0] == order


def test_half_split_measures_noise(harness):
    assert harness.half_split([2.0] * 10) == 0
    assert harness.half_split([1.0, 3.0] * 10) == 1


def test_the_page_shows_the_committed_results(render_pages):
    assert render_pages("--check") == 0, "run: python -m benchmarks.pages"


def test_the_page_changes_with_the_results(tmp_path, render_pages):
    assert render_pages("--root", tmp_path, "--check") == 0, "no results, no pages"
    ops = next(ROOT.glob("benchmarks/results/*/ops"))
    shutil.copytree(ops, tmp_path / ops.relative_to(ROOT))
    assert render_pages("--root", tmp_path, "--check") == 1, "no page yet"
    assert render_pages("--root", tmp_path) == 0 == render_pages("--root", tmp_path, "--check")
    page = (tmp_path / ops.relative_to(ROOT)).parent / "README.md"
    page.write_text(page.read_text() + "| forward | 1 | 576 | warm | 0.1 |\n")
    assert render_pages("--root", tmp_path, "--check") == 1


def test_the_page_has_the_gains_over_each_other_way(tmp_path, render_pages):
    """Least, median and most of a way's lines by hand; ours, and lines that were not timed, do not count."""
    folder = tmp_path / "benchmarks/results/machine"
    result = json.loads(next(ROOT.glob("benchmarks/results/*/ops/cache.json")).read_text())
    rows = [row for row in result["rows"] if row["cache"] == "warm" and row["contender"] == "assignment"]
    for row, times in zip(rows, (0.5, 9.0, 2.0, 1.0, 3.0, 8.0, 0.7), strict=True):
        row["times_ours"] = times
    rows.append(dict(rows[0], median_us=None, times_ours=99.0, reason="it fails"))
    result["rows"].append(rows[-1])
    (folder / "ops").mkdir(parents=True)
    (folder / "ops/cache.json").write_text(json.dumps(result))
    assert render_pages("--root", tmp_path) == 0
    page = (folder / "README.md").read_text()
    assert "| assignment | warm | 7 | 0.50 | 2.00 | 9.00 |" in page and "[cache.json](ops/cache.json)" in page
    assert "| pass_ext |" not in page and "Not timed: assignment, on 1 line: it fails." in page


def test_the_gpu_sleeps_until_the_host_has_queued_a_graph(harness, monkeypatch):
    """Three times what queueing takes once the graph is uploaded, never less than the least."""
    from benchmarks.harness import gpu_timing

    clock, queueing = [0.0], iter([9e-3, 2e-3, 1e-3, 1e-6, 1e-6, 1e-6])

    def queue():
        clock[0] += next(queueing)

    monkeypatch.setattr(gpu_timing.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_timing.time, "perf_counter", lambda: clock[0])
    assert gpu_timing.head_start(queue) == pytest.approx(3e-3 * gpu_timing.MOST_CLOCK)
    assert gpu_timing.head_start(queue) == pytest.approx(gpu_timing.LEAST_HEAD_START * gpu_timing.MOST_CLOCK)
