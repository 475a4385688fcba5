"""Every causal language model of transformers, tiny and random: each method writes transformers' own text, or refuses with a
sentence that names model and reason. Ten families always, all with the slow tests. The committed page shows the result.
"""

import shutil
import sys

import pytest
import torch

pytest.importorskip("transformers")

from support.paths import ROOT

from benchmarks.architectures import __main__ as architectures
from benchmarks.architectures.__main__ import NEW, RESULT, SAME, WAYS, judged
from benchmarks.architectures.models import NOT_TRIED, SMALL_HEADS_ONLY, model_types, tiny_config, tiny_model
from benchmarks.architectures.table import versions
from pass_ext import NGram, Plain, generate

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "gemma2", "gemma3_text", "phi3", "gpt2", "olmo2")
ALL = [pytest.param(name, marks=[] if name in FAMILIES else pytest.mark.slow) for name in model_types()]


@pytest.fixture(scope="module")
def result():
    return architectures.committed_result(ROOT)


def kinds(line):
    """The outcomes of a line without their reasons."""
    return {way: line[way].partition(":")[0] for way in (*WAYS, "early exit", "way") if way in line}


@pytest.mark.parametrize("architecture", ALL)
def test_transformers_own_text_or_a_refusal(architecture, result):
    line = judged(architecture)
    assert ("not tried" in line) == (architecture in NOT_TRIED), line
    wrong = {way: line[way] for way in WAYS if architectures.is_wrong(line, way)}
    assert not wrong
    assert architecture not in FAMILIES or [line[way] for way in WAYS] == [SAME] * 3
    assert architecture not in FAMILIES or line["different rows"] == len(architectures.LENGTHS), (
        "equal texts for different prompts prove nothing"
    )
    if result["versions"]["transformers"] == versions()["transformers"]:
        shown = next(row for row in result["rows"] if row["architecture"] == architecture)
        assert kinds(line) == kinds(shown), "the page shows another outcome: judge it again"


def kinds_of_layers(config):
    """By the name of a list with an entry for each layer: its kinds, in words or as switches."""
    layers = getattr(config, "num_hidden_layers", None)
    lists = ((name, value) for name, value in vars(config).items() if isinstance(value, list) and len(value) == layers)
    return {name: set(value) for name, value in lists if all(isinstance(x, str) or x in (0, 1) for x in value)}


def test_a_tiny_model_has_every_kind_of_layer_of_its_default_config():
    from transformers import CONFIG_MAPPING

    lacking = {}
    for architecture in set(model_types()) - set(NOT_TRIED):
        whole = kinds_of_layers(CONFIG_MAPPING[architecture]().get_text_config(decoder=True))
        tiny = kinds_of_layers(tiny_config(architecture).get_text_config(decoder=True))
        lacks = {name: missing for name, kinds in whole.items() if (missing := kinds - tiny.get(name, set()))}
        if lacks:
            lacking[architecture] = lacks
    assert not lacking


# dots3_note_text has latents of 512 + 64 numbers and of 1024 + 64.
REAL_HEADS = [
    pytest.param(name, marks=[] if name in ("llama", "dots3_note_text") else pytest.mark.slow) for name in model_types()
]


@pytest.mark.parametrize("architecture", REAL_HEADS)
def test_heads_as_wide_as_in_the_default_config(architecture, result):
    shown = next((row for row in result["rows"] if row["architecture"] == architecture), {})
    if shown.get("generate") != SAME:
        pytest.skip("the page has no text of it")
    if architecture in SMALL_HEADS_ONLY:
        pytest.skip(SMALL_HEADS_ONLY[architecture])
    model = tiny_model(architecture, real_heads=True)
    texts = architectures.Texts(model)
    for method in (Plain(), NGram(shortest=1)):
        got = generate(model, texts.ids, method, max_new_tokens=NEW, attention_mask=texts.mask, eos_token_id=[])
        assert texts.difference(got.sequences[:, texts.ids.shape[1] :]) is None, method


# ---- faults that the sweep finds ----


def test_a_missing_window_is_found(monkeypatch):
    from pass_ext.decoding.models import layer_attention

    attention_tree = layer_attention.attention_tree
    monkeypatch.setattr(
        layer_attention,
        "attention_tree",
        lambda *tensors, **options: attention_tree(*tensors, **{**options, "window": -1}),
    )
    line = judged("mistral")
    assert line["generate"].startswith("another text by Plain: row 0"), line
    assert line["custom_generate"].startswith("another text: row 0"), line
    assert all(architectures.is_wrong(line, way) for way in WAYS[:2]) and line["attn_implementation"] == SAME


def test_slightly_different_logits_are_found(monkeypatch):
    from pass_ext.decoding.models import layer_attention

    attention_tree = layer_attention.attention_tree

    def scaled(*tensors, **options):
        out, lse = attention_tree(*tensors, **options)
        return out * 1.002, lse

    monkeypatch.setattr(layer_attention, "attention_tree", scaled)
    assert "other logits by Plain" in judged("llama")["generate"]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("llama has no head"), "refused: llama has no head"),
        (ValueError("LlamaAttention is not causal"), "refused: LlamaAttention is not causal"),
        (ValueError("it has no head"), "fails: ValueError: it has no head"),
        (AssertionError("llama"), "fails: AssertionError: llama"),
        (RuntimeError("llama: view size"), "fails: RuntimeError: llama: view size"),
    ],
)
def test_refusals_and_failures(error, outcome):
    def raises():
        raise error

    assert architectures._outcome(tiny_model("llama"), raises) == outcome


def test_only_ties_are_forgiven(monkeypatch):
    """A token as likely as the expected one is accepted, no other."""
    texts = architectures.Texts(tiny_model("llama"))
    assert texts.difference(texts.expected) is None and texts.ties == 0
    got = texts.expected.clone()
    got[1, 3:] = 5
    logits = texts.logits(1)
    assert int(logits[architectures.LENGTHS[1] + 2].argmax()) == int(texts.expected[1, 3]), "the row that wrote it"
    assert texts.difference(got).startswith("row 1, token 3: 5, transformers writes")
    best = logits[architectures.LENGTHS[1] + 2]
    best[5] = best.max() - 1e-5
    monkeypatch.setattr(texts, "logits", lambda row: logits)
    assert texts.difference(got) is None and texts.ties == 1
    got[1, 3] = 6
    assert texts.difference(got) is not None, "a tie, but of two other tokens"


# ---- the page ----


def check(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["architectures", "--check", "--root", str(root)])
        return architectures.main()


def test_the_page_shows_the_committed_result(tmp_path):
    assert check(ROOT) == 0
    for file in (RESULT, architectures.PAGE):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    page = tmp_path / architectures.PAGE
    page.write_text(page.read_text().replace("| llama | yes |", "| llama | no |"))
    assert check(tmp_path) == 1


def release(found):
    return tuple(map(int, found["transformers"].split(".")[:2]))


def test_every_architecture_is_in_the_table(result):
    """An older transformers may have some that it has given up since."""
    known = [row["architecture"] for row in result["rows"]]
    if release(versions()) >= release(result["versions"]):
        new = sorted(set(model_types()) - set(known))
        assert not new, f"judge them: python -m benchmarks.architectures {' '.join(new)}"
    assert known == sorted(known)
    assert {row["architecture"] for row in result["rows"] if "not tried" in row} == set(NOT_TRIED)


def test_models_are_tiny():
    assert sum(parameter.numel() for parameter in tiny_model("llama").parameters()) < 200_000
    assert torch.equal(tiny_model("llama").lm_head.weight, tiny_model("llama").lm_head.weight)
