"""Acceptance counts against a loop, their sums and definitions, and profiler ranges."""

import json
import math
import random
import time
from contextlib import nullcontext

import pytest
import torch

from pass_ext import LookaheadEmbedding, NGram, PaSS, Tree, generate
from pass_ext.decoding.stats import AcceptanceCounts, AcceptanceStats, GenerationStats, profiled


def random_steps(seed, most=4, requests=5, steps=30):
    rng = random.Random(seed)
    for _ in range(steps):
        drafted = [rng.choice([0, 3, 7]) for _ in range(requests)]
        accepted = [rng.randint(0, min(most, d)) for d in drafted]
        yield accepted, drafted


@pytest.mark.parametrize("seed", range(3))
def test_counts_as_a_loop_does(seed):
    counters, histogram, drafted, per_position = AcceptanceCounts(4), [0] * 5, 0, [0] * 4
    for accepted, proposed in random_steps(seed):
        for a, d in zip(accepted, proposed, strict=True):
            counters.add(a, d)
            if d:
                histogram[a] += 1
                drafted += d
                for position in range(a):
                    per_position[position] += 1
    stats = counters.snapshot()
    assert stats.acceptance_histogram == tuple(histogram) and stats.num_draft_tokens == drafted
    assert stats.num_drafts == sum(histogram) and stats.num_accepted_tokens == sum(per_position)
    assert stats.accepted_per_position == tuple(per_position)
    assert stats.mean_acceptance_length == 1 + sum(per_position) / sum(histogram)
    assert stats.draft_acceptance_rate == sum(per_position) / drafted
    assert stats.acceptance_rate_per_position == tuple(count / sum(histogram) for count in per_position)


def test_more_accepted_than_predicted_is_the_most():
    counts = AcceptanceCounts(2)
    counts.add(99, 4)
    assert counts.snapshot() == AcceptanceStats((0, 0, 1), 4)


def plain_decoder():
    """A model whose logits are all equal: its text is all zeros."""

    class Decoder:
        embedding = torch.zeros(9, 64)

        def __call__(self, rows, positions, attend, wanted):
            x = attend(0, *(rows.unflatten(1, (1, 64)),) * 3).flatten(1)
            return torch.zeros(len(x) if wanted is None else len(wanted), 9)

    return Decoder()


@pytest.mark.parametrize(
    ("end", "counts"),
    [
        ({}, (5, 3, 3)),
        ({"eos_token_id": 0}, (1, 0, 0)),
        ({"stopping": lambda text, scores: text.shape[1] == 11}, (3, 2, 3)),
    ],
    ids=["limit", "end", "stop"],
)
def test_tokens_after_the_end_of_a_text_are_not_counted(end, counts):
    """The first call adds a token of the target's own; the next accepts at most as many drafts as the text has room for."""
    options = {"max_new_tokens": 5, "eos_token_id": [], **end}
    stats = generate(plain_decoder(), torch.tensor([[3, 0, 0, 0, 0, 0, 0, 0]]), NGram(tokens=8), **options).stats
    assert (stats.tokens, stats.num_accepted_tokens, stats.num_draft_tokens) == counts


class Machine:
    """A model that writes 0, 1, 2 again and again, on a made-up clock that its calls alone move: several rows are dear.
    Its slots predict nothing that is right. It keeps the number of candidates in each call after the prompt's."""

    embedding = torch.eye(8, 16)

    def __init__(self, monkeypatch, dear):
        self.seconds, self.dear, self.candidates = 0.0, dear, []
        monkeypatch.setattr(time, "perf_counter", lambda: self.seconds)

    def __call__(self, rows, positions, attend, wanted):
        attend(0, *[rows[:, None]] * 3)
        self.seconds += 0.1 if len(rows) == 1 else self.dear
        is_slot = rows[:, 8:].any(1)
        self.candidates.append(int((~is_slot).sum()) - 1)
        following = torch.eye(8)[(positions + 1) % 3]
        following[is_slot] = torch.tensor([-50.0] * 3 + [0.0, 0.0, 1.0, 0.0, 0.0])
        return following if wanted is None else following[wanted]


