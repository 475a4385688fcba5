"""return_logprobs of accept_tree and accept_chain on every backend: the reference's numbers, and unchanged decisions."""

import math
from functools import cache
from itertools import product

import pytest
import torch
from support.steps import random_step, to

import pass_ext
from pass_ext import reference
from pass_ext.ops.accept import MAX_TOP_LOGPROBS
from pass_ext.testing import cpu_backends

BEST_CPU = cpu_backends()[-1].name
NEAR = 2e-5  # a filter so near a tie may keep another token
PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "allowed")
TOP = 3
RULES = tuple(pass_ext.RULES)


def with_logprobs(backend, step, top=TOP):
    result = pass_ext.accept_tree(**to(step, backend.device), return_logprobs=True, top_logprobs=top)
    return [part.cpu() for part in result], pass_ext.ops.accept.TokenLogprobs(*(part.cpu() for part in result.logprobs))


def expected_of(step, result, top=TOP):
    parameters = {name: step[name] for name in PARAMETERS if name in step}
    return reference.accept_logprobs(step["target_logits"], step["cu_nodes"], result[0], result[1], top, **parameters)


def plain_error(step):
    """Twice the error of plain PyTorch in fp32 against fp64, and three roundings of the largest log probability."""
    rows = step["target_logits"].float()
    exact = rows.double().log_softmax(1)
    finite = exact.isfinite()
    error = (rows.log_softmax(1).double() - exact)[finite].abs().max()
    return float(2 * error + 3 * 2**-24 * exact[finite].abs().max())


def assert_same_numbers(ours, expected, bound):
    """Infinite and NaN in the same places, the same tokens, and all numbers within the bound."""
    for name, value in ours._asdict().items():
        right = getattr(expected, name)
        assert value.shape == right.shape, name
        if name == "top_tokens":
            assert value.dtype == torch.int64 and torch.equal(value, right)
            continue
        assert value.dtype == torch.float32, name
        assert torch.equal(value.isnan(), right.isnan()) and torch.equal(value.isinf(), right.isinf()), name
        finite = right.isfinite()
        error = (value.double() - right)[finite].abs()
        assert error.numel() == 0 or error.max() <= bound, f"{name} is {error.max()} off, {bound} allowed"


def allowed_words(step, random, share=0.8):
    """Masks of the target's rows; the first row of each allows all."""
    rows, vocabulary = step["target_logits"].shape
    bits = torch.rand(rows, -(-vocabulary // 32), 32, generator=random) < share
    words = (bits.long() << torch.arange(32)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).int()


@cache
def steps_of(rule):
    """Steps with every kind of sampling; masked ones too. And the requests whose filters are near no tie."""
    random = torch.Generator().manual_seed(RULES.index(rule))
    steps = []
    kinds = [
        (5, torch.float32, True),
        (70, torch.bfloat16, True),
        (193, torch.float16, False),
        (300, torch.bfloat16, None),
    ]
    for vocabulary, dtype, filters in kinds:
        sizes = [int(n) for n in torch.randint(1, 9, (10,), generator=random)]
        sizes[3], sizes[7] = 0, 1
        step = random_step(rule, sizes, vocabulary, random, dtype=dtype, filters=bool(filters))
        if filters is None:  # the softmax itself, whose sum the walk may know
            step["temperature"].fill_(1.0)
        if vocabulary in (5, 193):
            step["allowed"] = allowed_words(step, random)
            step["draft_allowed"] = None
        steps.append((step, reference.accept_tree(**step).margin > NEAR))
    return steps


@pytest.mark.parametrize("rule", RULES)
def test_numbers_are_the_references(backend, rule):
    for step, clear in steps_of(rule):
        result, ours = with_logprobs(backend, step)
        expected = expected_of(step, result)
        assert clear.sum() >= 8
        assert_same_numbers(
            pass_ext.ops.accept.TokenLogprobs(*(part[clear] for part in ours)),
            type(expected)(*(part[clear] for part in expected)),
            plain_error(step),
        )


# On the emulator one rule for each way to walk.
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, marks=() if rule in ("coupled", "rejection", "traversal") else pytest.mark.quick_on("cpu"))
        for rule in RULES
    ],
)
def test_decisions_are_the_same_bits_with_and_without(backend, rule):
    for step, _ in steps_of(rule):
        plain = pass_ext.accept_tree(**to(step, backend.device))
        assert plain.logprobs is None and len(plain) == 4
        for top in (0, TOP):
            result, ours = with_logprobs(backend, step, top)
            assert ours.top_tokens.shape == (*plain.emitted.shape, top)
            for left, right in zip(result, plain, strict=True):
                assert torch.equal(left, right.cpu())


