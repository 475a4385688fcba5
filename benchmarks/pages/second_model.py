"""A second real model: what an hour of training gave Gemma 3 270M, on prompts that the training held out.

`python -m benchmarks.pages.second_model --model GGUF --run FOLDER` takes the result and the held-out prompts of
`python -m pass_ext train` from FOLDER, counts tokens per call with slots before and after training, and writes
benchmarks/results/second-model.json and the picture of docs/guide/training.md. Nothing of the model or of its texts is kept.
Without options it draws the picture again; `--check` compares it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import pass_ext
from benchmarks import ROOT
from benchmarks.harness import machine, picture
from pass_ext.checkpoint import load_checkpoint

RESULT = ROOT / "benchmarks/results/second-model.json"
PICTURE = ROOT / "docs/guide/training-curve.svg"
TOKENS, PROMPTS, ROWS = 32, 6, 8
"""Prompts are of each kind."""
KEPT = ("command", "date", "machine", "versions", "parameters", "data", "steps", "seconds", "evaluation")
WIDTH = 25  # steps of the running mean


def measure(model_file: str, run: Path) -> dict[str, Any]:
    """Tokens per call, prompts' calls included, by kind of prompt, temperature and method."""
    model, _ = load_checkpoint(model_file, torch.bfloat16, weights="dense")
    embed = model.get_input_embeddings()
    trained = pass_ext.LookaheadEmbedding.load(run / "lookahead.safetensors", table=embed.weight)
    torch.manual_seed(0)
    fresh = pass_ext.LookaheadEmbedding.from_table(trained.num_lookahead, embed.weight, rank=trained.rank)
    with torch.no_grad():  # at what the first layer reads
        fresh.weight.mul_(getattr(embed, "embed_scale", 1.0))
    methods = {
        "prompt lookup": pass_ext.NGram(),
        "slots before training": pass_ext.PaSS(fresh, rows=ROWS),
        "slots after training": pass_ext.PaSS(trained, rows=ROWS),
    }
    lines = (run / "held-out.jsonl").read_text().splitlines()[1:]
    samples = [sample for line in lines for sample in json.loads(line)]
    found: dict[str, Any] = {}
    for kind in sorted({sample["kind"] for sample in samples}):
        prompts = [sample["ids"][: sample["prompt_tokens"]] for sample in samples if sample["kind"] == kind][:PROMPTS]
        for temperature in (0.0, 0.8):
            for name, method in methods.items():
                tokens = calls = 0
                for seed, prompt in enumerate(prompts):
                    how = dict(max_new_tokens=TOKENS, temperature=temperature, seeds=seed, eos_token_id=[])
                    stats = pass_ext.generate(model, torch.tensor([prompt]), method, **how).stats
                    tokens, calls = tokens + stats.tokens, calls + stats.model_calls
                found.setdefault(kind, {}).setdefault(f"{temperature}", {})[name] = round(tokens / calls, 3)
                print(kind, temperature, name, found[kind][f"{temperature}"][name], flush=True)
    record = json.loads((run / "lookahead.json").read_text())
    return {
        **{name: record[name] for name in KEPT},
        "command": shlex.join(
            Path(word).name if word.startswith("/") else word for word in shlex.split(record["command"])
        ),
        "losses": record["losses"],
        "tokens_per_call": found,
        "prompts": len(prompts),
        "new_tokens": TOKENS,
        "rows": ROWS,
        "measured": {"date": machine.now(), "commit": machine.commit()},
    }


def draw(path: Path, result: dict[str, Any]) -> None:
    """The loss of every step and its running mean, beside tokens per call before and after."""
    picture.save(path, lambda: _figure(result), title="A run of training", story=story(result))


def story(result: dict[str, Any]) -> dict[str, Any]:
    """The data that the picture shows."""
    return {name: result[name] for name in ("losses", "tokens_per_call")}


def _figure(result: dict[str, Any]) -> Any:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 3.4), layout="constrained")
    losses = result["losses"]
    means = [sum(losses[max(0, i - WIDTH + 1) : i + 1]) / min(i + 1, WIDTH) for i in range(len(losses))]
    steps = range(1, len(losses) + 1)
    left.plot(steps, losses, color="0.8", linewidth=0.8, label="each step")
    left.plot(steps, means, color="#2f6fb3", label=f"mean of {WIDTH}")
    left.set(xlabel="step", ylabel="KL(model ‖ slots)")
    left.legend(frameon=False)
    groups = [(kind, t) for kind, by_heat in result["tokens_per_call"].items() for t in by_heat]
    names = list(result["tokens_per_call"][groups[0][0]][groups[0][1]])
    for number, (name, colour) in enumerate(zip(names, ("0.8", "#e0a860", "#2f6fb3"), strict=True)):
        heights = [result["tokens_per_call"][kind][t][name] for kind, t in groups]
        places = [i + 0.27 * (number - 1) for i in range(len(groups))]
        right.bar(places, heights, 0.25, color=colour, label=name)
    right.set_xticks(range(len(groups)), [f"{kind}\n{'greedy' if t == '0.0' else f'T {t}'}" for kind, t in groups])
    right.set(ylabel="tokens per call", ylim=(1, None))
    right.legend(frameon=False, fontsize=8)
    return figure


def main() -> int:
    """Entry point of `python -m benchmarks.pages.second_model`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="GGUF")
    parser.add_argument("--run", type=Path, metavar="FOLDER")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if (options.model is None) != (options.run is None):
        parser.error("--model and --run belong together")
    if options.model is not None:
        RESULT.write_text(json.dumps(measure(options.model, options.run), indent=1) + "\n")
    result = json.loads(RESULT.read_text())
    if options.check:
        right = picture.tells(PICTURE, story(result)) and picture.is_redrawn(PICTURE, lambda path: draw(path, result))
        print(f"{PICTURE} {'shows' if right else 'does not show'} {RESULT}")
        return 0 if right else 1
    draw(PICTURE, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
