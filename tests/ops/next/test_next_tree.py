"""next_tree_ on every backend against the reference, and the reference against every shape: slots of nodes above, costs,
limits, races, and what does not exist."""

import itertools
import random

import pytest
import torch
from next_cases import STATE, VOCABULARY, check, copied, law_of, of_few_tokens, on, tables
from support.pairwise import pairwise

import pass_ext
from pass_ext import Tree, reference
from pass_ext.testing import assert_same_bits


def verified_rows(numbers, row_count, slots):
    """ids, tokens and parents of a step with some candidates, slots after the root and after a node."""
    nodes = numbers.randint(1, max(1, row_count - 2))
    parents = [-1, *(numbers.randrange(node) for node in range(1, nodes))]
    ids = [numbers.randrange(VOCABULARY) for _ in parents]
    tokens = list(ids)
    for node in (0, numbers.randrange(nodes)):
        for slot in range(numbers.randint(0, slots)):
            if len(ids) < row_count:
                parents.append(node if slot == 0 else len(ids) - 1)
                ids.append(-1 - slot)
                tokens.append(-1)
    spare = row_count - len(ids)
    return ids + [0] * spare, tokens + [-1] * spare, parents + [0] * spare, nodes


def a_step(
    backend, requests=3, row_count=12, *, slots=4, count=8, rank=None, seed=0, sampled=False, filters=False, costed=False,
    sharp=2.0, room=20,
):  # fmt: skip
    """Arguments of a step whose accepted nodes, slots, tokens and limits are random."""
    numbers, width = random.Random(seed), 3
    torch.manual_seed(seed)
    judged = [verified_rows(numbers, row_count, slots) for _ in range(requests)]
    accepted = [numbers.randrange(width) for _ in judged]
    lengths = [numbers.randint(1, 50) for _ in judged]
    path = [[numbers.randrange(nodes) for _ in range(width)] for *_, nodes in judged]
    rows = torch.randint(0, 99, (3, requests, row_count))
    rows[0], rows[1] = (torch.tensor([step[i] for step in judged]).view(requests, row_count) for i in (0, 1))
    offered = [torch.randperm(VOCABULARY)[:count] for _ in range(requests * row_count)]
    arguments = dict(
        rows=rows, parents=torch.tensor([step[2] for step in judged], dtype=torch.int32).view(requests, row_count),
        lengths=torch.tensor(lengths), prefix_lens=torch.full((requests,), -7, dtype=torch.int32),
        report=torch.full((requests, 5 + width + seed % 3), -9), limits=torch.tensor([n + room for n in lengths]),
        emitted=torch.randint(0, VOCABULARY, (requests, width)),
        path=torch.tensor(path, dtype=torch.int32).view(requests, width),
        num_accepted=torch.tensor(accepted, dtype=torch.int32), status=torch.zeros(requests, dtype=torch.int32),
        rates=torch.rand(slots), offered=torch.stack(offered).view(requests, row_count, count),
    )  # fmt: skip
    scores = (sharp * torch.randn(requests, row_count, count + 3)).log_softmax(-1)  # some of the mass is not offered
    arguments["scores"] = scores[..., :count].sort(descending=True).values.contiguous()
    arguments |= tables(rank)
    arguments |= law_of(requests, sampled=sampled, filters=filters)
    if costed:
        arguments["costs"] = 0.3 * torch.rand(row_count).cumsum(0)
    return on(backend, arguments)


def shapes_of(state):
    """(rows in use, nodes among them) of each request."""
    return [tuple(numbers) for numbers in state["report"][:, 3:5].tolist()]


