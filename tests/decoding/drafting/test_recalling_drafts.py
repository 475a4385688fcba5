"""Recall: texts that grow, and what a repeating text gains in every loop and with every rule."""

import random

import pytest
import torch
from support.grammars import Automaton

from pass_ext import LookaheadEmbedding, PaSS, Plain, Session, Tree, generate
from pass_ext.decoding.drafting.slot_tokens import GrowingTexts


def test_texts_grow():
    numbers = random.Random(0)
    texts = [[numbers.randrange(99) for _ in range(n)] for n in (1, 7, 3)]
    growing = GrowingTexts(torch.device("cpu"))
    for _ in range(40):
        requests = numbers.sample(range(3), numbers.randint(1, 3))
        rows = growing.of(texts, requests)
        assert rows.shape == (len(requests), max(map(len, texts)))
        for row, b in zip(rows.tolist(), requests, strict=True):
            assert row[: len(texts[b])] == texts[b]
        for text in texts:
            text += [numbers.randrange(99) for _ in range(numbers.randrange(4))]


class Round:
    """A model whose text goes round: 1 2 3 … 11 0 1 …. Slots without numbers predict token 1, whatever comes."""

    def __init__(self):
        self.embedding = torch.eye(12, 64)

    def __call__(self, rows, positions, attend, wanted):
        attend(0, *[rows[:, None]] * 3)
        following = (rows[:, :12].argmax(1) + 1) % 12
        logits = 3.0 * torch.nn.functional.one_hot(following, 12).float()
        return logits if wanted is None else logits[wanted]


def slots_of(rank=0):
    slots = LookaheadEmbedding(3, 64, rank=rank, vocabulary=12)
    torch.nn.init.zeros_(slots.weight)
    return slots


@pytest.mark.parametrize("run_ahead", [False, True], ids=["waiting", "ahead"])
@pytest.mark.parametrize(
    "method", [dict(rows=9), dict(tree=Tree.from_branching((1, 1, 1)), rows=9)], ids=["rows", "tree"]
)
@pytest.mark.parametrize("rank", [0, 2], ids=["slots alone", "transitions"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_text_that_repeats_itself_takes_fewer_calls(count, rank, method, run_ahead):
    starts = torch.tensor([0, 4, 7])[:count, None]
    prompts = torch.arange(12) * (torch.arange(12) >= starts)
    options = dict(
        max_new_tokens=72, eos_token_id=[], temperature=0.0, attention_mask=(torch.arange(12) >= starts).long()
    )
    want = generate(Round(), prompts, Plain(), **options)
    calls = {}
    for recall in (False, True):
        pass_method = PaSS(slots_of(rank), recall=recall, **method)
        model = Round()
        got = generate(model, prompts, pass_method, session=Session(model, run_ahead=run_ahead), **options)
        assert got.sequences.tolist() == want.sequences.tolist()
        calls[recall] = got.stats.model_calls
    assert calls[True] < 0.7 * calls[False], calls


# After an even token no even one may come: nothing is forced, and an odd one is half of what slots could offer.
GRAMMAR = {0: {token: 1 - token % 2 for token in range(12)}, 1: dict.fromkeys(range(1, 12, 2), 0)}


@pytest.mark.parametrize("grammar", [None, GRAMMAR], ids=["free", "grammar"])
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "traversal", "kseq", "rejection_with_replacement"])
def test_every_rule_gains(rule, grammar):
    """Texts are the model's law in test_generate.py and test_grammar.py; here that what is drawn follows the text."""
    tree = Tree.chain(3) if rule == "block" else Tree.from_branching((2, 1, 1))
    options = dict(max_new_tokens=96, eos_token_id=[], temperature=0.4, rule=rule, seeds=[5])
    options |= {} if grammar is None else {"grammar": Automaton(grammar)}
    calls = {}
    for recall in (False, True):
        method = PaSS(slots_of(), recall=recall, tree=tree, rows=16)
        model = Round()
        session = Session(model, run_ahead=False)
        got = generate(model, torch.arange(12).repeat(1, 2), method, session=session, **options)
        calls[recall] = got.stats.model_calls
    assert calls[True] < 0.75 * calls[False], calls
