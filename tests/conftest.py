"""The backends of the tests (`--device`, default: all here), and a poisoned torch.empty, so that unwritten output shows."""

import gc
import logging
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from support.pairwise import spread

import pass_ext
from pass_ext import testing

sys.path.append(str(Path(__file__).parents[1]))  # benchmarks, tools and examples; an installed pass_ext comes first

KINDS = ("cpu", "best-cpu", "emulated", "cuda")  # best-cpu: at the best instruction set only
BEST = testing.cpu_backends()[-1].name
# The files that take longest, longest first. They start first: two processes share the files, and the last to end is short.
LONG = (
    "test_accept.py",
    "test_contract.py",
    "test_attention.py",
    "test_attention_group.py",
    "test_heads.py",
    "test_attention_masks.py",
    "test_attention_one_row.py",
    "test_ranks.py",
    "test_attention_codes.py",
    "test_attention_group_codes.py",
    "test_batch_invariant.py",
    "test_hybrid_models.py",
    "test_next_tree.py",
    "test_encoders.py",
    "test_indexed.py",
    "test_registration.py",
    "test_core.py",
    "test_adapted_layer.py",
    "test_attention_lists.py",
    "test_import.py",
    "test_adapter.py",
    "test_linear.py",
    "test_draft.py",
    "test_pace.py",
    "test_bf16_texts.py",
    "test_launches.py",
    "test_layer.py",
    "test_few_tokens.py",
    "test_compressed.py",
    "test_shard_kernels.py",
)


def pytest_addoption(parser):
    parser.addoption("--device", action="append", choices=KINDS, help="run only these backends; repeatable")


def pytest_configure(config):
    """Limits threads when several processes share the cores."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays to the end: nothing looks for garbage in it, now or, as it is frozen, later."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_finish():
    """pytest hangs a handler on every logger that does not propagate, three times a test, and torch has fifty of them."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """With --device, tests that take no backend run only with cpu. quick_on becomes slow on the other backends."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    for item in items:
        quick_on = item.get_closest_marker("quick_on")
        backend = item.callspec.params["backend"] if "backend" in item.fixturenames else None
        if quick_on and backend and not is_quick(backend.name, quick_on.args):
            item.add_marker(pytest.mark.slow)
    mark_repeated(items)
    devices = config.getoption("--device")
    if devices and not {"cpu", "best-cpu"} & set(devices):
        items[:] = [item for item in items if "backend" in item.fixturenames or "cuda" in item.fixturenames]


def mark_repeated(items):
    """``make test`` runs a case at the best instruction set and at one of the others in turn, so that a test runs at all of
    them; likewise by emulated tiles or by the processor's."""
    for backends in (testing.cpu_backends()[:-1], testing.tile_backends()):
        names = [backend.name for backend in backends]
        tests = defaultdict(dict)
        for item in items:
            backend = item.callspec.params["backend"] if "backend" in item.fixturenames else None
            if backend and backend.name in names and not item.get_closest_marker("slow"):
                test, _, case = item.nodeid.partition("[")
                tests[test][case.replace(backend.name, "", 1), backend.name] = item
        for pairs in tests.values():
            for pair in pairs.keys() - spread([case for case, _ in pairs], names):
                pairs[pair].add_marker(pytest.mark.repeated)


def is_quick(name, kinds):
    return name == "cuda" or name.split("-")[0] in kinds or (name == BEST and "best" in kinds)


def find_backends(devices):
    backends = []
    if not devices or "cpu" in devices:
        backends += testing.cpu_backends()
    elif "best-cpu" in devices:
        backends += testing.cpu_backends()[-1:]
    if not devices or "emulated" in devices:
        from emulator.ops import EMULATED

        backends.append(EMULATED)
    if not devices or "cuda" in devices:
        cuda = testing.cuda_backends()
        if devices and "cuda" in devices and not cuda:
            raise pytest.UsageError("--device cuda: no GPU, or pass_ext's CUDA kernels are not loaded")
        backends += cuda
    return backends


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        devices = metafunc.config.getoption("--device")
        backends = find_backends(devices)
        if metafunc.definition.get_closest_marker("by_tiles") and (not devices or {"cpu", "best-cpu"} & set(devices)):
            backends += testing.tile_backends()
        metafunc.parametrize("backend", backends, ids=str, indirect=True)


@pytest.fixture
def backend(request):
    with request.param.active():
        yield request.param


@pytest.fixture
def on_backend(request):
    """Tensors are made on the backend's device where none is named."""
    if "backend" not in request.fixturenames:
        yield
        return
    with request.getfixturevalue("backend").device:
        yield


@pytest.fixture
def one_thread():
    """One thread: the models of these tests are so small that more threads cost more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def with_threads():
    """Calls a function with several numbers of threads: all results."""
    before = torch.get_num_threads()

    def results(call, counts=(1, 2, 3)):
        found = []
        for count in counts:
            torch.set_num_threads(count)
            found.append(call())
        return found

    yield results
    torch.set_num_threads(before)


@pytest.fixture
def debug_mode():
    """Ops check the values of their arguments and raise."""
    former = pass_ext.set_debug(True)
    yield
    pass_ext.set_debug(former)


@pytest.fixture(scope="module")
def llama():
    """A small Llama with random weights."""
    from support.small_models import small_model

    return small_model("llama")


@pytest.fixture(scope="module")
def predicted(llama):
    """PaSS whose candidates come true often, once a Prophet knows the future."""
    from support.generation import BUSHY, slots_for

    from pass_ext import PaSS

    return PaSS(slots_for(llama), tree=BUSHY, rows=24)


@pytest.fixture
def cuda():
    """The CUDA backend, for tests of streams and graphs that only a GPU can run."""
    backends = testing.cuda_backends()
    if not backends:
        pytest.skip("no GPU")
    return backends[0]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty gives NaN or the largest integer, so that an element a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
