"""Rows of a batch: shared out by what each gives, as well as by trying every choice; chances, seconds and pauses that are
learned; and texts that stay those of plain decoding."""

import random
from itertools import combinations, product
from types import SimpleNamespace

import pytest
import torch
from support.generation import Prophet, slots_for
from support.grammars import random_automaton
from support.small_models import VOCABULARY, ragged_prompts

from pass_ext import PaSS, Plain, Tree, generate
from pass_ext.decoding.drafting.lookahead import of_pass
from pass_ext.decoding.drafting.lookahead.drafter import LookaheadDrafter
from pass_ext.decoding.drafting.lookahead.tree_filler import TreeFiller
from pass_ext.decoding.drafting.rows import batch_seconds as seconds_module
from pass_ext.decoding.drafting.rows import shared as shared_module
from pass_ext.decoding.drafting.rows.batch_seconds import BatchSeconds
from pass_ext.decoding.drafting.rows.chances import Chances
from pass_ext.decoding.drafting.rows.share import Offer, share_rows
from pass_ext.decoding.drafting.rows.shared import SharedRows
from pass_ext.decoding.planning.step_times import StepTimes

# ---- sharing ----


def chosen(rows):
    return [(r.nodes, r.slots) for r in rows]


def candidates(*chances, weight=1.0, worth=(), slots=None):
    """Children of the root."""
    parents = [-1] + [0] * len(chances)
    return Offer(parents, [1.0, *chances], worth, slots or [0] * len(parents), weight)


def random_offer(rng):
    nodes = rng.randint(1, 5)
    parents = [-1] + [rng.randrange(node) for node in range(1, nodes)]
    chances = [1.0]
    for node in range(1, nodes):  # of exclusive events
        left = 1 - sum(chance for chance, parent in zip(chances, parents, strict=False) if parent == parents[node])
        chances.append(left * rng.uniform(0.45, 0.8))
    return Offer(parents, chances, (), [0] * nodes, rng.uniform(0.7, 1.3))


def closed_sets(offer):
    """All sets of nodes that hold the parents of their members, with the tokens that they give."""
    for size in range(len(offer.parents)):
        for nodes in combinations(range(1, len(offer.parents)), size):
            if all(offer.parents[node] in (0, *nodes) for node in nodes):
                reach = {0: 1.0}
                for node in nodes:
                    reach[node] = reach[offer.parents[node]] * offer.chances[node]
                yield len(nodes), offer.weight * (sum(reach.values()) - 1)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_choice_gives_more_tokens_per_second(seed):
    rng = random.Random(seed)
    offers = [random_offer(rng) for _ in range(rng.randint(1, 3))]
    requests, slope, knee = len(offers), rng.uniform(0.0, 0.4), rng.randint(1, 6)

    def seconds(rows):
        return 1 + slope * max(0, rows - knee)

    shares = share_rows(offers, seconds)
    gain = 0.0
    for offer, rows in zip(offers, shares, strict=True):
        assert rows.nodes == sorted(rows.nodes) and all(offer.parents[node] in rows.nodes for node in rows.nodes[1:])
        reach = {0: 1.0}
        for node in rows.nodes[1:]:
            reach[node] = reach[offer.parents[node]] * offer.chances[node]
            assert reach[node] * offer.weight >= 0.02
        gain += offer.weight * (sum(reach.values()) - 1)
    plain = requests / seconds(requests)
    best = max(
        (requests + sum(value for _, value in parts)) / seconds(requests + sum(rows for rows, _ in parts))
        for parts in product(*(list(closed_sets(offer)) for offer in offers))
    )
    rate = (requests + gain) / seconds(sum(len(rows.nodes) for rows in shares))
    if best < 1.15 * plain:
        assert chosen(shares) == [([0], {})] * requests
    else:
        assert rate > 0.985 * best, "rows of less than 0.02 tokens are left out"


