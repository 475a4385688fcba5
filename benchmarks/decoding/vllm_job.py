"""Runs vLLM on prompts from a job file: batch of one, greedy, seconds per text.

It runs in vLLM's environment, so it imports nothing of this project.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main() -> None:
    """Reads the job file, runs it, writes the result file."""
    import torch
    import vllm

    job = json.loads(Path(sys.argv[1]).read_text())
    on_gpu = job["device"] == "cuda"
    llm = vllm.LLM(
        job["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=1,
        enable_prefix_caching=False,
        **({"gpu_memory_utilization": 0.3} if on_gpu else {}),
    )
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=job["max_new_tokens"], stop_token_ids=job["eos"], detokenize=False
    )
    runs = []
    for ids in [job["prompts"][0], *job["prompts"]]:  # the first prompt twice: once to warm up
        started = time.perf_counter()
        done = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        runs.append({"seconds": time.perf_counter() - started, "tokens": list(done[0].outputs[0].token_ids)})
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    Path(sys.argv[2]).write_text(json.dumps({"versions": versions, "cores": cores, "runs": runs[1:]}))


if __name__ == "__main__":
    main()
