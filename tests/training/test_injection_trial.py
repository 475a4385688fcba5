"""The trial of hidden states for look-ahead slots: groups against an ordinary forward, training, its sums and its table."""

import dataclasses
import json
import math
import sys

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from support.paths import ROOT
from support.training_models import counting, tiny_llama

sys.path.append(str(ROOT))  # for benchmarks; at the end, so that an installed pass_ext stays

from benchmarks.harness.markdown import has_part
from benchmarks.pages.by_machine import RESULTS
from benchmarks.pages.injection import __main__ as injection
from benchmarks.pages.injection.hidden import HiddenInjection
from benchmarks.pages.injection.page import NAME, PAGE, render
from benchmarks.pages.injection.summary import summary
from benchmarks.pages.injection.trial import InjectionTrainer, Trial, attached, run_trial
from benchmarks.pages.lookahead.slots import Text
from pass_ext import LookaheadEmbedding
from pass_ext.training.common.frozen_model import text_rows
from pass_ext.training.common.windows import Windows
from pass_ext.training.lookahead.forward import slot_rows

pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="an sdist has no results")
SLOTS, DIM = 3, 32


def setting(rank, layers=(0, 1)):
    """A model of two layers, slots with vectors per layer, and an injection away from zero."""
    model = tiny_llama()
    torch.manual_seed(2)
    embedding = LookaheadEmbedding.from_table(SLOTS, model.get_input_embeddings().weight, deep_layers=2)
    made = HiddenInjection(layers, SLOTS, DIM, rank)
    with torch.no_grad():
        for parameter in [embedding.deep, *made.up.parameters()]:
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return model, embedding, made


def ordinary_rows(model, embedding, made, text, anchor):
    """The slots' last hidden states of one causal forward over [text up to the anchor, slots], by the formula."""
    table = model.get_input_embeddings().weight
    hooks = []
    for number, layer in enumerate(model.model.layers):

        def add(_, x, number=number):
            up = made.up[str(number)]
            down = made.down[str(number)] if str(number) in made.down else torch.eye(DIM)
            state = x[0][0, anchor]
            term = torch.stack([up[slot] @ (down @ state) for slot in range(SLOTS)])
            return (x[0] + F.pad(term + embedding.deep[number], (0, 0, anchor + 1, 0)), *x[1:])

        hooks.append(layer.register_forward_pre_hook(add))
    rows = torch.cat([table[text[: anchor + 1]], embedding.weight])[None]
    hidden = model.model(inputs_embeds=rows).last_hidden_state[0, anchor + 1 :]
    for hook in hooks:
        hook.remove()
    return hidden


def grouped_rows(model, embedding, made, ids, anchors):
    with made.attached(model):
        text, past = text_rows(model, ids)
        return text, slot_rows(model, embedding, anchors, past)


IDS = torch.arange(2 * 12).reshape(2, 12) * 7 % 90
ANCHORS = torch.tensor([[1, 4, 6], [2, 3, 8]])


def farthest(model, embedding, made, rows):
    """The largest difference of groups' rows to ordinary forwards."""
    return max(
        (rows[b, a] - ordinary_rows(model, embedding, made, IDS[b], int(anchor))).abs().max().item()
        for b, anchors in enumerate(ANCHORS)
        for a, anchor in enumerate(anchors)
    )


@pytest.mark.parametrize("rank", [4, None], ids=["low rank", "full"])
def test_groups_get_the_rows_of_an_ordinary_forward(rank):
    model, embedding, made = setting(rank)
    plain, _ = text_rows(model, IDS)
    text, rows = grouped_rows(model, embedding, made, IDS, ANCHORS)
    assert torch.equal(text, plain), "rows of tokens stay as they are"
    assert farthest(model, embedding, made, rows) < 2e-5
    after = slot_rows(model, embedding, ANCHORS, text_rows(model, IDS)[1])
    assert (after - rows).abs().max() > 0.1, "hooks end with the block"


@pytest.mark.parametrize("fault", ["another anchor", "another slot", "another layer"])
def test_planted_faults_are_seen(fault, monkeypatch):
    model, embedding, made = setting(4)
    right = HiddenInjection.term

    def wrong(self, layer, anchors):
        if fault == "another anchor":
            return right(self, layer, anchors.roll(1, 1))
        if fault == "another slot":
            return right(self, layer, anchors).unflatten(1, (-1, SLOTS)).roll(1, 2).flatten(1, 2)
        return right(self, 1 - layer, anchors)

    monkeypatch.setattr(HiddenInjection, "term", wrong)
    _, rows = grouped_rows(model, embedding, made, IDS, ANCHORS)
    assert farthest(model, embedding, made, rows) > 1e-2