def test_a_chain_has_the_numbers_of_its_tree(backend):
    random = torch.Generator().manual_seed(3)
    requests, drafts, vocabulary = 3, 3, 90
    target = torch.randn(requests, drafts + 1, vocabulary + 5, generator=random)[..., :vocabulary]
    tokens = torch.randint(0, vocabulary, (requests, drafts), generator=random)
    law = dict(temperature=[0.7, 0.0, 1.0], top_p=[0.9, 1.0, 1.0], seeds=[1, 2, 3], positions=4)
    words = torch.full((requests, drafts + 1, 3), -1, dtype=torch.int32)
    words[0, 0, 0] = 0x0F0F0F0F
    shared = dict(rule="rejection", return_logprobs=True, top_logprobs=2, **law)
    put = lambda tensor: tensor.to(backend.device)  # noqa: E731
    chain = pass_ext.accept_chain(put(target), put(tokens), allowed=put(words), **shared)
    tree = pass_ext.accept_tree(
        put(target.flatten(0, 1)),
        put(torch.cat([torch.zeros(requests, 1).long(), tokens], 1).flatten()),
        put(torch.arange(-1, drafts).repeat(requests)),
        put(torch.arange(requests + 1) * (drafts + 1)),
        drafts,
        allowed=put(words.flatten(0, 1)),
        **shared,
    )
    assert all(
        torch.equal(left, right) for left, right in zip((*chain, *chain.logprobs), (*tree, *tree.logprobs), strict=True)
    )


def lone(logits, **more):
    """One request of one node."""
    return dict(
        target_logits=logits[None],
        tokens=torch.zeros(1).long(),
        parents=torch.full((1,), -1),
        cu_nodes=torch.tensor([0, 1]),
        max_depth=0,
        **more,
    )


def test_equal_logits_rank_by_their_ids_and_impossible_tokens_by_none(backend):
    logits = torch.full((21,), -math.inf)
    logits[[17, 2, 9, 4]] = torch.tensor([3.0, 3.0, 5.0, 3.0])
    _, ours = with_logprobs(backend, lone(logits), 6)
    assert ours.top_tokens.tolist() == [[[9, 2, 4, 17, -1, -1]]]
    raw = torch.tensor([5.0, 3.0, 3.0, 3.0]).log_softmax(0)
    torch.testing.assert_close(ours.top_raw[0, 0, :4], raw)
    assert ours.top_raw[0, 0, 4:].tolist() == [-math.inf] * 2
    assert ours.top_processed.tolist() == [[[0.0, *[-math.inf] * 5]]]  # greedy: all mass on the first
    assert ours.raw.item() == ours.top_raw[0, 0, 0] and ours.processed.item() == 0.0


@pytest.mark.parametrize("vocabulary", [3, 4096 * 33 + 7])
def test_the_most_alternatives_of_small_and_large_rows(backend, vocabulary):
    """A row of more pieces than a block's warp reads at once, with its largest logits side by side and far apart."""
    random = torch.Generator().manual_seed(4)
    logits = torch.randn(vocabulary, generator=random)
    places = torch.tensor([0, 1, 2, 4096, 4097, 2 * 4096 + 5, 32 * 4096, 33 * 4096 + 6])
    logits[places[places < vocabulary]] += 9
    step = lone(
        logits.bfloat16(), temperature=torch.tensor([1.0]), seeds=torch.tensor([1]), positions=torch.tensor([0])
    )
    result, ours = with_logprobs(backend, step, MAX_TOP_LOGPROBS if backend.name != "emulated" else 12)
    assert_same_numbers(ours, expected_of(step, result, ours.top_tokens.shape[-1]), plain_error(step))


