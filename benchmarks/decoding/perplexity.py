"""How exact packed weights are on a text: the perplexity of a GGUF file's own 4 and 8 bits beside the same numbers in float32.

    perplexity = exp of the mean of  -log p(token | the tokens before it),  over pieces of 512 tokens
    from dense = perplexity / dense - 1,  ± the standard error of the mean of the differences, token by token
    divergence = the mean of  KL(dense || form)  after each token: of two forms with the same, neither is the worse

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

from benchmarks import ROOT
from benchmarks.decoding.prompts import read_prompts
from benchmarks.harness import machine
from pass_ext.checkpoint import demo_model, load_checkpoint
from pass_ext.training.common.frozen_model import opening_ids

PIECE = 512  # tokens


def pieces_of(tokenizer: Any) -> list[list[int]]:
    """The texts one after the other, in pieces, each with the token that begins a text, if the model has one."""
    prompts = [*read_prompts("prose", tokenizer, 64), *read_prompts("code", tokenizer, 10)]
    ids = [token for prompt in prompts for token in prompt.ids]
    return [opening_ids(tokenizer) + ids[first : first + PIECE] for first in range(0, len(ids), PIECE)]


Logits = Callable[[list[int]], Tensor]  # of a piece: [N, V]


def beside(dense: Logits, other: Logits, pieces: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """-log p of each token by both, and KL(dense || other) after each."""
    found = []
    for ids in pieces:
        of_dense, of_other = (logits(ids)[:-1].log_softmax(-1) for logits in (dense, other))
        columns = torch.tensor(ids[1:])[:, None]
        apart = of_other.sub_(of_dense).mul_(-1)
        dense_loss, more = -of_dense.gather(1, columns)[:, 0], apart.gather(1, columns)[:, 0]
        found.append((dense_loss.double(), (dense_loss + more).double(), (apart * of_dense.exp_()).sum(-1).double()))
    losses_of_dense, losses, divergence = map(torch.cat, zip(*found, strict=True))
    return losses_of_dense, losses, divergence


def perplexity(losses: Tensor) -> float:
    """exp of the mean."""
    return math.exp(losses.mean())


def figures(dense: Tensor, losses: Tensor, divergence: Tensor) -> dict[str, Any]:
    """Of a form of the weights; see the module."""
    differences = losses - dense
    error = float(differences.std()) / len(differences) ** 0.5
    return {
        "perplexity": round(perplexity(losses), 5),
        "from dense": f"{math.expm1(differences.mean()):+.4%} ± {error:.4%}",
        "divergence": float(f"{float(divergence.mean()):.3g}"),
    }


def of_transformers(model: Any) -> Logits:
    """What gives the logits of a piece by transformers' forward."""

    def logits(ids: list[int]) -> Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].float()

    return logits


def of_llama_cpp(file: Path) -> Logits:
    """What gives the logits of a piece by llama.cpp's run of the file."""
    import llama_cpp

    llama = llama_cpp.Llama(str(file), n_ctx=2 * PIECE, logits_all=True, verbose=False)

    def logits(ids: list[int]) -> Tensor:
        llama.reset()
        llama.eval(ids)
        return torch.from_numpy(llama.scores[: len(ids)].copy())

    return logits


FORMS = {
    "packed": ("stored", torch.float32),
    "dense, bfloat16": ("dense", torch.bfloat16),
    "packed, bfloat16": ("stored", torch.bfloat16),
}
"""Name -> weights and dtype of `load_checkpoint`."""


def measure(file: Path) -> dict[str, Any]:
    """The dense model's perplexity on a file, and each form's beside it."""
    model, tokenizer = load_checkpoint(file, torch.float32, weights="dense")
    dense, pieces = of_transformers(model), pieces_of(tokenizer)
    forms = {}
    for name, (weights, dtype) in FORMS.items():
        of_dense, *others = beside(dense, of_transformers(load_checkpoint(file, dtype, weights=weights)[0]), pieces)
        forms[name] = figures(of_dense, *others)
    if find_spec("llama_cpp"):
        of_dense, *others = beside(dense, of_llama_cpp(file), pieces)
        forms["llama.cpp"] = figures(of_dense, *others)
    return {"file": file.name, "tokens": len(of_dense), "dense": round(perplexity(of_dense), 5), "forms": forms}


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
