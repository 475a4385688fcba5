"""The rules on shards are exact: an enumeration of the rounds of csrc/core/shard.h, combined by core/shard_combine.h, over 2
and 3 ranks, as test_accept_core enumerates the walk on all columns. The distribution of emitted tokens must equal the target's
to within the rounding of floats.
"""

from functools import cache

import pytest
from support.enumeration import (
    CHAINS,
    DUPLICATES,
    FAULTY,
    FIXED,
    STARS,
    TREES,
    distribution_of_walk,
    emitted_distribution,
    make,
    worlds,
)
from support.native import ROOT, build_module

from pass_ext.distributed.steps import residual_rounds, rounds_of
from pass_ext.ops.shard import ROUNDS

NEARLY = 1e-5  # that of test_accept_core: probabilities are floats
SPLITS = {
    "2 unequal": lambda vocabulary: [0, 1, vocabulary],
    "3, one empty": lambda vocabulary: [0, 2, 2, vocabulary],
    "3 of one or two columns": lambda vocabulary: [0, 1, 2, vocabulary],
}
SHAPES = {
    "coupled": {"chain2": CHAINS["chain2"], **STARS},
    "rejection": {"chain2": CHAINS["chain2"], **STARS, "2,1": TREES["2,1"], "1,2": TREES["1,2"]},
    "rejection_with_replacement": {"chain2": CHAINS["chain2"], **STARS, "2,1": TREES["2,1"], "1,2": TREES["1,2"]},
    "block": CHAINS,
    "traversal": {"chain3": CHAINS["chain3"], **STARS, "2,1": TREES["2,1"], "1,2": TREES["1,2"]},
}
CASES = [(rule, shape) for rule, shapes in SHAPES.items() for shape in shapes]


@cache
def core():
    folder = ROOT / "tests" / "core"
    flags = f"-O1 -ffp-contract=off -Wall -Wextra -I{folder / 'enumerated'} -I{ROOT / 'csrc'}"
    return build_module("_shard_core", {folder / "shard_core.cpp": ""}, flags)


def distribution_on_shards(drafts, rule, borders):
    residuals = residual_rounds(rule, drafts.parents, [0, len(drafts.parents)])
    rounds = [*rounds_of(rule, greedy=False, top_k=False, top_p=False, residuals=residuals), "finish"]
    numbers = [ROUNDS.index(name) for name in rounds]
    return distribution_of_walk(drafts, rule, lambda *step: core().outcomes(*step, borders, numbers))


def assert_exact(drafts, rule, split):
    distribution, mean = distribution_on_shards(drafts, rule, SPLITS[split](drafts.vocabulary))
    truth = drafts.world.joint(drafts.max_depth + 1)
    assert 0.5 * sum(abs(distribution[text] - truth[text]) for text in truth) < NEARLY
    assert abs(mean - emitted_distribution(drafts, rule)[1]) < NEARLY


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("rule", "shape"), CASES)
def test_exact(rule, shape, split):
    for world in worlds([], 2, zeros=0.25 if shape == "star3" else 0.1):
        assert_exact(make(world, rule, SHAPES[rule][shape]), rule, split)


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize("origin", ["proposed again", "outside the draft's support"])
def test_exact_with_duplicates(rule, origin):
    parents, _, options = DUPLICATES[origin]
    for world in worlds(parents, 2, zeros=0.4 if "outside" in origin else 0.1):
        assert_exact(make(world, rule, parents, **options), rule, "3 of one or two columns")


@pytest.mark.parametrize("fixed", ["no row at the root", "outside the vocabulary", "twice the same"])
@pytest.mark.parametrize("rule", SHAPES)
def test_exact_with_fixed_proposals(rule, fixed):
    parents = CHAINS["chain2"] if rule == "block" else [-1, 0, 0]
    for world in worlds(parents, 2, zeros=0.4):
        assert_exact(make(world, rule, parents, **FIXED[fixed]), rule, "2 unequal")


def test_columns_that_nobody_holds_show():
    """The enumeration can fail: the last column belongs to no rank."""
    (world,) = worlds([], 1, zeros=0.0)
    drafts = make(world, "rejection", [-1, 0, 0])
    truth = world.joint(2)
    for borders, is_exact in (([0, 1, drafts.vocabulary], True), ([0, 1, drafts.vocabulary - 1], False)):
        distribution, _ = distribution_on_shards(drafts, "rejection", borders)
        distance = 0.5 * sum(abs(distribution.get(text, 0.0) - truth[text]) for text in truth)
        assert distance < NEARLY if is_exact else distance > FAULTY
