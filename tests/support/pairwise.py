"""Pairs of two parameters. Every value of either is in a quick pair; the other pairs are slow. If each parameter decides about
other lines of the code, the full product finds no more faults.
"""

import itertools

import pytest


def pairwise(some, others, *quick_on):
    """All pairs; those beside the diagonal are quick on these backends only (see the marker quick_on)."""
    length = max(len(some), len(others))
    diagonal = {(i % len(some), i % len(others)) for i in range(length)}
    return [
        pytest.param(one, other, marks=() if (i, j) in diagonal else pytest.mark.quick_on(*quick_on))
        for (i, one), (j, other) in itertools.product(enumerate(some), enumerate(others))
    ]
