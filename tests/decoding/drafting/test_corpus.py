"""A corpus of texts: the right continuations in the right order, dropped texts, grammars, threads, and texts by generate."""

import random
from threading import Thread

import pytest
import torch
from support.small_models import ragged_prompts, whole_prompts

from pass_ext import NGram, Plain, generate
from pass_ext.drafting import Corpus


def plain_search(texts, text, tokens, count, shortest):
    """Every place of every text, compared token by token."""
    found = []
    for number, other in enumerate(texts):
        for end in range(shortest, len(other)):
            if list(text[-shortest:]) != other[end - shortest : end]:
                continue
            length = shortest
            while length < min(len(text), end, 32) and text[-1 - length] == other[end - 1 - length]:
                length += 1
            found.append((length, number, end, other[end : end + tokens]))
    chains = {}
    for length, _, _, chain in sorted(found, key=lambda place: (-place[0], -place[1], -place[2])):
        chains.setdefault(tuple(chain), length)
    return [(length, list(chain)) for chain, length in list(chains.items())[:count]]


@pytest.mark.parametrize("shortest", [1, 2, 4])
def test_continuations_are_those_of_a_plain_search(shortest):
    draw = random.Random(shortest)
    corpus = Corpus(shortest=shortest)
    texts = [[draw.randrange(6) for _ in range(draw.randrange(40))] for _ in range(3)]
    for text in texts:
        corpus.add(text)
    assert len(corpus) == sum(map(len, texts))
    for _ in range(60):
        text = [draw.randrange(6) for _ in range(draw.randrange(9))]
        tokens, count = draw.randrange(1, 6), draw.randrange(1, 5)
        expected = plain_search(texts, text, tokens, count, shortest) if len(text) >= shortest else []
        assert corpus.continuations(text, tokens, count) == expected


def test_a_longer_match_comes_before_a_later_one():
    corpus = Corpus(shortest=2)
    corpus.add([9, 1, 2, 3, 50])
    corpus.add([8, 8, 2, 3, 60])
    assert corpus.continuations([9, 1, 2, 3], 1, 2) == [(4, [50]), (2, [60])]
    assert corpus.continuations([7, 7, 2, 3], 1, 2) == [(2, [60]), (2, [50])]


def test_the_oldest_texts_are_dropped_whole():
    corpus = Corpus(most_tokens=20, shortest=1)
    texts = [corpus.open() for _ in range(3)]
    texts[0].extend([1, 10, 1, 11])
    texts[1].extend([1, 20] * 4)
    texts[2].extend([1, 30] * 4)
    assert len(corpus) == 20 and (1, [11]) in corpus.continuations([1], 1, 9)
    texts[2].extend([1])
    assert len(corpus) == 17 and texts[0].is_dropped
    assert corpus.continuations([1], 1, 9) == [(1, [30]), (1, [20])] and corpus.continuations([10], 1, 9) == []
    texts[0].extend([1, 10])
    assert len(corpus) == 17, "a dropped text stays dropped"
    for number in range(1000):
        corpus.add([number, number + 1, 5])
        assert len(corpus) <= 20 and len(corpus._places) <= 20
    corpus.add(range(100))
    assert len(corpus) == 0 and not corpus._places, "one text alone is too long"


def test_frequent_tokens_keep_their_latest_places():
    corpus = Corpus(shortest=1)
    corpus.add([token for number in range(500) for token in (1, 1000 + number)])
    assert [chain for _, chain in corpus.continuations([1], 1, 3)] == [[1499], [1498], [1497]]
    assert len(corpus.continuations([1], 1, 500)) == 64


def test_its_own_text_and_what_a_grammar_forbids_are_left_out():
    corpus = Corpus(shortest=1)
    text = corpus.open()
    text.extend([1, 2, 1])
    corpus.add([1, 3, 4])
    assert corpus.continuations(text.tokens, 2, 5) == [(1, [3, 4]), (1, [2, 1])]
    assert corpus.continuations(text.tokens, 2, 5, without=text) == [(1, [3, 4])]
    assert corpus.continuations([1], 2, 5, allowed=lambda chain: chain[0] == 3) == [(1, [3])]


@pytest.mark.parametrize("arguments", [{"most_tokens": 0}, {"shortest": 0}])
def test_refusals(arguments):
    with pytest.raises(ValueError, match=r"Corpus: (most_tokens|shortest) must be a whole number, 1 or more, got"):
        Corpus(**arguments)


def test_threads_share_it():
    corpus = Corpus(most_tokens=3_000, shortest=2)

    def work(seed):
        draw = random.Random(seed)
        for _ in range(40):
            text = corpus.open()
            for _ in range(8):
                text.extend(draw.randrange(5) for _ in range(5))
                corpus.continuations(text.tokens, 3, 4)

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(corpus) == sum(map(len, corpus._texts)) <= 3_000


def test_texts_stay_the_same_and_a_second_call_needs_fewer_steps(llama):
    ids, mask = ragged_prompts(4)
    options = dict(attention_mask=mask, max_new_tokens=30, temperature=0.8, seeds=[5, 6, 7, 8])
    want = generate(llama, ids, Plain(), **options)
    corpus = Corpus()
    first, second = (generate(llama, ids, NGram(corpus=corpus), **options) for _ in range(2))
    assert torch.equal(first.sequences, want.sequences) and torch.equal(second.sequences, want.sequences)
    assert second.stats.model_calls < first.stats.model_calls / 2, "all but the end of every text was written before"
    other = generate(llama, ids, NGram(corpus=corpus, branches=3), **dict(options, seeds=[1, 2, 3, 4]))
    alone = generate(llama, ids, Plain(), **dict(options, seeds=[1, 2, 3, 4]))
    assert torch.equal(other.sequences, alone.sequences)


def test_a_corpus_has_whole_texts(llama):
    """Their last tokens too, and those of the end of a text at which drafting paused."""
    corpus, ids = Corpus(), whole_prompts(1)
    found = generate(llama, ids, NGram(corpus=corpus), max_new_tokens=24, eos_token_id=[])
    assert [text.tokens for text in corpus._texts] == found.sequences.tolist()


def test_samples_of_one_prompt_see_each_other(llama):
    """Two greedy texts of one prompt: neither is ahead of the other, so a text that began earlier is what helps."""
    ids = whole_prompts(1)
    options = dict(max_new_tokens=24)
    corpus = Corpus()
    alone = generate(llama, ids, NGram(corpus=corpus), **options)
    both = generate(llama, ids.repeat(3, 1), NGram(corpus=corpus), **options)
    assert all(torch.equal(row, alone.sequences[0]) for row in both.sequences)
    assert both.stats.model_calls < alone.stats.model_calls
