"""Pauses: drafting that does not pay costs at most 2 % of a text of 96 tokens, by the seconds that steps take at run time.

The clock is made up: only calls of the model, and drafting, advance it.
"""

import random
from types import SimpleNamespace

import pytest
import torch

from pass_ext import Plain, Tree, generate
from pass_ext.decoding.drafting.drafter import DraftContext, Drafter
from pass_ext.decoding.drafting.rows import pace as pace_module
from pass_ext.decoding.drafting.rows.pace import Pace, Pauses
from pass_ext.decoding.drafting.step import Step
from pass_ext.decoding.planning import run_times as run_times_module
from pass_ext.decoding.planning.run_times import RunTimes, run_times
from pass_ext.decoding.planning.step_times import StepTimes
from pass_ext.drafting import Candidates, Proposal

PLANNED = StepTimes((1, 4), (0.030, 0.039))


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(pace_module.time, "perf_counter", lambda: now.seconds)
    run_times.cache_clear()
    yield now
    run_times.cache_clear()


# ---- the credit of a request ----


def steps(pace, count, seconds, tokens, plain=1.0):
    """How many of ``count`` steps rest."""
    resting = 0
    for _ in range(count):
        drafts = pace.may_draft(plain=plain, step=seconds)
        resting += not drafts
        pace.add(tokens if drafts else 1, seconds if drafts else 0.0, plain=plain)
    return resting


def test_drafting_that_pays_never_rests():
    assert steps(Pace(), 1000, seconds=1.4, tokens=2) == 0
    assert steps(Pace(), 1000, seconds=2.8, tokens=2, plain=2.0) == 0, "seconds are against those of a plain step"
    assert steps(Pace(), 1000, seconds=1.0, tokens=1) == 0, "what costs nothing loses nothing"


@pytest.mark.parametrize(("seconds", "trials"), [(1.05, 39), (1.4, 4), (1.9, 2), (2.6, 1), (2.9, 1), (3.0, 0)])
def test_a_dear_step_has_few_trials(seconds, trials):
    pace = Pace()
    assert 96 - steps(pace, 96, seconds, tokens=1) == trials
    assert pace._tokens - pace._seconds >= -1e-9


@pytest.mark.parametrize("seconds", [1.1, 1.4, 2.6, 3.5])
def test_losses_stay_below_two_percent_of_any_text_from_96_tokens_on(seconds):
    pace, lost = Pace(), 0.0
    for token in range(1, 3000):
        if pace.may_draft(plain=1.0, step=seconds):
            lost += seconds - 1
            pace.add(1, seconds, plain=1.0)
        else:
            pace.add(1, plain=1.0)
        assert token / (token + lost) >= 0.98 or token < 96
    assert lost > 2999 * (1 / 0.98 - 1) - 3 * seconds, "it is tried again and again, as often as it may"


def test_drafting_that_does_not_pay_is_tried_again_and_stays_once_it_pays():
    pace = Pace()
    assert 900 < steps(pace, 1000, seconds=1.4, tokens=1) < 960
    assert steps(pace, 1000, seconds=1.4, tokens=2) < 50
    assert steps(pace, 500, seconds=1.4, tokens=2) == 0
    assert steps(pace, 50, seconds=1.4, tokens=1) > 35, "gains of long ago are not spent"


def test_a_pause_ends_when_two_steps_can_be_paid():
    pace = Pace()
    steps(pace, 96, 1.9, tokens=1)
    credit = pace._tokens - pace._seconds
    waited = 0
    while not pace.may_draft(plain=1.0, step=1.9):
        pace.add(1, plain=1.0)
        waited += 1
    assert waited == pytest.approx((2 * 0.9 - credit) / (1 / 0.98 - 1), abs=1.01)


def test_a_plain_step_that_turns_out_slower_returns_the_credit():
    """A machine that is busy for both: the first guess takes the drafted step for dear."""
    pace = Pace()
    pace.add(1, 2.6, plain=1.0)
    assert not pace.may_draft(plain=1.0, step=2.6)
    assert pace.may_draft(plain=2.0, step=2.6)