def test_rows_that_do_not_pay_leave_the_roots():
    offers = [candidates(0.9, 0.05)] * 3
    assert chosen(share_rows(offers, lambda rows: 1.0 + 10 * (rows - 3))) == [([0], {})] * 3
    assert chosen(share_rows(offers, lambda rows: 1.0 + 0.29 * (rows - 3))) == [([0], {})] * 3, "15 % are needed"
    assert share_rows([], lambda rows: 1.0) == []
    assert chosen(share_rows([candidates(0.9, 0.05)], lambda rows: 1.0)) == [([0, 1, 2], {})], "one request, free rows"


def test_a_sure_request_gets_more_rows_than_an_unsure_one():
    sure = Offer([-1, 0, 1, 2], [1.0, 0.9, 0.9, 0.9], (), [0] * 4)
    unsure = Offer([-1, 0, 1, 2], [1.0, 0.3, 0.3, 0.3], (), [0] * 4)
    few = share_rows([unsure, sure], lambda rows: 1.0 if rows <= 4 else 9.0)
    assert chosen(few) == [([0], {}), ([0, 1, 2], {})]
    assert chosen(share_rows([sure, unsure], lambda rows: 1.0 if rows <= 4 else 9.0)) == [([0, 1, 2], {}), ([0], {})]
    more = share_rows([unsure, sure], lambda rows: 1.0 if rows <= 6 else 9.0)
    assert chosen(more) == [([0, 1], {}), ([0, 1, 2, 3], {})]


def test_of_equal_rows_the_first_request_has_the_first():
    offers = [candidates(0.6), candidates(0.6), candidates(0.6)]
    for _ in range(3):
        shares = share_rows(offers, lambda rows: 1.0 if rows <= 4 else 9.0)
        assert chosen(shares) == [([0, 1], {}), ([0], {}), ([0], {})]
    late = [candidates(0.6), candidates(0.6, weight=1.2), candidates(0.6)]
    assert chosen(share_rows(late, lambda rows: 1.0 if rows <= 4 else 9.0))[1] == ([0, 1], {}), "who lags comes first"


def test_slots_stand_where_the_next_step_will_begin():
    room = 2, 2
    sure = candidates(0.9, worth=(0.5, 0.3), slots=room)
    assert chosen(share_rows([sure], lambda rows: 1.0 if rows <= 4 else 9.0)) == [([0, 1], {1: 2})]
    unsure = candidates(0.15, worth=(0.5, 0.3), slots=room)
    assert chosen(share_rows([unsure], lambda rows: 1.0 if rows <= 3 else 9.0)) == [([0], {0: 2})]
    assert chosen(share_rows([unsure], lambda rows: 1.0 if rows <= 2 else 9.0)) == [([0], {0: 1})]
    short = candidates(0.9, worth=(0.5, 0.3), slots=(2, 1))
    assert chosen(share_rows([short], lambda rows: 1.0 if rows <= 4 else 9.0)) == [([0, 1], {0: 1, 1: 1})], "one fits"


def test_a_candidate_makes_the_slots_of_its_parent_worth_less():
    offer = candidates(0.5, worth=(0.6,), slots=(1, 0))
    assert chosen(share_rows([offer], lambda rows: 1.0 if rows <= 2 else 1.2)) == [([0], {0: 1})]
    assert chosen(share_rows([offer], lambda rows: 1.0 if rows <= 2 else 1.1)) == [([0, 1], {0: 1})]


# ---- chances ----


def test_a_chance_begins_as_the_probability_and_follows_the_text():
    chances = Chances(2)
    assert chances.of(1, [0.4, 0.3, 0.2]) == pytest.approx([0.4, 0.3, 0.2])
    rng = random.Random(0)
    for _ in range(3000):
        chances.learn(1, chances.of(1, [0.4])[0], rng.random() < 0.7)
    learned = chances.of(1, [0.4, 0.3, 0.3])
    assert learned[0] == pytest.approx(0.7, abs=0.15) and sum(learned) == pytest.approx(1.0)
    assert learned[1] == learned[2] == pytest.approx((1 - learned[0]) / 2)
    assert chances.of(2, [0.4, 0.3]) == pytest.approx([0.4, 0.3]), "every depth has its own"
    assert chances.of(1, [1.0, 0.0])[0] < 1 and chances.of(1, [0.0, 0.0])[0] > 0
    assert sum(chances.of(1, [0.2, 0.7])) <= 1, "the best under the noise is not the most probable"


