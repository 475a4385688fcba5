"""Rows that the host chooses, for all requests together: as good as by trying every choice; and texts that stay those of plain
decoding, also under a grammar."""

import random
import time
from itertools import combinations, product

import pytest
import torch
from support.generation import Prophet, slots_for
from support.grammars import random_automaton
from support.small_models import VOCABULARY, ragged_prompts

from pass_ext import PaSS, Plain, Session, generate
from pass_ext.decoding.drafting.lookahead.chosen_rows import Offer, choose_rows
from pass_ext.decoding.drafting.lookahead.tree_filler import TreeFiller
from pass_ext.decoding.planning.step_times import StepTimes

# ---- the choice ----


def chosen(rows):
    return [(r.nodes, r.slots) for r in rows]


def candidates(*chances, worth=(), slots=None):
    """Children of the root."""
    parents = [-1] + [0] * len(chances)
    return Offer(parents, [1.0, *chances], worth, slots or [0] * len(parents))


def random_offer(rng):
    nodes = rng.randint(1, 5)
    parents = [-1] + [rng.randrange(node) for node in range(1, nodes)]
    chances = [1.0]
    for node in range(1, nodes):  # of exclusive events
        left = 1 - sum(chance for chance, parent in zip(chances, parents, strict=False) if parent == parents[node])
        chances.append(left * rng.uniform(0.45, 0.8))
    return Offer(parents, chances, (), [0] * nodes)


def closed_sets(offer):
    """All sets of nodes that hold the parents of their members, with the tokens that they give."""
    for size in range(len(offer.parents)):
        for nodes in combinations(range(1, len(offer.parents)), size):
            if all(offer.parents[node] in (0, *nodes) for node in nodes):
                reach = {0: 1.0}
                for node in nodes:
                    reach[node] = reach[offer.parents[node]] * offer.chances[node]
                yield len(nodes), sum(reach.values()) - 1


@pytest.mark.parametrize("seed", range(30))
def test_no_other_choice_gives_more_tokens_per_second(seed):
    rng = random.Random(seed)
    offers = [random_offer(rng) for _ in range(rng.randint(1, 3))]
    requests, slope, knee = len(offers), rng.uniform(0.0, 0.4), rng.randint(1, 6)

    def seconds(rows):
        return 1 + slope * max(0, rows - knee)

    shares = choose_rows(offers, seconds)
    gain = 0.0
    for offer, rows in zip(offers, shares, strict=True):
        assert rows.nodes == sorted(rows.nodes) and all(offer.parents[node] in rows.nodes for node in rows.nodes[1:])
        reach = {0: 1.0}
        for node in rows.nodes[1:]:
            reach[node] = reach[offer.parents[node]] * offer.chances[node]
            assert reach[node] >= 0.02
        gain += sum(reach.values()) - 1
    best = max(
        (requests + sum(value for _, value in parts)) / seconds(requests + sum(rows for rows, _ in parts))
        for parts in product(*(list(closed_sets(offer)) for offer in offers))
    )
    rate = (requests + gain) / seconds(sum(len(rows.nodes) for rows in shares))
    assert rate > 0.985 * best, "rows of less than 0.02 tokens are left out"


def test_rows_that_do_not_pay_leave_the_roots():
    offers = [candidates(0.9, 0.05)] * 3
    assert chosen(choose_rows(offers, lambda rows: 1.0 + 10 * (rows - 3))) == [([0], {})] * 3
    assert choose_rows([], lambda rows: 1.0) == []
    assert chosen(choose_rows([candidates(0.9, 0.05)], lambda rows: 1.0)) == [([0, 1, 2], {})], "one request, free rows"


def test_a_sure_request_gets_more_rows_than_an_unsure_one():
    sure = Offer([-1, 0, 1, 2], [1.0, 0.9, 0.9, 0.9], (), [0] * 4)
    unsure = Offer([-1, 0, 1, 2], [1.0, 0.3, 0.3, 0.3], (), [0] * 4)
    few = choose_rows([unsure, sure], lambda rows: 1.0 if rows <= 4 else 9.0)
    assert chosen(few) == [([0], {}), ([0, 1, 2], {})]
    assert chosen(choose_rows([sure, unsure], lambda rows: 1.0 if rows <= 4 else 9.0)) == [([0, 1, 2], {}), ([0], {})]
    more = choose_rows([unsure, sure], lambda rows: 1.0 if rows <= 6 else 9.0)
    assert chosen(more) == [([0, 1], {}), ([0, 1, 2, 3], {})]


