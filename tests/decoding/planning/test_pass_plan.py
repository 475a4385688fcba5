"""Measured step times of models: their keys, and which are kept on disk."""

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")

from support.small_models import small_model

from pass_ext import LookaheadEmbedding, PaSS, generate
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.planning import plan as planning
from pass_ext.decoding.planning import step_times as timing
from pass_ext.decoding.planning.step_times import StepTimes
from pass_ext.drafting import plan
from pass_ext.modules.slot_adapters import SlotAdapters
from pass_ext.training.lookahead.adapters import adapter_sizes


@pytest.fixture
def measured(monkeypatch):
    """The fingerprints that were measured."""
    fingerprints = []

    def measure(run, *, fingerprint, device):
        run(2)
        fingerprints.append(fingerprint)
        return StepTimes((1, 64), (1.0, 1.0 + 0.01 * len(fingerprints)))

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(timing, "_times", {})
    return fingerprints


def test_another_dtype_or_size_is_another_model(measured):
    model = small_model("llama")
    first = timing.measured_times(packed_model(model))
    assert timing.measured_times(packed_model(model)) is first
    assert timing.measured_times(packed_model(small_model("llama"))) is first, "one like it takes as long"
    assert timing.measured_times(packed_model(model.bfloat16())) is not first
    assert timing.measured_times(packed_model(small_model("llama", num_hidden_layers=1))) is not first
    assert len(set(measured)) == len(measured) == 3 and None not in measured


def test_adapters_have_times_of_their_own(measured, monkeypatch):
    """Half the rows of the measured calls are slots, which have the adapters; slots without adapters change no time."""
    llama = small_model("llama")
    model, table = packed_model(llama), llama.get_input_embeddings().weight
    lookahead = LookaheadEmbedding.from_table(3, table, deep_layers=2)
    bare = timing.measured_times(model)
    assert timing.measured_times(model, lookahead=lookahead) is bare and len(measured) == 1
    lookahead.adapters = SlotAdapters(adapter_sizes(llama, 2))
    adapted = timing.measured_times(model, lookahead=lookahead)
    assert adapted is timing.measured_times(model, lookahead=lookahead) and len(measured) == 2
    assert measured[1] != measured[0], "kept on disk under another name"
    timing.measured_times(model, graphs=True, lookahead=lookahead)
    wider = LookaheadEmbedding.from_table(3, table, deep_layers=2)
    wider.adapters = SlotAdapters(adapter_sizes(llama, 3))
    timing.measured_times(model, lookahead=wider)
    assert len(measured) == 4 and len(set(measured)) == 4, "of graphs, and of another rank"

    ids_seen = []
    with torch.no_grad(), model.attached():
        calls = timing._Calls(model, False, lookahead)
        monkeypatch.setattr(calls._session, "call", lambda trees, ids, *rest: ids_seen.append(ids.tolist()))
        calls._session.caches = [None]
        for rows in (1, 5, 8):
            calls.run(rows)
    assert ids_seen == [[0], [0, 1, 2, -1, -2], [0, 1, 2, 3, -1, -2, -3, -1]]


def test_greedy_texts_are_planned_by_rates_of_their_own(monkeypatch, rows_called):
    """Slots that are right only in greedy texts have rows there and nowhere else."""
    model = small_model("llama")
    times = StepTimes((1, 64), (1.0, 7.3))  # a tenth of a call for each further row
    monkeypatch.setattr(planning, "measured_times", lambda *_, **__: times)
    lookahead = LookaheadEmbedding.from_table(2, model.get_input_embeddings().weight)
    lookahead.hit_rates, lookahead.greedy_hit_rates = ((0.01,), (0.01,)), ((0.9,), (0.9,))
    method = PaSS(lookahead)
    assert not plan(model, method).is_plain and plan(model, method, temperature=0.8).is_plain
    for law, drafts in (({}, True), (dict(temperature=0.8, seeds=1), False)):
        rows_called.clear()
        generate(model, torch.tensor([[3, 4, 5]]), method, max_new_tokens=9, **law)
        assert (max(rows_called[1:]) > 1) == drafts
    lookahead.greedy_hit_rates = None
    assert plan(model, method).is_plain, "an older file has one calibration"


@dataclasses.dataclass  # its __eq__ makes it unhashable
class Decoder:
    embedding: torch.Tensor
    layers: int = 1

    def __call__(self, rows, positions, attend, wanted):
        for layer in range(self.layers):
            rows = rows + attend(layer, *(rows.unflatten(1, (1, 64)),) * 3).flatten(1)
        return (rows if wanted is None else rows[wanted]) @ self.embedding.T


def test_callables_have_times_of_their_own_that_are_not_kept(measured):
    few, many = (Decoder(torch.randn(9, 64), layers) for layers in (1, 3))
    for model in (few, many, few):
        method = PaSS(LookaheadEmbedding.from_table(2, model.embedding))
        generate(model, torch.tensor([[3, 4]]), method, max_new_tokens=3)
    assert measured == [None, None] and len(timing._times) == 2
    del model, few
    assert len(timing._times) == 1, "they go with their model"
