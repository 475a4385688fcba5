"""Pages of 1 to 256 slots, as ``[P, page, Hkv, D]`` and, by strides, as the ``[P, Hkv, page, D]`` of other engines: attention
has the result of a dense cache, on the CPU its bits, and a commit moves the same rows.
"""

import pytest
import torch

import pass_ext

PAGES = (1, 2, 5, 16, 32, 100, 256)
HEADS, DIM = 2, 64


def paged(dense, page, order, random):
    """A dense cache ``[B, S, H, D]`` as shuffled pages in this order of dimensions, and the block table. Others hold NaN."""
    batch, slots, heads, dim = dense.shape
    each = -(-slots // page)
    table = torch.randperm(batch * each + 3, generator=random)[: batch * each].view(batch, each).int()
    filled = torch.nn.functional.pad(dense, (0, 0, 0, 0, 0, each * page - slots), value=torch.nan)
    pool = torch.full((batch * each + 3, page, heads, dim), torch.nan, dtype=dense.dtype)
    pool[table.flatten().long()] = filled.view(batch * each, page, heads, dim)
    if order == "[P, Hkv, page, D]":
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
        assert page == 1 or not pool.is_contiguous()
    return pool, table


@pytest.mark.parametrize("order", ["[P, page, Hkv, D]", "[P, Hkv, page, D]"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_has_the_result_of_a_dense_cache(backend, order, dtype):
    random = torch.Generator().manual_seed(1)
    prefixes, trees = [300, 7], pass_ext.pack_trees([pass_ext.Tree.from_branching((2, 2)), pass_ext.Tree.chain(3)])
    nodes = len(trees.parents)
    q = torch.randn(nodes, 2 * HEADS, DIM, generator=random).to(dtype)
    keys, values = (torch.randn(2, 320, HEADS, DIM, generator=random).to(dtype) for _ in range(2))
    put = lambda tensor: tensor.to(backend.device)  # noqa: E731
    lens = torch.tensor(prefixes, dtype=torch.int32)
    shared = [put(part) if isinstance(part, torch.Tensor) else part for part in (lens, trees.cu_nodes, trees.visible)]
    dense = pass_ext.attention_tree(put(q), put(keys), put(values), *shared, trees.max_nodes)
    for page in PAGES if backend.name != "emulated" else (1, 5, 256):
        pool, table = paged(keys, page, order, torch.Generator().manual_seed(page))
        others, _ = paged(values, page, order, torch.Generator().manual_seed(page))
        # Strides survive the copy to a device.
        pool, others = (
            put(p.transpose(1, 2)).transpose(1, 2) if "Hkv, page" in order else put(p) for p in (pool, others)
        )
        ours = pass_ext.attention_tree(put(q), pool, others, *shared, trees.max_nodes, block_table=put(table))
        for left, right in zip(ours, dense, strict=True):
            if backend.device.type == "cpu" and backend.name != "emulated":
                assert torch.equal(left, right), page
            else:  # the keys are divided by the work of the GPU, and each call of the emulator has another one
                torch.testing.assert_close(left, right, rtol=0.016, atol=0.01)


@pytest.mark.parametrize("order", ["[P, page, Hkv, D]", "[P, Hkv, page, D]"])
def test_a_commit_moves_the_rows_of_a_dense_cache(backend, order):
    random = torch.Generator().manual_seed(2)
    dense = torch.randn(2, 320, HEADS, DIM, generator=random)
    cu_nodes, path = torch.tensor([0, 7, 11]).int(), torch.tensor([[0, 2, 5], [0, 3, -1]]).int()
    lens, accepted = torch.tensor([300, 7]).int(), torch.tensor([2, 1]).int()
    put = lambda tensor: tensor.to(backend.device)  # noqa: E731
    step = [put(part) for part in (lens, cu_nodes, path, accepted)]
    expected = put(dense.clone())
    pass_ext.cache_commit_([expected], *step)
    assert not torch.equal(expected.cpu(), dense)
    for page in PAGES:
        pool, table = paged(dense, page, order, random)
        pool = put(pool.transpose(1, 2)).transpose(1, 2) if "Hkv, page" in order else put(pool)
        pass_ext.cache_commit_([pool], *step, block_table=put(table))
        back = pool[put(table).long()].flatten(1, 2)[:, :320]
        assert torch.equal(back, expected), page
