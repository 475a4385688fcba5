"""Records steps of one request: the real kernels run on the emulator, which records the critical path of each launch.

Logits: 128,256 in bfloat16, peaked (distributions.py), temperature 0.8. Each step has a planned number of accepted drafts.
Under `coupled` the drafts up to that number are the target's tokens, the others differ. Under `rejection` a draft is certain
to be accepted if both distributions are equal, and certain to be rejected if q is one at a token that the target does not draw.
Attention: 32 heads and 8 key heads of head_dim 128 in bfloat16. The emulator runs one key head on an eighth of the GPU: key
heads are equal and share nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pass_ext
from benchmarks import ROOT
from benchmarks.kernel_code.bounds import MULTIPROCESSORS, VOCABULARY
from benchmarks.kernel_time.costs import COSTS, middle
from benchmarks.kernel_time.host_code import weights_of
from benchmarks.ops.contenders.inputs.distributions import FILTERS, TEMPERATURE, make_logits

sys.path.append(str(ROOT / "tests"))  # at the end: an installed pass_ext stays

import emulator
from emulator.ops import accept, attention, launching
from emulator.ops.draft import draft_sample
from emulator.ops.logits import SAMPLING

SEED, POSITION = 7, 41
RESIDENT_BLOCKS = 2
"""Blocks of the attention kernel on a multiprocessor: kResidentBlocks of cuda/attention_tile.cuh."""
KEY_HEADS, GROUP, HEAD_DIM = 8, 4, 128
ATTENTION = {
    "1,024 keys, 4 rows": (1_024, 4, -1),
    "8,192 keys, 16 rows": (8_192, 16, -1),
    "32,768 keys, 16 rows": (32_768, 16, -1),
    "window 2,048 of 8,192 keys, 8 rows": (8_192, 8, 2_048),
}
FILTERED = "top-k 50, top-p 0.9"
LEVELS = (3, 4, 4)
"""Branching of the tree of 63 drafts."""


class Step(NamedTuple):
    """A named call, and the check of its result."""

    kind: str
    name: str
    run: Callable[[], Any]
    is_right: Callable[[Any], bool]


class Machine:
    """The emulator, set up to record critical paths."""

    def __init__(self) -> None:
        self.module = emulator.load()
        self.weights = weights_of(Path(self.module.__file__))
        self.cycles = {event: middle(event) for event in COSTS}

    def record(self, step: Step, most: bool, turns: tuple[int, int] | None = None) -> list[dict[str, Any]]:
        """``turns``: those of a loop whose loads are one round, and those of loads of 16 bytes."""
        self.module.record_paths(self.cycles, most, self.weights, **({"turns": turns} if turns else {}))
        try:
            result = step.run()
        finally:
            launches = self.module.taken_paths()
        if not step.is_right(result):
            raise AssertionError(f"{step.kind}, {step.name}: the step's result is not the planned one")
        return list(launches)


def shape_of(name: str) -> str:
    """The shape of the kernel that runs a step of attention: the rows of its tiles."""
    return "16 rows" if ATTENTION[name][1] * GROUP <= 16 else "64 rows"


def record_all(in_flight: Mapping[str, tuple[int, int]], only: str = "") -> list[dict[str, Any]]:
    """Every step whose name contains ``only``, with loads in the fewest possible rounds and in the most.

    ``in_flight``: shape of attention -> its loads in flight, of any width and of 16 bytes.
    """
    machine = Machine()
    launching.multiprocessors = lambda: MULTIPROCESSORS
    records = []
    for step in (*draft_steps(), *accept_steps(), *attention_steps()):
        if only in f"{step.kind}, {step.name}":
            print(f"{step.kind}, {step.name}", flush=True)
            turns = in_flight[shape_of(step.name)] if step.kind == "attention" else None
            paths = {side: machine.record(step, side == "most", turns) for side in ("least", "most")}
            records.append({"kind": step.kind, "name": step.name, **paths})
    return records


def _sampling(rows: int, filters: str, prefix: str = "") -> dict[str, Tensor]:
    kinds = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    values = {"temperature": TEMPERATURE, **FILTERS[filters]}
    return {prefix + name: torch.full((rows,), value, dtype=kinds[name]) for name, value in values.items()}


def _numbers(rows: int) -> dict[str, Tensor]:
    return {"seeds": torch.full((rows,), SEED), "positions": torch.arange(rows) + POSITION}


def draft_steps(vocabulary: int = VOCABULARY) -> Iterator[Step]:
    """draft_sample of one row."""
    logits = make_logits("peaked", 1, vocabulary, torch.Generator().manual_seed(SEED)).bfloat16()
    for name, mode, count, filters in (
        ("1 row, coupled", "coupled", 1, "off"),
        (f"1 row, coupled, {FILTERED}", "coupled", 1, FILTERED),
        ("1 row, 4 without replacement", "without", 4, "off"),
    ):
        arguments = {**_sampling(1, filters), **_numbers(1)}
        expected, _ = pass_ext.draft_sample(logits, count, mode=mode, **arguments)
        rest = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "allowed", "seeds", "positions", "nodes"))
        index = pass_ext.ops.draft.MODES.index(mode)

        def run(count: int = count, index: int = index, options: dict[str, Any] = {**rest, **arguments}) -> Any:  # noqa: B006
            return draft_sample(logits, count, index, **options)

        yield Step("draft_sample", name, run, lambda result, expected=expected: torch.equal(result[0], expected))


def accept_steps(vocabulary: int = VOCABULARY) -> Iterator[Step]:
    """accept_chain of four drafts, 0 to 4 of them accepted; accept_tree of 63 drafts."""
    random = torch.Generator().manual_seed(SEED)
    target = make_logits("peaked", 5, vocabulary, random).bfloat16()
    for filters in ("off", FILTERED):
        draws, _ = pass_ext.draft_sample(target, 1, mode="coupled", **_sampling(5, filters), **_numbers(5))
        for rule in ("coupled", "rejection"):
            for accepted in range(5):
                tokens = draws[:4, 0].clone()
                tokens[accepted:] = (tokens[accepted:] + 1) % vocabulary
                draft = target[:4].clone()
                draft[torch.arange(accepted, 4), tokens[accepted:]] = 200.0
                name = f"chain of 4, {rule}, {accepted} accepted" + ("" if filters == "off" else f", {filters}")
                yield _chain_step(name, rule, target, tokens, draft, filters, accepted)
    tree = pass_ext.Tree.from_branching(LEVELS)
    target = make_logits("peaked", len(tree.parents), vocabulary, random).bfloat16()
    for rule in ("coupled", "rejection"):
        yield _tree_step(rule, target, tree)


def _chain_step(
    name: str, rule: str, target: Tensor, tokens: Tensor, draft: Tensor, filters: str, accepted: int
) -> Step:
    values = {
        **dict.fromkeys(SAMPLING + accept.DRAFT_SAMPLING),
        **_sampling(1, filters),
        **_sampling(1, filters, "draft_"),
    }
    numbers = (torch.tensor([SEED]), torch.tensor([POSITION]))
    used = None if rule == "coupled" else draft[None]

    def run() -> Any:
        rest = (*values.values(), None, None, *numbers, 0.09, 0.3, -1)
        return accept.accept_chain(target[None], tokens[None], list(pass_ext.RULES).index(rule), used, *rest)

    return Step("accept", name, run, lambda result: result[2].tolist() == [accepted])


def _tree_step(rule: str, target: Tensor, tree: pass_ext.Tree) -> Step:
    parents = torch.tensor(tree.parents, dtype=torch.int32)
    depths = torch.tensor(tree.depths)
    draws, _ = pass_ext.draft_sample(
        target, max(LEVELS), mode="coupled", **_sampling(len(parents), "off"),
        seeds=torch.full_like(depths, SEED), positions=depths + POSITION,
    )  # fmt: skip
    tokens, seen = torch.zeros(len(parents), dtype=torch.int64), [0] * len(parents)
    for node, parent in enumerate(tree.parents):
        if parent >= 0:  # the last child is the node's first draw, its siblings are the later draws
            tokens[node] = draws[parent, LEVELS[int(depths[parent])] - 1 - seen[parent]]
            seen[parent] += 1
    values = {**dict.fromkeys(SAMPLING + accept.DRAFT_SAMPLING), **_sampling(1, "off"), **_sampling(1, "off", "draft_")}
    numbers = (torch.tensor([SEED]), torch.tensor([POSITION]))
    bounds = torch.tensor([0, len(parents)], dtype=torch.int32)
    used = None if rule == "coupled" else target

    def run() -> Any:
        rest = (*values.values(), None, None, *numbers, 0.09, 0.3, -1)
        index = list(pass_ext.RULES).index(rule)
        return accept.accept_tree(target, tokens, parents, bounds, len(LEVELS), index, used, None, *rest)

    return Step("accept", f"tree of 63, {rule}", run, lambda result: result[2].tolist() == [len(LEVELS)])


def attention_steps() -> Iterator[Step]:
    """attention_tree of a chain of rows behind a prefix, with one key head."""
    for name, (keys, rows, window) in ATTENTION.items():
        yield attention_step(name, keys, rows, window, RESIDENT_BLOCKS * MULTIPROCESSORS // KEY_HEADS)


def attention_step(name: str, keys: int, rows: int, window: int, blocks: int) -> Step:
    """A step of attention with one key head on `blocks` blocks, `RESIDENT_BLOCKS` on a multiprocessor."""
    random = torch.Generator().manual_seed(SEED)
    q = torch.randn(rows, GROUP, HEAD_DIM, generator=random).bfloat16()
    caches = [torch.randn(1, keys + rows, 1, HEAD_DIM, generator=random).bfloat16() for _ in range(2)]
    bounds, prefix = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([keys], dtype=torch.int32)
    parents = torch.arange(-1, rows - 1, dtype=torch.int32)
    visible, depths = pass_ext.tree_prepare(parents, bounds, rows)
    plain = pass_ext.attention_tree(
        q, *caches, prefix, bounds, visible, rows, depths=depths if window >= 0 else None, window=window
    )[0]  # fmt: skip
    arguments = (q, *caches, prefix, bounds, visible, rows, None, None, None, depths, None, 0.0, window)

    def run() -> Any:
        return attention.attention_tree(*arguments, blocks=blocks, multiprocessors=blocks // RESIDENT_BLOCKS)

    return Step("attention", name, run, lambda result: bool((result[0].float() - plain.float()).abs().max() < 0.05))
