"""Trees, `pass_ext.tree_prepare` and `pass_ext.tree_mask`, against plain PyTorch. `python -m benchmarks.ops.tree --help`.

tree_prepare turns parents into bits and depths. "squaring" builds the matrix of ancestors by repeated squaring. "walk" goes up
one level at a time; it gets the number of levels, which a program knows on the host only if it made the tree there. Both need
the same number of nodes in every request, as all requests have here.

tree_mask turns bits into the dense additive mask. "gather" picks the bit of each column. "slices" writes rectangles request by
request and reads the lengths of the prefixes back, which on a GPU makes the host wait.

Trees: "wide" is the branching 4, 2, 2, … of expected drafts; "chain" is the deepest tree there is.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import pass_ext
from benchmarks.harness.aims import at_least, at_most, fastest_of, never_slower, rows_of_ours, share_of
from benchmarks.harness.cases import OURS, Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import line_name, lines_of
from pass_ext import Tree

SHAPES = {"wide": (4, 2, 2, 2, 2, 2, 2), "chain": (1,) * 1023}
PREPARE = ((1, 29), (8, 61), (64, 61), (1, 1024), (16, 1024))  # requests, nodes
MASKS = ((1, 29, 1024), (8, 61, 4096), (1, 256, 32_768))  # requests, nodes, columns
SETS = {"cpu": 8, "cuda": 32}
MOST_BYTES = 2**29  # of the masks of all sets

OPS = ("tree_prepare", "tree_mask")


# ---- tree_prepare ----


def prepare(parents: Tensor, cu_nodes: Tensor, nodes: int, *rest: Any) -> tuple[Tensor, Tensor]:
    """pass_ext."""
    return pass_ext.tree_prepare(parents, cu_nodes, nodes)


def squaring(parents: Tensor, cu_nodes: Tensor, nodes: int, rounds: int, levels: int) -> tuple[Tensor, Tensor]:
    """The ancestors reached in at most 2^r steps: (I + P)^(2^r) as 0 and 1, until r covers the deepest tree."""
    by_request = parents.view(-1, nodes).long()
    reached = torch.zeros(*by_request.shape, nodes, device=parents.device)
    reached.scatter_(2, by_request.clamp(min=0).unsqueeze(2), (by_request >= 0).float().unsqueeze(2))
    reached.diagonal(dim1=1, dim2=2).fill_(1)
    for _ in range(rounds):
        reached = (reached @ reached).clamp_(max=1)
    return as_words(reached.long(), nodes), (reached.sum(2) - 1).int().flatten()


def walk(parents: Tensor, cu_nodes: Tensor, nodes: int, rounds: int, levels: int) -> tuple[Tensor, Tensor]:
    """Moves every node one level up, once per level; the root stays."""
    by_request = parents.view(-1, nodes).long()
    up, at = by_request.clamp(min=0), torch.arange(nodes, device=parents.device).expand_as(by_request)
    reached = torch.zeros(*by_request.shape, nodes, dtype=torch.int64, device=parents.device)
    for _ in range(levels):
        reached.scatter_(2, at.unsqueeze(2), 1)
        at = up.gather(1, at)
    reached.scatter_(2, at.unsqueeze(2), 1)
    return as_words(reached, nodes), (reached.sum(2) - 1).int().flatten()


def as_words(reached: Tensor, nodes: int) -> Tensor:
    """Zeros and ones as the bits of 64-bit words."""
    padded = torch.nn.functional.pad(reached, (0, -nodes % 64)).view(-1, -(-nodes // 64), 64)
    return (padded << torch.arange(64, device=reached.device)).sum(2)


def prepare_case(shape: str, requests: int, nodes: int, device: torch.device, sets: int) -> Case:
    """A case of tree_prepare. Fewest bytes: parents and bounds, bits and depths."""
    parents = torch.tensor(make_tree(shape, nodes).parents, dtype=torch.int32).repeat(requests)
    cu_nodes = torch.arange(0, requests * nodes + 1, nodes, dtype=torch.int32, device=device)
    levels = max(make_tree(shape, nodes).depths)
    contenders = [Contender(OURS, prepare), Contender("squaring", squaring)]
    if levels < 64:  # with more levels it is far slower
        contenders.append(Contender("walk", walk))
    rounds = (nodes - 1).bit_length()
    inputs = [(parents.to(device, copy=True), cu_nodes, nodes, rounds, levels) for _ in range(sets)]
    rows = requests * nodes
    labels: dict[str, str | int] = dict(op="tree_prepare", tree=shape, requests=requests, nodes=nodes, columns="–")
    moved = rows * (4 + 4 + 8 * -(-nodes // 64)) + 4 * (requests + 1)
    return Case(labels, contenders, inputs, fewest_bytes=moved)


def make_tree(shape: str, nodes: int) -> Tree:
    """The first `nodes` nodes, level by level, of the endless tree of a shape."""
    parents, level = [-1], range(1)
    for width in SHAPES[shape]:
        parents += [parent for parent in level for _ in range(width)]
        level = range(level.stop, len(parents))
        if len(parents) >= nodes:
            return Tree(parents[:nodes])
    return Tree(parents[:nodes] + [0] * (nodes - len(parents)))


# ---- tree_mask ----


def mask(
    visible: Tensor, cu_nodes: Tensor, nodes: int, prefix_lens: Tensor, columns: int, dtype: torch.dtype
) -> Tensor:
    """pass_ext."""
    return pass_ext.tree_mask(visible, cu_nodes, nodes, prefix_lens, columns, dtype)


def gather(
    visible: Tensor, cu_nodes: Tensor, nodes: int, prefix_lens: Tensor, columns: int, dtype: torch.dtype
) -> Tensor:
    """Picks each column's bit and chooses between two numbers."""
    node = torch.arange(columns, device=visible.device) - prefix_lens.unsqueeze(1)
    words = visible.view(-1, nodes, visible.shape[1])
    bits = (words.unsqueeze(3) >> torch.arange(64, device=visible.device) & 1).bool().flatten(2)
    picked = bits.gather(2, node.clamp(0, nodes - 1).unsqueeze(1).expand(-1, nodes, -1))
    seen = (node < 0).unsqueeze(1) | (picked & (node < nodes).unsqueeze(1))
    low = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=visible.device)
    return torch.where(seen, torch.zeros((), dtype=dtype, device=visible.device), low).unsqueeze(1)


