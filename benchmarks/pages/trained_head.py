"""A trained head beside Plain and PaSS with the shipped slots, and both together, on SmolLM2 with the 4 bits of its file.

`python -m benchmarks.pages.trained_head FOLDER` reads the head's checkpoint there. Each round has prompts of its own, and
writes greedy texts by each method, in shuffled order; Plain writes the same beside each, in front of it and behind it in turn.
The first round counts the hit rates for "auto" and warms up. Writes benchmarks/results/<device>/trained-head.json and the page
beside it. `--render` and `--check` measure nothing.
"""

import random
import sys
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch

import pass_ext
from benchmarks.decoding.prompts import read_prompts
from benchmarks.decoding.steps import RANGES, timed_ranges
from benchmarks.harness import by_machine, machine
from benchmarks.harness.markdown import table
from benchmarks.harness.template import page
from pass_ext.checkpoint import demo_model, load_checkpoint

NAME, PLAIN, SLOTS = "trained-head", "Plain", "smollm2-135m-instruct-slots"
KINDS = ("chat", "prose", "code")
PROMPTS, TOKENS, ROUNDS = 2, 64, 4
"""Of a kind in a round; new tokens of a text; rounds."""
LENGTHS, WIDE, TREES, BELOW, ROWS = (1, 2, 3, 4), (1, 2), ((2, 1), (2, 2)), (1, 2), (8, 12)
"""Drafts of a chain of the head in 4 bits, and in bfloat16; children of each node of a tree, by level; drafts above slots,
and the most rows of a call with slots."""


def measure(path: str, rounds: int) -> dict[str, Any]:
    """The result: hit rates, and a row for each kind and method."""
    model, tokenizer = load_checkpoint(demo_model(), torch.bfloat16)
    wide, head = pass_ext.load_drafter(path, model), pass_ext.load_drafter(path, model, bits=4)
    prompts = {
        kind: [torch.tensor([each.ids]) for each in read_prompts(kind, tokenizer, PROMPTS * (rounds + 1))]
        for kind in KINDS
    }
    rates = _hit_rates(model, head, [ids for every in prompts.values() for ids in every[:PROMPTS]])
    head = replace(head, hit_rates=rates)
    methods = {
        PLAIN: pass_ext.Plain(),
        "PaSS, slots": pass_ext.PaSS(SLOTS),
        **{f"head in bfloat16, {length} draft{'s' * (length > 1)}": replace(wide, length=length) for length in WIDE},
        **{f"head, {length} draft{'s' * (length > 1)}": replace(head, length=length) for length in LENGTHS},
        **{f"head, tree {' × '.join(map(str, tree))}": replace(head, branching=tree) for tree in TREES},
        'head, "auto"': replace(head, length="auto"),
        **{
            f"head, {length} draft{'s' * (length > 1)}, slots below, {rows} rows": replace(
                head, length=length, lookahead=pass_ext.PaSS(SLOTS, rows=rows)
            )
            for length in BELOW
            for rows in ROWS
        },
    }
    rows = {(kind, name): _Row(kind, name) for kind in KINDS for name in methods}
    for turn in range(rounds + 1):
        for kind, every in prompts.items():
            own = every[turn * PROMPTS : (turn + 1) * PROMPTS]
            for place, name in enumerate(random.Random(turn).sample([*methods], len(methods))):
                pair = [name, PLAIN] if (turn + place) % 2 else [PLAIN, name]
                written = {side: _written(model, methods[each], own) for side, each in enumerate(pair)}
                if turn:
                    rows[kind, name].add(written[pair.index(name)], written[pair.index(PLAIN)])
        print(f"round {turn} of {rounds}", file=sys.stderr)
    return {
        **machine.describe_run(),
        "settings": {"tokens": TOKENS, "prompts": PROMPTS, "rounds": rounds},
        "hit rates": [round(rate, 3) for (rate,) in rates],
        "rows": [vars(row) for row in rows.values()],
    }


