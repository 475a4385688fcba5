"""next_tree_ without rates, so that rows are kept, on every backend against the reference: trees, transition scores, races,
limits, and what does not exist."""

import random

import pytest
import torch
from next_cases import STATE, VOCABULARY, check, copied, law_of, of_few_tokens, on, tables
from support.pairwise import pairwise

import pass_ext
from pass_ext import Tree

TREES = {
    "root": Tree.chain(0),
    "chain": Tree.chain(4).with_lookahead({0: 4, 4: 4}),
    "bushy": Tree([-1, 0, 0, 0, 1, 1, 2, 4, 4, 7]).with_lookahead({0: 5, 1: 5, 8: 5}),
    "star": Tree([-1, *[0] * 50, 1, 1, 50]).with_lookahead({0: 2, 50: 2}),
    "deep and wide": Tree.from_branching((3, 2, 2, 1)).with_lookahead({0: 4, 1: 4, 9: 4}),
}


def a_step(backend, tree, requests=3, *, count=8, rank=None, seed=0, sampled=False, filters=False, judged=None):
    """Arguments of a step of this tree, whose accepted nodes, tokens and limits are random; the limits allow candidates."""
    numbers, width, rows = random.Random(seed), 3, len(tree)
    torch.manual_seed(seed)
    ids = torch.stack([tree.ids(torch.randint(0, VOCABULARY, (tree.num_nodes,))) for _ in range(requests)])
    accepted = [numbers.randrange(width) for _ in range(requests)]
    lengths = [numbers.randint(1, 50) for _ in range(requests)]
    scores = torch.randn(requests, rows, count).sort(descending=True).values
    arguments = dict(
        rows=torch.stack([ids, ids.where(ids >= 0, -1), torch.randint(0, 99, ids.shape)]),
        parents=torch.tensor(tree.parents, dtype=torch.int32).repeat(requests, 1),
        lengths=torch.tensor(lengths), prefix_lens=torch.full((requests,), -7, dtype=torch.int32),
        report=torch.full((requests, 5 + width + seed % 3), -9), limits=torch.tensor([n + 20 for n in lengths]),
        emitted=torch.randint(0, VOCABULARY, (requests, width)),
        path=torch.randint(0, judged or tree.num_nodes, (requests, width), dtype=torch.int32),
        num_accepted=torch.tensor(accepted, dtype=torch.int32), status=torch.zeros(requests, dtype=torch.int32),
        offered=torch.stack([torch.randperm(VOCABULARY)[:count] for _ in range(requests * rows)]).view(requests, rows, count),
        scores=scores, **tables(rank), **law_of(requests, sampled=sampled, filters=filters),
    )  # fmt: skip
    return on(backend, arguments)


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("tree", "kind"),
    pairwise(list(TREES), [f"{x}{y}" for x in ("scored", "raced", "filtered") for y in ("", " recalls")], "best"),
)
def test_rows_are_those_of_the_reference(backend, tree, kind):
    drafted, (kind, _, recalls) = 0, kind.partition(" ")
    for seed, (count, rank) in enumerate([(1, 1), (3, 0), (8, 5), (33, 31), (64, 32), (100, 65), (20, None)]):
        arguments = a_step(
            backend, TREES[tree], 1 + seed % 5, count=count, rank=rank, seed=seed,
            sampled=kind in ("raced", "filtered"), filters=kind == "filtered",
        )  # fmt: skip
        state = check(of_few_tokens(arguments) if recalls else arguments)
        drafted += int((state["rows"][1, :, 1 : TREES[tree].num_nodes] >= 0).sum())
        assert (state["rows"][2] >= state["prefix_lens"][:, None]).all()
    assert (drafted > 10) == (tree != "root")


def test_a_step_after_a_step(backend):
    """The state of one call is the next one's; the report says what the step before had drafted."""
    arguments = a_step(backend, TREES["bushy"], 2, rank=4, seed=1)
    for seed in range(2, 6):
        state = check(arguments)
        drafted = (state["rows"][1, :, 1:] >= 0).sum(1)
        fresh = a_step(backend, TREES["bushy"], 2, rank=4, seed=seed)
        more = {name: value for name, value in fresh.items() if name not in (*STATE, "limits")}
        arguments = {**arguments, **more, "limits": arguments["lengths"] + 20}
        expected = copied(arguments)
        pass_ext.next_tree_(**expected)
        assert expected["report"][:, 2].tolist() == drafted.tolist()


def test_texts_end_at_their_limits(backend):
    """After the limit nothing moves; one token before it candidates would be wasted."""
    for room in range(-1, 6):
        arguments = a_step(backend, TREES["chain"], 4, seed=room + 9)
        arguments["limits"] = arguments["lengths"] + room
        arguments["path"][:] = 0
        before, root = arguments["lengths"].clone(), arguments["rows"][0, :, 0].clone()
        gained = arguments["num_accepted"].long() + 1
        state = check(arguments)
        if room <= 0:
            assert state["lengths"].tolist() == before.tolist() and state["report"][:, 0].tolist() == [-1] * 4
            assert state["rows"][0, :, 0].tolist() == root.tolist()
        else:
            assert state["lengths"].tolist() == (before + gained).tolist()
        has_candidates = (state["rows"][1, :, 1:5] >= 0).all(1)
        assert has_candidates.tolist() == [room - n > 1 for n in gained.tolist()]
        assert (state["rows"][1, :, 1:5].amax(1) >= 0).tolist() == has_candidates.tolist()
        arguments["limits"].zero_()
        ended = check(arguments)
        assert ended["lengths"].tolist() == state["lengths"].tolist(), "a limit of 0 ends a text at once"


