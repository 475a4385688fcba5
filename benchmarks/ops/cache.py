"""Committing a step's accepted rows, `pass_ext.cache_commit_`, in the caches of all layers, against what decoders do: copy the
prefix and the accepted rows into new caches by `index_select`, or move the accepted rows layer by layer.
`python -m benchmarks.ops.cache --help`.

Caches are [B, Hkv, S, D], as in transformers. A step has twelve nodes after the prefix; the root is in its place, five
accepted rows move. Sets of inputs share the caches and differ in the prefix, by 16 slots. All requests accept the same nodes,
which helps the plain ways: they need one list of slots.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import pass_ext
from benchmarks.harness.aims import at_least, launches, never_slower, times_of
from benchmarks.harness.cases import OURS, Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import line_name, lines_of

NODES = 12
PATH = (0, 2, 4, 5, 8, 11)
SETS = 16
MODELS = ((32, 8, 128), (30, 3, 64))  # layers, Hkv, D
CONTEXTS = (8192, 1024)
BATCHES = (1, 8)
MOST_BYTES = {"cpu": 7 * 2**28, "cuda": 10 * 2**30}  # of all caches of a case; larger cases are left out

SELECT = "index_select"


# ---- the contenders; `caches` [B, Hkv, S, D], `slots`: of the accepted rows; `first`, on the host: where they go ----


def commit(caches: list[Tensor], first: int, slots: Tensor, targets: Tensor, views: list[Tensor], step: Any) -> None:
    """pass_ext: one call for all layers."""
    pass_ext.cache_commit_(views, *step)


def select_rows(cache: Tensor, first: int, slots: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
    """Makes a new cache of the prefix and the accepted rows."""
    return cache.index_select(2, rows)


def copy_rows(cache: Tensor, first: int, slots: Tensor, targets: Tensor, rows: Tensor | None) -> Tensor:
    """Gathers the accepted rows, then scatters them."""
    return cache.index_copy_(2, targets, cache.index_select(2, slots))


def assign_rows(cache: Tensor, first: int, slots: Tensor, targets: Tensor, rows: Tensor | None) -> Tensor:
    """Moves the accepted rows by an assignment."""
    cache[:, :, first : first + len(PATH)] = cache[:, :, slots]
    return cache


def layer_by_layer(commit_cache: Callable[..., Tensor]) -> Callable[..., None]:
    """Commits cache by cache and drops each result: memory does not hold new caches of all layers."""

    def all_layers(caches: list[Tensor], first: int, slots: Tensor, targets: Tensor, *rest: Any) -> None:
        rows = torch.cat([torch.arange(first, device=slots.device), slots]) if commit_cache is select_rows else None
        for cache in caches:
            commit_cache(cache, first, slots, targets, rows)

    return all_layers


PLAIN = {SELECT: select_rows, "index_copy_": copy_rows, "assignment": assign_rows}
CONTENDERS = (Contender(OURS, commit), *(Contender(name, layer_by_layer(way)) for name, way in PLAIN.items()))


def check_agreement(case: Case) -> None:
    """Raises unless all contenders leave the same prefix and accepted rows in copies of two caches."""
    for caches, first, slots, targets, _views, step in (case.inputs[0], case.inputs[-1]):
        rows = torch.cat([torch.arange(first, device=slots.device), slots])
        for cache in (caches[0], caches[-1]):
            ours = cache.clone()
            pass_ext.cache_commit_([ours.transpose(1, 2)], *step)
            for name, commit_cache in PLAIN.items():
                other = commit_cache(cache.clone(), first, slots, targets, rows)
                if not torch.equal(ours[:, :, : rows.numel()], other[:, :, : rows.numel()]):
                    raise AssertionError(f"{name} and {OURS} differ on {dict(case.labels)}: nothing was timed")


# ---- the cases ----


def make_plan(options: argparse.Namespace) -> Plan:
    """Every model, context and batch whose caches memory holds; one small case with --quick."""
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
    """Bytes of keys and values in all layers."""
    return 2 * layers * heads * dim * context * batch * DTYPES[options.dtype].itemsize


def make_cases(options: argparse.Namespace, shapes: list[tuple[int, ...]]) -> Iterator[Case]:
    """The cases; the caches of one are in memory at a time."""
    for layers, heads, dim, context, batch in shapes:
        yield make_case(layers, heads, dim, context, batch, DTYPES[options.dtype], torch.device(options.device))


def make_case(
    layers: int, heads: int, dim: int, context: int, batch: int, dtype: torch.dtype, device: torch.device
) -> Case:
    """A case. Fewest bytes: the accepted rows after the root, read once and written once."""
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


# ---- the aims ----


def judge(rows: list[Row]) -> list[Aim]:
    """20 × faster than rebuilding a long context; never slower; on a GPU one launch."""
    lines = lines_of({"rows": rows})
    long = [line for line in lines if line[0]["labels"]["context"] == 8192]
    aims = [
        at_least("at least 20 × faster than index_select at 8k", 20, times_of(long, SELECT, name)),
        never_slower(lines, name),
    ]
    if any(row["how"] == "graph" for row in rows):
        case = make_case(32, 8, 128, 512, 1, torch.bfloat16, torch.device("cuda"))  # 64 tensors
        aims.append(launches("one launch for all layers", 1, commit, case.inputs[0]))
    return aims


def name(line: list[Row]) -> str:
    """A line in a few words."""
    labels = line[0]["labels"]
    sizes = f"{labels['layers']} × {labels['Hkv']} × {labels['D']}"
    return line_name(line, f"{labels['B']} × {labels['context']}", sizes)


if __name__ == "__main__":
    run("cache", parse(__doc__ or ""), make_plan, judge)
