"""Texts of draft models have the target's distribution, by enumeration: every candidate that ModelDrafter can draw and every
outcome of the coins. The drafter, its trees, slices and logits are real; draws are replayed, and the rules are those of
pass_ext.reference, which test_accept_exactness.py proves. The approximate rule has another distribution, and generate follows
the numbers that docs/guide/speculative.md prints for it.
"""

import dataclasses
import itertools
import math

import pytest
import torch
from support.chi_square import counted, fit
from support.drafted import PROMPT, Judged, Recalling, emitted, replayed, variation
from support.enumeration import EXACT, FAULTY, Replay, World, outcomes
from support.paths import ROOT

import pass_ext.decoding.drafting.from_draft_model as model_drafter
from pass_ext import MultiCandidate, Tree, generate
from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.decoding.session.session import Session
from pass_ext.reference.accept import Walk
from pass_ext.reference.common.distribution import process
from pass_ext.reference.common.noise import Purpose

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 3


# ---- all possible candidates ----


def drafted_once(draft, tree, rule, draw, filters, decision=None, levels=9, first=None):
    """One step's candidates after PROMPT, by the real drafter with replayed draws."""
    sampling = SamplingParams(temperature=1.0, seeds=0).for_batch(1, torch.device("cpu"))
    target = packed_model(Recalling(99, VOCABULARY))
    context = DraftContext(target, [PROMPT], sampling, rule)
    drafter = model_drafter.ModelDrafter(packed_model(draft), tree, context, decision)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(model_drafter, "draw_children", draw)
        drafter.begin(Session(target, 1, 16))
        proposal = drafter.draft([levels], None if first is None else torch.tensor([first]))
    return proposal.candidates[0], proposal.draft_logits


def everything_drafted(draft, tree, rule, world, **options):
    """(probability, candidates, their draft logits) for all possible draws."""
    for probability, (drafted, draft_logits), _ in outcomes(
        lambda replay: drafted_once(draft, tree, rule, replayed(replay, world.filters), world.filters, **options)
    ):
        yield probability, drafted, draft_logits


def measured(draft, tree, rule, world, spoil=lambda drafted, draft_logits: (drafted, draft_logits), **options):
    """Total variation of one step, continued by the target, from the target's distribution; mean accepted drafts; depths."""
    masses, mean, depths = {}, 0.0, set()
    for mass, drafted, draft_logits in everything_drafted(draft, tree, rule, world, **options):
        depths.add(drafted.tree.max_depth)
        mean += mass * emitted(Judged(*spoil(drafted, draft_logits), world), rule, masses, mass)
    horizon = tree.max_depth + 1
    return variation(world.completed(masses, horizon), world, horizon), mean, depths


# ---- exact rules ----

TREES = {
    "chain": Tree.chain(2),
    "narrow": Tree.from_branching((2, 1)),
    "branching": Tree.from_branching((2, 2)),
    "irregular": Tree([-1, 0, 0, 1, 1, 2]),
    "wider than the vocabulary": Tree.from_branching((4, 1)),
}
DECISIONS = {
    "by a sibling": lambda level: (level.tokens[:, -1:] != 1).any(1),
    "by all tokens": lambda level: (level.tokens.sum() % 2 == 0).expand(len(level.tokens)),
    "by likelihood": lambda level: level.logprobs[:, 0].exp(),
}
COMBINATIONS = [
    *itertools.product(["rejection", "block", "traversal", "rejection_with_replacement", "kseq"], ["chain"]),
    *itertools.product(["rejection", "traversal"], ["branching", "irregular"]),
    *itertools.product(["rejection_with_replacement", "kseq"], ["narrow"]),
]
WORLDS = [
    World(1, VOCABULARY, zeros=0.0),
    World(2, VOCABULARY, zeros=0.3),
    World(3, VOCABULARY, zeros=0.0, filters={"temperature": 0.7, "top_k": 2}),
]


def one_of(values):
    """Each combination with one of the values in turn; the other pairs are slow."""
    for i, (rule, shape) in enumerate(COMBINATIONS):
        for j, value in enumerate(values):
            yield pytest.param(rule, shape, value, marks=() if j == i % len(values) else pytest.mark.slow)


@pytest.mark.parametrize("rule,shape,world", list(one_of(range(3))))
def test_exact(rule, shape, world):
    distance, mean, depths = measured(Recalling(world, VOCABULARY), TREES[shape], rule, WORLDS[world])
    assert distance < EXACT
    assert 0.1 < mean < 2 and depths == {TREES[shape].max_depth}


