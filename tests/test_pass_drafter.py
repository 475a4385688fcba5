"""Candidates from look-ahead slots: as many children as a tree asks for, in every kind of draft."""

import pytest
import torch

from pass_ext import LookaheadEmbedding, Tree
from pass_ext.decoding.pass_drafter import PassDrafter
from pass_ext.decoding.sampling import SamplingParams

STAR = Tree([-1] + [0] * 70 + [1, 1])


@pytest.mark.parametrize("vocabulary", [50, 200])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_more_children_than_a_shortlist_or_a_vocabulary_has(vocabulary, rank, temperature):
    torch.manual_seed(0)
    table, slots = torch.randn(vocabulary, 16), torch.randn(2, 2, vocabulary)
    lookahead = LookaheadEmbedding.from_table(2, table, rank=rank)
    if rank:
        torch.nn.init.normal_(lookahead.transition_right, std=0.01)
    sampling = SamplingParams.of(2, torch.device("cpu"), temperature=temperature, seeds=3)
    drafter = PassDrafter(lookahead, STAR, table, sampling, "coupled")
    with torch.no_grad():
        drafted = drafter.draft(slots, [0, 1], [3, 4], [5, 6]).tokens
    for own, logits in zip(drafted, slots, strict=True):
        known = [token for token in own[:70] if token >= 0]
        assert len(set(known)) == len(known) == min(70, vocabulary), (
            "every child is another token, while there are some"
        )
        assert own[len(known) : 70] == [-1] * (70 - len(known))
        assert own[70] >= 0 and own[71] >= 0
        if not temperature and not rank:
            assert known == logits[0].topk(len(known)).indices.tolist()