def _hit_rates(model: Any, head: Any, prompts: list[torch.Tensor]) -> list[list[float]]:
    """How often a draft of each level is right where those above it are."""
    found = []
    for ids in prompts:
        method = replace(head, length=max(LENGTHS))
        stats = pass_ext.generate(model, ids, method, max_new_tokens=TOKENS, eos_token_id=[]).stats
        found.append(torch.tensor([1.0, *stats.acceptance_rate_per_position]))
    reached = torch.stack(found).mean(0)
    return [[float(rate)] for rate in reached[1:] / reached[:-1].clamp(min=1e-6)]


def _written(model: Any, method: Any, prompts: list[torch.Tensor]) -> dict[str, Any]:
    """New tokens, calls, seconds, and milliseconds of the parts of a step, of texts one after the other."""
    texts, calls, parts, begun = [], 0, dict[str, list[float]](), time.perf_counter()
    for ids in prompts:
        with timed_ranges(torch.device("cpu")) as times:
            got = pass_ext.generate(model, ids, method, max_new_tokens=TOKENS, eos_token_id=[])
        texts.append(got.sequences[0, ids.shape[1] :].tolist())
        calls += got.stats.model_calls
        for part in RANGES:  # the first call reads the prompt
            parts.setdefault(part, []).extend(times[part][1:])
    seconds = time.perf_counter() - begun
    return {
        "texts": texts, "calls": calls, "seconds": seconds,
        "ms": {part: 1e3 * sum(each) / max(len(each), 1) for part, each in parts.items()},
    }  # fmt: skip


class _Row:
    """What a method has written of a kind; its attributes are those of the result."""

    def __init__(self, kind: str, method: str) -> None:
        self.kind, self.method = kind, method
        self.texts = self.same = self.calls = 0
        self.seconds: list[float] = []
        self.plain: list[float] = []
        """Of Plain beside it."""
        self.ms: dict[str, list[float]] = {part: [] for part in RANGES}

    def add(self, own: dict[str, Any], plain: dict[str, Any]) -> None:
        """One round's texts, and those of Plain."""
        self.texts += len(own["texts"])
        self.same += sum(a == b for a, b in zip(own["texts"], plain["texts"], strict=True))
        self.calls += own["calls"]
        self.seconds.append(round(own["seconds"], 4))
        self.plain.append(round(plain["seconds"], 4))
        for part, each in self.ms.items():
            each.append(round(own["ms"][part], 3))


def render(result: dict[str, Any]) -> str:
    """The page."""
    settings, speeds, steps = result["settings"], [], []
    for row in result["rows"]:
        ratios = [a / b for a, b in zip(row["plain"], row["seconds"], strict=True)]
        tokens = row["texts"] * settings["tokens"]
        speed = settings["prompts"] * settings["tokens"] / median(row["seconds"])
        against = f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        same = f"{row['same']} of {row['texts']}"
        speeds.append([row["kind"], row["method"], f"{tokens / row['calls']:.2f}", f"{speed:.1f}", against, same])
    for method in dict.fromkeys(row["method"] for row in result["rows"]):
        own = [row["ms"] for row in result["rows"] if row["method"] == method]
        ms = {part: median([value for each in own for value in each[part]]) for part in RANGES}
        whole = sum(ms.values())
        steps.append([method, *(f"{ms[part]:.2f}" for part in RANGES), f"{whole:.2f}", f"{ms['draft'] / whole:.0%}"])
    return page(
        __file__, result, rates=", ".join(f"{rate:.3f}" for rate in result["hit rates"]),
        speeds=table(["text", "method", "tokens a call", "tokens/s", "× Plain", "Plain's texts"], speeds, left=2),
        steps=table(["method", *RANGES, "whole", "drafting"], steps, left=1),
    )  # fmt: skip


def main() -> int:
    """Entry point of `python -m benchmarks.pages.trained_head`."""
    parser = by_machine.parser_of(__doc__, ROUNDS)
    parser.add_argument("folder", nargs="?", help="of the head's checkpoint")
    options = parser.parse_args()
    if options.folder is None and not (options.render or options.check):
        parser.error("give the folder of a head, or --render")
    return by_machine.command(NAME, options, lambda: measure(options.folder, options.rounds), render)


if __name__ == "__main__":
    sys.exit(main())
