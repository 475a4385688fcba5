"""The slots' probabilities of the candidates that fill a tree, by slot, transitions and recall, free and under a grammar."""

from itertools import product

import pytest
import torch
from support.generation import slots_for
from support.grammars import Automaton
from support.small_models import VOCABULARY

from pass_ext import Tree
from pass_ext.decoding.drafting.lookahead.short_rows import rows_of
from pass_ext.decoding.drafting.lookahead.tree_filler import TreeFiller
from pass_ext.decoding.requests.grammar import Guide
from pass_ext.decoding.requests.guides import Guides
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.reference.recall import recall

TREE = Tree([-1, 0, 0, 1, 1, 2])
ROOTS = [3, 4]
TEXT = torch.tensor([[3, 7, 3, 8, 7, 3, 0], [4, 4, 9, 9, 2, 3, 4]])
LENGTHS = [6, 7]


def test_rows_are_copied_as_indexing_does():
    for dtype, columns in product((torch.float32, torch.bfloat16), (64, 63)):
        logits = torch.randn(9, columns).to(dtype)
        for x in (logits, torch.randn(9, 2 * columns).to(dtype)[:, ::2]):
            rows = [[4, 5], [8, 8], [0, 1]]
            assert torch.equal(rows_of(x, rows), x[torch.tensor(rows)])


class Filling:
    """Both requests' trees, filled from these logits of slots."""

    def __init__(self, model, rank, recalls, logits, guides=None):
        table = model.get_input_embeddings().weight.detach()
        sampling = SamplingParams().for_batch(2, table.device)
        options = dict(guides=guides, has_probabilities=True, recalls=recalls)
        filler = TreeFiller(slots_for(model, rank=rank), TREE, table, sampling, "coupled", **options)
        with torch.no_grad():
            filled = filler.fill(logits, [0, 1], ROOTS, [length - 1 for length in LENGTHS], TEXT)
        self.transition, self.recalls = filler.offers.transition, recalls
        self.tokens = [[root, *tokens] for root, tokens in zip(ROOTS, filled.tokens, strict=True)]
        self.probabilities = filled.probabilities

    def path(self, b, node):
        """The candidates above a node, the root left out."""
        return [self.tokens[b][v] for v in TREE.path(TREE.parents[node])[1:]]

    def law(self, b, node, row, best):
        """The probabilities below a node's parent: ``best`` are reordered, of the row's log probabilities."""
        shifted = torch.full_like(row, -torch.inf)
        shifted[best] = row[best]
        if self.transition is not None:
            left, right = self.transition
            shifted[best] += right[best] @ left[self.tokens[b][TREE.parents[node]]]
        if self.recalls:
            known = TEXT[b, : LENGTHS[b]].tolist()
            shifted[best] += recall(known, [*known, *self.path(b, node)], best.tolist())
        return shifted.softmax(-1) * row[best].exp().sum()

    def check(self, b, node, law):
        assert self.probabilities[b][node - 1] == pytest.approx(law[self.tokens[b][node]].item(), rel=1e-4)


@pytest.mark.parametrize("recalls", [False, True], ids=["", "recalls"])
@pytest.mark.parametrize("rank", [0, 3])
def test_probabilities_are_those_of_slot_and_transitions(llama, rank, recalls):
    logits = torch.randn(2, 4, VOCABULARY)
    filling = Filling(llama, rank, recalls, logits)
    for b, node in product(range(2), range(1, 6)):
        row = logits[b, TREE.depths[node] - 1].log_softmax(-1)
        is_scored = rank or recalls
        filling.check(b, node, filling.law(b, node, row, row.topk(64).indices) if is_scored else row.exp())


@pytest.mark.parametrize("recalls", [False, True], ids=["", "recalls"])
@pytest.mark.parametrize("rank", [0, 3])
def test_under_a_grammar_probabilities_are_those_among_the_allowed_tokens(llama, rank, recalls):
    """The best 64 of these below each parent, though fewer may be allowed; where none is there is no token."""
    few, many = [5, 7, 9], list(range(10, 90))
    states = {0: dict.fromkeys(few, 1), 1: {**dict.fromkeys(many, 2), 7: 3}, 2: {8: 0}, 3: {}}
    grammars = [Automaton(states, start=start) for start in (0, 1)]
    guides = Guides([Guide(grammar, VOCABULARY, ()) for grammar in grammars], VOCABULARY, TEXT.device)
    logits = torch.randn(2, 4, VOCABULARY)
    logits[1, 0, 7] = 9.0  # so that the second text reaches the state behind which nothing is allowed
    filling = Filling(llama, rank, recalls, logits, guides)
    for b, node in product(range(2), range(1, 6)):
        token, rank_of = filling.tokens[b][node], TREE.children(TREE.parents[node]).index(node)
        allowed = sorted(grammars[b].allowed_behind(filling.path(b, node)))
        if rank_of >= len(allowed):
            assert token == -1 and filling.probabilities[b][node - 1] == 0
            continue
        row = torch.full((VOCABULARY,), -torch.inf)
        row[allowed] = logits[b, TREE.depths[node] - 1, allowed]
        row = row.log_softmax(-1)
        law = filling.law(b, node, row, row.topk(min(64, len(allowed))).indices)
        assert token == law.topk(rank_of + 1).indices[rank_of]
        filling.check(b, node, law)
    assert filling.tokens[1][1] == 7 and filling.tokens[1][3] == -1
