"""Pairs of two parameters that are quick everywhere for every value of either, and elsewhere slow: where each decides about
other lines of the code, the full product finds no more faults."""

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