# ---- seconds ----


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(seconds_module.time, "perf_counter", lambda: now.seconds)
    seconds_module.batch_seconds.cache_clear()
    yield now
    seconds_module.batch_seconds.cache_clear()


TIMES = StepTimes((1, 101), (0.010, 0.110))  # 1 ms a row, from 10 ms on


def test_requests_add_their_seconds_to_those_of_the_rows(clock):
    seconds = BatchSeconds(TIMES)
    assert not seconds.knows_plain and seconds.at(4, 4) == pytest.approx(0.013)
    for more in (0.008, 0.008, 0.004, 0.012, 0.012, 0.008, 0.012, 0.012):
        assert not seconds.knows_plain
        seconds.add(4, 4, 0.013 + more, is_plain=True)
    assert seconds.knows_plain
    assert seconds.at(4, 4) == pytest.approx(0.017), "an undisturbed step"
    assert seconds.usual_plain(4) == pytest.approx(0.013 + 0.008), "the lower quartile"
    assert seconds.at(9, 4) == pytest.approx(0.018 + 0.004), "drafted steps: as the plain ones, at first"
    assert seconds.at(2, 2) == pytest.approx(0.011 + 0.002), "two of them: half of it"
    for _ in range(4):
        seconds.add(9, 4, 0.018 + 0.020, is_plain=False)
    assert seconds.at(9, 4) == pytest.approx(0.038) and seconds.at(5, 4) == pytest.approx(0.034)
    assert seconds.at(4, 4) == pytest.approx(0.017)
    clock.seconds += 11
    assert seconds.at(9, 4) == pytest.approx(0.022), "drafting is tried again"
    clock.seconds += 50
    assert not seconds.knows_plain


def test_a_drafted_step_never_looks_faster_than_a_plain_one(clock):
    seconds = BatchSeconds(TIMES)
    for _ in range(8):
        seconds.add(4, 4, 0.033, is_plain=True)
        seconds.add(9, 4, 0.019, is_plain=False)
    assert seconds.at(9, 4) == seconds.at(4, 4) == pytest.approx(0.033)


# ---- a batch's steps ----

USUAL = 1.0  # seconds of a plain step


def shared_rows(requests, monkeypatch, seconds=None, slots=1, rates=((0.5, 0.2),)):
    seconds = seconds or SimpleNamespace(
        at=lambda rows, requests: 1.0, knows_plain=True, usual_plain=lambda n: USUAL, add=lambda *_, is_plain: None
    )
    monkeypatch.setattr(shared_module, "batch_seconds", lambda *_: seconds)
    texts = [[0] for _ in range(requests)]
    return SharedRows(StepTimes((1, 64), (1.0, 1.0)), texts, Tree.chain(slots), slots, 2 * slots, rates), texts


def test_candidates_are_parts_of_the_tree_with_their_tokens(monkeypatch):
    rows, _ = shared_rows(3, monkeypatch, slots=2, rates=((0.5,), (0.5,)))
    first, second, ended = rows.choose([9, 1, 0], [10, 2, 0], {0: ([7, 8], [0.9, 0.8]), 1: ([5, 6], [0.9, 0.9])})
    assert list(first.tokens) == [7, 8] and first.tree == Tree.chain(2) and dict(first.groups)[2] == 2
    assert list(second.tokens) == [5] and second.groups == (), (
        "two tokens are left: one candidate, and no further step drafts"
    )
    assert ended is None
    assert rows.choose([9, 0, 0], [9, 1, 0], {})[1] is None
    probe = rows.choose([9, 0, 0], [9, 1, 0], {})[0]
    assert probe.tree == Tree.chain(0) and probe.groups == ((0, 2),)


def test_a_missing_token_ends_a_path(monkeypatch):
    rows, _ = shared_rows(2, monkeypatch, slots=2, rates=((0.5,), (0.5,)))
    first, second = rows.choose([9, 9], [10, 10], {0: ([7, -1], [0.9, 0.0]), 1: ([-1, 6], [0.0, 0.9])})
    assert list(first.tokens) == [7] and list(second.tokens) == []


