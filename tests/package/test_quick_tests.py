"""Which tests are quick: every case of a test at one instruction set at least, and every set with a case of each kind."""

import pytest
from support.pairwise import spread

SETS = ["portable", "avx2", "avx512"]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 60])
def test_every_case_and_every_set_is_in_a_pair(count):
    cases = [f"case {i}" for i in range(count)]
    pairs = spread(cases, SETS)
    assert {case for case, _ in pairs} == set(cases)
    assert {name for _, name in pairs} == set(SETS)
    assert len(pairs) == max(count, len(SETS))


def test_every_type_meets_every_set():
    pairs = spread([f"{size}-{kind}" for size in range(16) for kind in ("float32", "bfloat16", "float16")], SETS)
    assert len({(case.partition("-")[2], name) for case, name in pairs}) == 9


def test_with_the_best_set_alone_there_is_no_pair():
    assert spread(["case"], []) == set()
