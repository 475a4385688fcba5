"""Texts under a grammar have the target's masked distribution, by enumeration: every candidate that the draft model can draw
under the grammar's masks, and every outcome of the coins. Drafter, masks, pruning and forced chains are real; draws are
replayed, and the rules are those of pass_ext.reference, which test_accept_exactness.py proves.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from support.enumeration import EXACT, Replay, World, outcomes
from support.grammars import Automaton

import pass_ext.decoding.drafting.from_draft_model as model_drafter
from pass_ext import Tree
from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.drafting.drafting import guided
from pass_ext.decoding.models.early_exit import packed_model
from pass_ext.decoding.requests.grammar import Guide
from pass_ext.decoding.requests.guides import Guides
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.decoding.session.session import Session
from pass_ext.reference.accept import Walk
from pass_ext.reference.common.distribution import process

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, VOCABULARY = [2, 0, 1], 4
# After 0 three tokens may follow, after 1 two; 2 forces 3, then 1.
GRAMMAR = Automaton({0: {0: 0, 1: 1, 2: 2}, 1: {0: 0, 3: 1}, 2: {3: 3}, 3: {1: 0}})


class Recalling:
    """A draft whose logits depend on all tokens and their order."""

    def __init__(self, seed):
        self.embedding = torch.eye(VOCABULARY, 64)
        generator = torch.Generator().manual_seed(seed)
        self.inner = torch.randn(64, 16, generator=generator)
        self.head = torch.randn(16, VOCABULARY, generator=generator)

    def __call__(self, rows, positions, attend, wanted):
        weighted = (rows * (1 + positions[:, None] ** 1.5))[:, None]
        mean = attend(0, torch.zeros_like(weighted), weighted, weighted)[:, 0]
        mean = mean if wanted is None else mean[wanted]
        return 0.8 * torch.sin(mean @ self.inner) @ self.head


def masked(row, allowed):
    return row.double() + torch.tensor([0.0 if token in allowed else -math.inf for token in range(len(row))])


class Masked(World):
    """A world whose target obeys the grammar."""

    def at(self, text):
        if text not in self.laws:
            logits = torch.randn(self.vocabulary, generator=self.generator, dtype=torch.float64) * self.spread
            allowed = GRAMMAR.allowed_behind(text) or range(
                self.vocabulary
            )  # a forbidden text has no probability anyway
            self.laws[text] = (process(masked(logits, allowed), **self.filters), None)
        return self.laws[text]


class Judged:
    """Candidates as the reference rules take them."""

    def __init__(self, candidates, draft_logits, draft_allowed, world):
        self.parents, self.max_depth = list(candidates.tree.parents), candidates.tree.max_depth
        self.vocabulary, self.world = world.vocabulary, world
        self.tokens, self.rows = [PROMPT[-1], *candidates.tokens], candidates.draft_rows
        self.draft_logits, self.draft_allowed = draft_logits, draft_allowed

    def text(self, node):
        return () if node == 0 else (*self.text(self.parents[node]), self.tokens[node])

    def token(self, node):
        return self.tokens[node]

    def target(self, node):
        return self.world.at(self.text(node))[0]

    def draft(self, node):
        if self.rows[node] < 0:
            return None
        row = self.rows[node]
        allowed = {token for token in range(self.vocabulary) if int(self.draft_allowed[row]) >> token & 1}
        return process(masked(self.draft_logits[row], allowed), **self.world.filters)


def replayed(replay, filters):
    """A ``draw_children`` that replays the choices of a script, under the masks that it is given."""

    def draw(logits, width, mode, sampling, places, depth, parents, allowed):
        tokens = []
        for row, words in zip(logits, allowed, strict=True):
            support = {token for token in range(VOCABULARY) if int(words) >> token & 1}
            q = process(masked(row, support), **filters).probs.tolist() if support else [0.0] * VOCABULARY
            children = []
            for _ in range(width):
                left = [0.0 if mode == "without" and token in children else x for token, x in enumerate(q)]
                children.append(replay.choose([x / sum(left) for x in left]) if sum(left) > 0 else -1)
            tokens.append(children)
        return torch.tensor(tokens), torch.zeros(len(tokens), width)

    return draw


def drafted_once(tree, rule, world, replay, levels):
    """One step's candidates after PROMPT."""
    sampling = SamplingParams(temperature=1.0, seeds=0).for_batch(1, torch.device("cpu"))
    target, guide = packed_model(Recalling(99)), Guide(GRAMMAR, VOCABULARY, ())
    guides = Guides([guide], VOCABULARY, torch.device("cpu"))
    drafter = model_drafter.ModelDrafter(
        packed_model(Recalling(5)), tree, DraftContext(target, [PROMPT], sampling, rule, guides=guides)
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
        request = Judged(drafted.candidates, drafted.logits, drafted.allowed, world)
        depths.add(request.max_depth)
        assert all(GRAMMAR.state_behind(request.text(node)) is not None for node in range(len(request.parents)))
        for probability, (stop, token), replay in outcomes(lambda replay, r=request: Walk(r, replay, rule).run()):
            for last, p in ({token: 1.0} if replay.law is None else dict(enumerate(replay.law))).items():
                text = (*request.text(stop), last)
                masses[text] = masses.get(text, 0.0) + mass * probability * p
    horizon = levels + 1
    truth, done = world.joint(horizon), world.completed(masses, horizon)
    assert abs(sum(done.values()) - 1.0) < EXACT
    return 0.5 * sum(abs(done[text] - truth[text]) for text in truth), depths


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
