"""Several texts of one prompt: seeds, order and arguments of ``num_return_sequences``; and beginnings that prompts share, which
are read once.
"""

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import methods_for
from support.small_models import ragged_prompts, small_model

from pass_ext import Corpus, NGram, Plain, SamplingParams, Speculative, generate
from pass_ext.decoding.session import reading
from pass_ext.decoding.session.reading import Beginning, shared_beginnings
from pass_ext.decoding.session.session import Session

OPTIONS = dict(max_new_tokens=8, eos_token_id=[], temperature=1.0)


@pytest.fixture
def rows_read(monkeypatch):
    """The rows of each call of a session."""
    rows, call = [], Session.call
    monkeypatch.setattr(
        Session, "call", lambda self, trees, ids, *more: rows.append(len(ids)) or call(self, trees, ids, *more)
    )
    return rows


# ---- samples ----


@pytest.mark.parametrize("method", ["plain", "ngram", "one pass", "one pass with ngrams"])
def test_each_sample_is_the_text_of_its_seed(llama, method):
    ids, mask = ragged_prompts(2, longest=9)
    method = methods_for(llama)[method]
    got = generate(llama, ids, method, attention_mask=mask, seeds=[7, 40], num_return_sequences=3, **OPTIONS)
    assert got.sequences.shape == (6, 9 + 8) and len(got.lengths) == 6
    alone = [
        generate(llama, ids[b : b + 1], attention_mask=mask[b : b + 1], seeds=seed + k, **OPTIONS).sequences[0]
        for b, seed in enumerate((7, 40))
        for k in range(3)
    ]
    assert torch.equal(got.sequences, torch.stack(alone))
    assert len({tuple(row) for row in got.sequences.tolist()}) == 6


def test_arguments_of_each_prompt_are_those_of_its_samples(llama):
    ids, mask = ragged_prompts(2, longest=6)
    shared = dict(max_new_tokens=8, eos_token_id=[], attention_mask=mask, num_return_sequences=2)
    sampling = SamplingParams(temperature=[0.0, 2.0], top_k=[0, 5], seeds=torch.tensor([2**63 - 1, 5]))
    got = generate(llama, ids, sampling=sampling, **shared).sequences
    assert torch.equal(got[0], got[1]), "the first prompt is greedy"
    hot = dict(temperature=2.0, top_k=5, max_new_tokens=8, eos_token_id=[], attention_mask=mask[1:])
    for k in range(2):
        assert torch.equal(got[2 + k], generate(llama, ids[1:], seeds=5 + k, **hot).sequences[0])
    fresh = generate(llama, ids, temperature=1.0, generator=torch.Generator().manual_seed(3), **shared).sequences
    again = generate(llama, ids, temperature=1.0, generator=torch.Generator().manual_seed(3), **shared).sequences
    assert torch.equal(fresh, again) and not torch.equal(fresh[0], fresh[1])


def test_samples_draft_for_each_other(llama):
    ids = ragged_prompts(1, longest=6)[0]
    options = OPTIONS | dict(seeds=3, num_return_sequences=4, max_new_tokens=20)
    plain = generate(llama, ids, **options)
    got = generate(llama, ids, NGram(shortest=1, tokens=3, corpus=Corpus()), **options)
    assert torch.equal(got.sequences, plain.sequences)


@pytest.mark.parametrize("count", [0, -1, True, 2.0, None])
def test_wrong_numbers_of_samples(llama, count):
    with pytest.raises(ValueError, match="num_return_sequences must be 1 or more"):
        generate(llama, torch.tensor([[5]]), num_return_sequences=count, **OPTIONS)


def test_greedy_samples_are_refused(llama):
    with pytest.raises(ValueError, match="num_return_sequences must be 1 at temperature 0"):
        generate(llama, torch.tensor([[5]]), num_return_sequences=2, max_new_tokens=3)


# ---- shared beginnings ----


