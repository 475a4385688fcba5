"""Plans of a PaSS step: against every tree of a small size, against a simulation of the steps, and refusals."""

import random
from itertools import pairwise

import pytest
import torch

from pass_ext import Tree
from pass_ext.decoding.planning.lookahead_tree import Plan, assumed_hit_rates, plan, plan_auto
from pass_ext.decoding.planning.step_times import StepTimes

RATES = [[0.4, 0.15, 0.1], [0.3, 0.15, 0.05], [0.25, 0.1, 0.05]]


def all_trees(nodes, depth, ranks):
    """Every tree of 2 to ``nodes`` nodes, as parents that never fall from node to node, with the depths."""

    def grow(parents, depths):
        if len(parents) > 1:
            yield parents
        if len(parents) < nodes:
            for parent in range(max(parents[-1], 0), len(parents)):
                if depths[parent] < depth and parents.count(parent) < ranks:
                    yield from grow([*parents, parent], [*depths, depths[parent] + 1])

    yield from grow([-1], [0])


def probabilities(parents, rates):
    """Reach and P(last accepted) of each node, computed independently."""
    depths, taken, reach, stop = [0], [0] * len(parents), [1.0], [1.0] * len(parents)
    for parent in parents[1:]:
        rate = rates[depths[parent]][taken[parent]]
        taken[parent] += 1
        stop[parent] -= rate
        depths.append(depths[parent] + 1)
        reach.append(reach[parent] * rate)
    return reach, [a * b for a, b in zip(reach, stop, strict=True)], max(depths)


def best_by_trying(rates, rows, time, passes):
    best = 1 / time(1)
    for parents in all_trees(rows, len(rates), len(rates[0])):
        reach, last, slots = probabilities(parents, rates)
        miss = 1.0
        for groups, gain in enumerate([0.0, *sorted(last, reverse=True)] if passes == 1 else [0.0]):
            miss -= gain
            if len(parents) + groups * slots <= rows:
                tokens = sum(reach) + miss
                best = max(best, tokens / (time(len(parents) + groups * slots) + miss * time(1 + slots)))
    return best


def random_rates(random_number, slots, ranks):
    rates = []
    for _ in range(slots):
        values = sorted((random_number() ** 2 for _ in range(ranks)), reverse=True)
        total = sum(values) + random_number()
        rates.append([value / total for value in values])
    return rates


@pytest.mark.parametrize("passes", [1, 2])
def test_plans_are_the_best_of_all_trees(passes):
    ratios = []
    for seed in range(40):
        rng = random.Random(seed)
        rates = random_rates(rng.random, rng.choice([1, 2, 3]), rng.choice([2, 3]))
        slope, rows = rng.choice([0, 0.01, 0.05, 0.1]), rng.choice([3, 5, 7])
        found = plan(rates, rows=rows, step_time=lambda r, slope=slope: 1 + slope * r, passes=passes)
        best = best_by_trying(rates, rows, lambda r, slope=slope: 1 + slope * r, passes)
        assert found.rows <= rows
        ratios.append(found.speedup / (1 + slope) / best)
    # best first maximises accepted drafts, so two-pass plans are optimal; with groups another tree may be slightly better
    assert max(ratios) < 1 + 1e-9 and min(ratios) > (0.98 if passes == 1 else 1 - 1e-9)
    assert sum(ratios) / len(ratios) > 0.999


def simulated(tree, groups, rates, calls=60_000, seed=1):
    """Tokens per call of full and probe steps, one random draw per parent."""
    rng, tokens, made, drafts = random.Random(seed), 0, 0, False
    while made < calls:
        made += 1
        tokens += 1
        if not drafts:
            drafts = True
            continue
        node = 0
        while True:
            draw, right = rng.random(), None
            for rank, child in enumerate(tree.children(node)):
                draw -= rates[tree.depths[node]][rank]
                if draw < 0:
                    right = child
                    break
            if right is None:
                break
            node, tokens = right, tokens + 1
        drafts = node in groups
    return tokens / made


@pytest.mark.parametrize(
    "made",
    [
        plan(RATES, rows=8),
        plan(RATES, rows=16),
        plan(RATES, rows=10, passes=2),
        Plan.from_tree(Tree.from_branching((2, 2)).with_lookahead({1: 3, 4: 3}), 3, RATES),
    ],
    ids=["8 rows", "16 rows", "two-pass", "own tree"],
)
def test_expectations_come_true_in_a_simulation(made):
    seen = simulated(made.tree, made.groups, RATES)
    assert made.tokens_per_call == pytest.approx(seen, rel=0.01)
    assert made.speedup is None


def test_a_chain_by_hand():
    tree = Tree.chain(2)
    accepted = 0.5 + 0.5 * 0.2
    rates = [[0.5], [0.2]]

    def promised(tree, **options):
        return Plan.from_tree(tree, 2, rates, **options).tokens_per_call

    assert promised(tree, passes=2) == pytest.approx((2 + accepted) / 2), "no groups: every other call is a probe"
    assert promised(tree.with_lookahead(2)) == pytest.approx(1 + accepted)
    assert promised(tree.with_lookahead({0: 2})) == pytest.approx((1 + accepted + 0.5) / 1.5)
    without_third = Plan.from_tree(Tree.chain(3), 3, rates, passes=2).tokens_per_call
    assert without_third == promised(tree, passes=2), "there is no rate for a third slot"
    made = Plan.from_tree(tree.with_lookahead({0: 2}), 2, rates, step_time=lambda rows: 10 + rows)
    assert made.last == pytest.approx((0.5, 0.4, 0.1)) and made.reach == pytest.approx((1, 0.5, 0.1))
    assert made.speedup == pytest.approx((1 + accepted + 0.5) / (15 + 0.5 * 13) * 11)


