"""The random numbers of pass_ext.reference: known answers, distribution, independence, and a counter that tells draws apart."""

import math

import pytest
import torch

from pass_ext.reference.common.noise import GROUP, Purpose, coin, exponential, exponentials, philox4x32

# Known answers published with Philox: counter, key, result.
ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), ANSWERS)
def test_known_answers(counter, key, result):
    assert philox4x32(*counter, key[1] << 32 | key[0]) == result
    blocks = philox4x32(*torch.tensor([counter, counter]).T, key[1] << 32 | key[0])
    assert torch.stack(blocks, -1).tolist() == [list(result)] * 2


def kolmogorov(sample, cumulative):
    """The largest distance between the empirical and the true cumulative distribution, times sqrt(n)."""
    sorted_sample, n = sample.sort().values, len(sample)
    truth = cumulative(sorted_sample)
    steps = torch.arange(n + 1) / n
    return float(torch.maximum(truth - steps[:-1], steps[1:] - truth).max()) * math.sqrt(n)


def exponential_cdf(x):
    return 1.0 - torch.exp(-x)


# P(sqrt(n) distance > 2.2) = 2 exp(-2 2.2^2) = 1.2e-4; seeds are fixed, so a failure is a fault.
SUSPICIOUS = 2.2


@pytest.mark.parametrize("purpose", [Purpose.coupled, Purpose.residual, Purpose.bonus, Purpose.draft])
def test_every_variate_is_exponential(purpose):
    noise = exponentials(seed=2**63 + 17, position=12345, purpose=purpose, vocabulary=200_000)
    assert noise.dtype == torch.float64 and noise.shape == (200_000,) and (noise > 0).all()
    assert kolmogorov(noise, exponential_cdf) < SUSPICIOUS


def test_every_place_in_a_group_is_exponential():
    groups = exponentials(3, 4, Purpose.draft, 2000 * GROUP).view(-1, GROUP)
    assert max(kolmogorov(groups[:, place], exponential_cdf) for place in range(GROUP)) < SUSPICIOUS
    least = groups.min(1)
    assert kolmogorov(least.values * GROUP, exponential_cdf) < SUSPICIOUS
    leaders = torch.bincount(least.indices, minlength=GROUP)
    assert float(((leaders - 2000 / GROUP) ** 2 / (2000 / GROUP)).sum()) < 63 + 5 * math.sqrt(2 * 63)


def test_variates_of_a_group_are_independent():
    """A shared first_g does not show in values or ranks, for any pair of places."""
    groups = exponentials(5, 6, Purpose.coupled, 8000 * GROUP).view(-1, GROUP)
    for values in (groups, exponential_cdf(groups), groups.log()):
        correlation = torch.corrcoef(values.T) - torch.eye(GROUP)
        assert correlation.abs().max() < 5.5 / math.sqrt(8000)
        assert abs(float(correlation.mean())) < 5.0 / math.sqrt(8000 * GROUP * GROUP / 2)
    pairs = exponential_cdf(groups[:, :2]) * 4  # the square of two variates, in 16 cells
    cells = torch.bincount(pairs[:, 0].long() * 4 + pairs[:, 1].long(), minlength=16)
    assert float(((cells - 500) ** 2 / 500).sum()) < 15 + 5 * math.sqrt(30)


def test_small_variates_keep_their_digits():
    """Small variates win races: E(word) is v (1 + v / 2 + ...) to full relative precision, and never 0."""
    words = torch.tensor([0, 1, 2, 1000])
    v = (words.double() + 0.5) * 2.0**-32
    assert torch.allclose(exponential(words), v * (1 + v / 2 + v * v / 3), rtol=1e-14, atol=0)
    assert exponential(torch.tensor([2**32 - 1])).item() == pytest.approx(33 * math.log(2), rel=1e-9)


def test_a_token_keeps_its_noise_in_any_vocabulary():
    whole = exponentials(7, 8, Purpose.residual, 1000)
    for vocabulary in (1, 63, 64, 65, 128, 999):
        assert torch.equal(exponentials(7, 8, Purpose.residual, vocabulary), whole[:vocabulary])
    assert exponentials(7, 8, Purpose.residual, 0).shape == (0,)


def test_every_part_of_the_counter_makes_another_draw():
    plain = {"seed": 7, "position": 8, "purpose": Purpose.draft, "vocabulary": 2000, "node": 0, "draw": 0}
    changes = [
        {},
        {"seed": 8},
        {"seed": 7 + 2**32},
        {"seed": 7 - 2**63},
        {"position": 9},
        {"position": 8 + 2**32},
        {"position": -8},
        {"purpose": Purpose.residual},
        {"purpose": Purpose.bonus},
        {"purpose": Purpose.coupled},
        {"node": 1},
        {"node": 1023},
        {"draw": 1},
        {"draw": 4095},
    ]
    noises = torch.stack([exponentials(**(plain | change)) for change in changes])
    correlation = torch.corrcoef(noises) - torch.eye(len(changes))
    assert correlation.abs().max() < 5.5 / math.sqrt(2000)
    assert torch.equal(exponentials(**(plain | {"seed": 7 - 2**63})), exponentials(**(plain | {"seed": 7 + 2**63})))


def test_coins_are_uniform():
    coins = torch.tensor(
        [coin(11, position, node) for position in range(60) for node in range(30)], dtype=torch.float64
    )
    assert ((coins >= 0) & (coins < 1) & (coins * 2**32 == (coins * 2**32).floor())).all()
    assert kolmogorov(coins, lambda x: x) < SUSPICIOUS
    assert len(set(coins.tolist())) == len(coins)
