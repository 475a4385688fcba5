"""SmolLM2's own file with its 4 and 8 bits (``load_checkpoint``: "stored") beside its conversion to bfloat16 ("dense").

    load           seconds of the call, transformers' imports among them and torch's not, and most megabytes of a process that
                   imports, loads and ends; for "dense" with and without a kept conversion
    tokens/s       whole texts, prompts included, by Plain and PaSS with the shipped slots: medians of the rounds, the weights
                   in turn
    prompt         tokens/s of a call that reads a prompt; a long one in turn too
    products       milliseconds for weights that no cache holds, 134 million numbers of random ones: `linear_rows` in bfloat16,
                   `linear_packed` in 4 and 8 bits, in turn, medians; at one row their share of the bytes that a plain read of
                   memory takes in this time; K: as Q4_K and Q6_K, of rows of 256 numbers
    layers         milliseconds of a layer of Llama 3 8B's shapes with random weights in 4 bits, one and eight rows in turn

`python -m benchmarks.decoding.stored_weights [PART ...]` keeps each part, or those that it names, in stored-weights.json of the
machine's folder of results.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

import torch
from torch import nn

import pass_ext
from benchmarks import CORES, ROOT
from benchmarks.decoding.prompts import read_prompts
from benchmarks.decoding.steps import step_times
from benchmarks.harness import machine
from benchmarks.harness.packed_weights import packed, packed_k
from pass_ext.checkpoint import demo_model, load_checkpoint
from pass_ext.huge_pages import to_huge_pages
from pass_ext.weights.model import packed_layer

FORMS = ("stored", "dense")
PROMPTS, TOKENS, ROUNDS = 3, 64, 3
READ, LONG = 1200, 6600  # tokens of the prompts that are read
LAYERS = 3  # of Llama 3 8B's shapes: 0.4 GB
SHAPES, ROWS, NUMBERS, TURNS = ((4096, 4096), (1536, 576)), (1, 2, 4, 8, 16), 1 << 27, 7


def load(form: str) -> None:
    """Prints seconds and megabytes of a load in this process."""
    begun = time.perf_counter()
    load_checkpoint(demo_model(), torch.bfloat16, weights=form)
    seconds = time.perf_counter() - begun
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": round(seconds, 2), "megabytes": round(most)}))


def loads() -> list[dict[str, Any]]:
    """A row for each way to load, in a process of its own."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for form, kept in (("stored", ""), ("dense", "no"), ("dense", "yes")):
            command = [sys.executable, "-m", "benchmarks.decoding.stored_weights", "load", form]
            done = subprocess.run(
                command,
                env={**os.environ, "PASS_EXT_CACHE": folder},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                preexec_fn=_on_all_cores if CORES else None,
            )
            rows.append({"weights": form, "kept conversion": kept} | json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(rows[-1]))
    return rows


def texts() -> list[dict[str, Any]]:
    """A row for each form of the weights."""
    if CORES:
        _on_all_cores()
    models = {}
    for form in FORMS:
        models[form], tokenizer = load_checkpoint(demo_model(), torch.bfloat16, weights=form)
    prompts = [torch.tensor([each.ids]) for each in read_prompts("chat", tokenizer, PROMPTS)]
    long = torch.cat([torch.tensor([each.ids]) for each in read_prompts("prose", tokenizer, 64)], 1)[:, :READ]
    methods: dict[str, Any] = {"Plain": pass_ext.Plain(), "PaSS": pass_ext.PaSS("smollm2-135m-instruct")}
    rates: dict[Any, list[float]] = {}
    same = dict.fromkeys(FORMS, 0)
    for number in range(ROUNDS + 1):
        for form in FORMS:
            written: dict[str, list[Any]] = {}
            for name, method in methods.items():
                begun, tokens = time.perf_counter(), 0
                for ids in prompts:
                    result = pass_ext.generate(models[form], ids, method, max_new_tokens=TOKENS, eos_token_id=[])
                    written.setdefault(name, []).append(result.sequences)
                    tokens += TOKENS
                rates.setdefault((form, name), []).append(tokens / (time.perf_counter() - begun))
            same[form] += sum(map(torch.equal, written["Plain"], written["PaSS"]))
            begun = time.perf_counter()
            pass_ext.generate(models[form], long, max_new_tokens=1, eos_token_id=[])
            rates.setdefault((form, "prompt"), []).append(long.shape[1] / (time.perf_counter() - begun))
        print(f"round {number} of {ROUNDS}", file=sys.stderr)
    rows = []
    for form in FORMS:
        # The first round warms up.
        medians = {name: round(median(rates[form, name][1:]), 1) for name in (*methods, "prompt")}
        rows.append({"weights": form, "tokens/s": medians, "same texts": f"{same[form]} of {PROMPTS * (ROUNDS + 1)}"})
        print(json.dumps(rows[-1]))
    return rows