def test_two_paces_of_a_request_share_the_credit():
    assert 96 - steps(Pace(0.5), 96, 1.4, tokens=1) == 2
    assert 96 - steps(Pace(0.5), 96, 2.6, tokens=1) == 0


# ---- seconds at run time ----


def test_ratios_are_medians_of_the_last_steps(clock):
    times = RunTimes()
    assert (times.plain_ratio, times.ratio(4), times.knows_plain) == (1.0, 1.0, False)
    times.add(4, 0.8, is_plain=False)
    assert times.plain_ratio == 0.8, "while no plain step was timed: no better than the drafted ones"
    times.add(4, 2.0, is_plain=False)
    times.add(4, 2.2, is_plain=False)
    assert times.ratio(4) == 2.0 == times.ratio(9) and times.plain_ratio == 1.0
    times.add(8, 3.0, is_plain=False)
    assert times.ratio(8) == 3.0 and times.ratio(4) == 2.0
    times.add(1, 5.0, is_plain=True)
    times.add(1, 1.5, is_plain=True)
    assert times.plain_ratio == 1.5 and times.knows_plain, "of two the smaller one"
    for ratio in (1.0, 3.0):
        for _ in range(5):
            times.add(4, ratio, is_plain=False)
        assert times.ratio(4) == ratio
    for ratio in (1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 3.0):
        times.add(1, ratio, is_plain=True)
    assert times.plain_ratio == 3.0, "of the last eight steps"


def test_ratios_are_forgotten_after_a_minute(clock):
    times = RunTimes()
    times.add(1, 2.0, is_plain=True)
    times.add(4, 3.0, is_plain=False)
    clock.seconds += 59
    assert times.plain_ratio == 2.0 and times.ratio(4) == 3.0
    clock.seconds += 2
    assert (times.plain_ratio, times.ratio(4), times.knows_plain) == (1.0, 1.0, False)


@pytest.mark.parametrize(("ratio", "disagrees"), [(1.0, False), (1.24, False), (1.3, True), (0.7, True), (0.8, False)])
@pytest.mark.parametrize("is_plain", [True, False])
def test_a_quarter_is_a_disagreement_once_in_five_minutes(clock, ratio, disagrees, is_plain):
    times = RunTimes()
    for count in range(8):
        assert not times.disagrees(), f"{count} steps are too few"
        times.add(1, ratio, is_plain=is_plain)
    assert times.disagrees() == disagrees
    assert not times.disagrees()
    clock.seconds += 301
    for _ in range(8):
        times.add(1, ratio, is_plain=is_plain)
    assert times.disagrees() == disagrees


# ---- whole texts ----


class Machine:
    """A model that writes 0, 1, 2 again and again. A call takes ``seconds(rows, number of the call)``."""

    embedding = torch.eye(8, 16)

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.calls = clock, seconds, 0

    def __call__(self, rows, positions, attend, wanted):
        self.clock.seconds += self.seconds(len(rows), self.calls)
        self.calls += 1
        attend(0, *[rows[:, None]] * 3)
        following = torch.eye(8)[(positions + 1) % 3]
        return following if wanted is None else following[wanted]


class Chains(Drafter):
    """Proposes chains of three: right ones with a chance. Behind a pause it first needs a step of probes, as PaSS does."""

    name, max_depth = "chains", 3

    def __init__(self, right, probes=False, pauses=True, planned=PLANNED, seed=0):
        self.right, self.probes, self.pauses, self.step_times = right, probes, pauses, planned
        self.ready, self.random = True, random.Random(seed)

    def drafters(self, context):
        return [self]

    def propose(self, batch):
        ready, self.ready = self.ready or not self.probes, bool(batch.levels[0])
        if not batch.levels[0]:
            return Proposal([None])
        right = ready and self.random.random() < self.right
        chain = [(batch.texts[0][-1] + 1 + depth) % 3 if right else 5 for depth in range(3)]
        return Proposal([Candidates(Tree.chain(3), chain)])


