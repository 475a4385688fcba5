"""The critical path of a launch: planted loads, shuffles and barriers are counted where threads wait for them."""

from pathlib import Path

import pytest
import torch

import emulator
from benchmarks.kernel_time.cycles import CYCLES
from benchmarks.kernel_time.host_code import weights_in, weights_of


def path_of(chased=0, shuffles=1, barriers=1, weights=None, name="path", blocks=None):
    """The record of one launch of a primitive kernel."""
    memory = torch.zeros(512 + 32, dtype=torch.int32)
    source = memory[-memory.data_ptr() % 128 // 4 :][:512]  # begins with a line
    outputs = [torch.zeros(64, dtype=torch.int32) for _ in range(3)]
    buffers = {"in": (source, "in")} | {f"out{i}": (tensor, "inout") for i, tensor in enumerate(outputs)}
    with emulator.session(buffers) as machine:
        machine.record_paths(CYCLES, weights or {})
        arguments = (chased, shuffles, barriers) if blocks is None else (blocks, 0, 0)
        try:
            machine.run_primitive(name, source.data_ptr(), *(tensor.data_ptr() for tensor in outputs), *arguments)
        finally:
            (launch,) = machine.taken_paths()
    return launch


def counts(**options):
    return {event: count for event, count in path_of(**options)["path"].items() if count}


def test_a_second_barrier_is_counted_once():
    assert counts() == {"memory_load": 1, "warp_operation": 1, "block_barrier": 1}
    assert counts(barriers=2) == {"memory_load": 1, "warp_operation": 1, "block_barrier": 2}


def test_loads_between_two_waits_are_one_round():
    """The emulator does not see which load depends on which."""
    for chased in range(3):
        assert counts(chased=chased)["memory_load"] == 1


def test_the_slower_warp_makes_the_path():
    """The first warp does not shuffle; it waits at the barrier for the second."""
    assert counts(shuffles=7)["warp_operation"] == 7


def test_a_line_is_near_once_a_block_has_read_it():
    assert path_of()["bytes"] == 128
    assert path_of(chased=2)["bytes"] == 3 * 128


def test_the_last_block_continues_with_the_longest_path():
    single, nine = (path_of(name="last_arriver", blocks=blocks) for blocks in (1, 9))
    for launch in (single, nine):
        launch["path"].pop("l1_load")  # the last block adds the results of all blocks, line by line
    assert single["path"] == nine["path"], "blocks run side by side"
    assert single["path"]["atomic"] == 1


def test_what_other_blocks_wrote_is_no_byte_from_memory():
    single, nine = (path_of(name="last_arriver", blocks=blocks) for blocks in (1, 9))
    assert single["bytes"] == 128 and nine["bytes"] == 9 * 128, "each block reads a line; partial sums were written"


def test_instructions_grow_with_the_turns_of_a_loop():
    weights = weights_of(Path(emulator.load().__file__))
    few, many = (path_of(shuffles=shuffles, weights=weights) for shuffles in (2, 12))
    grown = many["path"]["instruction"] - few["path"]["instruction"]
    assert grown > 0 and grown % 10 == 0, "ten more turns of the same loop"


def test_weights_leave_out_the_access_checks():
    listing = """
0000000000001000 <kernel>:
    1000:\tpush   %rbx
    1001:\tcall   900 <__sanitizer_cov_trace_pc>
    1006:\tmov    %rsp,%rbx
    1009:\tlea    0x8(%rdi),%rdi
    100d:\tcall   910 <__tsan_read4>
    1012:\tmov    0x8(%rdi),%eax
    1015:\tadd    %eax,%ebx
    1017:\tje     1020 <kernel+0x20>
    1019:\tcall   900 <__sanitizer_cov_trace_pc>
    101e:\timul   %eax,%ebx
    1020:\tjmp    1030 <kernel+0x30>
    1022:\tadd    %eax,%ebx
""".splitlines()
    assert weights_in(listing) == {0x1006: 3, 0x101E: 2}


@pytest.mark.parametrize("error", ["up", "down", "mixed"])
def test_2_to_the_x_is_off_by_two_units(error):
    exponents = torch.linspace(-20, 5, 32)
    exponents[0] = 0.0
    results = {}
    for name in ("none", error):
        out = torch.zeros(32)
        emulator.load().set_exp2_error(name)
        try:
            with emulator.session({"in": (exponents, "in"), "out": (out, "out")}) as machine:
                machine.run_primitive("exp2", exponents.data_ptr(), out.data_ptr(), 0, 0, 1, 0, 0)
        finally:
            emulator.load().set_exp2_error("none")
        results[name] = out
    units = results[error].view(torch.int32) - results["none"].view(torch.int32)
    assert units[0] == 0, "2^0 is 1"
    assert set(units[1:].tolist()) == {"up": {2}, "down": {-2}, "mixed": {-2, 2}}[error]
