"""On the CPU a bf16 text is Plain's, token for token, whatever shares its calls: a token's row has the bits that it has alone,
in every key and value. Where two logits are equal, or nearly, other bits would choose another token.

A fault in the sums of attention hardly shows after a whole model's rounding: tests/ops/attention/test_attention_one_row.py.
"""

import pytest
import torch
from support.generation import Prophet, methods_for, unpadded
from support.pairwise import pairwise
from support.small_models import VOCABULARY, small_model
from torch import nn

from pass_ext import NGram, PaSS, Plain, Session, Speculative, generate
from pass_ext.decoding.models.module_ops import most_few_rows

# Around the ends of tiles of keys; a prompt that is few rows, but not with its slots; one that is not.
MOST = most_few_rows(torch.bfloat16, True)
FEW = min(MOST, 128)
LENGTHS = (1, 37, 62, 64, 65, FEW - 2, FEW + 1)
NEW = 30


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral", "gemma2"])
def model(request):
    """Of many numbers, since few of them show a sum in another order once they are rounded."""
    changes = {} if request.param in ("llama", "mistral") else {"head_dim": 64}
    return small_model(request.param, sharpness=1.0, hidden_size=256, **changes).bfloat16()


def prompt(length, seed=0):
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def text_of(model, ids, method, **options):
    """The text, and the keys and values of all its tokens but the last."""
    session = Session(model)
    got = generate(model, ids, method, max_new_tokens=NEW, eos_token_id=[], session=session, **options)
    length = got.sequences.shape[1] - 1
    return got, torch.stack([torch.stack(pair)[:, :, :length] for pair in session.caches])


def assert_same(got, want, name):
    assert torch.equal(got[0].sequences, want[0].sequences), name
    differing = (got[1] != want[1]).any(-1).nonzero().tolist()
    assert not differing, (name, "layer, K or V, request, place, head", differing[:3])


@pytest.mark.parametrize(("length", "temperature"), pairwise(LENGTHS, [0.0, 0.8]))
def test_a_text_is_plains(model, length, temperature, monkeypatch):
    ids, options = prompt(length, seed=length), dict(temperature=temperature, seeds=[5])
    want = text_of(model, ids, Plain(), **options)
    methods = methods_for(model) | {"draft model": Speculative(model, length=5), "long ngrams": NGram(tokens=9)}
    for name, method in methods.items():
        assert_same(text_of(model, ids, method, **options), want, name)
    Prophet(monkeypatch, unpadded(want[0].sequences, torch.ones_like(ids)))
    for name in ("one pass", "two passes"):
        got = text_of(model, ids, methods[name], **options)
        assert_same(got, want, name)
        assert got[0].stats.mean_acceptance_length > 1.8, name


@pytest.mark.parametrize(
    "lengths",
    [(3, 17, 9), (MOST - 5, MOST - 9, 40), (MOST + 9, 3, MOST - 1, 2 * MOST)] if MOST < 1000 else [(3, 17, 9)],
)
def test_texts_of_a_batch_are_those_alone(model, lengths):
    """Ragged prompts: of few rows in all, of many in all, of many in one text."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:] = prompt(length, seed=row)[0], 1
    alone = [text_of(model, prompt(length, seed=row), Plain()) for row, length in enumerate(lengths)]
    method = PaSS(methods_for(model)["one pass"].lookahead, rows=16)
    for each in (Plain(), NGram(tokens=5), method):
        got, caches = text_of(model, ids, each, attention_mask=mask)
        for row, (length, (want, cache)) in enumerate(zip(lengths, alone, strict=True)):
            assert torch.equal(got.sequences[row, max(lengths) :], want.sequences[0, length:]), (each, row)
            differing = (caches[:, :, row, : cache.shape[3]] != cache[:, :, 0]).any(-1).nonzero().tolist()
            assert not differing, (each, row, "layer, K or V, place, head", differing[:3])


@pytest.mark.parametrize("length", [FEW - 2, FEW, FEW + 1])
def test_slots_do_not_decide_how_a_prompt_is_computed(model, length, monkeypatch):
    """The products of many rows are PyTorch's, which may add in another order."""
    by_torch = []
    linear = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda x, *rest: by_torch.append(x.shape) or linear(x, *rest))
    for method in (
        Plain(),
        methods_for(model)["one pass"],
        PaSS(methods_for(model)["one pass, deep"].lookahead, rows=12),
    ):
        text_of(model, prompt(length), method)
        assert bool(by_torch) == (length > MOST), method
        by_torch.clear()
