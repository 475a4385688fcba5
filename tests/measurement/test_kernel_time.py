"""Estimated times: the page shows the committed result; the arithmetic from counts to microseconds is checked by hand."""

import sys

import pytest
from support.paths import ROOT

from benchmarks.kernel_code.bounds import BANDWIDTH, CLOCK
from benchmarks.kernel_time import __main__ as command
from benchmarks.kernel_time import costs, fit, page


def counts(**events):
    return dict.fromkeys(costs.COSTS, 0) | events


def test_the_page_shows_the_committed_results():
    shown = (ROOT / page.PAGE).read_text()
    measured = page.read_measured(ROOT)
    assert shown == page.render(page.read(ROOT), measured, fit.read_measured_paths(ROOT)), (
        "run: python -m benchmarks.kernel_time --render"
    )


def test_measured_times_stand_beside_their_estimates():
    """The committed result's steps, with times above, within and below their estimates, one that failed, and one without."""
    result = page.read(ROOT)
    estimates = page.Estimates(result)
    step = ("draft_sample", "1 row, coupled")
    estimate = estimates.of_step(*step)
    measured = {
        "machine": {"gpu": {"name": "Some GPU", "driver": "1.2"}},
        "versions": {"torch": "9.9"},
        "date": "2031-02-03T04:05:06Z",
        "commit": "0123456789ab",
        "constants": {"launch_us": 1.25, "copy_gb_per_s": 2000.0, "read_gb_per_s": 2500.0},
    }
    times = dict(bytes=5e6, cold_us=7.0, alone_us=8.0, kernels=1)
    for warm, place in ((estimate.high + 1, "above"), (estimate.high, "within"), (estimate.low - 0.1, "below")):
        steps = [
            dict(times, kind=step[0], name=step[1], warm_us=warm),
            dict(times, kind="accept", name="many", warm_us=3.0),
        ]
        steps.append(dict(kind="draft_sample", name="broken", error="no"))
        text = page.render(result, measured | {"steps": steps})
        (line,) = [
            line
            for line in text.splitlines()
            if line.startswith("| draft_sample: 1 row, coupled | 1 |") and "7.0" in line
        ]
        assert f"| {warm:.1f} | 7.0 | 8.0 |" in line and f"| {place} |" in line
        assert "| accept: many | 1 | 3.0 | 7.0 | 8.0 | 5.0 | 2.0 |" in text and "broken" not in text
        assert "Some GPU, driver 1.2, torch 9.9, 2031-02-03, commit 0123456789ab" in text
    assert "## Measured" not in page.render(result)


def test_the_page_says_at_which_commit_each_kind_of_steps_was_recorded():
    """Steps that are recorded alone have another commit than those that are kept."""
    result = page.read(ROOT)
    steps = [
        step | {"commit": "aaaaaaaaaaaa" if step["kind"] == "accept" else "bbbbbbbbbbbb"} for step in result["steps"]
    ]
    text = page.render(result | {"steps": steps})
    assert "\nKernels of commit aaaaaaaaaaaa: accept.\n" in text
    assert "\nKernels of commit bbbbbbbbbbbb: draft_sample, layer, attention, attention in one order, " in text
    same = [step | {"commit": "aaaaaaaaaaaa"} for step in result["steps"]]
    assert "\nKernels of commit aaaaaaaaaaaa.\n" in page.render(result | {"steps": same})


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
    launch = dict(whole=dict(instruction=3000, memory_load=2, l2_load=1, l1_load=7), bytes=100)
    other = dict(whole=dict(instruction=1000, memory_load=4), bytes=100)
    step = dict(kind="accept", name="", least=[launch, launch], most=[other, other])
    assert fit.counts_of(step) == fit.Counts(2, 4.0, 6, 0)
    assert fit.counts_of(step | {"kind": "attention"}).bytes == 8 * 200


