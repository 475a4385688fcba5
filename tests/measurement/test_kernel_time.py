"""Times of the kernels: the page shows the committed results; the arithmetic from counts to microseconds is checked by hand."""

import sys

import pytest
from support.paths import ROOT

from benchmarks.kernel_time import __main__ as command
from benchmarks.kernel_time import fit, page


def test_the_page_shows_the_committed_results():
    shown = (ROOT / page.PAGE).read_text()
    measured = page.read_measured(ROOT)
    assert shown == page.render(page.read(ROOT), measured, fit.read_measured_paths(ROOT)), (
        "run: python -m benchmarks.kernel_time --render"
    )


def test_measured_times_stand_beside_the_fit():
    """A step that was recorded, one that was not, one that failed, and one that no GPU has measured."""
    result, paths = page.read(ROOT), fit.read_measured_paths(ROOT)
    measured = page.read_measured(ROOT)
    kept = [step for step in measured["steps"] if step["name"] != "tree of 63, coupled"]
    text = page.render(result, measured | {"steps": [*kept, dict(kind="accept", name="broken", error="no")]}, paths)
    constants = fit.fit(measured | {"steps": kept}, paths)
    (step,) = [step for step in kept if (step["kind"], step["name"]) == ("draft_sample", "1 row, coupled")]
    then = fit.fitted("draft_sample", paths["draft_sample", "1 row, coupled"], constants)
    times = " | ".join(f"{step[f'{how}_us']:.1f}" for how in ("warm", "cold", "alone"))
    assert (
        f"| draft_sample: 1 row, coupled | 1 | {times} | {then:.1f} | {100 * (then / step['warm_us'] - 1):+.0f} % |"
        in text
    )
    (other,) = [step for step in kept if step["name"] == "1 × (1 + 4), V 8192, rejection, filters off"]
    assert f"| {other['bytes'] / 1e6:,.1f} | " in text and "broken" not in text
    assert "accept: tree of 63, coupled | 2 |" not in text.split("## Critical paths")[0]


def test_the_page_says_at_which_commit_each_kind_of_steps_was_recorded():
    """Steps that are recorded alone have another commit than those that are kept."""
    result, others = page.read(ROOT), (page.read_measured(ROOT), fit.read_measured_paths(ROOT))
    steps = [
        step | {"commit": "aaaaaaaaaaaa" if step["kind"] == "accept" else "bbbbbbbbbbbb"} for step in result["steps"]
    ]
    text = page.render(result | {"steps": steps}, *others)
    assert "\nKernels of commit aaaaaaaaaaaa: accept.\n" in text
    assert "\nKernels of commit bbbbbbbbbbbb: draft_sample, layer, attention, attention in one order, " in text
    same = [step | {"commit": "aaaaaaaaaaaa"} for step in result["steps"]]
    assert "\nKernels of commit aaaaaaaaaaaa.\n" in page.render(result | {"steps": same}, *others)


def test_the_fit_reproduces_every_step_that_the_gpu_measured():
    """Within a quarter, attention too, whose steps are not fitted."""
    measured, paths = page.read_measured(ROOT), fit.read_measured_paths(ROOT)
    constants = fit.fit(measured, paths)
    assert min(constants) > 0
    times = {(step["kind"], step["name"]): step["warm_us"] for step in measured["steps"]}
    assert len(paths) == 29 and paths.keys() <= times.keys()
    for (kind, name), counts in paths.items():
        assert fit.fitted(kind, counts, constants) == pytest.approx(times[kind, name], rel=0.25), (kind, name)


def test_the_fit_finds_the_constants_of_exact_times():
    found = fit.Constants(2.0, 0.5, 1.25, 1e6)
    paths = {("accept", str(i)): fit.Counts(1 + i % 2, 3.0 + i * i, 5 + i % 3, 0) for i in range(8)}
    paths["attention", "long"] = fit.Counts(2, 1e9, 3, 5e6)
    steps = [dict(kind=kind, name=name, warm_us=fit.fitted(kind, c, found)) for (kind, name), c in paths.items()]
    assert steps[-1]["warm_us"] == 2 * 2.0 + 3 * 1.25 + 5.0
    constants = fit.fit({"steps": steps, "constants": {"read_gb_per_s": 1e3}}, paths)
    assert constants == pytest.approx(found)


def test_counts_are_those_of_all_launches_of_a_step():
    launch = dict(path=dict(instruction=3000, memory_load=2, l2_load=1, l1_load=7), bytes=100)
    step = dict(kind="accept", name="", launches=[launch, launch])
    assert fit.counts_of(step) == fit.Counts(2, 6.0, 6, 0)
    assert fit.counts_of(step | {"kind": "attention"}).bytes == 8 * 200


def test_another_result_needs_another_page(tmp_path, capsys, monkeypatch):
    (tmp_path / page.PAGE).parent.mkdir(parents=True)
    (tmp_path / page.PAGE).write_text("another")
    page.save(page.read(ROOT), tmp_path)
    (tmp_path / fit.PATHS).write_text((ROOT / fit.PATHS).read_text())
    gpu = next(ROOT.glob(f"benchmarks/results/*/{page.MEASURED}"))
    (tmp_path / gpu.relative_to(ROOT)).parent.mkdir()
    (tmp_path / gpu.relative_to(ROOT)).write_text(gpu.read_text())
    monkeypatch.setattr(sys, "argv", ["kernel_time", "--root", str(tmp_path), "--check"])
    assert command.main() == 1
    assert "run python -m benchmarks.kernel_time --render" in capsys.readouterr().err
