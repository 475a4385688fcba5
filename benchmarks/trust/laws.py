"""Accept rules enumerated: every draft that can be drawn, every way that coins can fall, and the text that comes of it.

    error = total variation between the distribution of the emitted text and the target's

in worlds of three and four tokens, on chains, stars and trees of up to 11 nodes, with filters, fixed proposals and duplicates.
The reference is enumerated in float64; the compiled walk of csrc/core/accept_walk.h, whose probabilities are floats, on trees
of up to five nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support import enumeration
from support.native import ROOT, build_module

FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 2},
    {"temperature": 1.3, "top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 0.9, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
]


def measure() -> dict[str, Any]:
    """For each exact rule the number of outcomes and the largest error, of the reference and of the compiled walk."""
    return {"rows": [_of_rule(rule) for rule in enumeration.SHAPES]}


def _of_rule(rule: str) -> dict[str, Any]:
    counted = {"outcomes": 0, "compiled outcomes": 0}

    class Counted(enumeration.Replay):  # type: ignore[misc]
        def __init__(self, script: list[tuple[int, int]]) -> None:
            super().__init__(script)
            counted["outcomes"] += 1

    def endings(*arguments: Any) -> Any:
        found = core.outcomes(*arguments)
        counted["compiled outcomes"] += len(found)
        return found

    core, worst, compiled, problems = _core(), 0.0, 0.0, 0
    for drafts, is_filtered in _problems(rule):
        problems += 1
        worst = max(worst, enumeration.variation(drafts, rule, Counted))
        if len(drafts.parents) <= 5 and not is_filtered:
            law, _ = enumeration.distribution_of_walk(drafts, rule, endings)
            truth = drafts.world.joint(drafts.max_depth + 1)
            compiled = max(compiled, 0.5 * sum(abs(law[text] - truth[text]) for text in truth))
    return {"rule": rule, "problems": problems, **counted, "error": worst, "compiled error": compiled}


def _problems(rule: str) -> Iterator[tuple[Any, bool]]:
    for zeros in (0.0, 0.25):
        for parents in enumeration.SHAPES[rule].values():
            for world in enumeration.worlds(parents, 8 if len(parents) < 8 else 2, zeros=zeros):
                yield enumeration.make(world, rule, parents), False
    for options in enumeration.FIXED.values():
        for parents in [[-1, 0, 1, 2]] if rule == "block" else [[-1, 0, 0, 1, 1], [-1, 0, 0, 0, 1]]:
            for world in enumeration.worlds(parents, 8, zeros=0.4):
                yield enumeration.make(world, rule, parents, **options), False
    for parents, count, options in (
        enumeration.DUPLICATES[origin] for name, origin in enumeration.DUPLICATE_CASES if name == rule
    ):
        for world in enumeration.worlds(parents, count, zeros=0.25):
            yield enumeration.make(world, rule, parents, **options), False
    parents = [-1, 0, 1] if rule == "block" else [-1, 0, 0, 1]
    for filters in FILTERS:
        for draft_filters in (filters, FILTERS[1], {"temperature": 1.0}):
            world = enumeration.World(5, 4, zeros=0.0, filters=filters, draft_filters=draft_filters)
            yield enumeration.make(world, rule, parents), True


def _core() -> Any:
    folder = ROOT / "tests" / "core"
    flags = f"-O1 -ffp-contract=off -Wall -Wextra -I{folder / 'enumerated'} -I{ROOT / 'csrc'}"
    return build_module("_accept_core", {folder / "accept_core.cpp": ""}, flags)
