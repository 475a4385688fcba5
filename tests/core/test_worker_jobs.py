"""csrc/cpu/workers.cpp on a stand-in for torch's threads: a thread has the same share of every job, and nobody spins for long,
which in a container with a quota would stop those that work.
"""

from functools import cache

import pytest
from support.native import ROOT, build_module, quote

HERE = ROOT / "tests" / "core"
THREADS = 4
TEAMS = pytest.mark.parametrize("is_crew", [False, True], ids=["pool", "crew"])


@cache
def built():
    flags = f"-O2 -pthread -I{quote(HERE / 'threads')} -I{quote(ROOT / 'csrc')}"
    module = build_module("_worker_jobs", {HERE / "worker_jobs.cpp": "", ROOT / "csrc/cpu/workers.cpp": ""}, flags)
    module.set_threads(THREADS)
    return module


@TEAMS
def test_a_thread_has_the_same_share_of_every_job(is_crew):
    """Its first piece, unless it came so late that others had begun its share."""
    jobs = built().owners(is_crew, 40, 4 * THREADS, 2e-3)[5:]
    first = [tuple(job[::4]) for job in jobs]
    usual = max(first, key=first.count)
    assert len(set(usual)) == THREADS
    assert first.count(usual) >= len(first) * 3 // 4


def test_threads_that_wait_for_a_job_sleep():
    assert built().time_without_jobs(0.4) < 0.1


@TEAMS
def test_the_caller_sleeps_while_a_piece_lasts(is_crew):
    assert built().time_with_a_late_piece(is_crew, 2 * THREADS, 0.4) < 0.1
