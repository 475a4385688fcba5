"""Texts under a grammar have the target's masked distribution, by enumeration: every candidate that the draft model can draw
under the grammar's masks, and every outcome of the coins. Drafter, masks, pruning and forced chains are real; draws are
replayed, and the rules are those of pass_ext.reference, which test_accept_exactness.py proves.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from support.drafted import PROMPT, Judged, Recalling, emitted, replayed, variation
from support.enumeration import EXACT, Replay, World, outcomes
from support.grammars import Automaton

import pass_ext.decoding.drafting.from_draft_model as model_drafter
from pass_ext import Tree
from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.drafting.drafting import guided
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.requests.grammar import Guide
from pass_ext.decoding.requests.guides import Guides
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.decoding.session.session import Session
from pass_ext.reference.common.distribution import process

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 4
# After 0 three tokens may follow, after 1 two; 2 forces 3, then 1.
GRAMMAR = Automaton({0: {0: 0, 1: 1, 2: 2}, 1: {0: 0, 3: 1}, 2: {3: 3}, 3: {1: 0}})


class Masked(World):
    """A world whose target obeys the grammar."""

    def at(self, text):
        if text not in self.laws:
            logits = torch.randn(self.vocabulary, generator=self.generator, dtype=torch.float64) * self.spread
            if allowed := GRAMMAR.allowed_after(text):  # a forbidden text has no probability anyway
                logits[[token for token in range(self.vocabulary) if token not in allowed]] = -math.inf
            self.laws[text] = (process(logits, **self.filters), None)
        return self.laws[text]


def drafted_once(tree, rule, world, replay, levels):
    """One step's candidates after PROMPT."""
    sampling = SamplingParams(temperature=1.0, seeds=0).for_batch(1, torch.device("cpu"))
    target, guide = packed_model(Recalling(99, VOCABULARY)), Guide(GRAMMAR, VOCABULARY, ())
    guides = Guides([guide], VOCABULARY, torch.device("cpu"))
    drafter = model_drafter.ModelDrafter(
        packed_model(Recalling(5, VOCABULARY)), tree, DraftContext(target, [PROMPT], sampling, rule, guides=guides)
    )
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(model_drafter, "draw_children", replayed(replay, world.filters))
        drafter.begin(Session(target, 1, 16))
        proposal = drafter.draft([levels])
    candidates = guided(guide, proposal.candidates[0], levels, 16, drawn=True, leaves_only=True)
    return SimpleNamespace(candidates=candidates, logits=proposal.draft_logits, allowed=proposal.draft_allowed)


def measured(tree, rule, world, levels=3, spoil=lambda drafted: None):
    """Total variation of one step, continued by the target, from the target's masked distribution; and the depths of trees."""
    masses, depths = {}, set()
    for mass, drafted, _ in outcomes(lambda replay: drafted_once(tree, rule, world, replay, levels)):
        spoil(drafted)
        request = Judged(drafted.candidates, drafted.logits, world, drafted.allowed)
        depths.add(request.max_depth)
        assert all(GRAMMAR.state_after(request.text(node)) is not None for node in range(len(request.parents)))
        emitted(request, rule, masses, mass)
    horizon = levels + 1
    return variation(world.completed(masses, horizon), world, horizon), depths


TREES = {"chain": Tree.chain(2), "tree": Tree.from_branching((2, 1)), "bushy": Tree.from_branching((2, 2))}
CASES = [
    ("rejection", "chain"), ("block", "chain"), ("traversal", "tree"), ("rejection", "tree"), ("rejection", "bushy"),
    ("kseq", "tree"), ("rejection_with_replacement", "tree"),
]  # fmt: skip
WORLDS = [Masked(1, VOCABULARY), Masked(2, VOCABULARY, filters={"temperature": 0.7, "top_k": 2})]


@pytest.mark.parametrize("rule,shape", CASES)
def test_exact_under_a_grammar(rule, shape):
    """Forced tokens follow some leaves. Draws with replacement give equal siblings, each with a chain of its own."""
    for world in WORLDS:
        distance, depths = measured(TREES[shape], rule, world)
        assert distance < EXACT
        assert 3 in depths


def no_masks(drafted):
    drafted.allowed = torch.full_like(drafted.allowed, -1)


def masks_in_another_order(drafted):
    drafted.allowed = drafted.allowed.flip(0)


def a_draw_thrown_away(drafted):
    """The last leaf is missing where its token is 0: a decision by the token itself, after it was drawn."""
    tree, tokens, rows = drafted.candidates.tree, list(drafted.candidates.tokens), list(drafted.candidates.draft_rows)
    if tokens[-1] == 0:
        drafted.candidates = SimpleNamespace(tree=Tree(tree.parents[:-1]), tokens=tokens[:-1], draft_rows=rows[:-1])


@pytest.mark.parametrize("fault", [no_masks, masks_in_another_order, a_draw_thrown_away])
def test_planted_faults_are_found(fault):
    assert measured(TREES["tree"], "rejection", WORLDS[0], spoil=fault)[0] > 1e6 * EXACT


def test_a_replay_draws_under_masks():
    draw = replayed(Replay([]), {})
    drawn, _ = draw(torch.zeros(2, VOCABULARY), 3, "without", None, None, 1, None, torch.tensor([[5], [0]]))
    assert drawn.tolist() == [[0, 2, -1], [-1, -1, -1]]