def slices(
    visible: Tensor, cu_nodes: Tensor, nodes: int, prefix_lens: Tensor, columns: int, dtype: torch.dtype
) -> Tensor:
    """Writes rectangles, one request after the other."""
    low = torch.finfo(dtype).min
    out = torch.full((len(prefix_lens), 1, nodes, columns), low, dtype=dtype, device=visible.device)
    bits = (visible.unsqueeze(2) >> torch.arange(64, device=visible.device) & 1).bool().flatten(1)[:, :nodes]
    block = torch.where(bits, 0.0, low).to(dtype).view(-1, nodes, nodes)
    for request, prefix in enumerate(prefix_lens.tolist()):
        out[request, 0, :, :prefix] = 0
        out[request, 0, :, prefix : prefix + nodes] = block[request]
    return out


MASK = (Contender(OURS, mask), Contender("gather", gather), Contender("slices", slices, capturable=False))


def mask_case(requests: int, nodes: int, columns: int, dtype: torch.dtype, device: torch.device, sets: int) -> Case:
    """A case of tree_mask. Fewest bytes: the bits and the mask."""
    random = torch.Generator().manual_seed(0)
    tree, inputs = make_tree("wide", nodes), []
    out_bytes = requests * nodes * columns * dtype.itemsize
    for _ in range(max(3, min(sets, MOST_BYTES // out_bytes))):
        cu_nodes = torch.arange(0, requests * nodes + 1, nodes, dtype=torch.int32, device=device)
        prefixes = torch.randint(columns // 2, columns - nodes + 1, (requests,), generator=random, dtype=torch.int32)
        inputs.append(
            (tree.visible.repeat(requests, 1).to(device), cu_nodes, nodes, prefixes.to(device), columns, dtype)
        )
    labels: dict[str, str | int] = dict(op="tree_mask", tree="wide", requests=requests, nodes=nodes, columns=columns)
    moved = out_bytes + inputs[0][0].numel() * 8 + 8 * requests
    return Case(labels, MASK, inputs, fewest_bytes=moved)


# ---- the plan and the aims ----


def make_plan(options: argparse.Namespace) -> Plan:
    """Both ops at every size; the two smallest of each with --quick."""
    prepares = [(shape, *size) for size in PREPARE[: 2 if options.quick else None] for shape in SHAPES]
    masks = MASKS[: 2 if options.quick else None]
    labels = [f"tree_prepare, {shape}, {requests} × {nodes}" for shape, requests, nodes in prepares]
    labels += [f"tree_mask, {requests} × {nodes} × {columns}" for requests, nodes, columns in masks]
    return Plan(labels, make_cases(options, prepares, masks))


def make_cases(options: argparse.Namespace, prepares: list[tuple[str, int, int]], masks: Any) -> Iterator[Case]:
    """The cases in the order of the labels."""
    device, sets = torch.device(options.device), 3 if options.quick else SETS[options.device]
    for shape, requests, nodes in prepares:
        yield prepare_case(shape, requests, nodes, device, sets)
    for requests, nodes, columns in masks:
        yield mask_case(requests, nodes, columns, DTYPES[options.dtype], device, sets)


def judge(rows: list[Row]) -> list[Aim]:
    """Faster than plain PyTorch, microseconds for small trees, and on a GPU large masks at the memory's speed."""
    lines = lines_of({"rows": rows})
    on_gpu = any(row["how"] == "graph" for row in rows)
    times = {op: fastest_of([line for line in lines if line[0]["labels"]["op"] == op], name) for op in OPS}
    ours = rows_of_ours(rows)
    prepares = [row for row in ours if row["labels"]["op"] == "tree_prepare" and row["cache"] == "warm"]
    small, most = [row for row in prepares if row["labels"]["nodes"] <= 64], 5 if on_gpu else 20
    aims = [
        at_least("tree_prepare: at least 2 × faster than the fastest plain way", 2, times["tree_prepare"]),
        at_least("tree_mask: at least 1.5 × faster than the fastest plain way", 1.5, times["tree_mask"]),
        never_slower(lines, name),
        at_most(f"tree_prepare of small trees, warm: at most {most} µs", most, small, name),
    ]
    if on_gpu:
        large = [row for row in ours if row["labels"]["columns"] == MASKS[-1][-1] and row["cache"] == "cold"]
        aims.append(share_of("large masks, cold: at least 80 % of a copy", "of_copy", 0.8, large, name))
    return aims


def name(line: list[Row]) -> str:
    """A line in a few words."""
    labels = line[0]["labels"]
    size = " × ".join(str(labels[key]) for key in ("requests", "nodes", "columns") if labels[key] != "–")
    return line_name(line, labels["op"], labels["tree"], size)


if __name__ == "__main__":
    run("tree", parse(__doc__ or ""), make_plan, judge)