def test_a_fresh_one_changes_nothing_and_is_trained():
    model, embedding, _ = setting(4)
    for rank in (4, None):
        fresh = HiddenInjection((1,), SLOTS, DIM, rank)
        _, rows = grouped_rows(model, embedding, fresh, IDS, ANCHORS)
        alone = slot_rows(model, embedding, ANCHORS, text_rows(model, IDS)[1])
        assert torch.equal(rows, alone)
        windows = Windows(None, [], counting(9, 24), 1.0, 24, 2, 6, SLOTS, 0)
        settings = dataclasses.replace(injection.SETTINGS, steps=3)
        slots = LookaheadEmbedding.from_table(SLOTS, model.get_input_embeddings().weight)
        trainer = InjectionTrainer(model, slots, windows, settings, fresh, 0.01)
        trainer.run()
        assert fresh.up["1"].abs().max() > 1e-3 and all(math.isfinite(loss) for loss in trainer.losses)


def test_without_an_injection_nothing_is_attached():
    model = tiny_llama()
    with attached(None, model):
        assert not model.model.layers[0]._forward_pre_hooks


def test_gains_and_standard_errors_by_hand():
    """Gains 2 of 10 and 1 of 10 places: mean 0.15, and sqrt(2 (0.5^2 + 0.5^2)) / 20 = 0.05."""
    alone = [{"places": 10, "right": [3], "overlap": [5.0]}, {"places": 10, "right": [4], "overlap": [5.0]}]
    more = [{"places": 10, "right": [5], "overlap": [5.0]}, {"places": 10, "right": [5], "overlap": [5.0]}]
    assert summary(alone, None) == {"texts": 2, "places": 20, "top 1": [0.35], "overlap": [0.5]}
    judged = summary(more, alone)
    assert (judged["top 1"], judged["top 1, gain"], judged["top 1, standard error"]) == ([0.5], [0.15], [0.05])
    assert judged["overlap, gain"] == judged["overlap, standard error"] == [0.0]


def test_a_trial_is_judged_behind_the_prompt(tmp_path):
    model, embedding, _ = setting(4)
    embedding.save(tmp_path / "slots.safetensors")
    start, texts = str(tmp_path / "slots.safetensors"), [Text("chat", "greedy", IDS[0].tolist(), 4)]
    windows, settings = (
        Windows(None, [], counting(9, 24), 1.0, 24, 2, 6, SLOTS, 0),
        dataclasses.replace(injection.SETTINGS, steps=2),
    )
    sizes = {
        Trial(start): 0,
        Trial(start, (1,), 4, 0.01): 4 * DIM + SLOTS * DIM * 4,
        Trial(start, (0, 1), None, 0.01): 2 * SLOTS * DIM * DIM,
    }
    for trial, parameters in sizes.items():
        result = run_trial(trial, model, windows, settings, texts)
        assert (result["parameters"], result["steps"], trial.alone) == (parameters, 2, Trial(start))
        for judged in result["judged"].values():
            (text,) = judged
            assert text["places"] == 12 - 1 - SLOTS - 2 and all(0 <= right <= text["places"] for right in text["right"])
            assert all(0 < overlap < text["places"] for overlap in text["overlap"])


def test_texts_to_judge_are_written_once_and_do_not_loop(tmp_path, monkeypatch):
    def texts_of(model, tokenizer, domain, *, wanted, tokens):
        return [Text(domain, kind, [1, 2, 3], 2) for kind in ("greedy", "greedy, loops", "T 0.8")]

    monkeypatch.setattr(injection, "texts_of", texts_of)
    texts = injection.texts_to_judge(None, None, tmp_path / "texts.json")
    assert len(texts) == 6 and {text.kind for text in texts} == {"greedy", "T 0.8"}
    monkeypatch.delattr(injection, "texts_of")
    assert injection.texts_to_judge(None, None, tmp_path / "texts.json") == texts


def test_the_page_shows_the_result():
    result = json.loads(injection.HIDDEN.result.read_text())
    assert has_part(PAGE.read_text(), NAME, render(result))
    fields = [field.name for field in dataclasses.fields(Trial)]
    trials = [
        Trial(**{name: row[name] for name in fields} | {"layers": tuple(row["layers"])}) for row in result["rows"]
    ]
    assert tuple(trials) == injection.TRIALS
    changed = {**result, "rows": [{**row, "loss": row["loss"] + 1} for row in result["rows"]]}
    assert not has_part(PAGE.read_text(), NAME, render(changed))
