"""The held-out evaluation of look-ahead slots: ranks, overlaps, hit rates and the best tree against brute force."""

import dataclasses
import itertools

import pytest
import torch
from support.training_models import counting, sequential_logits, slots_for, tiny_llama

from pass_ext.reference.recall import recall
from pass_ext.training.common import rates
from pass_ext.training.lookahead import evaluation
from pass_ext.training.lookahead.evaluation import evaluate, hits_of

transformers = pytest.importorskip("transformers")


def test_ranks_are_those_of_a_sort_and_overlaps_those_of_the_laws():
    model = tiny_llama(tied=False)
    embedding = slots_for(model)
    text, anchors = torch.tensor(counting(3, 24)[2].ids), torch.tensor([1, 8, 19])
    ranks, overlaps = hits_of(model, embedding, text, anchors)
    for row, anchor in enumerate(anchors.tolist()):
        logits = sequential_logits(model, embedding, text, anchor).detach()
        order = logits.argsort(dim=-1, descending=True, stable=True)
        assert ranks[row].tolist() == [order[i].tolist().index(int(text[anchor + 2 + i])) for i in range(3)]
        laws = model(input_ids=text[None]).logits[0, anchor + 1 : anchor + 4].softmax(-1)
        wanted = torch.minimum(laws, logits.softmax(-1)).sum(-1)
        torch.testing.assert_close(overlaps[row], wanted.detach(), rtol=1e-4, atol=1e-5)
    many = torch.arange(1, 20)
    apart = [hits_of(model, embedding, text, many[i : i + 1]).ranks for i in range(19)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "_ANCHORS", 4)  # the cache is cut back between groups
        assert torch.equal(hits_of(model, embedding, text, many).ranks, torch.cat(apart))


def test_places_after_a_sliding_window(monkeypatch):
    """The slots' keys push text out of the cache: each group of anchors begins with the text's own."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    llama = tiny_llama().config
    config = MistralConfig(**{name: getattr(llama, name) for name in sizes}, sliding_window=32)
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval().requires_grad_(False)
    embedding, text = slots_for(model), torch.tensor(counting(3, 24)[2].ids)
    many = torch.arange(1, 20)
    whole = hits_of(model, embedding, text, many[:7])
    monkeypatch.setattr(evaluation, "_ANCHORS", 7)
    parts = hits_of(model, embedding, text, many)
    assert torch.equal(parts.ranks[:7], whole.ranks) and torch.equal(parts.overlaps[:7], whole.overlaps)


@pytest.mark.parametrize("anchors", [100, 4, 2, 1])
def test_evaluation_reads_each_text_from_its_prompts_end_to_where_slots_end(anchors):
    """The first place's root is the prompt's last token, and slot 0 stands for the second token after it. Texts go round, so
    that they recall something, which hit rates count in."""
    model = tiny_llama()
    embedding = slots_for(model)  # three slots
    samples = [
        dataclasses.replace(one, ids=[token % 7 for token in one.ids], prompt_tokens=prompt)
        for one, prompt in zip(counting(4, 24), (2, 6, 20, 21), strict=True)
    ]
    places = {2: range(0, 20), 6: range(4, 20), 20: range(18, 20), 21: range(19, 20)}
    wanted, recalled, count = [], [], 0
    for one in samples:
        own = list(places[one.prompt_tokens])
        most = min(anchors, len(own))
        chosen = [own[int(place)] for place in torch.linspace(0, len(own) - 1, most)]
        assert chosen[0] == own[0] and (most == 1 or chosen[-1] == own[-1])
        of_text = model, embedding, torch.tensor(one.ids), torch.tensor(chosen)
        wanted.append(hits_of(*of_text).ranks)
        recalled.append(hits_of(*of_text, recalls=True).ranks)
        count += most
    found = evaluate(model, embedding, samples, anchors)
    assert found["places"] == count and found["hit_rates"] == rates.hit_rates(torch.cat(recalled))
    assert found["slots"] == rates.top_rates(torch.cat(wanted))
    without = rates.hit_rates(torch.cat(wanted))
    assert found["hit_rates"] != without and found["accepted"] == rates.accepted_lengths(torch.cat(wanted), without)


def test_recall_knows_the_text_up_to_a_place_and_not_the_token_that_is_sought():
    model = tiny_llama(tied=False)
    embedding = slots_for(model)
    text, anchors = torch.tensor([token % 7 for token in counting(3, 24)[2].ids]), torch.arange(1, 20)
    text[[9, 15, 16]] = torch.tensor([60, 61, 62])  # new tokens, which nothing recalls
    found = hits_of(model, embedding, text, anchors, recalls=True).ranks
    wanted, leaking = torch.empty_like(found), torch.empty_like(found)
    for row, anchor in enumerate(anchors.tolist()):
        logits = sequential_logits(model, embedding, text, anchor).detach()
        for i in range(3):
            known = text[: anchor + 2 + i].tolist()
            for ranks, more in ((wanted, 0), (leaking, 1)):
                after = recall(text[: len(known) + more].tolist(), known, range(100))
                ranks[row, i] = rates.ranks_among((logits[i] + after)[None], text[len(known)][None])
    assert torch.equal(found, wanted) and not torch.equal(found, leaking)


def test_greedy_texts_have_hit_rates_of_their_own():
    model = tiny_llama()
    embedding, samples = slots_for(model), counting(6, 24)
    warm = [dataclasses.replace(one, temperature=0.8) if i % 2 else one for i, one in enumerate(samples)]
    found, greedy = evaluate(model, embedding, warm, 9), evaluate(model, embedding, samples[::2], 9)
    assert found["hit_rates"] == evaluate(model, embedding, samples, 9)["hit_rates"] != greedy["hit_rates"]
    assert found["greedy_hit_rates"] == greedy["hit_rates"] and found["greedy_places"] == greedy["places"]
    assert "greedy_hit_rates" not in evaluate(model, embedding, warm[1::2], 9)


def test_hit_rates_are_shares_among_places_whose_path_was_right():
    ranks = torch.randint(0, 6, (200, 3), generator=torch.Generator().manual_seed(0))
    found = rates.hit_rates(ranks, count=4)
    for i in range(3):
        reached = [row for row in ranks.tolist() if all(rank < 4 for rank in row[:i])]
        assert 0 < len(reached) < 200 or i == 0
        for k in range(4):
            assert found[i][k] == pytest.approx(sum(row[i] == k for row in reached) / len(reached), abs=1e-5)
    assert rates.hit_rates(torch.full((3, 2), 9), count=4) == ((0.0,) * 4,) * 2
    assert rates.top_rates(ranks)[0]["top 2"] == pytest.approx(sum(r[0] < 2 for r in ranks.tolist()) / 200, abs=1e-4)


def test_the_best_tree_and_what_it_accepts_equal_brute_force():
    table = ((0.5, 0.2, 0.1), (0.4, 0.3, 0.2), (0.6, 0.3, 0.05))
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]

    def value(path):
        product = 1.0
        for depth, rank in enumerate(path):
            product *= table[depth][rank]
        return product

    for nodes in (1, 4, 9):
        tree = rates.best_tree(table, nodes)
        best = sorted(map(value, paths), reverse=True)[:nodes]
        assert sum(map(value, tree)) == pytest.approx(sum(best)) and len(tree) == nodes
        assert all(path[:-1] in tree for path in tree if len(path) > 1)
    ranks = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 2]])
    assert rates.accepted_length(ranks, {(0,), (0, 0), (1,)}) == (2 + 1 + 1 + 2) / 4
    assert rates.accepted_lengths(ranks, table)["chain"] == (3 + 1 + 0 + 2) / 4
