"""The table of docs/guide/training.md: slots with hidden states of their anchors beside slots alone."""

from __future__ import annotations

from typing import Any

from benchmarks import ROOT
from benchmarks.harness.markdown import table

PAGE, NAME = ROOT / "docs/guide/training.md", "benchmarks.pages.injection"
HEADS = (
    *("start", "layers", "matrices", "rate", "seed", "new parameters", "training loss"),
    *("top 1, raw", "gain, slots 1 and 2", "top 1, with transitions", "gain, slots 1 and 2"),
    *("overlap, with transitions", "gain, slots 1 and 2"),
)


def render(result: dict[str, Any]) -> str:
    """The table, and the run above it."""
    return "\n".join([origin(result), "", *table(HEADS, [line(row) for row in result["rows"]], left=3)])


def origin(result: dict[str, Any]) -> str:
    """What made a result."""
    settings, rows = result["settings"], result["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    judged = rows[0]["judged"]["raw"]
    counts = {
        kind: sum(kinds[kind] for kinds in result["texts"].values()) for kind in next(iter(result["texts"].values()))
    }
    dates = sorted(row["date"][:10] for row in rows)
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return (
        f"`{result['command']}`: {settings['steps']} steps of {settings['loss'].upper()} with `{result['training options']}`, "
        f"rates {settings['learning_rate']:g} (slots), {settings['transition_learning_rate']:g} (transitions), "
        f"{settings['deep_learning_rate']:g} (vectors per layer). "
        f"Judged on {judged['texts']} texts ({', '.join(f'{count} {kind}' for kind, count in counts.items())}; "
        f"{judged['places']:,} places) of {result['tokens']} tokens at most that do not loop, behind held-out prompts. "
        f"{result['model']}; {result['machine']['model']}, {result['machine']['torch_threads']} threads; {days}, "
        f"commit {rows[-1]['commit']}; {versions}."
    )


def line(row: dict[str, Any]) -> list[str]:
    """A trial."""
    raw, scored = row["judged"]["raw"], row["judged"]["with transitions"]
    matrices = "full" if row["rank"] is None else f"rank {row['rank']}"
    place = [", ".join(map(str, row["layers"])), matrices, f"{row['rate']:g}"] if row["layers"] else ["none", "", ""]
    return [
        row["start"].removeprefix("smollm2-135m-"),
        *place,
        str(row["seed"]),
        f"{row['parameters']:,}",
        f"{row['loss']:.3f}",
        shares(raw["top 1"]),
        gains(raw, "top 1"),
        shares(scored["top 1"]),
        gains(scored, "top 1"),
        shares(scored["overlap"]),
        gains(scored, "overlap"),
    ]


def shares(values: list[float]) -> str:
    """The shares of all slots."""
    return " ".join(f"{value:.3f}" for value in values)


def gains(judged: dict[str, Any], measure: str) -> str:
    """The gains of slots 1 and 2 over slots alone, in percentage points with standard errors; empty for slots alone."""
    if f"{measure}, gain" not in judged:
        return ""
    pairs = zip(judged[f"{measure}, gain"][:2], judged[f"{measure}, standard error"][:2], strict=True)
    return ", ".join(f"{100 * gain:+.1f} ± {100 * error:.1f}" for gain, error in pairs)
