"""Writes docs/trust.md: what the checks of this repository found, from benchmarks/results/trust/*.json and the GPU's records.

`python -m benchmarks.pages.trust` writes the page, `--check` compares it and writes nothing. `python -m benchmarks.trust NAME`
measures a part again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness.markdown import table
from benchmarks.pages import gpu_status

PAGE, RESULTS = Path("docs/trust.md"), Path("benchmarks/results/trust")
HEAD = """# Figures of trust

What is checked, how often, and with which result. Written by `python -m benchmarks.pages.trust`; do not edit. Each part names
the command that measures it again."""

SANITIZERS_TO_RUN = """## Sanitizers

`make sanitize` runs the op tests and random calls under AddressSanitizer with UBSan, and under ThreadSanitizer. No whole run is
counted here: on two cores it takes hours. `python -m benchmarks.trust sanitized` counts one file by file, and goes on where it
stopped. Random calls under UBSan found one fault on 2026-11-26: `recall_scores` of no tokens cleared no bytes at a null
pointer. It is mended, and 800 random calls of all ops under AddressSanitizer with UBSan found no other."""

GITHUB = "https://github.com"
OTHERS = (
    ("SQLite", "all branches, and MC/DC", "https://www.sqlite.org/testing.html"),
    (
        "llama.cpp",
        "NMSE of an op at most 1e-7, of products and attention 5e-4, one backend against another",
        f"{GITHUB}/ggml-org/llama.cpp/blob/master/tests/test-backend-ops.cpp",
    ),
    (
        "FlashAttention",
        "largest error at most twice that of PyTorch in the same type",
        f"{GITHUB}/Dao-AILab/flash-attention/blob/main/tests/test_flash_attn.py",
    ),
    ("vLLM", "acceptance length within 2 % on 80 prompts", f"{GITHUB}/vllm-project/vllm/pull/32030"),
    ("vLLM", "χ² of the rejection sampler", f"{GITHUB}/vllm-project/vllm/pull/38496"),
    (
        "PyTorch",
        "opcheck for custom ops: schema, fake tensors, autograd, compilation; it runs here on every op too",
        "https://docs.pytorch.org/docs/stable/library.html",
    ),
)
"""Project, figure, source."""


def render(root: Path) -> str:
    """The page: each part whose results are there."""
    results = {path.stem: json.loads(path.read_text()) for path in (root / RESULTS).glob("*.json")}
    shown = [part(*(results[name] for name in names)) for part, names in PARTS.items() if results.keys() >= set(names)]
    if "sanitized" not in results:
        shown.append(SANITIZERS_TO_RUN)
    return "\n\n".join([HEAD, *shown, gpu(root), others()]) + "\n"


def measured(name: str, result: dict[str, Any]) -> str:
    """The sentence below a part: command, date, commit and processor."""
    note = f" {result['note']}" if "note" in result else ""
    return (
        f"`python -m benchmarks.trust {name}`, {result['date'][:10]}, commit {result['commit']}, {result['cpu']}.{note}"
    )


def laws(result: dict[str, Any]) -> str:
    """Accept rules enumerated."""
    heads = ["rule", "problems", "outcomes", "largest error", "of the compiled walk", "largest error"]
    rows = [
        [
            f"`{row['rule']}`",
            *(f"{row[key]:,}" for key in ("problems", "outcomes")),
            f"{row['error']:.0e}",
            f"{row['compiled outcomes']:,}",
            f"{row['compiled error']:.0e}",
        ]
        for row in result["rows"]
    ]
    words = (
        "Every draft that can be drawn and every way that coins can fall, on small trees and vocabularies, with filters, fixed "
        "proposals and duplicates. The error is the total variation between the distribution of the emitted text and the "
        "target's. The reference computes in float64; the walk that CPU and GPU share has float32 probabilities, and is "
        "enumerated on trees of up to five nodes. Approximate rules are not in this table: "
        "[accept](ops/accept.md) says by how much they are wrong."
    )
    return "\n".join(["## Accept rules, enumerated", "", words, "", *table(heads, rows), "", measured("laws", result)])


def errors(result: dict[str, Any]) -> str:
    """Errors of attention and products."""
    heads = ["op", "type", "problems", "worst ratio", "where", "NMSE", "PyTorch's NMSE"]
    rows = [
        [
            f"`{row['op']}`",
            row["dtype"],
            str(row["problems"]),
            f"{row['ratio']:.2f} ×",
            row["at"],
            f"{row['nmse']:.1e}",
            f"{row['plain nmse']:.1e}",
        ]
        for row in result["rows"]
    ]
    words = (
        "Each against float64, on the CPU. *worst ratio*: our largest error over PyTorch's largest error for the same inputs "
        "in the same type, in the problem where it is worst. *NMSE*: squared error over the squares of the exact result, as "
        "llama.cpp counts it; its limit for products and for attention is 5e-4. The tests allow each element of attention a "
        "bound of its own ([tests](../tests/ops/attention/attention_checks.py)), and a product twice PyTorch's error or one "
        "unit in the last place."
    )
    below = f"torch {result['torch']}, {result['isa']}. {measured('errors', result)}"
    return "\n".join(["## Errors of attention and products", "", words, "", *table(heads, rows, left=2), "", below])


def bits(result: dict[str, Any]) -> str:
    """What must not change a bit."""
    rows = [[name, str(one["compared"]), str(one["differ"])] for name, one in result["compared"].items()]
    words = (
        "What is computed beside a row must not change it. Texts are 64 tokens of SmolLM2-135M-Instruct in bfloat16, greedy or "
        "by rule coupled at temperature 0.8. Batches have their prompts read by our products if no prompt has many rows, else "
        "in a call of its own ([exactness](guide/exactness.md#exactness))."
    )
    below = f"Instruction sets: {', '.join(result['isas'])}. {measured('bits', result)}"
    missing = (
        "Not compared: bits of attention and products between instruction sets and between CPU and GPU, which may differ "
        "([what each op promises](ops/attention.md))."
    )
    heads = ["compared", "pairs", "different"]
    return "\n".join(["## Bits", "", words, "", *table(heads, rows), "", missing, "", below])


OUTCOMES = ("killed", "timed out", "survived", "same code", "does not compile")


def faults(result: dict[str, Any]) -> str:
    """Planted faults and the survivors."""
    total = sum(map(Counter, result["folders"].values()), Counter())
    rows = [[name, *(str(counts.get(one, 0)) for one in OUTCOMES)] for name, counts in result["folders"].items()]
    rows.append(["all", *(str(total[one]) for one in OUTCOMES)])
    noticed, real = total["killed"] + total["timed out"], total["killed"] + total["timed out"] + total["survived"]
    words = (
        f"Small faults, chosen by a seed and planted one at a time: another operator, a number off by one, swapped arguments. "
        f"The tests noticed **{noticed} of {real}** that changed the code ({noticed / real:.0%})."
    )
    tried = sum(total.values())
    if tried < result["planned"]:
        words += f" {tried} of the {result['planned']} planned were tried; the run continues where it stopped."
    survivors = [f"- `{one['fault']}`: {one['why']}" for one in result["survivors"]]
    lines = ["## Planted faults", "", words, "", *table(["folder", *OUTCOMES], rows)]
    if survivors:
        lines += ["", "Survivors:", "", *survivors]
    return "\n".join([*lines, "", f"`make mutants`, then {measured('mutants', result)}"])


def random_calls(result: dict[str, Any]) -> str:
    """Calls with arguments of every kind."""
    words = (
        f"{result['calls'] + result['wrong']:,} calls of {result['ops']} ops with right, odd and wrong arguments: "
        f"{result['results']:,} gave what the reference gives, {result['refusals']:,} were refused in words, {result['wrong']} "
        "did neither."
    )
    return "\n".join(["## Random calls", "", words, "", measured("random", result)])


def sanitizers(result: dict[str, Any]) -> str:
    """Op tests and random calls under sanitizers."""
    found = ", ".join(f"`{name}`" for name in result["wrong"]) or "nothing"
    words = (
        f"Under AddressSanitizer with UBSan, in a build of its own, **{result['passed']:,} op tests** in {result['files']} "
        f"files passed, on every instruction set of this processor, and {result['random calls']:,} random calls of all ops. "
        f"Found: {found}. A sanitizer ends the process at its first finding. `make sanitize` runs the same, and then all of "
        "it under ThreadSanitizer, which is not counted here. Random calls under UBSan found one fault on 2026-11-26: "
        "`recall_scores` of no tokens cleared no bytes at a null pointer. It is mended."
    )
    return "\n".join(["## Sanitizers", "", words, "", measured("sanitized", result)])


def branches(result: dict[str, Any]) -> str:
    """Branches of csrc/core."""
    files = [row for row in result["files"] if row["branches"]]
    total, taken = (sum(row[key] for row in files) for key in ("branches", "taken"))
    rows = [[row["file"], str(row["branches"]), str(row["taken"])] for row in files]
    words = (
        f"gcov counts branches of the formulas that CPU and GPU share (`csrc/core/`), while tests run on the CPU: "
        f"**{taken} of {total}** are taken ({taken / total:.1%}). SQLite takes all branches."
    )
    reasons: dict[str, list[str]] = {}
    for row in files:
        for one in row["missed"]:
            place = f"`{row['file']}:{one['line']}`, {one['branches']} of `{one['text']}`"
            reasons.setdefault(one["why"], []).append(place)
    missed = [
        f"- {why}: {'; '.join(places)}" for why, places in sorted(reasons.items(), key=lambda item: -len(item[1]))
    ]
    below = f"{result['passed']:,} tests passed, {result['failed']} failed. {measured('coverage', result)}"
    return "\n".join(
        [
            "## Branches",
            "",
            words,
            "",
            *table(["header", "branches", "taken"], [*rows, ["all", str(total), str(taken)]]),
            "",
            "Branches that no test takes, by the reason:",
            "",
            *missed,
            "",
            below,
        ]
    )


PARTS: dict[Callable[..., str], tuple[str, ...]] = {
    laws: ("laws",),
    errors: ("errors",),
    bits: ("bits",),
    faults: ("mutants",),
    random_calls: ("random",),
    sanitizers: ("sanitized",),
    branches: ("coverage",),
}
"""Part of the page -> the results that it shows."""


def gpu(root: Path) -> str:
    """What a GPU has verified."""
    last = gpu_status.read_records(root)[-1]
    kernels = last["kernels"]
    every = kernels["primitives.cuh"]  # which every kernel file includes
    checked = "".join(f", {count} of them under {tool}" for tool, count in every["sanitized"].items())
    words = (
        f"The last run was on an {last['machine']['gpu']['name']} on {last['date'][:10]}, commit {last['commit']}: "
        f"{every['tests_passed']:,} tests of {len(kernels)} kernel files passed{checked}, {every['tests_failed']} failed. A "
        "file whose code changed since then has run on the [emulator](../tests/emulator/README.md) and was compiled, no more. "
        "[GPU status](../benchmarks/results/gpu-status.md) says for each file whether it is still the one that was verified."
    )
    found = sorted(root.glob("benchmarks/results/*/texts.json"))
    return "\n".join(
        [
            "## On a GPU",
            "",
            words,
            *(line for path in found for line in ("", *texts_on_gpu(json.loads(path.read_text())))),
        ]
    )


def texts_on_gpu(result: dict[str, Any]) -> list[str]:
    """Texts of every method on a GPU."""
    same = [name for name, outcome in result["models"].items() if outcome == "same"]
    rows = [
        [
            line["method"] + ", batch-invariant" * line.get("batch_invariant", False),
            str(line["together"]),
            f"{line['differing']} of {line['texts']}",
        ]
        for line in result["bits"]
    ]
    return [
        f"Texts, {result['machine']['gpu']['name']}. In float32 {len(same)} of {len(result['models'])} tiny models, one for "
        f"each kind of layer ({', '.join(same)}), write there by every method the greedy texts that Plain writes on the CPU, "
        "and by Plain, PaSS and MultiCandidate its sampled ones. In bfloat16 the bits of a row depend on the rows beside it, "
        "other than on the CPU. Of a model with random weights, whose best tokens lie close together:",
        "",
        *table(["method", "texts in a call", "other than Plain alone"], rows),
        "",
        f"`python -m benchmarks.gpu.texts`, {result['date'][:10]}, commit {result['commit']}.",
    ]


def others() -> str:
    """What other projects publish."""
    rows = [[project, figure, f"[{source.partition('//')[2]}]({source})"] for project, figure, source in OTHERS]
    words = (
        "Figures of other machines and other code: to see what is usual, not to compare. We found no other project that "
        "enumerates the distribution of its accept rules, or that publishes planted faults."
    )
    return "\n".join(["## What others publish", "", words, "", *table(["project", "figure", "source"], rows, left=3)])


def main() -> int:
    """Entry point of `python -m benchmarks.pages.trust`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    page, text = options.root / PAGE, render(options.root)
    if not options.check:
        page.write_text(text)
    elif not page.exists() or page.read_text() != text:
        print(f"{PAGE} does not show benchmarks/results/trust: run python -m benchmarks.pages.trust", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
