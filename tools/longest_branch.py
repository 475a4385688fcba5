"""What rule "longest_branch" does to the law of a text: every way that a step can go, with its probability, in exact fractions.

    a step    w roots of the target's own law, without replacement; below each a chain of drafts, kept while u < p(x) / q(x)
    kept      the branch with the most kept drafts, the first of equal ones; nothing is added to it

`python -m tools.longest_branch` writes the table of docs/guide/speculative.md; `--check` writes nothing and fails where the
table is not this one. tests/decoding/drafting/test_speculative_laws.py finds the same law in what generate writes.
"""

import itertools
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from benchmarks.harness import marked
from tools.command import run

PAGE = Path("docs/guide/speculative.md")
NAME = "tools.longest_branch"

Law = Sequence[Fraction]
Laws = Mapping[int, Law]
"""The law behind each token: both models look at the last token only."""
Texts = dict[tuple[int, ...], Fraction]


def tenths(*numbers: int) -> Law:
    """A law."""
    assert sum(numbers) == 10
    return [Fraction(number, 10) for number in numbers]


PROMPT = 0  # the token behind which the texts begin
TARGET: Laws = dict.fromkeys(range(3), tenths(6, 3, 1))
DRAFTS: dict[str, Laws] = {
    "good behind rare tokens": {0: tenths(1, 1, 8), 1: tenths(2, 3, 5), 2: tenths(5, 3, 2)},
    "equally good everywhere": dict.fromkeys(range(3), tenths(2, 3, 5)),
    "perfect": TARGET,
}
CASES = [(name, roots) for name in DRAFTS for roots in (1, 2, 3)]
LENGTH = 1  # of the chain below each root
NEW_TOKENS = 2


def acceptance(p: Law, q: Law) -> Fraction:
    """P(a draft is kept)."""
    return sum(map(min, p, q), Fraction(0))


def kept_chains(target: Laws, draft: Laws, last: int, length: int) -> Texts:
    """The law of the drafts that are kept behind a token."""
    if length == 0:
        return {(): Fraction(1)}
    p, q = target[last], draft[last]
    kept: Texts = {(): 1 - acceptance(p, q)}
    for token, mass in enumerate(map(min, p, q)):
        for rest, own in kept_chains(target, draft, token, length - 1).items():
            kept[(token, *rest)] = mass * own
    return kept


def ordered_roots(p: Law, count: int) -> Texts:
    """So many tokens of a law, drawn without replacement."""
    drawn: Texts = {(): Fraction(1)}
    for _ in range(count):
        drawn = {
            (*roots, token): mass * own / (1 - sum(p[root] for root in roots))
            for roots, mass in drawn.items()
            for token, own in enumerate(p)
            if token not in roots and own
        }
    return drawn


def step(target: Laws, draft: Laws, last: int, roots: int, length: int) -> Texts:
    """The law of the tokens that one step writes."""
    written: Texts = defaultdict(Fraction)
    for tokens, mass in ordered_roots(target[last], roots).items():
        below = [kept_chains(target, draft, token, length).items() for token in tokens]
        for chains in itertools.product(*below):
            best = max(range(roots), key=lambda i: (len(chains[i][0]), -i))
            both = mass
            for _, own in chains:
                both *= own
            written[(tokens[best], *chains[best][0])] += both
    return written


def law_of_texts(target: Laws, draft: Laws, roots: int, length: int, new_tokens: int, prompt: int = PROMPT) -> Texts:
    """The law of texts of so many new tokens; the last steps draft no further than that."""
    texts: Texts = {(): Fraction(1)}
    for written in range(new_tokens):
        grown: Texts = defaultdict(Fraction)
        for text, mass in texts.items():
            if len(text) > written:
                grown[text] += mass
                continue
            most = min(length, new_tokens - written - 1)
            for more, own in step(target, draft, text[-1] if text else prompt, roots, most).items():
                grown[text + more] += mass * own
        texts = grown
    return texts


def true_law(target: Laws, new_tokens: int, prompt: int = PROMPT) -> Texts:
    """The target's own."""
    law: Texts = {}
    for text in itertools.product(range(len(target[prompt])), repeat=new_tokens):
        law[text] = Fraction(1)
        for before, token in itertools.pairwise((prompt, *text)):
            law[text] *= target[before][token]
    return law


def variation(one: Texts, other: Texts) -> Fraction:
    """Total variation."""
    return sum(abs(one.get(text, Fraction(0)) - other.get(text, Fraction(0))) for text in {*one, *other}) / 2


def first_token(texts: Texts) -> Texts:
    """The law of the first token."""
    law: Texts = defaultdict(Fraction)
    for text, mass in texts.items():
        law[text[:1]] += mass
    return law


def table() -> str:
    """For the page."""
    lines = [
        "| the draft | kept behind 0, 1, 2 | roots | first token | off by | two tokens off by |",
        "|---|---|---:|---|---:|---:|",
    ]
    for name, roots in CASES:
        draft = DRAFTS[name]
        texts = law_of_texts(TARGET, draft, roots, LENGTH, NEW_TOKENS)
        own = first_token(texts)
        kept = ", ".join(_short(acceptance(TARGET[token], draft[token])) for token in range(3))
        first = ", ".join(_short(own[token,]) for token in range(3))
        off = variation(own, true_law(TARGET, 1)), variation(texts, true_law(TARGET, NEW_TOKENS))
        lines.append(f"| {name} | {kept} | {roots} | {first} | {_short(off[0])} | {_short(off[1])} |")
    return "\n".join(lines)


def _short(number: Fraction) -> str:
    """To four places; without them where they are none."""
    return f"{float(number):.4f}".rstrip("0").rstrip(".")


def check(root: Path) -> str | None:
    """A sentence where the page shows another table."""
    page = (root / PAGE).read_text()
    return None if marked.shows(page, NAME, table()) else f"the table of {PAGE} is not this one"


def write(root: Path) -> None:
    """Writes the table into its page."""
    page = root / PAGE
    page.write_text(marked.replace(page.read_text(), NAME, table()))


def main() -> int:
    """Entry point of `python -m tools.longest_branch`."""
    return run("longest_branch", __doc__, check, write)


if __name__ == "__main__":
    sys.exit(main())
