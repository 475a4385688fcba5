"""shard_local, shard_combine and shard_best: ranks simulated in one process take the decisions of the op on all columns, to the
bit, whatever the split; a rank whose columns lie one to the side is noticed.
"""

from itertools import pairwise

import pytest
import torch
from shard_cases import (
    FILTERS,
    RULES,
    Step,
    any_layout,
    apart,
    drafts_on_ranks,
    equal_layout,
    mask_columns,
    random_drafts,
    random_step,
    same,
)
from support.samples import shard_case

import pass_ext
from pass_ext.distributed.accept import chain_steps
from pass_ext.distributed.exchange import Move, run_together
from pass_ext.distributed.layout import Layout, checked_layout
from pass_ext.distributed.steps import Shard, residual_rounds, residual_rounds_of_chain
from pass_ext.ops.shard import SELECT_ROUNDS, SLICE_COLUMNS

CASES = 30  # of each rule and filter


@pytest.fixture(autouse=True)
def on_cpu(backend, one_thread):
    if not backend.name.startswith("cpu"):
        pytest.skip("test_shard_kernels.py compares the kernels with the CPU's")


def check_steps(seeds, **options):
    emitted = 0
    for seed in seeds:
        step = random_step(seed, **options)
        expected = step.whole()
        emitted += int(expected.num_accepted.sum())
        for ranks in (1, 2, 3, 4):
            layout = any_layout(step.target.shape[1], ranks, step.chance)
            results, _ = step.on_ranks(layout)
            assert same(results, expected), (seed, options, layout, expected, results[0])
    return emitted


# ---- the same decisions ----


@pytest.mark.quick_on("best")
@pytest.mark.parametrize("filter", ["temperature", "top_k", "top_p", "min_p", "all"])
@pytest.mark.parametrize("rule", RULES)
def test_ranks_decide_like_the_op_on_all_columns(rule, filter):
    filters = list(FILTERS) if filter == "all" else ["temperature", filter]
    assert check_steps(range(CASES), rule=rule, filters=filters) > 0


@pytest.mark.quick_on("best")
def test_drafts_are_those_of_all_columns():
    for seed in range(150):
        chance, logits, k, mode, sampling, rest = random_drafts(seed)
        expected = pass_ext.draft_sample(logits, k, mode=mode, **sampling, **rest)
        for ranks in (1, 2, 3, 4):
            layout = any_layout(logits.shape[1], ranks, chance)
            results, _ = drafts_on_ranks(logits, k, mode, sampling, rest, layout)
            assert same(results, expected), (seed, layout, expected, results[0])


def test_greedy_steps_and_gathered_ones():
    for seed in range(40):
        step = random_step(seed, rule="rejection")
        layout = any_layout(step.target.shape[1], 3, step.chance)
        results, exchanges = step.on_ranks(layout, gather_below=1000)
        assert same(results, step.whole()) and len(exchanges) == 1
        step.sampling, step.draft_sampling = dict.fromkeys(FILTERS), {}
        results, exchanges = step.on_ranks(layout)
        assert same(results, step.whole()) and len(exchanges) == 1 + (not layout.is_aligned)


@pytest.mark.parametrize("rule", ["kseq", "typical", "coupled_inverse", "adaptive_rejection", "joint"])
def test_rules_that_need_all_columns_gather_them(rule):
    step = random_step(5, rule="rejection_with_replacement", vocabulary=300)
    step.keywords["rule"] = rule
    for more in ({}, {"threshold": 0.9, "alpha": 0.9, "support": 300}):
        expected = step.whole(**more)
        results, exchanges = step.on_ranks(equal_layout(300, 2), **more)
        assert same(results, expected) and len(exchanges) == 1
        assert not more or all(same([result.support], expected.support) for result in results)


