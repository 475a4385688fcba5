"""What a prompt with a picture costs: reading it, beside transformers' own call on it; and each token after it, beside one
after a text of as many tokens.

    reading   seconds of custom_generate / seconds of transformers' generate, for one new token
    token     seconds a token after the picture / after the text, by Plain: those of NEW more tokens than one

SmolLM2's text model in float32 after a tiny vision tower with random weights, whose picture takes 400 rows; for reading also
1,600. Medians over rounds, in which all calls take turns, in another order each time: the second of two finds other caches than
the first.

    python -m benchmarks.architectures.picture_times

Writes benchmarks/results/picture-times.json.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import pass_ext
from benchmarks import ROOT
from benchmarks.architectures.picture_sizes import PATCH
from benchmarks.architectures.pictures import llava_of
from benchmarks.harness import machine
from pass_ext.checkpoint import demo_model, load_checkpoint

RESULT = ROOT / "benchmarks/results/picture-times.json"
SIDES, NEW, ROUNDS, PLACEHOLDER = (160, 320), 48, 15, "<filename>"


def seconds_of(call: Callable[[], Any]) -> float:
    """Of one call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def measured() -> dict[str, float]:
    """The ratios, and the seconds that they are of."""
    text, tokenizer = load_checkpoint(demo_model(), torch.float32, weights="dense")
    token = tokenizer.convert_tokens_to_ids(PLACEHOLDER)
    before, after = [tokenizer(said)["input_ids"] for said in ("User: ", " What do you see? Answer: ")]

    def call(model: Any, ids: torch.Tensor, new: int, *, ours: bool, **inputs: Any) -> Callable[[], Any]:
        both = dict(attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None, pad_token_id=0)
        method = pass_ext.custom_generate() if ours else None
        return lambda: model.generate(input_ids=ids, **inputs, **both, max_new_tokens=new, custom_generate=method)

    calls = {}
    for side in SIDES:
        rows = (side // PATCH) ** 2
        model = llava_of(text.config, token, side)
        model.model.language_model, model.lm_head = text.model, text.lm_head
        ids = torch.tensor([[*before, *[token] * rows, *after]])
        pixels = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1))
        calls[f"own, {rows}"] = call(model, ids, 1, ours=False, pixel_values=pixels)
        calls[f"ours, {rows}"] = call(model, ids, 1, ours=True, pixel_values=pixels)
        if side == SIDES[0]:
            words = torch.randint(100, 40000, ids.shape, generator=torch.Generator().manual_seed(0))
            calls["picture"] = call(model, ids, 1 + NEW, ours=True, pixel_values=pixels)
            calls["text"] = call(model, words, 1, ours=True)
            calls["texts"] = call(model, words, 1 + NEW, ours=True)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for each in calls.values():
        each()
    order = random.Random(0)
    for _ in range(ROUNDS):
        for name in order.sample(list(calls), len(calls)):
            seconds[name].append(seconds_of(calls[name]))
    first, *_ = counts = [(side // PATCH) ** 2 for side in SIDES]
    pairs = {rows: zip(seconds[f"ours, {rows}"], seconds[f"own, {rows}"], strict=True) for rows in counts}
    reading = {f"reading, {rows}": median(ours / own for ours, own in pairs[rows]) for rows in counts}
    longer = zip(seconds["picture"], seconds[f"ours, {first}"], seconds["texts"], seconds["text"], strict=True)
    token_ratio = median((a - b) / (c - d) for a, b, c, d in longer)
    spent = {f"seconds, {name}": median(values) for name, values in seconds.items()}
    return {**reading, "token": token_ratio, **spent}


def main() -> None:
    """Entry point of `python -m benchmarks.architectures.picture_times`."""
    result = {
        **machine.describe_run(),
        **measured(),
    }
    print(result)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