def test_of_equal_rows_the_first_request_has_the_first():
    offers = [candidates(0.6), candidates(0.6), candidates(0.6)]
    for _ in range(3):
        shares = choose_rows(offers, lambda rows: 1.0 if rows <= 4 else 9.0)
        assert chosen(shares) == [([0, 1], {}), ([0], {}), ([0], {})]


def test_slots_stand_where_the_next_step_will_begin():
    room = 2, 2
    sure = candidates(0.9, worth=(0.5, 0.3), slots=room)
    assert chosen(choose_rows([sure], lambda rows: 1.0 if rows <= 4 else 9.0)) == [([0, 1], {1: 2})]
    unsure = candidates(0.15, worth=(0.5, 0.3), slots=room)
    assert chosen(choose_rows([unsure], lambda rows: 1.0 if rows <= 3 else 9.0)) == [([0], {0: 2})]
    assert chosen(choose_rows([unsure], lambda rows: 1.0 if rows <= 2 else 9.0)) == [([0], {0: 1})]
    short = candidates(0.9, worth=(0.5, 0.3), slots=(2, 1))
    assert chosen(choose_rows([short], lambda rows: 1.0 if rows <= 4 else 9.0)) == [([0, 1], {0: 1, 1: 1})], "one fits"


def test_a_candidate_makes_the_slots_of_its_parent_worth_less():
    offer = candidates(0.5, worth=(0.6,), slots=(1, 0))
    assert chosen(choose_rows([offer], lambda rows: 1.0 if rows <= 2 else 1.2)) == [([0], {0: 1})]
    assert chosen(choose_rows([offer], lambda rows: 1.0 if rows <= 2 else 1.1)) == [([0, 1], {0: 1})]


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


def sure_slots(model, monkeypatch, rows_called):
    """Slots with hit rates, where rows are cheap: all steps take the same time, by a clock that calls alone move."""
    monkeypatch.setattr(time, "perf_counter", lambda: 1e8 + 0.01 * len(rows_called))
    monkeypatch.setattr(
        "pass_ext.decoding.planning.for_lookahead.measured_times", lambda *_, **__: StepTimes((1, 64), (1.0, 1.3))
    )
    slots = slots_for(model, rank=3)
    slots.hit_rates = [[0.6, 0.2], [0.5, 0.2], [0.4, 0.1], [0.3, 0.1]]
    return slots


@pytest.mark.parametrize("temperature", [0.0, [0.0, 0.8, 1.0, 0.6]])
@pytest.mark.parametrize("foresees", [True, False])
def test_texts_of_a_batch_are_those_of_plain_decoding(llama, monkeypatch, rows_called, temperature, foresees):
    """Ragged prompts; texts end early and at different steps; rows differ from request to request."""
    ids, mask = ragged_prompts(4)
    slots = sure_slots(llama, monkeypatch, rows_called)
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
    got = generate(llama, ids, PaSS(slots), eos_token_id=ends, session=Session(llama, run_ahead=False), **options)
    assert torch.equal(got.sequences, plain.sequences) and got.lengths == plain.lengths
    if foresees:
        assert got.stats.num_draft_tokens > 0
        assert got.stats.model_calls < 0.75 * plain.stats.model_calls


@pytest.mark.parametrize("temperature", [0.0, [0.0, 0.8, 1.0, 0.6]])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("foresees", [True, False])
def test_texts_under_a_grammar_are_those_of_plain_decoding(
    llama, monkeypatch, rows_called, foresees, count, temperature
):
    """One text has no grammar; in all others tokens are forced, behind roots and candidates."""
    ids, mask = (part[:count] for part in ragged_prompts(4))
    slots = sure_slots(llama, monkeypatch, rows_called)
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
