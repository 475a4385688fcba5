"""How exact packed weights are on a text: the perplexity of a GGUF file's own 4 and 8 bits beside the same numbers in float32.

    perplexity = exp of the mean of  -log p(token | the tokens before it),  over pieces of 512 tokens

The text is the prompts of benchmarks, prose and held-out code (`prompts.py`). "dense" is transformers' model
in float32, "packed" the stored weights with float32 around them; both again in bfloat16, as `load_checkpoint` gives them; and
"llama.cpp", where llama-cpp-python is installed, its own run of the file.

`python -m benchmarks.decoding.perplexity [FILE.gguf ...]` keeps the results in perplexity-*.json of the machine's folder
of results; without files it takes SmolLM2's.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import ROOT
from benchmarks.decoding.prompts import read_prompts
from benchmarks.harness import machine
from pass_ext.checkpoint import demo_model, load_checkpoint
from pass_ext.training.common.frozen_model import opening_ids

PIECE = 512  # tokens


def pieces_of(tokenizer: Any) -> list[list[int]]:
    """The texts one behind the other, in pieces, each with the token that begins a text, if the model has one."""
    prompts = [*read_prompts("prose", tokenizer, 64), *read_prompts("code", tokenizer, 10)]
    ids = [token for prompt in prompts for token in prompt.ids]
    return [opening_ids(tokenizer) + ids[first : first + PIECE] for first in range(0, len(ids), PIECE)]


def perplexity(logits: Callable[[list[int]], Tensor], pieces: list[list[int]]) -> float:
    """Of a model that gives the logits ``[N, V]`` of a piece."""
    total, count = 0.0, 0
    for ids in pieces:
        losses = functional.cross_entropy(logits(ids)[:-1].double(), torch.tensor(ids[1:]), reduction="sum")
        total, count = total + float(losses), count + len(ids) - 1
    return math.exp(total / count)


def of_transformers(model: Any) -> Callable[[list[int]], Tensor]:
    """What gives the logits of a piece by transformers' forward."""

    def logits(ids: list[int]) -> Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].float()

    return logits


def of_llama_cpp(file: Path) -> Callable[[list[int]], Tensor]:
    """What gives the logits of a piece by llama.cpp's run of the file."""
    import llama_cpp

    llama = llama_cpp.Llama(str(file), n_ctx=2 * PIECE, logits_all=True, verbose=False)

    def logits(ids: list[int]) -> Tensor:
        llama.reset()
        llama.eval(ids)
        return torch.from_numpy(llama.scores[: len(ids)].copy())

    return logits


FORMS = {
    "dense": ("dense", torch.float32),
    "packed": ("stored", torch.float32),
    "dense, bfloat16": ("dense", torch.bfloat16),
    "packed, bfloat16": ("stored", torch.bfloat16),
}
"""Name -> weights and dtype of `load_checkpoint`."""


def measure(file: Path) -> dict[str, Any]:
    """The perplexities of a file, and how far they are from the dense model's."""
    pieces: list[list[int]] = []
    found: dict[str, float] = {}
    for name, (weights, dtype) in FORMS.items():
        model, tokenizer = load_checkpoint(file, dtype, weights=weights)
        pieces = pieces or pieces_of(tokenizer)
        found[name] = perplexity(of_transformers(model), pieces)
    if find_spec("llama_cpp"):
        found["llama.cpp"] = perplexity(of_llama_cpp(file), pieces)
    return {
        "file": file.name,
        "tokens": sum(len(piece) - 1 for piece in pieces),
        "perplexity": {name: round(value, 5) for name, value in found.items()},
        "from dense": {name: f"{value / found['dense'] - 1:+.4%}" for name, value in found.items()},
    }


def main(files: list[str]) -> None:
    """Measures these files, or the demo's, and keeps a result of each."""
    torch.manual_seed(0)
    others = ["transformers", "gguf", *(["llama-cpp-python"] if find_spec("llama_cpp") else [])]
    for file in map(Path, files or [str(demo_model())]):
        result = {
            "date": machine.now(),
            "commit": machine.commit(),
            "machine": machine.describe_cpu(),
            "versions": machine.describe_versions() | {name: metadata.version(name) for name in others},
            **measure(file),
        }
        print(json.dumps(result, indent=1), flush=True)
        folder = ROOT / "benchmarks" / "results" / machine.device_slug("cpu")
        (folder / f"perplexity-{machine.slug(file.stem)}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
