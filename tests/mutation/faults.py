"""The small faults that a source file can have: a comparison, a sign, a number, a condition, an argument, a statement.

Python and C++ are both read with patterns, outside comments and strings: ruff and clang-format have spaced them alike.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

_PAIRS = (
    "< <=, > >=, == !=, + -, * /, & |, << >>, && ||, and or, min max, minimum maximum, True False, true false, += -="
)
_SWAP = {a: b for pair in _PAIRS.split(", ") for a, b in (pair.split(), pair.split()[::-1])}
_SWAP |= {"is": "is not", "is not": "is", "not in": "in", "//": "*"}
_HIDDEN = {
    True: r'"""(?:.|\n)*?"""|f?"(?:\\.|[^"\\\n])*"|#[^\n]*|^ *def [^\n]*|^(?:from|import) [^\n]*|^ *raise [^\n]*',
    False: r'//[^\n]*|"(?:\\.|[^"\\\n])*"|^#(?:[^\n]*\\\n)*[^\n]*|static_assert[^;]*;',
}
_NESTED = r"(?:[^()\n]|\((?:[^()\n]|\([^()\n]*\))*\))+"
_SIGN = r"<=?|>=?|[!=]=|<<|>>|&&|\|\||[-+*&]|//?|[-+]=|and|or|is(?: not)?|not in"
_CALLED = r"(?<!min\()(?<!max\()(?<!mum\()(?<=\w\()"  # but for min and max, whose arguments have no order
_CHANGED = r"([\w.>\-\[\]]+(?:\([^\n]*\)| [-+*/|&]?= [^\n]*[^\n,(\[{;])"  # the bracket closes after it
_ALWAYS_PYTHON = ("sign", "number", "word")  # parsing a file for each would take a minute
# kind, whether for Python (None: both), pattern, what becomes of its first group
_FAULTS: list[tuple[str, bool | None, str, Callable[[str], str]]] = [
    ("sign", None, rf"(?<=[\w)\]] )({_SIGN})(?= )", _SWAP.__getitem__),
    ("number", None, r"(?<![\w.])(\d+)(?![\w.])", lambda text: str(int(text) + 1)),
    ("word", None, r"\b((?:min|max)(?:imum)?(?=\()|True|False|true|false)\b", _SWAP.__getitem__),
    ("condition", True, r"\b(?:if|while) ([^\n]+)(?=:$)", lambda text: f"not ({text})"),
    ("condition", True, r"(?<= if )([^:\n]+?)(?= else )", lambda text: f"not ({text})"),
    ("condition", False, rf"\b(?:if|while) \(({_NESTED})\)", lambda text: f"!({text})"),
    ("arguments", None, rf"{_CALLED}([\w.]+, [\w.]+)(?=[,)])", lambda text: ", ".join(text.split(", ")[::-1])),
    ("statement", True, rf"^ +(?!return|assert){_CHANGED})$", lambda text: "pass"),
    ("statement", False, rf"^ +(?!return|break|using|const|else|case){_CHANGED};)$", lambda text: ";"),
]  # fmt: skip


class Fault(NamedTuple):
    """``source[begin:end]`` becomes ``text``."""

    begin: int
    end: int
    text: str
    kind: str

    def planted(self, source: str) -> str:
        """The source with the fault."""
        return source[: self.begin] + self.text + source[self.end :]

    def described(self, source: str) -> str:
        """Its line and column, and what it changes."""
        line, column = source.count("\n", 0, self.begin) + 1, self.begin - source.rfind("\n", 0, self.begin)
        return f"{line}:{column} {source[self.begin : self.end]!r} -> {self.text!r}"


def faults_of(source: str, is_python: bool) -> list[Fault]:
    """All of them, in the order of the text; Python's only where the text still is Python."""
    found = set(_found(source, is_python))
    return sorted(
        one for one in found if not is_python or one.kind in _ALWAYS_PYTHON or _is_python(one.planted(source))
    )


def _found(source: str, is_python: bool) -> Iterator[Fault]:
    code = re.sub(_HIDDEN[is_python], lambda m: re.sub(r"[^\n]", " ", m[0]), source, flags=re.MULTILINE)
    for kind, language, pattern, change in _FAULTS:
        for match in re.finditer(pattern, code, re.MULTILINE) if language in (None, is_python) else ():
            before = source[slice(*match.span(1))]
            after = change(before)
            if after != before and match[1].count("(") == match[1].count(")"):
                yield Fault(*match.span(1), after, kind)


def _is_python(source: str) -> bool:
    with suppress(SyntaxError):
        ast.parse(source)
        return True
    return False


def choose(faults: list[Fault], count: int, seed: str) -> list[Fault]:
    """So many, the same ones for the same seed; each kind as often as every other while there are some."""
    generator = random.Random(seed)
    kinds = [[fault for fault in faults if fault.kind == kind] for kind in sorted({fault.kind for fault in faults})]
    for group in kinds:
        generator.shuffle(group)
    turns = [group[turn] for turn in range(len(faults)) for group in kinds if turn < len(group)]
    return turns[:count]
