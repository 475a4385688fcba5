"""accept_tree and accept_chain on every backend: the reference's decisions, and each line of their contract.

test_accept_exactness.py (reference) and test_accept_distribution.py (kernels) show that emitted tokens have the target's
distribution.
"""

import math
from functools import cache

import pytest
import torch
from support.each import each
from support.pairwise import pairwise
from support.steps import random_step, to

import pass_ext
from pass_ext import reference, testing
from pass_ext.ops.common.rules import ACCEPT_RULES
from pass_ext.reference.common import noise
from pass_ext.testing import cpu_backends

BEST_CPU = cpu_backends()[-1].name
NEAR = 2e-5  # a decision so near a tie may differ: relative, a few hundred ulp after sums over a row
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def size_for(backend, most):
    """Fewer requests on backends that are slow."""
    return most if backend.name in (BEST_CPU, "cuda") else most // 20 if backend.name == "emulated" else most // 4


def accept(backend, step):
    result = pass_ext.accept_tree(**to(step, backend.device))
    return pass_ext.AcceptResult(*(tensor.cpu() for tensor in result))


def assert_same_decisions(result, expected, allowed_near_ties=0.02):
    """Every request as in the reference, except near ties, which are few."""
    differs = torch.zeros(len(expected.status), dtype=torch.bool)
    for got, reference_value in zip(result, expected, strict=False):
        assert got.shape == reference_value.shape and got.dtype == reference_value.dtype
        differs |= (got != reference_value).reshape(len(differs), -1).any(1)
    assert (expected.margin[differs] < NEAR).all(), (
        f"requests {differs.nonzero().flatten().tolist()} differ, their margins {expected.margin[differs].tolist()}"
    )
    assert differs.sum() <= allowed_near_ties * len(differs) + 1


@cache
def random_steps(rule, requests):
    """Random steps of so many requests and the reference's decisions about them, computed once for all backends."""
    random = torch.Generator().manual_seed(1)
    steps = []
    for vocabulary, dtype in [(5, torch.float32), (70, torch.bfloat16), (193, torch.float16)]:
        sizes = [int(n) for n in torch.randint(1, 14, (requests,), generator=random)]
        sizes[3], sizes[7] = 0, 1  # padded, and a lone root
        step = random_step(rule, sizes, vocabulary, random, dtype=dtype, draft_dtype=torch.float32)
        steps.append((step, reference.accept_tree(**step)))
    return steps


def forest(logits, tokens, parents, requests=1, **more):
    """So many equal trees with their own seeds; `logits` has the rows of one of them, or of all."""
    logits, size = torch.as_tensor(logits, dtype=torch.float32), len(tokens)
    step = dict(
        target_logits=logits.repeat(requests, 1) if len(logits) == size else logits,
        tokens=torch.tensor(tokens).repeat(requests),
        parents=torch.tensor(parents, dtype=torch.int32).repeat(requests),
        cu_nodes=torch.arange(requests + 1, dtype=torch.int32) * size,
        max_depth=size - 1 if parents == list(range(-1, size - 1)) else 3,
        temperature=1.0,
        seeds=torch.arange(requests) + 1,
        positions=0,
    )
    return step | more


def sampled(backend, logits, tokens, parents, **more):
    """The result of one tree at temperature 1."""
    return accept(backend, forest(logits, tokens, parents, **more))


def lone_roots(logits, **more):
    """Requests of one node each."""
    return forest(logits, [0], [-1], len(logits), **more)


NO_LAW = dict(temperature=None, seeds=None, positions=None)
DIVIDING = ("rejection", "block", "traversal", "kseq", "rejection_with_replacement", "adaptive_rejection", "joint")


def one_hot(vocabulary, *ids, high=9.0):
    logits = torch.zeros(len(ids), vocabulary)
    logits[torch.arange(len(ids)), torch.tensor(ids)] = high
    return logits


# ---- the reference's decisions ----


def test_a_gpu_decides_as_the_cpu_does():
    """A decision may differ only where a coin or an edge is within 5e-7, because devices add sums over a row in another order;
    test_accept_near_ties.py plants such ties. Without top-p rule coupled has no sum and its inverse form adds integers:
    always the same tokens.
    """
    others = testing.cuda_backends()
    if not others:
        from emulator.ops import EMULATED

        others = [EMULATED]
    cases = [("coupled", False, 60), ("coupled_inverse", False, 60), ("rejection", True, 60), ("traversal", True, 30)]
    for rule, filters, requests in cases:
        random = torch.Generator().manual_seed(31)
        sizes = [int(n) for n in torch.randint(1, 9, (requests,), generator=random)]
        step = random_step(rule, sizes, 150, random, dtype=torch.bfloat16, filters=filters)
        with cpu_backends()[-1].active():
            cpu_result = accept(cpu_backends()[-1], step)
        sums_nothing = rule in ("coupled", "coupled_inverse")
        margin = torch.zeros(requests) if sums_nothing else reference.accept_tree(**step).margin
        for backend in 2 * others:  # the emulator scans rows beforehand and during the walk, in turn
            with backend.active():
                got = accept(backend, step)
            differs = (got.emitted != cpu_result.emitted).any(1) | (got.status != cpu_result.status)
            assert not (differs & (sums_nothing | (margin > 5e-7))).any(), (
                backend,
                rule,
                margin[differs],
            )
            assert differs.sum() <= 1


@pytest.mark.sanitizer
@pytest.mark.parametrize("rule", pass_ext.RULES)
def test_decisions_are_the_references(backend, rule):
    for step, expected in random_steps(rule, 10 + size_for(backend, 40)):
        assert_same_decisions(accept(backend, step), expected)


@pytest.mark.parametrize(("rule", "dtype"), pairwise(list(pass_ext.RULES), DTYPES, "cpu"), ids=str)
def test_decisions_at_vocabularies_of_many_groups(backend, rule, dtype):
    random = torch.Generator().manual_seed(2)
    for vocabulary in (1024, 5003, 32_000) if backend.name in (BEST_CPU, "cuda") else (1024, 5003):
        step = random_step(rule, [4, 1, 6], vocabulary, random, dtype=dtype, closeness=0.2)
        step["target_logits"].mul_(1.5)
        assert_same_decisions(accept(backend, step), reference.accept_tree(**step))


ODD = [2, 3, 63, 64, 65, 127, 128, 129, 1023, 1025, 2049]


