"""The threads of the CPU kernels: the pool gives the bits of one thread, from several callers at once, in forked processes and
on one processor; and a job does not wait for a thread that has lost its processor.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import cache

import pytest
import torch

import pass_ext
from pass_ext import _library
from pass_ext.testing import assert_same_bits

fork = pytest.mark.skipif(
    not hasattr(os, "fork") or _library.status().sanitize == "thread",
    reason="no fork, or ThreadSanitizer, which lets a forked process start no threads",
)


@pytest.fixture
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def pool(two_threads):
    """Every job in the pool, with two threads."""
    former = _library.always_pool(True)
    yield
    _library.always_pool(former)


@cache  # a forked process has its parent's: torch's own ops on large tensors may hang there
def make_case(seed, rows=3, width=300, outputs=1500):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator), torch.randn(outputs, width, generator=generator)


def alone(*case):
    """The result on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return pass_ext.layers.linear_rows(*case)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("threads", [2, 3, 20])
def test_the_pool_gives_the_bits_of_one_thread(pool, threads):
    torch.set_num_threads(threads)
    for seed in range(40):
        case = make_case(seed, rows=1 + seed % 7, outputs=1 + 97 * seed)
        assert_same_bits(pass_ext.layers.linear_rows(*case), alone(*case))
        if seed % 10 == 0:
            time.sleep(0.001)  # workers fall asleep


def test_several_callers_at_once(pool):
    """More callers than the pool has slots; each result is its caller's."""
    cases = [make_case(seed, outputs=700 + 13 * seed) for seed in range(12)]
    expected, wrong = [alone(*case) for case in cases], []

    def call(index):
        for _ in range(60):
            if not torch.equal(pass_ext.layers.linear_rows(*cases[index]), expected[index]):
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(cases))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not wrong and not any(caller.is_alive() for caller in callers)


def test_a_jobs_pieces_may_bring_jobs(pool):
    """draft_sample of several rows shares rows among threads, and the slices of a row inside a piece run alone."""
    logits = torch.randn(3, 40000)
    tokens, _ = pass_ext.draft_sample(logits, 5, mode="top")
    assert torch.equal(tokens, logits.topk(5).indices)