def test_slots_that_draft_badly_lose_their_worth(monkeypatch):
    dear = SimpleNamespace(
        at=lambda rows, requests: 1.0 + 0.1 * (rows - requests),
        knows_plain=True,
        usual_plain=lambda n: USUAL,
        add=lambda *_, is_plain: None,
    )
    rows, texts = shared_rows(2, monkeypatch, dear)
    rows._times = StepTimes((1, 101), (1.0, 11.0))
    for step in range(40):
        rows.begin(rows._rows)
        rows.choose([90 - step] * 2, [91 - step] * 2, {0: ([3], [0.02]), 1: ([4], [0.9])})
        for text, token in zip(texts, (9, 4), strict=True):
            text.append(token)
        rows.learn([1, 1])
        rows._cost = 0.0
    bad, good = (worth[0] for worth in rows._worth)
    assert bad < 0.02 and good > 0.4
    shares = rows.choose([40, 40], [41, 41], {})
    assert shares[0] is None and shares[1].groups == ((0, 1),)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ((7, 5), [(1, True), (2, True)]),
        ((7, 5, 7), [(1, True), (2, True)]),
        ((7, 6), [(1, True), (2, False)]),
        ((8, 6), [(1, False), (2, True)]),
        ((8, 5), [(1, False), (2, False)]),
        ((9, 5), [(1, False)]),
        ((7,), [(1, True)]),
    ],
)
def test_chances_learn_along_the_path_of_the_text(monkeypatch, text, wanted):
    """At each depth whether the best candidate below the right node was right; behind a wrong path nothing."""
    rows, texts = shared_rows(1, monkeypatch, slots=2, rates=((0.5, 0.2), (0.5,)))
    rows._tree, rows._none = Tree.from_branching((2, 1)), (1.0, 0.0, 0.0, 0.0, 0.0)
    rows._room = rows._slots_within(7)
    learned = []
    monkeypatch.setattr(rows._chances, "learn", lambda depth, chance, right: learned.append((depth, right)))
    rows.begin(1)
    rows.choose([9], [10], {0: ([7, 8, 5, 6], [0.6, 0.3, 0.9, 0.9])})
    texts[0] += text
    rows.learn([len(text)])
    assert learned == wanted


def test_where_no_slots_pay_the_next_steps_choose_nothing(monkeypatch):
    dear = SimpleNamespace(
        at=lambda rows, requests: 1.0 + 9 * (rows - requests),
        knows_plain=True,
        usual_plain=lambda n: USUAL,
        add=lambda *_, is_plain: None,
    )
    rows, _ = shared_rows(2, monkeypatch, dear)
    assert not rows.begins_with_slots and shared_rows(2, monkeypatch)[0].begins_with_slots
    assert rows.choose([9, 9], [10, 10], {}) == [None, None]
    dear.at = lambda rows, requests: 1.0
    for step in range(7):
        assert rows.choose([9, 9], [10 - step, 10 - step], {}) == [None, None]
    assert None not in rows.choose([9, 9], [3, 3], {})
    rows, _ = shared_rows(2, monkeypatch, SimpleNamespace(**{**vars(dear), "knows_plain": False}))
    assert rows.choose([9, 9], [10, 10], {0: ([3], [0.9])}) == [None, None], "plain steps are timed first"
    rows, _ = shared_rows(1, monkeypatch, SimpleNamespace(**{**vars(dear), "knows_plain": False}))
    assert rows.begins_with_slots and rows.choose([9], [10], {0: ([3], [0.9])}) != [None], "one's are planned"


