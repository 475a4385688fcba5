"""The arguments of ``generate`` are checked alike in greedy and in sampled generations."""

import pytest
import torch
from support.generation import Decoder

from pass_ext import generate

IDS = torch.tensor([[5, 6, 7]])


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"top_k": -3}, r"top_k must be 0 \(off\) or more, got -3"),
        ({"top_k": 2.5}, "top_k must be integers"),
        ({"top_p": 7.0}, r"top_p must be in \(0, 1\], got 7"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": float("nan")}, "top_p must be in"),
        ({"min_p": -2}, r"min_p must be in \[0, 1\], got -2"),
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\], got 1"),
        ({"seeds": "x"}, r"seeds must be integers from -\d+ to \d+, got 'x'"),
        ({"seeds": [1, 2]}, "seeds must be one number, or one for each of the 1 requests"),
        ({"attention_mask": [[1, 1, 1]]}, r"attention_mask must be a tensor \[B, T\].*, got list"),
        ({"eos_token_id": torch.tensor([[1]])}, "eos_token_id must be one id or some"),
        ({"eos_token_id": torch.tensor(0.5)}, "eos_token_id must be one id or some"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(temperature, argument, message):
    with pytest.raises((ValueError, TypeError), match=message):
        generate(Decoder(), IDS, max_new_tokens=1, temperature=temperature, **argument)


def test_top_k_may_be_off():
    off, none = (
        generate(Decoder(), IDS, max_new_tokens=9, temperature=1.0, seeds=3, top_k=k).sequences for k in (0, None)
    )
    assert torch.equal(off, none)


def test_an_end_may_be_a_tensor():
    text = generate(Decoder(), IDS, max_new_tokens=6, temperature=1.0, seeds=3).sequences[0, 3:].tolist()
    for end in (text[2], [text[2]], torch.tensor(text[2]), torch.tensor([text[2]])):
        got = generate(Decoder(), IDS, max_new_tokens=6, temperature=1.0, seeds=3, eos_token_id=end)
        assert got.lengths == (text.index(text[2]) + 1,)