def prompts() -> list[dict[str, Any]]:
    """A row for each form of the weights, of a long prompt: tokens/s, the median of the rounds."""
    models = {form: load_checkpoint(demo_model(), torch.bfloat16, weights=form) for form in FORMS}
    ids = torch.cat([torch.tensor([each.ids]) for each in read_prompts("prose", models["dense"][1], 64)], 1)
    ids = ids.repeat(1, -(-LONG // ids.shape[1]))[:, :LONG]
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(ROUNDS):
        for form, (model, _) in models.items():
            begun = time.perf_counter()
            pass_ext.generate(model, ids, max_new_tokens=1, eos_token_id=[])
            seconds[form].append(time.perf_counter() - begun)
    return [{"weights": form, "tokens": LONG, "tokens/s": round(LONG / median(seconds[form]), 1)} for form in FORMS]


def layers() -> list[dict[str, Any]]:
    """A row for each number of rows: milliseconds of one of the layers, the table of 512 tokens among them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=512, tie_word_embeddings=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            weight = packed(torch.randn(layer.out_features, layer.in_features) / 64, 4)
            model.set_submodule(name, packed_layer(layer, weight, torch.bfloat16))
    for name, value in list(model.named_parameters()):
        if value.is_meta:
            place, _, last = name.rpartition(".")
            setattr(model.get_submodule(place), last, nn.Parameter(torch.ones(value.shape).bfloat16(), False))
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    found = step_times(to_huge_pages(model.eval().requires_grad_(False)), ROUNDS * TURNS)
    return [{"rows": row["rows"], "ms a layer": round(row["ms"] / LAYERS, 3)} for row in found if row["rows"] in (1, 8)]


def on_huge_pages(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """The weights as a loaded model has them."""
    return list(to_huge_pages(nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)))


def read_rate() -> float:
    """Bytes of memory per second that a plain read takes, the fastest of PyTorch's."""
    source, times = on_huge_pages([torch.ones(1 << 27)])[0], []
    for _ in range(TURNS):
        for read in (source.sum, source.max, lambda: source.dot(source)):
            begun = time.perf_counter()
            read()
            times.append(time.perf_counter() - begun)
    return source.nbytes / min(times)


def products() -> list[dict[str, Any]]:
    """A row for each shape and number of rows."""
    rows, rate = [], read_rate()
    for outputs, width in SHAPES:
        count = NUMBERS // (outputs * width)
        dense = torch.randn(outputs, width)
        each_form = {
            "bfloat16": dense.bfloat16(),
            "4 bits": packed(dense, 4),
            "4 bits, table": packed(dense, 4, torch.arange(16, dtype=torch.uint8)),
            "8 bits": packed(dense, 8),
        }
        if width % 256 == 0:
            each_form |= {"4 bits, K": packed_k(dense, 4, 32), "8 bits, K": packed_k(dense, 8, 16)}
        weights = {name: on_huge_pages([weight.clone() for _ in range(count)]) for name, weight in each_form.items()}
        for few in ROWS:
            x = torch.randn(few, width).bfloat16()
            times: dict[str, list[float]] = {name: [] for name in weights}
            for _ in range(TURNS):
                for name, each in weights.items():
                    begun = time.perf_counter()
                    for weight in each:
                        if name == "bfloat16":
                            pass_ext.layers.linear_rows(x, weight)
                        else:
                            pass_ext.layers.linear_packed(x, weight, outputs=outputs)
                    times[name].append(1e3 * (time.perf_counter() - begun))
            medians = {name: round(median(each), 2) for name, each in times.items()}
            rows.append({"weight": f"{outputs} × {width}", "rows": few, "ms": medians})
            if few == 1:
                size = {name: sum(weight.nbytes for weight in each) for name, each in weights.items()}
                rows[-1]["of read"] = {name: round(1e3 * size[name] / ms / rate, 2) for name, ms in medians.items()}
            print(json.dumps(rows[-1], ensure_ascii=False))
    return rows


def _on_all_cores() -> None:
    os.sched_setaffinity(0, CORES)  # this process is pinned to one, which a child would inherit


PARTS = {"load": loads, "texts": texts, "prompt": prompts, "products": products, "layers": layers}


def main(names: list[str]) -> None:
    """Measures these parts, or all, and keeps them beside the others."""
    file = ROOT / "benchmarks" / "results" / machine.device_slug("cpu") / "stored-weights.json"
    for name in names or PARTS:
        result = json.loads(file.read_text()) if file.exists() else {}
        run = machine.describe_run()
        result |= run | {name: {"date": run["date"], "commit": run["commit"], "rows": PARTS[name]()}}
        file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["load"] and sys.argv[2:] and sys.argv[2] in FORMS:
        load(sys.argv[2])
    else:
        main(sys.argv[1:])
