"""Pace: drafting that does not pay rests for a while, longer each time, and is tried again; also inside generate."""

from types import SimpleNamespace

import pytest
import torch

from pass_ext.decoding.drafting.pace import Pace


def steps(pace, count, seconds, tokens):
    """How many of ``count`` steps rest; a resting step takes the time of a plain step."""
    resting = 0
    for _ in range(count):
        resting += pace.rests
        pace.add(1.0 if pace.rests else seconds, 1 if pace.rests else tokens)
    return resting


def test_drafting_that_pays_never_rests():
    assert steps(Pace(1.0), 1000, seconds=1.4, tokens=2) == 0
    assert steps(Pace(2.0), 1000, seconds=2.8, tokens=2) == 0, "seconds are against those of a plain step"


def test_drafting_that_does_not_pay_rests_longer_each_time_and_is_tried_again():
    pace = Pace(1.0)
    resting = steps(pace, 1000, seconds=1.4, tokens=1)
    assert 850 < resting < 990
    assert steps(pace, 1000, seconds=1.4, tokens=2) < 500, "it is tried again, and stays"
    assert steps(pace, 500, seconds=1.4, tokens=2) == 0


def rest_of(pace):
    """The length of the next rest, for drafts that do not pay."""
    while not pace.rests:
        pace.add(1.4, 1)
    length = 0
    while pace.rests:
        pace.add(1.0, 1)
        length += 1
    return length


def test_rests_grow_to_the_longest_and_are_short_again_behind_drafts_that_paid():
    pace = Pace(1.0)
    assert [rest_of(pace) for _ in range(6)] == [24, 48, 96, 192, 384, 384]
    for _ in range(30):  # for a while only
        pace.add(1.4, 2)
    assert rest_of(pace) == 384
    for _ in range(49):
        pace.add(1.4, 2)
    assert [rest_of(pace) for _ in range(2)] == [24, 48]


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_a_planned_draft_model_that_is_always_wrong_is_hardly_asked(kind, monkeypatch):
    pytest.importorskip("transformers")
    from support.small_models import small_model

    from pass_ext import MultiCandidate, Plain, Speculative, generate
    from pass_ext.decoding.planning import for_draft_model

    times = {"llama": lambda rows: 1 + 0.01 * rows, "qwen2": lambda rows: 0.2 + 0.001 * rows}
    monkeypatch.setattr(
        for_draft_model, "measured_times", lambda model, graphs: SimpleNamespace(at=times[model.name], rows=(1, 64))
    )
    model, draft = small_model("llama"), small_model("qwen2", seed=5, num_hidden_layers=1)
    rates = [[0.9, 0.05]] * 3  # it says
    method = (
        Speculative(draft, "auto", hit_rates=rates)
        if kind == "chain"
        else MultiCandidate(draft, "auto", hit_rates=rates)
    )
    ids = torch.tensor([[5, 9, 11]])
    options = dict(max_new_tokens=200, eos_token_id=[])
    made = generate(model, ids, method, **options)
    assert torch.equal(made.sequences, generate(model, ids, Plain(), **options).sequences)
    assert 5 <= made.stats.num_drafts < 60, "of 200 steps"