def test_an_accept_result_without_a_token_moves_nothing(backend):
    """A request without rows, and one whose logits were no distribution."""
    arguments = a_step(backend, TREES["bushy"], 3, rank=3)
    int32 = dict(dtype=torch.int32, device=backend.device)
    arguments["num_accepted"] = torch.tensor([-1, 1, 0], **int32)
    arguments["emitted"][1, 1] = -1
    arguments["status"] = torch.tensor([0, 1, 0], **int32)
    before = arguments["lengths"].tolist()
    state = check(arguments)
    assert state["lengths"].tolist() == [*before[:2], before[2] + 1]
    assert (state["rows"][1, :2, 1 : TREES["bushy"].num_nodes] == -1).all()
    assert state["report"][:, :2].tolist() == [[-1, 0], [1, 1], [0, 0]]


def test_a_slot_of_the_models_own_logits_offers_the_token_that_the_target_draws(backend):
    """Scores without transitions (a rank of 0) race as in the accept rule."""
    torch.manual_seed(3)
    logits, tree = 4 * torch.randn(3, VOCABULARY, device=backend.device), Tree.chain(3).with_lookahead({0: 3})
    arguments = a_step(backend, tree, 1, count=64, rank=0, judged=1)
    offered, scores = pass_ext.draft_sample(logits, 64, mode="top")
    arguments |= dict(offered=offered[None], scores=scores[None], first=4)
    arguments |= {
        name: torch.tensor([value], device=backend.device) for name, value in (("temperature", 0.8), ("seeds", 5))
    }
    check(arguments)
    at = arguments["lengths"] + torch.arange(3, device=backend.device)
    drawn, _ = pass_ext.draft_sample(logits, 1, mode="coupled", temperature=0.8, seeds=5, positions=at)
    assert arguments["rows"][1, 0, 1:4].tolist() == drawn[:, 0].tolist()


@pytest.mark.parametrize("kind", ["scored", "raced"])
def test_a_tree_deeper_than_its_slots_ends_with_them(backend, kind):
    """After the last slot of a request lies the first of the next one."""
    tree = Tree.chain(6).with_lookahead({0: 3})
    state = check(a_step(backend, tree, rank=4, sampled=kind == "raced", judged=1))
    assert ((state["rows"][1, :, 1:7] >= 0) == (torch.arange(1, 7) <= 3)).all()


def test_slots_of_nodes_above_offer_nothing(backend):
    tree = Tree.chain(3).with_lookahead({0: 3, 2: 3})
    for last in range(4):
        arguments = a_step(backend, tree, seed=last)
        arguments["path"].fill_(last)
        assert (check(arguments)["rows"][1, :, 1:4] >= 0).all() == (last in (0, 2))


def test_a_group_of_more_slots_than_rows_are_chosen_of(backend):
    """Nine and more: chains of as many candidates."""
    arguments = a_step(backend, Tree.chain(11).with_lookahead({0: 11}), judged=1)
    assert (check(arguments)["rows"][1, :, 1:12] >= 0).all()


FLAT, STEPS, THREE = [0.0] * 8, [0.4, 0.3, 0.2, 0.1], [0.0, -1.0, 0.0, -1e-6, 0.0]
TWO = [0.0, -float("inf"), 0.0, *[-float("inf")] * 3]
SUPPORTS = [
    (FLAT, dict(top_p=0.5), 4),  # reached exactly
    (FLAT, dict(top_k=4, top_p=0.5), 2),  # of the mass that top-k has left
    (FLAT, dict(top_k=2, top_p=0.75), 2),
    (FLAT, dict(top_k=7), 7),
    (FLAT, dict(top_k=8), 8),
    (FLAT, dict(top_k=3, min_p=1.0), 3),  # ties at a border keep the lower ids
    (FLAT, dict(top_p=0.5, min_p=1.0), 4),
    (THREE, dict(min_p=1.0), 3),  # exactly as probable as the first
    (THREE, dict(min_p=0.9), 4),
    (STEPS, dict(top_p=0.55), 2),
    (STEPS, dict(top_k=2, top_p=0.55), 1),
    (STEPS, dict(top_k=3, top_p=0.9, min_p=0.7), 2),
    (STEPS, dict(top_k=2, min_p=0.7, top_p=0.5), 1),
    (TWO, {}, 2),
    (TWO, dict(top_k=5), 2),  # more than there are
    (TWO, dict(top_k=5, top_p=0.5, min_p=0.5), 1),
    (TWO[1:2] * 3, dict(top_k=2, top_p=0.9), 0),
]


