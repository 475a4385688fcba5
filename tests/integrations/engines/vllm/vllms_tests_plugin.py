"""A plugin of pytest that lets vLLM's own tests run here: ``-p vllms_tests_plugin --model FOLDER [--slots NAME]``.

Every ``LLM`` of a test loads the model in FOLDER. With --slots it drafts by PaSS where its test gives another proposer, and
in files that give none everywhere.
"""

import functools

import pytest
import vllm
from vllm.platforms import current_platform

WITHOUT_PROPOSERS = ("test_min_tokens.py", "test_sampling_params_e2e.py")
MOST_DRAFTS = 8  # twice the slots
FILE = pytest.StashKey[str]()  # of the test that runs


def pytest_addoption(parser):
    parser.addoption("--model", required=True)
    parser.addoption("--slots")


def pytest_configure(config):
    import tests.utils  # vLLM's, found in the folder in which pytest runs

    # A list of GPU kernels that parametrizes tests of GPUs alone, and an error on a CPU.
    tests.utils.get_attn_backend_list_based_on_platform = list
    model, slots, start = config.getoption("--model"), config.getoption("--slots"), vllm.LLM.__init__

    def start_here(llm, model_of_test=None, *, speculative_config=None, **options):
        if slots and (speculative_config or config.stash[FILE] in WITHOUT_PROPOSERS):
            drafts = min(MOST_DRAFTS, (speculative_config or {}).get("num_speculative_tokens", MOST_DRAFTS))
            proposer = dict(method="custom_class", model="pass_ext.integrations.vllm.PaSS")
            speculative_config = dict(proposer, num_speculative_tokens=drafts)
            options["additional_config"] = {"pass_ext": dict(slots=slots, pause=False)}
        start(llm, **{"enforce_eager": True, **options, "model": model}, speculative_config=speculative_config)

    vllm.LLM.__init__ = start_here
    # Each engine of this process would do it again, and fails where numba is loaded, as it is after n-grams.
    once = functools.cache(current_platform.register_triton_kernel_overrides)
    type(current_platform).register_triton_kernel_overrides = staticmethod(once)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.config.stash[FILE] = item.path.name


def pytest_collection_modifyitems(items):
    for item in items:
        # Their engine is in this process, and the clean-up after every test would take its groups from it.
        if item.path.name in WITHOUT_PROPOSERS:
            item.add_marker("skip_global_cleanup")
        # "Needs 32 GB on a GPU", for the model that is not used here.
        if item.name.startswith("test_spec_decode_logprobs"):
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "skipif"]
