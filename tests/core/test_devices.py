"""Ops on two GPUs of different kinds, by the code that all of them launch with, on a stand-in for the CUDA runtime."""

import re
from functools import cache

import pytest
from support.native import ROOT, build_module, quote, write_if_changed

HERE = ROOT / "tests" / "core"
KINDS = [dict(multiprocessors=108, resident=3), dict(multiprocessors=132, resident=2)]


@cache
def built():
    """The launch of primitives.cuh is compiled from its text: a C++ compiler reads neither PTX nor <<< >>>."""
    source = (ROOT / "csrc/cuda/primitives.cuh").read_text()
    includes = "".join(re.findall(r"#include <.*>\n", source)) + '#include "core/grid.h"\n'
    launch = source[source.index("// ---- launch (host) ----") :]
    launch, replaced = re.subn(r"kernel<<<(.*)>>>\(", r"launch_plainly(kernel, \1, ", launch)
    assert replaced == 1
    header = ROOT / "build" / "tests" / "_devices" / "launch" / "cuda" / "primitives.cuh"
    header.parent.mkdir(parents=True, exist_ok=True)
    write_if_changed(header, f"#pragma once\n{includes}namespace pass_ext::gpu {{\n{launch}")
    folders = (header.parents[1], HERE / "streams", ROOT / "csrc")
    return build_module(
        "_devices", {HERE / "devices.cpp": ""}, "-O1 -Wall -Wextra " + " ".join(f"-I{quote(f)}" for f in folders)
    )


@pytest.fixture
def streams():
    """torch's current stream on each device."""
    built().take_launches()
    yield [built().set_stream(device) for device in range(2)]
    built().set_device(0)


@pytest.mark.parametrize("current", [0, 1])
def test_work_for_a_device_has_its_stream_its_counters_and_its_plan(streams, current):
    """Whatever device is current, and stays so; the first of the two may not launch early."""
    built().set_device(current)
    for device in (1, 0, 1, 0, 0, 1):
        found = built().call(device)
        assert built().take_launches() == [(device, streams[device], device == 1)] * 2
        assert found["counters' device"] == device
        assert {name: found[name] for name in KINDS[device]} == KINDS[device]
        assert built().device() == current


def test_each_device_is_asked_once(streams):
    for device in range(2):
        built().call(device)
    before = built().questions()
    for device in (0, 1, 1, 0):
        built().call(device)
    assert built().questions() == before


def test_streams_of_two_devices_share_no_counters(streams):
    slots = {}
    for device in (0, 1):
        for number in range(3):
            built().set_stream(device)
            slots[device, number] = built().call(device)["counters"]
            assert built().call(device)["counters"] == slots[device, number]
    assert len(set(slots.values())) == 6
