"""The page: the estimates of one result, the constants, and the paths that they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness.results import read_all
from benchmarks.kernel_code.bounds import BANDWIDTH, CLOCK
from benchmarks.kernel_time.costs import (
    COLD,
    COSTS,
    LAUNCH,
    Range,
    cold_code,
    difference,
    time_of,
    with_bytes,
)
from benchmarks.kernel_time.steps import ATTENTION, FILTERED, GROUP, KEY_HEADS, MULTIPROCESSORS, RESIDENT_BLOCKS

RESULTS = Path("benchmarks/results/kernel-time")
PAGE = Path("benchmarks/results/kernel-time/README.md")
HEADER = """# Estimated times at batch 1

Written by `python -m benchmarks.kernel_time` from `benchmarks/results/kernel-time/`; do not edit.

**All times here are estimates. No GPU was used, and none of these kernels has been timed on one.** The real kernels ran on the
emulator (`tests/emulator/`), which recorded what the slowest threads of each launch do and wait for, one thing after the
other; the constants below turn these counts into microseconds, once with every constant low and once with every one high. A
GPU run is to contradict these numbers: launch by launch, or the constants one by one.
"""
METHOD = """## How it is counted

- A thread's path grows by each event. Where threads wait for each other, at a barrier, a shuffle, a vote, or an atomic by which
  blocks hand over, all go on with the longest of their paths. So the last block to arrive goes on with the slowest block's.
- **Rounds of loads**: loads that are on their way together. The emulator does not see which load needs which. *Low* takes all
  loads between two waits as one round; *high* those of one basic block, and up to four turns of a loop.
- **Instructions** are the emulator's own, of basic blocks as the host's compiler made them, scaled. For the scan of a row the
  scale is what the machine code says. For all else it lies between that one and the one of the loop that bounds the groups of
  a race (below): an assumption, for no other part is known on both sides.
- **Low** is the longer of the path and of the bytes at {bandwidth:.1f} TB/s; **high** their sum.
- **Cold code** stands apart: what the instructions of a step cost at most when no cache holds them.
- *Underestimated*: lanes of a warp that go different ways run side by side here; arrays in local memory cost nothing; all
  blocks begin at once, however many there are; double precision is as fast as single. *Overestimated*: every instruction of
  the path waits for its turn though other warps' work would hide it nowhere; high counts loads that a compiler hoists.
