"""Properties of a continuation: whether it loops, and where it leaves another one.

A text loops if a fifth of its tokens repeat what followed the same eight tokens earlier in the continuation, or if three
quarters of its last third equal the token one period before.
"""

from collections.abc import Sequence

GRAM = 8
MOST_REPEATED = 0.2
PERIODIC = 0.75
DEFINITION = (
    f"a continuation loops if {MOST_REPEATED:.0%} of its tokens follow {GRAM} tokens that the same token has followed before, "
    f"or if, for some period, {PERIODIC:.0%} of its last third equal the token one period before"
)


def repeated_share(tokens: Sequence[int], gram: int = GRAM) -> float:
    """The share of tokens that followed the same `gram` tokens earlier in the text."""
    followers: dict[tuple[int, ...], set[int]] = {}
    repeated = 0
    for end in range(gram, len(tokens)):
        key = tuple(tokens[end - gram : end])
        seen = followers.setdefault(key, set())
        repeated += tokens[end] in seen
        seen.add(tokens[end])
    return repeated / len(tokens) if tokens else 0.0


def period_share(tokens: Sequence[int]) -> float:
    """The largest share of the last third that equals the token p before, over all periods p up to a third of the text."""
    third = len(tokens) // 3
    if third < GRAM:
        return 0.0
    last = range(len(tokens) - third, len(tokens))
    return max(sum(tokens[i] == tokens[i - p] for i in last) / third for p in range(1, third + 1))


def loops(tokens: Sequence[int]) -> bool:
    """True if the text loops: a drafter that copies the text so far looks too good on it."""
    return repeated_share(tokens) >= MOST_REPEATED or period_share(tokens) >= PERIODIC


def first_difference(text: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where the texts differ; None if they are equal. A shorter text differs at its end."""
    for position, (a, b) in enumerate(zip(text, other, strict=False)):
        if a != b:
            return position
    return None if len(text) == len(other) else min(len(text), len(other))
