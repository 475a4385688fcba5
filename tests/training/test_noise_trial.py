"""The trial of uniform numbers for look-ahead slots: the numbers given a text, rows that are told them, training, the table."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from support.paths import ROOT
from support.training_models import counting, tiny_llama

sys.path.append(str(ROOT))  # for benchmarks; at the end, so that an installed pass_ext stays

from benchmarks.harness.markdown import has_part
from benchmarks.pages.by_machine import RESULTS
from benchmarks.pages.injection import __main__ as injection
from benchmarks.pages.injection.noise import uniforms
from benchmarks.pages.injection.noise.guesses import BINS, chi_square, guesses, law, same_draw
from benchmarks.pages.injection.noise.injection import NoiseInjection
from benchmarks.pages.injection.noise.page import knowing
from benchmarks.pages.injection.noise.trial import drawn_texts
from benchmarks.pages.injection.noise.uniforms import distribution_function, features, posterior_uniforms, quantile
from benchmarks.pages.injection.noise.windows import SampledWindows
from benchmarks.pages.injection.page import PAGE
from benchmarks.pages.injection.trial import InjectionTrainer
from benchmarks.pages.lookahead.slots import Text
from pass_ext import LookaheadEmbedding
from pass_ext.training.common.frozen_model import text_rows
from pass_ext.training.common.windows import Windows
from pass_ext.training.lookahead.forward import slot_rows

pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="an sdist has no results")
SLOTS, TEMPERATURE = 3, 0.8
DRAWS, VOCABULARY = 40_000, 50
LIMIT = 44.3  # chi-square with 15 degrees of freedom is above in 1 of 10,000 cases


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn():
    """F of many laws, and a token of each."""
    logits = 3 * torch.randn(DRAWS, VOCABULARY, generator=generator())
    sums = distribution_function(logits, TEMPERATURE)
    return sums, torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator(1))[:, 0]


def test_numbers_given_tokens_draw_them_and_are_uniform():
    sums, tokens = drawn()
    u = posterior_uniforms(sums, tokens, generator(2))
    assert torch.equal(quantile(sums, u), tokens)
    assert u.min() >= 0 and u.max() < 1
    assert abs(float(u.mean()) - 0.5) < 4 / math.sqrt(12 * DRAWS)
    assert BINS == 16 and chi_square(u) < LIMIT


def test_other_tokens_numbers_are_seen():
    sums, tokens = drawn()
    most = sums.diff(prepend=sums.new_zeros(DRAWS, 1)).argmax(1)
    assert chi_square(posterior_uniforms(sums, most, generator(2))) > 10 * LIMIT, "greedy texts have other numbers"
    assert chi_square(posterior_uniforms(sums.roll(1, 0), tokens, generator(2))) > 10 * LIMIT, "a law of another place"
    hot = posterior_uniforms(distribution_function(law(sums).log(), 2.0), tokens, generator(2))
    assert chi_square(hot) > 10 * LIMIT, "another temperature"


def test_the_quantile_is_the_least_token_whose_sum_is_larger():
    sums = torch.tensor([[0.25, 0.25, 0.75, 1.0]], dtype=torch.float64).expand(5, -1).contiguous()
    u = torch.tensor([0.0, 0.25, 0.5, 0.75, 0.99], dtype=torch.float64)
    assert quantile(sums, u).tolist() == [0, 2, 2, 3, 3]
    assert [next(v for v, s in enumerate(row) if s > x) for row, x in zip(sums, u, strict=True)] == [0, 2, 2, 3, 3]


def test_features_by_hand():
    row = features(torch.tensor([0.0, 0.625]))[1].tolist()
    frequencies = len(uniforms.FREQUENCIES)
    assert uniforms.FREQUENCIES[:6] + uniforms.FREQUENCIES[-1:] == [1, 2, 3, 4, 6, 8, 4096] and 16 <= frequencies <= 32
    assert row[0] == 0.25 and len(row) == uniforms.FEATURES
    assert row[1] == pytest.approx(math.sin(2 * math.pi * 0.625), abs=1e-6)
    assert row[1 + frequencies] == pytest.approx(math.cos(2 * math.pi * 0.625), abs=1e-6)
    assert row[-uniforms.DIGITS :][:4] == [1, -1, 1, -1]


IDS = torch.arange(2 * 12).reshape(2, 12) * 7 % 90
ANCHORS = torch.tensor([[1, 4, 6], [2, 3, 8]])


def setting():
    """A model, slots, and an injection away from zero."""
    model = tiny_llama()
    torch.manual_seed(2)
    embedding = LookaheadEmbedding.from_table(SLOTS, model.get_input_embeddings().weight)
    noise = NoiseInjection(SLOTS, embedding.dim, TEMPERATURE, 0)
    torch.nn.init.normal_(noise.weight, std=0.1)
    return model, embedding, noise


def grouped_rows(model, embedding, noise):
    with noise.attached(model):
        text, past = text_rows(model, IDS)
        return text, slot_rows(model, embedding, ANCHORS, past)


def ordinary_rows(model, embedding, noise, text, anchor):
    """The slots' last hidden states of one causal forward; slot i is told the number of the token at its own position."""
    u = noise.uniforms(model.get_output_embeddings(), text_rows(model, text[None])[0][0], text)
    told = [features(u[anchor + 1 + slot]) @ noise.weight[slot] for slot in range(SLOTS)]
    table = model.get_input_embeddings().weight
    rows = torch.cat([table[text[: anchor + 1]], embedding.weight + torch.stack(told)])[None]
    return model.model(inputs_embeds=rows).last_hidden_state[0, anchor + 1 :]