def in_a_child(function):
    """Whether function() is true in a forked process, which has half a minute."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if function() else 1)
        except BaseException:
            os._exit(2)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the forked process hangs")


def draft(logits):
    return pass_ext.draft_sample(logits, 5, mode="top")[0]


def attend(q, cache, bounds, visible):
    prefix = torch.tensor([cache.shape[1] - 1], dtype=torch.int32)
    return pass_ext.attention_tree(q, cache, cache, prefix, bounds, visible, 2, k_new=q, v_new=q)[0]


def many_calls():
    """(op, its arguments): calls that take two threads."""
    random = torch.Generator().manual_seed(5)
    bounds, visible = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([[1], [3]])
    attended = torch.randn(2, 4, 64, generator=random), torch.randn(1, 400, 4, 64, generator=random), bounds, visible
    calls = [(pass_ext.layers.linear_rows, make_case(1)), (draft, (torch.randn(3, 40000, generator=random),))]
    return [*calls, (attend, attended)]


@fork
@pytest.mark.parametrize("always", [False, True], ids=["torch's threads", "the pool"])
def test_a_forked_process_gets_threads_of_its_own(two_threads, always):
    """Whatever its parent used; and so does a process that forks from it."""
    calls, former = many_calls(), _library.always_pool(always)
    try:
        expected = [op(*arguments) for op, arguments in calls for _ in range(20)][::20]
    finally:
        _library.always_pool(former)

    def is_right():
        return all(
            torch.equal(op(*arguments), want)
            for _ in range(20)
            for (op, arguments), want in zip(calls, expected, strict=True)
        )

    assert in_a_child(is_right)
    assert in_a_child(lambda: is_right() and in_a_child(is_right))
    assert is_right(), "the parent goes on with its own"


@fork
def test_a_process_forked_while_another_thread_is_in_an_op(two_threads):
    """What that thread holds at this moment stays held in the child."""
    case, ends = make_case(2), threading.Event()
    expected = pass_ext.layers.linear_rows(*case)

    def work():
        while not ends.is_set():
            pass_ext.layers.linear_rows(*case)

    former, worker = _library.always_pool(True), threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(10):
            assert in_a_child(lambda: torch.equal(pass_ext.layers.linear_rows(*case), expected))
    finally:
        ends.set()
        worker.join()
        _library.always_pool(former)


def linear_of(seed):
    torch.set_num_threads(2)  # a DataLoader's worker begins with one
    return pass_ext.layers.linear_rows(*make_case(seed)).numpy()


class Products(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, seed):
        return linear_of(seed)


@fork
def test_workers_of_a_data_loader_and_of_a_pool_of_processes(two_threads):
    expected = [pass_ext.layers.linear_rows(*make_case(seed)) for seed in range(8)]
    loader = torch.utils.data.DataLoader(
        Products(), batch_size=None, num_workers=2, timeout=30, multiprocessing_context="fork"
    )
    with multiprocessing.get_context("fork").Pool(2) as processes:
        mapped = processes.map_async(linear_of, range(8)).get(30)
    for results in (loader, mapped):
        for result, want in zip(results, expected, strict=True):
            assert_same_bits(torch.as_tensor(result), want)


BOUND = """
import os, torch, pass_ext
from pass_ext import _library
torch.set_num_threads(2)
x, weight = torch.randn(2, 576), torch.randn(3000, 576)
pass_ext.layers.linear_rows(x, weight)  # OpenMP binds its threads
_library.always_pool(True)
before = set(os.listdir("/proc/self/task"))
for _ in range(200):
    pass_ext.layers.linear_rows(x, weight)
worker, = set(os.listdir("/proc/self/task")) - before
print(len(os.sched_getaffinity(0)), len(os.sched_getaffinity(int(worker))))
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two processors"
)
def test_the_pools_threads_are_not_bound_to_their_callers_processor():
    """OMP_PROC_BIND binds the caller, and a new thread inherits that."""
    environment = os.environ | {"OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "2"}
    run = subprocess.run(
        [sys.executable, "-c", BOUND], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout.split() == ["1", "2"]


ON_ONE_PROCESSOR = """
import os, time, torch, pass_ext
from pass_ext import _library
_library.always_pool({pool})
x, weight = torch.randn(2, 576), torch.randn(3000, 576)
torch.set_num_threads(1)
expected = pass_ext.layers.linear_rows(x, weight)
torch.set_num_threads(2)
for _ in range(20):
    assert torch.equal(pass_ext.layers.linear_rows(x, weight), expected)
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), [min(os.sched_getaffinity(0))])
times = []
for _ in range(3000):
    begin = time.perf_counter()
    result = pass_ext.layers.linear_rows(x, weight)
    times.append(time.perf_counter() - begin)
    assert torch.equal(result, expected)
print(sorted(times)[len(times) // 2])
"""


def run_on_one_processor(pool):
    """Seconds of a product, the median, if both threads have one processor."""
    program = [sys.executable, "-c", ON_ONE_PROCESSOR.format(pool=pool)]
    return float(subprocess.run(program, capture_output=True, text=True, check=True, timeout=120).stdout)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot bind a process to a processor")
def test_no_job_waits_for_a_thread_without_a_processor():
    """Two threads on one processor: the one that waits has it, the other one does not. Waiting lasts a time slice, some
    milliseconds; the product alone lasts a fraction of one."""
    in_pool = run_on_one_processor(True)
    chosen = run_on_one_processor(False)  # torch's threads, until a job has waited long
    assert in_pool < 2e-3 and chosen < 2e-3
