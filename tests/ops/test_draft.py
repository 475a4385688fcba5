"""draft_sample on every backend: the reference's candidates, and each line of its contract.

The distribution of each mode: test_accept_distribution.py. Mode coupled as the plain sampler: test_seed_stability.py.
"""

import math
from functools import cache

import pytest
import torch
from support.each import each
from support.pairwise import pairwise
from support.steps import random_sampling, strided, to

import pass_ext
from pass_ext import reference
from pass_ext.ops.draft import MODES
from pass_ext.testing import cpu_backends

BEST_CPU = cpu_backends()[-1].name
NEAR = 2e-5  # candidates whose scores are so close may change places


def draw(backend, logits, k, **arguments):
    result = pass_ext.draft_sample(**to({"logits": logits, **arguments}, backend.device), k=k)
    return tuple(tensor.cpu() for tensor in result)


def random_rows(rows, vocabulary, seed, dtype=torch.float32, spread=3.0):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=random) * spread
    keys = dict(
        seeds=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=random),
        positions=torch.randint(0, 2**50, (rows,), generator=random),
        nodes=torch.randint(0, 1024, (rows,), generator=random).int(),
    )
    return strided(logits, dtype), random, keys


def assert_same_candidates(got, expected):
    tokens, logprobs = got
    differs = (tokens != expected.tokens).any(1)
    assert (expected.margin[differs] < NEAR).all(), (
        f"rows {differs.nonzero().flatten().tolist()} differ, their margins {expected.margin[differs].tolist()}"
    )
    assert differs.sum() <= 0.05 * len(differs) + 1
    same, finite = ~differs, expected.logprobs[~differs] > -math.inf
    assert torch.equal(logprobs[same] > -math.inf, finite)
    assert (logprobs[same].double() - expected.logprobs[same])[finite].abs().max() < 1e-5


# ---- the reference's candidates ----


@cache
def random_draws(mode, dtype, few):
    """(logits, k, the other arguments, the reference's candidates), computed once for all backends."""
    draws = []
    most = (6, 4) if mode == "with" else (20, 4) if few else (70, 12)
    for vocabulary, k in [(2, 3), (65, 4), (130, most[0]), (1025, most[1])]:
        rows = 6 if few else 24
        logits, random, keys = random_rows(rows, vocabulary, vocabulary, dtype)
        if mode == "top":  # bfloat16 has many ties: lower ids first
            logits = logits.round()
        for sampling in (random_sampling(rows, random), random_sampling(rows, random, filters=False), {}):
            arguments = dict(mode=mode, **sampling, **keys)
            draws.append((logits, k, arguments, reference.draft_sample(logits, k, **arguments)))
    return draws


FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.sanitizer
@pytest.mark.parametrize(("mode", "dtype"), pairwise(list(MODES), FLOATS, "cpu"), ids=str)
def test_candidates_are_the_references(backend, mode, dtype):
    for logits, k, arguments, expected in random_draws(mode, dtype, backend.name == "emulated"):
        assert_same_candidates(draw(backend, logits, k, **arguments), expected)


@pytest.mark.parametrize("mode", MODES)
def test_large_vocabularies(backend, mode):
    vocabulary = 151_936 if backend.name in (BEST_CPU, "cuda") and mode in ("without", "top") else 9_011
    k = 2 if mode == "with" else 6
    for filters in ({}, {"top_k": 50}, {"top_k": 5000}, {"top_p": 0.9}, {"top_k": 300, "top_p": 0.8}, {"min_p": 0.01}):
        logits, _, keys = random_rows(1, vocabulary, 1, torch.bfloat16)
        sampling = {"temperature": 0.9, **filters}
        columns = {name: torch.full((1,), value) for name, value in sampling.items()}
        expected = reference.draft_sample(logits, k, mode=mode, **columns, **keys)
        assert_same_candidates(draw(backend, logits, k, mode=mode, **sampling, **keys), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_may_begin_at_any_element(backend, dtype):
    """Wide loads start at multiples of 16 bytes, rows do not: the draws are equal to the bit."""
    vocabulary = 3 * 1024 + 77
    logits, _, keys = random_rows(8, vocabulary, 4, dtype)
    rows = torch.empty(8 * (vocabulary + 9) + 8, dtype=dtype)
    for shift in (0, 1, 5):
        moved = rows[shift : shift + 8 * (vocabulary + 9)].view(8, -1)[:, :vocabulary]  # and each row at another place
        rows.fill_(100.0)  # memory around a row must not be taken for a part of it
        moved.copy_(logits)
        for sampling in ({}, {"top_k": 40, "top_p": 0.9}):
            for got, expected in zip(
                draw(backend, moved, 3, **sampling, **keys),
                draw(backend, logits.contiguous(), 3, **sampling, **keys),
                strict=True,
            ):
                assert torch.equal(got, expected)


@pytest.mark.parametrize("slots", [5, 95, *(pytest.param(n, marks=pytest.mark.quick_on("cpu")) for n in (2, 32))])
def test_scores_that_round_to_one_number_are_in_the_order_of_ids(backend, slots):
    """Far below the largest logit small differences vanish in a score, but not between logits."""
    vocabulary = 9_000 if backend.name == "emulated" else 40_000
    logits = 1e-6 * torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(2))
    logits[:, 300] = 1000.0
    tokens, _ = draw(backend, logits, slots, mode="top")
    assert tokens.tolist() == [[300, *range(slots - 1)]] * 2