def on_cpu():
    from pass_ext.testing import cpu_backends

    return cpu_backends()[-1]


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("kind", "more"),
    pairwise(["no tables", "scored", "raced", "filtered"], ["free", "costed", "recalls", "recalls costed"], "best"),
)
def test_rows_are_those_of_the_reference(backend, kind, more):
    shapes, recalls, costed = set(), "recalls" in more, "costed" in more
    for seed, (row_count, slots, count, rank) in enumerate(
        [(1, 1, 1, 1), (2, 2, 3, 0), (8, 3, 8, 5), (12, 4, 33, 31), (16, 4, 64, 32), (33, 8, 100, 65), (64, 8, 16, 3)]
    ):
        for sharp in (1.0, 6.0):
            arguments = a_step(
                backend, 1 + seed % 5, row_count, slots=slots, count=count, rank=None if kind == "no tables" else rank,
                seed=seed, sampled=kind in ("raced", "filtered"), filters=kind == "filtered", costed=costed, sharp=sharp,
            )  # fmt: skip
            state = check(of_few_tokens(arguments) if recalls else arguments)
            shapes |= set(shapes_of(state))
            for b, (used, nodes) in enumerate(shapes_of(state)):
                assert 1 <= nodes <= used <= row_count
                assert (state["rows"][1, b, :nodes] >= 0).all() and (state["rows"][1, b, nodes:] == -1).all()
                assert (state["rows"][0, b, nodes:used] < 0).all() and (state["rows"][0, b, used:] == 0).all()
                Tree(state["parents"][b].tolist())
    assert len(shapes) > (4 if costed else 8), shapes


def test_a_step_after_a_step(backend):
    """The state of one call is the next one's; the report says what the step before had drafted."""
    arguments = a_step(backend, 3, rank=4, seed=1)
    slots_seen = set()
    for seed in range(2, 12):
        state = check(arguments)
        drafted = (state["rows"][1, :, 1:] >= 0).sum(1).tolist()
        nodes = [n for _, n in shapes_of(state)]
        fresh = a_step(backend, 3, rank=4, seed=seed)
        more = {name: value for name, value in fresh.items() if name not in (*STATE, "limits")}
        numbers = random.Random(seed)
        more["path"] = torch.tensor([[numbers.randrange(n) for _ in range(3)] for n in nodes], dtype=torch.int32)
        more["path"] = more["path"].to(backend.device)
        arguments = {**arguments, **more, "limits": arguments["lengths"] + 20}
        expected = copied(arguments)
        pass_ext.next_tree_(**expected)
        assert expected["report"][:, 2].tolist() == drafted
        slots_seen |= {used - n for used, n in shapes_of(state)}
    assert len(slots_seen) > 2


def chained(backend, slots=3, nodes=4, row_count=14, requests=1, **options):
    """Requests that have judged a chain with slots after the root alone."""
    arguments = a_step(backend, requests, row_count, slots=slots, **options)
    tree = Tree.chain(nodes - 1).with_lookahead({0: slots})
    spare = row_count - len(tree)
    ids = [*range(nodes), *(-1 - slot for slot in range(slots)), *[0] * spare]
    arguments["rows"][0] = torch.tensor(ids)
    arguments["parents"][:] = torch.tensor([*tree.parents, *[0] * spare])
    arguments["num_accepted"].zero_()
    return arguments


def test_a_node_without_slots_takes_those_of_the_root_that_are_ahead_of_it(backend):
    """Slot k of the ancestor at distance k predicts the same token as slot 0 after the node."""
    for last in range(4):
        arguments = chained(backend, seed=3)
        arguments["path"][0, 0] = last
        state = check(arguments)
        offered, nodes = arguments["offered"].cpu(), shapes_of(state)[0][1]
        depths = state["rows"][2, 0, :nodes] - state["rows"][2, 0, 0]
        assert depths.max() == (3 - last if last < 3 else 0)
        for token, depth in zip(state["rows"][1, 0, 1:nodes], depths[1:], strict=True):
            assert token in offered[0, 4 + last + int(depth) - 1]


def test_offers_of_the_last_rows_alone(backend):
    """`first` says which row offered[:, 0] is; rows in front of it offer nothing."""
    arguments = a_step(backend, 4, rank=5, seed=7)
    whole = check(copied(arguments))
    arguments["offered"], arguments["scores"] = (arguments[name][:, 1:].contiguous() for name in ("offered", "scores"))
    assert_same_bits(check(arguments | dict(first=1))["rows"], whole["rows"])
    arguments = chained(backend, seed=3)
    for name in ("offered", "scores"):
        arguments[name] = arguments[name][:, 5:7].contiguous()  # slot 1 and slot 2 of three
    for last in (0, 1, 2):
        arguments["path"][0, 0] = last
        state = check(copied(arguments) | dict(first=5))
        assert (shapes_of(state)[0][1] > 1) == (last in (1, 2)), last


