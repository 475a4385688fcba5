"""A worker: a method of pass_ext, or transformers' ``generate``, on the demo's model.

options     {"model": GGUF file, "contender": a name of names.py, "dtype": "bfloat16" or "float32",
             "weights": "dense" or "stored"}
requests    texts; {"parts": [ids], "tokens": n}: the parts of a step; {"limits": true}: the machine's speeds
"""

import os
import tempfile
from typing import Any

import torch

import pass_ext
from benchmarks.contenders.workers.channel import Answer, answer, versions
from benchmarks.contenders.workers.names import ADAPTED, GENERATE, JOINED, NGRAM, PLAIN
from benchmarks.contenders.workers.step_parts import machine_limits, step_parts
from benchmarks.decoding.contenders import method_contender, transformers_contender
from benchmarks.harness.plan import DTYPES
from pass_ext.checkpoint import load_checkpoint

SLOTS, WITH_ADAPTERS = "smollm2-135m-instruct-slots", "smollm2-135m-instruct"


def method(name: str) -> Any:
    """The method of this name, with the settings that a user gets by default."""
    if name == PLAIN:
        return pass_ext.Plain()
    if name == NGRAM:
        return pass_ext.NGram()
    lookahead = pass_ext.LookaheadEmbedding.from_pretrained(WITH_ADAPTERS if name == ADAPTED else SLOTS)
    return pass_ext.PaSS(lookahead, ngram=pass_ext.NGram() if name == JOINED else None)


def start(options: dict[str, Any]) -> tuple[Any, Answer]:
    """Loads the model, and makes the contender."""
    torch.set_num_threads(options["threads"])
    model, _ = load_checkpoint(options["model"], torch.bfloat16, weights=options["weights"])
    model = model.to(DTYPES[options["dtype"]])
    model.generation_config.eos_token_id = None  # every text has its full length
    # Step times of this run: a folder that is empty unless a worker of this run measured them.
    os.environ["PASS_EXT_CACHE"] = options["step_times"] or tempfile.mkdtemp()
    if options["contender"] == GENERATE:
        contender = transformers_contender(GENERATE, model)
    else:
        contender = method_contender(options["contender"], model, method(options["contender"]))

    def reply(request: Answer) -> Answer:
        if "limits" in request:
            return machine_limits()
        if "parts" in request:
            return step_parts(model, contender, request["parts"], request["tokens"])
        outcome = contender(request["prompt"], request["tokens"])
        return {
            "seconds": outcome.seconds,
            "tokens": outcome.tokens,
            "calls": outcome.calls,
            "drafted": outcome.drafted,
            "accepted": sum(count * steps for count, steps in enumerate(outcome.histogram)),
        }

    return reply, {"versions": versions("torch", "transformers"), "isa": pass_ext.status().cpu_isa}


if __name__ == "__main__":
    answer(start)
