"""The page of the contenders: a table, the parts of our step against the machine's limits, the aims, and the picture.

Page and picture are written from contenders.json beside them, and checked against it; the share of drafting by heads from
heads.json, where that lies beside them too.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import picture_of_speeds as drawing
from benchmarks.contenders.summary import PARTS, baseline_of, counted, lines, parts
from benchmarks.contenders.workers import names
from benchmarks.harness import markdown, picture
from benchmarks.harness.template import page

NAME = "contenders"
PART_WORDS = {
    "layers": "layers and head",
    "small": "small ops of the call",
    "loop": "loop outside the model",
}


def render(result: dict[str, Any], heads: dict[str, Any] | None = None) -> str:
    """The page. heads: the result of benchmarks.pages.heads on this machine; None: there is none."""
    rows = counted(result)
    table, baseline = lines(rows), baseline_of(rows)
    titles = ["", "tokens/s", "tokens per call", f"against {baseline or 'nothing'}", "same text", "as in float32"]
    shown = markdown.table(titles, [_cells(line) for line in table])
    shown += [f"\nNot raced: {name}: {reason}" for name, reason in result["reasons"].items()]
    if measured := parts(result):
        shown.append(_parts_section(result, measured))
    if heads is not None:
        shown.append(_drafting_line(heads))
    return page(
        __file__, {}, measured=_provenance(result, rows), shown=shown, aims=markdown.aims(result),
        facts=_contender_facts(result),
    )  # fmt: skip


def _cells(line: dict[str, Any]) -> list[str]:
    return [
        line["contender"],
        _spread(line["tokens_per_second"], 1),
        f"{line['tokens_per_call']:.2f}",
        _spread(line["against"], 2) if line["against"] else "–",
        f"{line['same_text']} of {line['rounds']}",
        f"{line['same_as_float32']} of {line['rounds']}",
    ]


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{values[0]:.{digits}f} ({values[1]:.{digits}f}–{values[2]:.{digits}f})"


def _provenance(result: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    settings, machine = result["settings"], result["machine"]
    texts = len({row["round"] for row in rows})
    disturbed = len({row["round"] for row in result["rows"]}) - texts
    load = result["load_average"]
    return (
        f"Measured {result['date']} at commit {result['commit']}, on {machine['cpu']['model']}, "
        f"{machine['cpu']['cores']} cores, {settings['threads']} threads; {settings['model']} in bfloat16; "
        f"{settings['length']} tokens per text; {texts} rounds"
        f"{f', {disturbed} disturbed ones left out' if disturbed else ''}; {len(result['skipped'])} prompts not raced, "
        f"because the text loops or ends; load average {load['before']:.1f} before, {load['after']:.1f} after; "
        f"{result['sittings']} sitting{'s' if result['sittings'] > 1 else ''}."
    )


def _parts_section(result: dict[str, Any], measured: Sequence[dict[str, Any]]) -> str:
    limits = result["parts"]["limits"]
    words = (
        "\n## A step against the machine\n\n"
        "Milliseconds per call of the model, after the call on the prompt; in brackets the share of the machine's limit. "
        "Layers and head: products and attention, and all that is in one op with them, against "
        "max(bytes of weights, keys and values ÷ read bandwidth, flops ÷ peak). "
        f"A large read: {limits['read_gb_per_s']:.1f} GB/s; a large product: {limits['gflop_per_s']:.0f} GFLOP/s, both in this "
        "run. Small ops and the loop have no limit but zero. Once per text: the time outside the model's calls that "
        "does not grow with the text's length; it is not in the whole.\n\n"
    )
    heads = ["", "rows", *(PART_WORDS[part] for part in PARTS), "whole", "once per text"]
    rows = [
        [
            line["contender"],
            f"{line['rows']:.1f}",
            *(
                f"{line['ms'][part]:.2f}" + (f" ({line['share'][part]:.0%})" if part in line["share"] else "")
                for part in PARTS
            ),
            f"{sum(line['ms'].values()):.2f}",
            f"{line['once_ms']:.1f}",
        ]
        for line in measured
    ]
    return words + "\n".join(markdown.table(heads, rows))


def _drafting_line(heads: dict[str, Any]) -> str:
    """What share of a step the drafting by each form of head is."""
    drafted = [row for row in heads["rows"] if row["drafts"] and "auto" not in row["method"]]
    shares = ", ".join(f"{row['method']} {row['ms']['draft'] / sum(row['ms'].values()):.0%}" for row in drafted)
    return (
        f"\nDrafting by a head as a share of its step, measured {heads['date'][:10]} at commit {heads['commit']} by random "
        f"heads ([heads](heads.md)): {shares}."
    )


def _contender_facts(result: dict[str, Any]) -> list[str]:
    """The versions of each environment, and the contenders that run in it."""
    by_facts: dict[tuple[str, str], list[str]] = {}
    for name, facts in result["facts"].items():
        versions = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
        by_facts.setdefault((versions, facts.get("isa", "–")), []).append(name)
    rows = [[versions, isa, "; ".join(members)] for (versions, isa), members in by_facts.items()]
    return markdown.table(["", "instructions", "contenders"], rows, left=3)


# ---- page and picture together ----


def story_of(result: dict[str, Any]) -> dict[str, Any]:
    """The numbers of the picture."""
    rows = counted(result)
    return {
        "title": f"{result['settings']['model']} in bfloat16, {result['machine']['cpu']['model']}, "
        f"{result['settings']['threads']} threads",
        "speeds": [
            [
                line["contender"],
                *(round(value, 2) for value in line["tokens_per_second"]),
                round(line["tokens_per_call"], 2),
            ]
            for line in lines(rows)
        ],
        "ours": [*names.OURS],
        "parts": [
            {
                "contender": line["contender"],
                "rows": round(line["rows"], 1),
                "ms": {PART_WORDS[part]: round(line["ms"][part], 2) for part in PARTS},
                "limit_ms": {PART_WORDS[part]: round(value, 2) for part, value in line["limit_ms"].items()},
            }
            for line in parts(result)
        ],
    }


def _heads_beside(file: Path) -> dict[str, Any] | None:
    heads = file.with_name("heads.json")
    return json.loads(heads.read_text()) if heads.exists() else None


def write_beside(file: Path) -> None:
    """Writes page and picture of one contenders.json."""
    result = json.loads(file.read_text())
    file.with_suffix(".md").write_text(render(result, _heads_beside(file)))
    drawing.draw(story_of(result), file.with_suffix(".svg"))


def write(root: Path, *, check: bool) -> list[str]:
    """Writes page and picture of every contenders.json; with `check` returns a sentence for each that differs."""
    wrong = []
    for file in sorted(root.glob(f"benchmarks/results/*/{NAME}.json")):
        if not check:
            write_beside(file)
            continue
        result = json.loads(file.read_text())
        shown, image, story = file.with_suffix(".md"), file.with_suffix(".svg"), story_of(result)
        if not shown.exists() or shown.read_text() != render(result, _heads_beside(file)):
            wrong.append(f"{shown.relative_to(root)} does not show {NAME}.json")
        if not (picture.tells(image, story) and picture.is_redrawn(image, partial(drawing.draw, story))):
            wrong.append(f"{image.relative_to(root)} does not show {NAME}.json")
    return wrong
