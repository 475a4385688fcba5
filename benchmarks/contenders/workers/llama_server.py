"""A worker: llama.cpp's own server, through the wheel of xllamacpp, in this process.

    options     {"gguf": file, "threads": n, "speculation": a name in common_speculative_type, or "NONE",
                 "sizes": {a field of speculative: {its field: value}}}

Requests go to its native endpoint over the loop-back device, which answers with token ids and timings.
"""

import json
import time
import urllib.request
from typing import Any

import xllamacpp

from benchmarks.contenders.workers.channel import Answer, answer, versions


def start(options: dict[str, Any]) -> tuple[Any, Answer]:
    """Loads the model."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = options["gguf"]
    parameters.n_ctx, parameters.n_parallel, parameters.cache_ram_mib = 1024, 1, 0
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = options["threads"]
    parameters.verbosity = -1
    kind = getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{options['speculation']}")
    parameters.speculative.types = [kind]
    for part, fields in options["sizes"].items():
        for name, value in fields.items():
            setattr(getattr(parameters.speculative, part), name, value)
    server = xllamacpp.Server(parameters)
    request = urllib.request.Request(f"{server.listening_address}/completion", method="POST")
    request.add_header("Content-Type", "application/json")

    def write(text: Answer) -> Answer:
        wish = {"prompt": text["prompt"], "n_predict": text["tokens"], "temperature": 0.0, "top_k": 1, "stream": False}
        wish |= {"cache_prompt": False, "return_tokens": True, "ignore_eos": True}
        request.data = json.dumps(wish).encode()
        started = time.perf_counter()
        with urllib.request.urlopen(request) as reply:
            done = json.load(reply)
        seconds, timings = time.perf_counter() - started, done["timings"]
        drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        calls = len(done["tokens"]) - accepted
        return {
            "seconds": seconds,
            "tokens": done["tokens"],
            "calls": calls,
            "drafted": drafted,
            "accepted": accepted,
        }

    write.server = server  # type: ignore[attr-defined]  # a server that nothing refers to ends
    features = [part.split("=")[0].strip() for part in xllamacpp.get_system_info().split("|") if "= 1" in part]
    return write, {
        "versions": versions("xllamacpp"),
        "isa": " ".join(name.removeprefix("CPU :").strip() for name in features),
    }


if __name__ == "__main__":
    answer(start)
