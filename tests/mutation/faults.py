"""The small faults that a source file can have: a comparison, a sign, a number, a condition, an argument, a statement.

Python is read with ``ast``; of C++, which clang-format has spaced, lines outside comments and strings are read with patterns.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from typing import NamedTuple

SWAPS = {
    "compare": {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "in": "not in"},
    "arithmetic": {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "&": "|", "|": "&", "<<": ">>", ">>": "<<"},
    "logic": {"and": "or", "or": "and", "&&": "||", "||": "&&"},
    "extreme": {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"},
}


class Fault(NamedTuple):
    """``source[begin:end]`` becomes ``text``."""

    operator: str
    begin: int
    end: int
    text: str

    def planted(self, source: str) -> str:
        """The source with the fault."""
        return source[: self.begin] + self.text + source[self.end :]

    def line(self, source: str) -> int:
        """Where, from 1 on."""
        return source.count("\n", 0, self.begin) + 1


def faults_of(source: str, is_python: bool) -> list[Fault]:
    """All of them, in the order of the text."""
    return sorted(set(_of_python(source) if is_python else _of_cpp(source)), key=lambda fault: fault[1:])


def choose(faults: list[Fault], count: int, seed: str) -> list[Fault]:
    """So many, the same ones for the same seed: each kind as often as every other while there are some."""
    generator, chosen = random.Random(seed), []
    kinds = [list(group) for group in ([f for f in faults if f.operator == kind] for kind in _kinds(faults))]
    for group in kinds:
        generator.shuffle(group)
    while len(chosen) < count and any(kinds):
        generator.shuffle(kinds)
        chosen += [group.pop() for group in kinds if group][: count - len(chosen)]
    return chosen


def _kinds(faults: list[Fault]) -> list[str]:
    return sorted({fault.operator for fault in faults})


# ---- Python ----


def _of_python(source: str) -> Iterator[Fault]:
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:  # ast counts bytes
        return len(source.encode()[: starts[line - 1] + column].decode())

    def span(node: ast.AST) -> tuple[int, int]:
        return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)

    def text(node: ast.AST) -> str:
        return source[slice(*span(node))]

    def between(kind: str, left: ast.AST, right: ast.AST) -> Iterator[Fault]:
        begin, end = span(left)[1], span(right)[0]
        found = re.search(r"[^\s()#]+(?: (?:not|in)\b)?", source[begin:end])
        if found and found[0] in SWAPS[kind]:
            yield Fault(kind, begin + found.start(), begin + found.end(), SWAPS[kind][found[0]])

    for node in _judged(ast.parse(source)):
        if isinstance(node, ast.Compare):
            yield from between("compare", node.left, node.comparators[0])
        elif isinstance(node, ast.BinOp):
            yield from between("arithmetic", node.left, node.right)
        elif isinstance(node, ast.BoolOp):
            yield from between("logic", *node.values[:2])
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            yield Fault("number", *span(node), str(not node.value if node.value is bool(node.value) else node.value + 1))
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield Fault("condition", *span(node.test), f"not ({text(node.test)})")
        elif isinstance(node, ast.Call):
            name = node.func
            if isinstance(name, ast.Name) and name.id in SWAPS["extreme"]:
                yield Fault("extreme", *span(name), SWAPS["extreme"][name.id])
            elif len(node.args) > 1 and not any(isinstance(arg, ast.Starred) for arg in node.args[:2]):
                first, second = node.args[:2]
                swapped = text(second) + source[span(first)[1] : span(second)[0]] + text(first)
                yield Fault("arguments", span(first)[0], span(second)[1], swapped)
        elif isinstance(node, (ast.Expr, ast.AugAssign)) or (
            isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
        ):
            yield Fault("statement", *span(node), "pass")


def _judged(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that decide something: no messages, annotations or docstrings."""
    for name, value in ast.iter_fields(tree):
        for node in value if isinstance(value, list) else [value]:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not isinstance(node, ast.AST) or is_text or isinstance(node, (ast.Raise, ast.JoinedStr)):
                continue
            if name in ("annotation", "returns", "decorator_list"):
                continue
            yield node
            yield from _judged(node)


# ---- C++ ----

_HIDDEN = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|^#(?:[^\n]*\\\n)*[^\n]*|static_assert[^;]*;', re.MULTILINE)
_SIGN = re.compile(r"(?<=[\w)\]] )(<=|>=|==|!=|<<|>>|&&|\|\||[-+*/<>&|])(?= )")
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
_EXTREME = re.compile(r"\b(min|max|minimum|maximum)(?=\()")
_IF = re.compile(r"\b(?:if|while) \(")
_ARGUMENTS = re.compile(r"(?<!imum\()(?<=\w\()([\w.]+), ([\w.]+)(?=[,)])")
_STATEMENT = re.compile(r"^ +((?!return|delete|break|using|goto|const|else|case)[\w.>\-\[\]*]+(?: [-+*/|&]?= |\().*;)$", re.M)


def _of_cpp(source: str) -> Iterator[Fault]:
    code = _HIDDEN.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)
    for found in _SIGN.finditer(code):
        for kind in ("compare", "arithmetic", "logic"):
            if found[1] in SWAPS[kind]:
                yield Fault(kind, *found.span(1), SWAPS[kind][found[1]])
    for found in _NUMBER.finditer(code):
        yield Fault("number", *found.span(), str(int(found[0]) + 1))
    for found in _EXTREME.finditer(code):
        yield Fault("extreme", *found.span(), SWAPS["extreme"][found[1]])
    for found in _IF.finditer(code):
        end = _closing(code, found.end() - 1)
        yield Fault("condition", found.end(), end, f"!({source[found.end() : end]})")
    for found in _ARGUMENTS.finditer(code):
        if found[1] != found[2]:
            yield Fault("arguments", *found.span(), f"{found[2]}, {found[1]}")
    for found in _STATEMENT.finditer(code):
        if found[1].count("(") == found[1].count(")"):
            yield Fault("statement", *found.span(1), ";")


def _closing(code: str, opening: int) -> int:
    """The place of the bracket that closes the one here."""
    depth = 0
    for place in range(opening, len(code)):
        depth += {"(": 1, ")": -1}.get(code[place], 0)
        if depth == 0:
            return place
    raise ValueError("a bracket that nothing closes")
