"""Pairs of two parameters. Every value of either is in a quick pair; the other pairs are slow. If each parameter decides about
other lines of the code, the full product finds no more faults. ``spread``: the same of a test's cases and instruction sets.
"""

import itertools
import zlib

import pytest


def pairwise(some, others, *quick_on):
    """All pairs; those beside the diagonal are quick on these backends only (see the marker quick_on), of none: slow."""
    others_are = pytest.mark.quick_on(*quick_on) if quick_on else pytest.mark.slow
    length = max(len(some), len(others))
    diagonal = {(i % len(some), i % len(others)) for i in range(length)}
    return [
        pytest.param(one, other, marks=() if (i, j) in diagonal else others_are)
        for (i, one), (j, other) in itertools.product(enumerate(some), enumerate(others))
    ]


def spread(cases, sets):
    """Pairs such that each case is at one set at least, and each set has a case: (case, set). In the order of a hash: else a
    parameter with as many values as there are sets would always meet the same one."""
    ordered = sorted(set(cases), key=lambda case: zlib.crc32(case.encode()))
    length = max(len(ordered), len(sets)) if ordered and sets else 0
    return {(ordered[i % len(ordered)], sets[i % len(sets)]) for i in range(length)}
