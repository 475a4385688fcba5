"""One vLLM engine in the process of ``python one_engine.py JOB.json RESULT.json``, which ``vllm_job.run_alone`` starts.

    job = {"engine": arguments of LLM, "version": a version to pretend or None, "calls": {name: call}}
    call = {"prompts": [ids, …], "params": [arguments of SamplingParams, …], "batch": True: all prompts at once}

The result has the tokens and log-probabilities of each prompt of each call, the modules of vLLM's sampling functions, and the
counters of speculation.
"""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the functions to look at are in this process


def sampling_params(arguments):
    from vllm import SamplingParams

    arguments = dict(arguments)
    bad_words = arguments.pop("bad_words_token_ids", None)
    params = SamplingParams(detokenize=False, **arguments)
    params._bad_words_token_ids = bad_words  # vLLM makes these ids of words, with the tokenizer that is missing here
    return params


def text_of(output):
    text = {"tokens": list(output.outputs[0].token_ids)}
    if output.outputs[0].logprobs is not None:
        text["logprobs"] = [
            {id: logprob.logprob for id, logprob in place.items()} for place in output.outputs[0].logprobs
        ]
    return text


def run(engine, call):
    prompts = [dict(prompt_token_ids=ids) for ids in call["prompts"]]
    params = [sampling_params(arguments) for arguments in call["params"]]
    if call.get("batch", True):
        outputs = engine.generate(prompts, params, use_tqdm=False)
    else:
        outputs = [
            engine.generate([prompt], [its], use_tqdm=False)[0] for prompt, its in zip(prompts, params, strict=True)
        ]
    return [text_of(output) for output in outputs]


def main(job_file, result_file):
    job = json.loads(Path(job_file).read_text())
    import vllm

    if job["version"]:
        vllm.__version__ = job["version"]
    engine = vllm.LLM(
        **{
            **dict(skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, max_num_seqs=32, seed=0),
            **dict(max_num_batched_tokens=256, disable_log_stats=False),
            **job["engine"],
        }
    )
    result = {"calls": {name: run(engine, call) for name, call in job["calls"].items()}}
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    result["modules"] = {
        "_sample": GPUModelRunner._sample.__module__,
        "init_device": WorkerWrapperBase.init_device.__code__.co_filename,
    }
    result["counters"] = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
