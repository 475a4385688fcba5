"""Proposals from the text so far: what followed the last places where the text's latest tokens stood before.

    the text ends in an n-gram that also ended at e: propose text[e + 1], text[e + 2], ..., and past its end the same again

Host side; no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

_MOST_PLACES = 32
"""Of one n-gram, the latest places that are looked at: a frequent one may have thousands that continue alike."""


class NGramIndex:
    """The places of every n-gram of one growing text.

    An n-gram's number is looked up by the number of its first n - 1 tokens and its last token, so that a token costs one
    look-up for each n.

    Args:
        longest, shortest: the n-grams that are looked for, longest first.
    """

    def __init__(self, longest: int = 4, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams must have 1 <= shortest <= longest, got shortest {shortest}, longest {longest}")
        self.longest = longest
        self.shortest = shortest
        self._text: list[int] = []
        self._numbers: dict[tuple[int, int], int] = {}
        self._places: list[list[int]] = [[]]  # of each number; 0 is the empty n-gram
        self._ending: list[int] = [0]  # the numbers of the 0-gram, 1-gram, ... that the text ends in

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds committed tokens to the text."""
        for token in tokens:
            place, ending = len(self._text), [0]
            self._text.append(int(token))
            for n, shorter in enumerate(self._ending[: self.longest], 1):
                number = self._numbers.setdefault((shorter, self._text[place]), len(self._places))
                if number == len(self._places):
                    self._places.append([])
                if n >= self.shortest:
                    self._places[number].append(place)
                ending.append(number)
            self._ending = ending

    def proposals(self, tokens: int, branches: int) -> list[list[int]]:
        """Up to ``branches`` distinct continuations of ``tokens`` tokens each: those after longer n-grams first, the latest
        first. A place near the end is continued by what it leads to itself, so a repetition goes on."""
        if tokens < 1:
            return []
        found: dict[tuple[int, ...], None] = {}
        for end in self._earlier_places():
            if len(found) >= branches:
                break
            found.setdefault(self._continuation(end, tokens))
        return [list(chain) for chain in found]

    def _earlier_places(self) -> Iterator[int]:
        for n in range(len(self._ending) - 1, self.shortest - 1, -1):
            places = self._places[self._ending[n]]
            yield from places[-2 : -2 - _MOST_PLACES : -1]  # the last one is the end of the text itself

    def _continuation(self, end: int, tokens: int) -> tuple[int, ...]:
        begin, period = end + 1, len(self._text) - 1 - end
        if tokens <= period:
            return tuple(self._text[begin : begin + tokens])
        return tuple(self._text[begin + offset % period] for offset in range(tokens))


def join(
    parents: Sequence[int], tokens: Sequence[int], chains: Iterable[Sequence[int]], *, most: int | None = None
) -> tuple[list[int], list[int]]:
    """Hangs chains of proposals below the root of a tree of candidates; equal beginnings are shared.

    Nodes keep their numbers and new ones follow, so the groups of the tree stay where they are.

    Args:
        parents, tokens: of each node; -1 for the root's parent. ``[-1], [root]`` is a tree without candidates.
        chains: most wanted first.
        most: nodes of the joined tree; what does not fit is left out.

    Returns:
        The parents and tokens of the joined tree.
    """
    joined_parents, joined_tokens = list(parents), list(tokens)
    if len(joined_parents) != len(joined_tokens) or not joined_parents:
        raise ValueError(
            f"parents and tokens must be one for each node, the root included, got {len(parents)} and {len(tokens)}"
        )
    below: dict[tuple[int, int], int] = {}
    for node in range(1, len(joined_parents)):
        below.setdefault((joined_parents[node], joined_tokens[node]), node)
    for chain in chains:
        node = 0
        for token in chain:
            child = below.get((node, token))
            if child is None:
                if most is not None and len(joined_parents) >= most:
                    break
                child = below[node, token] = len(joined_parents)
                joined_parents.append(node)
                joined_tokens.append(token)
            node = child
    return joined_parents, joined_tokens
