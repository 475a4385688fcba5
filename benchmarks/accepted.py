"""How many tokens each model call brings with the shipped files: counts, no clock, so that a test can hold them.

`python -m benchmarks.accepted` writes 64 tokens after each of eight held-out prompts, greedy, with 8 rows or 4 draft tokens a
call, and keeps the counts in benchmarks/results/accepted.json. `--check` writes nothing and fails where a file brings less than
that by more than 2 %; `make test` does the same for the first prompt of each kind. Products of pairs of bf16, which not every
processor has, are left out: they round otherwise, so texts differ, and with them the counts, by up to 6 %.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import pass_ext
from benchmarks import ROOT
from benchmarks.decoding.prompts import read_prompts
from benchmarks.harness import machine
from pass_ext.checkpoint import demo_model, load_checkpoint
from pass_ext.testing import cpu_backends

RESULT = ROOT / "benchmarks" / "results" / "accepted.json"
DOMAINS, PROMPTS, TOKENS = ("prose", "chat"), 4, 64
"""Code prompts are cut from the running Python's files, which differ from version to version."""
LEAST = 0.98
Counts = dict[str, dict[str, list[list[int]]]]
"""Of each file and domain: [tokens, calls] of each prompt, the prompts' calls included."""


def measure(file: Path, prompts: int = PROMPTS) -> Counts:
    """What each shipped file brings on so many prompts of each domain."""
    without_pairs = [backend for backend in cpu_backends() if backend.name != "cpu-avx512_bf16"][-1]
    with without_pairs.active():
        return _measure(file, prompts)


def _measure(file: Path, prompts: int) -> Counts:
    model, tokenizer = load_checkpoint(file, torch.bfloat16, weights="dense")
    exit_draft = pass_ext.EarlyExitDraft(model, adapter="smollm2-135m-instruct")
    methods: dict[str, Any] = {
        name: pass_ext.PaSS(name, rows=8) for name in ("smollm2-135m-instruct-slots", "smollm2-135m-instruct")
    }
    methods["smollm2-135m-instruct-exit"] = pass_ext.Speculative(exit_draft, length=4)
    counts: Counts = {}
    for name, method in methods.items():
        counts[name] = {domain: [] for domain in DOMAINS}
        for domain in DOMAINS:
            for prompt in read_prompts(domain, tokenizer, PROMPTS)[:prompts]:
                ids = torch.tensor([prompt.ids])
                stats = pass_ext.generate(model, ids, method, max_new_tokens=TOKENS, eos_token_id=[]).stats
                counts[name][domain].append([stats.tokens, stats.model_calls])
    return counts


def per_call(counts: Mapping[str, Sequence[Sequence[int]]]) -> float:
    """Tokens per call of all prompts of a file."""
    tokens, calls = (sum(each) for each in zip(*(pair for pairs in counts.values() for pair in pairs), strict=True))
    return tokens / calls


def fallen(counts: Counts, kept: Counts) -> list[str]:
    """A sentence for each file that brings fewer tokens per call than it did on the same prompts."""
    wrong = []
    for name, before in kept.items():
        same = {domain: before[domain][: len(pairs)] for domain, pairs in counts[name].items()}
        got, expected = per_call(counts[name]), per_call(same)
        if got < LEAST * expected:
            wrong.append(f"{name}: {got:.3f} tokens per call, {expected:.3f} are in {RESULT.relative_to(ROOT)}")
    return wrong


def main() -> int:
    """Entry point of `python -m benchmarks.accepted`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file brings less")
    options = parser.parse_args()
    file = demo_model()
    begun = {
        **machine.describe_run(),
        "model": file.name,
    }
    counts = measure(file)
    for name, each in counts.items():
        print(f"{name:<34} {per_call(each):.3f} tokens per call")
    if options.check:
        wrong = fallen(counts, json.loads(RESULT.read_text())["counts"])
        print(*wrong, sep="\n", file=sys.stderr, end="\n" if wrong else "")
        return 1 if wrong else 0
    RESULT.write_text(json.dumps({**begun, "counts": counts}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