@pytest.mark.parametrize(
    "rule,shape",
    [
        pytest.param("kseq", "branching", marks=pytest.mark.slow),
        ("rejection", "wider than the vocabulary"),
        pytest.param("traversal", "irregular", marks=pytest.mark.slow),
    ],
)
def test_exact_in_larger_trees(rule, shape):
    assert measured(Recalling(9, VOCABULARY), TREES[shape], rule, WORLDS[1])[0] < EXACT


@pytest.mark.parametrize("rule,shape,decision", list(one_of(DECISIONS)))
def test_exact_when_drafting_stops_by_the_drafts(rule, shape, decision):
    """A decision may depend on everything that was drawn so far, because it decides only about later draws."""
    distance, _, depths = measured(
        Recalling(4, VOCABULARY), TREES[shape], rule, WORLDS[0], decision=DECISIONS[decision]
    )
    assert distance < EXACT
    if decision != "by likelihood":
        assert depths == {1, 2}, "some are sliced"


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_exact_in_three_levels(rule):
    tree, decision = Tree([-1, 0, 0, 1, 2, 3]), DECISIONS["by all tokens"]
    distance, _, depths = measured(Recalling(5, VOCABULARY), tree, rule, WORLDS[0], decision=decision)
    assert distance < EXACT and depths == {1, 2, 3}


@pytest.mark.parametrize("rule,shape", COMBINATIONS)
def test_exact_when_the_tree_is_sliced(rule, shape):
    """Near the end of a text fewer levels are drafted."""
    distance, mean, depths = measured(Recalling(6, VOCABULARY), TREES[shape], rule, WORLDS[1], levels=1)
    assert distance < EXACT and 0.1 < mean <= 1 and depths == {1}


@pytest.mark.parametrize("rule", ["rejection", "traversal", "kseq"])
def test_exact_with_a_smaller_vocabulary(rule):
    """The draft does not have the target's last token."""
    distance, mean, _ = measured(Recalling(7, VOCABULARY - 1), TREES["branching"], rule, WORLDS[0])
    assert distance < EXACT and mean > 0.1


@pytest.mark.parametrize("decision", [None, "by all tokens"])
@pytest.mark.parametrize("shape", ["chain", "irregular"])
def test_coupled_is_the_targets_own_text(shape, decision):
    """Target and draft share the noise: for every order of it at every position the text is the target's, token by token."""
    world, orders = WORLDS[0], list(itertools.permutations((0.2, 1.0, 3.0)))
    accepted = 0
    for noise in itertools.product(torch.tensor(orders, dtype=torch.float64), repeat=3):

        def draw(logits, width, mode, sampling, places, depth, parents, allowed=None, noise=noise):
            assert mode == "coupled"
            scores = logits.double().log_softmax(-1) - noise[depth - 1].log()
            tokens = scores.topk(min(width, VOCABULARY)).indices
            tokens = torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]), value=-1)
            return tokens, scores.gather(1, tokens.clamp(min=0))

        class Noisy(Replay):
            def draw(self, weights, sizes, purpose, depth, noise=noise):
                assert purpose == Purpose.coupled
                return int((weights / noise[depth]).argmax())

        drafted, draft_logits = drafted_once(
            Recalling(8, VOCABULARY), TREES[shape], "coupled", draw, {}, DECISIONS.get(decision), 9
        )
        request = Judged(drafted, draft_logits, world)
        stop, token = Walk(request, Noisy([]), "coupled").run()
        expected = ()
        for place in range(3):
            expected = (*expected, int((world.at(expected)[0].probs / noise[place]).argmax()))
        text = (*request.text(stop), token)
        assert text == expected[: len(text)]
        accepted += len(text) - 1
    assert accepted > 50


# ---- planted faults ----


def test_logits_of_other_rows_are_found():
    def spoil(drafted, draft_logits):
        rows = [row if row < 1 else 1 + row % 2 for row in drafted.draft_rows]
        return dataclasses.replace(drafted, draft_rows=rows), draft_logits

    for rule in ("rejection", "traversal"):
        assert measured(Recalling(1, VOCABULARY), TREES["branching"], rule, WORLDS[0], spoil)[0] > FAULTY


# ---- the approximate rule ----


