"""Step times: interpolation, measuring, and the files on disk."""

import json
import logging
import os
import threading
import time

import pytest
import torch

from pass_ext import _library
from pass_ext._library import limit_cpu_isa
from pass_ext.checkpoint import cache_folder
from pass_ext.decoding.planning import cpu_watch, kept_step_times, step_times
from pass_ext.decoding.planning.cpu_watch import CpuUse, CpuWatch
from pass_ext.decoding.planning.step_times import StepTimes, measure

QUIET, BUSY = CpuUse(0.01, 0.02, 0.5), CpuUse(0.6, 0.02, 0.5)
DAY = 24 * 3600


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PASS_EXT_CACHE", str(tmp_path / "cache"))
    on_a_machine(monkeypatch, QUIET)
    return tmp_path / "cache"


def on_a_machine(monkeypatch, *uses):
    """Sets the use of the CPU during each of the next measurements; the last of ``uses`` repeats."""
    left = list(uses)

    class Watch:
        def stop(self):
            return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(step_times, "CpuWatch", Watch)


class Machine:
    """A clock that only calls advance: each takes ``seconds(rows)``."""

    def __init__(self, monkeypatch, seconds):
        self.calls, self.seconds, self.now, self.today = [], seconds, 0.0, 1e9
        monkeypatch.setattr(step_times.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(kept_step_times.time, "time", lambda: self.today)

    def run(self, rows):
        self.calls.append(rows)
        self.now += self.seconds(rows)

    def measure(self, **how):
        """The times, and the number of calls that measured them."""
        before = len(self.calls)
        times = measure(self.run, (1, 2), **{"fingerprint": "a"} | how)
        return times, len(self.calls) - before


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch, lambda rows: 0.03 + 0.001 * rows)