def test_a_batch_that_loses_time_pauses_and_the_slowest_text_counts(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(shared_module.time, "perf_counter", lambda: now.seconds)
    for gain, fewest, most in ((0, 4, 8), (1, 37, 39)):
        rows, texts = shared_rows(2, monkeypatch)
        left, drafted = [200, 160], 0
        for _ in range(40):
            rows.begin(rows._rows)
            step = rows.choose([tokens - 1 for tokens in left], left, {b: ([3], [0.9]) for b in (0, 1)})
            drafted += step[0] is not None
            now.seconds += 1.5 if step[0] is not None else 1.0
            gained = [1 + gain * (step[0] is not None), 2 * (step[0] is not None) or 1]
            for b in (0, 1):
                texts[b] += [3] * gained[b]
                left[b] -= gained[b]
            rows.learn(gained)
        assert fewest <= drafted <= most, gain


def test_a_step_counts_with_the_rows_that_a_grammar_forced(monkeypatch):
    """A step for which nothing was drafted is plain, however many tokens were forced."""
    now, counted = SimpleNamespace(seconds=0.0), []
    monkeypatch.setattr(shared_module.time, "perf_counter", lambda: now.seconds)
    seconds = SimpleNamespace(
        at=lambda rows, requests: 1.0 + 0.1 * rows,
        knows_plain=True,
        usual_plain=lambda n: USUAL,
        add=lambda rows, requests, took, *, is_plain: counted.append((rows, requests, took, is_plain)),
    )
    rows, texts = shared_rows(1, monkeypatch, seconds)
    for took, draft, of_call in ((1.5, {}, 6), (2.0, {0: ([3], [0.9])}, 9)):
        rows._idle = 1  # no slots where there is no draft
        rows.begin(of_call)
        rows.choose([20], [21], draft)
        now.seconds += took
        texts[0].append(3)
        rows.learn([1])
    rows.begin(8)
    assert counted == [(9, 1, 1.5, True), (8, 1, 2.0, False)]
    assert rows._cost == pytest.approx(2.0)


# ---- texts ----


class SureProphet(Prophet):
    """A prophet who says how sure he is: very, of tokens that come true."""

    def __init__(self, monkeypatch, futures, seed=0):
        super().__init__(monkeypatch, futures, seed)
        plain_fill = TreeFiller.fill

        def fill(filler, slots, requests, roots, positions, text):
            filled = plain_fill(filler, slots, requests, roots, positions, text)
            shares = []
            for b, at, tokens in zip(requests, positions, filled.tokens, strict=True):
                future = self.futures[b]
                places = [at + filler.tree.depths[node] for node in range(1, filler.tree.num_nodes)]
                right = [p < len(future) and future[p] == token for p, token in zip(places, tokens, strict=True)]
                shares.append([0.85 if is_right else 0.05 for is_right in right])
            return filled._replace(probabilities=shares)

        monkeypatch.setattr(TreeFiller, "fill", fill)


def steady_slots(model, monkeypatch):
    """Slots with hit rates, where rows are cheap and every step takes the time that is expected."""
    monkeypatch.setattr(
        "pass_ext.decoding.planning.for_lookahead.measured_times", lambda *_, **__: StepTimes((1, 64), (1.0, 1.3))
    )
    steady = SimpleNamespace(
        at=lambda rows, requests: 1.0 + 0.02 * rows,
        knows_plain=True,
        usual_plain=lambda n: USUAL,
        add=lambda *_, is_plain: None,
    )
    monkeypatch.setattr(shared_module, "batch_seconds", lambda *_: steady)
    slots = slots_for(model, rank=3)
    slots.hit_rates = [[0.6, 0.2], [0.5, 0.2], [0.4, 0.1], [0.3, 0.1]]
    return slots


@pytest.mark.parametrize("temperature", [0.0, [0.0, 0.8, 1.0, 0.6]])
@pytest.mark.parametrize("foresees", [True, False])
def test_texts_of_a_batch_are_those_of_plain_decoding(llama, monkeypatch, temperature, foresees):
    """Ragged prompts; texts end early and at different steps; rows differ from request to request."""
    ids, mask = ragged_prompts(4)
    slots = steady_slots(llama, monkeypatch)
    options = dict(max_new_tokens=24, attention_mask=mask, temperature=temperature, seeds=[1, 2, 3, 4])
    plain = generate(llama, ids, Plain(), eos_token_id=[], **options)
    width = ids.shape[1]
    ends = [plain.sequences[0, width + 5].item(), plain.sequences[2, width + 11].item()]
    plain = generate(llama, ids, Plain(), eos_token_id=ends, **options)
    assert len(set(plain.lengths)) > 1
    if foresees:
        texts = [row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)]
        SureProphet(
            monkeypatch,
            [text + row[width:].tolist() for text, row in zip(texts, plain.sequences, strict=True)],
        )
    seen, inner = [], LookaheadDrafter._shared

    def spied(self, shared, batch):
        result = inner(self, shared, batch)
        for b, (tokens, _) in shared._drafts.items():
            group = len(batch.steps[b].tree.group_rows(batch.last_nodes[b]))
            deep = [token for token, depth in zip(tokens, self.tree.depths[1:], strict=True) if depth > group]
            assert set(deep) <= {-1}, "no slot foresaw them"
        seen.append([None if part is None else (part.tree, part.groups) for part in result])
        return result

    monkeypatch.setattr(LookaheadDrafter, "_shared", spied)
    got = generate(llama, ids, PaSS(slots), eos_token_id=ends, **options)
    assert torch.equal(got.sequences, plain.sequences) and got.lengths == plain.lengths
    if foresees:
        assert got.stats.num_draft_tokens > 0
        assert any(len({part for part in step if part is not None}) > 1 for step in seen), (
            "requests have their own rows"
        )
        assert got.stats.model_calls < 0.75 * plain.stats.model_calls


