"""How much other programs compute beside a measurement."""

import os
import threading

import pytest

from benchmarks.contenders import cpu_watch
from benchmarks.contenders.cpu_watch import CpuWatch


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
    now = dict(wall=0.0, process=0.0, stat="")
    monkeypatch.setattr(cpu_watch.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(cpu_watch.time, "process_time", lambda: now["process"])
    monkeypatch.setattr(cpu_watch.time, "sleep", lambda seconds: now.update(wall=now["wall"] + seconds))
    monkeypatch.setattr(cpu_watch, "_proc_stat", lambda: now["stat"])
    monkeypatch.setattr(cpu_watch, "_own_cores", lambda: frozenset({0, 1}))
    monkeypatch.setattr(cpu_watch.os, "sysconf", lambda name: 100)
    return now


def watched(proc, before, after, wall=2.0, own=2.0):
    proc["stat"] = before
    watch = CpuWatch()
    proc.update(stat=after, wall=proc["wall"] + wall, process=proc["process"] + own)
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
    assert use.others == pytest.approx(others, abs=1e-9)


@pytest.mark.parametrize(
    "unseen", ["", "cpu  0 0 0 0", stat((0, (300, 100, 5, 5, 5))), stat((0, (0,) * 5), (1, (0,) * 5))]
)
def test_cores_that_cannot_be_seen_are_unknown(proc, unseen):
    assert watched(proc, unseen, unseen).others is None


def test_a_stretch_too_short_for_the_kernels_count_is_made_longer(proc):
    use = watched(proc, ZERO, stat((0, (111, 100, 5, 5, 5)), (1, (101, 110, 5, 5, 5))), wall=0.02, own=0.02)
    assert proc["wall"] == pytest.approx(0.1) and use.others == pytest.approx(0.08 / 0.2)


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
    assert use.others is None or 0 <= use.others <= 1