@pytest.mark.parametrize("mode", ["coupled", "without"])
@each("spread", [0.0, 0.5, 8.0])
@each("slots", [2, 3, 8, 17, 32, 33])
def test_several_winners_of_a_race_are_those_of_the_cpu(backend, mode, spread, slots):
    """A flat row, whose lists overflow, a usual one, and one whose winners share a group."""
    logits = spread * torch.randn(3, 9_011, generator=torch.Generator().manual_seed(slots))
    logits[1, 640:660] += 9.0
    logits[2, 40:] = -torch.inf
    options = dict(mode=mode, temperature=1.0, seeds=torch.tensor([3, 4, 5]), positions=slots)
    expected = pass_ext.draft_sample(logits, slots, **options)
    tokens, logprobs = draw(backend, logits, slots, **options)
    assert torch.equal(tokens.cpu(), expected[0])
    torch.testing.assert_close(logprobs.cpu(), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["coupled", "top"])
def test_flat_rows_are_narrowed_down(backend, mode):
    """More candidates than a list holds, nearly all equal: the cut is found by bins of logits, then of ids."""
    logits = torch.zeros(2, 6000)
    logits[1, ::3] = torch.linspace(0, 1e-3, 2000)
    keys = dict(seeds=torch.tensor([3, 4]), positions=torch.tensor([5, 6]))
    for sampling in ({"top_k": 4500}, {"top_p": 0.7}, {"top_k": 5000, "top_p": 0.6, "min_p": 0.5}):
        sampling = {"temperature": 1.0, **sampling}
        columns = {name: torch.full((2,), value) for name, value in sampling.items()}
        k = 40
        expected = reference.draft_sample(logits, k, mode=mode, **columns, **keys)
        assert_same_candidates(draw(backend, logits, k, mode=mode, **sampling, **keys), expected)


def test_masks(backend):
    logits, random, keys = random_rows(8, 100, 2)
    allowed = torch.randint(-(2**31), 2**31, (8, 4), generator=random).int()
    allowed[3] = 0
    for mode in MODES:
        k = 6 if mode == "with" else 60
        arguments = dict(mode=mode, allowed=allowed, temperature=torch.full((8,), 0.7), **keys)
        expected = reference.draft_sample(logits, k, **arguments)
        assert_same_candidates(draw(backend, logits, k, **arguments), expected)


@pytest.mark.parametrize(
    "keep", [1, 63, 64, 65, pytest.param(200, marks=pytest.mark.quick_on("cpu")), 1999, 2000, 2001]
)
def test_top_k_keeps_exactly_k(backend, keep):
    """Also with ties across the edge, and with fewer finite logits than k."""
    if backend.name == "emulated" and keep in (65, 1999, 2001):
        pytest.skip("seconds each, and their neighbours run")
    logits, _, _ = random_rows(4, 2000, 3)
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[3, 150:] = -math.inf
    slots = 220 if backend.name == "emulated" else 1024
    tokens, _ = draw(backend, logits, slots, mode="top", top_k=keep)
    for row in range(4):
        _, order = logits[row].sort(descending=True, stable=True)
        count = min(keep, slots, 150 if row == 3 else 2000)
        assert tokens[row, :count].tolist() == order[:count].tolist()
        assert (tokens[row, count:] == -1).all()