def check_chains(rows, rule, **given):
    """rows: logits of target and drafts, masks of both."""
    requests = len(given["draft_tokens"]) if "cu_nodes" not in given else len(given["cu_nodes"]) - 1
    names, layout = ("target_logits", "draft_logits", "allowed", "draft_allowed"), equal_layout(300, 3)
    whole = dict(zip(names, rows, strict=True))
    named = dict(rule=rule, seeds=torch.arange(requests), positions=torch.arange(requests) * 7, **given)
    temperature = torch.linspace(0.6, 1.4, requests)
    expected = pass_ext.accept_chain(**whole, temperature=temperature, **named)
    ranks = []
    for rank, (begin, end) in enumerate(zip(layout.starts, layout.ends, strict=True)):
        own = {
            name: mask_columns(x.flatten(0, -2), begin, end).view(*x.shape[:-1], -1)
            if "allowed" in name
            else apart(x[..., begin:end])
            for name, x in whole.items()
        }
        ranks.append(chain_steps(rank, layout, **own, target=(temperature, None, None, None), **named))
    results, _ = run_together(ranks)
    assert same(results, expected), (expected, results[0])
    assert 0 < expected.num_accepted.sum() < len(given["draft_tokens"].flatten())


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_chains_are_those_of_all_columns(rule):
    """Of one length, and packed ones of several, whose drafts' rows lie elsewhere. Masks and parameters differ by request."""
    generator = torch.Generator().manual_seed(1)
    draft = torch.randn(40, 300, generator=generator)
    target = draft + torch.randn(40, 300, generator=generator)
    masks = torch.randint(-(2**31), 2**31, (2, 40, 10), generator=generator).int()
    tokens, _ = pass_ext.draft_sample(draft, 1, mode="with", allowed=masks[1], seeds=3, positions=0)
    each = [x.view(10, 4, -1) for x in (target, draft, *masks)]
    drafts = [x[:, :3].contiguous() for x in (each[1], each[3])]
    check_chains([each[0], drafts[0], each[2], drafts[1]], rule, draft_tokens=tokens.view(10, 4)[:, :3])
    places = torch.arange(40).view(20, 2).T.flatten()  # of the drafts' rows
    drawn = torch.cat([tokens[:1], tokens[places[:-1]]])[:, 0]  # after the row before
    bounds = torch.tensor([0, 5, 6, 6, 14, 24, 40])
    check_chains(
        [target, draft, *masks], rule, draft_tokens=drawn, cu_nodes=bounds, max_depth=15, draft_rows=places.int()
    )


# ---- faults ----


@pytest.mark.quick_on("best")
def test_supports_are_those_of_all_columns():
    """Of every rule and filter, masked and with room for some: some ranks hold no column, some no id, some gather them."""
    listed = left_out = 0
    for seed in range(60):
        step = random_step(seed)
        room = min(step.chance.choice((1, 4, 40, 40_000)), step.target.shape[1])
        whole = step.whole(support=room)
        layout = any_layout(step.target.shape[1], step.chance.choice((1, 2, 3)), step.chance)
        results, _ = step.on_ranks(layout, support=room, gather_below=1000 * (seed % 3 == 2))
        for result in results:
            assert torch.equal(result.emitted, whole.emitted)
            assert all(
                left.dtype == right.dtype and torch.equal(left, right)
                for left, right in zip(result.support, whole.support, strict=True)
            )
        listed += int(((whole.support.counts > 1) & (whole.support.counts <= room)).sum())
        left_out += int((whole.support.counts > room).sum())
    assert listed > 20 and left_out > 20


@pytest.mark.parametrize("rule", RULES)
def test_no_support_after_a_row_that_ends_a_request(rule):
    """NaN at the first root, and at the second request's accepted draft; the third request goes on."""
    sampling = {name: torch.ones(3) if name == "temperature" else None for name in FILTERS}
    keywords = dict(rule=rule, seeds=torch.arange(3), positions=torch.arange(3), draft_rows=None)
    target = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    target[[0, 2, 4], 7] = 60.0
    target[0, 200] = target[3, 200] = torch.nan
    draft = torch.zeros(6, 300).index_fill(1, torch.tensor([7]), 60.0)
    bounds, parents = torch.tensor([0, 2, 4, 6]), torch.tensor([-1, 0] * 3)
    step = Step(target, draft, (torch.full((6,), 7), parents, bounds, 1), keywords, sampling, {}, None)
    expected = step.whole(support=300)
    assert expected.emitted[:2].tolist() == [[-1, -1], [7, -1]] and expected.status.tolist() == [1, 1, 0]
    assert expected.support.counts.tolist() == [[0, 0], [300, 0], [300, 300]]
    results, _ = step.on_ranks(equal_layout(300, 2), support=300)
    for result in results:
        assert same([result], expected)
        assert same([result.support], expected.support)