@pytest.mark.parametrize("temperature", [0.0, [0.0, 0.8, 1.0, 0.6]])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("foresees", [True, False])
def test_texts_under_a_grammar_are_those_of_plain_decoding(llama, monkeypatch, foresees, count, temperature):
    """One text has no grammar; in all others tokens are forced, behind roots and candidates."""
    ids, mask = (part[:count] for part in ragged_prompts(4))
    slots = steady_slots(llama, monkeypatch)
    grammar = [random_automaton(VOCABULARY, seed=seed) if seed != 2 else None for seed in range(count)]
    temperature = temperature if temperature == 0.0 else temperature[-count:]
    options = dict(
        max_new_tokens=24, attention_mask=mask, temperature=temperature, seeds=range(count), eos_token_id=[],
        grammar=grammar,
    )  # fmt: skip
    plain = generate(llama, ids, Plain(), **options)
    if foresees:
        texts = [row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)]
        new = [row[ids.shape[1] :].tolist() for row in plain.sequences]
        SureProphet(monkeypatch, [text + written for text, written in zip(texts, new, strict=True)])
    got = generate(llama, ids, PaSS(slots), **options)
    assert torch.equal(got.sequences, plain.sequences) and got.lengths == plain.lengths
    assert got.stats.num_draft_tokens > 0
    if foresees:
        assert got.stats.model_calls < 0.75 * plain.stats.model_calls


@pytest.mark.parametrize(
    ("options", "method", "shares"),
    [
        ({}, {}, True),
        (dict(grammar=random_automaton(VOCABULARY, seed=1)), {}, True),
        (dict(grammar=random_automaton(VOCABULARY, seed=1)), dict(rows=6), False),
        (dict(temperature=0.9, seeds=1), {}, True),
        (dict(temperature=0.9, rule="rejection"), {}, False),
        ({}, dict(passes=2), False),
        ({}, dict(tree=Tree.chain(2)), False),
        ({}, dict(rows=6), False),
    ],
)
def test_rows_are_shared_where_leaving_candidates_out_is_exact(llama, monkeypatch, options, method, shares):
    monkeypatch.setattr(
        "pass_ext.decoding.planning.for_lookahead.measured_times", lambda *_, **__: StepTimes((1, 64), (1.0, 1.0))
    )
    made, inner = [], of_pass.lookahead_drafter

    def spied(*arguments, **keywords):
        made.append(inner(*arguments, **keywords))
        return made[-1]

    monkeypatch.setattr(of_pass, "lookahead_drafter", spied)
    ids, mask = ragged_prompts(2)
    slots = slots_for(llama)
    for count in (2, 1):
        generate(llama, ids[:count], PaSS(slots, **method), attention_mask=mask[:count], max_new_tokens=3, **options)
    assert [drafter.shared is not None for drafter in made] == [shares, shares and "grammar" in options]
