"""The rules of csrc/core/accept_walk.h are exact: an enumeration of the walk that CPU and CUDA kernels share, over every draft
that can be drawn and every way its coins can fall. The distribution of emitted tokens must equal the target's to within the
rounding of floats, and the mean number of accepted drafts must equal the reference's.
"""

from functools import cache

import pytest
from support.enumeration import (
    CASES,
    CHAINS,
    DUPLICATE_CASES,
    DUPLICATES,
    FAULTY,
    FIXED,
    SHAPES,
    distribution_of_walk,
    emitted_distribution,
    make,
    worlds,
)
from support.native import ROOT, build_module

NEARLY = 1e-5  # probabilities are floats


@cache
def core():
    folder = ROOT / "tests" / "core"
    flags = f"-O1 -ffp-contract=off -Wall -Wextra -I{folder / 'enumerated'} -I{ROOT / 'csrc'}"
    return build_module("_accept_core", {folder / "accept_core.cpp": ""}, flags)


def assert_exact(drafts, rule):
    distribution, mean = distribution_of_walk(drafts, rule, core().outcomes)
    truth = drafts.world.joint(drafts.max_depth + 1)
    assert 0.5 * sum(abs(distribution[text] - truth[text]) for text in truth) < NEARLY
    assert abs(mean - emitted_distribution(drafts, rule)[1]) < NEARLY


@pytest.mark.parametrize("zeros", [0.0, 0.25])
@pytest.mark.parametrize(("rule", "shape"), [case for case in CASES if len(SHAPES[case[0]][case[1]]) <= 5])
def test_exact(rule, shape, zeros):
    for world in worlds(SHAPES[rule][shape], 2, zeros=zeros):
        assert_exact(make(world, rule, SHAPES[rule][shape]), rule)


@pytest.mark.parametrize("rule", ["rejection", "rejection_with_replacement", "kseq", "traversal"])
def test_exact_on_a_tree_of_two_levels(rule):
    (world,) = worlds(range(9), 1, zeros=0.1)
    assert_exact(make(world, rule, [-1, 0, 0, 1, 1, 2]), rule)


@pytest.mark.parametrize(("rule", "origin"), DUPLICATE_CASES)
def test_exact_with_duplicates(rule, origin):
    parents, _, options = DUPLICATES[origin]
    for world in worlds(parents, 2, zeros=0.4 if "outside" in origin else 0.1):
        assert_exact(make(world, rule, parents, **options), rule)


@pytest.mark.parametrize("fixed", FIXED)
@pytest.mark.parametrize("rule", SHAPES)
def test_exact_with_fixed_proposals(rule, fixed):
    parents = CHAINS["chain3"] if rule == "block" else [-1, 0, 0, 1, 1]
    for world in worlds(parents, 2, zeros=0.4):
        assert_exact(make(world, rule, parents, **FIXED[fixed]), rule)


@pytest.mark.parametrize("max_depth", [0, 1])
@pytest.mark.parametrize("rule", SHAPES)
def test_exact_when_the_tree_is_cut(rule, max_depth):
    (world,) = worlds([], 1)
    assert_exact(make(world, rule, CHAINS["chain2"], max_depth=max_depth), rule)


def test_drafts_of_another_distribution_show():
    """The enumeration can fail: drafts of one distribution, judged by another."""
    (world,) = worlds([], 1, zeros=0.0)
    drafts = make(world, "rejection", [-1, 0, 0])
    others = make(world, "rejection", [-1, 0, 0], fixed={1: 0})
    truth = world.joint(2)
    for drawn, is_exact in ((drafts, True), (others, False)):
        distribution, _ = distribution_of_walk(drawn, "rejection", core().outcomes)
        distance = 0.5 * sum(abs(distribution[text] - truth[text]) for text in truth)
        assert distance < NEARLY if is_exact else distance > FAULTY