def farthest(model, embedding, noise, rows):
    return max(
        (rows[b, a] - ordinary_rows(model, embedding, noise, IDS[b], int(anchor))).abs().max().item()
        for b, anchors in enumerate(ANCHORS)
        for a, anchor in enumerate(anchors)
    )


def test_slots_are_told_the_number_of_the_token_at_their_position():
    model, embedding, noise = setting()
    plain, _ = text_rows(model, IDS)
    text, rows = grouped_rows(model, embedding, noise)
    assert torch.equal(text, plain), "rows of tokens stay as they are"
    assert farthest(model, embedding, noise, rows) < 2e-5
    after = slot_rows(model, embedding, ANCHORS, text_rows(model, IDS)[1])
    assert (after - rows).abs().max() > 0.1, "hooks end with the block"


def test_a_text_s_numbers_draw_it():
    model, _, noise = setting()
    hidden, _ = text_rows(model, IDS)
    sums = distribution_function(model.get_output_embeddings()(hidden[0, :-1]), TEMPERATURE)
    u = noise.uniforms(model.get_output_embeddings(), hidden[0], IDS[0])
    assert torch.equal(quantile(sums, u[1:]), IDS[0, 1:])
    assert torch.equal(u, noise.uniforms(model.get_output_embeddings(), hidden[0], IDS[0])), "text and seed decide them"


@pytest.mark.parametrize("fault", ["another position", "another slot"])
def test_planted_faults_are_seen(fault, monkeypatch):
    model, embedding, noise = setting()
    right = NoiseInjection.term

    def wrong(self, u):
        if fault == "another position":
            return right(self, u.roll(1, 1))
        return right(self, u).unflatten(1, (-1, SLOTS)).roll(1, 2).flatten(1, 2)

    monkeypatch.setattr(NoiseInjection, "term", wrong)
    _, rows = grouped_rows(model, embedding, noise)
    monkeypatch.undo()
    assert farthest(model, embedding, noise, rows) > 1e-2


def windows():
    """Texts at three temperatures, of 5 tokens of prompt and 19 new ones; windows of 20 tokens."""
    texts = zip(counting(3, 24), (0.0, TEMPERATURE, 1.0), strict=True)
    samples = [replace(text, temperature=temperature, prompt_tokens=5) for text, temperature in texts]
    return Windows(None, [], samples, 1.0, 20, 1, 4, SLOTS, 0)


def test_windows_have_drawn_tokens_at_every_slot():
    chosen = SampledWindows.at_temperature(windows(), TEMPERATURE)
    assert [sample.temperature for sample in chosen.samples] == [TEMPERATURE]
    for step in range(20):
        window = chosen.at(step)
        assert window.ids.tolist() == [chosen.samples[0].ids[:20]]
        assert window.anchors.min() >= 4 and window.anchors.max() + SLOTS + 1 < 20
        assert len(set(window.anchors[0].tolist())) == 4
    assert torch.equal(chosen.at(3).anchors, chosen.at(3).anchors) and not torch.equal(
        chosen.at(3).anchors, chosen.at(4).anchors
    )


