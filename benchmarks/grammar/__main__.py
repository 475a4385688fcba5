"""Texts under grammars of xgrammar and llguidance, by every method: valid, the same for a seed, calls and seconds.

    python -m benchmarks.grammar

Needs `pip install -e ".[hf,bench,grammar]"` and the demo's model. Writes results/<device>/grammar.json and grammar.md,
in float32 grammar-float32.json and its page; `--render` writes the pages alone, `--check` compares them.
"""

import argparse
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import ROOT
from benchmarks.grammar import page
from benchmarks.grammar.tasks import TASKS, Task
from benchmarks.grammar.timed import Clock, Timed
from benchmarks.harness import by_machine, machine
from benchmarks.harness.results import FORMAT, save
from pass_ext import Grammar, LookaheadEmbedding, NGram, PaSS, Plain, generate
from pass_ext.checkpoint import demo_model, load_checkpoint
from pass_ext.integrations.grammar import LLGuidance, XGrammar

SLOTS = "smollm2-135m-instruct-slots"
TEMPERATURES = (0.0, 0.8)


def grammars(tokenizer: Any, vocabulary: int) -> dict[str, dict[str, Grammar]]:
    """Library -> task -> grammar. JSON without spaces that the model could choose."""
    import llguidance
    import llguidance.hf
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
    compiler, matcher = xgrammar.GrammarCompiler(info), llguidance.LLMatcher
    of_llguidance = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary)

    def by_xgrammar(task: Task) -> Grammar:
        if task.pattern:
            compiled = compiler.compile_regex(task.pattern)
        else:
            compiled = compiler.compile_json_schema(json.dumps(task.schema), any_whitespace=False)
        return XGrammar(compiled, lambda text: tokenizer.encode(text, add_special_tokens=False))

    def by_llguidance(task: Task) -> Grammar:
        if task.pattern:
            return LLGuidance(of_llguidance, matcher.grammar_from_regex(task.pattern))
        options = {"whitespace_flexible": False}
        return LLGuidance(of_llguidance, matcher.grammar_from_json_schema(task.schema, overrides=options))

    makers = {"xgrammar": by_xgrammar, "llguidance": by_llguidance}
    return {library: {task.name: make(task) for task in TASKS} for library, make in makers.items()}


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Writes every text and returns the result."""
    dtype = getattr(torch, options.dtype)
    model, tokenizer = load_checkpoint(options.model, dtype, weights="dense")
    slots = LookaheadEmbedding.from_pretrained(SLOTS)
    methods = {
        page.PLAIN: Plain(),
        "forced tokens alone": NGram(longest=64, shortest=64),
        "NGram": NGram(),
        "PaSS, without recall": PaSS(slots, recall=False),
        "PaSS, one pass": PaSS(slots),
        "PaSS, one pass + NGram": PaSS(slots, ngram=NGram()),
    }
    libraries = grammars(tokenizer, model.config.vocab_size)
    rows: list[dict[str, Any]] = []
    for temperature in options.temperatures:
        for library, by_task in libraries.items():
            for task in TASKS:
                for place, prompt in enumerate(task.prompts[: options.prompts]):
                    messages = [{"role": "user", "content": prompt}]
                    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
                    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
                    order = list(methods)[:: 1 if place % 2 == 0 else -1]
                    if not rows:  # the first calls load kernels and measure step times
                        for method in methods.values():
                            generate(model, ids, method, max_new_tokens=16, grammar=by_task[task.name])
                    for name in order:
                        clock = Clock()
                        got = generate(
                            model, ids, methods[name], max_new_tokens=options.length, temperature=temperature, seeds=place,
                            grammar=Timed(by_task[task.name], clock),
                        )  # fmt: skip
                        tokens = got.sequences[0, ids.shape[1] :].tolist()
                        written = tokenizer.decode(tokens, skip_special_tokens=True)
                        rows.append(
                            {
                                "library": library,
                                "temperature": temperature,
                                "task": task.name,
                                "prompt": f"{task.name} {place}",
                                "method": name,
                                "valid": task.is_valid(written),
                                "calls": got.stats.model_calls,
                                "drafted": got.stats.num_draft_tokens,
                                "accepted": got.stats.num_accepted_tokens,
                                "seconds": round(got.stats.seconds, 4),
                                "grammar_seconds": round(clock.seconds, 6),
                                "masks": clock.masks,
                                "tokens": tokens,
                            }
                        )
                    console.print(f"{library}, {temperature}, {task.name} {place}: {written}")
    return {
        "format": FORMAT,
        "benchmark": "grammar",
        "date": machine.now(),
        "commit": machine.commit(),
        "machine": machine.describe_machine(),
        "settings": {
            "model": Path(options.model).stem,
            "dtype": options.dtype,
            "length": options.length,
            "versions": {name: version(name) for name in ("xgrammar", "llguidance", "torch", "transformers")},
        },
        "rows": rows,
    }


def main() -> int:
    """Entry point of `python -m benchmarks.grammar`."""
    parser = by_machine.parser_of(__doc__)
    parser.add_argument("--model", help="GGUF file or folder; default: the demo's model")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--length", type=int, default=200, help="the most tokens of a text")
    parser.add_argument("--prompts", type=int, default=4, help="of each task")
    parser.add_argument("--temperatures", type=float, nargs="+", default=list(TEMPERATURES))
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("PASS_EXT_OUT", ROOT / "benchmarks" / "results"))
    )
    options = parser.parse_args()
    if options.render or options.check:
        wrong = by_machine.write_pages("grammar*", page.render, check=options.check)
        return by_machine.say(wrong, "benchmarks.grammar --render")
    if options.model is None:
        options.model = str(demo_model())
    result = measure(options, Console())
    name = "grammar.json" if options.dtype == "bfloat16" else f"grammar-{options.dtype}.json"
    file = options.out / machine.device_slug("cpu") / name
    save(result, file)
    file.with_suffix(".md").write_text(page.render(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
