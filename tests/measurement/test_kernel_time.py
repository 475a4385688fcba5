"""Estimated times: the page shows the committed result; the arithmetic from counts to microseconds is checked by hand."""

import sys

import pytest
from support.paths import ROOT

sys.path.append(str(ROOT))  # for benchmarks; at the end, so that an installed pass_ext stays

from benchmarks.kernel_code.bounds import BANDWIDTH, CLOCK
from benchmarks.kernel_time import __main__ as command
from benchmarks.kernel_time import costs, page


def counts(**events):
    return dict.fromkeys(costs.COSTS, 0) | events


def test_the_page_shows_the_committed_results():
    shown = (ROOT / page.PAGE).read_text()
    assert shown == page.render(page.read_results(ROOT)), "run: python -m benchmarks.kernel_time --render"
    assert "No GPU was used" in shown


def test_another_result_needs_another_page(tmp_path, capsys, monkeypatch):
    (tmp_path / page.PAGE).parent.mkdir(parents=True)
    (tmp_path / page.PAGE).write_text("another")
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


def test_a_path_behind_its_beginning():
    assert costs.difference({"fence": 3, "atomic": 2}, {"fence": 1, "atomic": 5}) == {"fence": 2, "atomic": 0}