@pytest.mark.parametrize(
    "options", [{}, dict(tree=Tree.chain(2)), dict(rows=4), dict(rows=8)], ids=["auto", "tree", "4 rows", "8 rows"]
)
@pytest.mark.parametrize("dear", [0.101, 0.4], ids=["cheap", "dear"])
def test_candidates_that_no_call_has_are_not_counted(monkeypatch, options, dear):
    """Where drafting pauses, the candidates that were chosen for the step are dropped, and counted nowhere."""
    machine = Machine(monkeypatch, dear)
    slots = LookaheadEmbedding(3, 16)
    torch.nn.init.zeros_(slots.weight)
    slots.weight.data[:, 9:12] = torch.eye(3)
    slots.hit_rates = ((0.9, 0.05),) * 3
    stats = generate(machine, torch.tensor([[0, 1, 2]]), PaSS(slots, **options), max_new_tokens=120).stats
    verified = machine.candidates[-stats.model_calls + 1 :]
    assert stats.num_draft_tokens == sum(verified) and stats.num_drafts == sum(map(bool, verified))
    assert stats.num_accepted_tokens == 0 == stats.draft_acceptance_rate and stats.tokens == stats.model_calls == 120
    assert stats.acceptance_histogram[0] == stats.num_drafts and stats.mean_acceptance_length == 1
    if dear > 0.2 and "rows" not in options:
        assert verified.count(0) > 80, "it pauses"


def test_nothing_drafted_is_not_nan():
    for stats in (AcceptanceStats(), AcceptanceCounts(3).snapshot(), GenerationStats()):
        assert stats.mean_acceptance_length == 1 and stats.draft_acceptance_rate == 0
        assert all(rate == 0 for rate in stats.acceptance_rate_per_position)
        assert "NaN" not in json.dumps(stats.as_dict(), allow_nan=False)
    assert "nothing drafted" in str(GenerationStats(model_calls=3, tokens=3, seconds=1.0))
    assert GenerationStats().tokens_per_second == 0 and GenerationStats().tokens_per_call == 0


def test_sums():
    one = GenerationStats((2, 1), 9, model_calls=4, tokens=5, seconds=0.5)
    two = GenerationStats((0, 0, 3), 9, model_calls=4, tokens=10, seconds=1.0)
    both = one + two
    assert both == GenerationStats((2, 1, 3), 18, 8, 15, 1.5) == sum([two], one)
    assert (both.num_draft_tokens, both.num_accepted_tokens) == (18, 7)
    assert math.isclose(both.mean_acceptance_length, 1 + 7 / 6) and both.tokens_per_second == 10
    assert both.tokens_per_call == 15 / 8
    assert AcceptanceStats((1,), 2) + AcceptanceStats((0, 1), 2) == AcceptanceStats((1, 1), 4)
    with pytest.raises(TypeError):
        one + AcceptanceStats()


def test_it_reads_well():
    stats = GenerationStats((2, 1, 3), 18, model_calls=8, tokens=15, seconds=1.5, backend="fused")
    assert str(stats) == (
        "15 tokens in 1.50 s (10.0 tokens/s), 8 model calls (1.88 tokens per call), fused\n"
        "Mean acceptance length: 2.17, Accepted: 7 tokens, Drafted: 18 tokens, "
        "Per-position acceptance rate: 0.667, 0.500, Avg Draft acceptance rate: 38.9%"
    )


def names_of(profile):
    return {event.key for event in profile.key_averages()}


def test_ranges_show_in_a_profile():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, profiled("draft"):
        torch.ones(2).sum()
    assert "pass_ext::draft" in names_of(profile)


def test_ranges_cost_nothing_when_nobody_looks(monkeypatch):
    monkeypatch.delenv("PASS_EXT_NVTX", raising=False)
    assert profiled("draft") is profiled("verify")
    monkeypatch.setenv("PASS_EXT_NVTX", "1")
    opened = []
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: opened.append(name) or nullcontext())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with profiled("commit"):
        pass
    assert opened == ["pass_ext::commit"]
