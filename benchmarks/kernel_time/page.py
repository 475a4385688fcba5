"""benchmarks/results/kernel-time/README.md: a GPU's times, the estimates, the constants and the critical paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.kernel_code.bounds import BANDWIDTH, CLOCK, MULTIPROCESSORS
from benchmarks.kernel_time.costs import (
    COLD,
    COSTS,
    LAUNCH,
    PORT,
    Range,
    cold_code,
    difference,
    time_of,
    with_bytes,
)
from benchmarks.kernel_time.fit import Counts, counts_of, fit, fitted
from benchmarks.kernel_time.inputs import ATTENTION, FILTERED, KEY_HEADS, MEASURED
from benchmarks.kernel_time.steps import RESIDENT_BLOCKS, shape_of

RESULT = Path("benchmarks/results/kernel-time/estimates.json")
PAGE = Path("benchmarks/results/kernel-time/README.md")
HEADER = """# Estimated times at batch 1

Written by `python -m benchmarks.kernel_time` from [estimates.json](estimates.json); do not edit.

**Only the section "Measured" comes from a GPU; all other times are estimates.** For these the real kernels ran on the emulator
(`tests/emulator/`), which recorded the work and the waits of the slowest threads of each launch, in sequence. Constants turn
these counts into microseconds in two ways: *by the fit*, with three numbers that agree with what the GPU has measured; and once
with every constant of the last section but one low, once with every constant high. Where the two differ, believe the fit.
"""
METHOD = """## Method

- A thread's path grows by each event. Where threads wait for each other (a barrier, a shuffle, a vote, or an atomic by which
  blocks hand over), all continue with the longest of their paths. So the last block to arrive continues with the slowest
  block's path.
- **Rounds of loads**: loads that are under way together. The emulator does not see which load depends on which. *Low* counts
  all loads between two waits as one round; *high* counts as one round those of one basic block, in up to four turns of a loop.
- **Instructions** are those of the emulator, in basic blocks of the host's compiler, scaled. The scale of the scan of a row
  comes from the machine code. All other code has a scale between that of the scan and that of the loop that bounds the groups
  of a race (below). This is an assumption: no other part is known on both sides.
- **Attention**: *high* joins loads in as many turns of a loop as the kernel's machine code has loads on their way before it
  uses any (below): its loops are unrolled so far.
- **Attention in one order, and to codes**: a whole GPU on the emulator, which counts every instruction on the path, as it does
  for other kernels; the loops that make numbers of codes have no scale of their own.
- **Low** is the longer of the path and of the bytes at {bandwidth:.1f} TB/s; **high** is their sum. What kernels have written
  is read from L2, not from memory.
- **Cold code** is stated apart: the most that a step's instructions cost if no cache holds them.
- *Underestimated*: diverging lanes of a warp run side by side here; arrays in local memory cost nothing; all blocks begin at
  once, however many there are; double precision is as fast as single. *Overestimated*: every instruction of the path waits
  for its turn though other warps' work would hide it nowhere; high counts loads that a compiler hoists.
