"""Committing a step's accepted rows, `pass_ext.cache_commit_`, in the caches of all layers, against what decoders do: keep
the prefix and the accepted rows by `index_select` into new caches, or move the accepted rows layer by layer.
`python -m benchmarks.ops.cache --help`.

Caches are [B, Hkv, S, D], as in transformers. The step has twelve nodes behind the prefix; the root is in its place, five
accepted rows move. Sets of inputs share the caches and differ in the prefix, 16 slots from set to set. All requests accept
alike, which makes it easy for the plain ways: they need one list of slots for all.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import pass_ext
from benchmarks.harness.aims import at_least, times_of
from benchmarks.harness.cases import Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import gain, lines_of, noise

NODES = 12
PATH = (0, 2, 4, 5, 8, 11)
SETS = 16
MODELS = ((32, 8, 128), (30, 3, 64))  # layers, Hkv, D
CONTEXTS = (8192, 1024)
BATCHES = (1, 8)
MOST_BYTES = {"cpu": 7 * 2**28, "cuda": 10 * 2**30}  # of all caches of a case; larger ones are left out

OURS = "pass_ext"
SELECT = "index_select"


# ---- the contenders; `caches` are [B, Hkv, S, D], `slots` the accepted rows' and `first` where they go, on the host ----


def commit(caches: list[Tensor], first: int, slots: Tensor, targets: Tensor, views: list[Tensor], step: Any) -> None:
    """Ours: one call for all layers."""
    pass_ext.cache_commit_(views, *step)


def select_one(cache: Tensor, first: int, slots: Tensor, targets: Tensor, kept: Tensor) -> Tensor:
    """A new cache of the prefix and the accepted rows."""
    return cache.index_select(2, kept)


def copy_one(cache: Tensor, first: int, slots: Tensor, targets: Tensor, kept: Tensor | None) -> Tensor:
    """The accepted rows gathered, then scattered."""
    return cache.index_copy_(2, targets, cache.index_select(2, slots))


def assign_one(cache: Tensor, first: int, slots: Tensor, targets: Tensor, kept: Tensor | None) -> Tensor:
    """The same as one writes it."""
    cache[:, :, first : first + len(PATH)] = cache[:, :, slots]
    return cache


def layer_by_layer(one: Callable[..., Tensor]) -> Callable[..., None]:
    """Of every layer's result only the next one is kept, as memory allows no more."""

    def all_layers(caches: list[Tensor], first: int, slots: Tensor, targets: Tensor, *rest: Any) -> None:
        kept = torch.cat([torch.arange(first, device=slots.device), slots]) if one is select_one else None
        for cache in caches:
            one(cache, first, slots, targets, kept)

    return all_layers


PLAIN = {SELECT: select_one, "index_copy_": copy_one, "assignment": assign_one}
CONTENDERS = (Contender(OURS, commit), *(Contender(name, layer_by_layer(one)) for name, one in PLAIN.items()))


def check_agreement(case: Case) -> None:
    """On copies of two caches, all ways leave the same prefix and accepted rows."""
    for caches, first, slots, targets, _views, step in (case.inputs[0], case.inputs[-1]):
        kept = torch.cat([torch.arange(first, device=slots.device), slots])
        for cache in (caches[0], caches[-1]):
            ours = cache.clone()
            pass_ext.cache_commit_([ours.transpose(1, 2)], *step)
            for name, one in PLAIN.items():
                other = one(cache.clone(), first, slots, targets, kept)
                if not torch.equal(ours[:, :, : kept.numel()], other[:, :, : kept.numel()]):
                    raise AssertionError(f"{name} and {OURS} differ on {dict(case.labels)}: nothing was timed")


# ---- the cases ----


