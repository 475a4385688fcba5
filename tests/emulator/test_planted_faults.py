"""The emulator must catch every planted fault, under every seed, with the right words, and pass each kernel without it."""

import pytest
import torch

import emulator

SEEDS = range(25)
FAULTS = {
    "block_barrier": r"race: (reads|writes).*shared array tile.*no barrier in between|uninitialised.*shared array tile",
    "warp_barrier": r"race: (reads|writes).*shared array tile.*no barrier in between|uninitialised.*shared array tile",
    "shared_bounds": r"out of bounds: writes 4 bytes.*0 bytes past the end of shared array tile",
    "dynamic_bounds": r"out of bounds: writes 4 bytes.*past the end of dynamic shared memory",
    "uninitialised": r"thread 17: uninitialised: reads 4 bytes at offset 68 of shared array tile",
    "unwritten_half": r"uninitialised: reads 2 bytes at offset \d+ of shared array tile",
    "half_of_a_word": r"race: (reads 2|writes 4) bytes.*no barrier in between|uninitialised: reads 2 bytes.* of shared array",
    "one_word": r"race: writes 4 bytes at offset \d+ of out, which thread \d+ wrote",
    "shared_word": r"race: writes 4 bytes at offset 0 of shared array flag, which thread [01] wrote",
    "overwrite": r"race: (writes|reads) 4 bytes.*of shared array tile, which thread \d+ (read|wrote)",
    "global_bounds": r"thread 63: out of bounds: reads 4 bytes.*0 bytes past the end of in",
    "read_only": r"read-only: writes 4 bytes at offset \d+ of in",
    "misaligned": r"misaligned: an access of 16 bytes",
    "device_fence": r"race: reads 4 bytes at offset \d+ of out, which thread \d+ of block [01] wrote with no fence and atomic",
    "device_fence_order": r"race: reads 4 bytes at offset \d+ of out, which thread \d+ of block [01] wrote with no fence",
    "device_late_write": r"race: reads 4 bytes at offset [48] of out, which thread 0 of block [01] wrote with no fence",
    "device_warp_release": r"race: reads 4 bytes at offset \d+ of out, which thread \d+ of block [01] wrote with no fence",
    "device_warp_acquire": r"race: reads 4 bytes at offset \d+ of out, which thread \d+ of block [01] wrote with no fence",
    "device_sum": r"race: reads 4 bytes at offset 4 of out, which thread 0 of block [01] updated atomically with no fence",
    "endless": r"endless: \d+ atomics without a barrier",
    "copy_bounds": r"out of bounds: reads 24 bytes at offset 240 of in, which has 256",
    "fill": r"race: writes 17 bytes at offset (0|16) of out, which thread [01] wrote",
    "async_source": r"asynchronous copy: its source was written before copy_async_wait",
    "async_target": r"(race: writes 4 bytes.*of shared array tile.*read|asynchronous copy: reads 4 bytes|race: reads)",
    "different_masks": r"divergence: nobody can go on..*sync_warp \(mask 0xffff(ffff)?\)",
    "own_lane": r"thread 16: divergence: calls any with a mask without itself",
    "async_wait": r"asynchronous copy: reads 4 bytes at offset \d+ of shared array tile.*no copy_async_wait",
    "async_commit": r"asynchronous copy: reads 4 bytes at offset \d+ of shared array tile.*no copy_async_wait",
    "async_barrier": r"(asynchronous copy|race|uninitialised): reads 4 bytes at offset \d+ of shared array tile",
    "divergent_barrier": r"divergence: nobody can go on. Threads 0 to 31 at sync_block. Threads 32 to 63 at sync_block_count.",
    "divergent_shuffle": r"divergence: nobody can go on..*Thread 5 has returned.",
    "absent_lane": r"undefined: shuffle from lane 20, which does not take part",
    "streaming": r"load16_streaming: 16 bytes at offset \d+ of out was written in this launch",
    "global_store": r"store16_global: the address is shared memory",
}


def run(name, broken, seed):
    given = torch.arange(64, dtype=torch.int32) + 1
    out = torch.zeros(64, dtype=torch.int32)
    with emulator.session({"in": (given, "in"), "out": (out, "inout")}, seed=seed) as machine:
        machine.run_planted_fault(name, given.data_ptr(), out.data_ptr(), broken)
    return given, out


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_caught_whatever_the_order(name):
    for seed in SEEDS:
        with pytest.raises(RuntimeError, match=rf"kernel {name}, block .*" + FAULTS[name]):
            run(name, True, seed)


@pytest.mark.parametrize("name", FAULTS)
def test_the_kernel_without_the_fault_passes(name):
    results = []
    for seed in SEEDS:
        results.append(run(name, False, seed)[1])
    if not name.startswith("device_"):  # there, which block comes last decides what the others leave after
        assert all(torch.equal(result, results[0]) for result in results)


def test_the_machine_works_after_a_fault():
    with pytest.raises(RuntimeError):
        run("block_barrier", True, 0)
    given, out = run("block_barrier", False, 0)
    assert torch.equal(out, given.flip(0))


def test_invalid_launches_are_refused():
    with emulator.session({}) as machine, pytest.raises(RuntimeError, match="invalid launch: 0 blocks"):
        machine.run_primitive("reverse", 0, 0, 0, 0, 0, 0, 0)


def test_more_blocks_than_a_launch_can_have_are_refused():
    message = (
        "pass_ext::exp2: too much for one launch: 4294967296 x 1 x 1 blocks"  # narrowed to 32 bits it would be none
    )
    with emulator.session({}) as machine, pytest.raises(RuntimeError, match=message):
        machine.run_primitive("exp2", 0, 0, 0, 0, 2**30, 0, 2)


def test_sessions_do_not_nest():
    with emulator.session({}), pytest.raises(RuntimeError, match="already runs a session"), emulator.session({}):
        pass