def test_a_shard_off_by_one_column_shows():
    """Each fault shows in most steps: a draw depends on its columns alone, an accepted token on its own."""
    seen = 0
    for seed in range(40):
        step = random_step(seed, vocabulary=300)
        results, _ = step.on_ranks(equal_layout(300, 2), shift=seed % 2)
        seen += not same(results, step.whole())
    assert seen >= 20, seen


# ---- data on which a small fault decides ----


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_a_cut_through_equal_logits_of_the_draft(rule):
    """Top-k cuts q among tokens of one logit, all columns of the second rank: its sums after a rejected child depend on the
    last token's id among its own columns."""
    vocabulary, first, equal, kept = 8800, 8192, 400, 40
    generator, accepted = torch.Generator().manual_seed(0), []
    draft = torch.full((4, vocabulary), -30.0)
    draft[:, first : first + equal] = 0.0
    for seed in range(60):
        target = torch.full((4, vocabulary), -30.0)
        target[:, first : first + equal] = torch.randn(4, equal, generator=generator)
        target[:, first : first + kept] += 2.5
        drawn, _ = pass_ext.draft_sample(
            draft[:1], 3, mode="without", temperature=1.0, top_k=kept, seeds=seed, positions=0
        )
        parents, bounds = torch.tensor([-1, 0, 0, 0], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
        tokens = torch.cat([torch.zeros(1, dtype=torch.int64), drawn[0]])
        step = Step(
            target, draft, (tokens, parents, bounds, 1),
            {"rule": rule, "seeds": torch.tensor([seed]), "positions": torch.tensor([0])},
            {"temperature": torch.ones(1), "top_k": None, "top_p": None, "min_p": None},
            {"top_k": torch.tensor([kept], dtype=torch.int32)}, None,
        )  # fmt: skip
        expected = step.whole()
        accepted.append(int(expected.path[0, 1]) if expected.num_accepted[0] else 0)
        results, _ = step.on_ranks(Layout((0, first), (first, vocabulary)))
        assert same(results, expected), (seed, expected, results[0])
    assert {2, 3} <= set(accepted)


def test_a_nucleus_whose_last_token_hangs_on_the_last_bits_of_the_mass():
    """The smallest top-p, to the bit, at which one token more belongs to the nucleus; and the floats around it."""
    rows, vocabulary, k = 8, 9000, 64
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(2)) * 2.0

    def size(top_p):
        tokens, _ = pass_ext.draft_sample(logits, k, mode="top", temperature=1.0, top_p=top_p)
        return (tokens >= 0).sum(1)

    low, high = torch.full((rows,), 0.02), torch.full((rows,), 0.2)
    sizes = size(low)
    assert (sizes < size(high)).all() and (size(high) < k).all()
    while (high.view(torch.int32) - low.view(torch.int32) > 1).any():
        middle = ((low.view(torch.int32) + high.view(torch.int32)) // 2).view(torch.float32)
        is_larger = size(middle) > sizes
        low, high = torch.where(is_larger, low, middle), torch.where(is_larger, middle, high)
    for steps in range(-12, 13):
        top_p = (high.view(torch.int32) + steps).view(torch.float32)
        sampling = {"temperature": torch.ones(rows), "top_k": None, "top_p": top_p, "min_p": None}
        expected = pass_ext.draft_sample(logits, k, mode="top", **sampling)
        results, _ = drafts_on_ranks(
            logits, k, "top", sampling, {"allowed": None}, Layout((0, 8192), (8192, vocabulary))
        )
        assert same(results, expected), steps


# ---- exchanges ----


@pytest.mark.parametrize(
    ("rule", "filters", "count"),
    [
        ("coupled", ["temperature"], 2),
        ("coupled", ["temperature", "top_k"], 2 + SELECT_ROUNDS),
        ("rejection", ["temperature", "min_p"], 3),
        ("rejection", ["temperature", "top_p"], 3 + 1 + SELECT_ROUNDS),
        ("block", ["temperature"], 4),
    ],
)
def test_the_number_of_exchanges_is_that_of_the_docstring(rule, filters, count):
    layout = Layout((0, 8192), (8192, 8300))
    generator = torch.Generator().manual_seed(1)
    step = random_step(3, rule=rule, filters=filters, vocabulary=8300)
    nodes = 4
    step.target, step.draft = (torch.randn(nodes, 8300, generator=generator) for _ in range(2))
    chain = torch.arange(-1, nodes - 1, dtype=torch.int32)
    step.tree = (torch.randint(0, 8300, (nodes,)), chain, torch.tensor([0, nodes], dtype=torch.int32), nodes - 1)
    step.sampling = {name: None if value is None else value[:1] for name, value in step.sampling.items()}
    step.draft_sampling = {}
    step.keywords = {"rule": rule, "seeds": 5, "positions": 7}
    results, exchanges = step.on_ranks(layout)
    assert same(results, step.whole()) and len(exchanges) == count
    _, exchanges = step.on_ranks(Layout((0, 8000), (8000, 8300)))
    assert len(exchanges) == count + 1 and isinstance(exchanges[0][0], Move)


@pytest.mark.parametrize(("rule", "sums"), [("rejection", 5), ("rejection_with_replacement", 5), ("traversal", 6)])
def test_the_number_of_exchanges_of_a_tree_is_that_of_the_docstring(rule, sums):
    """Branching (4, 2, 2), as the docstring counts it."""
    generator, tree = torch.Generator().manual_seed(1), pass_ext.Tree.from_branching((4, 2, 2))
    nodes = tree.num_nodes
    target, draft = (torch.randn(nodes, 300, generator=generator) for _ in range(2))
    tokens, bounds = torch.randint(0, 300, (nodes,)), torch.tensor([0, nodes], dtype=torch.int32)
    packed = (tokens, torch.tensor(tree.parents, dtype=torch.int32), bounds, 3)
    sampling = {name: torch.ones(1) if name == "temperature" else None for name in FILTERS}
    step = Step(
        target,
        draft,
        packed,
        {"rule": rule, "seeds": torch.tensor([3]), "positions": torch.tensor([0])},
        sampling,
        {},
        None,
    )
    results, exchanges = step.on_ranks(Layout((0, 300), (300, 300)))
    assert same(results, step.whole()) and len(exchanges) == 3 + sums
    assert residual_rounds(rule, tree.parents, [0, nodes]) == sums


@pytest.mark.parametrize(
    ("filters", "count"),
    [({}, 3), ({"top_k": 5}, 9), ({"top_p": 0.5}, 10), ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, 16)],
)
def test_the_number_of_exchanges_of_drafting_is_that_of_the_docstring(filters, count):
    logits = torch.randn(2, 9000, generator=torch.Generator().manual_seed(1))
    sampling = {"temperature": torch.ones(2)} | {name: None for name in FILTERS if name != "temperature"}
    for name, number in filters.items():
        sampling[name] = torch.tensor([number] * 2, dtype=torch.int32 if name == "top_k" else torch.float32)
    noise = {"seeds": torch.tensor([1, 2]), "positions": torch.tensor([7, 7])}
    rest = {"allowed": None, **noise}
    for layout, moves in ((Layout((0, 8192), (8192, 9000)), 0), (Layout((0, 8000), (8000, 9000)), 1)):
        results, exchanges = drafts_on_ranks(logits, 3, "without", sampling, rest, layout)
        assert len(exchanges) == count + moves
        assert same(results, pass_ext.draft_sample(logits, 3, mode="without", **sampling, **noise))


