"""What drafting by heads costs: the parts of a step, and whole texts beside Plain, with drafts that are never right.

`python -m benchmarks.pages.heads` gives SmolLM2-135M-Instruct random heads of each form, and a model of Gemma 4 of about this
size, with random weights, an assistant. Each round writes a text by each method, with its usual length and with length="auto",
in shuffled order, and beside each text with "auto" one by Plain, in front of it and behind it in turn: a machine whose speed
drifts is as slow for both. Writes benchmarks/results/<device>/heads.json and the page beside it. `--render` and `--check`
measure nothing.
"""

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import pass_ext
from benchmarks.decoding import random_heads
from benchmarks.decoding.prompts import read_prompts
from benchmarks.decoding.steps import RANGES, timed_ranges
from benchmarks.harness import by_machine, machine
from benchmarks.harness.markdown import table
from benchmarks.harness.template import page
from pass_ext.checkpoint import demo_model, load_checkpoint

PLAIN, ASSISTANT, AUTO = "Plain", "Assistant", ', "auto"'
TOKENS, STEPS, WARMING, ROUNDS = 256, 24, 64, 3
"""Tokens of a text with length "auto"; of one with the usual length; of a text that warms up; rounds."""
AIM = 0.95
GEMMA: dict[str, Any] = dict(
    hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1,
    head_dim=128, global_head_dim=128, num_global_key_value_heads=1, vocab_size=49152, vocab_size_per_layer_input=0,
    hidden_size_per_layer_input=0, layer_types=[*["sliding_attention"] * 5, "full_attention"] * 3, sliding_window=512,
    num_kv_shared_layers=0,
)  # fmt: skip


def measure(names: Sequence[str], rounds: int) -> dict[str, Any]:
    """The result: seconds of each text, and milliseconds of the parts of a step."""
    torch.manual_seed(0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        smollm, tokenizer = load_checkpoint(demo_model(), torch.bfloat16, weights="dense")
        prompts = [torch.tensor([each.ids]) for each in read_prompts("chat", tokenizer, rounds + 1)]
        models = {"SmolLM2-135M-Instruct": (smollm, [name for name in names if name in random_heads.FORMS])}
        if ASSISTANT in names:
            models["Gemma 4, random"] = _gemma(), [ASSISTANT]
        for title, (model, own) in models.items():
            methods: dict[str, Any] = {PLAIN: pass_ext.Plain()}
            for name in own:
                place = Path(folder) / name
                random_heads.FORMS.get(name, random_heads.assistant)(place, model)
                methods[name] = pass_ext.load_drafter(place, model)
                methods[name + AUTO] = replace(methods[name], length="auto")
            rows += _raced(title, model, methods, prompts)
    return {
        **machine.describe_run(),
        "settings": {"tokens": TOKENS, "steps": STEPS, "rounds": rounds},
        "rows": rows,
    }


def _gemma() -> Any:
    from transformers import AutoModelForCausalLM, Gemma4TextConfig

    model = AutoModelForCausalLM.from_config(Gemma4TextConfig(**GEMMA), dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def _raced(title: str, model: Any, methods: dict[str, Any], prompts: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """A row for each method; the first prompt warms up. Those with "auto" have the seconds of Plain beside them."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    beside: dict[str, list[float]] = {name: [] for name in methods if name.endswith(AUTO)}
    parts: dict[str, dict[str, list[float]]] = {name: {part: [] for part in RANGES} for name in methods}
    found: dict[str, dict[str, Any]] = {name: {} for name in methods}

    def written(name: str, turn: int) -> tuple[list[int], float]:
        """A text's new tokens and its seconds."""
        prompt, tokens = prompts[turn], STEPS if name not in beside and name != PLAIN else TOKENS if turn else WARMING
        with timed_ranges(torch.device("cpu")) as times:
            begun = time.perf_counter()
            got = pass_ext.generate(model, prompt, methods[name], max_new_tokens=tokens, eos_token_id=[])
            taken = time.perf_counter() - begun
        if turn:
            seconds[name].append(round(taken, 4))
            for part in RANGES:  # the first call reads the prompt
                parts[name][part] += times[part][1:]
            found[name] = {"calls": got.stats.model_calls, "drafts": got.stats.num_drafts}
        return got.sequences[0, prompt.shape[1] :].tolist(), taken

    for turn in range(len(prompts)):
        texts, others = [], [name for name in methods if name != PLAIN]
        for place, name in enumerate(random.Random(turn).sample(others, len(others))):
            pair = [name] if name not in beside else [PLAIN, name] if (turn + place) % 2 else [name, PLAIN]
            own = {each: written(each, turn) for each in pair}
            texts += [text for text, _ in own.values()]
            if turn and name in beside:
                beside[name].append(round(own[PLAIN][1], 4))
        longest = max(texts, key=len)
        assert all(text == longest[: len(text)] for text in texts), "texts are Plain's"
        print(f"{title}: round {turn} of {len(prompts) - 1}", file=sys.stderr)
    return [
        {"model": title, "method": name, "seconds": seconds[name], **found[name],
         **({"plain": beside[name]} if name in beside else {}),
         "ms": {part: round(1e3 * median(parts[name][part]), 3) for part in RANGES}}
        for name in methods
    ]  # fmt: skip


def render(result: dict[str, Any]) -> str:
    """The page."""
    rows = result["rows"]
    plain = {row["model"]: row for row in rows if row["method"] == PLAIN}
    steps, races, every = [], [], list[float]()
    for row in rows:
        whole = sum(row["ms"].values())
        if not row["method"].endswith(AUTO):
            cells = [f"{row['ms'][part]:.2f}" for part in RANGES]
            against = whole / sum(plain[row["model"]]["ms"].values())
            share = f"{row['ms']['draft'] / whole:.0%}"
            steps.append([row["model"], row["method"], *cells, f"{whole:.2f}", share, f"{against:.2f}"])
        else:
            ratios = [a / b for a, b in zip(row["plain"], row["seconds"], strict=True)]
            every += ratios
            speed = f"{median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f})"
            met = "met" if median(ratios) >= AIM else "not met"
            races.append([row["model"], row["method"], speed, f"{row['drafts']} of {row['calls']}", met])
    return page(
        __file__, result, aim=AIM, pairs=len(every), every=f"{median(every):.3f}",
        steps=table(["model", "method", *RANGES, "whole", "drafting", "against Plain"], steps, left=2),
        races=table(["model", "method", "× Plain", "drafted", "aim"], races, left=2),
    )  # fmt: skip


def main() -> int:
    """Entry point of `python -m benchmarks.pages.heads`."""
    parser = by_machine.parser_of(__doc__, ROUNDS)
    parser.add_argument("--only", nargs="+", metavar="FORM", help="print the page of these forms, and write nothing")
    options = parser.parse_args()
    if options.only:
        print(render(measure(options.only, options.rounds)))
        return 0
    return by_machine.command(
        "heads", options, lambda: measure([*random_heads.FORMS, ASSISTANT], options.rounds), render
    )


if __name__ == "__main__":
    sys.exit(main())