def test_bad_rows_and_padding(backend):
    """Request 0 ends before a NaN row, 1 is padding, 2 has NaN at the root, 3 is no tree, 4 hides NaN after its mask."""
    random = torch.Generator().manual_seed(5)
    logits = torch.randn(7, 40, generator=random)
    best = logits.argmax(1)
    logits[1, 3] = logits[2, 3] = math.nan
    logits[6, 39] = math.nan
    words = torch.full((7, 2), -1, dtype=torch.int32)
    words[6, 1] = 0x7F
    step = dict(
        target_logits=logits,
        tokens=torch.tensor([0, int(best[0]), 0, 0, 0, 0, 0]),
        parents=torch.tensor([-1, 0, -1, -1, 5, 0, -1]),
        cu_nodes=torch.tensor([0, 2, 2, 3, 6, 7]),
        max_depth=1,
        allowed=words,
    )
    result, ours = with_logprobs(backend, step)
    assert result[3].tolist() == [1, 0, 1, 4, 0]
    assert result[0].tolist() == [[best[0], -1], [-1, -1], [-1, -1], [best[3], -1], [logits[6, :39].argmax(), -1]]
    assert ours.raw[4, 0].isnan() and ours.processed[4, 0] == 0.0 and ours.top_tokens[4, 0].tolist() == [-1] * TOP
    step["target_logits"] = logits.nan_to_num(0.0)  # in rows that gave nothing; and row 6 is left out
    expected = expected_of(step, result)
    assert_same_numbers(
        pass_ext.ops.accept.TokenLogprobs(*(part[:4] for part in ours)),
        type(expected)(*(part[:4] for part in expected)),
        1e-5,
    )


def test_a_forbidden_token_far_above_the_others(backend):
    """exp of the forbidden logit less the largest allowed one overflows."""
    logits = torch.linspace(-1, 1, 40)
    logits[7] = 200.0
    step = lone(logits, allowed=torch.tensor([[~(1 << 7), -1]], dtype=torch.int32))
    result, ours = with_logprobs(backend, step)
    assert result[0].tolist() == [[39]] and ours.top_tokens[0, 0, 0] == 7
    assert_same_numbers(ours, expected_of(step, result), 4e-5)


def test_numbers_are_the_same_bits_with_any_thread_count(with_threads):
    random = torch.Generator().manual_seed(15)
    step = random_step("coupled", [6], 40_000, random, filters=False)
    results = with_threads(lambda: pass_ext.accept_tree(**step, return_logprobs=True, top_logprobs=5).logprobs)
    for result in results[1:]:
        assert all(torch.equal(left, right) for left, right in zip(result, results[0], strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(return_logprobs=True, top_logprobs=65), r"top_logprobs must be in \[0, 64\], got 65"),
        (dict(return_logprobs=True, top_logprobs=-1), r"top_logprobs must be in \[0, 64\], got -1"),
        (dict(top_logprobs=2), r"return_logprobs must be True with top_logprobs 2, got False"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match="pass_ext::accept_tree: " + message):
        pass_ext.accept_tree(**lone(torch.zeros(4)), **arguments)


def test_the_op_refuses_other_counts():
    nothing = [None] * 8
    for count in (-2, 65):
        with pytest.raises(
            RuntimeError, match=rf"accept_chain: logprobs must be -1 \(none\) or .*, 0 to 64, got {count}"
        ):
            torch.ops.pass_ext.accept_chain(
                torch.zeros(1, 1, 4),
                torch.zeros(1, 0).long(),
                0,
                None,
                *nothing,
                None,
                None,
                None,
                None,
                0.1,
                0.1,
                count,
                0,
            )


def test_every_sum_is_taken_from_where_it_is_known(backend):
    """With and without mask, temperature and filters: each combination takes another way to its sums."""
    random = torch.Generator().manual_seed(6)
    for rule, temperature, top_k, masked in product(("coupled", "rejection"), (1.0, 0.5), (0, 4), (False, True)):
        step = random_step(rule, [3, 4], 100, random, filters=False)
        step["temperature"].fill_(temperature)
        step["top_k"] = torch.full((2,), top_k, dtype=torch.int32)
        if masked:
            step["allowed"] = allowed_words(step, random)
        result, ours = with_logprobs(backend, step, 2)
        assert_same_numbers(ours, expected_of(step, result, 2), plain_error(step))
