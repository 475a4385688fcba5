"""The effect of rule "longest_branch" on the distribution of a text: all outcomes of a step in exact fractions.

    a step    w roots drawn from the target's distribution without replacement; below each a chain of drafts, each accepted
              while u < p(x) / q(x)
    result    the branch with the most accepted drafts, the first of equal ones; the target adds no token

`python -m tools.longest_branch` writes the table of docs/guide/speculative.md; `--check` writes nothing and fails where the
page shows another table.
"""

import itertools
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from benchmarks.harness import markdown
from tools.command import run

PAGE = Path("docs/guide/speculative.md")
NAME = "tools.longest_branch"

Distribution = Sequence[Fraction]
Model = Mapping[int, Distribution]
"""Token -> the distribution after it: both models look at the last token only."""
Texts = dict[tuple[int, ...], Fraction]
"""Tokens -> their probability."""


def tenths(*numbers: int) -> Distribution:
    """A distribution in tenths."""
    assert sum(numbers) == 10
    return [Fraction(number, 10) for number in numbers]


PROMPT = 0  # the token before the texts
TARGET: Model = dict.fromkeys(range(3), tenths(6, 3, 1))
DRAFTS: dict[str, Model] = {
    "good after rare tokens": {0: tenths(1, 1, 8), 1: tenths(2, 3, 5), 2: tenths(5, 3, 2)},
    "equally good everywhere": dict.fromkeys(range(3), tenths(2, 3, 5)),
    "perfect": TARGET,
}
CASES = [(name, roots) for name in DRAFTS for roots in (1, 2, 3)]
LENGTH = 1  # of the chain below each root
NEW_TOKENS = 2


def acceptance(p: Distribution, q: Distribution) -> Fraction:
    """P(a draft is accepted)."""
    return sum(map(min, p, q), Fraction(0))


def accepted_chains(target: Model, draft: Model, last: int, length: int) -> Texts:
    """The distribution of the drafts that are accepted after a token."""
    if length == 0:
        return {(): Fraction(1)}
    p, q = target[last], draft[last]
    accepted: Texts = {(): 1 - acceptance(p, q)}
    for token, mass in enumerate(map(min, p, q)):
        for rest, probability in accepted_chains(target, draft, token, length - 1).items():
            accepted[(token, *rest)] = mass * probability
    return accepted


def ordered_roots(p: Distribution, count: int) -> Texts:
    """The distribution of `count` tokens drawn without replacement, in order."""
    drawn: Texts = {(): Fraction(1)}
    for _ in range(count):
        drawn = {
            (*roots, token): mass * probability / (1 - sum(p[root] for root in roots))
            for roots, mass in drawn.items()
            for token, probability in enumerate(p)
            if token not in roots and probability
        }
    return drawn


def step(target: Model, draft: Model, last: int, roots: int, length: int) -> Texts:
    """The distribution of the tokens that one step writes."""
    written: Texts = defaultdict(Fraction)
    for tokens, mass in ordered_roots(target[last], roots).items():
        below = [accepted_chains(target, draft, token, length).items() for token in tokens]
        for chains in itertools.product(*below):
            best = max(range(roots), key=lambda i: (len(chains[i][0]), -i))
            joint = mass
            for _, probability in chains:
                joint *= probability
            written[(tokens[best], *chains[best][0])] += joint
    return written


def distribution_of_texts(
    target: Model, draft: Model, roots: int, length: int, new_tokens: int, prompt: int = PROMPT
) -> Texts:
    """The distribution of texts of `new_tokens` tokens; the last steps draft no further."""
    texts: Texts = {(): Fraction(1)}
    for written in range(new_tokens):
        grown: Texts = defaultdict(Fraction)
        for text, mass in texts.items():
            if len(text) > written:
                grown[text] += mass
                continue
            most = min(length, new_tokens - written - 1)
            for more, probability in step(target, draft, text[-1] if text else prompt, roots, most).items():
                grown[text + more] += mass * probability
        texts = grown
    return texts


def target_distribution(target: Model, new_tokens: int, prompt: int = PROMPT) -> Texts:
    """The distribution of texts that the target writes alone."""
    texts: Texts = {}
    for text in itertools.product(range(len(target[prompt])), repeat=new_tokens):
        texts[text] = Fraction(1)
        for before, token in itertools.pairwise((prompt, *text)):
            texts[text] *= target[before][token]
    return texts


def variation(texts: Texts, other: Texts) -> Fraction:
    """The total variation distance."""
    return sum(abs(texts.get(text, Fraction(0)) - other.get(text, Fraction(0))) for text in {*texts, *other}) / 2


def first_token(texts: Texts) -> Texts:
    """The distribution of the first token."""
    first: Texts = defaultdict(Fraction)
    for text, mass in texts.items():
        first[text[:1]] += mass
    return first


def table() -> str:
    """The table of the page."""
    lines = [
        "| the draft | kept after 0, 1, 2 | roots | first token | off by | two tokens off by |",
        "|---|---|---:|---|---:|---:|",
    ]
    for name, roots in CASES:
        draft = DRAFTS[name]
        texts = distribution_of_texts(TARGET, draft, roots, LENGTH, NEW_TOKENS)
        first = first_token(texts)
        accepted = ", ".join(_short(acceptance(TARGET[token], draft[token])) for token in range(3))
        shown = ", ".join(_short(first[token,]) for token in range(3))
        off = (
            variation(first, target_distribution(TARGET, 1)),
            variation(texts, target_distribution(TARGET, NEW_TOKENS)),
        )
        lines.append(f"| {name} | {accepted} | {roots} | {shown} | {_short(off[0])} | {_short(off[1])} |")
    return "\n".join(lines)


def _short(number: Fraction) -> str:
    """A number to four places, without zeros at its end."""
    return f"{float(number):.4f}".rstrip("0").rstrip(".")


def check(root: Path) -> str | None:
    """A sentence where the page shows another table."""
    page = (root / PAGE).read_text()
    return None if markdown.has_part(page, NAME, table()) else f"the table of {PAGE} is not this one"


def write(root: Path) -> None:
    """Writes the table into its page."""
    page = root / PAGE
    page.write_text(markdown.replace_part(page.read_text(), NAME, table()))


def main() -> int:
    """Entry point of `python -m tools.longest_branch`."""
    return run("longest_branch", __doc__, check, write)


if __name__ == "__main__":
    sys.exit(main())
