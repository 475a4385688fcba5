"""Hybrid models: whole texts of pass_ext beside transformers' generate, in turn, in tokens per second.

`python -m benchmarks.pages.hybrid` takes models of random weights with hidden size 1,024, eight layers and heads of real sizes.
Their texts repeat, as the embeddings are large, and n-grams find that. Writes benchmarks/results/<device>/hybrid.json and the
page beside it. `--render` and `--check` measure nothing.
"""

import random
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

import pass_ext
from benchmarks.harness import by_machine, machine
from benchmarks.harness.markdown import table
from benchmarks.harness.template import page

PROMPT, TOKENS, ROUNDS = 128, 128, 5
WIDE = 100.0
"""Factor of the embeddings, which are the output layer too: a token is the most likely one after itself, and texts repeat."""
HIDDEN, LAYERS, VOCABULARY = 1024, 8, 32_768
DELTA, ATTENDING = "linear_attention", "full_attention"
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": dict(
        intermediate_size=3584, num_attention_heads=8, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=16, layer_types=[DELTA, DELTA, DELTA, ATTENDING] * 2,
    ),
    "bamba": dict(
        intermediate_size=3584, num_attention_heads=8, num_key_value_heads=2, mamba_n_heads=32, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1, attn_layer_indices=[3, 7],
    ),
    "lfm2": dict(
        intermediate_size=3584, num_attention_heads=16, num_key_value_heads=8,
        layer_types=["conv", "conv", ATTENDING, "conv"] * 2,
    ),
}  # fmt: skip
METHODS: dict[str, Any] = {"Plain": pass_ext.Plain(), "NGram": pass_ext.NGram()}


def measure(rounds: int) -> dict[str, Any]:
    """The result: seconds of each text, and whether it is transformers'."""
    from rich.progress import track
    from transformers import AutoConfig, AutoModelForCausalLM

    rows = []
    for name, sizes in track(list(SIZES.items()), "hybrid"):
        torch.manual_seed(0)
        shape = dict(hidden_size=HIDDEN, num_hidden_layers=LAYERS, vocab_size=VOCABULARY, tie_word_embeddings=True)
        config = AutoConfig.for_model(name, **shape, **sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
        model.get_input_embeddings().weight.mul_(WIDE)
        prompts = torch.randint(3, VOCABULARY, (rounds + 1, PROMPT), generator=torch.Generator().manual_seed(1))
        seconds: dict[str, list[float]] = {"transformers": [], **{method: [] for method in METHODS}}
        calls: dict[str, list[int]] = {method: [] for method in METHODS}
        same = dict.fromkeys(METHODS, 0)
        for turn, prompt in enumerate(prompts):
            texts: dict[str, Tensor] = {}
            order = list(seconds)
            random.Random(turn).shuffle(order)
            for contender in order:
                begin = time.perf_counter()
                texts[contender], counted = WRITERS.get(contender, _ours)(model, prompt[None], contender)
                if turn:  # the first round warms up
                    seconds[contender].append(round(time.perf_counter() - begin, 4))
                    if counted is not None:
                        calls[contender].append(counted)
            for method in METHODS:
                same[method] += bool(turn) and torch.equal(texts[method], texts["Plain"])
        rows.append({"model": name, "seconds": seconds, "calls": calls, "equal_to_plain": same})
    return {
        **machine.describe_run(),
        "settings": {"prompt": PROMPT, "tokens": TOKENS, "hidden": HIDDEN, "layers": LAYERS, "sizes": SIZES},
        "rows": rows,
    }


def _theirs(model: Any, ids: Tensor, _: str) -> tuple[Tensor, None]:
    options = dict(do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS, pad_token_id=0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options), None


def _ours(model: Any, ids: Tensor, method: str) -> tuple[Tensor, int]:
    got = pass_ext.generate(model, ids, METHODS[method], max_new_tokens=TOKENS, eos_token_id=[])
    return got.sequences, got.stats.model_calls


WRITERS: dict[str, Callable[..., tuple[Tensor, int | None]]] = {"transformers": _theirs}


def render(result: dict[str, Any]) -> str:
    """The page."""
    settings, lines = result["settings"], []
    for row in result["rows"]:
        theirs = row["seconds"]["transformers"]
        cells = [row["model"], f"{settings['tokens'] / median(theirs):.1f}"]
        for method in METHODS:
            ours = row["seconds"][method]
            ratio = median(a / b for a, b in zip(theirs, ours, strict=True))
            per_call = settings["tokens"] / median(row["calls"][method])
            cells += [f"{settings['tokens'] / median(ours):.1f}", f"{ratio:.2f} ×", f"{per_call:.2f}"]
        cells.append(f"{row['equal_to_plain']['NGram']} of {len(theirs)}")
        lines.append(cells)
    heads = [
        "model",
        "transformers, tokens/s",
        *(f"{m}{x}" for m in METHODS for x in (", tokens/s", "", ", tokens a call")),
    ]
    speeds = table([*heads, "NGram's texts that are Plain's"], lines)
    return page(__file__, result, rounds=len(result["rows"][0]["seconds"]["Plain"]), speeds=speeds)


def main() -> int:
    """Entry point of `python -m benchmarks.pages.hybrid`."""
    parser = by_machine.parser_of(__doc__, ROUNDS)
    options = parser.parse_args()
    return by_machine.command("hybrid", options, lambda: measure(options.rounds), render)


if __name__ == "__main__":
    sys.exit(main())
