"""Several texts of one prompt: seeds, order and arguments of ``num_return_sequences``; and beginnings that prompts share, which
are read once.
"""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from support.generation import methods_for
from support.small_models import ragged_prompts, small_model, whole_prompts

from pass_ext import NGram, Plain, Session, Speculative, generate
from pass_ext.decoding.session import reading
from pass_ext.decoding.session.reading import Beginning, shared_beginnings
from pass_ext.drafting import Corpus

OPTIONS = dict(max_new_tokens=8, eos_token_id=[], temperature=1.0)


@pytest.fixture
def rows_read(monkeypatch):
    """The rows of each call of a session."""
    rows, call = [], Session.call

    def counted(self, trees, ids, *more, **named):
        rows.append(len(ids))
        return call(self, trees, ids, *more, **named)

    monkeypatch.setattr(Session, "call", counted)
    return rows


def random_past(model, requests, tokens):
    """Keys and values of no tokens at all."""
    generator = torch.Generator().manual_seed(0)
    shape = (model.config.num_key_value_heads, model.config.hidden_size // model.config.num_attention_heads)
    return [
        tuple(torch.randn(requests, tokens, *shape, generator=generator) for _ in range(2))
        for _ in range(model.config.num_hidden_layers)
    ]


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
    sampling = dict(temperature=[0.0, 2.0], top_k=[0, 5], seeds=torch.tensor([2**63 - 1, 5]))
    got = generate(llama, ids, **sampling, **shared).sequences
    assert torch.equal(got[0], got[1]), "the first prompt is greedy"
    hot = dict(temperature=2.0, top_k=5, max_new_tokens=8, eos_token_id=[], attention_mask=mask[1:])
    for k in range(2):
        assert torch.equal(got[2 + k], generate(llama, ids[1:], seeds=5 + k, **hot).sequences[0])
    fresh = generate(llama, ids, temperature=1.0, seeds=torch.Generator().manual_seed(3), **shared).sequences
    again = generate(llama, ids, temperature=1.0, seeds=torch.Generator().manual_seed(3), **shared).sequences
    assert torch.equal(fresh, again) and not torch.equal(fresh[0], fresh[1])


def test_samples_draft_for_each_other(llama):
    ids = ragged_prompts(1, longest=6)[0]
    options = OPTIONS | dict(seeds=3, num_return_sequences=4, max_new_tokens=20)
    plain = generate(llama, ids, **options)
    got = generate(llama, ids, NGram(shortest=1, tokens=3, corpus=Corpus()), **options)
    assert torch.equal(got.sequences, plain.sequences)


@pytest.mark.parametrize("count", [0, -1, True, 2.0, None])
def test_wrong_numbers_of_samples(llama, count):
    with pytest.raises(ValueError, match="num_return_sequences must be a whole number, 1 or more"):
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
    monkeypatch.setattr(reading, "SHARED_ROWS", {"cpu": 10**6, "cuda": 10**6})
    rows_read.clear()
    assert torch.equal(generate(llama, ids, method, **options).sequences, got.sequences)
    assert rows_read[0] >= sum(map(len, prompts))


def test_past_and_used_sessions_begin_after_what_they_know(llama, rows_read):
    ids = torch.randint(5, 90, (1, 60), generator=torch.Generator().manual_seed(0))
    cached = llama(ids[:, :20], use_cache=True).past_key_values
    past = [(layer.keys.transpose(1, 2), layer.values.transpose(1, 2)) for layer in cached.layers]
    options = OPTIONS | dict(seeds=3, num_return_sequences=3)
    fresh = generate(llama, ids, **options)
    rows_read.clear()
    session = Session(llama, past=(past, 20))
    got = generate(llama, ids, session=session, **options)
    assert rows_read[:2] == [39, 3] and torch.equal(got.sequences, fresh.sequences)
    rows_read.clear()
    again = generate(llama, ids, session=session, **options)
    assert rows_read[:2] == [59, 3] and torch.equal(again.sequences, fresh.sequences)


def test_the_past_of_each_prompt_is_that_of_its_samples(llama):
    """Keys, values and lengths of two prompts differ."""
    ids, past = whole_prompts(2, 12), random_past(llama, 2, 7)
    options = OPTIONS | dict(num_return_sequences=2)
    session = Session(llama)
    generate(llama, ids, session=session, seeds=0, **options)
    for held in ([7, 5], 7):
        alone = []
        for b, seed in enumerate((3, 90)):
            own = [tuple(x[b : b + 1] for x in pair) for pair in past]
            begun = Session(llama, past=(own, held if held == 7 else held[b]))
            alone.append(generate(llama, ids[b : b + 1], session=begun, seeds=seed, **options).sequences)
        assert len(torch.cat(alone).unique(dim=0)) == 4
        for begun in (Session(llama), session):
            begun.past = past, held
            got = generate(llama, ids, session=begun, seeds=[3, 90], **options).sequences
            assert torch.equal(got, torch.cat(alone)), held


def test_long_beginnings_are_read_in_pieces(llama, rows_read):
    ids = torch.randint(5, 90, (1, 1030), generator=torch.Generator().manual_seed(0))
    got = generate(llama, ids, seeds=3, num_return_sequences=2, **OPTIONS | dict(max_new_tokens=2))
    assert rows_read[:3] == [5, 1024, 2]
    alone = generate(llama, ids, seeds=4, **OPTIONS | dict(max_new_tokens=2))
    assert torch.equal(got.sequences[1], alone.sequences[0])


def beginnings(texts, held=0, least=10, requests=None):
    return shared_beginnings(texts, [held] * len(texts), range(len(texts)) if requests is None else requests, least)


def test_beginnings_that_save_rows():
    a, b = list(range(20)), list(range(50, 80))
    assert beginnings([a, [*a, 1], b, a]) == [Beginning([0, 1, 3], 19)]
    assert beginnings([a, [*a, 1], b, a], held=5) == [Beginning([0, 1, 3], 19)]
    assert beginnings([a, [*a, 1], b, a], requests=[0, 2]) == [], "others may not share"
    assert beginnings([a, [*a, 1], b, a], least=39) == []
    assert beginnings([a, a], least=19) == [Beginning([0, 1], 19)] and beginnings([a, a], least=20) == []
    assert beginnings([[1], [1]], least=1) == [], "the last token's row has the logits"
    # The short beginning of all is not worth a call, those of some are.
    assert beginnings([[9, *a], [9, *b], [9, *a], [9, *b]]) == [Beginning([0, 2], 20), Beginning([1, 3], 30)]
    # All have a beginning that is; a longer one of some comes in the next round.
    many = [[*a[:8], 90 + i] for i in range(9)]
    assert beginnings([a, a, *many]) == [Beginning(list(range(11)), 8)]
    assert shared_beginnings([a, a, *many], [8] * 11, range(11), 10) == [Beginning([0, 1], 19)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=9), st.integers(1, 6))
