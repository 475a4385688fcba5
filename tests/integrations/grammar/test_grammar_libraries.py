"""Grammars of xgrammar and llguidance in generate and in custom_generate, on a small model whose tokens are characters: valid
texts, the same with and without drafts, and the text of the library's own processor in transformers' loop.
"""

import json
import re

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import methods_for
from support.small_models import VOCABULARY, ragged_prompts, small_model
from transformers import LogitsProcessor

import pass_ext
from pass_ext import EarlyExitDraft, MultiCandidate, NGram, Plain, Speculative, custom_generate, generate
from pass_ext.integrations.grammar import LLGuidance, XGrammar, grammars_of

pytestmark = pytest.mark.usefixtures("one_thread")

END, MODEL_END = 0, 2
NEW = 60
# Tokens 0 to 2 are special; then one or more characters each. The model's own vocabulary has a few more.
PIECES = [
    '{"', '":', ' "', '",', "name", "age", "true", "false", "an", "ab", "\\n", '"}', " a", "12", "ame",
    *'abcdefghijklmno0123456789{}[]":, -',
]  # fmt: skip
TOKENS = ["<end>", "<pad>", "<stop>", *PIECES]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PATTERN = r"(ab|an)+-[0-9]{3}( a)?"


class Characters:
    """A tokenizer for llguidance: the longest pieces first."""

    eos_token_id, bos_token_id, special_token_ids = END, None, [0, 1, 2]
    tokens = [token.encode() for token in TOKENS] + [b""] * (VOCABULARY - len(TOKENS))

    def __call__(self, text):
        text = text.decode() if isinstance(text, bytes) else text
        ids = []
        while text:
            piece = max((piece for piece in PIECES if text.startswith(piece)), key=len, default=None)
            if piece is None:
                break
            ids.append(TOKENS.index(piece))
            text = text[len(piece) :]
        return ids


def compiled_by_xgrammar(kind):
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo(["", "", "", *PIECES], vocab_size=VOCABULARY, stop_token_ids=[END])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    if kind == "schema":
        return compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    return compiler.compile_regex(PATTERN)


def of_xgrammar(kind):
    return XGrammar(compiled_by_xgrammar(kind))


def of_llguidance(kind):
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Characters()), n_vocab=VOCABULARY)
    matcher = llguidance.LLMatcher
    grammar = matcher.grammar_from_json_schema(SCHEMA) if kind == "schema" else matcher.grammar_from_regex(PATTERN)
    return LLGuidance(tokenizer, grammar)


LIBRARIES = {"xgrammar": of_xgrammar, "llguidance": of_llguidance}


@pytest.fixture(scope="module")
def model():
    """Its distributions are not sharp, so its texts differ."""
    return small_model("llama", sharpness=2.0)


def texts(got, ids):
    return [
        row[ids.shape[1] : ids.shape[1] + count].tolist() for row, count in zip(got.sequences, got.lengths, strict=True)
    ]


def written(tokens):
    return "".join(TOKENS[token] for token in tokens if token > 2)


def check_valid(kind, tokens):
    """A text that ended is valid; one that was cut off is the beginning of a valid one."""
    assert all(2 < token < len(TOKENS) for token in tokens[:-1])
    if tokens[-1] != MODEL_END:
        assert len(tokens) == NEW
        return False
    if kind == "regex":
        assert re.fullmatch(PATTERN, written(tokens))
    else:
        value = json.loads(written(tokens))
        assert value.keys() == {"name", "age"} and len(value["name"]) <= 6 and 0 <= value["age"] <= 999
    return True


# ---- generate ----


