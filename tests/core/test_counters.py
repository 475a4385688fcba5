"""The counters of csrc/cuda/counters.h, on a stand-in for the CUDA runtime: streams that come and go, captures, no memory."""

from functools import cache

import pytest
from support.native import ROOT, build_module, quote

HERE = ROOT / "tests" / "core"


@cache
def built():
    flags = f"-O1 -Wall -Wextra -I{quote(HERE / 'streams')} -I{quote(ROOT / 'csrc')}"
    return build_module("_counters", {HERE / "counters.cpp": ""}, flags)


def test_streams_that_come_and_go_take_no_more_memory():
    slots, before = built().CounterSlots(), built().allocations()
    kept = [built().Stream() for _ in range(3)]
    first = [stream.slot(slots) for stream in kept]
    assert 0 not in first and len(set(first)) == 3
    for _ in range(10 * built().most_eager_streams):
        stream = built().Stream()
        slot = stream.slot(slots)
        assert slot not in first and stream.slot(slots) == slot
    assert slot == 0, "of the later streams each call has memory of its own"
    assert [stream.slot(slots) for stream in kept] == first
    assert built().allocations() - before == 1


def test_slots_of_graphs_come_back_when_eager_streams_have_all_theirs():
    slots, streams = built().CounterSlots(), [built().Stream() for _ in range(built().most_eager_streams + 1)]
    eager = [stream.slot(slots) for stream in streams]
    assert eager[-1] == 0 and len(set(eager)) == len(eager)
    before, captured = built().allocations(), set()
    for _ in range(1000):
        streams[-1].begin_capture()
        slot = streams[-1].slot(slots)
        assert slot != 0 and slot not in eager and streams[-1].slot(slots) == slot
        captured.add(slot)
        streams[-1].end_capture_and_destroy()
    assert built().allocations() - before == 1 and len(captured) <= built().most_eager_streams


def test_lack_of_memory_is_said_and_the_next_call_tries_again():
    slots, stream = built().CounterSlots(), built().Stream()
    built().set_full(True)
    with pytest.raises(RuntimeError, match="op: no counters on this device: out of memory"):
        stream.slot(slots)
    built().set_full(False)
    assert stream.slot(slots) != 0