def longest_branch_texts(draft, tree, world):
    """The distribution of one step's text by rule "longest_branch", as (text, mass)."""
    p = world.at(())[0].probs.tolist()
    for roots in itertools.permutations(range(VOCABULARY), len(tree.children(0))):
        left, mass = 1.0, 1.0
        for root in roots:
            mass, left = mass * p[root] / left, left - p[root]
        for probability, drafted, draft_logits in everything_drafted(
            draft, tree, "longest_branch", world, first=list(roots)
        ):
            request = Judged(drafted, draft_logits, world)
            branches = [request.branch(top) for top in tree.children(0)]
            walks = [list(outcomes(lambda replay, b=b: Walk(b, replay, "rejection").run())) for b in branches]
            for ways in itertools.product(*walks):
                paths = [branch.text(way[1][0]) for branch, way in zip(branches, ways, strict=True)]
                yield max(paths, key=len), mass * probability * math.prod(way[0] for way in ways)


@pytest.mark.parametrize("tree", [Tree.from_branching((2, 1)), Tree.from_branching((2, 2))], ids=["chains", "trees"])
def test_the_longest_branch_has_another_distribution(tree):
    masses = {}
    for text, mass in longest_branch_texts(Recalling(1, VOCABULARY), tree, WORLDS[0]):
        masses[text] = masses.get(text, 0.0) + mass
    distance = variation(WORLDS[0].completed(masses, 2), WORLDS[0], 2)
    assert 0.01 < distance < 0.5


class Table:
    """A model whose logits depend on the last token only."""

    def __init__(self, distributions):
        self.embedding = torch.eye(len(distributions), 64)
        self.logits = torch.tensor(
            [[float(p) for p in distributions[token]] for token in range(len(distributions))]
        ).log()

    def __call__(self, rows, positions, attend, wanted):
        attend(0, *[rows[:, None]] * 3)
        return (rows if wanted is None else rows[wanted])[:, : len(self.logits)] @ self.logits.clamp(min=-1e9)


@pytest.fixture
def page_tool(monkeypatch):
    if not (ROOT / "tools").exists():
        pytest.skip("an sdist has no tools")
    monkeypatch.syspath_prepend(ROOT)
    from tools import longest_branch

    return longest_branch


def test_the_pages_distribution_is_that_of_reference_rules_and_the_drafter(page_tool):
    """Chains of two drafts below two roots, by fractions and by replaying the parts of pass_ext."""
    target, draft = page_tool.TARGET, page_tool.DRAFTS["good after rare tokens"]
    steps = page_tool.step(target, draft, PROMPT[-1], 2, 2)
    world = World(0, VOCABULARY)
    for text in itertools.chain.from_iterable(itertools.product(range(VOCABULARY), repeat=n) for n in range(4)):
        distribution = torch.tensor([float(p) for p in target[text[-1] if text else 0]], dtype=torch.float64)
        world.laws[text] = (process(distribution.log()), None)
    masses = {}
    for text, mass in longest_branch_texts(Table(draft), Tree.from_branching((2, 1, 1)), world):
        masses[text] = masses.get(text, 0.0) + mass
    assert set(masses) == {text for text, mass in steps.items() if mass}
    assert max(abs(masses[text] - float(mass)) for text, mass in steps.items()) < 1e-6  # the draft's logits are float32


@pytest.mark.parametrize("roots", [1, 2])
def test_generate_follows_the_pages_distribution(page_tool, roots):
    """3,000 texts of three tokens fit the enumerated distribution, and not the target's own."""
    requests, new_tokens = 3000, 3
    target, draft = page_tool.TARGET, page_tool.DRAFTS["good after rare tokens"]
    method = MultiCandidate(Table(draft), (roots, 1))
    got = generate(
        Table(target), torch.tensor([[page_tool.PROMPT]]).expand(requests, -1), method, max_new_tokens=new_tokens,
        temperature=1.0, seeds=range(requests), rule="longest_branch", eos_token_id=[],
    )  # fmt: skip
    counts = counted(got.sequences[:, -new_tokens:], VOCABULARY)
    texts = list(itertools.product(range(VOCABULARY), repeat=new_tokens))
    fits = []
    for distribution in (
        page_tool.distribution_of_texts(target, draft, roots, 1, new_tokens),
        page_tool.target_distribution(target, new_tokens),
    ):
        chi_square, freedom = fit(counts, torch.tensor([float(distribution.get(text, 0)) for text in texts]).double())
        fits.append((chi_square - freedom) / (2 * freedom) ** 0.5)
    assert fits[0] < 5 and fits[1] > 20, fits
