"""N-gram proposals against an exhaustive search, and the trie that joins them to a tree."""

import random
import time

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pass_ext.decoding.drafting import from_ngrams
from pass_ext.decoding.drafting.candidates import join
from pass_ext.decoding.drafting.from_ngrams import NGramIndex


def searched(text, longest, shortest, tokens, branches, looked_at=from_ngrams._MOST_PLACES):
    """The proposals by an exhaustive search; the text grows by its own continuation, token by token."""
    chains = []
    for n in range(min(longest, len(text)), shortest - 1, -1):
        ends = [end for end in range(len(text) - 2, n - 2, -1) if text[end - n + 1 : end + 1] == text[-n:]]
        for end in ends[:looked_at]:
            grown = list(text)
            for offset in range(tokens):
                grown.append(grown[end + 1 + offset])
            chain = grown[len(text) :]
            if tokens and chain not in chains and len(chains) < branches:
                chains.append(chain)
    return chains


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.integers(0, 2), max_size=40),
    cut=st.integers(0, 40),
    longest=st.integers(1, 4),
    shorter=st.integers(0, 3),
    tokens=st.integers(0, 6),
    branches=st.integers(0, 4),
)
def test_as_a_search_finds(text, cut, longest, shorter, tokens, branches):
    shortest = max(1, longest - shorter)
    index = NGramIndex(longest, shortest)
    index.extend(text[:cut])
    index.extend(text[cut:])
    assert len(index) == len(text)
    assert index.proposals(tokens, branches) == searched(text, longest, shortest, tokens, branches)


def test_longest_first_latest_first_and_distinct():
    index = NGramIndex(2, 1)
    index.extend([1, 2, 7, 0, 1, 2, 8, 0, 5, 2, 9, 0, 1, 2])
    assert index.proposals(1, 9) == [[8], [7], [9]]
    assert index.proposals(2, 2) == [[8, 0], [7, 0]]


def test_a_repetition_goes_on():
    index = NGramIndex(3, 1)
    index.extend([9, 4, 5, 6, 4, 5, 6, 4])
    assert index.proposals(7, 1) == [[5, 6, 4, 5, 6, 4, 5]]


def test_nothing_to_propose():
    index = NGramIndex(3, 2)
    assert index.proposals(4, 4) == []
    index.extend([1, 2, 3, 1])
    assert index.proposals(4, 4) == []  # only one token matches


def test_only_the_latest_places_are_looked_at():
    text = [7, 8] + [7, 9] * from_ngrams._MOST_PLACES + [7]
    index = NGramIndex(1, 1)
    index.extend(text)
    assert index.proposals(1, 4) == [[9]] == searched(text, 1, 1, 1, 4)
    assert searched(text, 1, 1, 1, 4, looked_at=99) == [[9], [8]]


def test_long_texts_are_cheap():
    rng = random.Random(1)
    for text in ([5] * 20_000, [rng.randrange(50) for _ in range(20_000)]):
        begin = time.perf_counter()
        index = NGramIndex(4, 1)
        index.extend(text)
        for _ in range(100):
            index.proposals(8, 4)
        assert time.perf_counter() - begin < 3


def paths(parents, tokens):
    """The tokens on the path to each node, without the root."""
    result = [()]
    for node in range(1, len(parents)):
        result.append((*result[parents[node]], tokens[node]))
    return result


def test_a_join_by_hand():
    parents, tokens = join([-1, 0, 0, 1], [50, 1, 2, 3], [[1, 3, 4], [2, 5], [6]])
    assert parents == [-1, 0, 0, 1, 3, 2, 0] and tokens == [50, 1, 2, 3, 4, 5, 6]


@settings(max_examples=100, deadline=None)
@given(
    chains=st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=5),
    nodes=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), max_size=8),
)
def test_a_join_holds_every_chain_once_and_keeps_the_tree(chains, nodes):
    parents = [-1, *(choice % (node + 1) for node, (choice, _) in enumerate(nodes))]
    tokens = [9, *(token for _, token in nodes)]
    assume(len(set(zip(parents, tokens, strict=True))) == len(parents))  # of equal siblings join follows the first only
    new_parents, new_tokens = join(parents, tokens, chains)
    assert new_parents[: len(parents)] == parents and new_tokens[: len(tokens)] == tokens
    beginnings = {tuple(chain[:n]) for chain in chains for n in range(len(chain) + 1)}
    before, after = paths(parents, tokens), paths(new_parents, new_tokens)
    assert set(after) == set(before) | beginnings
    assert len(after) - len(before) == len(beginnings - set(before))  # nothing twice