@pytest.mark.parametrize(
    ("vocabulary", "rule"), pairwise(ODD, ["rejection", "traversal", "kseq", "coupled", "coupled_inverse"], "cpu")
)
def test_odd_vocabularies(backend, vocabulary, rule):
    random = torch.Generator().manual_seed(vocabulary)
    step = random_step(rule, [3, 5, 2], vocabulary, random)
    assert_same_decisions(accept(backend, step), reference.accept_tree(**step))


def test_the_largest_vocabulary(backend):
    random = torch.Generator().manual_seed(3)
    for rule in ("coupled", "coupled_inverse", "rejection"):
        step = random_step(rule, [3], 262_144, random, dtype=torch.bfloat16, filters=False, closeness=0.05)
        assert_same_decisions(accept(backend, step), reference.accept_tree(**step))


@pytest.mark.parametrize("rule", ["coupled", "rejection", "traversal", "typical", "joint"])
def test_a_tree_of_1024_nodes(backend, rule):
    if backend.name == "emulated" and rule != "rejection":
        pytest.skip("ten seconds each; the walk over nodes is the same")
    random = torch.Generator().manual_seed(4)
    step = random_step(rule, [1024, 1], 17, random, filters=False, closeness=0.2)
    assert_same_decisions(accept(backend, step), reference.accept_tree(**step))


@pytest.mark.parametrize("rule", ["coupled", "rejection", "traversal"])
def test_a_tree_of_more_than_1024_nodes_is_none(backend, rule):
    """Its drafts are ignored, and the request beside it is not touched."""
    parents = [-1, *[0] * 1024, -1, 0]
    logits = one_hot(5, *[3] * 1027)
    step = forest(logits, [0, *[3] * 1024, 0, 3], parents, rule=rule)
    step["cu_nodes"] = torch.tensor([0, 1025, 1027]).int()
    step["seeds"] = torch.tensor([1, 2])
    result = accept(backend, step)
    assert result.num_accepted.tolist() == [0, 1] and result.status.tolist() == [4, 0]
    assert result.emitted[:, 0].tolist() == [3, 3] and result.path[0].max().item() == 0


@pytest.mark.parametrize("rule", [pytest.param("coupled", marks=pytest.mark.quick_on("cpu")), "block"])
def test_a_chain_of_1024_nodes(backend, rule):
    target = one_hot(5, *[i % 5 for i in range(1, 1025)])
    tokens = [i % 5 for i in range(1024)]
    result = sampled(backend, target, tokens, list(range(-1, 1023)), rule=rule, temperature=0.1, seeds=3)
    assert result.num_accepted.tolist() == [1023]
    assert result.emitted[0].tolist() == [i % 5 for i in range(1, 1025)]