def test_another_result_needs_another_page(tmp_path, capsys, monkeypatch):
    (tmp_path / page.PAGE).parent.mkdir(parents=True)
    (tmp_path / page.PAGE).write_text("another")
    page.save(page.read(ROOT), tmp_path)
    (tmp_path / fit.PATHS).write_text((ROOT / fit.PATHS).read_text())
    monkeypatch.setattr(sys, "argv", ["kernel_time", "--root", str(tmp_path), "--check"])
    assert command.main() == 1
    assert "run python -m benchmarks.kernel_time --render" in capsys.readouterr().err


def test_every_event_costs_what_its_constants_say():
    for event, cost in costs.COSTS.items():
        time = costs.time_of(counts(**{event: 10}), counts(**{event: 20}), costs.Range(0.25, 0.5))
        scale = (0.25, 0.5) if event == "instruction" else (1.0, 1.0)
        assert time.low == pytest.approx(10 * scale[0] * cost.low / CLOCK * 1e6)
        assert time.high == pytest.approx(20 * scale[1] * cost.high / CLOCK * 1e6)
        assert 0 < cost.low <= costs.middle(event) <= cost.high and cost.source


def test_bytes_hide_behind_the_path_at_best_and_come_on_top_at_worst():
    time = costs.with_bytes(costs.Range(2.0, 3.0), 5e-6 * BANDWIDTH)
    assert time == pytest.approx((5.0, 8.0))
    assert costs.with_bytes(costs.Range(7.0, 8.0), 5e-6 * BANDWIDTH).low == 7.0


BYTES_OF_TURN = 32_768


def attention_launch(instructions, handed_over):
    """A launch of two tiles with 1,000 instructions before its last product and so many after it."""
    whole, product = counts(instruction=1000 + instructions, fence=2, matrix_product=256), counts(instruction=1000)
    return {"whole": whole, "to_product": counts(), "to_last_product": product | {"matrix_product": 256},
            "to_atomic": counts(), "handed_over": handed_over, "multiplying": 16, "bytes": 0}  # fmt: skip


def test_merging_is_the_turns_of_its_loop_other_instructions_and_the_port():
    result = {
        "ratios": {"scan": {"gpu": 1, "emulator": 4}, "bounds": {"gpu": 1, "emulator": 2}},
        "tiles": {"64 rows": {"instructions": 800, "products": 128}},
        "merges": {"64 rows": {"gpu": 100, "emulator": 900, "bytes": BYTES_OF_TURN}},
        "steps": [],
    }
    estimates = page.Estimates(result)
    name, turns = "8,192 keys, 16 rows", 3
    launch = attention_launch(turns * 900 + 4_000, turns * BYTES_OF_TURN)
    low, high = estimates.merging(name, launch, launch)
    fence, instruction = costs.COSTS["fence"], costs.COSTS["instruction"]
    bytes_time = turns * BYTES_OF_TURN / costs.PORT.high / CLOCK * 1e6
    assert low == pytest.approx(((turns * 100 + 1_000) * instruction.low + 2 * fence.low) / CLOCK * 1e6)
    assert high == pytest.approx(((turns * 100 + 2_000) * instruction.high + 2 * fence.high) / CLOCK * 1e6 + bytes_time)
    wide = attention_launch(0, 100 * BYTES_OF_TURN)
    wide["whole"]["instruction"] = 1000
    merges = result["merges"]["64 rows"]
    merges["gpu"] = 1
    assert estimates.merging(name, wide, wide).low == pytest.approx(100 * BYTES_OF_TURN / 64 / CLOCK * 1e6), "the port"
    first, tiles, _ = estimates.attention_parts(name, launch, launch)
    assert first == (0, 0) and tiles.low == pytest.approx(2 * 800 / CLOCK * 1e6)
    assert tiles.high == pytest.approx(2 * tiles.low), "16 of 33 blocks: each alone on its multiprocessor"
    launch["multiplying"] = 33
    assert estimates.attention_parts(name, launch, launch)[1].high == pytest.approx(4 * tiles.low)
    combine = launch | {"multiplying": 0, "to_last_product": {}}
    assert estimates.of_launch("attention", name, combine, combine) == estimates.merging(name, combine, combine)


def test_a_path_behind_its_beginning():
    assert costs.difference({"fence": 3, "atomic": 2}, {"fence": 1, "atomic": 5}) == {"fence": 2, "atomic": 0}
