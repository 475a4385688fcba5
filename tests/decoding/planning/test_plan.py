"""Plans of a step: against every tree of a small size, against a simulation of the steps, and properties of every plan."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_ext import Tree
from pass_ext.decoding.planning.plan import Costs, Plan, assumed_hit_rates, plan_of_tree, plan_step
from pass_ext.decoding.planning.step_times import StepTimes

RATES = [[0.4, 0.15, 0.1], [0.3, 0.15, 0.05], [0.25, 0.1, 0.05]]
DRAFT_RATES = [[0.6, 0.15, 0.05], [0.55, 0.14, 0.05], [0.5, 0.1, 0.05]]


def plan(rates, rows, step_time=None, **options):
    """Of look-ahead slots."""
    return plan_step(rates, rows, Costs(step_time, **options))


def from_tree(tree, slots, rates=None, *, rows=None, step_time=None, **options):
    rates = assumed_hit_rates(slots, tree.num_nodes) if rates is None else rates
    return plan_of_tree(tree, rates, Costs(step_time, **options), slots=slots, rows=rows)


def plan_auto(rates, times, requests=1):
    return plan(rates, times.rows[-1] // requests, times.at, requests=requests)


def plan_drafts(rates, target, draft, rows=64, requests=1):
    """Of a draft model."""
    return plan_step(rates, rows, Costs(target, draft, requests=requests))


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
        from_tree(Tree.from_branching((2, 2)).with_lookahead({1: 3, 4: 3}), 3, RATES),
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
        return from_tree(tree, 2, rates, **options).tokens_per_call

    assert promised(tree, passes=2) == pytest.approx((2 + accepted) / 2), "no groups: every other call is a probe"
    assert promised(tree.with_lookahead(2)) == pytest.approx(1 + accepted)
    assert promised(tree.with_lookahead({0: 2})) == pytest.approx((1 + accepted + 0.5) / 1.5)
    without_third = from_tree(Tree.chain(3), 3, rates, passes=2).tokens_per_call
    assert without_third == promised(tree, passes=2), "there is no rate for a third slot"
    made = from_tree(tree.with_lookahead({0: 2}), 2, rates, step_time=lambda rows: 10 + rows)
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
    made = from_tree(Tree.chain(2), 4, [[0.5], [0.2]], rows=7)
    assert made.groups == {0: 2, 1: 2} and made.slots == 2
    assert from_tree(Tree.chain(2), 4, passes=2).groups == {}
    assert len(from_tree(Tree.chain(2), 4).groups) == 3
    costly = from_tree(Tree.chain(2), 4, [[0.5], [0.2]], step_time=lambda rows: 1.0 if rows <= 5 else 100.0)
    assert costly.rows == 5 and costly.groups == {0: 2}


def test_it_reads_well():
    made = from_tree(Tree([-1, 0, 0, 1]).with_lookahead({0: 2, 1: 2}), 2, [[0.5, 0.25], [0.4]])
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
    assert from_tree(tree, 2, rows=len(tree)).tree is tree


# ---- a draft model ----


def sure_rates(rng, levels, ranks):
    rates = []
    for _ in range(levels):
        values = sorted((rng.random() ** 3 for _ in range(ranks)), reverse=True)
        total = sum(values) + 0.3 * rng.random()
        rates.append([value / total for value in values])
    return rates


def tokens_per_second(parents, depths, rates, target, draft):
    """Tokens per second, computed independently from the paths."""
    reach, children = [1.0], [0] * len(parents)
    for parent in parents[1:]:
        reach.append(reach[parent] * rates[depths[parent]][children[parent]])
        children[parent] += 1
    calls = [draft(sum(depth <= level for depth in depths)) for level in range(max(depths))]
    return sum(reach) / (target(len(parents)) + sum(calls))


def random_times(rng, most, first):
    """Seconds at 1 to ``most`` rows; one time in three they may also fall."""
    steps = [first * rng.choice([0, 0, 0.03, 0.2]) * rng.random() for _ in range(most)]
    if rng.random() < 1 / 3:
        steps = [step * rng.choice([-0.3, 1]) for step in steps]
    return [first + sum(steps[:rows]) for rows in range(most)]


def test_drafts_are_nearly_the_best_of_all_trees():
    ratios, plain, deepest = [], 0, 0
    for seed in range(60):
        rng = random.Random(seed)
        levels, ranks, rows = rng.choice([2, 3, 6]), rng.choice([2, 3]), rng.choice([4, 6, 7])
        rates = sure_rates(rng, levels, ranks)
        target = [0.0, *random_times(rng, rows, 1.0)].__getitem__
        draft = [0.0, *random_times(rng, rows, rng.choice([0.01, 0.1, 0.3]))].__getitem__
        made = plan_drafts(rates, target, draft, rows)
        trees = [(parents, depths_of(parents)) for parents in [[-1], *all_trees(rows, levels, ranks)]]
        best = max(tokens_per_second(*tree, rates, target, draft) for tree in trees)
        own = tokens_per_second(made.tree.parents, made.tree.depths, rates, target, draft)
        assert made.speedup == pytest.approx(own * target(1))
        ratios.append(own / best)
        assert made.rows <= rows and made.tree.breadth_first()[0] == made.tree
        plain, deepest = plain + made.is_plain, max(deepest, made.tree.max_depth)
    assert min(ratios) > 0.99 and max(ratios) < 1 + 1e-9 and sum(ratios) / len(ratios) > 0.9995
    assert 0 < plain < 30 and deepest > 3


def depths_of(parents):
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def test_chains_are_the_best_of_all_lengths():
    lengths = set()
    for seed in range(60):
        rng = random.Random(seed)
        rates = [[rng.uniform(0.3, 0.95), 0.04] for _ in range(12)]
        target = [0.0, *random_times(rng, 13, 1.0)].__getitem__
        draft = [0.0, *random_times(rng, 13, rng.choice([0.02, 0.2, 0.6]))].__getitem__
        made = plan_drafts([level[:1] for level in rates], target, draft, 13)
        assert made.tree == Tree.chain(made.tree.max_depth)
        chains = ((range(-1, n), range(n + 1), rates, target, draft) for n in range(13))
        assert made.speedup == pytest.approx(max(tokens_per_second(*chain) for chain in chains) * target(1))
        lengths.add(made.tree.max_depth)
    assert 0 in lengths and max(lengths) > 8 and len(lengths) > 4
    assert plan_drafts([[0.5]] * 12, lambda rows: 1.0, lambda rows: 1e-9).tree == Tree.chain(12)


seeds = st.integers(0, 10_000).map(random.Random)


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 3), st.floats(0.01, 0.5), st.floats(0, 0.1), st.integers(1, 8))
def test_properties_of_every_plan(rng, ranks, first, slope, requests):
    rates = [level[:ranks] for level in sure_rates(rng, rng.choice([1, 4, 8]), 3)]
    asked = []

    def target(rows):
        asked.append(rows)
        return 1 + slope * rows

    def draft(rows):
        asked.append(rows)
        return first * (1 + slope * rows)

    plans = [plan_drafts(rates, target, draft, rows, requests) for rows in range(1, 9)]
    assert plans[0] == Plan.plain(1.0)
    assert all(more.speedup >= fewer.speedup * (1 - 1e-8) for fewer, more in pairwise(plans))
    assert all(rows % requests == 0 and rows <= 8 * requests for rows in asked)
    assert all(len(made.tree.children(node)) <= ranks for made in plans for node in range(made.rows))
    together = plan_drafts(rates, lambda r: target(requests * r), lambda r: draft(requests * r), 8)
    assert together == plans[-1]


@settings(max_examples=30, deadline=None)
@given(seeds, st.floats(0, 0.05))
def test_a_cheaper_draft_drafts_deeper(rng, slope):
    rates = [[rng.uniform(0.4, 0.9)] for _ in range(10)]
    depths = [
        plan_drafts(rates, lambda r: 1 + slope * r, lambda r, cost=cost: cost).tree.max_depth
        for cost in (3.0, 0.5, 0.2, 0.05, 1e-6)
    ]
    assert depths == sorted(depths) and depths[0] == 0
    assert depths[-1] == 10 or slope > 0


def test_a_draft_that_knows_nothing_or_costs_too_much_is_left_out():
    assert plan_drafts([[0.0, 0.0]] * 4, lambda r: 1.0, lambda r: 1e-9).is_plain
    assert plan_drafts(DRAFT_RATES, lambda r: 1.0, lambda r: 5.0).is_plain
    assert plan_drafts([], lambda r: 1.0, lambda r: 0.1).is_plain
    assert plan_drafts([[0.5], [0.0], [0.9]], lambda r: 1.0, lambda r: 0.01).tree == Tree.chain(1)


def test_branches_come_late_where_the_first_levels_are_sure():
    """Delayed expansion: a chain near the root, and branches where the draft is in doubt."""
    sure, doubtful = [0.97, 0.01, 0.01], [0.35, 0.25, 0.2]
    late = plan_drafts([sure, sure, doubtful], lambda r: 1 + 0.02 * r, lambda r: 0.05 + 0.001 * r)
    assert late.tree == Tree([-1, 0, 1, 2, 2, 2])
    early = plan_drafts([doubtful, sure, sure], lambda r: 1 + 0.02 * r, lambda r: 0.05 + 0.001 * r)
    assert len(early.tree.children(0)) == 3 and all(len(early.tree.children(node)) <= 1 for node in range(1, 4))
    assert late.tokens_per_call > early.tokens_per_call


def test_plans_for_many_rows_are_made_at_once():
    times = StepTimes((1, 16, 64), (0.020, 0.021, 0.050)), StepTimes((1, 16, 64), (0.001, 0.0011, 0.003))
    made = plan_drafts([[0.6 * 0.35**rank for rank in range(8)]] * 8, *(measured.at for measured in times))
    assert 16 <= made.rows <= 64 and made.speedup > 1.8
    eight = plan_drafts([[0.6, 0.2]] * 8, *(measured.at for measured in times), rows=8, requests=8)
    assert eight.rows <= 8 and eight.speedup > 1


def test_rates_that_rise_by_chance_still_make_a_plan():
    made = plan_drafts([[0.5, 0.1, 0.12], [0.3, 0.0, 0.2]], lambda r: 1 + 1e-3 * r, lambda r: 0.01)
    assert made.tree.children(0) == (1, 2, 3) and made.reach[3] == pytest.approx(0.12)


def of_drafts(tree, rates, requests=1):
    return plan_of_tree(tree, rates, Costs(lambda r: 10 + r, lambda r: r, requests=requests))


def test_expectations_of_drafts_by_hand():
    made = of_drafts(Tree([-1, 0, 1, 0]), [[0.5, 0.25], [0.4]], requests=2)
    assert made.tree == Tree([-1, 0, 0, 1]) and made.reach == pytest.approx((1, 0.5, 0.25, 0.2))
    assert made.last == pytest.approx((0.25, 0.3, 0.25, 0.2)) and made.draft_rows == (1, 3)
    assert made.tokens_per_call == pytest.approx(1.95) and made.accepted == pytest.approx(0.95) and made.miss == 0
    assert made.speedup == pytest.approx(1.95 / (18 + 2 + 6) * 12)
    assert of_drafts(Tree.chain(3), [[0.5]]).reach == (1.0, 0.5, 0.0, 0.0)
    with pytest.raises(ValueError, match="look-ahead slots"):
        of_drafts(Tree.chain(1).with_lookahead(1), [[0.5]])


def test_plans_of_drafts_read_well():
    assert str(of_drafts(Tree([-1, 0, 0, 1]), [[0.5, 0.25], [0.4]])) == (
        "4 rows, drafted by 2 calls on 1, 3 rows\n"
        "expected: 1.95 tokens per call, 1.19x plain decoding; 0.95 drafts accepted\n"
        "node     rank  reached   last\n"
        "0           -    1.000  0.250\n"
        "├─ 1        0    0.500  0.300\n"
        "│  └─ 3     0    0.200  0.200\n"
        "└─ 2        1    0.250  0.250"
    )
    assert "1 call on 1 row\n" in str(of_drafts(Tree.chain(1), [[0.5]]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan([[0.6, 0.6]], rows=4), "sum to at most 1"),
        (lambda: plan([[-0.1]], rows=4), "probabilities"),
        (lambda: plan(RATES, rows=0), "rows must be a whole number"),
        (lambda: plan(RATES, rows=4, passes=3), "passes must be 1 or 2"),
        (lambda: plan(RATES, rows=4, requests=0), "requests must be"),
        (lambda: plan(RATES, rows=4, step_time=lambda rows: 0.0), "step_time must give seconds above 0"),
        (lambda: plan_drafts(RATES, lambda rows: 0.0, lambda rows: 0.1), "target_time must give seconds above 0"),
        (
            lambda: plan_drafts(RATES, lambda rows: 1.0, lambda rows: float("nan")),
            "draft_time must give seconds above 0",
        ),
        (lambda: from_tree(Tree.chain(5), 4), "depth of 1 to 4"),
        (lambda: from_tree(Tree.chain(0), 4), "depth of 1 to 4"),
        (lambda: from_tree(Tree.chain(2).with_lookahead([2, 3, 0]), 4), "one size"),
        (lambda: from_tree(Tree.chain(2).with_lookahead(1), 4), "one size"),
        (lambda: from_tree(Tree.chain(2).with_lookahead(2), 2, passes=2), "two-pass"),
        (lambda: from_tree(Tree.chain(2).with_lookahead(2), 2, rows=8), "rows allows 8"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_rates_may_be_tensors_and_assumed_ones_are_probabilities():
    assert plan(torch.tensor(RATES), rows=8).tree == plan(RATES, rows=8).tree
    assert all(sum(level) < 1 for level in assumed_hit_rates(4, 1000))