def test_a_fresh_one_changes_nothing_and_is_trained():
    model, embedding, _ = setting()
    fresh = NoiseInjection(SLOTS, embedding.dim, TEMPERATURE, 0)
    _, rows = grouped_rows(model, embedding, fresh)
    assert torch.equal(rows, slot_rows(model, embedding, ANCHORS, text_rows(model, IDS)[1]))
    settings = replace(injection.SETTINGS, steps=3)
    trainer = InjectionTrainer(
        model, embedding, SampledWindows.at_temperature(windows(), TEMPERATURE), settings, fresh, 0.01
    )
    trainer.run()
    assert fresh.weight.abs().max() > 1e-3 and all(math.isfinite(loss) for loss in trainer.losses)


def test_judged_texts_are_drawn_and_begin_behind_the_first_new_token():
    texts = [Text("code", "greedy", [1, 2, 3], 1), Text("code", "T 0.8", [4, 5, 6], 1)]
    assert drawn_texts(texts) == [Text("code", "T 0.8", [4, 5, 6], 2)]


def test_same_draws_by_hand():
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): the borders 1/2, 3/4 and 1/4, 3/4. Both draw the same outside [1/4, 1/2)."""
    p, q = torch.tensor([[0.5, 0.75, 1.0]]), torch.tensor([[0.25, 0.75, 1.0]])
    assert same_draw(p, q).tolist() == [0.75] and same_draw(p, p).tolist() == [1.0]
    assert law(p).tolist() == [[0.5, 0.25, 0.25]]
    sums, _ = drawn()
    u = torch.rand(DRAWS, dtype=torch.float64, generator=generator(3))
    alike = quantile(sums, u) == quantile(sums.roll(1, 0), u)
    share = same_draw(sums, sums.roll(1, 0))
    assert abs(float(alike.double().mean() - share.mean())) < 4 * 0.5 / math.sqrt(DRAWS)


def test_guesses_against_single_groups(monkeypatch):
    model, embedding, _ = setting()
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    ranked = LookaheadEmbedding.from_table(SLOTS, table, rank=4)
    with torch.no_grad():
        ranked.weight.copy_(embedding.weight)
        ranked.transition_right.normal_(generator=generator())
    monkeypatch.setattr(LookaheadEmbedding, "from_pretrained", lambda *_, **__: ranked)
    text = Text("code", "T 0.8", IDS.flatten().tolist(), 6)
    measured = guesses(model, "any", [text], TEMPERATURE)
    ids, sums = torch.tensor([text.ids]), torch.zeros(2, 2, SLOTS, dtype=torch.float64)
    places = range(4, len(text.ids) - 1 - SLOTS)
    for anchor in places:
        rows, past = text_rows(model, ids)
        group = slot_rows(model, ranked, torch.tensor([[anchor]]), past)[0, 0]
        for slot in range(SLOTS):
            place = anchor + 1 + slot
            score = (table[text.ids[place]] @ ranked.transition_left) @ ranked.transition_right.T @ table.T
            p = distribution_function(head(rows[0, place])[None], TEMPERATURE)
            for number, logits in enumerate([head(group[slot]) + score, head(group[slot])]):
                q = distribution_function(logits[None], TEMPERATURE)
                sums[number, 0, slot] += same_draw(p, q)[0]
                sums[number, 1, slot] += torch.minimum(law(p), law(q)).sum()
    for number, scores in enumerate(("with transitions", "raw")):
        for key, share in zip(("same draw", "overlap"), sums[number] / len(places), strict=True):
            assert measured["guesses"][scores][key] == pytest.approx(share.tolist(), abs=1e-3)
    assert measured["u"]["numbers"] == len(text.ids) - text.prompt


def test_how_much_of_the_gain_u_has():
    def row(transitions, rate, **judged):
        return {"transitions": transitions, "rate": rate, "judged": {k: {"top 1": v} for k, v in judged.items()}}

    known = {"transitions": True, "rate": 0.0, "judged": {"with transitions": {"top 1": [0.6, 0.5]}}}
    text = knowing([known, row(False, 0.0, raw=[0.2, 0.1]), row(False, 0.1, raw=[0.3, 0.1])])
    assert "from 0.200 0.100 to 0.600 0.500" in text and "by slot, 25, 0 % of that gain" in text


def test_the_page_shows_the_result():
    experiment = injection.NOISE
    result = json.loads(experiment.result.read_text())
    assert has_part(PAGE.read_text(), experiment.part, experiment.render(result))
    trials = [(row["start"], row["transitions"], row["rate"], row["seed"]) for row in result["rows"]]
    assert trials == [tuple(vars(trial).values()) for trial in experiment.trials]
    changed = {**result, "rows": [{**row, "loss": row["loss"] + 1} for row in result["rows"]]}
    assert not has_part(PAGE.read_text(), experiment.part, experiment.render(changed))
