"""Drafting that does not pay costs little, drafting that pays goes on, rows are as many as pay: by the seconds that steps take.

The clock is made up: only calls of the model move it.
"""

import itertools
import random
import time

import pytest
import torch
from support.pairwise import pairwise

from pass_ext import Drafter, LookaheadEmbedding, PaSS, Plain, Session, Tree, generate
from pass_ext.decoding.planning.pace import Pace
from pass_ext.decoding.planning.step_times import StepClock, StepTimes
from pass_ext.drafting import Candidates, Proposal

_begin = itertools.count(10_000, 10_000)  # so that no test remembers another's steps


class Machine:
    """A model that writes 0, 1, 2 again and again. A call takes ``seconds(rows)``. Its slots predict some places of the text,
    and are as sure of other tokens elsewhere, or not. It keeps the rows of each call."""

    embedding = torch.eye(40, 48)

    def __init__(self, monkeypatch, seconds, right=0.0, seed=0, sureness=12.0):
        self.clock, self.seconds, self.calls = float(next(_begin)), seconds, []
        numbers = random.Random(seed)
        self.predicts = [numbers.random() < right for _ in range(2000)]
        self.wrong = torch.tensor([-50.0] * 3 + [0.0] * 36 + [sureness])
        monkeypatch.setattr(time, "perf_counter", lambda: self.clock)

    def __call__(self, rows, positions, attend, wanted):
        attend(0, *[rows[:, None]] * 3)
        self.clock += self.seconds(len(rows))
        self.calls.append(len(rows))
        logits = 12 * torch.eye(40)[(positions + 1) % 3]
        for row in rows[:, 40:].any(1).nonzero().flatten().tolist():
            if not self.predicts[positions[row] + 1]:
                logits[row] = self.wrong
        return logits if wanted is None else logits[wanted]


def slots():
    made = LookaheadEmbedding(3, 48)
    torch.nn.init.zeros_(made.weight)
    made.weight.data[:, 41:44] = torch.eye(3)
    made.hit_rates = ((0.9, 0.05), (0.8, 0.05), (0.7, 0.05))
    return made


def speed(
    monkeypatch, seconds, method, right=0.0, requests=1, tokens=256, seed=0, sureness=12.0, run_ahead=None, **options
):
    """The speed against plain decoding with the same seconds, the statistics, and the rows of the calls."""
    ids, options = torch.tensor([[0, 1, 2]] * requests), dict(max_new_tokens=tokens, eos_token_id=[], **options)
    plain = generate(Machine(monkeypatch, seconds), ids, Plain(), **options)
    machine = Machine(monkeypatch, seconds, right, seed, sureness)
    got = generate(machine, ids, method, session=Session(machine, run_ahead=run_ahead), **options)
    assert torch.equal(got.sequences, plain.sequences)
    return plain.stats.seconds / got.stats.seconds, got.stats, machine.calls[-got.stats.model_calls + 1 :]


def line(first, further):
    return lambda rows: first + further * (rows - 1)


METHODS = {
    "chosen": (dict(), dict()),
    "chosen on the host": (dict(), dict(run_ahead=False)),
    "a tree": (dict(tree=Tree.chain(2)), dict()),
    "a tree on the host": (dict(tree=Tree.chain(2)), dict(run_ahead=False)),
    "two passes": (dict(tree=Tree.chain(2), passes=2), dict()),
}


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize(("name", "further"), pairwise(list(METHODS), [0.002, 0.01, 0.03]))
def test_drafts_that_are_never_right_cost_five_percent_of_256_tokens(monkeypatch, name, requests, further):
    """Rows take up to a third of a call each, and hit rates say that nearly all will be right."""
    settings, options = METHODS[name]
    reached, stats, _ = speed(monkeypatch, line(0.1, further), PaSS(slots(), **settings), requests=requests, **options)
    assert 0.95 <= reached <= 1 and stats.num_accepted_tokens == 0


