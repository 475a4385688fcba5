"""A worker: llama.cpp built for this processor, through llama-cpp-python: plain, or with its prompt lookup.

options     {"gguf": file, "threads": n, "lookup": tokens per draft, 0: none}
"""

import time
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.contenders.workers.channel import Answer, answer, versions


def start(options: dict[str, Any]) -> tuple[Any, Answer]:
    """Loads the model."""
    draft = LlamaPromptLookupDecoding(num_pred_tokens=options["lookup"]) if options["lookup"] else None
    threads = options["threads"]
    llama = llama_cpp.Llama(
        options["gguf"], n_ctx=1024, n_threads=threads, n_threads_batch=threads, draft_model=draft, verbose=False
    )
    calls = [0]
    evaluate = llama.eval

    def counted(tokens: Any) -> None:
        calls[0] += 1
        evaluate(tokens)

    llama.eval = counted

    def write(text: Answer) -> Answer:
        llama.reset()
        calls[0], tokens = 0, list[int]()
        started = time.perf_counter()
        for token in llama.generate(text["prompt"], top_k=1, temp=0.0, reset=False):
            tokens.append(token)
            if len(tokens) == text["tokens"]:
                break
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": tokens, "calls": calls[0], "drafted": 0, "accepted": 0}

    system = llama_cpp.llama_print_system_info().decode()
    features = [part.split("=")[0].strip() for part in system.split("|") if "= 1" in part]
    facts = {
        "versions": versions("llama-cpp-python"),
        "isa": " ".join(f.removeprefix("CPU :").strip() for f in features),
    }
    return write, facts


if __name__ == "__main__":
    answer(start)