@pytest.mark.parametrize("offers", [0, 1, 2, 3])
def test_a_tree_ends_with_the_rows_that_offer(backend, offers):
    """After the last row of a request lies the first of the next one."""
    arguments = chained(backend, requests=3, seed=3)
    for name in ("offered", "scores"):
        arguments[name] = arguments[name][:, : 4 + offers].contiguous()  # after four nodes
    arguments["path"].zero_()
    state = check(arguments)
    depths = state["rows"][2] - state["rows"][2, :, :1]
    assert depths[state["rows"][1] >= 0].max() == offers


def test_no_offers_give_the_root_and_its_slots(backend):
    arguments = a_step(backend, 3, rank=5, slots=4) | dict(rates=torch.full((4,), 0.9, device=backend.device))
    none = dict.fromkeys(("offered", "scores", "left", "right"))
    state = check(copied(arguments) | none)
    assert shapes_of(state) == [(5, 1)] * 3
    for row_count in (1, 2, 4):
        few = a_step(backend, 2, row_count, slots=4) | dict(rates=arguments["rates"])
        assert shapes_of(check(few | none)) == [(min(row_count, 5), 1)] * 2
    arguments["offered"].fill_(-1)
    assert shapes_of(check(copied(arguments))) == [(5, 1)] * 3
    arguments["costs"] = torch.arange(12.0, device=backend.device) * 9
    assert shapes_of(check(arguments)) == [(1, 1)] * 3, "a cost that nothing pays"


def test_texts_end_at_their_limits(backend):
    """After the limit nothing moves; candidates and slots that reach beyond it are left out."""
    for room, seed in itertools.product(range(-1, 7), range(2)):
        arguments = chained(backend, seed=9 + seed, slots=3, room=room, rank=3)
        arguments["path"].zero_()
        before = arguments["lengths"].clone()
        root = arguments["rows"][0, :, 0].clone()
        state = check(arguments)
        used, nodes = shapes_of(state)[0]
        left = room - 1
        if room <= 0:
            assert state["lengths"].tolist() == before.tolist() and state["report"][0, 0] == -1
            assert state["rows"][0, :, 0].tolist() == root.tolist() and used == 1
        else:
            deepest = int((state["rows"][2, 0, :used] - state["rows"][2, 0, 0]).max())
            assert deepest < max(left, 1), "the target adds the last token"
            assert (nodes > 1) == (left > 1)
        arguments["limits"].zero_()
        ended = check(arguments)
        assert ended["lengths"].tolist() == state["lengths"].tolist() and shapes_of(ended) == [(1, 1)]


def test_an_accept_result_without_a_token_moves_nothing(backend):
    arguments = a_step(backend, 3, rank=3, seed=2)
    arguments["num_accepted"] = torch.tensor([-1, 1, 0], dtype=torch.int32, device=backend.device)
    arguments["emitted"][1, 1] = -1
    arguments["status"] = torch.tensor([0, 1, 0], dtype=torch.int32, device=backend.device)
    before = arguments["lengths"].tolist()
    state = check(arguments)
    assert state["lengths"].tolist() == [*before[:2], before[2] + 1]
    assert [nodes for _, nodes in shapes_of(state)][:2] == [1, 1]
    assert state["report"][:, :2].tolist() == [[-1, 0], [1, 1], [0, 0]]


def test_equal_scores_and_repeated_tokens(backend):
    """Lower ids come first, children of earlier nodes are taken first, and the choice with the fewest rows wins."""
    for count, costs in ((1, None), (4, None), (4, 0.0), (4, 0.1)):
        arguments = chained(backend, count=count, seed=count) | dict(rates=torch.full((3,), 0.9, device=backend.device))
        arguments["path"].zero_()
        arguments["scores"].fill_(0.0 if count == 1 else -1.5)
        if costs is not None:
            arguments["costs"] = torch.arange(14.0, device=backend.device) * costs
        state = check(arguments)
        if count == 1:  # sure tokens: the slots after the last of the chain are the only ones that may be needed
            assert shapes_of(state) == [(4 + 3, 4)] and state["parents"][0, 4] == 3
    arguments = chained(backend, count=6, seed=5, rank=4)
    arguments["offered"][:, :, 3:] = arguments["offered"][:, :, :1]
    arguments["scores"][:, :, 3:] = arguments["scores"][:, :, :1] - 0.25
    state = pass_ext.next_tree_(**arguments)
    assert (arguments["rows"][1] < VOCABULARY).all()