def test_children_are_in_rank_order_and_slots_fit_the_depth():
    for rows in range(2, 40):
        made = plan(RATES, rows=rows)
        assert made.rows <= rows and made.slots == made.tree.max_depth <= 3
        assert set(made.groups.values()) <= {made.slots}
        reach, last, _ = probabilities(made.tree.parents[: made.tree.num_nodes], RATES)
        assert made.reach == pytest.approx(reach) and made.last == pytest.approx(last)


def test_more_rows_never_promise_less():
    promised = [plan(RATES, rows=rows).tokens_per_call for rows in range(1, 60)]
    assert all(b >= a - 1e-9 for a, b in pairwise(promised))
    assert promised[0] == 1 and promised[-1] > 1.7


def test_auto_stops_where_rows_cost_more_than_they_give():
    flat = plan_auto(RATES, StepTimes((1, 64), (0.010, 0.0101)))
    dear = plan_auto(RATES, StepTimes((1, 64), (0.010, 0.100)))
    assert flat.rows > dear.rows > 1 and flat.speedup > dear.speedup > 1
    ruinous = plan_auto(RATES, StepTimes((1, 64), (0.001, 0.64)))
    assert ruinous.is_plain and ruinous.speedup == 1 and ruinous.tokens_per_call == 1
    assert plan_auto([[0.0, 0.0]], StepTimes((1, 64), (0.010, 0.010))).is_plain


def test_a_batch_multiplies_rows():
    asked = []
    times = StepTimes((1, 16, 64), (0.01, 0.011, 0.08))
    plan(RATES, rows=8, step_time=lambda rows: asked.append(rows) or 1.0, requests=4)
    assert asked and all(rows % 4 == 0 for rows in asked)
    alone, together = plan_auto(RATES, times), plan_auto(RATES, times, requests=8)
    assert together.rows * 8 <= 64 and together.rows < alone.rows


def test_groups_for_a_given_tree_go_where_the_last_node_will_be():
    made = Plan.from_tree(Tree.chain(2), 4, [[0.5], [0.2]], rows=7)
    assert made.groups == {0: 2, 1: 2} and made.slots == 2
    assert Plan.from_tree(Tree.chain(2), 4, passes=2).groups == {}
    assert len(Plan.from_tree(Tree.chain(2), 4).groups) == 3
    costly = Plan.from_tree(Tree.chain(2), 4, [[0.5], [0.2]], step_time=lambda rows: 1.0 if rows <= 5 else 100.0)
    assert costly.rows == 5 and costly.groups == {0: 2}


def test_it_reads_well():
    made = Plan.from_tree(Tree([-1, 0, 0, 1]).with_lookahead({0: 2, 1: 2}), 2, [[0.5, 0.25], [0.4]])
    assert str(made) == (
        "8 rows = 4 nodes + 2 groups of 2 slots; a probe has 3 rows\n"
        "expected: 1.66 tokens per call; 0.95 drafts accepted per full step, probe after 45%\n"
        "node     rank  reached   last  slots\n"
        "0           -    1.000  0.250      2\n"
        "├─ 1        0    0.500  0.300      2\n"
        "│  └─ 3     0    0.200  0.200\n"
        "└─ 2        1    0.250  0.250"
    )
    assert "plain decoding" in str(Plan.plain())
    assert hash(made) == hash(made) and "slots=2" in repr(made)


def test_a_tree_may_have_all_the_rows_there_are():
    tree = Tree.chain(2).with_lookahead(2)
    assert Plan.from_tree(tree, 2, rows=len(tree)).tree is tree


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan([[0.6, 0.6]], rows=4), "sum to at most 1"),
        (lambda: plan([[-0.1]], rows=4), "probabilities"),
        (lambda: plan(RATES, rows=0), "rows must be a whole number"),
        (lambda: plan(RATES, rows=4, passes=3), "passes must be 1 or 2"),
        (lambda: plan(RATES, rows=4, requests=0), "requests must be"),
        (lambda: plan(RATES, rows=4, step_time=lambda rows: 0.0), "step_time must give seconds above 0"),
        (lambda: Plan.from_tree(Tree.chain(5), 4), "depth of 1 to 4"),
        (lambda: Plan.from_tree(Tree.chain(0), 4), "depth of 1 to 4"),
        (lambda: Plan.from_tree(Tree.chain(2).with_lookahead([2, 3, 0]), 4), "one size"),
        (lambda: Plan.from_tree(Tree.chain(2).with_lookahead(1), 4), "one size"),
        (lambda: Plan.from_tree(Tree.chain(2).with_lookahead(2), 2, passes=2), "two-pass"),
        (lambda: Plan.from_tree(Tree.chain(2).with_lookahead(2), 2, rows=8), "rows allows 8"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_rates_may_be_tensors_and_assumed_ones_are_probabilities():
    assert plan(torch.tensor(RATES), rows=8).tree == plan(RATES, rows=8).tree
    assert all(sum(level) < 1 for level in assumed_hit_rates(4, 1000))