@pytest.mark.parametrize("rule", pass_ext.RULES)
def test_a_chain_is_a_tree(backend, rule):
    random = torch.Generator().manual_seed(5)
    batch, drafts, vocabulary = 12, 4, 40
    target = torch.randn(batch, drafts + 1, vocabulary, generator=random) * 2
    draft = target[:, :drafts] + 0.5 * torch.randn(batch, drafts, vocabulary, generator=random)
    words = -(-vocabulary // 32)
    allowed = torch.randint(-(2**31), 2**31, (batch, drafts + 1, words), generator=random).int()
    sampling = dict(temperature=0.8, top_p=0.95, seeds=torch.arange(batch), positions=torch.arange(batch) * 7)
    tokens, _ = pass_ext.draft_sample(
        draft.flatten(0, 1), 1, temperature=0.8, top_p=0.95, seeds=1, positions=torch.arange(batch * drafts)
    )
    tokens = tokens.view(batch, drafts)
    tokens[2, 1:] = -1  # a request with fewer drafts
    tree = to(
        dict(
            target_logits=target.flatten(0, 1),
            tokens=torch.cat([torch.full((batch, 1), -1), tokens], 1).flatten(),
            parents=torch.arange(-1, drafts).repeat(batch).int(),
            cu_nodes=(torch.arange(batch + 1) * (drafts + 1)).int(),
            draft_logits=draft.flatten(0, 1),
            draft_rows=torch.cat(
                [torch.arange(batch * drafts).view(batch, -1), torch.full((batch, 1), -1)], 1
            ).flatten(),
            allowed=allowed.flatten(0, 1),
            **sampling,
        ),
        backend.device,
    )
    chain = to(
        dict(draft_logits=draft.transpose(0, 1).contiguous().transpose(0, 1), allowed=allowed, **sampling),
        backend.device,
    )
    wide = torch.zeros(batch, drafts + 3, vocabulary + 1)
    wide[:, 1 : drafts + 2, 1:] = target
    strided_target = wide.to(backend.device)[:, 1 : drafts + 2, 1:]
    as_chain = pass_ext.accept_chain(strided_target, tokens.to(backend.device), rule=rule, **chain)
    as_tree = pass_ext.accept_tree(max_depth=drafts, rule=rule, **tree)
    for left, right in zip(as_chain, as_tree, strict=True):
        assert torch.equal(left, right)
    for b in (
        (0, 2, batch - 1) if backend.name == "emulated" else range(batch)
    ):  # alone: the numbers by which kernels tell rows apart depend on how many rows there are
        request = slice(b, b + 1)
        alone = {name: value[request] if isinstance(value, torch.Tensor) else value for name, value in chain.items()}
        of_one = pass_ext.accept_chain(strided_target[request], tokens[request].to(backend.device), rule=rule, **alone)
        for left, right in zip(of_one, as_chain, strict=True):
            assert torch.equal(left, right[request])
    expected = reference.accept_chain(
        target, tokens, rule=rule, draft_logits=draft, allowed=allowed, seeds=sampling["seeds"],
        positions=sampling["positions"], temperature=torch.full((batch,), 0.8), top_p=torch.full((batch,), 0.95),
    )  # fmt: skip
    assert_same_decisions(pass_ext.AcceptResult(*(tensor.cpu() for tensor in as_chain)), expected)


@pytest.mark.parametrize("rule", pass_ext.RULES)
def test_packed_chains_are_trees_without_branches(backend, rule):
    """Of different lengths, padded requests and lone roots among them; with room for all drafts, and for fewer."""
    step = random_step(rule, [4, 1, 0, 6, 2, 0, 5, 3], 60, torch.Generator().manual_seed(8), chain=True)
    expected, depth = reference.accept_tree(**step), step.pop("max_depth")
    assert depth == 5
    parents, tokens = (step.pop(name).to(backend.device) for name in ("parents", "tokens"))
    given = to(step, backend.device)
    for most in (2, depth):
        tree = pass_ext.accept_tree(tokens=tokens, parents=parents, max_depth=most, support=60, **given)
        chains = pass_ext.accept_chain(draft_tokens=tokens, max_depth=most, support=60, **given)
        for left, right in zip((*tree, *tree.support), (*chains, *chains.support), strict=True):
            assert torch.equal(left, right)
    assert chains.num_accepted.max() > 1
    assert_same_decisions(pass_ext.AcceptResult(*(part.cpu() for part in chains)), expected)


@pytest.mark.quick_on("best")
def test_every_argument_of_packed_chains_decides(backend):
    """Each changes the result of a step that is like another but for it, and changes it as in trees."""
    random, pairs = torch.Generator().manual_seed(3), 12
    step = random_step("rejection", [4, 6] * pairs, 60, random, chain=True, filters=False)
    step["temperature"] = torch.ones(2 * pairs)
    masks = torch.randint(-(2**31), 2**31, (2, len(step["tokens"]), 2), generator=random).int()
    of_two = {
        "temperature": (0.0, 2.0), "top_k": (0, 3), "top_p": (1.0, 0.3), "min_p": (0.0, 0.4),
        "draft_temperature": (0.3, 3.0), "draft_top_k": (0, 3), "draft_top_p": (1.0, 0.3), "draft_min_p": (0.0, 0.4),
        "seeds": (5, 9), "positions": (3, 2**40),
    }  # fmt: skip
    typical, adaptive = {"rule": "typical"}, {"rule": "adaptive_rejection"}
    cases = [({}, {name: list(values) * pairs}) for name, values in of_two.items()]
    cases += [({}, {"allowed": masks[0]}), ({}, {"draft_allowed": masks[1]}), ({}, typical), ({}, {"support": 60})]
    cases += [({}, {"draft_rows": step["draft_rows"].flip(0)}), ({}, {"draft_logits": None, "draft_rows": None})]
    cases += [(typical, {"threshold": 0.9}), (adaptive, {"alpha": 0.9}), ({}, {"return_logprobs": True})]
    cases += [({"return_logprobs": True}, {"top_logprobs": 2}), ({"seeds": None, "generator": 4}, {"generator": 5})]

    def result_of(function, generator=None, **given):
        if generator is not None:
            given["generator"] = torch.Generator(backend.device).manual_seed(generator)
        result = function(**given)
        return [*result, *(result.logprobs or ()), *(result.support or ())]

    def are_equal(left, right):
        return len(left) == len(right) and all(map(torch.equal, left, right))

    for base, change in cases:
        former, given = to(step | base, backend.device), to(step | base | change, backend.device)
        tree = result_of(pass_ext.accept_tree, **given)
        assert not are_equal(result_of(pass_ext.accept_tree, **former), tree), change
        given["draft_tokens"] = given.pop("tokens")
        del given["parents"]
        assert are_equal(result_of(pass_ext.accept_chain, **given), tree), change


@pytest.mark.parametrize("rule", ["rejection", "traversal", "kseq"])
def test_a_mask_for_the_target_and_one_for_the_drafts(backend, rule):
    random = torch.Generator().manual_seed(6)
    step = random_step(rule, [6] * 12, 40, random, filters=False)
    rows = len(step["tokens"])
    step["allowed"] = torch.randint(-(2**31), 2**31, (rows, 2), generator=random).int()
    assert_same_decisions(accept(backend, step), reference.accept_tree(**step))
    step["draft_allowed"] = step["allowed"].flip(0).contiguous()
    assert_same_decisions(accept(backend, step), reference.accept_tree(**step))


def test_drafts_with_parameters_of_their_own(backend):
    random = torch.Generator().manual_seed(7)
    step = random_step("rejection", [5] * 16, 33, random)
    requests = len(step["seeds"])
    step |= dict(
        draft_temperature=torch.full((requests,), 1.7),
        draft_top_k=torch.zeros(requests, dtype=torch.int32),
        draft_top_p=torch.ones(requests),
        draft_min_p=torch.zeros(requests),
    )
    assert_same_decisions(accept(backend, step), reference.accept_tree(**step))


# ---- the contract, line by line ----


def test_no_temperature_is_greedy_and_the_lowest_id_wins_ties(backend):
    logits = torch.zeros(3, 70)
    logits[0, [5, 66]] = logits[1, [3, 4]] = 2.0
    for rule in pass_ext.RULES:
        needs_q = rule in ("kseq", "rejection_with_replacement")
        for temperature in (None, 0.0, -1.0, math.nan):
            more = {"draft_logits": torch.zeros(3, 70)} if needs_q else {}
            law = NO_LAW | dict(temperature=temperature, rule=rule)
            result = sampled(backend, logits, [0, 5, 3], [-1, 0, 1], **law, **more)
            assert result.emitted.tolist() == [[5, 3, 0]]
            assert result.path.tolist() == [[0, 1, 2]]
            assert (result.num_accepted.item(), result.status.item()) == (2, 0)


def test_the_coin_is_strict_and_a_token_without_probability_is_never_accepted(backend):
    """p(x) = 0 by -inf, mask, top-k or top-p: every rule rejects it for thousands of coins, zero among them or not."""
    requests = 8 if backend.name == "emulated" else size_for(backend, 2000)
    target = torch.zeros(2 * requests, 4)
    target[:, 3] = -math.inf
    draft = torch.zeros(2 * requests, 4)
    draft[:, 3] = 50.0
    allowed = torch.full((2 * requests, 1), 0b0111, dtype=torch.int32)
    of_draft = dict(draft_logits=draft, draft_temperature=1.0, draft_top_k=0, draft_top_p=1.0)
    for rule in pass_ext.RULES:
        for change in ({}, {"allowed": allowed}, {"top_k": 3}, {"top_p": 0.7}):
            logits = target if not change else target.clone().masked_fill_(target == -math.inf, -40.0)
            result = sampled(backend, logits, [0, 3], [-1, 0], requests=requests, rule=rule, **of_draft, **change)
            assert (result.num_accepted == 0).all() and (result.status == 0).all()
            assert (result.emitted[:, 0] != 3).all() and (result.emitted[:, 0] >= 0).all()


def test_a_certain_token_is_always_accepted(backend):
    """p(x) >= q(x) at every child: no coin can refuse it."""
    requests = 8 if backend.name == "emulated" else size_for(backend, 1000)
    target = one_hot(4, *[2] * (2 * requests), high=3.0)
    for rule in DIVIDING:
        result = sampled(backend, target, [0, 2], [-1, 0], requests=requests, rule=rule, draft_logits=target.clone())
        assert (result.num_accepted == 1).all(), rule


def test_an_empty_residual_draws_from_the_target(backend):
    """Both distributions are one-hot at 1, the child is another token: nothing is left of (p - q)+, so the target's comes."""
    sure = one_hot(6, 1, 1, high=200.0)
    for rule in DIVIDING:
        result = sampled(backend, sure, [0, 4], [-1, 0], rule=rule, draft_logits=sure)
        assert result.emitted.tolist() == [[1, -1]]
        assert (result.num_accepted.item(), result.status.item()) == (0, 0)


def test_draws_never_leave_the_support(backend):
    """Odd vocabularies whose last tokens have no probability: the race never passes the end."""
    for vocabulary in (3, 65, 130):
        target = torch.randn(size_for(backend, 400), vocabulary, generator=torch.Generator().manual_seed(0))
        target[:, vocabulary // 2 :] = -math.inf
        for rule in ("coupled", "coupled_inverse", "rejection"):
            emitted = accept(backend, lone_roots(target, temperature=5.0, rule=rule)).emitted
            assert (emitted >= 0).all() and (emitted < vocabulary // 2).all()


BAD_ROWS = [(math.nan, 1), (math.inf, 1), (-math.inf, 2)]


@pytest.mark.parametrize("rule", pass_ext.RULES)
@pytest.mark.parametrize(("value", "bit"), BAD_ROWS, ids=str)
def test_a_bad_row_ends_its_request_and_touches_no_other(backend, rule, value, bit):
    random = torch.Generator().manual_seed(8)
    step = random_step(rule, [5, 6, 4], 50, random, filters=False)
    step["temperature"].fill_(1.0)
    before = accept(backend, step)
    root = int(step["cu_nodes"][1])
    step["target_logits"][root, slice(None) if bit == 2 else 49] = value
    after = accept(backend, step)
    assert after.emitted[1].tolist() == [-1] * after.emitted.shape[1]
    assert (after.path[1, 0], after.num_accepted[1], after.status[1]) == (0, 0, bit)
    for b in (0, 2):
        assert all(torch.equal(left[b], right[b]) for left, right in zip(before, after, strict=True))


@pytest.mark.parametrize(("value", "bit"), BAD_ROWS, ids=str)
def test_a_bad_row_below_the_root_lets_the_token_that_led_there_be_the_last(backend, value, bit):
    for rule in pass_ext.RULES:
        draft = one_hot(9, 4, 5, 6, high=30.0)
        logits = draft.clone()
        logits[2, slice(None) if bit == 2 else 0] = value
        result = sampled(backend, logits, [0, 4, 5], [-1, 0, 1], rule=rule, draft_logits=draft)
        assert result.emitted.tolist() == [[4, 5, -1]], rule
        assert result.path.tolist() == [[0, 1, -1]]
        assert (result.num_accepted.item(), result.status.item()) == (1, bit)


@pytest.mark.parametrize(("value", "bit"), BAD_ROWS, ids=str)
def test_a_bad_row_inside_the_tree_ends_the_path_there(backend, value, bit):
    """The target's: the token that led there is the last. The draft's: the target draws one more."""
    for rule, needs_draft in ((name, rule.needs_draft_logits) for name, rule in ACCEPT_RULES.items()):
        right = one_hot(9, 4, 5, 6, 7, high=40.0)
        wrong = right.clone()
        wrong[2, slice(None) if bit == 2 else 0] = value
        step = dict(tokens=[0, 4, 5, 6], parents=[-1, 0, 1, 2], rule=rule)
        result = sampled(backend, wrong, **step, draft_logits=right)
        assert result.emitted.tolist() == [[4, 5, -1, -1]], rule
        assert (result.num_accepted.item(), result.status.item()) == (1, bit), rule
        if needs_draft:
            result = sampled(backend, right, **step, draft_logits=wrong)
            assert result.emitted.tolist() == [[4, 5, 6, -1]], rule
            assert (result.num_accepted.item(), result.status.item()) == (2, bit), rule


def test_rows_off_the_path_are_never_read(backend):
    """NaN in the rows of rejected children, and in draft rows of leaves, changes nothing."""
    for rule in ("coupled", "coupled_inverse", "rejection", "rejection_with_replacement", "kseq", "adaptive_rejection"):
        logits = one_hot(9, 4, 5, 6, high=40.0)
        logits[1] = math.nan  # the child with token 3 is rejected
        draft = torch.zeros(3, 9)
        draft[1:] = math.nan
        result = sampled(backend, logits, [0, 3, 4], [-1, 0, 0], rule=rule, draft_logits=draft)
        assert result.emitted[0, :2].tolist() == [4, 6]
        assert (result.num_accepted.item(), result.status.item()) == (1, 0)


def test_a_bad_row_on_another_branch_ends_no_longest_path(backend):
    """Rules that look at all branches ignore children below a bad row, and say so only where the path ends at it."""
    logits = one_hot(9, 4, 5, 5, 6, high=3.0)
    logits[0, 3] = 3.0
    draft = logits.clone()
    for rule in ("typical", "joint"):
        for value, bit in BAD_ROWS:
            logits[1] = value  # nodes 1 (token 3) and 2 (token 4) hang below the root, 3 below 1, 4 below 2
            bounds = dict(rule=rule, threshold=0.05, alpha=1.0)
            rows = torch.cat([logits[:2], draft[2:3], logits[:1], draft[3:4]])
            drawn = torch.cat([draft[:3], draft[:1], draft[3:4]])
            result = sampled(backend, rows, [0, 3, 4, 7, 5], [-1, 0, 0, 1, 2], draft_logits=drawn, **bounds)
            assert (result.num_accepted.item(), result.status.item()) == (2, 0), (rule, value)
            assert result.emitted[0, :2].tolist() == [4, 5]
            alone = sampled(backend, rows[:2], [0, 3], [-1, 0], draft_logits=drawn[:2], **bounds)
            assert (alone.num_accepted.item(), alone.status.item()) == (0, bit)
            assert alone.emitted[0].tolist() == [3, -1]


def test_a_bad_draft_row_sets_its_bit_and_the_target_draws(backend):
    judging = [name for name, rule in ACCEPT_RULES.items() if rule.needs_draft_logits]
    for rule in judging:
        for value, bit in BAD_ROWS:
            draft = torch.full((2, 9), value)
            result = sampled(backend, one_hot(9, 4, 5, high=40.0), [0, 4], [-1, 0], rule=rule, draft_logits=draft)
            assert result.emitted.tolist() == [[4, -1]]
            assert (result.num_accepted.item(), result.status.item()) == (0, bit)


def test_masked_nan_is_not_read(backend):
    logits = one_hot(40, 4, 5)
    logits[:, 35] = math.nan
    allowed = torch.full((2, 2), -1, dtype=torch.int32)
    allowed[:, 1] = ~(1 << 3)
    result = sampled(backend, logits, [0, 4], [-1, 0], allowed=allowed, **NO_LAW)
    assert result.emitted.tolist() == [[4, 5]] and result.status.item() == 0


def test_duplicate_children_are_legal(backend):
    random = torch.Generator().manual_seed(9)
    for rule in (rule for rule in pass_ext.RULES if rule != "block"):
        step = random_step(rule, [4] * 20, 5, random, filters=False)
        step["parents"] = torch.tensor([-1, 0, 0, 0], dtype=torch.int32).repeat(20)
        step["tokens"] = torch.randint(0, 2, (80,), generator=random)
        step["max_depth"] = 1
        assert_same_decisions(accept(backend, step), reference.accept_tree(**step))


def test_the_first_of_duplicates_is_followed(backend):
    result = sampled(backend, one_hot(9, 4, 5, 6, 7), [0, 4, 4, 5], [-1, 0, 0, 2], max_depth=2, **NO_LAW)
    assert result.path[0].tolist()[:3] == [0, 1, -1]


@each("token", [-1, 9, 2**31 - 1, 2**31, 2**40, -(2**40), 2**63 - 1])
def test_tokens_outside_the_vocabulary_are_never_accepted(backend, token):
    for rule in pass_ext.RULES:
        target, draft = one_hot(9, 4, 5, high=40.0), torch.zeros(2, 9)
        result = sampled(backend, target, [0, token], [-1, 0], rule=rule, draft_logits=draft)
        assert result.emitted.tolist() == [[4, -1]] and result.status.item() == 0


def test_ties_at_the_edge_of_a_filter_keep_the_lower_ids(backend):
    """Equal logits in several groups: top-k and top-p keep the lowest ids on every device."""
    vocabulary, keep = 150, 70
    for change in ({"top_k": keep}, {"top_p": (keep - 0.5) / vocabulary}):
        emitted = accept(
            backend, lone_roots(torch.zeros(max(200, size_for(backend, 2000)), vocabulary), **change)
        ).emitted
        seen = set(emitted.flatten().tolist())
        assert max(seen) < keep
        assert len(seen) > keep * 0.8


def test_top_k_of_exactly_as_many_tokens_as_reach_the_floor(backend):
    """k tokens stand out, each alone at the top of its group; also a single token, as at temperature 0."""
    logits = torch.zeros(60 if backend.name == "emulated" else 200, 640)
    logits[:, ::64] = 1.0
    for count in (1, 10):
        result = accept(backend, lone_roots(logits, top_k=count))
        assert set(result.emitted.flatten().tolist()) == set(range(0, 64 * count, 64))


@each("largest", [0.0, -0.0, math.log(10), math.log(4), math.log(2), 3.0, 1e-20, -5.0])
def test_min_p_where_its_edge_is_near_zero(backend, largest):
    """Floats near 0 are many; the search must still find the edge."""
    for min_p in (0.1, 0.25, 0.5, math.exp(-3), 1.0, 5.0):
        step = lone_roots([[largest, largest - 20.0, -math.inf]], min_p=min_p)
        assert accept(backend, step).emitted.tolist() == [[0]]


def test_min_p_keeps_all_ties_at_its_edge(backend):
    logits = torch.zeros(150, 130)
    logits[:, 7] = math.log(2.0) + 1e-3
    assert len(set(accept(backend, lone_roots(logits, min_p=0.49)).emitted.flatten().tolist())) > 70
    assert (accept(backend, lone_roots(logits, min_p=0.5)).emitted == 7).all()


def test_malformed_trees_give_the_targets_token_and_their_bit(backend):
    for rule in ("coupled", "coupled_inverse", "rejection", "traversal", "typical", "joint"):
        for parents in ([0, 0, 1], [-1, 1, 0], [-1, 2, 0], [-1, -1, 0], [-1, 0, 5], [-1, 0, -9], [2, 0, 1]):
            result = sampled(backend, one_hot(9, 4, 5, 6, high=40.0), [0, 4, 5], parents, rule=rule)
            assert result.emitted[0].tolist() == [4, -1, -1, -1], (rule, parents)
            assert result.path[0].tolist() == [0, -1, -1, -1]
            assert (result.num_accepted.item(), result.status.item()) == (0, 4)


@pytest.mark.parametrize(
    "bounds",
    [[0, 3, 50, 10], [0, 3, -4, 10], [0, 3, 2**31 - 1, 10], [0, 8, 4, 10], [0, 8, 4, 4], [-(2**31), 2**31 - 1, 10, 10]],
)
def test_bounds_that_divide_nothing_refuse_every_request(backend, bounds):
    """The owners of rows are unknown, so no request emits anything."""
    random = torch.Generator().manual_seed(11)
    for rule in ("coupled", "rejection", "typical"):
        step = random_step(rule, [3, 4, 3], 20, random)
        step["cu_nodes"] = torch.tensor(bounds, dtype=torch.int32)
        result = accept(backend, step)
        assert (result.emitted == -1).all() and (result.path == -1).all()
        assert (result.num_accepted == 0).all() and (result.status == 4).all()


def test_bounds_of_many_requests(backend):
    """More requests than blocks check by themselves: an extra kernel checks cu_nodes."""
    step = lone_roots(one_hot(4, *[i % 4 for i in range(1100)]), **NO_LAW)
    assert accept(backend, step).emitted.flatten().tolist() == [i % 4 for i in range(1100)]
    step["cu_nodes"][700] = 900
    assert (accept(backend, step).status == 4).all()


def test_rows_after_the_last_request_are_padding(backend):
    random = torch.Generator().manual_seed(12)
    for rule in pass_ext.RULES:
        step = random_step(rule, [3, 4, 3], 20, random)
        expected = accept(backend, step)
        for name in ("target_logits", "draft_logits"):
            step[name] = torch.cat([step[name], torch.full((6, 20), math.nan)])
        for name in ("tokens", "parents", "draft_rows"):
            step[name] = torch.cat([step[name], torch.full((6,), -9, dtype=step[name].dtype)])
        for left, right in zip(accept(backend, step), expected, strict=True):
            assert torch.equal(left, right)


def test_empty_tensors_are_not_missing_ones(backend):
    """A step without nodes is not a chain, and draft_logits without a row is not None."""
    nothing = dict(
        target_logits=torch.zeros(0, 9), tokens=torch.zeros(0).long(), parents=torch.zeros(0).int(), max_depth=1
    )
    assert accept(backend, nothing | {"cu_nodes": torch.tensor([0, 3]).int()}).status.tolist() == [4]
    assert accept(backend, nothing | {"cu_nodes": torch.tensor([0, 0]).int()}).status.tolist() == [0]
    assert accept(backend, nothing | {"cu_nodes": torch.tensor([0]).int()}).emitted.shape == (0, 2)
    no_draft = dict(rule="rejection", draft_logits=torch.zeros(0, 9), draft_rows=torch.tensor([0, 0]))
    result = sampled(backend, one_hot(9, 4, 5, high=40.0), [0, 4], [-1, 0], **no_draft)
    assert result.emitted.tolist() == [[4, -1]] and result.status.item() == 4
    chain = pass_ext.accept_chain(
        one_hot(9, 4, 5)[:, None].to(backend.device), torch.zeros(2, 0, device=backend.device).long()
    )
    assert chain.emitted.tolist() == [[4], [5]]


def test_traversal_reads_no_row_that_no_decision_needs(backend):
    """Neither the row of a leaf that its coin refuses nor rows below a token without probability."""
    logits = torch.zeros(4, 32)
    logits[:, 0] = 20.0
    logits[1] = logits[3] = math.nan
    for parents in ([-1, 0, 0, 1], [-1, 0, 0, 0]):
        result = sampled(backend, logits, [0, 9, 0, 9], parents, rule="traversal", top_k=4)
        assert (result.num_accepted.item(), result.status.item()) == (1, 0)


def test_a_draft_row_that_is_not_there_sets_its_bit(backend):
    for row in (2, -2, 2**31 - 1):
        draft = dict(rule="rejection", draft_logits=torch.zeros(2, 9), draft_rows=torch.tensor([row, -1]))
        result = sampled(backend, one_hot(9, 4, 5, high=40.0), [0, 4], [-1, 0], **draft)
        assert result.emitted.tolist() == [[4, -1]]
        assert result.status.item() == 4


def test_nodes_deeper_than_max_depth_are_ignored(backend):
    needing = ("kseq", "rejection_with_replacement")  # a draft
    for rule in (rule for rule in pass_ext.RULES if rule not in needing):
        step = forest(one_hot(9, 4, 5, 6, 7, high=40.0), [0, 4, 5, 6], [-1, 0, 1, 2], rule=rule)
        for max_depth in range(4):
            result = accept(backend, step | {"max_depth": max_depth})
            assert result.emitted[0].tolist() == [4, 5, 6, 7][: max_depth + 1]
            assert (result.num_accepted.item(), result.status.item()) == (max_depth, 0)


def test_a_row_that_is_described_twice_is_the_same_distribution(backend):
    """Typical takes the entropy of a distribution and draws from it later: top-p keeps two tokens both times."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 2).log()
    for _ in range(2):  # with rows scanned beforehand, and without; the draft has no probability
        result = sampled(backend, logits, [0, 3], [-1, 0], requests=48, rule="typical", top_p=0.5)
        assert (result.num_accepted == 0).all() and set(result.emitted[:, 0].tolist()) == {0, 1}
        assert 10 < (result.emitted[:, 0] == 1).sum() < 32  # three in seven


def test_the_inverse_is_the_quantile_of_one_number_for_all_rows(backend):
    """Requests with one seed and position have one u: the token is the least v with F(v) > u. Rows of many sizes and masks."""
    random, near = torch.Generator().manual_seed(17), 1e-6
    for vocabulary in (2, 255, 256, 257, 4097) if backend.name == "emulated" else (2, 65, 256, 257, 9001, 70_001):
        logits = torch.randn(6, vocabulary, generator=random) * 3
        allowed = torch.randint(-(2**31), 2**31, (6, -(-vocabulary // 32)), generator=random).int()
        allowed[:, 0] |= 3
        for seed in range(3):
            law = dict(rule="coupled_inverse", temperature=0.7, allowed=allowed, seeds=seed, positions=40)
            tokens = accept(backend, lone_roots(logits, **law)).emitted[:, 0]
            bits = (allowed[:, :, None].long() >> torch.arange(32) & 1).bool().flatten(1)[:, :vocabulary]
            law = (logits.double() / 0.7).masked_fill(~bits, -math.inf).softmax(1)
            after = law.cumsum(1).gather(1, tokens[:, None])[:, 0]
            before = after - law.gather(1, tokens[:, None])[:, 0]
            assert before.max() < after.min() + near, (vocabulary, seed)  # one u lies in every interval
            assert (law.gather(1, tokens[:, None]) > 0).all()
            high, low, _, _ = noise.words(seed, 40, noise.Purpose.inverse, 0, 0)
            u = (high * 2**32 + low) * 2.0**-64
            assert before.max() - near < u < after.min() + near


def test_the_inverse_follows_drafts_that_name_its_tokens(backend):
    """A chain of its own tokens is accepted whole, and the token after it is the one of its position."""
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(18))
    law = dict(seeds=torch.full((4,), 3), rule="coupled_inverse")
    alone = accept(backend, lone_roots(logits, positions=torch.arange(90, 94), **law)).emitted[:, 0].tolist()
    law["seeds"] = 3
    result = sampled(backend, logits, [0, *alone[:3]], [-1, 0, 1, 2], positions=90, **law)
    assert result.emitted[0].tolist() == alone


def test_adaptive_rejection_accepts_more_where_the_target_is_unsure(backend):
    """The share of accepted drafts is p / q + alpha (1 - max p), for a flat target and for a sure one; alpha 0 is rejection."""
    requests = 100 if backend.name == "emulated" else size_for(backend, 4000)
    draft = torch.tensor([0.8, 0.1, 0.1]).log().repeat(2 * requests, 1)
    for target in ([0.3, 0.4, 0.3], [0.04, 0.95, 0.01]):
        for alpha in (0.0, 0.25, 1.0):
            law = dict(rule="adaptive_rejection", alpha=alpha, draft_logits=draft)
            step = forest(torch.tensor([target, target]).log(), [0, 0], [-1, 0], requests, **law)
            result = accept(backend, step)
            share = min(1.0, target[0] / 0.8 + alpha * (1.0 - max(target)))
            error = math.sqrt(share * (1.0 - share) / requests)
            assert abs(result.num_accepted.double().mean() - share) <= 4.5 * error
            if alpha == 0.0:
                same = accept(backend, step | {"rule": "rejection"})
                assert all(map(torch.equal, result, same))


def test_joint_accepts_the_longest_path_whose_product_passes(backend):
    """An unlikely token may be followed by likely ones: the whole path counts, not its parts."""
    target = torch.tensor([[0.1, 0.9], [0.9, 0.1], [0.8, 0.2], [0.5, 0.5]]).log()
    draft = torch.tensor([[0.4, 0.6], [0.2, 0.8], [0.5, 0.5], [0.5, 0.5]]).log()
    products = [0.25, 0.25 * 4.5, 0.25 * 4.5 * 1.6]
    for threshold, accepted in ((0.2, 3), (1.0, 3), (1.5, 3), (2.0, 0)):
        law = dict(rule="joint", threshold=threshold, draft_logits=draft)
        result = sampled(backend, target, [0, 0, 0, 0], [-1, 0, 1, 2], **law)
        assert (max((i + 1 for i, w in enumerate(products) if w > threshold), default=0)) == accepted
        assert result.num_accepted.item() == accepted
    law = dict(rule="joint", threshold=1.0, draft_logits=draft[:3])
    star = sampled(backend, target[:3], [0, 0, 1], [-1, 0, 0], **law)  # of equal lengths the first that passes
    assert star.path[0].tolist()[:2] == [0, 2]


def test_a_bound_that_is_reached_exactly_is_not_passed(backend):
    """joint accepts above its threshold, typical above both of its bounds; the next float below lets the token pass."""
    half, one, quarter = ([0.0] * n + [-math.inf] * (4 - n) for n in (2, 1, 4))
    cases = [  # rule, target, draft, threshold and alpha, how many are accepted at these numbers and just below
        ("joint", [half, half], None, (0.5, 0.0), (0, 1)),
        ("joint", [half, half], [half, half], (1.0, 0.0), (0, 1)),
        ("joint", [half, quarter, half], [quarter, half, half], (2.0, 0.0), (0, 1)),
        ("joint", [half, quarter, half], [quarter, half, half], (1.0, 0.0), (1, 2)),  # 2, then 2 times 1/2
        ("joint", [half, half, half], None, (0.25, 0.0), (1, 2)),
        ("typical", [half, half], None, (0.5, 9.0), (0, 1)),
        ("typical", [quarter, half], None, (0.25, 9.0), (0, 1)),
        ("typical", [one, one], None, (9.0, 1.0), (0, 1)),
    ]
    for rule, target, draft, bounds, accepted in cases:
        drawn = None if draft is None else torch.tensor(draft)
        for share, count in zip((1.0, 1.0 - 2.0**-24), accepted, strict=True):
            threshold, alpha = (share * bound for bound in bounds)
            law = dict(rule=rule, threshold=threshold, alpha=alpha, draft_logits=drawn)
            result = sampled(backend, target, [0] * len(target), list(range(-1, len(target) - 1)), **law)
            assert result.num_accepted.item() == count, (rule, target, threshold, alpha)


def test_the_bounds_of_a_rule_are_its_own(backend):
    """None stands for the rule's numbers, as the reference has them."""
    random = torch.Generator().manual_seed(19)
    for name, rule in ACCEPT_RULES.items():
        step = random_step(name, [6] * 10, 30, random)
        named = accept(backend, step | {"threshold": rule.threshold, "alpha": rule.alpha})
        assert all(map(torch.equal, accept(backend, step), named))
        assert reference.accept.BOUNDS.get(name, (0.0, 0.0)) == (rule.threshold, rule.alpha)


def test_extreme_parameters(backend):
    """Temperatures from nearly nothing to infinite, filters at and beyond their ends: legal tokens, no status."""
    random = torch.Generator().manual_seed(13)
    for temperature in (1e-38, 1e-6, 1e6, 1e38, math.inf):
        for filters in (
            {},
            {"top_k": 2**31 - 1},
            {"top_k": -5},
            {"top_p": 0.0},
            {"top_p": math.nan},
            {"min_p": 7.0},
            {"min_p": -1.0},
        ):
            step = random_step("rejection", [4, 3], 80, random, filters=False)
            step |= {"temperature": temperature, **filters}
            result = accept(backend, step)
            assert (result.status == 0).all(), (temperature, filters)
            assert (result.emitted[:, 0] >= 0).all() and (result.emitted < 80).all()
            if temperature == 1e-38 or filters in ({"top_p": 0.0}, {"min_p": 7.0}):
                assert result.emitted[0, 0] == step["target_logits"][0].argmax()
    huge = torch.tensor([[3e38, -3e38, 3.3e38, 0.0]])
    assert sampled(backend, huge, [0], [-1]).emitted.tolist() == [[2]]


def test_fresh_seeds_come_from_the_generator(backend):
    random = torch.Generator().manual_seed(14)
    step = to(random_step("rejection", [4] * 8, 80, random), backend.device)
    del step["seeds"], step["positions"]
    generator = torch.Generator(backend.device)
    first = pass_ext.accept_tree(**step, generator=generator.manual_seed(1))
    again = pass_ext.accept_tree(**step, generator=generator.manual_seed(1))
    other = pass_ext.accept_tree(**step, generator=generator.manual_seed(2))
    assert torch.equal(first.emitted, again.emitted) and not torch.equal(first.emitted, other.emitted)


def test_results_are_the_same_bits_with_any_thread_count(with_threads):
    random = torch.Generator().manual_seed(15)
    step = random_step("traversal", [6], 40_000, random, filters=False, closeness=0.1)
    results = with_threads(lambda: pass_ext.accept_tree(**step))
    for result in results[1:]:
        assert all(torch.equal(left, right) for left, right in zip(result, results[0], strict=True))


def test_debug_mode_raises_where_a_status_is_set(debug_mode):
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, pytest.raises(RuntimeError, match=r"accept_tree: request 0: NaN or \+inf among the logits"):
            pass_ext.accept_tree(torch.full((1, 4), math.nan), torch.zeros(1).long(), *LONE)


LONE = (torch.full((1,), -1), torch.tensor([0, 1]), 0)


# ---- refusals ----

GOOD = dict(
    target_logits=torch.zeros(3, 8),
    tokens=torch.zeros(3, dtype=torch.long),
    parents=torch.tensor([-1, 0, 0]),
    cu_nodes=torch.tensor([0, 3]),
    max_depth=2,
)
REFUSALS = [
    ({"target_logits": torch.zeros(3, 8).double()}, r"target_logits must be bfloat16, float16 or float32, got float64"),
    ({"target_logits": torch.zeros(3, 8, 1)}, r"target_logits must have shape \[N, V\], got float32\[3, 8, 1\]"),
    ({"target_logits": torch.zeros(8, 3).t()}, r"target_logits must be contiguous in its last dimension"),
    ({"tokens": torch.zeros(3)}, r"tokens must be int64, got float32\[3\]"),
    ({"tokens": torch.zeros(4).long()}, r"tokens must have 3 \(one for each row of target_logits\) in dimension 0"),
    ({"parents": torch.zeros(2).int()}, r"parents must have 3 \(one for each row of target_logits\)"),
    ({"cu_nodes": torch.zeros(0).int()}, r"cu_nodes must have shape \[B \+ 1\]"),
    ({"cu_nodes": torch.zeros(0).int(), "temperature": 1.0}, r"cu_nodes must have shape \[B \+ 1\]"),
    ({"max_depth": -1}, r"max_depth must be in \[0, 1024\), got -1"),
    ({"max_depth": 1024}, r"max_depth must be in \[0, 1024\), got 1024"),
    ({"temperature": torch.ones(2)}, r"temperature must have 1 \(one for each request\) in dimension 0"),
    (
        {"temperature": 1.0, "seeds": torch.zeros(3).long(), "positions": 0},
        r"seeds must have 1 \(one for each request\)",
    ),
    (
        {"allowed": torch.zeros(3, 2).int()},
        r"allowed must have shape \[3, 1\] \(a word for 32 tokens\), got int32\[3, 2\]",
    ),
    ({"allowed": torch.zeros(3, 1).long()}, r"allowed must be int32, got int64"),
    ({"draft_logits": torch.zeros(3, 9)}, r"draft_logits must have 8 \(the target's vocabulary\) in dimension 1"),
    ({"draft_logits": torch.zeros(2, 8)}, r"draft_rows must be given unless draft_logits has a row for each of the 3"),
    ({"rule": "kseq"}, r"draft_logits must be given for rule 'kseq' .*, got None"),
    (
        {"rule": "rejection_with_replacement"},
        r"draft_logits must be given for rule 'rejection_with_replacement' .*, got None",
    ),
    ({"rule": "block"}, r"rule 'block' fits chains only, but in request 0 node 2 hangs below node 0"),
    ({"draft_allowed": torch.zeros(3, 1).int()}, r"draft_logits must be given with draft_allowed, .*, got None"),
    ({"rule": "typical", "threshold": -1.0}, r"threshold and alpha must not be negative, got -1 and 0.3"),
    ({"rule": "joint", "alpha": -1.0}, r"threshold and alpha must not be negative, got 0.5 and -1"),
    ({"rule": "typical", "alpha": math.nan}, r"threshold and alpha must not be negative, got 0.09 and nan"),
]


@pytest.mark.quick_on("best")
@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[m[:30] for _, m in REFUSALS])
def test_bad_input_is_refused_in_words(backend, change, message):
    if not backend.name.startswith("cpu") and "hangs below" in message:
        pytest.skip("values are not checked on a GPU: the request gets its status bit")
    arguments = to(GOOD | change, backend.device)
    with pytest.raises(RuntimeError, match="pass_ext::accept_tree: .*" + message):
        pass_ext.accept_tree(**arguments)


def test_chains_are_refused_in_words_too():
    logits, tokens = torch.zeros(2, 4, 8), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(RuntimeError, match=r"accept_chain: draft_tokens must have 3 \(one less than target_logits"):
        pass_ext.accept_chain(logits, tokens[:, :2])
    with pytest.raises(RuntimeError, match=r"accept_chain: draft_logits must have 3 \(one for each draft token\)"):
        pass_ext.accept_chain(logits, tokens, draft_logits=torch.zeros(2, 4, 8))
    with pytest.raises(RuntimeError, match=r"accept_chain: target_logits must have 1 to 1024 rows"):
        pass_ext.accept_chain(torch.zeros(2, 0, 8), tokens[:, :0])
    packed = dict(
        target_logits=logits[0], draft_tokens=torch.zeros(4).long(), cu_nodes=torch.tensor([0, 4]), max_depth=3
    )
    for change, message in (
        (dict(cu_nodes=None), "max_depth must be None without cu_nodes, got int"),
        (
            dict(cu_nodes=None, max_depth=None, draft_rows=torch.zeros(4)),
            "draft_rows must be None without cu_nodes, got T",
        ),
        (dict(max_depth=None), "max_depth must be the most drafts of a request with cu_nodes, got None"),
        (dict(target_logits=logits), r"target_logits must have shape \[N, V\] .*, got \[2, 4, 8\] and \[4\]"),
        (dict(draft_tokens=torch.zeros(3).long()), r"and draft_tokens \[N\], got \[4, 8\] and \[3\]"),
    ):
        with pytest.raises(ValueError, match=f"pass_ext::accept_chain: .*{message}"):
            pass_ext.accept_chain(**packed | change)
    with pytest.raises(ValueError, match=r"accept_chain: rule must be one of coupled, .*, got 'greedy'"):
        pass_ext.accept_chain(logits, tokens, rule="greedy")


def test_the_rules_are_those_of_the_reference():
    assert pass_ext.RULES == reference.accept.RULES


# ---- what only a GPU can show ----


def test_streams_count_apart(cuda):
    """Few rows: blocks of several launches count their arrivals at once, each stream in memory of its own."""
    step = to(random_step("coupled", [5] * 3, 5000, torch.Generator().manual_seed(5)), cuda.device)
    expected = pass_ext.accept_tree(**step)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    for stream in 50 * streams:
        with torch.cuda.stream(stream):
            results.append(pass_ext.accept_tree(**step))
    torch.cuda.synchronize()
    for result in results:
        assert all(torch.equal(left, right) for left, right in zip(result, expected, strict=True))


def test_graphs_count_apart_and_beside_eager_calls(cuda):
    """Some graphs are dropped, so that their counters are taken again."""
    step = to(random_step("coupled", [5] * 3, 5000, torch.Generator().manual_seed(6)), cuda.device)
    pass_ext.accept_tree(**step)
    graphs = []
    for _ in range(6):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps = [pass_ext.accept_tree(**step) for _ in range(3)]
        graphs = [*graphs[-2:], (graph, steps)]
    for seed in range(4):
        step["seeds"].fill_(seed)
        expected = pass_ext.accept_tree(**step)
        for graph, steps in graphs:
            graph.replay()
            for result in (*steps, pass_ext.accept_tree(**step)):
                assert all(torch.equal(left, right) for left, right in zip(result, expected, strict=True))
