"""One version of pass_ext in a process of its own: writes the texts that it is asked for.

    {"case": {...}}  ->  {"seconds": s, "texts": [[ids]], "calls": n}

Runs inside the checkout that it measures, by that checkout's public names alone, and imports nothing of benchmarks.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import pass_ext

NAME = "smollm2-135m-instruct"


def first_shipped(*names):
    """The first of these files that this version of the package has: one with adapters had a longer name once."""
    files = {path.stem for path in Path(pass_ext.modules.files.PRETRAINED).glob("*.safetensors")}
    return pass_ext.PaSS(pass_ext.LookaheadEmbedding.from_pretrained(next(name for name in names if name in files)))


METHODS = {
    "Plain": lambda: pass_ext.Plain(),
    "NGram": lambda: pass_ext.NGram(),
    "PaSS": lambda: first_shipped(f"{NAME}-slots", NAME),
    "PaSS, adapters": lambda: first_shipped(f"{NAME}-adapters", NAME),
}


def json_grammar(tokenizer, vocabulary, schema):
    """The schema's grammar, without spaces that the model could choose."""
    import xgrammar

    from pass_ext.integrations.grammar import XGrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema), any_whitespace=False)
    return XGrammar(compiled, lambda text: tokenizer.encode(text, add_special_tokens=False))


def main() -> None:
    """Answers requests until the input ends."""
    with os.fdopen(os.dup(1), "w", buffering=1) as pipe:
        os.dup2(2, 1)
        folder = sys.argv[1]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        methods = {name: make() for name, make in METHODS.items()}
        pipe.write(json.dumps({"package": pass_ext.__file__}) + "\n")
        for line in sys.stdin:
            case = json.loads(line)["case"]
            longest = max(map(len, case["prompts"]))
            padding = [longest - len(prompt) for prompt in case["prompts"]]
            ids = torch.tensor([[0] * n + prompt for n, prompt in zip(padding, case["prompts"], strict=True)])
            mask = torch.tensor(
                [[0] * n + [1] * len(prompt) for n, prompt in zip(padding, case["prompts"], strict=True)]
            )
            options = {"attention_mask": mask, "max_new_tokens": case["tokens"], "temperature": case["temperature"]}
            if case["temperature"]:
                options["seeds"] = list(range(len(case["prompts"])))
            if case["schema"]:
                options["grammar"] = json_grammar(tokenizer, model.config.vocab_size, case["schema"])
            else:
                options["eos_token_id"] = []
            got = pass_ext.generate(model, ids, methods[case["method"]], **options)
            texts = [row[longest : longest + n].tolist() for row, n in zip(got.sequences, got.lengths, strict=True)]
            answer = {"seconds": got.stats.seconds, "texts": texts, "calls": got.stats.model_calls}
            pipe.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
