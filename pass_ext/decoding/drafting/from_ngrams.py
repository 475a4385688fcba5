"""Candidates from the text so far: the tokens that followed earlier occurrences of the text's last tokens.

    the text ends in an n-gram that also ended at e: propose text[e + 1], text[e + 2], ..., and past its end the same again

and, with a corpus, those that followed them in other texts (requests/corpus.py).

Of a prompt that is more than text, it is the text after all pictures and sound. Everything runs on the host. Nothing is drawn,
so any rule may verify the proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from pass_ext.decoding.drafting.candidates import Batch, Candidates, Proposal
from pass_ext.decoding.drafting.drafter import N_GRAM, DraftContext, Drafter
from pass_ext.decoding.methods import NGram
from pass_ext.decoding.requests.corpus import CorpusText
from pass_ext.decoding.requests.grammar import Guide
from pass_ext.decoding.session.session import Session

_MOST_PLACES = 32
"""How many places of one n-gram are searched, the latest first: a frequent n-gram may have thousands that continue alike."""


class NGramIndex:
    """The places of every n-gram of one growing text, from the longest to the shortest ones."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest, self._shortest = longest, shortest
        self._text: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}  # of the last token of each n-gram

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds committed tokens to the text."""
        for token in tokens:
            self._text.append(int(token))
            for ngram in self._ngrams():
                self._places.setdefault(ngram, []).append(len(self._text) - 1)

    def _ngrams(self) -> Iterator[tuple[int, ...]]:
        """Those that the text ends in, longest first."""
        for n in range(min(self._longest, len(self._text)), self._shortest - 1, -1):
            yield tuple(self._text[-n:])

    def proposals(
        self, tokens: int, branches: int, allowed: Callable[[Sequence[int]], int] | None = None
    ) -> list[list[int]]:
        """Up to ``branches`` distinct continuations of ``tokens`` tokens each: those after longer n-grams first, and the latest
        first. Past the text's end a continuation repeats itself, so a repetition goes on.

        allowed: how many tokens of a continuation a grammar allows; it is cut there. None: all.
        """
        if tokens < 1:
            return []
        chains: dict[tuple[int, ...], None] = {}
        for end in self._earlier_places():
            if len(chains) >= branches:
                break
            chain = self._continuation(end, tokens)
            chain = chain if allowed is None else chain[: allowed(chain)]
            if chain:
                chains.setdefault(chain)
        return [list(chain) for chain in chains]

    def _earlier_places(self) -> Iterator[int]:
        for ngram in self._ngrams():
            yield from self._places[ngram][-2 : -2 - _MOST_PLACES : -1]  # the last place is the end of the text itself

    def _continuation(self, end: int, tokens: int) -> tuple[int, ...]:
        begin, period = end + 1, len(self._text) - 1 - end
        if tokens <= period:
            return tuple(self._text[begin : begin + tokens])
        return tuple(self._text[begin + offset % period] for offset in range(tokens))


class NGramDrafter(Drafter):
    """Proposes continuations from each request's own text, and from the corpus."""

    name = N_GRAM
    is_silent = True

    def __init__(self, method: NGram, context: DraftContext) -> None:
        self.max_depth = method.tokens
        self._method, self._context = method, context
        requests, guides = len(context.texts), context.guides
        self._guides = [None if guides is None else guides.of(request) for request in range(requests)]
        self._indices = [NGramIndex(method.longest, method.shortest) for _ in range(requests)]
        corpus = method.corpus
        self._texts = [None if corpus is None else corpus.open() for _ in range(requests)]

    def begin(self, session: Session) -> None:
        """Learns where the text of each request begins."""
        self._begins = session.begins

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, candidates are proposed; then the corpus has whole texts."""
        yield
        self._read(self._context.texts)

    def _read(self, whole: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Adds the texts so far to the corpus -> what candidates may be looked for in."""
        texts = [text[begin:] if begin else text for text, begin in zip(whole, self._begins, strict=True)]
        for entry, text in zip(self._texts, texts, strict=True):
            if entry is not None:
                entry.extend(text[len(entry) :])
        return texts

    def propose(self, batch: Batch) -> Proposal:
        texts = self._read(batch.texts)
        return Proposal(list(map(self._candidates, self._indices, self._texts, self._guides, texts, batch.levels)))

    def _candidates(
        self, index: NGramIndex, entry: CorpusText | None, guide: Guide | None, text: Sequence[int], levels: int
    ) -> Candidates | None:
        if levels == 0:
            return None
        index.extend(text[len(index) :])
        allowed = None if guide is None else guide.allowed_count
        tokens, branches = min(self._method.tokens, levels), self._method.branches
        chains = index.proposals(tokens, branches, allowed)
        if self._method.corpus is not None:
            others = self._method.corpus.continuations(text, tokens, branches, without=entry, allowed=allowed)
            longer = [chain for length, chain in others if length > self._method.longest]
            chains = _different([*longer, *chains, *(chain for _, chain in others)])[:branches]
        return Candidates.from_chains(chains) if chains else None


def _different(chains: Sequence[list[int]]) -> list[list[int]]:
    return [list(chain) for chain in dict.fromkeys(map(tuple, chains))]


def ngram_drafters(method: NGram | None, context: DraftContext) -> list[Drafter]:
    """The drafter of ``NGram``; an empty list for None."""
    return [] if method is None else [NGramDrafter(method, context)]
