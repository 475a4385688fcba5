"""recall_scores on every backend against the reference, and the reference against its formula, counted by hand."""

import random

import pytest
import torch

import pass_ext
from pass_ext import reference
from pass_ext.testing import assert_same_bits

WINDOW = 4096  # kRecallWindow of csrc/core/recall.h


def a_case(backend, rows=5, count=9, requests=3, room=60, *, vocabulary=4, seed=0):
    """Arguments whose texts have few different tokens, so that paths of every length are found in them."""
    torch.manual_seed(seed)
    numbers = random.Random(seed)
    arguments = dict(
        tokens=torch.rand(rows, count + 3).argsort(1)[:, :count] - 1,
        contexts=torch.randint(-1, vocabulary, (rows, 3)),
        requests=torch.randint(0, requests, (rows,), dtype=torch.int32),
        text=torch.randint(0, vocabulary, (requests, room)),
        lengths=torch.tensor([numbers.choice([0, 1, 2, room // 2, room]) for _ in range(requests)]),
    )
    return {name: value.to(backend.device) for name, value in arguments.items()}


def check(arguments):
    """The scores of the op, which are those of the reference to the bit."""
    scores = pass_ext.drafting.recall_scores(**arguments).cpu()
    assert_same_bits(scores, reference.recall_scores(**{name: value.cpu() for name, value in arguments.items()}))
    return scores


@pytest.mark.sanitizer
def test_scores_are_those_of_the_reference(backend):
    highest = set()
    for seed, (rows, count, requests, room) in enumerate(
        [(1, 1, 1, 1), (3, 2, 2, 4), (5, 9, 3, 60), (17, 64, 2, 700), (4, 1024, 3, 33), (130, 33, 1, 129)]
    ):
        for vocabulary in (1, 3, 20):
            arguments = a_case(backend, rows, count, requests, room, vocabulary=vocabulary, seed=seed)
            arguments["lengths"][0] = room
            highest.add(float(check(arguments).max()))
    assert min(highest) == 0 and max(highest) == 6


def test_shares_by_hand(backend):
    """1 2 3 came twice, after it 4 and 5; 2 3 came three times, after it 4, 5, 5; 3 four times, after it also 6."""
    text = [1, 2, 3, 4, 1, 2, 3, 5, 2, 3, 5, 3, 6, 1, 2, 3]
    arguments = dict(
        tokens=torch.tensor([[4, 5, 6, 3, -1]]), contexts=torch.tensor([[1, 2, 3]]),
        requests=torch.zeros(1, dtype=torch.int32), text=torch.tensor([text]), lengths=torch.tensor([len(text)]),
    )  # fmt: skip
    scores = check({name: value.to(backend.device) for name, value in arguments.items()})
    wanted = [2 * (1 / 2 + 1 / 3 + 1 / 4), 2 * (1 / 2 + 2 / 3 + 2 / 4), 2 / 4, 0, 0]
    torch.testing.assert_close(scores[0], torch.tensor(wanted))


def test_the_last_place_has_nothing_after_it_and_columns_after_the_length_are_not_read(backend):
    for length, wanted in ((2, 0.0), (3, 0.0), (4, 2.0)):
        arguments = dict(
            tokens=torch.tensor([[7]]), contexts=torch.tensor([[-1, -1, 5]]), requests=torch.zeros(1, dtype=torch.int32),
            text=torch.tensor([[1, 2, 5, 7, 5, 8, 5, 8]]), lengths=torch.tensor([length]),
        )  # fmt: skip
        assert check({name: value.to(backend.device) for name, value in arguments.items()}).tolist() == [[wanted]]


def test_the_window_ends(backend):
    """Places before the last 4,096 tokens are not found, nor are tokens compared that lie before them."""
    for after, wanted in ((WINDOW - 3, 6.0), (WINDOW - 2, 4.0), (WINDOW - 1, 2.0), (WINDOW, 0.0)):
        text = [9, 1, 2, 3, 8] + [0] * (after - 1)  # so many tokens from 8 on
        arguments = dict(
            tokens=torch.tensor([[8]]), contexts=torch.tensor([[1, 2, 3]]), requests=torch.zeros(1, dtype=torch.int32),
            text=torch.tensor([text]), lengths=torch.tensor([len(text)]),
        )  # fmt: skip
        assert check({name: value.to(backend.device) for name, value in arguments.items()}).tolist() == [[wanted]]


def test_a_path_without_tokens_recalls_nothing(backend):
    arguments = a_case(backend, seed=3)
    arguments["contexts"][:, 2] = -1
    arguments["text"][:, ::3] = -1
    assert (check(arguments) == 0).all()


def test_no_rows(backend):
    arguments = a_case(backend, rows=0)
    assert check(arguments).shape == (0, 9)
    assert check(a_case(backend, count=0)).shape == (5, 0)


@pytest.mark.parametrize(("name", "value"), [("lengths", 61), ("lengths", -1), ("requests", 3), ("requests", -1)])
def test_values_out_of_range_are_refused_or_recall_nothing_else(backend, name, value):
    arguments = a_case(backend)
    arguments[name][1] = value
    if backend.name.startswith("cpu"):
        with pytest.raises(RuntimeError, match=f"pass_ext::recall_scores: {name} must be in"):
            pass_ext.drafting.recall_scores(**arguments)
        return
    scores = pass_ext.drafting.recall_scores(**arguments).cpu()
    if name == "requests":
        assert (scores[1] == 0).all()
    else:
        arguments["lengths"].clamp_(0, 60)
        assert_same_bits(check(arguments), scores)


def test_values_are_checked_of_rows_without_tokens():
    from pass_ext.testing import cpu_backends

    arguments = a_case(cpu_backends()[-1])
    arguments["tokens"] = arguments["tokens"][:, :0].contiguous()
    assert pass_ext.drafting.recall_scores(**arguments).shape == (5, 0)
    arguments["requests"][1] = 1 << 20
    with pytest.raises(RuntimeError, match="pass_ext::recall_scores: requests must be in"):
        pass_ext.drafting.recall_scores(**arguments)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(tokens=torch.zeros(5, dtype=torch.int64)), r"tokens must have shape \[N, K\]"),
        (dict(tokens=torch.zeros(5, 9)), "tokens must be int64"),
        (dict(tokens=torch.zeros(5, 1025, dtype=torch.int64)), "tokens must have at most 1024 in a row"),
        (dict(contexts=torch.zeros(5, 2, dtype=torch.int64)), "contexts must have 3 "),
        (dict(contexts=torch.zeros(4, 3, dtype=torch.int64)), "contexts must have 5 "),
        (dict(requests=torch.zeros(4, dtype=torch.int32)), "requests must have 5 "),
        (dict(lengths=torch.zeros(2, dtype=torch.int64)), "lengths must have 3 "),
        (dict(text=torch.zeros(3, 120, dtype=torch.int64)[:, ::2]), "text must be contiguous"),
    ],
)
def test_misuse_is_refused(changed, message):
    from pass_ext.testing import cpu_backends

    with pytest.raises((RuntimeError, TypeError), match=f"pass_ext::recall_scores: {message}"):
        pass_ext.drafting.recall_scores(**a_case(cpu_backends()[-1]) | changed)
