"""Step times: interpolation, measuring, and the files on disk."""

import json
import logging
import os
import time

import pytest
import torch

from pass_ext import _library
from pass_ext._library import limit_cpu_isa
from pass_ext.checkpoint import cache_folder
from pass_ext.decoding.planning import step_times
from pass_ext.decoding.planning.step_times import StepTimes, measure


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PASS_EXT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def counted():
    calls = []
    return calls, lambda rows: calls.append(rows)


def test_between_beyond_and_below_measured_rows():
    times = StepTimes((2, 4, 8), (1.0, 2.0, 3.0))
    assert [times.at(rows) for rows in (1, 2, 3, 4, 6, 8, 12)] == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]


def test_never_falling():
    times = StepTimes((1, 2, 4, 8), (1.0, 5.0, 2.0, 3.0))
    assert times.seconds == (1.0, 2.0, 2.0, 3.0)
    values = [times.at(rows) for rows in range(1, 40)]
    assert values == sorted(values)


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [((1,), (1.0,)), ((2, 1), (1.0, 1.0)), ((1, 1), (1.0, 1.0)), ((1, 2), (1.0,)), ((0, 1), (1.0, 1.0))],
)
def test_refused(rows, seconds):
    with pytest.raises(ValueError, match="ascending"):
        StepTimes(rows, seconds)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_no_time_is_refused(bad):
    with pytest.raises(ValueError, match="above 0"):
        StepTimes((1, 2), (bad, 1.0))


def test_measures_the_calls():
    times = measure(lambda rows: time.sleep(rows * 2e-3), (1, 4, 8), budget=0.2)
    assert times.at(1) < times.at(4) < times.at(8)
    assert times.at(8) >= 0.016


def test_rounds_visit_all_and_turn_round_within_the_budget(monkeypatch):
    clock, calls = [0.0], []

    def run(rows):
        calls.append(rows)
        clock[0] += 0.030

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    times = measure(run)
    assert times.seconds == pytest.approx((0.030,) * 9)
    rows = [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert calls[:27] == rows + rows + rows[::-1]
    assert clock[0] <= 2.5 and len(calls) >= 5 * 9
    calls.clear()
    measure(run, budget=0)
    assert len(calls) == 4 * 9  # warm-up and three rounds


def test_disturbed_rounds_change_nothing(monkeypatch):
    clock, calls = [0.0], []

    def run(rows):
        calls.append(rows)
        clock[0] += 5.0 if len(calls) in (1, 2, 3, 4, 5, 7) else rows * 1e-3

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert measure(run, (1, 2), budget=0).seconds == pytest.approx((1e-3, 2e-3))


def test_kept_for_the_same_and_measured_again_for_others(cache):
    calls, run = counted()
    first = measure(run, (1, 2), fingerprint="a")
    made = len(calls)
    assert measure(run, (1, 2), fingerprint="a") == first and len(calls) == made
    assert len(list(cache.rglob("*"))) == 2  # the folder and one file: nothing temporary is left
    for again in (
        dict(fingerprint="b"),
        dict(fingerprint="a", rows=(1, 3)),
        dict(),
    ):
        before = len(calls)
        measure(run, **{"rows": (1, 2)} | again)
        assert len(calls) > before, again
    assert len(list(cache.rglob("*.json"))) == 3


def test_threads_and_versions_are_part_of_the_key(monkeypatch):
    calls, run = counted()
    measure(run, (1, 2), fingerprint="a")
    before = len(calls)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    measure(run, (1, 2), fingerprint="a")
    assert len(calls) > before
    before = len(calls)
    monkeypatch.setattr(step_times, "version", lambda name: "99")
    measure(run, (1, 2), fingerprint="a")
    assert len(calls) > before


def test_other_kernels_and_other_instructions_have_other_times(monkeypatch):
    calls, run = counted()
    measure(run, (1, 2), fingerprint="a")
    for change in (
        lambda: monkeypatch.setattr(step_times, "kernels_hash", lambda device: "another build"),
        lambda: limit_cpu_isa("portable"),
    ):
        before = len(calls)
        change()
        measure(run, (1, 2), fingerprint="a")
        assert len(calls) > before
        before = len(calls)
        measure(run, (1, 2), fingerprint="a")
        assert len(calls) == before
    limit_cpu_isa("")


def test_the_hash_of_the_kernels_is_that_of_the_libraries(tmp_path, monkeypatch):
    monkeypatch.setattr(_library, "_HERE", tmp_path)
    seen = set()
    for cpu, cuda in ((b"a", None), (b"b", None), (b"b", b"c"), (b"b", b"d")):
        (tmp_path / "_C.so").write_bytes(cpu)
        if cuda is not None:
            (tmp_path / "_C_cuda.so").write_bytes(cuda)
        _library.kernels_hash.cache_clear()
        seen.add((_library.kernels_hash("cpu"), _library.kernels_hash("cuda")))
        _library.kernels_hash.cache_clear()
    assert len({cpu for cpu, _ in seen}) == 2 and len({cuda for _, cuda in seen}) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: "",
        lambda entry: "{",
        lambda entry: "[]",
        lambda entry: json.dumps(entry | {"seconds": [1.0]}),
        lambda entry: json.dumps(entry | {"seconds": [-1.0, 1.0]}),
        lambda entry: json.dumps(entry | {"seconds": None}),
        lambda entry: json.dumps(entry | {"key": entry["key"] | {"threads": -1}}),
        lambda entry: json.dumps({"key": entry["key"]}),
        lambda entry: "[" * 100_000,
        lambda entry: json.dumps(entry | {"key": []})[:-1].replace("[]", "[" * 100_000 + "]" * 100_000) + "}",
        lambda entry: json.dumps(entry | {"seconds": [10**400, 1]}),
        lambda entry: "[]",
        lambda entry: "\0" * 100,
    ],
)
def test_a_damaged_file_is_measured_again_and_said(cache, damage, caplog):
    calls, run = counted()
    measure(run, (1, 2), fingerprint="a")
    (path,) = cache.rglob("*.json")
    good = json.loads(path.read_text())
    path.write_text(damage(good))
    before = len(calls)
    with caplog.at_level(logging.WARNING, "pass_ext"):
        measure(run, (1, 2), fingerprint="a")
    assert len(calls) > before and "measuring again" in caplog.text
    assert json.loads(path.read_text())["key"] == good["key"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PASS_EXT_CACHE", str(tmp_path / "file"))
    calls, run = counted()
    with caplog.at_level(logging.INFO, "pass_ext"):
        measure(run, (1, 2), fingerprint="a")
    assert calls and "not kept" in caplog.text


def test_a_write_that_fails_leaves_nothing(cache, monkeypatch):
    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(json, "dump", fail)
    measure(counted()[1], (1, 2), fingerprint="a")
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_where_results_are_kept(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(cache_folder()) == os.environ["PASS_EXT_CACHE"]
    monkeypatch.delenv("PASS_EXT_CACHE")
    assert str(cache_folder()) == "/x/pass_ext"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert str(cache_folder()) == "/h/.cache/pass_ext"