def test_scores_that_are_no_numbers_and_tokens_that_tables_lack(backend):
    arguments = a_step(backend, 3, count=40, rank=7, seed=4)
    joined = torch.full((VOCABULARY, 20), float("nan"), device=backend.device)
    joined[:, 2:9], joined[:, 12:19] = arguments["left"], arguments["right"]
    arguments |= dict(left=joined[:, 2:9], right=joined[:, 12:19])
    arguments["scores"][:, :, 3], arguments["scores"][:, :, 4] = float("nan"), float("-inf")
    arguments["offered"][:, :, 5] = VOCABULARY + 3
    arguments["offered"][:, :, 6] = -1
    arguments["rates"][0] = float("nan")
    arguments["costs"] = torch.zeros(12, device=backend.device)
    arguments["costs"][5], arguments["costs"][7] = float("nan"), float("inf")
    state = check(arguments)
    assert (state["rows"][1] < VOCABULARY).all() and max(nodes for _, nodes in shapes_of(state)) > 1
    assert all(used != 8 for used, _ in shapes_of(state))
    arguments["emitted"].fill_(VOCABULARY)  # a root without transitions
    assert all(nodes == 1 for _, nodes in shapes_of(check(arguments)))
    arguments = a_step(backend, 2, count=5, seed=4)
    arguments["scores"].fill_(float("nan"))
    assert all(nodes == 1 for _, nodes in shapes_of(check(arguments)))


def test_a_sure_slot_gets_a_chain_and_an_unsure_one_gets_branches(backend):
    for sure, branches, depth in ((0.97, 1, 3), (0.3, 3, 1)):
        arguments = chained(backend, slots=3, row_count=7, count=3)
        arguments["path"].zero_()
        arguments["rates"] = torch.tensor([0.6, 0.45, 0.4], device=backend.device)
        rest = (1 - sure) / 2
        arguments["scores"][:] = torch.tensor([sure, rest, rest * 0.9], device=backend.device).log()
        state = check(arguments)
        nodes = shapes_of(state)[0][1]
        depths = state["rows"][2, 0, :nodes] - state["rows"][2, 0, 0]
        assert depths.max() >= depth
        assert (state["parents"][0, 1:nodes] == 0).sum() >= branches
        assert ((state["parents"][0, 1:nodes] == 0).sum() == 1) == (sure > 0.9)


def test_a_text_that_repeats_itself_is_followed(backend):
    """The slots alone would take other tokens: the path after 1 2 3 is 4 5 6, as before, and the text grows."""
    arguments = chained(backend, slots=3, row_count=8, count=8) | dict(
        rates=torch.full((3,), 0.5, device=backend.device)
    )
    text = torch.zeros(1, 40, dtype=torch.int64, device=backend.device)
    text[0, :10] = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 1, 2])
    arguments["path"].zero_()
    arguments["emitted"][0, 0], arguments["lengths"][0], arguments["limits"][0] = 3, 10, 30
    arguments["offered"][:] = torch.tensor([90, 91, 4, 5, 6, 92, 93, 94])
    arguments["scores"][:] = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.05, 0.02, 0.02, 0.01]).log()
    state = check(copied(arguments) | dict(text=text))
    assert state["text"][0, :12].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 0]
    assert state["rows"][1, 0, 1:4].tolist() == [4, 5, 6] and state["parents"][0, :4].tolist() == [-1, 0, 1, 2]
    assert check(arguments)["rows"][1, 0, 1] == 90


def test_accepted_tokens_are_written_into_the_text(backend):
    arguments = a_step(backend, 4, rank=3, seed=5)
    lengths, accepted = arguments["lengths"].tolist(), arguments["num_accepted"].tolist()
    arguments["limits"][3] = 0  # it has ended
    state = check(of_few_tokens(arguments))
    for b, (length, count) in enumerate(zip(lengths[:3], accepted, strict=False)):
        assert state["text"][b, length : length + count + 1].tolist() == arguments["emitted"][b, : count + 1].tolist()
        assert state["lengths"][b] == length + count + 1
    assert state["lengths"][3] == lengths[3]


def test_a_cost_makes_a_step_smaller(backend):
    used = []
    for costs in (0.0, 0.02, 0.1, 0.5):
        arguments = a_step(backend, 8, 16, rank=3, seed=6)
        arguments["costs"] = costs * torch.arange(16.0, device=backend.device)
        used.append(sum(rows for rows, _ in shapes_of(check(arguments))))
    assert used == sorted(used, reverse=True) and used[-1] < used[0] / 2