def test_top_p_keeps_the_shortest_prefix_that_reaches_it(backend):
    probabilities = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]])
    for top_p, count in ((0.0, 1), (0.4999, 1), (0.5001, 2), (0.7501, 3), (0.9376, 5), (0.9999, 5), (1.0, 5)):
        tokens, logprobs = draw(backend, probabilities.log(), 5, mode="top", top_p=top_p)
        assert tokens[0].tolist() == [*range(count), *[-1] * (5 - count)]
        expected = (probabilities[0, :count] / probabilities[0, :count].sum()).log()
        assert torch.allclose(logprobs[0, :count], expected, atol=1e-6)


def test_top_p_of_flat_rows_cuts_in_the_middle_of_ties(backend):
    tokens, _ = draw(backend, torch.zeros(2, 1000), 512, mode="top", top_p=torch.tensor([0.0999, 0.2999]))
    assert tokens[0].tolist() == [*range(100), *[-1] * 412]
    assert tokens[1].tolist() == [*range(300), *[-1] * 212]


@pytest.mark.parametrize("vocabulary", [4, 128, 1024])
def test_top_p_that_is_reached_exactly_is_enough(backend, vocabulary):
    """Equal logits weigh 1 each, so half of them have half of the mass to the bit; tokens below them weigh nothing."""
    logits = torch.zeros(1, vocabulary)
    tokens, _ = draw(backend, logits, vocabulary, mode="top", top_p=0.5)
    assert tokens[0].tolist() == [*range(vocabulary // 2), *[-1] * (vocabulary // 2)]
    tokens, _ = draw(backend, logits, vocabulary, mode="top", top_p=0.25, top_k=vocabulary // 2)
    count = vocabulary // 8 or 1
    assert tokens[0].tolist() == [*range(count), *[-1] * (vocabulary - count)], "of the tokens that top-k left"


def test_filters_apply_in_order(backend):
    """top-p applies after top-k: .4 / .7 reaches .55, so one token is kept; in the whole row it would be two."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    tokens, logprobs = draw(backend, logits, 4, mode="top", top_k=2, top_p=0.55)
    assert tokens.tolist() == [[0, -1, -1, -1]] and logprobs[0, 0].abs() < 1e-6
    tokens, _ = draw(backend, logits, 4, mode="top", temperature=1e6, top_p=0.45)  # temperature comes before
    assert tokens.tolist() == [[0, 1, -1, -1]]


# ---- the contract ----


def test_slots_beyond_the_support(backend):
    logits = torch.full((3, 80), -math.inf)
    logits[:, [3, 70]] = torch.tensor([1.0, 2.0])
    for mode in ("without", "top"):
        tokens, logprobs = draw(backend, logits, 5, mode=mode, seeds=1, positions=0)
        assert (tokens[:, :2].sort(1).values == torch.tensor([3, 70])).all()
        assert (tokens[:, 2:] == -1).all() and (logprobs[:, 2:] == -math.inf).all()
    tokens, _ = draw(backend, logits, 5, mode="with", seeds=1, positions=0)
    assert torch.isin(tokens, torch.tensor([3, 70])).all()


def test_temperature_zero_is_the_limit(backend):
    logits, _, keys = random_rows(6, 200, 4)
    order = logits.sort(dim=1, descending=True, stable=True).indices
    for mode in MODES:
        tokens, logprobs = draw(backend, logits, 4, mode=mode, temperature=0.0, **keys)
        expected = order[:, :1].expand(6, 4) if mode == "with" else order[:, :4]
        assert torch.equal(tokens, expected)
        assert (logprobs[:, 0] == 0).all()
        assert (logprobs[:, 1:] == (0 if mode == "with" else -math.inf)).all()
    tokens, _ = draw(
        backend, logits, 1, mode="coupled", **keys
    )  # without temperatures no row is greedy, as in accept_tree
    assert torch.equal(tokens, order[:, :1])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_rows_give_nothing_and_touch_no_other(backend, value):
    logits, _, keys = random_rows(5, 100, 5)
    for mode in MODES:
        before = draw(backend, logits, 3, mode=mode, temperature=1.0, **keys)
        bad = logits.clone()
        bad[2, slice(None) if value == -math.inf else 99] = value
        after = draw(backend, bad, 3, mode=mode, temperature=1.0, **keys)
        assert (after[0][2] == -1).all() and (after[1][2] == -math.inf).all()
        for left, right in zip(before, after, strict=True):
            assert torch.equal(left[[0, 1, 3, 4]], right[[0, 1, 3, 4]])


def test_a_draw_depends_on_its_own_row_only(backend):
    """Not on the batch, the order of rows, k, or the rows' stride."""
    logits, _, keys = random_rows(9, 150, 6)
    for mode in MODES:
        arguments = dict(mode=mode, temperature=torch.linspace(0.5, 2, 9), **keys)
        tokens, logprobs = draw(backend, logits, 6, **arguments)
        order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
        shuffled = {
            name: value[order] if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
        }
        again = draw(backend, logits[order].contiguous(), 6, **shuffled)
        assert torch.equal(again[0], tokens[order]) and torch.equal(again[1], logprobs[order])
        fewer = {name: value[4:5] if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
        assert torch.equal(draw(backend, logits[4:5], 2, **fewer)[0], tokens[4:5, :2])


def test_positions_nodes_seeds_and_purposes_tell_draws_apart(backend):
    logits = torch.zeros(1, 4096)
    plain = dict(mode="without", seeds=1, positions=1, nodes=1)
    drawn = {
        tuple(draw(backend, logits, 3, **(plain | change))[0][0].tolist())
        for change in ({}, {"seeds": 2}, {"positions": 2}, {"positions": 1 + 2**32}, {"nodes": 2}, {"seeds": 1 + 2**40})
    }
    drawn.add(tuple(draw(backend, logits, 3, **(plain | {"mode": "coupled", "temperature": 1.0}))[0][0].tolist()))
    assert len(drawn) == 7
    coupled = dict(mode="coupled", temperature=1.0, seeds=1, positions=1)
    assert torch.equal(draw(backend, logits, 3, nodes=5, **coupled)[0], draw(backend, logits, 3, **coupled)[0])


def test_fresh_seeds_come_from_the_generator(backend):
    logits = torch.zeros(4, 999, device=backend.device)
    generator = torch.Generator(backend.device)
    first, again, other = (pass_ext.draft_sample(logits, 2, generator=generator.manual_seed(s))[0] for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(pass_ext.draft_sample(logits, 2)[0], pass_ext.draft_sample(logits, 2)[0])


def test_no_rows(backend):
    for mode in MODES:
        tokens, logprobs = draw(backend, torch.zeros(0, 50), 3, mode=mode)
        assert tokens.shape == logprobs.shape == (0, 3)


# ---- refusals ----

REFUSALS = [
    ({"logits": torch.zeros(3, 8).double()}, r"logits must be bfloat16, float16 or float32, got float64\[3, 8\]"),
    ({"logits": torch.zeros(8)}, r"logits must have shape \[R, V\], got float32\[8\]"),
    ({"logits": torch.zeros(3, 0)}, r"logits must have a vocabulary of 1 to 4194304, got float32\[3, 0\]"),
    ({"logits": torch.zeros(8, 3).t()}, r"logits must be contiguous in its last dimension.*stride 3"),
    ({"k": 0}, r"k must be in \[1, 1024\], got 0"),
    ({"k": 1025}, r"k must be in \[1, 1024\], got 1025"),
    (
        {"temperature": torch.ones(2)},
        r"temperature must have 3 \(one for each row of logits\) in dimension 0, got float32\[2\]",
    ),
    ({"top_k": torch.ones(3, 1).int()}, r"top_k must have shape \[n\], one number each, got int32\[3, 1\]"),
    (
        {"seeds": torch.zeros(4).long(), "positions": 0},
        r"seeds must have 3 \(one for each row of logits\) in dimension 0",
    ),
    ({"allowed": torch.zeros(3).int()}, r"allowed must have shape \[3, 1\] \(a word for 32 tokens\), got int32\[3\]"),
]


@pytest.mark.quick_on("best")
@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[m[:24] for _, m in REFUSALS])
def test_bad_input_is_refused_in_words(backend, change, message):
    arguments = to({"logits": torch.zeros(3, 8), "k": 2} | change, backend.device)
    with pytest.raises(RuntimeError, match="pass_ext::draft_sample: " + message):
        pass_ext.draft_sample(**arguments)


def test_an_unknown_mode_is_refused_by_name():
    with pytest.raises(ValueError, match="draft_sample: mode must be one of coupled, without, with, top, got 'best'"):
        pass_ext.draft_sample(torch.zeros(1, 3), 1, mode="best")


# ---- what only a GPU can show ----
