"""DraftLength on made-up machines: it finds the fastest length, follows changes, and trials cost little."""

import random

import pytest

from pass_ext.integrations.vllm.proposer import DraftLength

LENGTHS = (0, 4, 8)


def run(choice, steps, tokens_per_second, requests=4, seed=0):
    """Seconds, tokens and how often each length was used. Steps vary by a third, as texts and machines do."""
    noise = random.Random(seed)
    seconds, total, used = 0.0, 0, dict.fromkeys(LENGTHS, 0)
    for _ in range(steps):
        length = choice.choose(requests)
        tokens = requests * (1 + (noise.random() < 0.5 if length else 0))
        duration = tokens / tokens_per_second[length] * noise.uniform(0.67, 1.33)
        choice.add(requests, length, duration, tokens)
        seconds, total = seconds + duration, total + tokens
        used[length] += 1
    return seconds, total, used


@pytest.mark.parametrize("best", LENGTHS)
def test_the_fastest_length_is_found_and_kept(best):
    speed = {length: 100.0 if length == best else 70.0 for length in LENGTHS}
    seconds, tokens, used = run(DraftLength(LENGTHS), 4000, speed)
    assert used[best] > 0.9 * 4000
    assert tokens / seconds > 0.96 * 100


def test_every_length_has_its_trial_the_longest_first():
    choice, order = DraftLength(LENGTHS), []
    for _ in range(72):
        order.append(choice.choose(1))
        choice.add(1, order[-1], 1.0, 1)
    assert order == [8] * 24 + [4] * 24 + [0] * 24


def test_a_machine_that_changes_is_noticed():
    choice = DraftLength(LENGTHS)
    run(choice, 1000, {0: 60.0, 4: 100.0, 8: 80.0})
    used = run(choice, 4000, {0: 100.0, 4: 60.0, 8: 50.0})[2]
    assert used[0] > 0.6 * 4000


def test_sizes_of_batches_are_judged_apart():
    choice = DraftLength(LENGTHS)
    run(choice, 100, {0: 100.0, 4: 80.0, 8: 50.0}, requests=16)
    assert choice.choose(16) == choice.choose(31) == 0
    assert choice.choose(1) == choice.choose(32) == 8, "these begin with trials of their own"
    run(choice, 100, {0: 50.0, 4: 80.0, 8: 100.0}, requests=1)
    assert (choice.choose(1), choice.choose(16)) == (8, 0)


def test_a_step_that_another_size_chose_does_not_count():
    choice = DraftLength(LENGTHS)
    for _ in range(1000):
        choice.add(1, 4, 1e-9, 1000)
    assert choice.choose(1) == 8
