"""vLLM's own tests of sampling and speculation, from its source package, with pass_ext's accept step and another model.

They run as they are, and once more with PaSS in the place of their proposers. `make test-engines` fetches them.
"""

import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from vllm_job import run_alone

HERE = Path(__file__).parent
SOURCE = Path(sys.prefix, "source")

FILES = {
    "tests/v1/e2e/general/test_min_tokens.py": 14,
    "tests/v1/sample/test_sampling_params_e2e.py": 8,
    "tests/v1/spec_decode/test_max_len.py": 3,
    "tests/v1/e2e/test_cpu_spec_decode.py": 1,
    "tests/v1/sample/test_logprobs.py::test_spec_decode_logprobs": 4,
}
"""So many tests are left of each without those that cannot run here, whoever samples:"""
NOT_HERE = {
    "eagle": "heads of Llama-3-8B and Llama-3.2-1B",
    "test_mtp_speculative_config_max_model_len": "the configuration of MiMo-7B; it draws nothing",
    "test_ngram_gpu_max_len": "runner V2, which needs Triton",
    "test_v2_speculator_smoke": "runner V2, and heads of three models",
}
STOP = "vLLM alone fails too: the word that it stops at is also this model's second"
EXPECTED = {
    "vLLM's proposers": {"test_stop": STOP},
    "PaSS": {"test_stop": STOP, "test_penalties": "its min_p: vLLM refuses it under speculation"},
}
"""What fails, and why."""


def outcomes(file):
    """Test -> "passed", "failure", "error" or "skipped"."""
    found = {}
    for case in ElementTree.parse(file).iter("testcase"):
        tags = [part.tag for part in case if part.tag in ("failure", "error", "skipped")]
        found[case.get("name")] = tags[0] if tags else "passed"
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: Path(file).stem)
@pytest.mark.parametrize("proposer", EXPECTED)
def test_what_fails_is_named(proposer, file, model_folder, tmp_path):
    options = ["--model", model_folder, *(["--slots", "smollm2-135m-instruct-slots"] if proposer == "PaSS" else [])]
    # Their marks of known failures are of bugs that are mended. -s: the log is the engines', too.
    options += ["-s", "--runxfail", "-k", " and ".join(f"not {name}" for name in NOT_HERE)]
    results = tmp_path / "results.xml"
    run_alone(
        ["-m", "pytest", "-p", "no:cacheprovider", "-p", "vllms_tests_plugin", "--junitxml", results, *options, file],
        tmp_path / "log",
        {
            "PASS_EXT_VLLM": "on",
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]]),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # two processes less that import vLLM
        },
        cwd=SOURCE,
    )
    log = (tmp_path / "log").read_text()
    assert results.exists(), log[-20000:]
    found = outcomes(results)
    failed = {name for name, outcome in found.items() if outcome != "passed"}
    assert failed == EXPECTED[proposer].keys() & found, log[-60000:]
    assert len(found) == FILES[file]
    assert ("pass_ext: PaSS drafts with 4 slots" in log) == (proposer == "PaSS")