def entry_of(cache):
    (path,) = cache.rglob("*.json")
    return path, json.loads(path.read_text())


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

    monkeypatch.setattr(step_times.time, "perf_counter", lambda: clock[0])
    times = measure(run)
    assert times.seconds == pytest.approx((0.030,) * 9)
    rows = [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert calls[:27] == rows + rows + rows[::-1]
    assert clock[0] <= 2.5 and len(calls) >= 5 * 9
    calls.clear()
    measure(run, budget=0)
    assert len(calls) == 4 * 9  # warm-up and three rounds


def test_one_disturbed_round_changes_nothing(monkeypatch):
    clock, calls = [0.0], []

    def run(rows):
        calls.append(rows)
        clock[0] += 5.0 if len(calls) in (1, 2, 3, 5) else rows * 1e-3

    monkeypatch.setattr(step_times.time, "perf_counter", lambda: clock[0])
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


def test_times_of_a_busy_machine_are_not_kept(cache, machine, monkeypatch, caplog):
    on_a_machine(monkeypatch, BUSY)
    with caplog.at_level("INFO", logger="pass_ext"):
        _, made = machine.measure()
    assert made == 3 * 32, "each attempt: warm-up and 15 rounds"
    assert "other programs were computing, on 60% of the cores" in caplog.text and "this process only" in caplog.text
    assert not list(cache.rglob("*.json"))
    assert machine.measure()[1] == made
    on_a_machine(monkeypatch, QUIET)
    assert machine.measure()[1] == 32 and machine.measure()[1] == 0


def test_a_busy_moment_is_measured_again(cache, machine, monkeypatch):
    on_a_machine(monkeypatch, BUSY, QUIET)
    machine.seconds = lambda rows: 0.056 if len(machine.calls) <= 32 else 0.031
    times, made = machine.measure()
    assert times.seconds == pytest.approx((0.031, 0.031)) and made == 64
    assert entry_of(cache)[1]["seconds"] == pytest.approx([0.031, 0.031])


def test_of_busy_attempts_the_shortest_times_are_used(cache, machine, monkeypatch):
    on_a_machine(monkeypatch, BUSY)
    machine.seconds = lambda rows: (0.05, 0.04, 0.06)[(len(machine.calls) - 1) // 32 % 3]
    assert machine.measure()[0].seconds == pytest.approx((0.04, 0.04)) and not list(cache.rglob("*.json"))


def test_attempts_end_with_the_time(machine, monkeypatch):
    on_a_machine(monkeypatch, BUSY)
    machine.seconds = lambda rows: 1.0
    assert machine.measure()[1] == 8, "warm-up and three rounds take longer than all attempts may"


def test_rounds_that_disagree_are_not_kept(cache, machine, caplog):
    machine.seconds = lambda rows: 0.03 if len(machine.calls) % 32 < 6 else 0.05
    with caplog.at_level("INFO", logger="pass_ext"):
        times, made = machine.measure()
    assert made == 96 and "rounds differ by 6" in caplog.text and not list(cache.rglob("*.json"))
    assert times.seconds == pytest.approx((0.05, 0.05))


def test_files_say_when_and_how_times_were_measured(cache, machine):
    machine.measure()
    _, entry = entry_of(cache)
    assert (entry["others"], entry["waited"], entry["load"], entry["measured"], entry["confirmed"]) == (
        *QUIET,
        1e9,
        1e9,
    )
    assert 0 <= entry["spread"] < 0.01


@pytest.mark.parametrize("days", [0, 0.9])
def test_fresh_times_are_used_without_a_call(machine, days):
    first, _ = machine.measure()
    machine.today += days * DAY
    assert machine.measure() == (first, 0)


def test_a_day_later_one_call_confirms_them(cache, machine):
    first, _ = machine.measure()
    machine.today += 1.1 * DAY
    assert machine.measure() == (first, 4) and machine.calls[-4:] == [1] * 4
    assert entry_of(cache)[1]["confirmed"] == machine.today and entry_of(cache)[1]["measured"] == 1e9
    assert machine.measure() == (first, 0)


def test_times_in_doubt_are_confirmed_by_a_call_however_fresh_they_are(cache, machine):
    first, _ = machine.measure()
    assert machine.measure(confirm=True) == (first, 4)
    machine.seconds = lambda rows: 0.02
    assert machine.measure() == (first, 0)
    times, made = machine.measure(confirm=True)
    assert made == 4 + 32 and times.seconds == pytest.approx((0.02, 0.02))


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_a_day_later_another_time_is_measured_again(cache, machine, factor):
    first, _ = machine.measure()
    machine.today += 1.1 * DAY
    machine.seconds = lambda rows: factor * (0.03 + 0.001 * rows)
    times, made = machine.measure()
    assert made == 4 + 32 and times.seconds == pytest.approx([factor * value for value in first.seconds])
    assert entry_of(cache)[1]["seconds"] == pytest.approx(times.seconds) and entry_of(cache)[1]["measured"] > 1e9


def test_quiet_times_are_not_given_up_for_those_of_a_busy_machine(cache, machine, monkeypatch, caplog):
    first, _ = machine.measure()
    machine.today += 1.1 * DAY
    machine.seconds = lambda rows: 0.056
    on_a_machine(monkeypatch, BUSY)
    with caplog.at_level("INFO", logger="pass_ext"):
        assert machine.measure() == (first, 4)
    assert "kept step times are used" in caplog.text and entry_of(cache)[1]["confirmed"] == 1e9
    machine.seconds = lambda rows: 0.01  # other programs cannot make a call shorter
    assert machine.measure()[0].seconds == pytest.approx((0.01, 0.01))


@pytest.mark.parametrize("days", [31, -2])
def test_old_times_and_those_of_the_future_are_measured_again(cache, machine, days):
    machine.measure()
    path, entry = entry_of(cache)
    path.write_text(json.dumps(entry | {"confirmed": machine.today + days * DAY}))
    machine.today += days * DAY
    assert machine.measure()[1] == 32 and entry_of(cache)[1]["measured"] == machine.today


@pytest.mark.parametrize("part", [{"others": 0.6}, {"waited": 0.5}, {"spread": 0.6}, {"others": None, "load": 2.0}])
def test_kept_times_of_a_busy_machine_are_not_used(cache, machine, part, caplog):
    machine.measure()
    path, entry = entry_of(cache)
    path.write_text(json.dumps(entry | part))
    assert machine.measure()[1] == 32 and f"{path} cannot be used" in caplog.text
    assert machine.measure()[1] == 0


@pytest.mark.parametrize("part", ["others", "waited", "load", "spread", "measured", "confirmed"])
def test_kept_times_that_do_not_say_how_they_were_measured_are_not_used(cache, machine, part):
    machine.measure()
    path, entry = entry_of(cache)
    path.write_text(json.dumps({name: value for name, value in entry.items() if name != part}))
    assert machine.measure()[1] == 32


# ---- how busy a CPU was ----


def stat(*cores):
    """The text of /proc/stat: each core's ticks of user, idle, iowait, steal, guest."""
    lines = [
        f"cpu{number} {user} 0 0 {idle} {wait} 0 0 {steal} {guest} 0"
        for number, (user, idle, wait, steal, guest) in cores
    ]
    return "\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *lines, "intr 1 2 3", "ctxt 5", ""])


@pytest.fixture
def proc(monkeypatch):
    """Fake clocks, and two cores for this process."""
    now = dict(wall=0.0, thread=0.0, process=0.0, stat="")
    monkeypatch.setattr(cpu_watch.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(cpu_watch.time, "thread_time", lambda: now["thread"])
    monkeypatch.setattr(cpu_watch.time, "process_time", lambda: now["process"])
    monkeypatch.setattr(cpu_watch.time, "sleep", lambda seconds: now.update(wall=now["wall"] + seconds))
    monkeypatch.setattr(cpu_watch, "_proc_stat", lambda: now["stat"])
    monkeypatch.setattr(cpu_watch, "_own_cores", lambda: frozenset({0, 1}))
    monkeypatch.setattr(cpu_watch.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(cpu_watch.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    return now


def watched(proc, before, after, wall=2.0, own=2.0):
    proc["stat"] = before
    watch = CpuWatch()
    proc.update(stat=after, wall=proc["wall"] + wall, thread=proc["thread"] + own, process=proc["process"] + own)
    return watch.stop()


ZERO = stat((0, (100, 100, 5, 5, 5)), (1, (100, 100, 5, 5, 5)), (2, (0, 0, 0, 0, 0)))


@pytest.mark.parametrize(
    ("after", "others"),
    [
        (stat((0, (300, 100, 5, 5, 5)), (1, (100, 300, 5, 5, 5)), (2, (0, 200, 0, 0, 0))), 0.0),  # this process alone
        (stat((0, (300, 100, 5, 5, 5)), (1, (300, 100, 5, 5, 5)), (2, (0, 200, 0, 0, 0))), 1.98 / 4),  # and another one
        (stat((0, (300, 100, 5, 5, 5)), (1, (100, 100, 205, 5, 5)), (2, (0, 0, 0, 0, 0))), 0.0),  # waits for a disk
        (
            stat((0, (300, 100, 5, 5, 5)), (1, (100, 200, 5, 105, 5)), (2, (0, 0, 0, 0, 0))),
            0.98 / 4,
        ),  # a neighbour's VM
        (stat((0, (300, 100, 5, 5, 205)), (1, (100, 300, 5, 5, 5)), (2, (0, 0, 0, 0, 0))), 0.0),  # user has its guests
        (stat((0, (300, 100, 5, 5, 5)), (1, (100, 300, 5, 5, 5)), (2, (200, 0, 0, 0, 0))), 0.0),  # a core of others
    ],
    ids=["alone", "another", "disk", "steal", "guests", "other cores"],
)
def test_other_programs_have_the_time_that_this_process_has_not(proc, after, others):
    use = watched(proc, ZERO, after)
    assert use.others == pytest.approx(others, abs=1e-9) and use.waited == 0
    assert bool(use.disturbance(torch.device("cpu"))) == (others > 0.1)
    assert not use.disturbance(torch.device("cuda"))


def test_a_load_average_does_not_count_where_the_cores_can_be_seen(proc, monkeypatch):
    """The load average includes this process a minute ago; it decides only where /proc/stat is missing."""
    monkeypatch.setattr(cpu_watch.os, "getloadavg", lambda: (float(os.cpu_count()), 0.0, 0.0))
    quiet = stat((0, (300, 100, 5, 5, 5)), (1, (100, 300, 5, 5, 5)))
    assert not watched(proc, ZERO, quiet).disturbance(torch.device("cpu"))
    for unseen in ("", "cpu  0 0 0 0", stat((0, (300, 100, 5, 5, 5))), stat((0, (0,) * 5), (1, (0,) * 5))):
        use = watched(proc, unseen, unseen)
        assert use.others is None and "load average is 100%" in use.disturbance(torch.device("cpu"))
        assert not use.disturbance(torch.device("cuda"))


def test_a_thread_that_is_kept_off_its_core_is_seen_by_its_own_clock(proc):
    use = watched(proc, "", "", wall=2.0, own=1.1)
    assert use.waited == pytest.approx(0.45) and "on no core 45% of the time" in use.disturbance(torch.device("cpu"))
    assert not watched(proc, "", "", wall=2.0, own=1.8).disturbance(torch.device("cpu"))


def test_a_stretch_too_short_for_the_kernels_count_is_made_longer(proc):
    use = watched(proc, ZERO, stat((0, (111, 100, 5, 5, 5)), (1, (101, 110, 5, 5, 5))), wall=0.02, own=0.02)
    assert proc["wall"] == pytest.approx(0.1) and use.waited == 0 and use.others == pytest.approx(0.08 / 0.2)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be bound here")
def test_cores_of_all_threads_are_watched():
    """OMP_PROC_BIND=true leaves the calling thread one core, and the process's other threads the others."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core")
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert CpuWatch().cores == len(cores)
        assert CpuWatch(frozenset({min(cores)})).cores == 1
    finally:
        os.sched_setaffinity(0, cores)
        done.set()
        other.join()


def test_this_machine_can_be_watched():
    watch = CpuWatch()
    sum(range(100_000))
    use = watch.stop()
    assert (use.others is None or 0 <= use.others <= 1) and 0 <= use.waited <= 1 and use.load >= 0


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
        lambda entry: json.dumps(entry | {"spread": float("nan")}),
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

    monkeypatch.setattr(kept_step_times.json, "dump", fail)
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
