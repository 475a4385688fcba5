"""Times the steps of inputs.py on a GPU, for the fit: `python -m benchmarks.kernel_time.on_gpu`.

    warm   64 calls of one step in a CUDA graph, one after the other, inputs in L2
    cold   calls in a graph, each with a copy of the inputs of its own, after a sweep of the L2
    alone  one call in a graph, warm, code and launch not prepared by an equal call just before it

The median of 25 replays each. Also the time of an empty kernel in a graph, the speed of a copy and of a read, and what the
emulator does not record: batches, other vocabularies, longer and shorter prefixes.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import pass_ext
from benchmarks.harness import evidence, gpu_timing, machine
from benchmarks.harness.cases import settings_for
from benchmarks.harness.command import provenance
from benchmarks.kernel_time.inputs import (
    FILTERED,
    MEASURED,
    SEED,
    Call,
    accept_calls,
    attention_call,
    attention_calls,
    codes_calls,
    draft_calls,
    latent_call,
    layer_calls,
    one_order_calls,
)
from benchmarks.ops.contenders.inputs.distributions import make_draft_logits, make_logits, per_row

CALLS, SAMPLES = 64, 25
VOCABULARIES = (1_024, 8_192, 32_000, 262_144)
SLOTS, TEXTS, ROWS = 131_072, (2_048, 32_768, 131_056), (1, 5, 6, 16)
"""Of a cache of latents: a launch's blocks go by its slots, its work by the text."""


