"""Texts that follow a grammar: python examples/grammar.py [--library xgrammar|llguidance --model NAME].

Without a library the grammar is one of your own: texts of brackets that close in the right order, which no regular expression
describes. The decoder comes from plain_decoder.py. With a library a model writes a JSON object by a schema. Drafts are made and
judged under the grammar's masks, tokens that it forces are drafted, and the text is that of one token per call.
"""

import argparse
import json

import torch

import pass_ext
from pass_ext.integrations.grammar import allow_tokens

if __package__:
    from examples.plain_decoder import VOCABULARY, Decoder
else:
    from plain_decoder import VOCABULARY, Decoder

PAIRS = {10: 20, 11: 21, 12: 22}
"""Tokens that open -> tokens that close."""
END = 2


class Brackets(pass_ext.Grammar):
    """Texts of brackets, at most ``deepest`` inside each other, each closed by its partner."""

    def __init__(self, deepest):
        self.deepest = deepest
        self.places = [()]  # the brackets that are open, after each accepted token

    def allowed(self):
        """The tokens that may follow."""
        still_open = self.places[-1]
        opening = list(PAIRS) if len(still_open) < self.deepest else []
        return opening + ([PAIRS[still_open[-1]]] if still_open else [])

    def accept(self, token):
        if token not in self.allowed():
            return False
        still_open = self.places[-1]
        self.places.append((*still_open, token) if token in PAIRS else still_open[:-1])
        return True

    def rollback(self, count):
        del self.places[-count:]

    def fill_mask(self, words):
        allow_tokens(words, self.allowed())

    @property
    def may_end(self):
        return len(self.places) > 1 and not self.places[-1]


def with_a_grammar_of_your_own(device, new_tokens):
    """Two prompts, greedy and sampled, each with a grammar of its own."""
    torch.manual_seed(0)
    model = Decoder().requires_grad_(False).to(device)
    prompts = torch.randint(VOCABULARY, (2, 16), device=device)
    options = dict(
        max_new_tokens=new_tokens, temperature=[0.0, 1.0], seeds=[1, 2], eos_token_id=END,
        grammar=[Brackets(deepest=1), Brackets(deepest=3)],
    )  # fmt: skip
    result = pass_ext.generate(model, prompts, pass_ext.NGram(shortest=1), **options)
    plain = pass_ext.generate(model, prompts, pass_ext.Plain(), **options)
    assert torch.equal(result.sequences, plain.sequences), "the texts differ"
    for row, length, grammar in zip(result.sequences, result.lengths, options["grammar"], strict=True):
        text = [token for token in row[16 : 16 + length].tolist() if token != END]
        assert all(grammar.accept(token) for token in text), "the text does not follow the grammar"
    return result.stats


def with_a_library(library, name, new_tokens):
    """A JSON object by a schema."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pass_ext.integrations.grammar import LLGuidance, XGrammar

    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
    fields = {"city": {"type": "string", "maxLength": 30}, "inhabitants": {"type": "integer"}}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    if library == "xgrammar":
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
        grammar = XGrammar(xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema)))
    else:
        import llguidance
        import llguidance.hf

        of_model = llguidance.hf.from_tokenizer(tokenizer, n_vocab=model.config.vocab_size)
        grammar = LLGuidance(of_model, llguidance.LLMatcher.grammar_from_json_schema(schema))
    ids = tokenizer("The largest city of the country, as JSON: ", return_tensors="pt").input_ids
    result = pass_ext.generate(model, ids, pass_ext.NGram(), max_new_tokens=new_tokens, grammar=grammar)
    print(tokenizer.decode(result.sequences[0, ids.shape[1] :], skip_special_tokens=True))
    return result.stats


def main():
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--library", choices=["xgrammar", "llguidance"])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="name or folder, for a library")
    options = parser.parse_args()
    if options.library:
        stats = with_a_library(options.library, options.model, options.new_tokens)
    else:
        stats = with_a_grammar_of_your_own(options.device, options.new_tokens)
    print(f"under the grammar: {stats.tokens_per_call:.2f} tokens per call")


if __name__ == "__main__":
    main()