"""


def read(root: Path) -> dict[str, Any]:
    """The result."""
    result: dict[str, Any] = json.loads((root / RESULT).read_text())
    return result


def save(result: dict[str, Any], root: Path) -> Path:
    """Writes a result in place of the one before it, a step per line."""
    path = root / RESULT
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
        """The time of all launches of a step, with the cost of launching each."""
        step = self.steps[kind, name]
        launches = zip(step["least"], step["most"], strict=True)
        return sum((LAUNCH + self.of_launch(kind, name, *launch) for launch in launches), Range(0.0, 0.0))

    def of_launch(self, kind: str, name: str, least: dict[str, Any], most: dict[str, Any]) -> Range:
        """The time of one launch, without the cost of launching it."""
        if kind == "attention":
            if not most["multiplying"]:
                return self.merging(name, least, most)
            return sum(self.attention_parts(name, least, most), Range(0.0, 0.0))
        scan, rest = self.split(least, most)
        return with_bytes(scan, most["bytes"]) + rest if least["to_atomic"] else with_bytes(rest, most["bytes"])

    def split(self, least: dict[str, Any], most: dict[str, Any]) -> tuple[Range, Range]:
        """The times before and after the hand-over between blocks. A launch of one block has all its time after it."""
        before = time_of(_all(least["to_atomic"]), _all(most["to_atomic"]), self.scan)
        behind = [difference(_all(side["whole"]), side["to_atomic"]) for side in (least, most)]
        return before, time_of(*behind, self.rest)

    def attention_parts(self, name: str, least: dict[str, Any], most: dict[str, Any]) -> tuple[Range, Range, Range]:
        """The times until the first tile arrives, for the tiles of a block, and for merging the blocks' results."""
        first = time_of(_all(least["to_product"]), _all(most["to_product"]), self.rest)
        tile = self.result["tiles"][shape_of(name)]
        issue = 1e6 / CLOCK * tile["instructions"] * most["whole"]["matrix_product"] / tile["products"]
        together = 1 if least["multiplying"] * KEY_HEADS <= MULTIPROCESSORS else RESIDENT_BLOCKS
        middle = with_bytes(Range(issue, issue * 2 * together), KEY_HEADS * most["bytes"])
        return first, middle, self.merging(name, least, most)

    def merging(self, name: str, least: dict[str, Any], most: dict[str, Any]) -> Range:
        """The time from a block's last product to the end: the path, and the bytes of other blocks' parts."""
        merge = self.result["merges"][shape_of(name)]
        turns = most["handed_over"] / merge["bytes"]
        sides = []
        for side, launch in enumerate((least, most)):
            counts: dict[str, float] = dict(difference(_all(launch["whole"]), launch["to_last_product"]))
            other = max(counts["instruction"] - turns * merge["emulator"], 0.0)
            sides.append(counts | {"instruction": turns * merge["gpu"] + other * self.rest[side]})
        path = time_of(*sides, Range(1.0, 1.0))
        port = Range(*(1e6 * most["handed_over"] / width / CLOCK for width in PORT))
        return Range(max(path.low, port.low), path.high + port.high)


def _all(counts: dict[str, int]) -> dict[str, int]:
    return {event: counts.get(event, 0) for event in COSTS}


def read_measured(root: Path) -> dict[str, Any] | None:
    """The newest result of on_gpu.py on any GPU."""
    found = [json.loads(path.read_text()) for path in sorted(root.glob(f"benchmarks/results/*/{MEASURED}"))]
    return max(found, key=lambda result: result["date"], default=None)


def _measured(estimates: Estimates, measured: dict[str, Any]) -> list[str]:
    machine, versions, constants = measured["machine"], measured["versions"], measured["constants"]
    rows, others, ratios = [], [], list[float]()
    for step in measured["steps"]:
        if "error" in step:
            continue
        times = [f"{step[key]:.1f}" for key in ("warm_us", "cold_us", "alone_us")]
        known = (step["kind"], step["name"]) in estimates.steps
        if known:
            value, aim = estimates.of_step(step["kind"], step["name"]), _aim(step["kind"], step["name"])
            place = "above" if step["warm_us"] > value.high else "below" if step["warm_us"] < value.low else "within"
            cold = cold_code(estimates.steps[step["kind"], step["name"]]["most"], estimates.rest)
            cells = [_range(value), place, f"{value.high + cold:.1f}", f"{aim:g}" if aim else ""]
            ratios += [step["warm_us"] / (value.high + cold)] if step["kind"] != "attention" else []
        else:
            cells = [f"{step['bytes'] / 1e6:,.1f}", f"{1e3 * step['bytes'] / constants['read_gb_per_s'] / 1e6:.1f}"]
        (rows if known else others).append([f"{step['kind']}: {step['name']}", str(step["kernels"]), *times, *cells])
    return [
        f"{machine['gpu']['name']}, driver {machine['gpu']['driver']}, torch {versions['torch']}, {measured['date'][:10]}, "
        f"commit {measured['commit']}: `python -m benchmarks.kernel_time.on_gpu`. Medians of 25 replays of a CUDA graph. "
        "*Warm*: 64 calls one behind the other, inputs in L2. *Cold*: each call has inputs of its own, which come from memory. "
        f"*Alone*: a graph of one call. An empty kernel takes {constants['launch_us']:.2f} µs, a copy moves "
        f"{constants['copy_gb_per_s']:,.0f} GB/s, a read {constants['read_gb_per_s']:,.0f} GB/s. The estimates are for an "
        "H200, which has the same processor and faster memory.\n",
        *_table(
            ["step", "launches", "warm, µs", "cold", "alone", "estimate", "warm is", "high + cold code", "aim, µs"],
            rows,
        ),
        f"\nWarm steps of draft and accept take {min(ratios):.2f} to {max(ratios):.2f} of their high estimate with cold code. "
        "So a call seems to find little of its code in the instruction cache, even behind an equal one, and the length of the "
        "code that runs counts.\n",
        "\nWithout an estimate: batches, other vocabularies and prefixes, and the time in which the inputs are read once.\n",
        *_table(["step", "launches", "warm, µs", "cold", "alone", "MB", "reading them, µs"], others),
        "",
    ]


