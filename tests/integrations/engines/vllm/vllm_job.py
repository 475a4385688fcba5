"""Runs calls from a JSON file in one vLLM engine, in a process of its own; writes texts, counters and pass_ext's log lines.

    {"model": folder, "options": of LLM, "calls": [{"prompts": [[ids]], "sampling": of SamplingParams, or a list, "batch": n}]}
    a call may have "sounds": a seed for each prompt, or null
    a job may have "drafts": true: the result has those of each step, prompt by prompt

vLLM holds global state, and one process takes one engine.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

MOST_SECONDS = 3600  # beside other work: what hangs is ended by it, not what is slow

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A region of two threads waits long beside other busy processes.
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",  # n-grams
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(MOST_SECONDS),
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def run_alone(arguments, log, environment=None, seconds=MOST_SECONDS, **options):
    """The exit status of this Python with these arguments. Engines have processes of their own: they end with it."""
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            start_new_session=True,
            **options,
        )
        try:
            return process.wait(timeout=seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run_engine(folder, model, calls, environment=None, drafts=False, **options):
    """The result of a job: ``texts`` of each call, ``counters``, ``log``, ``drafts``."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {"max_model_len": 1024, "enforce_eager": True, "skip_tokenizer_init": True, **options}
    job = {"model": str(model), "options": options, "calls": calls, "drafts": drafts}
    (folder / "job.json").write_text(json.dumps(job))
    status = run_alone([__file__, folder / "job.json", folder / "result.json"], folder / "log", environment)
    log = (folder / "log").read_text()
    if not (folder / "result.json").exists():
        raise RuntimeError(f"exit status {status}: {log[-60000:]}")
    result = json.loads((folder / "result.json").read_text())
    return result | {"log": [line for line in log.splitlines() if "pass_ext" in line]}


def sampling_params(schema=None, **options):
    """schema: of the JSON that the text must be."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if schema is not None:
        options["structured_outputs"] = StructuredOutputsParams(json=schema)
    return SamplingParams(**{"detokenize": False, **options})


def sound(seed):
    """A second of noise."""
    return np.random.default_rng(seed).standard_normal(16000).astype(np.float32)


def record_drafts():
    """The drafts that this process will propose, filled step by step: prompt -> of each step."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    propose, found = GPUModelRunner.propose_draft_token_ids, {}

    def recorded(runner, *given, **named):
        drafts = propose(runner, *given, **named)
        for request, ids in zip(runner.input_batch.req_ids, drafts.tolist(), strict=True):
            found.setdefault(request, []).append(ids)
        return drafts

    GPUModelRunner.propose_draft_token_ids = recorded
    return found


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    if job["drafts"]:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the proposer is in this process
    from vllm import LLM

    drafts = record_drafts() if job["drafts"] else {}
    llm = LLM(job["model"], disable_log_stats=False, **job["options"])
    texts, logprobs = [], []
    for call in job["calls"]:
        prompts = [{"prompt_token_ids": ids} for ids in call["prompts"]]
        for prompt, seed in zip(prompts, call.get("sounds", ()), strict=False):
            if seed is not None:
                prompt["multi_modal_data"] = {"audio": (sound(seed), 16000)}
        given = call["sampling"] if isinstance(call["sampling"], list) else [call["sampling"]] * len(prompts)
        sampling = [sampling_params(**one) for one in given]
        outputs = []
        for first in range(0, len(prompts), call.get("batch", len(prompts))):
            last = first + call.get("batch", len(prompts))
            outputs += llm.generate(prompts[first:last], sampling[first:last], use_tqdm=False)
        texts.append([list(output.outputs[0].token_ids) for output in outputs])
        logprobs.append(
            [
                [
                    [[token, entry.logprob] for token, entry in place.items()]
                    for place in output.outputs[0].logprobs or ()
                ]
                for output in outputs
            ]
        )
    counters = {
        metric.name.removeprefix("vllm:"): getattr(metric, "values", None) or metric.value
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name
    }
    result = {"texts": texts, "logprobs": logprobs, "counters": counters, "drafts": list(drafts.values())}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
