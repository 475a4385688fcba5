"""A row of a tree has the bits that it has alone, with its path in the cache: so a text of many tokens a step is the text of
one token a step, in bf16 too. On the CPU always; on a GPU where attention is batch-invariant, whatever the GPU's size.
"""

import itertools

import pytest
import torch
from attention_cases import BUSHY, CATERPILLAR, CHAIN, ORDERED, RANDOM, UNIFORM
from attention_checks import FLOATS, assert_right, assert_same_runs, is_small, run, run_on_gpu, sized, solved
from support.pairwise import pairwise

from pass_ext.reference.attention import attention_mask

# Trees whose columns end within a tile of 64, that begin or end one, and around the end of a chunk of 512.
PREFIXES = (0, 1, 37, 58, 62, 63, 64, 100, 505, 509, 511, 512, 700, 1020)
# On the emulator: around the ends of shares of 128, and in the sixth.
FEW_PREFIXES = (0, 37, 125, 250, 700)


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
    assert_rows_of_case_are_alone(backend, *solved([prefix], [nodes], new=True, **options), nodes)


def assert_rows_of_case_are_alone(backend, case, exact, nodes):
    case = case | {"batch_invariant": True}
    bits = attention_mask(0, case["visible"])[:, :nodes]
    together = run(backend, case)
    assert_right(together, case, exact)
    for node in range(0, nodes, sized(backend, max(1, nodes // 4), 1)):
        assert_same_runs([tensor[node : node + 1] for tensor in together], run(backend, one_row(case, node, bits)))


def some(backend, prefixes):
    return sized(backend, FEW_PREFIXES, prefixes)


KINDS = [(RANDOM, dtype) for dtype in FLOATS] + [(ORDERED, dtype) for dtype in FLOATS if dtype != torch.float16]
"""ORDERED has numbers above float16's largest."""


@pytest.mark.by_tiles
@pytest.mark.parametrize(("kind", "mask"), pairwise(KINDS, [CHAIN, CATERPILLAR, BUSHY, UNIFORM], "cpu"), ids=str)
def test_a_row_of_a_tree_has_the_bits_of_a_row_alone(backend, kind, mask):
    inputs, dtype = kind
    for prefix in some(backend, PREFIXES):
        assert_rows_are_alone(backend, prefix, 11, dtype=dtype, mask=mask, heads=(1, 3), seed=prefix, inputs=inputs)


@pytest.mark.by_tiles
@pytest.mark.parametrize("window", [1, 3, 50, 64, 600])
def test_in_a_window(backend, window):
    for prefix in some(backend, (0, 37, 60, 130, 509, 1020)):
        assert_rows_are_alone(backend, prefix, 9, mask=UNIFORM, window=window, seed=prefix)


@pytest.mark.by_tiles
@pytest.mark.parametrize("chunk", [1, 3, 50, 64, 600])
def test_in_chunks(backend, chunk):
    for prefix in some(backend, (0, 37, 60, 130, 509, 1020)):
        assert_rows_are_alone(backend, prefix, 9, mask=UNIFORM, chunk=chunk, seed=prefix)


@pytest.mark.by_tiles
def test_far_after_the_start(backend):
    """Where shares hold several steps: around the end of one in a window, and over all that is in front."""
    assert_rows_are_alone(backend, 9214, 5, mask=BUSHY, window=50)
    assert_rows_are_alone(backend, 4350, 3, mask=CHAIN, heads=(1, 2))


@pytest.mark.by_tiles
def test_in_large_trees(backend):
    """Up to 64 nodes beside up to 63 keys of the prefix in one tile, and a chain through several tiles."""
    for prefix in sized(backend, (127,), (0, 30, 63, 127)):
        assert_rows_are_alone(backend, prefix, 64, mask=UNIFORM, seed=prefix)
    assert_rows_are_alone(backend, 40, sized(backend, 70, 150), mask=CHAIN, heads=sized(backend, (1, 1), (2, 2)))


@pytest.mark.by_tiles
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_with_a_softcap_sinks_and_another_head_size(backend, softcap, sinks):
    assert_rows_are_alone(backend, 61, 12, mask=UNIFORM, softcap=softcap, sinks=sinks, dim=80, seed=3)
    assert_rows_are_alone(backend, 61, 12, mask=UNIFORM, softcap=softcap, sinks=sinks, dim=192, value_dim=128, seed=3)
    assert_rows_are_alone(backend, 253, 5, mask=BUSHY, softcap=softcap, sinks=sinks, heads=(1, 9), dim=256, seed=3)


@pytest.mark.by_tiles
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_in_any_batch_and_on_any_gpu(backend, dtype):
    """Many rows: a block takes all shares of a row, few: a share each; one request of others whose lengths differ."""
    case, _ = solved([700, 9, 0, 64], [5, 3, 0, 1], dtype=dtype, heads=(1, 3), new=True)
    together = run(backend, case | {"batch_invariant": True})
    for multiprocessors in (1, 16, 108, 132) if is_small(backend) else ():
        assert_same_runs(together, run_on_gpu(case | {"batch_invariant": True}, multiprocessors=multiprocessors))
    for b, (first, last) in enumerate(itertools.pairwise(case["cu_nodes"].tolist())):
        rows = slice(first, last)
        alone = case | {name: case[name][rows] for name in ("q", "visible", "k_new", "v_new")} | {
            "prefix_lens": case["prefix_lens"][b : b + 1], "k_cache": case["k_cache"][b : b + 1],
            "v_cache": case["v_cache"][b : b + 1], "cu_nodes": torch.tensor([0, last - first], dtype=torch.int32),
        }  # fmt: skip
        assert_same_runs([tensor[rows] for tensor in together], run(backend, alone | {"batch_invariant": True}))