def test_sizes_of_exchanges_do_not_depend_on_values():
    def sizes(seed):
        step = random_step(7, rule="traversal", filters=list(FILTERS), vocabulary=9000)
        step.target = torch.randn(step.target.shape, generator=torch.Generator().manual_seed(seed))
        _, exchanges = step.on_ranks(equal_layout(9000, 2))
        return [(type(wish), wish.tensor.shape) for wishes in exchanges[1:] for wish in wishes]

    assert sizes(1) == sizes(2)


def test_rounds_of_residual_sums():
    wide = [-1, 0, 0, 0, 0, 1, 1]  # four children of the root, two of the first
    assert residual_rounds("rejection", wide, [0, 7]) == 3
    assert residual_rounds("traversal", wide, [0, 7]) == 3
    assert residual_rounds("rejection", [-1, 0, 0, 2, 2], [0, 5]) == 2  # below the second child
    assert residual_rounds("traversal", [-1, 0, 0, 2, 2], [0, 5]) == 3
    for rule in ("rejection", "block", "traversal", "coupled"):
        for length in range(5):
            chain = list(range(-1, length))
            assert residual_rounds(rule, chain, [0, length + 1]) == residual_rounds_of_chain(rule, length)
    assert residual_rounds("traversal", [5, 1, -7, 2], [3, -1, 9, 4]) >= 0  # no tree at all