@pytest.mark.parametrize("kind", ["schema", "regex"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_texts_are_valid_and_the_same_with_and_without_drafts(model, library, kind):
    """The model's end token is not the library's: it ends the text where the grammar is complete."""
    grammar = LIBRARIES[library](kind)
    ids, mask = ragged_prompts(5, seed=2)
    options = dict(
        max_new_tokens=NEW, attention_mask=mask, eos_token_id=MODEL_END, grammar=grammar,
        temperature=[0.0, 0.7, 1.0, 1.3, 1.0], seeds=range(5),
    )  # fmt: skip
    want = generate(model, ids, Plain(), **options)
    ended = [check_valid(kind, text) for text in texts(want, ids)]
    assert sum(ended) >= 3, ended
    draft = EarlyExitDraft(model, layers=1)
    methods = methods_for(model) | {"chain": Speculative(draft, 3), "tree": MultiCandidate(draft, (3, 2))}
    for name in ("ngram", "one pass", "one pass, deep", "one pass with ngrams", "two passes", "chain", "tree"):
        got = generate(model, ids, methods[name], **options)
        assert torch.equal(got.sequences, want.sequences), name
        assert got.stats.model_calls <= want.stats.model_calls, name


RULES = [rule for rule in pass_ext.RULES if rule != "coupled"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_rule_writes_valid_texts(model, library):
    grammar, draft = LIBRARIES[library]("schema"), EarlyExitDraft(model, layers=1)
    ids, mask = ragged_prompts(4, seed=3)
    for rule in RULES:
        replacement = rule in ("rejection_with_replacement", "kseq")
        method = Speculative(draft, 3) if rule == "block" else MultiCandidate(draft, (3, 1), replacement=replacement)
        got = generate(
            model, ids, method, max_new_tokens=NEW, attention_mask=mask, eos_token_id=MODEL_END, grammar=grammar,
            temperature=1.0, seeds=range(4), rule=rule,
        )  # fmt: skip
        ended = [check_valid("schema", text) for text in texts(got, ids)]
        assert any(ended), rule
        assert got.stats.num_accepted_tokens > 0, rule


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_grammar_walks_back_and_forth(library):
    """accept, rollback and fork against a fresh grammar that reads the same tokens once."""
    grammar, generator = LIBRARIES[library]("schema"), torch.Generator().manual_seed(1)
    words, fresh_words = torch.zeros(2, -(-VOCABULARY // 32), dtype=torch.int32)
    path = []
    for _ in range(120):
        grammar.fill_mask(words)
        allowed = [v for v in range(VOCABULARY) if words[v // 32] >> v % 32 & 1]
        assert END not in allowed and MODEL_END not in allowed
        if path and (not allowed or torch.rand((), generator=generator) < 0.4):
            count = int(torch.randint(len(path), (), generator=generator)) + 1
            grammar.rollback(count)
            del path[-count:]
        else:
            token = allowed[int(torch.randint(len(allowed), (), generator=generator))]
            forbidden = next(v for v in range(3, VOCABULARY) if v not in allowed)
            assert not grammar.accept(forbidden) and not grammar.accept(END) and grammar.accept(token)
            path.append(token)
        fresh = LIBRARIES[library]("schema")
        assert all(fresh.accept(token) for token in path)
        copied = grammar.fork()
        assert grammar.may_end == fresh.may_end == copied.may_end
        copied.fill_mask(words)
        fresh.fill_mask(fresh_words)
        assert torch.equal(words, fresh_words)
        assert list(grammar.forced()) == list(fresh.forced())
        assert all(0 <= token < VOCABULARY for token in grammar.forced())


def test_forced_tokens_are_drafted(model):
    """The keys of a schema cost fewer calls than tokens; n-grams of nine tokens find nothing."""
    ids, mask = ragged_prompts(1)
    got = generate(
        model,
        ids,
        NGram(longest=9, shortest=9),
        max_new_tokens=NEW,
        attention_mask=mask,
        eos_token_id=MODEL_END,
        grammar=of_xgrammar("schema"),
    )
    assert got.stats.model_calls < got.stats.tokens - 4


def test_a_tokenizer_cuts_what_xgrammar_forces():
    compiled = compiled_by_xgrammar("schema")
    one_by_one = XGrammar(compiled, lambda text: [TOKENS.index(letter) for letter in text])
    assert [TOKENS[token] for token in XGrammar(compiled).forced()] == ['{"', "name", '":', ' "']
    assert written(one_by_one.forced()) == '{"name": "' and len(one_by_one.forced()) == 10
    assert XGrammar(one_by_one._matcher).forced() == (), "a matcher does not tell its vocabulary"


# ---- refusals ----


def test_refusals(model):
    xgrammar, llguidance = pytest.importorskip("xgrammar"), pytest.importorskip("llguidance")
    with pytest.raises(TypeError, match=r"XGrammar: grammar must be an xgrammar.CompiledGrammar .* got builtins.str"):
        XGrammar("root ::= [0-9]")
    with pytest.raises(TypeError, match=r"LLGuidance: tokenizer must be .* got builtins.str"):
        LLGuidance("gpt2", "")
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Characters()), n_vocab=VOCABULARY)
    with pytest.raises(ValueError, match="LLGuidance: grammar must be one that llguidance can follow, got"):
        LLGuidance(tokenizer, "start: (")
    info = xgrammar.TokenizerInfo(["", "", "", *PIECES], vocab_size=200, stop_token_ids=[END])
    wide = XGrammar(xgrammar.GrammarCompiler(info, max_threads=1).compile_regex("a+"))
    with pytest.raises(ValueError, match=r"XGrammar: grammar must be compiled with .* 97 to 128 tokens"):
        generate(model, torch.tensor([[3, 4]]), max_new_tokens=3, grammar=wide)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Wide()), n_vocab=200)
    with pytest.raises(ValueError, match=r"LLGuidance: tokenizer must have .* 97 to 128 tokens, got 200"):
        generate(model, torch.tensor([[3, 4]]), max_new_tokens=3, grammar=LLGuidance(tokenizer, "start: /a+/"))


class Wide(Characters):
    tokens = Characters.tokens + [b""] * (200 - VOCABULARY)


# ---- transformers' processors ----


def transformers_text(model, ids, mask, processor, **options):
    return model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=END, pad_token_id=1,
        logits_processor=[processor], **options,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["schema", "regex"])
def test_xgrammars_processor_becomes_a_grammar(model, kind):
    """transformers' greedy text with the processor itself; then by custom_generate, one grammar for all or one for each."""
    hf = pytest.importorskip("xgrammar.contrib.hf")
    compiled, (ids, mask) = compiled_by_xgrammar(kind), ragged_prompts(3, seed=7)
    want = transformers_text(model, ids, mask, hf.LogitsProcessor(compiled), do_sample=False)
    used = hf.LogitsProcessor(compiled)
    used(ids, torch.zeros(3, VOCABULARY))
    for processor in (hf.LogitsProcessor(compiled), hf.LogitsProcessor([compiled] * 3), used):
        for method in (Plain(), NGram(shortest=1), methods_for(model)["one pass"]):
            loop = custom_generate(method)
            got = transformers_text(model, ids, mask, processor, do_sample=False, custom_generate=loop)
            assert torch.equal(got, want)
            assert method == Plain() or loop.stats.num_accepted_tokens > 0
    sampled = dict(do_sample=True, temperature=1.2, top_k=20, seeds=3)
    one, other = (
        transformers_text(
            model, ids, mask, hf.LogitsProcessor(compiled), custom_generate=custom_generate(method), **sampled
        )
        for method in (Plain(), NGram(shortest=1))
    )
    assert torch.equal(one, other)


def test_each_text_follows_its_own_grammar(model):
    hf = pytest.importorskip("xgrammar.contrib.hf")
    ids, mask = ragged_prompts(2, seed=7)
    processor = hf.LogitsProcessor([compiled_by_xgrammar("schema"), compiled_by_xgrammar("regex")])
    got = transformers_text(model, ids, mask, processor, do_sample=False, custom_generate=custom_generate())
    first, second = (written(row[ids.shape[1] :].tolist()) for row in got)
    assert first.startswith('{"name": "') and re.match("(ab|an)+", second)
    with pytest.raises(ValueError, match="one grammar, or one for each of the 3 texts, got 2"):
        transformers_text(model, *ragged_prompts(3), processor, custom_generate=custom_generate())
    with pytest.raises(
        ValueError, match=r"one grammar at most, got a second one, xgrammar\.contrib\.hf\.LogitsProcessor"
    ):
        grammars_of([processor, processor], 2)


def stand_in(module, name, **attributes):
    """An object like outlines' processors, which hold the parts of a grammar."""
    processor = type(name, (), {"__module__": module, "__call__": lambda self, ids, scores: scores})()
    for attribute, value in attributes.items():
        setattr(processor, attribute, value)
    return processor


def test_outlines_processors_become_grammars(model):
    grammar = of_llguidance("regex")
    llguidance = pytest.importorskip("llguidance")
    processors = [
        stand_in("outlines.backends.xgrammar", "XGrammarLogitsProcessor", compiled_grammar=compiled_by_xgrammar("regex")),
        stand_in(
            "outlines.backends.llguidance", "LLGuidanceLogitsProcessor", llg_tokenizer=grammar._tokenizer,
            grammar=llguidance.LLMatcher.grammar_from_regex(PATTERN),
        ),
    ]  # fmt: skip
    ids, mask = ragged_prompts(2)
    for processor in processors:
        assert [type(made) for made in grammars_of([processor], 2)[0]] in ([XGrammar] * 2, [LLGuidance] * 2)
        got = transformers_text(model, ids, mask, processor, do_sample=False, custom_generate=custom_generate(NGram()))
        for row in got[:, ids.shape[1] :].tolist():
            assert re.match("(ab|an)+", written(row))


def test_other_processors_stay_processors():
    class Own(LogitsProcessor):
        pass

    processor = Own()
    assert grammars_of([processor], 2) == (None, [processor]) and grammars_of([], 1) == (None, [])


def hand_written(matcher):
    class Own(LogitsProcessor):
        def __init__(self):
            self.matchers = [matcher]

        def __call__(self, ids, scores):
            raise AssertionError

    return Own()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_processor_of_ones_own_that_holds_a_matcher_is_refused(model, library):
    """An error with four facts, before decoding starts, instead of the processor's own AssertionError."""
    processor = hand_written(LIBRARIES[library]("regex")._matcher)
    message = r"generate: logits_processor must compute .* got .*Own, which keeps state .* give its grammar as grammar="
    for run in (
        lambda: transformers_text(model, *ragged_prompts(2), processor, custom_generate=custom_generate(NGram())),
        lambda: generate(model, ragged_prompts(2)[0], NGram(), max_new_tokens=3, logits_processor=processor),
    ):
        with pytest.raises(ValueError, match=message):
            run()
