"""Texts on a GPU, beside those of the CPU and of plain decoding: `python -m benchmarks.gpu.texts`.

    models   tiny random models of one family for each kind of layer, float32: the greedy text of every method on the GPU is
             Plain's on the CPU, and methods that draw write the same text for a seed
    bits     PROMPTS prompts, a model of SmolLM2-135M's shape with random weights in bfloat16: how many texts differ from
             those that Plain writes for each prompt alone, by a method and by the texts in a call; then batch-invariant

`--device cpu` runs the same on a CPU, with fewer prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import pass_ext
from benchmarks.architectures.__main__ import DRAWN, NEW, SEEDS, methods, prompts
from benchmarks.architectures.models import tiny_model
from benchmarks.harness import evidence
from benchmarks.harness.command import provenance
from pass_ext import LookaheadEmbedding, PaSS, Plain, Speculative, Tree

FILE = "texts.json"
FAMILIES = (
    "llama", "qwen3_moe", "gemma3_text", "gpt_oss", "llama4_text", "deepseek_v3", "qwen3_next", "kimi_linear", "mamba2",
    "falcon_mamba", "falcon_h1", "lfm2", "nemotron_h", "starcoder2",
)  # fmt: skip
"""One for each kind of layer: plain, experts, windows, sinks, chunks, latents, states of several kinds, biases."""
PROMPTS, TOKENS = 75, 32


def of_family(name: str, device: str) -> str:
    """A sentence about the first text that is another; "same" if none is."""
    model, draft = tiny_model(name), tiny_model(name, seed=1)
    ids, mask = prompts()
    options: dict[str, Any] = dict(max_new_tokens=NEW, eos_token_id=[])
    greedy = pass_ext.generate(model, ids, attention_mask=mask, **options).sequences
    sampled = pass_ext.generate(model, ids, attention_mask=mask, temperature=0.8, seeds=SEEDS, **options).sequences
    model, draft, ids, mask = (x.to(device) for x in (model, draft, ids, mask))
    for by, method in methods(model, draft).items():
        got = pass_ext.generate(model, ids, method, attention_mask=mask, **options).sequences.cpu()
        if not torch.equal(got, greedy):
            return f"{by}: {int((got != greedy).any(1).sum())} of {len(ids)} greedy texts are not the CPU's"
        if by not in DRAWN:
            continue
        got = pass_ext.generate(
            model, ids, method, attention_mask=mask, temperature=0.8, seeds=SEEDS, **options
        ).sequences
        if not torch.equal(got.cpu(), sampled):
            return f"{by}: {int((got.cpu() != sampled).any(1).sum())} of {len(ids)} sampled texts are not the CPU's"
    return "same"


def small_model(device: str) -> Any:
    """A Llama of SmolLM2-135M's shape with random weights, whose texts vary."""
    import transformers

    from benchmarks.gpu.large_model import SMALL

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True, initializer_range=0.04)
    return transformers.LlamaForCausalLM(config).eval().to(device, torch.bfloat16)


def differing(model: Any, count: int) -> Iterator[dict[str, Any]]:
    """Method, texts in a call, how many of the texts are not those of Plain alone."""
    table = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, len(table), (12 + 7 * row % 130,), generator=generator) for row in range(count)]
    slots = LookaheadEmbedding.from_table(3, table, dtype=table.dtype).to(table.device)
    contenders = {
        "Plain": Plain(),
        "PaSS": PaSS(slots, tree=Tree([-1, 0, 0, 1, 1, 2, 3]), rows=24),  # drafts that are wrong
        "Speculative": Speculative(model, 3),  # drafts that are right
    }

    def written(method: Any, rows: list[Tensor], invariant: bool) -> list[list[int]]:
        longest = max(map(len, rows))
        ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows]).to(table.device)
        mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).to(table.device, torch.long)
        session = pass_ext.Session(model, batch_invariant=invariant)
        options = dict(attention_mask=mask, max_new_tokens=TOKENS, eos_token_id=[], session=session)
        got = pass_ext.generate(model, ids, method, **options)  # type: ignore[arg-type]
        return got.sequences[:, longest:].tolist()  # type: ignore[no-any-return]

    for invariant in (False, True):
        alone = [written(Plain(), [text], invariant)[0] for text in texts]
        for by, method in contenders.items():
            for together in (1, 25):
                if by == "Plain" and together == 1:
                    continue
                parts = (texts[first : first + together] for first in range(0, count, together))
                got = [row for part in parts for row in written(method, part, invariant)]
                wrong = sum(a != b for a, b in zip(got, alone, strict=True))
                yield {
                    "method": by,
                    "together": together,
                    "batch_invariant": invariant,
                    "texts": count,
                    "differing": wrong,
                }


def _tried(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def main() -> int:
    """Entry point of `python -m benchmarks.gpu.texts`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--prompts", type=int, help=f"default: {PROMPTS} on a GPU, 2 on a CPU")
    options = parser.parse_args()
    count = options.prompts if options.prompts is not None else PROMPTS if options.device == "cuda" else 2
    result = {**provenance("texts", False, options.device), "models": {}, "without graphs": [], "bits": []}
    for name in options.families:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            result["models"][name] = _tried(lambda name=name: of_family(name, options.device))
        result["without graphs"] += [name] * any("cannot be a CUDA graph" in str(warning.message) for warning in warned)
        print(json.dumps({name: result["models"][name]}), flush=True)
        evidence.add_result(FILE, result)
    if count:
        for line in differing(small_model(options.device), count):
            result["bits"].append(line)
            print(json.dumps(line), flush=True)
            evidence.add_result(FILE, result)
    return 0 if all(outcome == "same" for outcome in result["models"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