def test_samples_read_their_prompt_once(llama, rows_read):
    ids = torch.randint(5, 90, (1, 40), generator=torch.Generator().manual_seed(0))
    got = generate(llama, ids, seeds=3, num_return_sequences=4, **OPTIONS)
    assert rows_read[:2] == [39, 4], "the beginning; the last token of each sample"
    assert got.stats.model_calls == 2 + 7
    rows_read.clear()
    generate(llama, ids[:, :16], seeds=3, num_return_sequences=4, **OPTIONS)
    assert rows_read[0] == 4 * 16, "three times 15 rows are not worth a call"


@pytest.mark.parametrize("method", ["plain", "one pass", "two passes", "draft model"])
def test_texts_are_those_of_prompts_read_apart(llama, method, rows_read, monkeypatch):
    """Two groups with system prompts of their own, a prompt that is another's beginning, and one alone."""
    numbers = torch.Generator().manual_seed(1)
    first, second = (torch.randint(5, 90, (length,), generator=numbers).tolist() for length in (60, 30))
    prompts = [[*first, 7, 8], [9, 10], [*second, 3], first, [*first, 9], [*second, 4, 4, 4], [*second, 3]]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = OPTIONS | dict(attention_mask=mask, seeds=list(range(7)))
    method = Speculative(small_model("llama", seed=1)) if method == "draft model" else methods_for(llama)[method]
    got = generate(llama, ids, method, **options)
    assert rows_read[0] == 59 + 30
    monkeypatch.setattr(reading, "SHARED_ROWS", {"cpu": 10**6})
    rows_read.clear()
    assert torch.equal(generate(llama, ids, method, **options).sequences, got.sequences)
    assert rows_read[0] >= sum(map(len, prompts))


def test_past_and_used_sessions_begin_behind_what_they_know(llama, rows_read):
    ids = torch.randint(5, 90, (1, 60), generator=torch.Generator().manual_seed(0))
    cached = llama(ids[:, :20], use_cache=True).past_key_values
    past = [(layer.keys.transpose(1, 2), layer.values.transpose(1, 2)) for layer in cached.layers]
    options = OPTIONS | dict(seeds=3, num_return_sequences=3)
    fresh = generate(llama, ids, **options)
    rows_read.clear()
    got = generate(llama, ids, past=(past, 20), keep_cache=True, **options)
    assert rows_read[:2] == [39, 3] and torch.equal(got.sequences, fresh.sequences)
    rows_read.clear()
    again = generate(llama, ids, session=got.session, **options)
    assert rows_read[:2] == [59, 3] and torch.equal(again.sequences, fresh.sequences)


def test_long_beginnings_are_read_in_pieces(llama, rows_read):
    ids = torch.randint(5, 90, (1, 1030), generator=torch.Generator().manual_seed(0))
    got = generate(llama, ids, seeds=3, num_return_sequences=2, **OPTIONS | dict(max_new_tokens=2))
    assert rows_read[:3] == [5, 1024, 2]
    alone = generate(llama, ids, seeds=4, **OPTIONS | dict(max_new_tokens=2))
    assert torch.equal(got.sequences[1], alone.sequences[0])


def test_beginnings_that_save_most():
    a, b = list(range(20)), list(range(50, 80))
    assert shared_beginnings([a, [*a, 1], b, a], 0, 10) == [Beginning([0, 1, 3], 19)]
    assert shared_beginnings([a, [*a, 1], b, a], 5, 10) == [Beginning([0, 1, 3], 19)]
    assert shared_beginnings([a, [*a, 1], b, a], 0, 39) == []
    assert shared_beginnings([a, a], 0, 19) == [Beginning([0, 1], 19)] and shared_beginnings([a, a], 0, 20) == []
    # A short beginning of many, or a long one of two: what saves more rows.
    many = [[*a[:8], 90 + i] for i in range(9)]
    assert shared_beginnings([a, a, *many], 0, 10)[0] == Beginning(list(range(11)), 8)
    assert shared_beginnings([a, a, *many[:1]], 0, 10) == [Beginning([0, 1], 19)]
    assert shared_beginnings([[1], [1]], 0, 1) == [], "the last token's row has the logits"


def test_one_prompt_is_read_as_ever(llama, rows_read):
    generate(llama, torch.arange(5, 65)[None], Plain(), **OPTIONS)
    assert rows_read[0] == 60