def _fit(estimates: Estimates, measured: dict[str, Any], paths: dict[tuple[str, str], Counts]) -> list[str]:
    constants = fit(measured, paths)
    times = {(step["kind"], step["name"]): step["warm_us"] for step in measured["steps"] if "error" not in step}
    rows, errors = [], []
    for key in (key for key in estimates.steps if key in times and key in paths):
        then, now = (fitted(key[0], counts, constants) for counts in (paths[key], counts_of(estimates.steps[key])))
        errors.append(then / times[key] - 1)
        rows.append([": ".join(key), f"{times[key]:.1f}", f"{then:.1f}", f"{100 * errors[-1]:+.0f} %", f"{now:.1f}"])
    return [
        "Least squares of relative errors over the steps of draft and accept, with the paths of the kernels that the GPU ran "
        f"([measured-paths.json](measured-paths.json)): {constants.launch:.1f} µs a launch + "
        f"{constants.thousand_instructions:.2f} µs for 1,000 instructions of the emulator + {constants.round:.2f} µs a round "
        "of loads from L2 or memory (fewest rounds). Attention: its launches and rounds at the same constants, and its bytes "
        "at the read speed measured. Layers are products by all warps of a GPU, which these numbers do not describe. All "
        f"{len(errors)} steps come out within {100 * max(map(abs, errors)):.0f} %. *Now*: the kernels of this "
        "page, which no GPU has run.\n",
        *_table(["step", "measured, µs", "fitted", "off by", "now, by the fit"], rows),
        "",
    ]


def render(
    result: dict[str, Any],
    measured: dict[str, Any] | None = None,
    paths: dict[tuple[str, str], Counts] | None = None,
) -> str:
    """The text of the page for a result, for what a GPU measured, and for the paths of the kernels that it ran."""
    estimates = Estimates(result)
    parts = [HEADER, _commits(result), METHOD.format(bandwidth=BANDWIDTH / 1e12)]
    if measured:
        parts += ["## Measured\n", *_measured(estimates, measured)]
    if measured and paths:
        parts += ["## The fit\n", *_fit(estimates, measured, paths)]
    parts += ["## Steps\n", *_steps(estimates), "\n## Cost of a level\n", *_levels(estimates)]
    parts += ["\n## Filters\n", *_filters(estimates), "\n## Attention in parts\n", *_attention(estimates)]
    parts += [f"\n{LIMITS}"]
    parts += ["\n## Constants\n", *_constants(estimates), "\n## Critical paths\n", *_paths(result)]
    return "\n".join(parts) + "\n"


def _commits(result: dict[str, Any]) -> str:
    """The commits of the kernels, each with the kinds of the steps that were recorded there."""
    kinds: dict[str, dict[str, None]] = {}
    for step in result["steps"]:
        kinds.setdefault(step["commit"], {})[step["kind"]] = None
    if len(kinds) == 1:
        return f"Kernels of commit {next(iter(kinds))}.\n"
    return "".join(f"Kernels of commit {commit}: {', '.join(names)}.\n" for commit, names in kinds.items())


