"""The rules of pass_ext.reference are exact: an enumeration, for small vocabularies and trees, of every draft that can be drawn
and every way coins can fall, with its probability. The distribution of emitted tokens, continued by the target to the depth of
the tree plus one, must be the target's own to within rounding. Kernels are not used here: they are compared with the reference.
"""

import itertools

import pytest
import torch
from support.enumeration import (
    ALL,
    CASES,
    CHAINS,
    DUPLICATE_CASES,
    DUPLICATES,
    EXACT,
    FAULTY,
    FIXED,
    SHAPES,
    STARS,
    TREES,
    Drafts,
    Replay,
    Texts,
    World,
    emitted_distribution,
    make,
    outcomes,
    variation,
    worlds,
)

import pass_ext.reference.accept as accept_module
from pass_ext.reference.accept import RULES, Walk
from pass_ext.reference.common.noise import Purpose

# ---- everything that can happen ----


# ---- exactness ----

FILTERS = [
    {"temperature": 0.7, "top_k": 2},
    {"temperature": 1.3, "top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 0.9, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
    {"top_k": 1},
]


def test_every_exact_rule_is_here():
    assert set(SHAPES) == {rule for rule, kind in RULES.items() if kind == "exact"}


COUNT = pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])  # worlds


@COUNT
@pytest.mark.parametrize("zeros", [0.0, 0.25])
@pytest.mark.parametrize(("rule", "shape"), CASES)
def test_exact(rule, shape, zeros, count):
    """With zeros there are more children than the support, and drafts that equal the target."""
    parents = SHAPES[rule][shape]
    count = count if len(parents) < 6 else count // 2 if len(parents) < 8 else 1
    for world in worlds(parents, count, zeros=zeros):
        assert variation(make(world, rule, parents), rule) < EXACT


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("rule", SHAPES)
def test_exact_with_filters(rule, filters):
    """The target is the filtered distribution; the draft's filters are the same, others, or none."""
    parents = SHAPES[rule].get("2,1", CHAINS["chain2"])
    for draft_filters in (filters, FILTERS[1], {"temperature": 1.0}):
        world = World(5, 4, zeros=0.0, filters=filters, draft_filters=draft_filters)
        assert variation(make(world, rule, parents), rule) < EXACT


@COUNT
@pytest.mark.parametrize("fixed", FIXED)
@pytest.mark.parametrize("rule", SHAPES)
def test_exact_with_fixed_proposals(rule, fixed, count):
    for parents in [CHAINS["chain3"]] if rule == "block" else [[-1, 0, 0, 1, 1], [-1, 0, 0, 0, 1]]:
        for world in worlds(parents, count, zeros=0.4):
            assert variation(make(world, rule, parents, **FIXED[fixed]), rule) < EXACT


@pytest.mark.parametrize(("rule", "origin"), DUPLICATE_CASES)
def test_exact_with_duplicates(rule, origin):
    parents, count, options = DUPLICATES[origin]
    for world in worlds(parents, count, zeros=0.4 if "outside" in origin else 0.1):
        assert variation(make(world, rule, parents, **options), rule) < EXACT


@pytest.mark.parametrize("rule", SHAPES)
def test_exact_when_the_tree_is_cut(rule):
    """Nodes deeper than max_depth are ignored."""
    parents = CHAINS["chain3"] if rule == "block" else TREES["1,2,1"]
    for max_depth in (0, 1, 2):
        for world in worlds(parents, 4):
            assert variation(make(world, rule, parents, max_depth=max_depth), rule) < EXACT


@pytest.mark.parametrize("extra", [0.1, 0.5])
def test_any_rho_is_exact_that_meets_the_condition(extra, monkeypatch):
    """A near tie in the search of rho does no harm."""
    smallest = Walk.choose_rho
    monkeypatch.setattr(Walk, "choose_rho", lambda *args: smallest(*args) + extra)
    for world in worlds(STARS["star3"], 10):
        assert variation(make(world, "kseq", STARS["star3"]), "kseq") < EXACT


@pytest.mark.parametrize("rule", [rule for rule, kind in RULES.items() if kind == "approximate"])
def test_approximate_rules_change_the_distribution(rule):
    assert all(variation(make(world, rule, STARS["star2"]), rule) > FAULTY for world in worlds([], 4, zeros=0.0))


def test_adaptive_rejection_without_tolerance_is_exact(monkeypatch):
    monkeypatch.setitem(accept_module.BOUNDS, "adaptive_rejection", (0.0, 0.0))
    for world in worlds(TREES["2,1"], 4):
        assert variation(make(world, "adaptive_rejection", TREES["2,1"]), "adaptive_rejection") < EXACT


# ---- planted faults ----


def worst(rule, shape, chance=Replay, **options):
    parents = ALL[shape]
    return max(
        variation(make(world, rule, parents, **options), rule, chance) for world in worlds(parents, 6, zeros=0.0)
    )


class BiasedCoin(Replay):
    """u is in [0, 0.9)."""

    def coin(self, node, bound, size):
        return super().coin(node, bound / 0.9, size)


