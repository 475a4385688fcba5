"""The tests of attention_tree can fail: each fault of planted_attention.py is caught by the test named here."""

import pytest
import test_attention
import test_attention_masks
import torch
from attention_cases import BITS, RANDOM, SINK
from attention_checks import check
from planted_attention import FAULTS, planted

from pass_ext.testing import rerouted_backend

NUMBERS, MASKS = test_attention, test_attention_masks
CAUGHT_BY = {
    "a bit flipped": lambda backend: MASKS.test_every_bit(backend, 33, BITS),
    "bits of missing nodes count": lambda backend: NUMBERS.test_rows_without_a_request(backend),
    "window off by one": lambda backend: MASKS.test_every_bit_in_a_window(backend, 5, BITS),
    "window by slot, not depth": lambda backend: MASKS.test_every_bit_in_a_window(backend, 5, BITS),
    "last prefix key lost": lambda backend: MASKS.test_every_bit(backend, 1, BITS),
    "first key of a tile lost": lambda backend: NUMBERS.test_every_length(backend, 65),
    "sums in 16 bits": lambda backend: NUMBERS.test_hardly_worse_than_rounding_the_exact_result(
        backend, torch.bfloat16
    ),
    "sums in fp16": lambda backend: NUMBERS.test_in_fp32_as_close_as_pytorch(backend),
    "no rescale when the maximum rises": lambda backend: NUMBERS.test_every_shape_of_weights(
        backend, torch.bfloat16, RANDOM
    ),
    "lse in base 2": lambda backend: NUMBERS.test_every_number_of_heads(backend, 2),
    "hidden times zero": lambda backend: MASKS.test_a_broken_prefix_key_breaks_only_rows_that_reach_it(backend),
    "softcap forgotten": lambda backend: NUMBERS.test_softcap(backend, 5.0),
    "heads grouped the wrong way": lambda backend: NUMBERS.test_every_number_of_heads(backend, 3),
    "rows that see nothing get a mean": lambda backend: MASKS.test_rows_that_see_nothing(backend),
    "rows without a request unwritten": lambda backend: NUMBERS.test_rows_without_a_request(backend),
    "pages in order": lambda backend: NUMBERS.test_every_layout(backend, "paged 3", False),
    "nodes from the cache": lambda backend: NUMBERS.test_every_layout(backend, "rows", True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault):
    right, wrong = (rerouted_backend("planted", {"attention_tree": planted(which)}) for which in ("", fault))
    with right.active():
        CAUGHT_BY[fault](right)
    with wrong.active(), pytest.raises(AssertionError):
        CAUGHT_BY[fault](wrong)


def test_a_kernel_that_rounds_its_weights_stays_within_the_bound():
    """The bound leaves room for p in 16 bits, and for nothing wrong."""
    right = rerouted_backend("planted", {"attention_tree": planted()})
    with right.active():
        for inputs in (RANDOM, SINK):
            check(right, [500], [2], heads=(1, 2), dim=128, inputs=inputs)