@pytest.mark.parametrize("seed", range(4))
def test_drafts_that_are_seldom_right_cost_five_percent(monkeypatch, seed):
    for right in (0.1, 0.2):
        assert speed(monkeypatch, line(0.1, 0.02), PaSS(slots()), right, tokens=256, seed=seed)[0] >= 0.95


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_drafts_that_are_right_are_kept(monkeypatch, name, requests):
    settings, options = METHODS[name]
    reached, _, rows = speed(
        monkeypatch, line(0.1, 0.004), PaSS(slots(), **settings), 1.0, requests, tokens=200, **options
    )
    assert reached > (1.2 if name == "two passes" else 1.8) and rows.count(requests) <= 8, "few plain steps"


@pytest.mark.parametrize(("requests", "further"), pairwise([1, 2, 4, 8], [0.001, 0.01, 0.03]))
def test_rows_are_as_many_as_pay(monkeypatch, requests, further):
    """Against fixed numbers of rows. Slots predict two tokens of three, and are unsure of the others."""
    options = dict(right=0.67, requests=requests, tokens=200, sureness=1.0)
    fixed = {
        rows: speed(monkeypatch, line(0.1, further), PaSS(slots(), rows=rows), **options)[0]
        for rows in (2, 3, 4, 6, 8, 12)
    }
    reached, _, rows = speed(monkeypatch, line(0.1, further), PaSS(slots()), **options)
    assert reached >= 0.97 * max(1.0, *fixed.values()), (reached, fixed, sum(rows) / len(rows))