class ReusedCoin(Replay):
    """The residual draw inverts its cumulative distribution at the u of the last refused child, which is at least that child's
    bound.
    """

    bound = 0.0

    def coin(self, node, bound, size):
        self.bound = min(bound, 1.0)
        return super().coin(node, bound, size)

    def draw(self, weights, sizes, purpose, depth):
        if purpose == Purpose.residual:
            borders = torch.cat([torch.zeros(1), weights.cumsum(0) / weights.sum()]).clamp(min=self.bound)
            weights = borders.diff()
        return super().draw(weights, sizes, purpose, depth)


@pytest.mark.parametrize("rule", ["rejection", "rejection_with_replacement", "traversal", "kseq", "block"])
def test_a_biased_coin_shows(rule):
    assert worst(rule, "chain2", BiasedCoin) > FAULTY


@pytest.mark.parametrize("rule", ["rejection", "rejection_with_replacement", "kseq"])
def test_a_coin_used_twice_shows(rule):
    assert worst(rule, "chain1", ReusedCoin) > FAULTY


@pytest.mark.parametrize("rule", ["rejection", "rejection_with_replacement", "traversal"])
def test_a_fixed_proposal_that_the_draft_could_give_is_no_fixed_proposal(rule):
    """A fixed proposal must have the draft row -1 or lie outside the support; otherwise it is judged as if it were drawn."""
    assert worst(rule, "star2", fixed={1: 0}) > FAULTY


class Flat(World):
    """The draft's distribution depends on the length of the text alone."""

    def at(self, text):
        return super().at(text)[0], super().at((0,) * len(text))[1]


def test_branches_drawn_with_the_same_noise_show():
    """Traversal reads the drafts of several branches, so they must be independent; going down reads one branch."""

    class Copied(Drafts):
        def with_chance(self, chance):
            return Copied(self.world, self.parents, self.max_depth, chance=chance)

        def draw(self, node):
            return self.token(3) if node == 4 else super().draw(node)

    cases = [Copied(Flat(seed, 3, zeros=0.0), [-1, 0, 0, 1, 2], 2) for seed in range(6)]
    assert max(variation(case, "traversal") for case in cases) > FAULTY
    assert max(variation(case, "rejection") for case in cases) < EXACT


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
def test_noise_of_a_draft_used_again_in_the_next_step_shows(rule, reused):
    """A step drafts two tokens and emits one; the next step drafts the second of them again. Block and traversal have read it
    already, so it must be drawn afresh: noise by text position alone would draw the same.
    """

    def variation_of(world):
        masses = {}

        def play(chance):
            tree = Drafts(world, CHAINS["chain2"], 2).with_chance(chance)
            stop, _ = Walk(tree, chance, rule).run()
            text = (*tree.text(stop), chance.choose(chance.law))
            if stop == 0:
                again = tree.token(2) if reused else chance.choose(world.at(text)[1].probs.tolist())
                after = {(): world.at(text), (again,): world.at((*text, again))}
                following = Drafts(Texts(world.vocabulary, after), CHAINS["chain1"], 1, fixed={1: again})
                stop, _ = Walk(following.with_chance(chance), chance, rule).run()
                text = (*text, *following.fixed.values()) if stop else text
                text = (*text, chance.choose(chance.law))
            return text

        for probability, text, _ in outcomes(play):
            masses[text] = masses.get(text, 0.0) + probability
        distribution, truth = world.completed(masses, 3), world.joint(3)
        return 0.5 * sum(abs(distribution[text] - truth[text]) for text in truth)

    worst = max(variation_of(Flat(seed, 3, zeros=0.0)) for seed in range(4))
    assert worst > FAULTY if reused and rule != "rejection" else worst < EXACT


# ---- how much the rules accept ----


def accepted(rule, parents, world):
    return emitted_distribution(make(world, rule, parents), rule)[1]


@COUNT
@pytest.mark.parametrize("shape", ["chain2", "chain3"])
def test_block_accepts_no_less_than_rejection(shape, count):
    """In every single case, and clearly more on the average."""
    gains = [
        accepted("block", CHAINS[shape], world) - accepted("rejection", CHAINS[shape], world)
        for world in worlds(CHAINS[shape], 5 * count, zeros=0.1)
    ]
    assert min(gains) > -EXACT
    assert sum(gains) / len(gains) > 0.01


@COUNT
@pytest.mark.parametrize("shape", ["chain2", "2,1", "1,2", "2,2", "3,1"])
def test_traversal_accepts_no_less_than_rejection(shape, count):
    gains = [
        accepted("traversal", ALL[shape], world) - accepted("rejection", ALL[shape], world)
        for world in worlds(ALL[shape], 2 * count, zeros=0.1)
    ]
    assert min(gains) > -EXACT
    assert sum(gains) / len(gains) > 0.01


def test_the_gain_of_two_candidates():
    """One candidate < two with replacement < K-SEQ < two without replacement, on the average over random distributions."""

    def mean(rule, parents):
        return sum(accepted(rule, parents, World(seed, 3, zeros=0.0)) for seed in range(60)) / 60

    chain, star = CHAINS["chain1"], STARS["star2"]
    order = [
        mean("rejection", chain),
        mean("rejection_with_replacement", star),
        mean("kseq", star),
        mean("rejection", star),
    ]
    assert order == sorted(order)
    assert all(b - a > 0.005 for a, b in itertools.pairwise(order))
