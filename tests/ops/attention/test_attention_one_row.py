"""On the CPU a row of a tree has the bits that it has alone, with its path in the cache: so a text of many tokens a step is
the text of one token a step, in bf16 too.
"""

import pytest
import torch
from attention_cases import BUSHY, CATERPILLAR, CHAIN, ORDERED, RANDOM, UNIFORM, attention_case
from attention_checks import FLOATS, assert_same_runs, run

from pass_ext.reference.attention import attention_mask

# Trees whose columns end within a tile of 64, that begin or end one, and around the end of a chunk of 512.
PREFIXES = (0, 1, 37, 58, 62, 63, 64, 100, 505, 509, 511, 512, 700, 1020)


def one_row(case, node, bits):
    """The step of `node` alone, in a dense cache: the prefix, and after it the path to the node."""
    prefix = int(case["prefix_lens"][0])
    path = bits[node].nonzero().flatten()
    caches = {
        f"{name}_cache": torch.cat([case[f"{name}_cache"][:1, :prefix], case[f"{name}_new"][None, path]], dim=1)
        for name in "kv"
    }
    return case | caches | {
        "q": case["q"][node : node + 1], "k_new": None, "v_new": None, "visible": torch.ones(1, 1, dtype=torch.int64),
        "prefix_lens": torch.tensor([prefix + len(path) - 1], dtype=torch.int32), "max_nodes": 1,
        "cu_nodes": torch.tensor([0, 1], dtype=torch.int32),
        "depths": None if case["depths"] is None else torch.zeros(1, dtype=torch.int32),
    }  # fmt: skip


def assert_rows_are_alone(backend, prefix, nodes, **options):
    case = attention_case([prefix], [nodes], new=True, **options)
    bits = attention_mask(0, case["visible"])[:, :nodes]
    together = run(backend, case)
    for node in range(nodes):
        assert_same_runs([tensor[node : node + 1] for tensor in together], run(backend, one_row(case, node, bits)))


@pytest.fixture(autouse=True)
def _on_the_cpu(backend):
    if not backend.name.startswith("cpu"):
        pytest.skip("a GPU divides the work by its amount")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mask", [CHAIN, CATERPILLAR, BUSHY, UNIFORM])
@pytest.mark.parametrize("inputs", [RANDOM, ORDERED])
def test_a_row_of_a_tree_has_the_bits_of_a_row_alone(backend, dtype, mask, inputs):
    if inputs == ORDERED and dtype == torch.float16:
        pytest.skip("its largest number is 65504")
    for prefix in PREFIXES:
        assert_rows_are_alone(backend, prefix, 11, dtype=dtype, mask=mask, heads=(1, 3), seed=prefix, inputs=inputs)


@pytest.mark.parametrize("window", [1, 3, 50, 64, 600])
def test_in_a_window(backend, window):
    for prefix in (0, 37, 60, 130, 509, 1020):
        assert_rows_are_alone(backend, prefix, 9, mask=UNIFORM, window=window, seed=prefix)


@pytest.mark.parametrize("chunk", [1, 3, 50, 64, 600])
def test_in_chunks(backend, chunk):
    for prefix in (0, 37, 60, 130, 509, 1020):
        assert_rows_are_alone(backend, prefix, 9, mask=UNIFORM, chunk=chunk, seed=prefix)


def test_in_large_trees(backend):
    """Up to 64 nodes beside up to 63 keys of the prefix in one tile, and a chain through several tiles."""
    for prefix in (0, 30, 63, 127):
        assert_rows_are_alone(backend, prefix, 64, mask=UNIFORM, seed=prefix)
    assert_rows_are_alone(backend, 40, 150, mask=CHAIN)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_with_a_softcap_sinks_and_another_head_size(backend, softcap, sinks):
    assert_rows_are_alone(backend, 61, 12, mask=UNIFORM, softcap=softcap, sinks=sinks, dim=80, seed=3)
    assert_rows_are_alone(backend, 61, 12, mask=UNIFORM, softcap=softcap, sinks=sinks, dim=192, value_dim=128, seed=3)
