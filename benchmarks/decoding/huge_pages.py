"""What huge pages are worth: SmolLM2-135M with its weights in the file that transformers maps, and moved by ``to_huge_pages``.

    ratio = milliseconds of a call over the mapped file / over huge pages, of two processes of the same round

`python -m benchmarks.decoding.huge_pages` starts both processes anew in every round, because where a process's memory lies
changes its times by some percent as long as it lives. Within a round the processes take turns. Kept in huge-pages.json of the
machine's folder of results: the median, the lowest and the highest ratio, for Plain and for PaSS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from statistics import median
from typing import Any

import torch

import pass_ext
from benchmarks import CORES, ROOT
from benchmarks.harness import machine
from pass_ext.checkpoint import demo_model, safetensors_folder
from pass_ext.layers import to_huge_pages

ROUNDS, TURNS, TOKENS = 9, 3, 48
PROMPT = "Write a story about a fox and a hen that meet in a wood."
METHODS = ("Plain", "PaSS")
FORMS = ("file", "huge")


def work(form: str) -> None:
    """Answers each line of input, a method's name, with the milliseconds of a call."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = safetensors_folder(demo_model(), torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    if form == "huge":
        to_huge_pages(model)
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    methods: dict[str, Any] = {"Plain": pass_ext.Plain(), "PaSS": pass_ext.PaSS("smollm2-135m-instruct-slots", rows=8)}

    def milliseconds(name: str, tokens: int) -> float:
        stats = pass_ext.generate(model, ids, methods[name], max_new_tokens=tokens, eos_token_id=[]).stats
        return float(stats.seconds / stats.model_calls * 1e3)

    for name in METHODS:
        milliseconds(name, 8)
    print("ready", flush=True)
    for line in sys.stdin:
        print(milliseconds(line.strip(), TOKENS), flush=True)


def measure() -> dict[str, Any]:
    """The result."""
    times: dict[str, dict[str, list[float]]] = {name: {form: [] for form in FORMS} for name in METHODS}
    for number in range(ROUNDS):
        order = FORMS if number % 2 else FORMS[::-1]
        command = [sys.executable, "-m", "benchmarks.decoding.huge_pages", "work"]
        processes = {
            form: subprocess.Popen(
                [*command, form],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=_on_all_cores if CORES else None,
            )
            for form in order
        }
        for process in processes.values():
            assert _answer(process) == "ready"
        for name in METHODS:
            turns: dict[str, list[float]] = {form: [] for form in FORMS}
            for _ in range(TURNS):
                for form, process in processes.items():
                    assert process.stdin is not None
                    print(name, file=process.stdin, flush=True)
                    turns[form].append(float(_answer(process)))
            for form in FORMS:
                times[name][form].append(round(median(turns[form]), 3))
        for process in processes.values():
            process.kill()
            process.wait()
        print(f"round {number + 1} of {ROUNDS}", file=sys.stderr)
    rows = []
    for name in METHODS:
        file, huge = (times[name][form] for form in FORMS)
        ratios = sorted(round(a / b, 3) for a, b in zip(file, huge, strict=True))
        rows.append({"method": name, "ms": {form: median(times[name][form]) for form in FORMS}, "ratios": ratios})
    return {
        **machine.describe_run(),
        "rows": rows,
    }


def _on_all_cores() -> None:
    os.sched_setaffinity(0, CORES)  # this process is pinned to one, which a child would inherit


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise SystemExit("benchmarks.decoding.huge_pages: a process ended without an answer")
    return line.strip()


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2])
    else:
        result = measure()
        folder = ROOT / "benchmarks" / "results" / machine.device_slug("cpu")
        (folder / "huge-pages.json").write_text(json.dumps(result, indent=1) + "\n")
        for row in result["rows"]:
            ratios = row["ratios"]
            print(
                f"{row['method']}: {median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f}), {json.dumps(row['ms'])} ms"
            )