def test_a_knee_is_kept_to(monkeypatch):
    """Eight rows cost nothing more than one, all further ones much."""
    _, _, rows = speed(monkeypatch, lambda n: 0.1 if n <= 8 else 0.1 + 0.05 * (n - 8), PaSS(slots()), 1.0, tokens=100)
    assert max(rows) <= 8 and sorted(rows)[len(rows) // 2] >= 5


def test_a_moment_of_disturbance_ends_no_drafting(monkeypatch):
    numbers = itertools.count()

    def seconds(rows):
        return (0.1 + 0.004 * rows) * (5 if next(numbers) % 40 == 39 else 1)

    reached, _, rows = speed(monkeypatch, seconds, PaSS(slots()), 0.9, tokens=300)
    assert reached > 1.4 and rows.count(1) < 20


def test_a_program_that_begins_beside_and_slows_drafted_steps_is_seen(monkeypatch):
    """Plain steps stay as fast as they were."""
    machine = Machine(monkeypatch, lambda rows: 0.0, 1.0)
    machine.seconds = lambda rows: (0.1 + 0.004 * rows) * (6 if rows > 1 and len(machine.calls) > 80 else 1)
    generate(machine, torch.tensor([[0, 1, 2]]), PaSS(slots()), max_new_tokens=400, eos_token_id=[])
    assert machine.calls[-100:].count(1) > 90


def test_a_machine_that_was_busy_is_forgotten(monkeypatch):
    """Drafted steps that once took six times as long keep no later text from drafting."""
    machine = Machine(monkeypatch, lambda rows: 0.0, 1.0)
    method, options = PaSS(slots()), dict(max_new_tokens=100, eos_token_id=[])
    machine.seconds = lambda rows: (0.1 + 0.004 * rows) * (6 if rows > 1 and len(machine.calls) > 45 else 1)
    assert generate(machine, torch.tensor([[0, 1, 2]]), method, **options).stats.model_calls > 60
    machine.seconds = line(0.1, 0.004)
    machine.clock += 60
    assert generate(machine, torch.tensor([[0, 1, 2]]), method, **options).stats.model_calls < 50


def test_gains_of_long_ago_are_not_spent(monkeypatch):
    """Slots predict the first half of the text and nothing after it."""
    machine = Machine(monkeypatch, line(0.1, 0.01), 1.0)
    machine.predicts[260:] = [False] * len(machine.predicts[260:])
    generate(machine, torch.tensor([[0, 1, 2]]), PaSS(slots()), max_new_tokens=512, eos_token_id=[])
    after = machine.calls[-250:]
    assert sum(rows > 1 for rows in after) < 30 and machine.calls[-300:].count(1) < 280, "it stops, and is tried again"


def test_the_callers_time_is_no_fault_of_drafting(monkeypatch):
    """A streamer that takes a second for every token."""
    machine = Machine(monkeypatch, line(0.1, 0.004), 1.0)

    class Slow:
        def put(self, tokens):
            machine.clock += tokens.numel()

        def end(self):
            pass

    stats = generate(machine, torch.tensor([[0, 1, 2]]), PaSS(slots()), max_new_tokens=200, streamer=Slow()).stats
    assert stats.model_calls < 100 and stats.mean_acceptance_length > 2


def test_what_looked_dear_is_tried_again(monkeypatch):
    """Drafted steps take five times as long for a while."""
    machine = Machine(monkeypatch, lambda rows: 0.0, 1.0)
    machine.seconds = lambda rows: (0.1 + 0.004 * rows) * (5 if rows > 1 and 100 < len(machine.calls) < 140 else 1)
    generate(machine, torch.tensor([[0, 1, 2]]), PaSS(slots()), max_new_tokens=900, eos_token_id=[])
    assert machine.calls[-60:].count(1) < 10


class Dear(Drafter):
    """Chains of 15 tokens from a head that takes so many seconds for them, and the first time those for the prompt too. The
    first ``right`` tokens are right."""

    max_depth, name = 15, "dear"

    def __init__(self, machine, becomes_right, seconds, prompt, right):
        self.machine, self.seconds, self.prompt, self.right = machine, seconds, prompt, right
        self.becomes_right = becomes_right

    def propose(self, batch):
        if self.becomes_right is not None and len(batch.texts[0]) - 3 > self.becomes_right:
            self.right = 15
        if any(batch.levels):
            self.machine.clock += self.seconds + self.prompt
            self.prompt = 0.0
        return Proposal(
            [
                self.chain(text, levels) if levels else None
                for text, levels in zip(batch.texts, batch.levels, strict=False)
            ]
        )

    def chain(self, text, levels):
        right = [(text[-1] + 1 + place) % 3 for place in range(15)]
        return Candidates.from_chains([[*right[: self.right], *[39] * (15 - self.right)][:levels]])


class Head:
    """The method of a ``Dear``."""

    becomes_right = None
    """After so many tokens all drafts are right; None: never."""

    def __init__(self, *settings):
        self.settings = settings

    def drafters(self, context):
        drafter = Dear(context.target.model, self.becomes_right, *self.settings)
        drafter.pace = context.pace()
        context.target.model.begun = len(context.target.model.calls)  # the times of calls are measured
        return [drafter]


@pytest.mark.parametrize(("seconds", "further"), pairwise([0.0, 0.03, 0.06, 0.12, 0.2], [0.001, 0.004, 0.008]))
def test_heads_that_are_never_right_cost_three_percent_of_256_tokens(monkeypatch, further, seconds):
    """Where a drafted step takes twice as long as a plain one, and five where it takes three times as long, which the times of
    the model's calls do not tell."""
    least = 0.97 if seconds + 15 * further <= 0.1 else 0.95
    for _ in range(2):  # the second text knows the times of the first
        assert speed(monkeypatch, line(0.1, further), Head(seconds, 0.1, 0))[0] >= least


def test_short_texts_after_one_that_lost_cost_less(monkeypatch):
    """Of 96 tokens: 4 % where nothing is known of the head, then 2.5 %."""
    machine, costs = Machine(monkeypatch, line(0.1, 0.001)), []
    for _ in range(5):
        stats = generate(
            machine, torch.tensor([[0, 1, 2]]), Head(0.06, 0.0, 0), max_new_tokens=96, eos_token_id=[]
        ).stats
        costs.append(stats.seconds / 9.6 - 1)
        assert stats.num_drafts > 0, "each text tries"
    assert costs[0] < 0.04 and max(costs[1:]) < 0.025, costs


def test_a_text_of_another_length_knows_that_drafting_has_lost(monkeypatch):
    machine, drafts = Machine(monkeypatch, line(0.1, 0.0015)), []
    for prompt in (3, 300, 40):
        ids = torch.arange(prompt)[None] % 3
        found = generate(machine, ids, Head(0.06, 0.0, 0), max_new_tokens=64, eos_token_id=[])
        drafts.append(found.stats.num_drafts)
    assert drafts == [4, 2, 2]


def test_the_first_drafted_step_counts_with_the_second(monkeypatch):
    """Nobody knows what drafting takes before the second one, and in the first one the head reads the prompt. 0.9 plain steps
    are lost in each, 3 in the fourth."""
    machine = Machine(monkeypatch, line(0.1, 0.0012))
    stats = generate(machine, torch.tensor([[0, 1, 2]]), Head(0.075, 0.5, 0), max_new_tokens=90, eos_token_id=[]).stats
    assert stats.num_drafts == 4


def test_rows_have_new_costs_after_eight_steps_whoever_asks_when():
    pace = Pace(StepClock(StepTimes((1, 8), (0.1, 0.2))), 1.0, 0.1)
    given = []
    for step in range(40):
        if step < 12 or step >= 29:  # a pause between them
            given += [step] * (pace.costs(4, 1) is not None)
        pace.add(1, 1, 1, 0.1, may_draft=False)
    assert given == [0, 8, 29, 37]


@pytest.mark.parametrize("seconds", [0.0, 0.06, 0.2])
@pytest.mark.parametrize("wrong", [50, 300, 2000])
def test_a_head_that_becomes_right_is_found_again(monkeypatch, wrong, seconds):
    """Within 576 plain steps, however long it was wrong; then no step is plain but those that are timed."""
    machine = Machine(monkeypatch, line(0.1, 0.004))
    method = Head(seconds, 0.0, 0)
    method.becomes_right = wrong
    generate(machine, torch.tensor([[0, 1, 2]]), method, max_new_tokens=wrong + 1000, eos_token_id=[])
    rows = machine.calls[machine.begun + 1 :]
    found = next(i for i in range(wrong, len(rows)) if rows[i] > 1)
    assert found - wrong <= 576 and rows[found:].count(1) <= max(12, len(rows[found:]) // 8)


def test_a_head_that_pays_goes_on_though_it_reads_a_long_prompt_first(monkeypatch):
    """That takes as long as twenty calls of the model."""
    reached, _, rows = speed(monkeypatch, line(0.1, 0.004), Head(0.03, 2.0, 3), tokens=300)
    assert reached > 1.5 and rows.count(1) < 15


def test_beside_one_slow_plain_step_drafting_looks_no_cheaper(monkeypatch):
    """Another program has held up the first one."""
    machine = Machine(monkeypatch, lambda rows: 0.0)
    machine.begun = None

    def seconds(rows):
        is_slow = rows == 1 and machine.begun is not None and 1 not in machine.calls[machine.begun :]
        return (0.1 + 0.001 * rows) * (3 if is_slow else 1)

    machine.seconds = seconds
    stats = generate(machine, torch.tensor([[0, 1, 2]]), Head(0.05, 0.0, 0), max_new_tokens=256, eos_token_id=[]).stats
    assert stats.num_drafts < 30


@pytest.mark.parametrize("slower", [1.3, 1.6, 2.0])
@pytest.mark.parametrize("seconds", [0.03, 0.06, 0.1])
def test_beside_plain_steps_that_drafting_slows_it_looks_no_cheaper(monkeypatch, seconds, slower):
    """A plain step behind a drafted one takes longer: the caches hold the head's weights, or its threads still spin."""
    machine, ids = Machine(monkeypatch, lambda rows: 0.0), torch.tensor([[0, 1, 2]])
    machine.seconds = lambda rows: 0.1 * (slower if rows == 1 and machine.calls[-1:] > [1] else 1)
    for _ in range(2):
        stats = generate(machine, ids, Head(seconds, 0.0, 0), max_new_tokens=256, eos_token_id=[]).stats
        assert stats.seconds <= 256 * 0.1 / 0.95
        machine.clock += 60  # plain steps are forgotten


@pytest.mark.parametrize("further", [0.001, 0.003])
def test_a_machine_that_becomes_less_busy_makes_drafting_look_no_cheaper(monkeypatch, further):
    """All steps of a text took three times as long, its plain ones too, of which drafting that pays times few. Drafts of the
    next text are never right, and its steps take 10 ms, so that those plain ones are not old."""
    machine, ids = Machine(monkeypatch, line(0.03, 3 * further), 1.0), torch.tensor([[0, 1, 2]])
    generate(machine, ids, PaSS(slots()), max_new_tokens=300, eos_token_id=[])
    machine.seconds, machine.predicts = line(0.01, further), [False] * len(machine.predicts)
    before = machine.clock
    generate(machine, ids, PaSS(slots()), max_new_tokens=256, eos_token_id=[])
    assert machine.clock - before <= 256 * 0.01 / 0.95
