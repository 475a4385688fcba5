"""What the project wants of look-ahead slots with adapters, judged from the rows of `slots.json`.

one pass against two = speed of one pass with 8 rows / speed of two passes with 8 rows
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.markdown import table
from benchmarks.harness.plan import Aim
from benchmarks.pages.lookahead.slot_texts import EIGHT, TIMED, TWO

FILE = "smollm2-135m-instruct"
HITS = (0.60, 0.45, 0.35, 0.30)
GREEDY = {"code": 2.5, "prose": 2.0, "chat": 2.2}
SAMPLED = dict.fromkeys(GREEDY, 1.9)
RULES = ("coupled", "traversal")
RATIO, SPEED = 1.3, 1.6


def aims_of(result: dict[str, Any]) -> list[Aim]:
    """The aims; those of which this run has no row are left out."""
    return [*_hits(result["rows"]), *_texts(result["written"])]


def lines_of(result: dict[str, Any]) -> list[str]:
    """The table of the page; empty for a run without the file."""
    rows = [[aim.aim, "met" if aim.met else "missed", aim.measured] for aim in aims_of(result)]
    return ["## Aims", "", *table(["aim", "", "measured"], rows, left=3), ""] if rows else []


def _hits(rows: Sequence[dict[str, Any]]) -> list[Aim]:
    key = FILE, "greedy", "all", "with transitions"
    found = [row["top 1"] for row in rows if (row["file"], row["kind"], row["domain"], row["scores"]) == key]
    wanted = " ".join(f"{share:.2f}" for share in HITS)
    return [
        Aim(
            f"top 1 of slots 1 to {len(HITS)} with transitions, greedy: {wanted}",
            all(share >= least for share, least in zip(tops, HITS, strict=True)),
            " ".join(f"{share:.3f}" for share in tops),
        )
        for tops in found
    ]


def _texts(rows: Sequence[dict[str, Any]]) -> list[Aim]:
    def of(method: str, sampling: str, number: str) -> dict[str, float]:
        key = FILE, method, sampling
        return {row["domain"]: row[number] for row in rows if (row["file"], row["method"], row["sampling"]) == key}

    one, two = of(EIGHT, "greedy", "speed"), of(TWO, "greedy", "speed")
    timed = of(TIMED, "greedy", "speed")
    aims = [_least("tokens per call, one pass, 8 rows, greedy", of(EIGHT, "greedy", "tokens per call"), GREEDY)]
    aims += [
        _least(f"the same at T 0.8, rule {rule}", of(EIGHT, f"T 0.8, {rule}", "tokens per call"), SAMPLED)
        for rule in RULES
    ]
    aims += [
        _least("speed of one pass against two", {key: one[key] / two[key] for key in one if key in two}, RATIO),
        _least("speed against Plain, one pass, 8 rows", one, SPEED),
        _least("speed against Plain, rows by measured times", timed, SPEED),
    ]
    return [aim for aim in aims if aim is not None]


def _least(name: str, found: dict[str, float], wanted: dict[str, float] | float) -> Aim | None:
    """Met if every domain has as much as is wanted of it."""
    least = wanted if isinstance(wanted, dict) else dict.fromkeys(found, wanted)
    shared = [domain for domain in least if domain in found]
    if not shared:
        return None
    said = " ".join(f"{domain} {least[domain]:g}" for domain in shared) if isinstance(wanted, dict) else f"{wanted:g}"
    measured = ", ".join(f"{domain} {found[domain]:.2f}" for domain in shared)
    return Aim(f"{name}: {said}", all(found[domain] >= least[domain] for domain in shared), measured)
