"""Rows that the host's steps choose at each place: texts that stay those of plain decoding, also under a grammar."""

import time

import pytest
import torch
from support.generation import Monotone, Prophet, slots_for
from support.grammars import Automaton, random_automaton
from support.small_models import VOCABULARY, ragged_prompts

from pass_ext import LookaheadEmbedding, PaSS, Plain, Session, Tree, generate
from pass_ext.decoding.planning.step_times import StepTimes


def sure_slots(model, monkeypatch, rows_called):
    """Slots with hit rates, where rows are cheap: all steps take the same time, by a clock that calls alone move."""
    monkeypatch.setattr(time, "perf_counter", lambda: 1e8 + 0.01 * len(rows_called))
    monkeypatch.setattr(
        "pass_ext.decoding.planning.plan.measured_times", lambda *_, **__: StepTimes((1, 64), (1.0, 1.3))
    )
    slots = slots_for(model, rank=3)
    slots.hit_rates = [[0.6, 0.2], [0.5, 0.2], [0.4, 0.1], [0.3, 0.1]]
    return slots


@pytest.mark.parametrize("temperature", [0.0, [0.0, 0.8, 1.0, 0.6]])
@pytest.mark.parametrize("predicts", [True, False])
def test_texts_of_a_batch_are_those_of_plain_decoding(llama, monkeypatch, rows_called, temperature, predicts):
    """Ragged prompts; texts end early and at different steps; rows differ from request to request."""
    ids, mask = ragged_prompts(4)
    slots = sure_slots(llama, monkeypatch, rows_called)
    options = dict(max_new_tokens=24, attention_mask=mask, temperature=temperature, seeds=[1, 2, 3, 4])
    plain = generate(llama, ids, Plain(), eos_token_id=[], **options)
    width = ids.shape[1]
    ends = [plain.sequences[0, width + 5].item(), plain.sequences[2, width + 11].item()]
    plain = generate(llama, ids, Plain(), eos_token_id=ends, **options)
    assert len(set(plain.lengths)) > 1
    if predicts:
        texts = [row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)]
        Prophet(
            monkeypatch,
            [text + row[width:].tolist() for text, row in zip(texts, plain.sequences, strict=True)],
        )
    got = generate(llama, ids, PaSS(slots), eos_token_id=ends, session=Session(llama, run_ahead=False), **options)
    assert torch.equal(got.sequences, plain.sequences) and got.lengths == plain.lengths
    if predicts:
        assert got.stats.num_draft_tokens > 0
        assert got.stats.model_calls < 0.75 * plain.stats.model_calls


@pytest.mark.parametrize("temperature", [0.0, [0.0, 0.8, 1.0, 0.6]])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("predicts", [True, False])
def test_texts_under_a_grammar_are_those_of_plain_decoding(
    llama, monkeypatch, rows_called, predicts, count, temperature
):
    """One text has no grammar; in all others tokens are forced, after roots and candidates."""
    ids, mask = (part[:count] for part in ragged_prompts(4))
    slots = sure_slots(llama, monkeypatch, rows_called)
    grammar = [random_automaton(VOCABULARY, seed=seed) if seed != 2 else None for seed in range(count)]
    temperature = temperature if temperature == 0.0 else temperature[-count:]
    options = dict(
        max_new_tokens=24, attention_mask=mask, temperature=temperature, seeds=range(count), eos_token_id=[],
        grammar=grammar,
    )  # fmt: skip
    plain = generate(llama, ids, Plain(), **options)
    if predicts:
        texts = [row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)]
        new = [row[ids.shape[1] :].tolist() for row in plain.sequences]
        Prophet(monkeypatch, [text + written for text, written in zip(texts, new, strict=True)])
    got = generate(llama, ids, PaSS(slots), **options)
    assert torch.equal(got.sequences, plain.sequences) and got.lengths == plain.lengths
    assert got.stats.num_draft_tokens > 0
    if predicts:
        assert got.stats.model_calls < 0.75 * plain.stats.model_calls


@pytest.mark.parametrize("method", [dict(rows=6), dict(tree=Tree.chain(2), rows=9)], ids=["rows", "tree"])
def test_what_a_grammar_forbids_after_the_root_is_not_offered(method):
    """The model's and the slots' best tokens are forbidden; the best one of the others is right every time."""
    allowed = Monotone.logits.argsort()[:20].tolist()
    grammar = Automaton({0: dict.fromkeys(allowed, 0)})
    slots = LookaheadEmbedding.from_table(2, Monotone.embedding)
    options = dict(max_new_tokens=24, eos_token_id=[], grammar=grammar)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    plain = generate(Monotone(), ids, **options)
    got = generate(Monotone(), ids, PaSS(slots, recall=False, **method), **options)
    assert torch.equal(got.sequences, plain.sequences) and got.stats.model_calls <= 14
