"""benchmarks/results/kernel-time/README.md: a GPU's times, the fit to them, and the critical paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness.markdown import table
from benchmarks.harness.template import page
from benchmarks.kernel_time.cycles import CYCLES
from benchmarks.kernel_time.fit import FITTED, Counts, counts_of, fit, fitted
from benchmarks.kernel_time.inputs import ATTENTION, FILTERED, MEASURED

RESULT = Path("benchmarks/results/kernel-time/paths.json")
PAGE = Path("benchmarks/results/kernel-time/README.md")

ACCEPT_AIM = 15.0
AIMS = {("draft_sample", "1 row, coupled"): 9.0, **{("attention", name): aim for name, aim in
        zip(ATTENTION, (7.0, 14.0, 40.0, 10.0), strict=True)}}  # fmt: skip


def read(root: Path) -> dict[str, Any]:
    """The recorded paths."""
    result: dict[str, Any] = json.loads((root / RESULT).read_text())
    return result


def save(result: dict[str, Any], root: Path) -> None:
    """Writes a result in place of the one before it, a step per line."""
    path = root / RESULT
    path.parent.mkdir(parents=True, exist_ok=True)
    head = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in result.items() if key != "steps"]
    rows = [f"  {json.dumps(step)}" for step in result["steps"]]
    path.write_text("\n".join(["{", *head, ' "steps": [', ",\n".join(rows), " ]", "}", ""]))


def read_measured(root: Path) -> dict[str, Any]:
    """The newest result of on_gpu.py on any GPU."""
    found = [json.loads(path.read_text()) for path in sorted(root.glob(f"benchmarks/results/*/{MEASURED}"))]
    return max(found, key=lambda result: result["date"])


def render(result: dict[str, Any], measured: dict[str, Any], paths: dict[tuple[str, str], Counts]) -> str:
    """The text of the page for recorded paths, for what a GPU measured, and for the paths of the kernels that it ran."""
    return page(
        __file__, {}, commits=_commits(result), measured=_measured(result, measured, paths), paths=_paths(result)
    )  # fmt: skip


def _commits(result: dict[str, Any]) -> str:
    """The commits of the kernels, each with the kinds of the steps that were recorded there."""
    kinds: dict[str, dict[str, None]] = {}
    for step in result["steps"]:
        kinds.setdefault(step["commit"], {})[step["kind"]] = None
    if len(kinds) == 1:
        return f"Kernels of commit {next(iter(kinds))}.\n"
    return "".join(f"Kernels of commit {commit}: {', '.join(names)}.\n" for commit, names in kinds.items())


def _measured(result: dict[str, Any], measured: dict[str, Any], paths: dict[tuple[str, str], Counts]) -> list[str]:
    machine, versions, known = measured["machine"], measured["versions"], measured["constants"]
    constants = fit(measured, paths)
    recorded = {(step["kind"], step["name"]): step for step in result["steps"]}
    rows, others = [], []
    for step in measured["steps"]:
        if "error" in step:
            continue
        key = step["kind"], step["name"]
        cells = [
            ": ".join(key),
            str(step["kernels"]),
            *(f"{step[f'{how}_us']:.1f}" for how in ("warm", "cold", "alone")),
        ]
        if key in recorded:
            rows.append([*cells, *_fitted(key, recorded[key], step["warm_us"], constants, paths), _aim(*key)])
        else:
            reading = 1e3 * step["bytes"] / known["read_gb_per_s"] / 1e6
            others.append([*cells, f"{step['bytes'] / 1e6:,.1f}", f"{reading:.1f}"])
    return [
        f"{machine['gpu']['name']}, driver {machine['gpu']['driver']}, torch {versions['torch']}, {measured['date'][:10]}, "
        f"commit {measured['commit']}: `python -m benchmarks.kernel_time.on_gpu`. Medians of 25 replays of a CUDA graph. "
        "*Warm*: 64 calls one after the other, inputs in L2. *Cold*: each call has inputs of its own, which come from memory. "
        f"*Alone*: a graph of one call. An empty kernel takes {known['launch_us']:.2f} µs, a copy moves "
        f"{known['copy_gb_per_s']:,.0f} GB/s, a read {known['read_gb_per_s']:,.0f} GB/s.\n",
        "The fit: least squares of relative errors over the steps of draft and accept, with the paths of the kernels that the "
        f"GPU ran ([measured-paths.json](measured-paths.json)): {constants.launch:.1f} µs a launch + "
        f"{constants.thousand_instructions:.2f} µs for 1,000 instructions of the emulator + {constants.round:.2f} µs a round "
        "of loads from L2 or memory. Attention: its launches and rounds at the same constants, and its bytes at the read speed "
        "measured. Layers, and attention in one order or to codes, are products by all warps of a GPU, which these numbers do "
        "not describe. *Now*: the kernels of this page.\n",
        *table(["step", "launches", "warm, µs", "cold", "alone", "fitted", "off by", "now", "aim, µs"], rows),
        "\nBatches, other vocabularies and prefixes, and the time in which the inputs are read once:\n",
        *table(["step", "launches", "warm, µs", "cold", "alone", "MB", "reading them, µs"], others),
        "",
    ]


def _fitted(
    key: tuple[str, str],
    step: dict[str, Any],
    warm: float,
    constants: Any,
    paths: dict[tuple[str, str], Counts],
) -> list[str]:
    if key not in paths:
        return ["", "", _now(key, step, constants)]
    then = fitted(key[0], paths[key], constants)
    return [f"{then:.1f}", f"{100 * (then / warm - 1):+.0f} %", _now(key, step, constants)]


def _now(key: tuple[str, str], step: dict[str, Any], constants: Any) -> str:
    return f"{fitted(key[0], counts_of(step), constants):.1f}" if key[0] in (*FITTED, "attention") else ""


def _aim(kind: str, name: str) -> str:
    aim = AIMS.get((kind, name)) or (ACCEPT_AIM if kind == "accept" and FILTERED not in name else None)
    return f"{aim:g}" if aim else ""


def _paths(result: dict[str, Any]) -> list[str]:
    rows = [
        [f"{step['kind']}: {step['name']}", launch["name"], f"{launch['blocks']:,} × {launch['threads']}"]
        + [f"{launch['path'][event]:,}" if event in launch["path"] else "" for event in CYCLES]
        for step in result["steps"]
        for launch in step["launches"]
    ]
    columns = ["step", "launch", "blocks × threads", *(event.replace("_", " ") for event in CYCLES)]
    return ["Events on the longest path of each launch.\n", *table(columns, rows)]