def main() -> int:
    """Entry point of `python -m benchmarks.kernel_time.on_gpu`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    parser.add_argument("--only", default="", help="a text in the names of the calls to time")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.kernel_time.on_gpu: torch sees no GPU", file=sys.stderr)
        return 1
    result: dict[str, Any] = {
        **provenance("kernel-time", False, "cuda"),
        "constants": {},
        "steps": [],
    }
    with torch.inference_mode():
        cache = (machine.describe_gpu() or {})["l2_cache_bytes"] or 64 * 2**20
        result["constants"] = constants(cache)
        print(json.dumps(result["constants"]), flush=True)
        for make in (*recorded(), *long_texts(), *batches()):
            _add(result, make, cache, options.only)
            evidence.add_result(MEASURED, result)
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all("error" not in step for step in result["steps"]) else 1


def _add(result: dict[str, Any], make: Callable[[], Call], cache: int, only: str) -> None:
    call = None
    try:
        call = make()
        if only in f"{call.kind}, {call.name}":
            result["steps"].append(timed(call.to("cuda"), cache))
            print(json.dumps(result["steps"][-1]), flush=True)
    except Exception as error:  # the other calls are still timed
        name = (call.kind, call.name) if call else ("", str(make))
        result["steps"].append({"kind": name[0], "name": name[1], "error": f"{type(error).__name__}: {error}"[:2000]})
        print(json.dumps(result["steps"][-1]), flush=True)


def constants(cache: int) -> dict[str, float]:
    """Microseconds of an empty kernel in a graph, GB/s of a copy and of a read."""
    empty = torch.zeros(1, device="cuda")
    settings = settings_for("cuda", False, cache)
    return {
        "launch_us": 1e6 * graph_time(lambda: empty.add_(1), [()], CALLS),
        "copy_gb_per_s": gpu_timing.copy_bandwidth(settings, cache) / 1e9,
        "read_gb_per_s": gpu_timing.read_bandwidth(settings, cache) / 1e9,
    }


def timed(call: Call, cache: int) -> dict[str, Any]:
    """Microseconds of a call, warm, cold and alone; the result is the planned one."""
    if not call.is_right(call.run()):
        raise AssertionError("the step's result is not the planned one")
    size = sum(tensor.nbytes for tensor in tree_leaves(call.arguments) if isinstance(tensor, Tensor))
    copies = max(2, min(CALLS, 8 * 2**30 // size))
    sets = [(call.arguments,)] + [(tree_map_only(Tensor, Tensor.clone, call.arguments),) for _ in range(copies - 1)]
    run = lambda arguments: call.op(**arguments)  # noqa: E731
    sweep = torch.ones(cache, device="cuda")  # four times the cache
    return {
        "kind": call.kind,
        "name": call.name,
        "bytes": size,
        "warm_us": 1e6 * graph_time(run, sets[:1], CALLS),
        "cold_us": 1e6 * graph_time(run, sets, copies, sweep),
        "alone_us": 1e6 * graph_time(run, sets[:1], 1),
        "kernels": gpu_timing.count_kernels(run, sets[0]),
    }


def graph_time(run: Callable[..., Any], sets: list[tuple[Any, ...]], calls: int, sweep: Tensor | None = None) -> float:
    """Seconds of a call: the median of SAMPLES samples."""
    sample = gpu_timing.graph_sampler(run, sets, calls, sweep)
    return median(sample() for _ in range(SAMPLES))


def recorded() -> Iterator[Callable[[], Call]]:
    """The steps that the emulator records, the most wanted first: the time may end."""
    for calls in (draft_calls, accept_calls, attention_calls, codes_calls, one_order_calls, layer_calls):
        yield from _each(calls())
    yield functools.partial(latent_call, 1, 1)


def long_texts() -> Iterator[Callable[[], Call]]:
    """Latents in a large cache, and codes, lists and one order after a long text."""
    for keys in TEXTS:
        for rows in ROWS:
            yield functools.partial(latent_call, 1, rows, keys=keys, slots=SLOTS)
    yield from _each(codes_calls(32_768))
    yield from _each(one_order_calls(32_768))


def _each(calls: Iterator[Call]) -> Iterator[Callable[[], Call]]:
    for call in calls:
        yield lambda call=call: call  # type: ignore[misc]


def batches() -> Iterator[Callable[[], Call]]:
    """Batches and vocabularies."""
    for rows in (16, 64, 256, 640):
        yield functools.partial(_draft, rows, "off")
    yield functools.partial(_draft, 64, FILTERED)
    for rows in (1, 16):
        yield functools.partial(_draft, rows, "off", 32, "top")
    for rows in (1, 256):
        yield functools.partial(_draft, rows, "off", 4, "coupled", "flat")
    for requests in (1, 8, 64, 256):
        for rule in ("coupled", "rejection"):
            yield functools.partial(_chain, requests, rule, "off", 128_256)
    for requests in (1, 8, 64):
        yield functools.partial(_chain, requests, "rejection", FILTERED, 128_256)
    for vocabulary in VOCABULARIES:
        yield functools.partial(_chain, 1, "rejection", "off", vocabulary)
    yield functools.partial(attention_call, "32,768 keys, 64 rows", 32_768, 64, -1, 8)
    yield functools.partial(attention_call, "131,072 keys, 16 rows", 131_072, 16, -1, 8)
    yield functools.partial(attention_call, "64 keys, 4 rows", 64, 4, -1, 8)
    for requests, rows in ((1, 16), (8, 1), (8, 16)):
        yield functools.partial(latent_call, requests, rows)


def _draft(rows: int, filters: str, count: int = 1, mode: str = "coupled", kind: str = "peaked") -> Call:
    """draft_sample of many rows."""
    generator = torch.Generator("cuda").manual_seed(SEED)
    arguments = {
        "logits": make_logits(kind, rows, 128_256, generator).bfloat16(),
        "k": count,
        "mode": mode,
        **per_row(rows, torch.device("cuda"), 0.8, filters),
        "seeds": torch.arange(rows),
        "positions": torch.arange(rows),
    }
    name = f"{rows} × {count}, {kind}, {mode}, filters {filters}"
    return Call("draft_sample", name, pass_ext.draft_sample, arguments, lambda _: True)


def _chain(requests: int, rule: str, filters: str, vocabulary: int) -> Call:
    """accept_chain of four drafts drawn from the draft's distribution."""
    generator = torch.Generator("cuda").manual_seed(SEED)
    device, seeds = torch.device("cuda"), torch.arange(requests)
    target = make_logits("peaked", 5 * requests, vocabulary, generator)
    draft = make_draft_logits("peaked", target, generator).bfloat16().view(requests, 5, vocabulary)[:, :4].contiguous()
    mode = "coupled" if rule == "coupled" else "without"
    drawn = [
        pass_ext.draft_sample(
            draft[:, k],
            1,
            mode=mode,
            **per_row(requests, device, 0.8, filters),
            seeds=seeds.to(device),
            positions=7 + k,
        )[0][:, 0]
        for k in range(4)
    ]
    arguments = {
        "target_logits": target.bfloat16().view(requests, 5, vocabulary),
        "draft_tokens": torch.stack(drawn, 1),
        "rule": rule,
        "draft_logits": None if rule == "coupled" else draft,
        **per_row(requests, device, 0.8, filters),
        "seeds": seeds,
        "positions": torch.full((requests,), 7),
    }
    name = f"{requests} × (1 + 4), V {vocabulary}, {rule}, filters {filters}"
    return Call("accept", name, pass_ext.accept_chain, arguments, lambda result: not bool(result.status.any()))


if __name__ == "__main__":
    sys.exit(main())