# ---- columns ----


def test_columns_move_to_the_slices_that_they_belong_to():
    for vocabulary, borders in (
        (128256, (0, 64128, 128256)),
        (20000, (0, 100, 9000, 9001, 20000)),
        (300, (0, 150, 300)),
    ):
        before = Layout(borders[:-1], borders[1:])
        after = before.aligned()
        assert after.vocab_size == vocabulary and after.is_aligned
        assert all(a == b for a, b in zip(after.ends, after.starts[1:], strict=False)) and after.starts[0] == 0
        matrix = torch.arange(2 * vocabulary, dtype=torch.float32).view(2, vocabulary)
        ranks = [
            Shard(rank, before, (matrix[:, begin:end], matrix[:, begin:end].bfloat16()), (None, None)).aligned()
            for rank, (begin, end) in enumerate(pairwise(borders))
        ]
        moved, _ = run_together(ranks)
        for shard in moved:
            begin = shard.start
            assert torch.equal(shard.logits[0], matrix[:, begin : begin + shard.columns])
            assert torch.equal(shard.logits[1], matrix[:, begin : begin + shard.columns].bfloat16())


def test_aligned_columns_stay():
    assert Layout((0, 2 * SLICE_COLUMNS), (2 * SLICE_COLUMNS, 20000)).is_aligned
    assert not Layout((0, 100), (100, 20000)).is_aligned


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([(0, 10, 20), (11, 9, 20)], "vocab_start must be 10 on rank 1.*got 11"),
        ([(0, 10, 20), (10, 9, 20)], "target_logits must have 20 columns on all ranks together.*got 19"),
        ([(0, 10, 20), (10, 10, 21)], "vocab_size must be the same on all ranks, rank 0 has 20, got 21 on rank 1"),
        ([(5, 10, 15)], "vocab_start must be 0 on rank 0"),
    ],
)
def test_columns_that_make_up_no_vocabulary_are_refused(shards, message):
    with pytest.raises(ValueError, match=message):
        checked_layout(shards)


