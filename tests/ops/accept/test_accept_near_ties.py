"""Planted ties: GPU and CPU take the same decisions although their sums differ; exceptions are counted and bounded.

A GPU adds a row's weights with ex2.approx, within 2 units in the last place of the correctly rounded 2^x (PTX ISA, ex2), and in
a different order. The emulator can make the same error: all up, all down, or by a hash of x. Let u = 2^-24, V the tokens of a
row, and x the distance from the largest logit in nats; the mean of x under the row's distribution is at most ln V (by its
entropy). The relative error of a mass is then less than

    GPU  2^x 5u, its argument 4u ln V, a chunk's sum (31 + 5)u, the chunk's own weight 4u + 2u ln V
    CPU  e^x 4u, its argument 2u ln V, a sum of up to 8,192 tokens in 32 lanes (256 + 6)u

so a top-p edge is safe beyond `mass_bound`, and a coin, which two masses and two weights decide, beyond `coin_bound`. A bound
of 1e-7 is impossible: 2^x alone may be off by 2.5 units, 3e-7. Most of the bound is for sums whose roundings all go one way,
which does not happen: no planted tie farther than SEEN was decided differently, and the tests require the same of a GPU.
"""

import math

import emulator
import pytest
import torch
from emulator.ops import EMULATED
from support.steps import random_step, to

import pass_ext
from pass_ext import reference, testing
from pass_ext.reference.common.noise import coin
from pass_ext.testing import cpu_backends

CPU = cpu_backends()[-1]
SEEN = 5e-7
WIDTH = 3e-6  # relative width of the interval of planted ties
ERRORS = ("none", "up", "down", "mixed")
UNIT = 2.0**-24


def mass_bound(vocabulary):
    gpu = 45 + 6 * math.log(vocabulary)
    cpu = 4 + 2 * math.log(vocabulary) + min(vocabulary, 8192) / 32 + 6
    return max(gpu, cpu) * UNIT


def coin_bound(vocabulary):
    """The error of two masses, of two weights e^x (4u and an argument of about 2u ln V), and of products and quotients."""
    return 2 * mass_bound(vocabulary) + (2 * (4 + 2 * math.log(vocabulary)) + 6) * UNIT


@pytest.fixture(params=testing.cuda_backends() or ERRORS, ids=lambda backend: getattr(backend, "name", backend))
def gpu(request):
    """A GPU, or the emulator with the parameter's error of 2^x."""
    if not isinstance(request.param, str):
        yield request.param
        return
    emulator.load().set_exp2_error(request.param)
    yield EMULATED
    emulator.load().set_exp2_error("none")


def on(backend, op, tensors, **options):
    with backend.active():
        return [tensor.cpu() for tensor in op(**to(tensors, backend.device), **options)]


def planted_edges(vocabulary, rows, random):
    """(rows, top-p near the mass of their first few tokens, its relative distance from that mass)."""
    logits = torch.randn(rows, vocabulary, generator=random) * 2.0
    sums = torch.sort(logits.double().softmax(-1), descending=True).values.cumsum(-1)
    edges = sums[torch.arange(rows), torch.randint(2, 12, (rows,), generator=random)]
    top_p = (edges * (1 + (torch.rand(rows, generator=random).double() - 0.5) * WIDTH)).float()
    margins = ((sums - top_p.double()[:, None]).abs().amin(-1)) / top_p.double()
    return logits, top_p, margins


@pytest.mark.parametrize("vocabulary", [150, 5000])
def test_edges_of_top_p(gpu, vocabulary):
    rows = 400 if vocabulary < 1000 else 60
    logits, top_p, margins = planted_edges(vocabulary, rows, torch.Generator().manual_seed(vocabulary))
    step = {"logits": logits, "temperature": torch.ones(rows), "top_p": top_p}
    counts = [(on(backend, pass_ext.draft_sample, step, k=16, mode="top")[0] >= 0).sum(1) for backend in (CPU, gpu)]
    differs = counts[0] != counts[1]
    assert not (differs & (margins > min(SEEN, mass_bound(vocabulary)))).any(), margins[differs]
    assert (margins < 2e-7).sum() > 1, "there are ties to fall"
    if gpu.name == "emulated" and vocabulary < 1000:
        assert differs.any(), "no tie is decided differently: plant them nearer"


def planted_coins(vocabulary, requests, random):
    """(chains of one draft whose p / q is near its coin, its relative distance from the coin)."""
    positions = torch.arange(requests) * 3
    draft = torch.randn(requests, 1, vocabulary, generator=random) * 2.0
    target = torch.randn(requests, 2, vocabulary, generator=random) * 2.0
    tokens = draft[:, 0].argmax(-1, keepdim=True)
    q = draft[:, 0].double().softmax(-1).gather(1, tokens)[:, 0]
    coins = torch.tensor([coin(5, int(position), 1) for position in positions], dtype=torch.float64)
    target_p = coins * q * (1 + (torch.rand(requests, generator=random).double() - 0.5) * WIDTH)
    # The draft's logit is near 0, where floats are dense: the other tokens' weight sets p.
    others = target[:, 0].scatter(1, tokens, -math.inf)
    others -= (torch.logsumexp(others.double(), -1) + torch.log(target_p / (1 - target_p)))[:, None].float()
    exact = torch.logsumexp(others.double(), -1) + torch.log(target_p / (1 - target_p))
    target[:, 0] = others.scatter(1, tokens, exact.float()[:, None])
    p = target[:, 0].double().softmax(-1).gather(1, tokens)[:, 0]
    step = {
        "target_logits": target, "draft_tokens": tokens, "draft_logits": draft,
        "temperature": torch.ones(requests), "draft_temperature": torch.ones(requests),
        "seeds": torch.full((requests,), 5), "positions": positions,
    }  # fmt: skip
    return step, (p / q / coins - 1).abs()


@pytest.mark.parametrize("vocabulary", [150, 5000])
def test_coins(gpu, vocabulary):
    requests = 600 if vocabulary < 1000 else 60
    step, margins = planted_coins(vocabulary, requests, torch.Generator().manual_seed(vocabulary))
    accepted = [on(backend, pass_ext.accept_chain, step, rule="rejection")[2] for backend in (CPU, gpu)]
    differs = accepted[0] != accepted[1]
    assert not (differs & (margins > min(SEEN, coin_bound(vocabulary)))).any(), margins[differs]
    assert 0.3 < accepted[0].double().mean() < 0.7, "both sides of the coin"
    assert (margins < 2e-7).sum() > 1, "there are ties to fall"


def test_random_steps(gpu):
    """Without planted ties decisions differ at most within `coin_bound`; under rule coupled without filters they never do."""
    for rule, filters in (
        ("coupled", False),
        ("coupled", True),
        ("rejection", True),
        ("traversal", True),
        ("kseq", False),
    ):
        random = torch.Generator().manual_seed(31)
        step = random_step(rule, [1 + i % 7 for i in range(30)], 150, random, dtype=torch.bfloat16, filters=filters)
        expected, actual = (on(backend, pass_ext.accept_tree, step) for backend in (CPU, gpu))
        differs = (actual[0] != expected[0]).any(1) | (actual[3] != expected[3])
        if rule == "coupled" and not filters:
            assert not differs.any()
        elif differs.any():
            assert (reference.accept_tree(**step).margin[differs] <= coin_bound(150)).all()
