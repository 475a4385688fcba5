"""Batches: PaSS with rows by measured times, and with fixed numbers of rows, against plain decoding, as the batch grows.

    speed = the median over rounds of  seconds of Plain / seconds of PaSS,  for the same prompts, one after the other;
            which of them is first changes from round to round

Each round has other held-out prompts, chat, code and prose in turn; rows by measured times should be as fast as the best fixed
number, at every size.
`python -m benchmarks.pages.batches` writes batches.json and batches.md in the machine's folder of results; `--check` compares
the pages.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

import torch

import pass_ext
from benchmarks.decoding.prompts import DOMAINS, Prompt, read_prompts
from benchmarks.decoding.race import in_turn
from benchmarks.harness import by_machine, machine
from benchmarks.harness.markdown import table
from benchmarks.harness.template import page
from pass_ext.checkpoint import demo_model, load_checkpoint

SIZES, TOKENS, ROUNDS = (1, 2, 4, 8, 16), 96, 6
ROWS: tuple[int | Literal["auto"], ...] = (2, 3, 4, 6, 8, 12, "auto")
SETTINGS: dict[str, dict[str, Any]] = {"greedy": {}, "T 0.8": dict(temperature=0.8, seeds=1)}


def measure(slots: str, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """The result."""
    from rich.progress import track

    path = demo_model()
    model, tokenizer = load_checkpoint(path, torch.bfloat16, weights="dense")
    most = max(sizes) * rounds
    prompts = in_turn([read_prompts(domain, tokenizer, most) for domain in DOMAINS])
    lookahead = pass_ext.LookaheadEmbedding.from_pretrained(slots)
    contenders: dict[str, Any] = {"Plain": pass_ext.Plain()}
    contenders |= {str(rows): pass_ext.PaSS(lookahead, rows=rows) for rows in ROWS}
    pass_ext.generate(model, torch.tensor([prompts[0].ids]), contenders["auto"], max_new_tokens=8)  # times are measured
    rows = []
    for size, setting in track([(size, setting) for size in sizes for setting in SETTINGS], "batches"):
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        calls: dict[str, list[int]] = {name: [] for name in contenders}
        for turn in range(rounds):
            chosen = [prompts[(turn * size + b) % len(prompts)] for b in range(size)]
            order = list(contenders)
            random.Random(turn).shuffle(order)
            for name in order:
                stats = written(model, chosen, contenders[name], SETTINGS[setting])
                seconds[name].append(round(stats.seconds, 4))
                calls[name].append(stats.model_calls)
        rows.append({"batch": size, "setting": setting, "seconds": seconds, "calls": calls})
    return {
        **machine.describe_run(),
        "model": path.name,
        "slots": slots,
        "rows": rows,
    }


def written(model: Any, prompts: Sequence[Prompt], method: Any, setting: Mapping[str, Any]) -> Any:
    """The statistics of texts of these prompts."""
    longest = max(len(prompt.ids) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt.ids)) + list(prompt.ids) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in prompts])
    options: dict[str, Any] = dict(attention_mask=mask, eos_token_id=[], max_new_tokens=TOKENS)
    return pass_ext.generate(model, ids, method, **options, **setting).stats


def render(result: dict[str, Any]) -> str:
    """The page."""
    names = [name for name in result["rows"][0]["seconds"] if name != "Plain"]
    lines = []
    for row in result["rows"]:
        plain = row["seconds"]["Plain"]
        speeds = {
            name: median(ours / theirs for ours, theirs in zip(plain, row["seconds"][name], strict=True))
            for name in names
        }
        usual = f"{TOKENS * row['batch'] / median(plain):.0f}"
        lines.append(
            [str(row["batch"]), row.get("setting", "greedy"), usual, *(f"{speeds[name]:.2f} ×" for name in names)]
        )
    heads = ["batch", "texts", "Plain, tokens/s", *(f"rows {name}" if name != "PaSS" else name for name in names)]
    rounds = len(result["rows"][0]["seconds"]["Plain"])
    return page(__file__, result, tokens=TOKENS, rounds=rounds, speeds=table(heads, lines, left=2))


def main() -> int:
    """Entry point of `python -m benchmarks.pages.batches`."""
    parser = by_machine.parser_of(__doc__, ROUNDS)
    parser.add_argument(
        "--slots", default="smollm2-135m-instruct-slots", help="look-ahead embeddings: a name or a file"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="requests of a batch")
    options = parser.parse_args()
    return by_machine.command("batches", options, lambda: measure(options.slots, options.sizes, options.rounds), render)


if __name__ == "__main__":
    sys.exit(main())