def test_rounds_end_and_leave_nothing_that_saves_rows(texts, least):
    """No round reads a token twice, and after the last one no pair has so many tokens in common."""
    held = [0] * len(texts)
    while found := shared_beginnings(texts, held, range(len(texts)), least):
        for requests, length in found:
            assert len({tuple(texts[b][:length]) for b in requests}) == 1 and length < min(
                len(texts[b]) for b in requests
            )
            assert sum(length - held[b] for b in requests[1:]) >= least
            assert len({tuple(texts[b][: held[b]]) for b in requests}) == 1
            for b in requests:
                held[b] = length
    for a, b in combinations(range(len(texts)), 2):
        most = min(len(texts[a]), len(texts[b])) - 1
        equal = next((i for i in range(most) if texts[a][i] != texts[b][i]), most)
        assert equal - max(held[a], held[b]) < least


def test_samples_of_prompts_with_one_system_prompt(llama, rows_read):
    """Two rounds: the system prompt, and each prompt's own part; then the samples' last tokens."""
    numbers = torch.Generator().manual_seed(1)
    system = torch.randint(5, 90, (60,), generator=numbers)
    ids = torch.stack([torch.cat([system, torch.randint(5, 90, (30,), generator=numbers)]) for _ in range(2)])
    got = generate(llama, ids, seeds=[3, 90], num_return_sequences=3, **OPTIONS)
    assert rows_read[:3] == [60, 2 * 29, 6]
    for b, seed in ((0, 3), (1, 90)):
        alone = generate(llama, ids[b : b + 1], seeds=seed + 2, **OPTIONS)
        assert torch.equal(got.sequences[3 * b + 2], alone.sequences[0])


def test_requests_whose_past_differs_share_nothing(llama, rows_read):
    """Keys and values of equal tokens differ where they were made from other inputs."""
    ids = torch.randint(5, 90, (1, 70), generator=torch.Generator().manual_seed(0))
    past, options = random_past(llama, 2, 10), dict(max_new_tokens=8, eos_token_id=[])
    got = generate(llama, ids.repeat(2, 1), session=Session(llama, past=(past, 10)), **options)
    assert rows_read[0] == 2 * 60
    for b in range(2):
        own = [tuple(x[b : b + 1] for x in pair) for pair in past]
        alone = generate(llama, ids, session=Session(llama, past=(own, 10)), **options)
        assert torch.equal(got.sequences[b], alone.sequences[0])
    rows_read.clear()
    same = [tuple(x[:1].repeat(2, 1, 1, 1) for x in pair) for pair in past]
    got = generate(llama, ids.repeat(2, 1), session=Session(llama, past=(same, 10)), **options)
    assert rows_read[:2] == [59, 2] and torch.equal(got.sequences[0], got.sequences[1])


def test_one_prompt_is_read_as_ever(llama, rows_read):
    generate(llama, torch.arange(5, 65)[None], Plain(), **OPTIONS)
    assert rows_read[0] == 60