def speed(clock, seconds, *drafters, tokens=96):
    """The speed of a text against plain decoding with the same seconds, and the statistics."""
    ids, options = torch.tensor([[0, 1, 2]]), dict(max_new_tokens=tokens, eos_token_id=[])
    run_times.cache_clear()
    plain = generate(Machine(clock, seconds), ids, Plain(), **options)
    method = SimpleNamespace(drafters=lambda context: list(drafters))
    got = generate(Machine(clock, seconds), ids, method, **options)
    assert torch.equal(got.sequences, plain.sequences)
    return plain.stats.seconds / got.stats.seconds, got.stats


def dearer(factor, every=1.0):
    """Seconds of a call: the planned ones times ``every``, and for more than one row times ``factor``."""
    return lambda rows, call: every * PLANNED.at(rows) * (factor if rows > 1 else 1)


@pytest.mark.parametrize("probes", [False, True])
@pytest.mark.parametrize("every", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("factor", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("tokens", [96, 400])
def test_drafts_that_are_never_right_cost_two_percent(clock, tokens, factor, every, probes):
    """Also where a step takes twice the planned time, on a machine that is as fast as planned, faster or busy."""
    reached, stats = speed(clock, dearer(factor, every), Chains(0.0, probes), tokens=tokens)
    assert 0.98 <= reached < 1 and stats.num_drafts >= 1


@pytest.mark.parametrize("seed", range(8))
def test_drafts_that_are_seldom_right_cost_two_percent(clock, seed):
    for right in (0.05, 0.1, 0.2):
        assert speed(clock, dearer(1.5), Chains(right, True, seed=seed))[0] >= 0.98


def test_drafts_that_are_right_are_kept(clock):
    """Two plain steps are timed; a machine that is busy for all steps alike changes nothing."""
    for every in (0.5, 1.0, 3.0):
        reached, stats = speed(clock, dearer(1.0, every), Chains(1.0))
        assert stats.model_calls <= 1 + 24 + 2 + 2 and reached > 2.5, every


def test_times_that_became_stale_are_seen_through_by_plain_steps(clock):
    """Kept times from before a faster build: plain steps take half of them, drafted steps all of them."""
    planned = StepTimes((1, 4), (0.060, 0.078))
    reached, stats = speed(
        clock, lambda rows, call: 0.078 if rows > 1 else 0.030, Chains(0.25, planned=planned, seed=3)
    )
    assert reached >= 0.98 and stats.num_drafts < 20


@pytest.mark.parametrize("seed", range(6))
def test_a_program_that_begins_beside_and_slows_drafted_steps_costs_a_step_more(clock, seed):
    def seconds(rows, call):
        return PLANNED.at(rows) * (2 if rows > 1 and call > 8 else 1)

    for right in (0.0, 0.1, 0.2):
        assert speed(clock, seconds, Chains(right, True, seed=seed))[0] >= 96 / (96 / 0.98 + 1.3)


def test_every_text_has_one_trial(clock):
    """Also behind a text whose steps took five times as long as plain ones."""
    assert speed(clock, dearer(4), Chains(0.0))[1].num_drafts == 1
    ratios = run_times(PLANNED, 4)
    for _ in range(8):
        ratios.add(4, 4.0, is_plain=False)
        ratios.add(1, 1.0, is_plain=True)
    got = generate(Machine(clock, dearer(4)), torch.tensor([[0, 1, 2]]), Chains(0.0), max_new_tokens=96)
    assert got.stats.num_drafts == 1


def test_a_moment_of_disturbance_ends_no_drafting_that_pays(clock):
    def seconds(rows, call):
        return PLANNED.at(rows) * (4 if call in (12, 19) else 1)

    reached, stats = speed(clock, seconds, Chains(0.8), tokens=200)
    assert reached > 1.7 and stats.num_drafts > 50


def test_drafters_that_go_on_have_a_pause_of_their_own(clock):
    """Wrong look-ahead beside right n-grams, and wrong n-grams beside right look-ahead."""
    reached, stats = speed(clock, dearer(1.0), Chains(0.0), Chains(1.0, pauses=False), tokens=200)
    assert reached > 2
    reached, stats = speed(clock, dearer(2.0), Chains(0.0, True), Chains(0.0, pauses=False))
    assert 0.98 <= reached < 1 and stats.num_drafts >= 1
    reached, stats = speed(clock, lambda rows, call: 0.030, Chains(0.0, pauses=False))
    assert reached == 1 and stats.num_drafts > 80, "what costs nothing goes on"


def test_gains_of_drafters_that_go_on_pay_for_no_others(clock):
    pauses = Pauses(PLANNED, [[0]], {True, False})

    def step(seconds, tokens, kind, rows=4):
        pauses.begin([50])
        clock.seconds += seconds
        pauses.add([Step(0, Candidates(Tree.chain(rows - 1), [5] * (rows - 1)))], [tokens], [kind])

    step(0.030, 1, True, rows=1)
    step(0.078, 1, True)
    assert pauses.levels([9], True) == [0]
    for _ in range(6):
        step(0.039, 4, False)
    assert pauses.levels([9], True) == [0] and pauses.levels([9], False) == [9]
    for _ in range(3):
        step(0.078, 1, False)
    assert pauses.levels([9], False) == [0], "their losses count for themselves"


def test_requests_of_a_batch_pause_on_their_own(clock):
    class OneIsRight(Chains):
        def propose(self, batch):
            right = [[(text[-1] + 1 + depth) % 3 for depth in range(3)] for text in batch.texts]
            chains = [right[0], [5, 5, 5]]
            return Proposal(
                [Candidates(Tree.chain(3), c) if most else None for c, most in zip(chains, batch.levels, strict=True)]
            )

    lengths = []

    class Watching(OneIsRight):
        def propose(self, batch):
            lengths.append([bool(most) for most in batch.levels])
            return super().propose(batch)

    planned = StepTimes((1, 2, 8), (0.030, 0.036, 0.072))
    ids, drafter = torch.tensor([[0, 1, 2], [0, 1, 2]]), Watching(1.0, planned=planned)
    machine = Machine(clock, lambda rows, call: planned.at(rows))
    got = generate(machine, ids, drafter, max_new_tokens=90, eos_token_id=[])
    assert got.lengths == (90, 90)
    both = [flags for flags in lengths if flags[0]]
    assert len(both) >= 20 and sum(second for _, second in both) <= 4, "the first drafts on, the second pauses"


def test_calls_that_take_other_times_raise_doubt(clock, monkeypatch):
    doubts = []
    monkeypatch.setattr(DraftContext, "doubt_measured_times", lambda self: doubts.append(self.texts))
    speed(clock, dearer(1.0, 1.2), Chains(1.0), tokens=200)
    assert doubts == []
    speed(clock, dearer(1.0, 1.4), Chains(1.0), tokens=200)
    assert len(doubts) == 1


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_a_planned_draft_model_that_is_always_wrong_is_hardly_asked(kind, clock, monkeypatch):
    pytest.importorskip("transformers")
    from support.small_models import small_model

    from pass_ext import MultiCandidate, Speculative
    from pass_ext.decoding.planning import for_draft_model
    from pass_ext.decoding.session.session import Session

    times = {"llama": StepTimes((1, 64), (1.01, 1.64)), "qwen2": StepTimes((1, 64), (0.201, 0.264))}
    monkeypatch.setattr(for_draft_model, "measured_times", lambda model, graphs: times[model.name])
    call = Session.call

    def timed(session, trees, ids, *others, **named):
        clock.seconds += times[session.model.name].at(len(ids))
        return call(session, trees, ids, *others, **named)

    monkeypatch.setattr(Session, "call", timed)
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
    plain = generate(model, ids, Plain(), run_ahead=False, **options)
    assert torch.equal(made.sequences, plain.sequences)
    assert 2 <= made.stats.num_drafts < 60, "of 200 steps"
    assert plain.stats.seconds / made.stats.seconds > 0.98


def test_the_clock_of_ratios_is_that_of_the_pauses():
    assert run_times_module.time is pace_module.time