def test_costs_without_a_sense_are_cut(backend):
    """No number costs nothing; numbers beyond 2^20 tokens, infinities among them, count as 2^20."""
    shapes = []
    for costs in (float("nan"), 0.0, float("-inf"), -(2.0**20), float("inf"), 2.0**20):
        arguments = chained(backend, slots=3, nodes=1, row_count=12, rank=3, seed=6)
        arguments["path"].zero_()
        arguments["costs"] = torch.full((12,), -2.0, device=backend.device)
        arguments["costs"][6] = costs
        shapes.append(shapes_of(check(arguments)))
    assert shapes[0] == shapes[1] and shapes[2] == shapes[3] and shapes[4] == shapes[5]
    assert shapes[2][0][0] == 7 != shapes[4][0][0]


def one_candidate(backend, row_count, rate, costs):
    """A step with one slot, whose one token has the chance 1/2, and costs that undo what a row costs."""
    arguments = chained(backend, 1, 1, row_count, count=1)
    arguments["path"].zero_()
    arguments["scores"].fill_(0.5).log_()
    arguments["rates"].fill_(rate)
    arguments["costs"] = costs - torch.arange(1.0, row_count + 1, device=backend.device) / 1024
    return shapes_of(check(arguments)), arguments


def test_among_equal_choices_the_one_with_the_fewest_rows_and_slots_of_the_root_wins(backend):
    """A slot after the root helps where the candidate is wrong, one after the candidate where it is right: as often."""
    shapes, arguments = one_candidate(backend, 3, rate=1.0, costs=0.0)
    assert shapes == [(3, 2)] and arguments["parents"][0].tolist() == [-1, 0, 1]
    shapes, _ = one_candidate(backend, 3, rate=0.0, costs=0.0)  # a slot is worth nothing
    assert shapes == [(2, 2)]


def test_no_requests(backend):
    arguments = a_step(backend, 1)
    none = {name: value[:0] for name, value in arguments.items() if name not in ("rows", "rates")}
    check(arguments | none | dict(rows=arguments["rows"][:, :0]))


# ---- the choice against every other one ----


def worth(rates, passed, slots):
    total = 0.0
    for i in range(passed, slots):
        total += 0.8 * 0.6 ** (i - passed) * torch.tensor(rates[passed : i + 1]).prod().item()
    return total


def tokens_of(parents, reach, groups, rates):
    """The expected tokens, by where the accepted path ends: reach + sum of last(v) · W(slots that predict v's successor)."""
    total = 0.0
    for node, share in enumerate(reach):
        last = share - sum(reach[child] for child, parent in enumerate(parents) if parent == node)
        at, passed = node, 0
        while at not in groups and at > 0:
            at, passed = parents[at], passed + 1
        total += share + last * worth(rates, passed, groups.get(at, 0))
    return total