def test_padded_columns_are_not_read():
    assert checked_layout([(0, 16, 20), (16, 16, 20)]) == Layout((0, 16), (16, 20))
    assert checked_layout([(0, 16, 20), (16, 16, 20), (32, 16, 20)]) == Layout((0, 16, 20), (16, 20, 20))
    step = random_step(11, rule="rejection", vocabulary=300)
    expected = step.whole()
    step.target, step.draft = (
        None if logits is None else torch.cat([logits, torch.full((len(logits), 20), torch.nan, dtype=logits.dtype)], 1)
        for logits in (step.target, step.draft)
    )
    step.keywords |= {"allowed": None, "draft_allowed": None}
    results, _ = step.on_ranks(Layout((0, 150), (150, 320)))
    assert not same(results, expected)  # NaN is seen where it is no padding
    layout = Layout((0, 150), (150, 300))
    from pass_ext.distributed.accept import tree_steps

    expected = random_step(11, rule="rejection", vocabulary=300)
    expected.keywords |= {"allowed": None, "draft_allowed": None}
    ranks = [
        tree_steps(
            rank, layout, step.target[:, begin:end], *step.tree,
            draft_logits=None if step.draft is None else step.draft[:, begin:end],
            target=tuple(step.sampling.values()), draft=tuple(step.draft_sampling.get(name) for name in FILTERS),
            **step.keywords,
        )
        for rank, (begin, end) in enumerate(((0, 150), (150, 320)))
    ]  # fmt: skip
    assert same(run_together(ranks)[0], expected.whole())


# ---- refusals ----


def test_ranks_need_positions_with_seeds():
    step, layout = random_step(11, rule="rejection", vocabulary=300), Layout((0, 300), (300, 300))
    step.keywords |= {"positions": None}
    step.sampling |= {"temperature": torch.full_like(step.keywords["seeds"], 0.5, dtype=torch.float32)}
    with pytest.raises(
        ValueError, match=r"distributed\.accept_tree: positions must be given with seeds .*got None; pass"
    ):
        step.on_ranks(layout)
    with pytest.raises(ValueError, match=r"distributed\.draft_sample: positions must be given with seeds"):
        rest = {"allowed": None, "seeds": torch.tensor([1, 2])}
        drafts_on_ranks(torch.zeros(2, 300), 3, "with", dict.fromkeys(FILTERS), rest, layout)


def test_refusals():
    tree, target, draft, _, seeds = shard_case("cpu")
    local = dict(rule="rejection", vocab_start=0, slices=2, round="peaks", draft_logits=draft, seeds=seeds)
    with pytest.raises(RuntimeError, match=r"shard_local: vocab_start must be a multiple of 8192 .*got 5"):
        pass_ext.distributed.shard_local(target, *tree, **(local | {"vocab_start": 5}))
    with pytest.raises(RuntimeError, match="shard_local: rule must be one that is verified from shards, got 'typical'"):
        pass_ext.distributed.shard_local(target, *tree, **(local | {"rule": "typical"}))
    with pytest.raises(RuntimeError, match="shard_local: state must be given after the first round"):
        pass_ext.distributed.shard_local(target, *tree, **(local | {"round": "masses"}))
    with pytest.raises(ValueError, match=r"shard_local: round must be one of peaks, .*got 'sums'"):
        pass_ext.distributed.shard_local(target, *tree, **(local | {"round": "sums"}))
    answers = pass_ext.distributed.shard_local(target, *tree, **local)[None]
    combine = dict(rule="rejection", vocab_size=8200, round="peaks", next="masses", draft_logits=draft)
    with pytest.raises(RuntimeError, match="shard_combine: vocab_size must be at least"):
        pass_ext.distributed.shard_combine(target, *tree, 1, answers, **(combine | {"vocab_size": 100}))
    with pytest.raises(RuntimeError, match=r"shard_combine: answers must have 10 .*in dimension 1"):
        pass_ext.distributed.shard_combine(target, *tree, 1, answers[:, :3].contiguous(), **combine)
    with pytest.raises(RuntimeError, match=r"shard_combine: answers must be those of at least one rank"):
        pass_ext.distributed.shard_combine(target, *tree, 1, answers[:0], **combine)
    state, _ = pass_ext.distributed.shard_combine(target, *tree, 1, answers, **combine)
    with pytest.raises(RuntimeError, match="shard_best: state must have"):
        pass_ext.distributed.shard_best(target[:2], state, 1, mode="top", vocab_start=0)
