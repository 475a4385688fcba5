"""Steps of a large model on a GPU, and with --small of a small one: milliseconds per token of pass_ext's loop and of
transformers' generate.

    ms per token = (time of n tokens - time of n / 2 tokens) / (n / 2)

so the prompt and the first steps, which load kernels and record graphs, cancel. The model has the shape of Llama 3 8B, or of
SmolLM2-135M, and random weights in bfloat16: the time of a step does not depend on them. One request, a prompt of 200 tokens,
greedy. Slots of a random model predict nothing, so PaSS gains no token here: its lines are the price of steps with 8 and with
16 rows. The contenders run in turn; the result is the median of the rounds that the time allowed (`rounds`). The limit is the
time in which the weights that a step reads are read once, at the speed of a large read in this run. "other products": a layer's
products by the way that `generate` does not choose for this model, `linear_rows` inside the layer ops or PyTorch's. "int8":
keys and values in 8 bits. "batch-invariant": `Session(batch_invariant=True)`. `python -m benchmarks.gpu.large_model`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import pass_ext
from benchmarks.harness import evidence, gpu_timing, machine
from benchmarks.harness.cases import settings_for
from benchmarks.harness.command import provenance
from pass_ext import LookaheadEmbedding, PaSS, Plain, Tree
from pass_ext.decoding.models import backend, module_ops

FILES = {False: "large-model.json", True: "small-model.json"}
SMALL = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
             num_key_value_heads=3, vocab_size=49152, max_position_embeddings=8192, rope_theta=100000.0)  # fmt: skip
LARGE = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
             num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0)  # fmt: skip
PROMPT, TOKENS, TOKENS_OF_TRANSFORMERS, ROUNDS = 200, 64, 16, 5
SLOTS = 3
DRAFTS = {"PaSS": 3, "PaSS of 8 rows": 1}
"""Drafts of a step, whose nodes have SLOTS slots each: 16 rows, and 8."""


def make_model(shape: dict[str, Any]) -> Any:
    """The model with random weights, on the GPU."""
    import transformers

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            torch.manual_seed(0)
            config = transformers.LlamaConfig(**shape, tie_word_embeddings=False)
            return transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def contenders(model: Any, ids: torch.Tensor) -> dict[str, tuple[int, int, Callable[[int], Any]]]:
    """Name -> rows of a step, tokens of a text, function of the number of tokens."""
    table = model.get_input_embeddings().weight
    slots = LookaheadEmbedding.from_table(SLOTS, table, dtype=torch.bfloat16).to("cuda")
    methods: dict[str, tuple[int, Any]] = {"Plain": (1, Plain())}
    for name, drafts in DRAFTS.items():
        tree = Tree.chain(drafts).with_lookahead(dict.fromkeys(range(drafts + 1), SLOTS))
        methods[name] = (drafts + 1) * (1 + SLOTS), PaSS(slots, tree=tree, rows=24)
    usual = module_ops.torch_is_faster

    def ours(method: Any, is_other: bool = False, **options: Any) -> Callable[[int], Any]:
        def run(count: int) -> Any:
            if is_other:
                module_ops.torch_is_faster = lambda weights: not usual(weights)
                backend._kept.clear()  # what was chosen before
            try:
                session = pass_ext.Session(model, **options)
                return pass_ext.generate(model, ids, method, max_new_tokens=count, session=session)
            finally:
                module_ops.torch_is_faster = usual
                if is_other:
                    backend._kept.clear()

        return run

    def transformers(count: int) -> Any:
        return model.generate(
            ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None
        )

    found = {f"pass_ext, {name}": (rows, TOKENS, ours(method)) for name, (rows, method) in methods.items()}
    for name, (rows, method) in methods.items():
        found[f"pass_ext, {name}, other products"] = rows, TOKENS, ours(method, is_other=True)
    for name in ("Plain", "PaSS"):
        rows, method = methods[name]
        found[f"pass_ext, {name}, int8"] = rows, TOKENS, ours(method, cache_dtype=torch.int8)
        found[f"pass_ext, {name}, batch-invariant"] = rows, TOKENS, ours(method, batch_invariant=True)
    return found | {"transformers": (1, TOKENS_OF_TRANSFORMERS, transformers)}


def seconds(function: Callable[[int], Any], count: int) -> float:
    """Seconds of one text, until the GPU has ended."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    function(count)
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def measure(result: dict[str, Any], save: Callable[[], None]) -> None:
    """Fills the result round by round."""
    model = make_model(result["model"])
    ids = torch.randint(0, result["model"]["vocab_size"], (1, PROMPT), device="cuda")
    read = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    cache = (machine.describe_gpu() or {})["l2_cache_bytes"] or 64 * 2**20
    speed = gpu_timing.read_bandwidth(settings_for("cuda", False, cache), cache)
    result |= {"weights_gb": read / 1e9, "read_gb_per_s": speed / 1e9, "limit_ms": 1e3 * read / speed, "rows": []}
    entrants = contenders(model, ids)
    steady: dict[str, list[float]] = {name: [] for name in entrants}
    whole: dict[str, list[float]] = {name: [] for name in entrants}
    for _, _, function in entrants.values():
        function(4)
    for _ in range(ROUNDS):
        for name, (_, count, function) in entrants.items():
            half, full = seconds(function, count // 2), seconds(function, count)
            steady[name].append(1e3 * (full - half) / (count - count // 2))
            whole[name].append(1e3 * full / count)
        result["rows"] = [
            {"contender": name, "rows": rows, "tokens": count, "rounds": len(steady[name]),
             "ms_per_token": median(steady[name]), "least_ms": min(steady[name]), "most_ms": max(steady[name]),
             "ms_whole_text": median(whole[name])}
            for name, (rows, count, _) in entrants.items()
        ]  # fmt: skip
        save()


def by_time(events: Iterable[Any], tokens: int) -> list[dict[str, Any]]:
    """Kernels of a profile, those that take most of the GPU's time first: microseconds and launches for a token."""
    kernels = [
        {"kernel": event.key, "us": event.self_device_time_total / tokens, "launches": event.count / tokens}
        for event in events
        if event.self_device_time_total > 0
    ]
    return sorted(kernels, key=lambda kernel: -kernel["us"])


def profile(shape: dict[str, Any]) -> None:
    """Prints and records the kernels of Plain and of PaSS."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    model = make_model(shape)
    ids = torch.randint(0, shape["vocab_size"], (1, PROMPT), device="cuda")
    for name, (_, _, function) in contenders(model, ids).items():
        if name in ("pass_ext, Plain", "pass_ext, PaSS"):
            function(8)  # kernels are loaded
            with profiler(activities=[ProfilerActivity.CUDA]) as run:
                function(TOKENS)
                torch.cuda.synchronize()
            kernels = by_time(run.key_averages(), TOKENS)
            evidence.add_here("kernels", contender=name, kernels=kernels[:40])
            for kernel in kernels[:15]:
                print(
                    f"{name}: {kernel['us']:8.1f} us  {kernel['launches']:6.1f} launches  {kernel['kernel'][:90]}",
                    flush=True,
                )


def main() -> int:
    """Entry point of `python -m benchmarks.gpu.large_model`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    parser.add_argument("--small", action="store_true", help="SmolLM2-135M's shape")
    parser.add_argument("--kernels", action="store_true", help="a table of the kernels by time instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu.large_model: torch sees no GPU", file=sys.stderr)
        return 1
    if options.kernels:
        with torch.inference_mode():
            profile(SMALL if options.small else LARGE)
        return 0
    result: dict[str, Any] = {**provenance(FILES[options.small].removesuffix(".json"), False, "cuda")}
    result["model"] = SMALL if options.small else LARGE

    def save() -> None:
        evidence.add_result(FILES[options.small], result)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    with torch.inference_mode():
        measure(result, save)
    for row in result["rows"]:
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