@pytest.mark.parametrize("costed", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_no_other_choice_gives_more_tokens(seed, costed):
    """The reference: its chances, nodes and shape, against the expected tokens of every shape that it may take; a row costs
    2^-10."""
    numbers = random.Random(seed)
    rows, slots, levels = numbers.choice([3, 5, 8, 11]), numbers.choice([1, 2, 3]), numbers.choice([1, 2, 3, 9])
    arguments = chained(on_cpu(), slots, 1, max(rows, slots + 1), count=4, seed=seed, room=levels + 2)
    rows = arguments["rows"].shape[2]
    arguments["path"].zero_()
    if costed:
        arguments["costs"] = (0.05 * torch.rand(rows)).cumsum(0)
    offered, scores = arguments["offered"][0], arguments["scores"][0].double()
    rates, costs = arguments["rates"].tolist(), arguments.get("costs", torch.zeros(rows)).tolist()
    reference.next_tree_(**arguments)
    used, nodes = shapes_of(arguments)[0]
    got_parents, got_ids = arguments["parents"][0].tolist(), arguments["rows"][0, 0].tolist()

    # all candidates, the likeliest first; after each node its tokens are in order
    chances = {}
    for path in itertools.chain.from_iterable(
        itertools.product(range(4), repeat=depth) for depth in range(1, min(slots, levels) + 1)
    ):
        share = 1.0
        for depth, rank in enumerate(path):
            share *= scores[1 + depth, rank].exp().item()
        chances[path] = share
    order = [(), *sorted(chances, key=lambda path: (-chances[path], len(path)))]
    chances[()] = 1.0

    def value(parents, reach, groups):
        count = len(parents) + sum(groups.values())
        return tokens_of(parents, reach, groups, rates) - costs[count - 1] - count / 1024

    best = -1e9
    for count in range(1, min(rows, len(order)) + 1):
        kept = order[:count]
        parents = [kept.index(path[:-1]) if path else -1 for path in kept]
        reach = [chances[path] for path in kept]
        chain = [0]
        while (path := (0,) * len(chain)) in kept:
            chain.append(kept.index(path))
        for g, h, d in itertools.product(range(slots + 1), range(slots + 1), range(len(chain))):
            if (h > 0) != (d > 0) or count + g + h > rows or (g and g >= levels) or (h and d + h >= levels):
                continue
            groups = {node: size for node, size in ((0, g), (chain[d], h)) if size}
            best = max(best, value(parents, reach, groups))
    reach = [1.0]
    depths = [0]
    for node in range(1, nodes):
        parent = got_parents[node]
        depths.append(depths[parent] + 1)
        rank = offered[depths[node]].tolist().index(got_ids[node])
        reach.append(reach[parent] * scores[depths[node], rank].exp().item())
    groups = {}
    for row in range(nodes, used):
        at = got_parents[row]
        while at >= nodes:
            at = got_parents[at]
        groups[at] = groups.get(at, 0) + 1
    assert value(got_parents[:nodes], reach, groups) == pytest.approx(best, abs=1e-4)


# ---- refusals ----

WRONG = {
    "lengths": lambda a: a["lengths"].fill_(2**31 - 1),
    "parents": lambda a: a["parents"][:, 2].fill_(2),
    "num_accepted": lambda a: a["num_accepted"].fill_(3),
    "path": lambda a: a["path"].fill_(12),
}


@pytest.mark.parametrize("name", WRONG)
def test_values_out_of_range_are_refused_or_offer_nothing(backend, name):
    arguments = a_step(backend, 2, rank=3)
    WRONG[name](arguments)
    if backend.name.startswith("cpu"):
        with pytest.raises(RuntimeError, match=f"pass_ext::next_tree_: {name} must be"):
            pass_ext.next_tree_(**arguments)
        return
    pass_ext.next_tree_(**arguments)
    tokens = arguments["rows"][1, :, 1:]
    assert ((tokens >= -1) & (tokens < VOCABULARY)).all()
    assert name in ("lengths", "parents") or (tokens == -1).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(rows=torch.zeros(2, 3, 12, dtype=torch.int64)), r"rows must have shape \[3, B, R\]"),
        (dict(rows=torch.zeros(3, 3, 65, dtype=torch.int64)), "rows must have 1 to 64"),
        (dict(parents=torch.zeros(12, dtype=torch.int32)), r"parents must have shape \[B, R\]"),
        (dict(report=torch.zeros(3, 7, dtype=torch.int64)), "report must have 8 to"),
        (dict(rates=torch.zeros(9)), "rates must have 1 to 8"),
        (dict(rates=torch.zeros(0)), "rates must have 1 to 8"),
        (dict(costs=torch.zeros(11)), r"costs must have shape \[R\]"),
        (dict(scores=None), "offered and scores must come together"),
        (dict(left=None), "left and right must come together"),
        (dict(offered=None, scores=None), "left and right must come together"),
        (dict(first=1), r"first must be in \[0, 0\]"),
        (dict(first=-1), r"first must be in \[0, 0\]"),
        (dict(right=torch.zeros(VOCABULARY, 4)), "right must have 3 "),
        (dict(seeds=torch.zeros(2, dtype=torch.int64)), "seeds must have 3 "),
        (dict(offered=torch.zeros(3, 12, 129, dtype=torch.int64)), "offered must have at most 128 tokens"),
        (dict(lengths=torch.zeros(6, dtype=torch.int64)[::2]), "lengths must be contiguous"),
    ],
)
def test_misuse_is_refused(changed, message):
    arguments = a_step(on_cpu(), 3, rank=3) | changed
    with pytest.raises(RuntimeError, match=f"pass_ext::next_tree_: {message}"):
        pass_ext.next_tree_(**arguments)
