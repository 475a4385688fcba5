"""benchmarks/results/kernel-code/README.md: the tables of the result beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness.template import page
from benchmarks.kernel_code.instructions import CLASSES, OPCODES
from benchmarks.kernel_code.measure import DETAILED

RESULT = Path("benchmarks/results/kernel-code/kernel-code.json")
PAGE = Path("benchmarks/results/kernel-code/README.md")


def read(root: Path) -> dict[str, Any]:
    """The result."""
    result: dict[str, Any] = json.loads((root / RESULT).read_text())
    return result


def save(result: dict[str, Any], root: Path) -> Path:
    """Writes a result in place of the one before it, a kernel per line so that diffs stay readable."""
    path = root / RESULT
    path.parent.mkdir(parents=True, exist_ok=True)
    head = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in result.items() if key != "kernels"]
    rows = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in result["kernels"].items()]
    path.write_text("\n".join(["{", *head, ' "kernels": {', ",\n".join(rows), " }", "}", ""]))
    return path


def render(result: dict[str, Any]) -> str:
    """The text of the page."""
    return page(
        __file__, result, detailed=DETAILED, resources=_resource_table(result), classes=_instruction_table(result)
    )


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def _count(value: int | None) -> str:
    return f"{value:,}" if value else ""


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    alignment = ["---", *["--:"] * (len(columns) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (columns, alignment, *rows)]


def _label(name: str, row: dict[str, Any]) -> str:
    return f"`{name}`" + (f", {row['kinds']} kinds" if row["kinds"] > 1 else "")


def _resource_table(result: dict[str, Any]) -> list[str]:
    architectures = list(dict.fromkeys(a for row in result["kernels"].values() for a in row["resources"]))
    places = ", ".join(architectures)
    intro = f"Numbers for {places}, in this order. A kernel of several kinds shows the largest number of any kind.\n"
    sorts = {"registers": "registers", "stack": "stack", "shared": "shared", "code": "code"}
    rows = [
        [
            _label(name, row),
            *(
                " · ".join(_number(row["resources"].get(architecture, {}).get(sort)) for architecture in architectures)
                for sort in sorts
            ),
        ]
        for name, row in result["kernels"].items()
    ]
    total = " · ".join(map(_number, result["code"].values()))
    return [intro, *_table(["kernel", *sorts.values()], rows), f"\nCode of all kernels and kinds together: {total}."]


def _instruction_table(result: dict[str, Any]) -> list[str]:
    rows = {name: row for name, row in result["kernels"].items() if "classes" in row}
    classes = [name for name in (*CLASSES, "other") if any(name in row["classes"] for row in rows.values())]
    opcodes = [name for name in OPCODES if any(name in row["opcodes"] for row in rows.values())]
    by_class = _table(
        ["kernel", "all", *classes],
        [
            [_label(name, row), _number(row["instructions"]), *(_count(row["classes"].get(each)) for each in classes)]
            for name, row in rows.items()
        ],
    )
    single = _table(
        ["kernel", *opcodes, "in flight"],
        [
            [
                _label(name, row),
                *(_count(row["opcodes"].get(opcode)) for opcode in opcodes),
                "–".join(map(str, dict.fromkeys(row["loads_in_flight"].values()))),
            ]
            for name, row in rows.items()
        ],
    )
    intro = "A kernel of several kinds shows its largest kind.\n"
    return [intro, *by_class, "\nSingle instructions among them:\n", *single]
