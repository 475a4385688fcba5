"""Plans for drafting with a model: against every tree of a small size, and properties of every plan."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_ext import Tree
from pass_ext.decoding.planning.draft_tree import DraftPlan, plan_drafts
from pass_ext.decoding.planning.step_times import StepTimes

RATES = [[0.6, 0.15, 0.05], [0.55, 0.14, 0.05], [0.5, 0.1, 0.05]]


def all_trees(nodes, depth, ranks):
    """Every tree of 1 to ``nodes`` nodes, as parents that never fall from node to node, with the depths."""

    def grow(parents, depths):
        yield parents, depths
        if len(parents) < nodes:
            for parent in range(max(parents[-1], 0), len(parents)):
                if depths[parent] < depth and parents.count(parent) < ranks:
                    yield from grow([*parents, parent], [*depths, depths[parent] + 1])

    return grow([-1], [0])


def tokens_per_second(parents, depths, rates, target, draft):
    """Tokens per second, computed independently from the paths."""
    reach, children = [1.0], [0] * len(parents)
    for parent in parents[1:]:
        reach.append(reach[parent] * rates[depths[parent]][children[parent]])
        children[parent] += 1
    calls = [draft(sum(depth <= level for depth in depths)) for level in range(max(depths))]
    return sum(reach) / (target(len(parents)) + sum(calls))


def random_rates(rng, levels, ranks):
    rates = []
    for _ in range(levels):
        values = sorted((rng.random() ** 3 for _ in range(ranks)), reverse=True)
        total = sum(values) + 0.3 * rng.random()
        rates.append([value / total for value in values])
    return rates


def random_times(rng, most, first):
    """Seconds at 1 to ``most`` rows; one time in three they may also fall."""
    steps = [first * rng.choice([0, 0, 0.03, 0.2]) * rng.random() for _ in range(most)]
    if rng.random() < 1 / 3:
        steps = [step * rng.choice([-0.3, 1]) for step in steps]
    return [first + sum(steps[:rows]) for rows in range(most)]


def test_plans_are_the_best_of_all_trees():
    plain = deepest = 0
    for seed in range(60):
        rng = random.Random(seed)
        levels, ranks, rows = rng.choice([2, 3, 6]), rng.choice([2, 3]), rng.choice([4, 6, 7])
        rates = random_rates(rng, levels, ranks)
        target = [0.0, *random_times(rng, rows, 1.0)].__getitem__
        draft = [0.0, *random_times(rng, rows, rng.choice([0.01, 0.1, 0.3]))].__getitem__
        plan = plan_drafts(rates, target, draft, most_rows=rows)
        best = max(tokens_per_second(*tree, rates, target, draft) for tree in all_trees(rows, levels, ranks))
        assert plan.speedup == pytest.approx(best * target(1), rel=1e-8)
        own = tokens_per_second(plan.tree.parents, plan.tree.depths, rates, target, draft)
        assert plan.speedup == pytest.approx(own * target(1))
        assert plan.rows <= rows and plan.tree.breadth_first()[0] == plan.tree
        plain, deepest = plain + plan.is_plain, max(deepest, plan.tree.max_depth)
    assert 0 < plain < 30 and deepest > 3


def test_sizes_that_look_worse_at_first_are_followed():
    for seed in (295, 820, 871, 1165):  # extending only the most promising sizes misses the best tree here
        rng = random.Random(seed)
        rates = random_rates(rng, 4, 2)
        target = [0.0, *random_times(rng, 7, 1.0)].__getitem__
        draft = [0.0, *random_times(rng, 7, rng.choice([0.05, 0.1, 0.3]))].__getitem__
        best = max(tokens_per_second(*tree, rates, target, draft) for tree in all_trees(7, 4, 2))
        assert plan_drafts(rates, target, draft, most_rows=7).speedup == pytest.approx(best * target(1), rel=1e-8)


def best_sizes(rates, most, target, draft):
    """The tokens per second of the best sizes of levels, by trying all: each level has the likeliest children."""
    best = 0.0

    def go(reached, rows, tokens, seconds):
        nonlocal best
        best = max(best, tokens / (seconds + target(rows)))
        if not rates[len(path) :] or rows == most:
            return
        children = sorted((a * b for a in reached for b in rates[len(path)]), reverse=True)
        path.append(0)
        for width in range(1, min(len(children), most - rows) + 1):
            chosen = children[:width]
            go(chosen, rows + width, tokens + sum(chosen), seconds + draft(rows))
        path.pop()

    path = []
    go([1.0], 1, 1.0, 0.0)
    return best


def test_larger_plans_lose_next_to_nothing():
    for seed in range(6):
        rng = random.Random(seed)
        rates = random_rates(rng, 5, 4)
        target = [0.0, *random_times(rng, 13, 1.0)].__getitem__
        draft = [0.0, *random_times(rng, 13, 0.05)].__getitem__
        plan = plan_drafts(rates, target, draft, most_rows=13)
        assert plan.speedup > (1 - 1e-3) * best_sizes(rates, 13, target, draft) * target(1)


def test_chains_are_the_best_of_all_lengths():
    lengths = set()
    for seed in range(60):
        rng = random.Random(seed)
        rates = [[rng.uniform(0.3, 0.95), 0.04] for _ in range(12)]
        target = [0.0, *random_times(rng, 13, 1.0)].__getitem__
        draft = [0.0, *random_times(rng, 13, rng.choice([0.02, 0.2, 0.6]))].__getitem__
        plan = plan_drafts(rates, target, draft, ranks=1, most_rows=13)
        assert plan.tree == Tree.chain(plan.tree.max_depth)
        chains = ((range(-1, n), range(n + 1), rates, target, draft) for n in range(13))
        assert plan.speedup == pytest.approx(max(tokens_per_second(*chain) for chain in chains) * target(1))
        lengths.add(plan.tree.max_depth)
    assert 0 in lengths and max(lengths) > 8 and len(lengths) > 4
    assert plan_drafts([[0.5]] * 12, lambda rows: 1.0, lambda rows: 1e-9, ranks=1).tree == Tree.chain(12)


seeds = st.integers(0, 10_000).map(random.Random)


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 3), st.floats(0.01, 0.5), st.floats(0, 0.1), st.integers(1, 8))
def test_properties_of_every_plan(rng, ranks, first, slope, requests):
    rates = random_rates(rng, rng.choice([1, 4, 8]), 3)
    asked = []

    def target(rows):
        asked.append(rows)
        return 1 + slope * rows

    def draft(rows):
        asked.append(rows)
        return first * (1 + slope * rows)

    plans = [plan_drafts(rates, target, draft, most_rows=rows, requests=requests, ranks=ranks) for rows in range(1, 9)]
    assert plans[0] == DraftPlan.plain()
    assert all(more.speedup >= fewer.speedup * (1 - 1e-8) for fewer, more in pairwise(plans))
    assert all(rows % requests == 0 and rows <= 8 * requests for rows in asked)
    assert all(len(plan.tree.children(node)) <= ranks for plan in plans for node in range(plan.rows))
    flat = plan_drafts(rates, target, lambda rows: 1e-6, most_rows=8, requests=requests, most_levels=3)
    assert flat.tree.max_depth <= 3 and flat.rows <= 8
    together = plan_drafts(
        rates, lambda r: target(requests * r), lambda r: draft(requests * r), most_rows=8, ranks=ranks
    )
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
    assert plan_drafts(RATES, lambda r: 1.0, lambda r: 5.0).is_plain
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
    plan = plan_drafts([[0.6 * 0.35**rank for rank in range(8)]] * 8, *(measured.at for measured in times))
    assert 16 <= plan.rows <= 64 and plan.speedup > 1.8
    eight = plan_drafts([[0.6, 0.2]] * 8, *(measured.at for measured in times), requests=8, most_rows=8)
    assert eight.rows <= 8 and eight.speedup > 1


def test_rates_that_rise_by_chance_still_make_a_plan():
    plan = plan_drafts([[0.5, 0.1, 0.12], [0.3, 0.0, 0.2]], lambda r: 1 + 1e-3 * r, lambda r: 0.01)
    assert plan.tree.children(0) == (1, 2, 3) and plan.reach[3] == pytest.approx(0.12)


def test_expectations_of_a_given_tree_by_hand():
    plan = DraftPlan.from_tree(Tree([-1, 0, 1, 0]), [[0.5, 0.25], [0.4]], lambda r: 10 + r, lambda r: r, requests=2)
    assert plan.tree == Tree([-1, 0, 0, 1]) and plan.reach == pytest.approx((1, 0.5, 0.25, 0.2))
    assert plan.last == pytest.approx((0.25, 0.3, 0.25, 0.2)) and plan.draft_rows == (1, 3)
    assert plan.tokens_per_call == pytest.approx(1.95) and plan.accepted == pytest.approx(0.95)
    assert plan.speedup == pytest.approx(1.95 / (18 + 2 + 6) * 12)
    assert DraftPlan.from_tree(Tree.chain(3), [[0.5]]).reach == (1.0, 0.5, 0.0, 0.0)
    assert DraftPlan.from_tree(Tree.chain(0), [], lambda r: 1.0, lambda r: 1.0) == DraftPlan.plain()
    with pytest.raises(ValueError, match="look-ahead slots"):
        DraftPlan.from_tree(Tree.chain(1).with_lookahead(1), [[0.5]])


def test_it_reads_well():
    plan = DraftPlan.from_tree(Tree([-1, 0, 0, 1]), [[0.5, 0.25], [0.4]], lambda r: 10 + r, lambda r: r)
    assert str(plan) == (
        "4 rows, drafted by 2 calls on 1, 3 rows\n"
        "expected: 1.95 tokens per call, 1.19x plain decoding; 0.95 drafts accepted\n"
        "node     rank  reached   last\n"
        "0           -    1.000  0.250\n"
        "├─ 1        0    0.500  0.300\n"
        "│  └─ 3     0    0.200  0.200\n"
        "└─ 2        1    0.250  0.250"
    )
    assert "plain decoding" in str(DraftPlan.plain()) and hash(plan) == hash(plan)
    assert "1 call on 1 row" in str(DraftPlan.from_tree(Tree.chain(1), [[0.5]]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hit_rates=[[0.6, 0.6]]), "sum to at most 1"),
        (dict(most_rows=0), "most_rows must be a whole number"),
        (dict(requests=0), "requests must be"),
        (dict(most_levels=0), "most_levels must be"),
        (dict(ranks=True), "ranks must be"),
        (dict(target_time=lambda rows: 0.0), "target_time must give seconds above 0"),
        (dict(draft_time=lambda rows: float("nan")), "draft_time must give seconds above 0"),
    ],
)
def test_refusals(changes, message):
    arguments = dict(hit_rates=RATES, target_time=lambda rows: 1.0, draft_time=lambda rows: 0.1) | changes
    with pytest.raises(ValueError, match=message):
        plan_drafts(**arguments)