LIMITS = """## What takes the time

- **A race**: one block alone finishes it. It bounds every group of 64 tokens, with random numbers that the scan has drawn if
  it knew the race. Each of its warps scores the tokens of one group, and their best dismisses most others. The tokens of the
  rest that can still win are scored side by side. The scan draws for the race by which a walk that ends at the node ends: over
  the residual if the node has children, else over the target. A walk that ends by the other one draws all numbers itself.
- **Filters**: 128 sets of groups give a floor that enough tokens reach. The tokens above it, some tens, are listed, put in
  order by counting, cut, and raced; no other group is looked at again. A list too short for top-p, or for top-k above 96, and
  one too long for shared memory are narrowed from 256 bins as before; no step here does that.
- **Attention** reads lengths, computes its share, then the addresses of its keys, and reads these before its first product;
  each depends on the one before. The queries come beside the first keys. At 8,192 and 32,768 keys the tiles are bound by
  bytes. Blocks that share a tile of rows leave their parts to a second launch, which reads them with all multiprocessors.
- **A level** costs little: the walk reads the scan's results. Its price is the final draw under `rejection`.
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
    """The event with the largest share of the high time, and that share."""
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
        "One request, 128,256 logits in bfloat16, peaked. *met*: even the high time is within the aim; *missed*: even the "
        "low time exceeds it; *open*: the constants decide. Where a GPU has measured a step, the section above decides.\n",
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
        "A quarter of the difference between four accepted drafts and none. It is small beside the difference between the "
        "races of two rows. Under `rejection` the last level draws from the target, the others from the target's residual.\n",
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
        f"The time with {FILTERED}, over the time without filters; the aim is a ratio of {FILTERS_AIM}.\n",
        *_table(["step", "without, µs", "with, µs", "ratio", "aim is"], rows),
    ]


def _attention(estimates: Estimates) -> list[str]:
    rows = []
    for (kind, name), step in estimates.steps.items():
        if kind == "attention":
            least, most = step["least"][0], step["most"][0]
            *parts, merging = estimates.attention_parts(name, least, most)
            for behind in zip(step["least"][1:], step["most"][1:], strict=True):
                merging += LAUNCH + estimates.of_launch(kind, name, *behind)
            handed_over = max(launch["handed_over"] for launch in step["most"])
            atomics = least["whole"].get("atomic", 0)
            tiles = most["whole"]["matrix_product"] // estimates.result["tiles"][shape_of(name)]["products"]
            rows.append([name, str(least["multiplying"] * KEY_HEADS), str(tiles),
                         *(_range(part) for part in (*parts, merging)),
                         f"{least['to_product'].get('instruction', 0) * estimates.rest.low:,.0f} – "
                         f"{most['to_product'].get('instruction', 0) * estimates.rest.high:,.0f}",
                         f"{_rounds(least['to_product'])} – {_rounds(most['to_product'])}",
                         f"{_merging_rounds(step['least'])} – {_merging_rounds(step['most'])}",
                         f"{handed_over / 1024:,.0f}", str(atomics)])  # fmt: skip
    columns = ["step", "blocks with tiles", "tiles of a block", "before the first product, µs", "tiles, µs",
               "merging, µs", "instructions before the product", "rounds of loads from L2 or memory before it",
               "rounds behind the last product", "KB of parts that a block reads", "atomics on the path"]  # fmt: skip
    return [
        "Tiles: the instructions of a warp's turn of the loop ([kernel code](../kernel-code/README.md)), low: one a cycle, "
        "high: one in two cycles and shared between the blocks of a multiprocessor; and all bytes at full bandwidth. Merging: "
        "from the last product to the end, and the second launch. Each of its blocks reads the parts of a row, low at "
        f"{PORT.low:g} bytes a cycle beside its path, high at {PORT.high:g} on top.\n",
        *_table(columns, rows),
        "\nInstructions of one turn of the second launch's loop, in which each thread loads columns and totals of nine parts, "
        "per warp; and loads on their way before the first is used, read from the machine code (sm_90):\n",
        *_table(["shape", "GPU", "emulator", "loads of any width", "loads of 16 bytes"], [
            [shape, f"{merge['gpu']:,.0f}", f"{merge['emulator']:,.0f}", *map(str, merge["in_flight"])]
            for shape, merge in estimates.result["merges"].items()
        ]),
    ]  # fmt: skip


def _merging_rounds(launches: list[dict[str, Any]]) -> int:
    return sum(_rounds(launch["whole"]) for launch in launches) - _rounds(launches[0]["to_last_product"])


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
        f"Cycles at {CLOCK / 1e9:.2f} GHz. A launch takes {LAUNCH.low:g} to {LAUNCH.high:g} µs, from the end of the kernel "
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
        "Events on the longest path of each launch, with loads in the fewest possible rounds and in the most. Instructions are "
        "the emulator's, not scaled. Attention has one key head, on an eighth of the GPU.\n",
        *_table(columns, rows),
    ]