"""


def read_results(root: Path) -> list[dict[str, Any]]:
    """Every result, oldest first."""
    return read_all(root / RESULTS)


def save(result: dict[str, Any], root: Path) -> Path:
    """Writes one result, a step per line."""
    path = root / RESULTS / f"{result['commit']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in result.items() if key != "steps"]
    rows = [f"  {json.dumps(step)}" for step in result["steps"]]
    path.write_text("\n".join(["{", *head, ' "steps": [', ",\n".join(rows), " ]", "}", ""]))
    return path


class Estimates:
    """The times of one result's steps, in microseconds."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result
        ratios = {name: ratio["gpu"] / ratio["emulator"] for name, ratio in result["ratios"].items()}
        self.scan = Range(ratios["scan"], ratios["scan"])
        self.rest = Range(*sorted(ratios.values()))
        self.steps = {(step["kind"], step["name"]): step for step in result["steps"]}

    def of_step(self, kind: str, name: str) -> Range:
        """All launches of a step, each with what it costs to launch."""
        step = self.steps[kind, name]
        launches = zip(step["least"], step["most"], strict=True)
        return sum((LAUNCH + self.of_launch(kind, name, *launch) for launch in launches), Range(0.0, 0.0))

    def of_launch(self, kind: str, name: str, least: dict[str, Any], most: dict[str, Any]) -> Range:
        """One launch without what it costs to launch."""
        if kind == "attention":
            return sum(self.attention_parts(name, least, most), Range(0.0, 0.0))
        scan, rest = self.split(least, most)
        return with_bytes(scan, most["bytes"]) + rest if least["to_atomic"] else with_bytes(rest, most["bytes"])

    def split(self, least: dict[str, Any], most: dict[str, Any]) -> tuple[Range, Range]:
        """Up to the hand-over between blocks, and behind it; of a launch of one block all is behind."""
        before = time_of(_all(least["to_atomic"]), _all(most["to_atomic"]), self.scan)
        behind = [difference(_all(side["whole"]), side["to_atomic"]) for side in (least, most)]
        return before, time_of(*behind, self.rest)

    def attention_parts(self, name: str, least: dict[str, Any], most: dict[str, Any]) -> tuple[Range, Range, Range]:
        """Until the first tile is there; the tiles of a block; merging what the blocks have."""
        first = time_of(_all(least["to_product"]), _all(most["to_product"]), self.rest)
        keys, rows, window = ATTENTION[name]
        path = self.result["tiles"]["16 rows" if rows * GROUP <= 16 else "64 rows"]
        tiles = -(-((window if window > 0 else keys) + rows) // 64 // least["blocks"]) + 1
        issue = 1e6 / CLOCK * tiles * path
        together = 1 if least["blocks"] * KEY_HEADS <= MULTIPROCESSORS else RESIDENT_BLOCKS
        middle = with_bytes(Range(issue, issue * 2 * together), KEY_HEADS * most["bytes"])
        behind = [difference(_all(side["whole"]), side["to_atomic"]) for side in (least, most)]
        return first, middle, time_of(*behind, self.rest)


def _all(counts: dict[str, int]) -> dict[str, int]:
    return {event: counts.get(event, 0) for event in COSTS}


def render(results: list[dict[str, Any]]) -> str:
    """The page of the newest result."""
    if not results:
        return f"{HEADER}\nNothing is estimated yet.\n"
    estimates = Estimates(results[-1])
    parts = [HEADER, f"Kernels of commit {results[-1]['commit']}.\n", METHOD.format(bandwidth=BANDWIDTH / 1e12)]
    parts += ["## Steps\n", *_steps(estimates), "\n## A level more\n", *_levels(estimates)]
    parts += ["\n## Filters\n", *_filters(estimates), "\n## Attention in parts\n", *_attention(estimates)]
    parts += [f"\n{LIMITS}"]
    parts += ["\n## Constants\n", *_constants(estimates), "\n## Critical paths\n", *_paths(results[-1])]
    return "\n".join(parts) + "\n"


LIMITS = """## What stands in the way

- **A race** is finished by one block, alone: it bounds every group of 64 tokens, with random numbers that the scan has
  drawn where it knew the race, then looks at the few groups that can win, one after the other. Each look is two random
  numbers, some logarithms and a load. Races that begin anew, as under `rejection`, draw the numbers of all groups
  themselves.
- **Filters** narrow 2,004 groups, then their tokens, then top-p's, each from 256 bins, with a barrier behind every step.
- **Attention** before its first product finds its share, the addresses of its keys and its queries, each from the one before;
  merging reads the parts of all members.
- **A level** costs little: the walk reads what the scan has left. Its price is the final draw under `rejection`.
"""

AIMS = {("draft_sample", "1 row, coupled"): 9.0, **{("attention", name): aim for name, aim in
        zip(ATTENTION, (7.0, 14.0, 40.0, 10.0), strict=True)}}  # fmt: skip
ACCEPT_AIM = 15.0
FILTERS_AIM = 1.5


def _aim(kind: str, name: str) -> float | None:
    return AIMS.get((kind, name)) or (ACCEPT_AIM if kind == "accept" and FILTERED not in name else None)


def _verdict(value: Range, aim: float | None) -> str:
    if aim is None:
        return ""
    return "met" if value.high <= aim else "missed" if value.low > aim else "open"


def _range(value: Range) -> str:
    return f"{value.low:.1f} – {value.high:.1f}"


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    alignment = ["---", *["--:"] * (len(columns) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (columns, alignment, *rows)]


def _greatest(estimates: Estimates, step: dict[str, Any]) -> str:
    """The event that most of the high time is spent on, and its share."""
    shares: dict[str, float] = {}
    for launch in step["most"]:
        for event, count in _all(launch["whole"]).items():
            scale = 1.0
            if event == "instruction":
                before = launch["to_atomic"].get(event, 0)
                count, scale = before * estimates.scan.high + (count - before) * estimates.rest.high, 1.0
            shares[event] = shares.get(event, 0.0) + scale * count * COSTS[event].high
    event = max(shares, key=lambda event: shares[event])
    return f"{event.replace('_', ' ')}, {100 * shares[event] / sum(shares.values()):.0f} %"


def _steps(estimates: Estimates) -> list[str]:
    rows = []
    for (kind, name), step in estimates.steps.items():
        value, aim = estimates.of_step(kind, name), _aim(kind, name)
        cold = cold_code(step["most"], estimates.rest)
        rows.append([
            f"{kind}: {name}", str(len(step["most"])), _range(value), f"{cold:.1f}", f"{aim:g}" if aim else "",
            _verdict(value, aim), _greatest(estimates, step),
        ])  # fmt: skip
    columns = [
        "step",
        "launches",
        "µs, low – high",
        "cold code, at most +",
        "aim, µs",
        "aim is",
        "most of the path, high",
    ]
    return [
        "One request, 128,256 logits in bfloat16, peaked. *met*: even the high time is within the aim; *missed*: not even the "
        "low one is; *open*: the constants decide.\n",
        *_table(columns, rows),
    ]


def _levels(estimates: Estimates) -> list[str]:
    rows = []
    for filters in ("", f", {FILTERED}"):
        for rule in ("coupled", "rejection"):
            first, last = (estimates.of_step("accept", f"chain of 4, {rule}, {n} accepted{filters}") for n in (0, 4))
            rows.append(
                [f"{rule}{filters}", f"{(last.low - first.low) / 4:.2f}", f"{(last.high - first.high) / 4:.2f}"]
            )
    return [
        "From none accepted to all four, a quarter of the difference; it is small beside what the races of two rows differ by. "
        "Under `rejection` the last level draws from the target, the others from what is left of it.\n",
        *_table(["rule", "µs a level, low", "high"], rows),
    ]


def _filters(estimates: Estimates) -> list[str]:
    rows = []
    pairs = [("draft_sample", "1 row, coupled")]
    pairs += [("accept", f"chain of 4, {rule}, 2 accepted") for rule in ("coupled", "rejection")]
    for kind, name in pairs:
        plain, filtered = estimates.of_step(kind, name), estimates.of_step(kind, f"{name}, {FILTERED}")
        ratio = Range(filtered.low / plain.low, filtered.high / plain.high)
        rows.append([f"{kind}: {name}", _range(plain), _range(filtered), f"{ratio.low:.2f} – {ratio.high:.2f}",
                     "met" if max(ratio) <= FILTERS_AIM else "missed" if min(ratio) > FILTERS_AIM else "open"])  # fmt: skip
    return [
        f"With {FILTERED}; the aim is {FILTERS_AIM} times the time without.\n",
        *_table(["step", "without, µs", "with, µs", "ratio", "aim is"], rows),
    ]


def _attention(estimates: Estimates) -> list[str]:
    rows = []
    for (kind, name), step in estimates.steps.items():
        if kind == "attention":
            least, most = step["least"][0], step["most"][0]
            parts = estimates.attention_parts(name, least, most)
            atomics = least["whole"].get("atomic", 0)
            rows.append([name, str(least["blocks"] * KEY_HEADS), *(_range(part) for part in parts),
                         f"{least['to_product'].get('instruction', 0) * estimates.rest.low:,.0f} – "
                         f"{most['to_product'].get('instruction', 0) * estimates.rest.high:,.0f}",
                         f"{_rounds(least['to_product'])} – {_rounds(most['to_product'])}", str(atomics)])  # fmt: skip
    columns = ["step", "blocks", "before the first product, µs", "tiles, µs", "merging, µs",
               "instructions before it", "rounds from L2 or memory before it", "atomics on the path"]  # fmt: skip
    return [
        "Tiles: the instructions of a warp's turn of the loop ([kernel code](../kernel-code/README.md)), one a cycle or one in "
        "two cycles and shared between the blocks of a multiprocessor; and all bytes at full bandwidth. Two atomics on the "
        "path are one level of merging: the last to come counts, and sets the counter back.\n",
        *_table(columns, rows),
    ]


def _rounds(counts: dict[str, int]) -> int:
    return counts.get("memory_load", 0) + counts.get("l2_load", 0)


def _constants(estimates: Estimates) -> list[str]:
    rows = [
        [f"{event.replace('_', ' ')}", f"{cost.low:,}", f"{cost.high:,}", cost.source] for event, cost in COSTS.items()
    ]
    ratios = [
        [name, f"{ratio['gpu']:,.0f}", f"{ratio['emulator']:,.0f}", f"{ratio['gpu'] / ratio['emulator']:.2f}"]
        for name, ratio in estimates.result["ratios"].items()
    ]
    return [
        f"Cycles of {CLOCK / 1e9:.2f} GHz. A launch takes {LAUNCH.low:g} to {LAUNCH.high:g} µs, from the end of the kernel "
        f"before it in a CUDA graph; assumed. Cold code: {COLD.low:g} to {COLD.high:g} cycles for 128 bytes; assumed.\n",
        *_table(["event", "low", "high", "source"], rows),
        "\nInstructions of the GPU (sm_90) and of the emulator for the same work, per warp:\n",
        *_table(["part", "GPU", "emulator", "ratio"], ratios),
    ]


def _paths(result: dict[str, Any]) -> list[str]:
    rows = []
    for step in result["steps"]:
        for least, most in zip(step["least"], step["most"], strict=True):
            cells = []
            for event in COSTS:
                low, high = (side["whole"].get(event, 0) for side in (least, most))
                cells.append("" if high == low == 0 else f"{low:,}" if low == high else f"{low:,} – {high:,}")
            rows.append(
                [f"{step['kind']}: {step['name']}", least["name"], f"{least['blocks']:,} × {least['threads']}", *cells]
            )
    columns = ["step", "launch", "blocks × threads", *(event.replace("_", " ") for event in COSTS)]
    return [
        "What the longest path of each launch has, with loads in as few rounds as can be and in as many. Instructions are the "
        "emulator's, not scaled. Of attention one key head, on an eighth of the GPU.\n",
        *_table(columns, rows),
    ]