@pytest.mark.parametrize(("scores", "filters", "kept"), SUPPORTS)
def test_filters_of_a_race_decide_together(backend, scores, filters, kept):
    """As many candidates as top-k, top-p and min-p leave, in that order, each on what is left, the likeliest ones."""
    scores = torch.tensor(scores) if max(scores) == 0.0 else torch.tensor(scores).log()
    arguments = a_step(
        backend, Tree([-1, *[0] * 9]).with_lookahead({0: 1}), 1, count=len(scores), rank=0, judged=1, sampled=True
    )
    arguments["temperature"].fill_(1.0)
    arguments["scores"][0, 10] = scores
    arguments["offered"][0, 10] = 3 * torch.arange(len(scores)) + 5
    types = dict(top_k=torch.int32)
    arguments |= {
        name: torch.tensor([value], dtype=types.get(name), device=backend.device) for name, value in filters.items()
    }
    likeliest = 3 * scores.sort(descending=True, stable=True).indices[:kept] + 5
    for seed in range(5):
        arguments["seeds"].fill_(seed)
        tokens = check(arguments)["rows"][1, 0, 1:10]
        assert tokens[:kept].sort().values.tolist() == likeliest.sort().values.tolist() and (tokens[kept:] == -1).all()
    check(arguments | dict(seeds=None))  # the seed 0


def test_strided_tables_and_tokens_that_they_lack(backend):
    """Tables as views; tokens of a padded head outside of them, and NaN or -inf among the scores, are no candidates."""
    arguments = a_step(backend, TREES["bushy"], 3, count=40, rank=7, seed=4)
    joined = torch.full((VOCABULARY, 20), float("nan"), device=backend.device)
    joined[:, 2:9], joined[:, 12:19] = arguments["left"], arguments["right"]
    arguments |= dict(left=joined[:, 2:9], right=joined[:, 12:19])
    for value in (float("nan"), float("-inf")):
        arguments["scores"][:, :, 3] = value
    arguments["offered"][:, :, 5] = VOCABULARY + 3
    arguments["offered"][:, :, 6] = -1
    state = check(arguments)
    assert (state["rows"][1] < VOCABULARY).all()
    arguments["emitted"].fill_(VOCABULARY)  # a root without transitions
    assert (check(arguments)["rows"][1, :, 1 : TREES["bushy"].num_nodes] == -1).all()


def test_a_text_without_room_keeps_its_columns(backend):
    """On CUDA, where lengths are not checked: tokens without a column are left out, and the rest is recalled from."""
    arguments = of_few_tokens(a_step(backend, TREES["bushy"], 3, rank=3))
    arguments["text"] = arguments["text"][:, :4].contiguous()
    if backend.name.startswith("cpu"):
        with pytest.raises(RuntimeError, match="text must have a column"):
            pass_ext.next_tree_(**arguments)
        return
    pass_ext.next_tree_(**arguments)
    assert ((arguments["text"] >= 0) & (arguments["text"] < VOCABULARY)).all()


def test_no_requests(backend):
    arguments = a_step(backend, TREES["bushy"], 1)
    none = {name: value[:0] for name, value in arguments.items() if name != "rows"}
    check(arguments | none | dict(rows=arguments["rows"][:, :0]))


def test_offered_ids_below_minus_one_are_no_tokens(backend):
    arguments = a_step(backend, TREES["star"], 2, judged=1)
    arguments["offered"][:, :, 1::2] = torch.tensor([-2, -9, -(2**40), -1], device=backend.device)
    tokens = check(arguments)["rows"][1, :, 1 : TREES["star"].num_nodes]
    assert tokens.min() == -1 and (tokens >= 0).any()


WRONG = {
    "lengths": lambda a: a["lengths"].fill_(2**31 - 1),
    "parents": lambda a: a["parents"][:, 2].fill_(2),
    "num_accepted": lambda a: a["num_accepted"].fill_(3),
    "path": lambda a: a["path"].fill_(25),
}


@pytest.mark.parametrize("name", WRONG)
def test_values_out_of_range_are_refused_or_offer_nothing(backend, name):
    arguments = a_step(backend, TREES["bushy"], 2, rank=3)
    WRONG[name](arguments)
    if backend.name.startswith("cpu"):
        with pytest.raises(RuntimeError, match=f"pass_ext::next_tree_: {name} must be"):
            pass_ext.next_tree_(**arguments)
        return
    pass_ext.next_tree_(**arguments)
    tokens = arguments["rows"][1, :, 1 : TREES["bushy"].num_nodes]
    assert ((tokens >= -1) & (tokens < VOCABULARY)).all()
    assert name in ("lengths", "parents") or (tokens == -1).all()


def test_costs_without_rates_are_refused():
    from pass_ext.testing import cpu_backends

    arguments = a_step(cpu_backends()[-1], TREES["bushy"])
    with pytest.raises(RuntimeError, match="pass_ext::next_tree_: costs must come with rates"):
        pass_ext.next_tree_(**arguments, costs=torch.zeros(len(TREES["bushy"])))