def make_plan(options: argparse.Namespace) -> Plan:
    """Every model, context and batch that memory allows; one small case with --quick."""
    shapes = [
        (layers, heads, dim, context, batch)
        for layers, heads, dim in ([(4, 3, 64)] if options.quick else MODELS)
        for context in CONTEXTS[: 1 if options.quick else None]
        for batch in BATCHES[: 1 if options.quick else None]
        if cache_bytes(layers, heads, dim, context, batch, options) <= MOST_BYTES[options.device]
    ]
    labels = [f"{batch} × {context}, {layers} × {heads} × {dim}" for layers, heads, dim, context, batch in shapes]
    return Plan(labels, make_cases(options, shapes))


def cache_bytes(layers: int, heads: int, dim: int, context: int, batch: int, options: argparse.Namespace) -> int:
    """Of K and V in all layers."""
    return 2 * layers * heads * dim * context * batch * DTYPES[options.dtype].itemsize


def make_cases(options: argparse.Namespace, shapes: list[tuple[int, ...]]) -> Iterator[Case]:
    """One case's caches are in memory at a time."""
    for layers, heads, dim, context, batch in shapes:
        yield make_case(layers, heads, dim, context, batch, DTYPES[options.dtype], torch.device(options.device))


def make_case(
    layers: int, heads: int, dim: int, context: int, batch: int, dtype: torch.dtype, device: torch.device
) -> Case:
    """Fewest bytes: the accepted rows behind the root, read once and written once."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, heads, context, dim)
    caches = [torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator) for _ in range(2 * layers)]
    views = [cache.transpose(1, 2) for cache in caches]
    integers = dict(dtype=torch.int32, device=device)
    cu_nodes = torch.arange(0, batch + 1, **integers) * NODES
    path = torch.tensor([PATH] * batch, **integers)
    num_accepted = torch.full((batch,), len(PATH) - 1, **integers)
    inputs = []
    for index in range(SETS):
        first = context - NODES - 16 * index
        slots = first + torch.tensor(PATH, device=device)
        targets = first + torch.arange(len(PATH), device=device)
        step = (torch.full((batch,), first, **integers), cu_nodes, path, num_accepted)
        inputs.append((caches, first, slots, targets, views, step))
    moved = 2 * (len(PATH) - 1) * heads * dim * dtype.itemsize * 2 * layers * batch
    labels: dict[str, str | int] = {"B": batch, "context": context, "layers": layers, "Hkv": heads, "D": dim}
    return Case(labels, CONTENDERS, inputs, fewest_bytes=moved, check=check_agreement)


# ---- what was promised ----


def judge(rows: list[Row]) -> list[Aim]:
    """20 × faster than rebuilding a long context; never slower; on a GPU one launch."""
    lines = lines_of({"rows": rows})
    long = [line for line in lines if line[0]["labels"]["context"] == 8192]
    slower = [f"{name(line)}: {gain(line):.2f} ×" for line in lines if (gain(line) or 1) < 1 - noise(line)]
    never = "never slower than any plain way, beyond the noise"
    aims = [
        at_least("at least 20 × faster than index_select at 8k", 20, times_of(long, SELECT, name)),
        Aim(never, not slower, "; ".join(slower) or "on no line"),
    ]
    if any(row["how"] == "graph" for row in rows):
        launches = count_launches()
        one = None if launches is None else launches == 1
        aims.append(Aim("one launch for all layers", one, f"{launches or 'not seen'} launched"))
    return aims


def count_launches() -> int | None:
    """Kernels that one commit to 64 tensors launches, as the profiler sees them."""
    from benchmarks.harness.gpu_timing import count_kernels

    case = make_case(32, 8, 128, 512, 1, torch.bfloat16, torch.device("cuda"))
    with torch.inference_mode():
        return count_kernels(commit, case.inputs[0])


def name(line: list[Row]) -> str:
    """A line of the table in few words."""
    labels, how = line[0]["labels"], line[0]["how"]
    way = "" if how == "call" else f", {how}"
    shape = f"{labels['B']} × {labels['context']}, {labels['layers']} × {labels['Hkv']} × {labels['D']}"
    return f"{shape}, {line[0]['cache']}{way}"


if __name__ == "__main__":
    run("cache", parse(__doc__ or ""), make_plan, judge)
