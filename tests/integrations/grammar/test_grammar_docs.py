"""docs/guide/grammar.md: its blocks run, on a small model and a small tokenizer, and their texts follow the grammars."""

import json
import re
import runpy
import sys

import pytest
from support.code_blocks import blocks_of, run_blocks
from support.generation import slots_for
from support.grammars import small_tokenizer
from support.paths import ROOT

pytest.importorskip("transformers")

from support.small_models import VOCABULARY, prompts, small_model

import pass_ext
from pass_ext.integrations.grammar import LLGuidance

PAGE = ROOT / "docs/guide/grammar.md"

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not PAGE.exists(), reason="an sdist has no docs"),
]
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["ann", "bo"]}}, "required": ["name"]}
SCHEMA |= {"additionalProperties": False}


@pytest.fixture
def names():
    model = small_model("llama", sharpness=2.0)
    return dict(
        pass_ext=pass_ext, model=model, tokenizer=small_tokenizer(), input_ids=prompts(1, 9)[0], slots=slots_for(model),
        schema=json.dumps(SCHEMA),
    )  # fmt: skip


def new_tokens(names):
    result = names["result"]
    return result.sequences[0, 9 : 9 + result.lengths[0]].tolist()


@pytest.mark.parametrize("place,library", [(0, "xgrammar"), (1, "llguidance")])
def test_the_libraries_blocks_run(names, place, library):
    pytest.importorskip(library)
    run_blocks(PAGE, blocks_of(PAGE)[place : place + 1], names)
    text = names["tokenizer"].decode(new_tokens(names), skip_special_tokens=True)
    assert json.loads(text)["name"] in ("ann", "bo") and names["result"].stats.num_accepted_tokens > 4


def test_llguidance_forces_tokens_of_a_canonical_tokenizer(names):
    """Where the schema leaves no choice of spaces."""
    llguidance, hf = pytest.importorskip("llguidance"), pytest.importorskip("llguidance.hf")
    compact = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
    grammar = LLGuidance(hf.from_tokenizer(names["tokenizer"], n_vocab=VOCABULARY), compact)
    forced = grammar.forced()
    assert names["tokenizer"].decode(forced) == '{"name":"' and all(grammar.accept(token) for token in forced)


def test_the_grammar_of_ones_own_counts_down(names):
    blocks = blocks_of(PAGE)
    assert len(blocks) == 3
    run_blocks(PAGE, blocks[2:], names)
    *numbers, end = new_tokens(names)
    assert numbers == sorted(set(numbers), reverse=True) and numbers[-1] == 3 and end == 2


def test_the_page_names_every_method_of_the_interface():
    written = re.findall(r"^\| `(\w+)", PAGE.read_text(), re.MULTILINE)
    interface = [name for name in vars(pass_ext.Grammar) if not name.startswith("_")]
    assert sorted(written) == sorted(interface)


def test_the_example_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grammar", "--new-tokens", "24"])
    runpy.run_module("examples.grammar", run_name="__main__")
    said = capsys.readouterr().out
    assert float(said.split(":")[1].split()[0]) > 2.5, "two texts, and forced tokens"
