"""Parts that only the CUDA kernels of attention have: shares of a grid, parts and their sum, pages by asynchronous copies.

Against fp64 softmax attention with a boolean mask, written here from the definition. On the emulator, so small.
"""

import itertools

import pytest
import torch
from emulator.ops.attention import attention_merge, attention_tree

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}
NONE = float("-inf")


class Case:
    """A ragged batch in pages or dense; everything that no row may see is NaN."""

    def __init__(
        self, prefixes, nodes, dim=64, heads=1, kv_heads=1, dtype=torch.bfloat16, page=0, separate=False, window=-1,
        softcap=0.0, max_nodes=None, seed=0, behind=0, scale=None,
    ):  # fmt: skip
        random = torch.Generator().manual_seed(seed)
        self.prefixes, self.nodes, self.window, self.softcap, self.scale = prefixes, nodes, window, softcap, scale
        self.max_nodes = max_nodes or max([*nodes, 1])
        self.group = heads // kv_heads
        self.bounds = [0, *itertools.accumulate(nodes)]
        rows, requests = self.bounds[-1] + behind, len(nodes)
        self.q = torch.randn(rows, heads, dim, generator=random).to(dtype)
        longest = max([p + (0 if separate else n) for p, n in zip(prefixes, nodes, strict=True)] + [1])
        slots = longest + 3
        width = max(page, 1)
        pages = -(-slots // page) if page else 1
        shape = (requests * pages + 2, page, kv_heads, dim) if page else (requests, slots, kv_heads, dim)
        self.k_cache, self.v_cache = (
            torch.full(shape, torch.nan, dtype=dtype),
            torch.full(shape, torch.nan, dtype=dtype),
        )
        self.block_table = None
        if page:
            self.block_table = (
                torch.randperm(shape[0], generator=random)[: requests * pages].view(requests, pages).int()
            )
        self.keys, self.values = [], []
        self.k_new, self.v_new = (
            [torch.full((rows, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2)] if separate else (None, None)
        )
        for b, (prefix, count) in enumerate(zip(prefixes, nodes, strict=True)):
            k, v = (torch.randn(prefix + count, kv_heads, dim, generator=random).to(dtype) for _ in range(2))
            for whole, cache, new in ((k, self.k_cache, self.k_new), (v, self.v_cache, self.v_new)):
                stored = prefix if separate else prefix + count
                for i in range(stored):
                    place = (int(self.block_table[b, i // width]), i % width) if page else (b, i)
                    cache[place] = whole[i]
                if separate:
                    new[self.bounds[b] : self.bounds[b + 1]] = whole[prefix:]
            self.keys.append(k)
            self.values.append(v)
        words = -(-self.max_nodes // 64)
        self.visible = torch.randint(-(2**63), 2**63 - 1, (rows, words), generator=random)
        for b, count in enumerate(nodes):  # each sees itself
            for i in range(count):
                self.visible[self.bounds[b] + i, i // 64] |= torch.tensor(1).bitwise_left_shift(i % 64)
        self.depths = torch.zeros(rows, dtype=torch.int32)
        for b, count in enumerate(nodes):
            for i in range(1, count):
                self.depths[self.bounds[b] + i] = int(self.depths[self.bounds[b] + (i * 7) % i]) + 1 if i > 1 else 1

    def mask(self, b):
        """[nodes, keys] of one request: True for visible keys."""
        prefix, count, first = self.prefixes[b], self.nodes[b], self.bounds[b]
        depths = self.depths[first : first + count]
        positions = torch.cat([torch.arange(prefix), prefix + depths])
        mask = torch.ones(count, prefix + count, dtype=torch.bool)
        for i, j in itertools.product(range(count), repeat=2):
            mask[i, prefix + j] = bool(int(self.visible[first + i, j // 64]) >> (j % 64) & 1)
        if self.window >= 0:
            mask &= (prefix + depths)[:, None] - self.window < positions
        return mask

    def exact(self):
        """out, lse and A, the attention over |V|, in fp64."""
        rows, heads, dim = self.q.shape
        out, magnitude = (torch.zeros(rows, heads, dim, dtype=torch.float64) for _ in range(2))
        lse = torch.full((rows, heads), NONE, dtype=torch.float64)
        for b, count in enumerate(self.nodes):
            span, mask = slice(self.bounds[b], self.bounds[b] + count), self.mask(b)
            for h in range(heads):
                k, v = (t[b][:, h // self.group].double() for t in (self.keys, self.values))
                scores = self.q[span, h].double() @ k.T * (dim**-0.5 if self.scale is None else self.scale)
                if self.softcap:
                    scores = self.softcap * torch.tanh(scores / self.softcap)
                scores = scores.masked_fill(~mask, NONE)
                weights = torch.nan_to_num(scores.softmax(-1), nan=0.0)
                out[span, h], magnitude[span, h] = weights @ v, weights @ v.abs()
                lse[span, h] = scores.logsumexp(-1)
        return out, lse, magnitude

    def arguments(self):
        return (
            self.q, self.k_cache, self.v_cache, torch.tensor(self.prefixes, dtype=torch.int32),
            torch.tensor(self.bounds, dtype=torch.int32), self.visible, self.max_nodes, self.k_new, self.v_new,
            self.block_table, self.depths, self.scale, self.softcap, self.window,
        )  # fmt: skip

    def run(self, **launch):
        return attention_tree(*self.arguments(), **launch)

    def on(self, device):
        """The op, and its arguments on a real GPU."""
        moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in self.arguments()]
        return torch.ops.pass_ext.attention_tree.default, moved

    def check(self, out, lse):
        exact, exact_lse, magnitude = self.exact()
        unit = ROUNDING[self.q.dtype]
        bound = unit * exact.abs() + unit * (magnitude + exact.abs()) + 2e-5 * magnitude
        excess = (out.double() - exact).abs() - bound
        assert not out.isnan().any()
        assert (excess <= 0).all(), f"{int((excess > 0).sum())} beyond the bound, by up to {excess.max():.2e}"
        nothing = exact_lse == NONE
        assert torch.equal(lse == NONE, nothing)
        assert ((lse - exact_lse)[~nothing].abs() <= 2e-5 + 2**-20 * exact_lse[~nothing].abs()).all()


def test_one_request_in_one_block():
    case = Case([70], [3])
    case.check(*case.run(blocks=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "nodes"), [(4, 2, 5), (7, 1, 4)], ids=["one tile", "two tiles"])
def test_every_kernel(dtype, dim, heads, kv_heads, nodes):
    case = Case([75, 3], [nodes, 1], dim, heads, kv_heads, dtype, seed=dim)
    case.check(*case.run(blocks=2))


@pytest.mark.parametrize("dim", [64, 80, 256])
def test_fp32(dim):
    case = Case([40, 0, 5], [3, 0, 2], dim, 3, 1, torch.float32, window=20, behind=1)
    case.check(*case.run())


@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("blocks", [1, 3, 7, 16])
def test_ragged_batches_on_any_grid(group, blocks):
    """Padded requests, an empty prefix, more nodes than a word has bits, and rows without a request."""
    case = Case([0, 33, 130, 64], [1, 0, 70, 6], heads=2 * group, kv_heads=2, behind=2, seed=group)
    case.check(*case.run(blocks=blocks))


@pytest.mark.parametrize("page", [0, 1, 3, 16])
@pytest.mark.parametrize("separate", [False, True], ids=["in the cache", "beside the cache"])
def test_pages(page, separate):
    case = Case([61, 7, 64], [5, 2, 9], heads=4, kv_heads=2, page=page, separate=separate, seed=page)
    case.check(*case.run(blocks=3))


def test_strided_caches():
    """K as a transposed [B, Hkv, S, D], V in rows of a wider buffer."""
    case = Case([70, 9], [3, 4], heads=4, kv_heads=2)
    case.k_cache = case.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((*case.v_cache.shape[:3], 96), torch.nan, dtype=case.v_cache.dtype)
    wide[..., 8:72] = case.v_cache
    case.v_cache = wide[..., 8:72]
    case.check(*case.run(blocks=2))


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_windows(window, dim):
    case = Case([150, 20], [6, 9], dim, heads=2, window=window, seed=window, page=7)
    case.check(*case.run(blocks=3))


def test_softcap_and_scale():
    case = Case([90], [7], heads=2, softcap=2.5, scale=-0.4)
    case.check(*case.run(blocks=2))


def test_the_grid_changes_rounding_only_and_the_order_of_threads_nothing():
    case = Case([300, 0, 70], [9, 2, 20], heads=4, kv_heads=2)
    results = {}
    for blocks in (1, 3, 7, 16):
        results[blocks] = case.run(blocks=blocks, seed=0)
        for seed in (1, 2):
            again = case.run(blocks=blocks, seed=seed)
            assert torch.equal(again[0], results[blocks][0]) and torch.equal(again[1], results[blocks][1])
    magnitude = case.exact()[2]
    for out, lse in results.values():
        assert ((out - results[1][0]).double().abs() <= 2 * ROUNDING[out.dtype] * magnitude).all()
        torch.testing.assert_close(lse, results[1][1], atol=2e-5, rtol=1e-6)


def test_a_batch_of_all_sizes_longer_than_a_block_has_threads():
    """Requests of one and of three tiles of rows, the larger ones far apart."""
    nodes = [(b % 16 == 0) + 39 * (b in (2, 135)) for b in range(140)]
    case = Case([3] * 140, nodes, heads=4, seed=2)
    case.check(*case.run(blocks=11))


@pytest.mark.parametrize(
    ("members", "nodes", "group"),
    [(2, 3, 1), (8, 3, 1), (9, 3, 1), (20, 3, 1), (80, 3, 1), (8, 16, 4), (9, 5, 5), (12, 15, 4)],
)
def test_a_unit_that_many_blocks_share(members, nodes, group):
    """Eight threads share a column and have nine parts each on their way: some have none, and 80 members are more."""
    case = Case([128 * members - nodes], [nodes], heads=group, seed=members)
    out, lse = case.run(blocks=members, seed=1)
    case.check(out, lse)
    for seed in (2, 3):
        again = case.run(blocks=members, seed=seed)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    ("members", "nodes", "group"), [(5, 3, 1), (19, 16, 1), (10, 13, 3), (4, 5, 4)],
    ids=["some of 16 rows", "16 rows", "some of 64 rows", "few of 64 rows"],
)  # fmt: skip
def test_every_kernel_merges_the_parts_of_blocks(dim, members, nodes, group):
    """Two to eight threads share a column; at 256 columns 19 members are more than two have on their way."""
    tile = 64 if dim <= 128 else 32
    case = Case([2 * tile * members - nodes], [nodes], dim, heads=group, seed=dim)
    record = {}
    case.check(*case.run(blocks=members, seed=1, record=record))
    assert len({block for block, _, _ in record["copies"]}) == members


def test_parts_of_very_different_weight_are_merged():
    """The largest score lies in one block's part, and all others weigh nothing beside it."""
    for place in (0, 300, 1130):
        case = Case([128 * 9 - 16], [16], heads=4, seed=7)
        case.keys[0][place] = 20 * case.q[3, 1]  # row 13 sees it, others may or may not
        case.k_cache[0, : len(case.keys[0])] = case.keys[0]
        case.check(*case.run(blocks=9))


@pytest.mark.parametrize(
    ("tiles", "busy"), [([8], 4), ([32], 8), ([48], 12), ([200], 16), ([20, 12], 8)],
    ids=["fewest tiles", "one a multiprocessor", "between", "all", "two requests"],
)  # fmt: skip
def test_short_shares_go_to_one_block_of_a_multiprocessor(tiles, busy):
    """16 blocks fit on 8 multiprocessors: a block has two tiles at least, and more blocks than 8 have four each."""
    case = Case([64 * count - 3 for count in tiles], [3] * len(tiles), heads=2)
    record = {}
    case.check(*case.run(blocks=16, multiprocessors=8, record=record))
    assert len({block for block, _, _ in record["copies"]}) == busy


def test_a_team_of_every_size_stays_on_few_multiprocessors():
    """Requests of one to three tiles of rows need six blocks, though one multiprocessor would do for so little work."""
    nodes = [3, 20, 40]
    case = Case([10] * 3, nodes, heads=4, seed=5)
    record = {}
    case.check(*case.run(blocks=16, multiprocessors=1, record=record))
    assert len({block for block, _, _ in record["copies"]}) == 6


def bytes_from_memory(copies, steps=1):
    """(read from memory, copied at all, distinct). A read comes from memory if no block has copied the same in the last
    ``steps`` steps.

    A step is one tile of a block: a model of blocks that run side by side at one pace, with a cache that holds little.
    """
    last_use, read = {}, 0
    for step, address in sorted((group, address) for _, group, address in copies):
        read += 16 * (step - last_use.get(address, -steps - 1) > steps)
        last_use[address] = step
    return read, 16 * len(copies), 16 * len(last_use)


@pytest.mark.parametrize(
    ("nodes", "group", "kv_heads", "blocks"),
    [([64], 4, 2, 12), ([64], 4, 2, 10), ([70], 6, 1, 28), ([64, 5, 20], 4, 1, 13)],
    ids=["4 tiles", "blocks left over", "7 tiles", "ragged"],
)
def test_tiles_of_rows_read_the_keys_of_their_head_in_step(nodes, group, kv_heads, blocks):
    """More than 64 rows to a key head: all of them read a key in the step in which it comes from memory, once."""
    case = Case([64 * 5] * len(nodes), nodes, heads=group * kv_heads, kv_heads=kv_heads)
    record = {}
    case.check(*case.run(blocks=blocks, record=record))
    read, copied, distinct = bytes_from_memory(record["copies"])
    assert copied > 2 * distinct  # every tile of rows does copy them
    assert read <= 1.05 * distinct


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("separate", [False, True], ids=["in the cache", "beside the cache"])
def test_hidden_values_may_be_anything_and_visible_values_show(value, dim, separate):
    """Node 2 holds `value` in K, node 3 in V; only rows 1 and 4 see node 2, rows 0 and 4 node 3."""
    case = Case([60], [6], dim, heads=4, kv_heads=2, separate=separate, seed=3)
    bits = [0b001011, 0b000111, 0b000011, 0b010011, 0b111111, 0b110011]
    case.visible[:, 0] = torch.tensor(bits)
    clean = case.run(blocks=1)[0]
    rows = slice(0, 6) if separate else slice(60, 66)
    k, v = (case.k_new, case.v_new) if separate else (case.k_cache[0], case.v_cache[0])
    k[rows][2, :, 5] = value
    v[rows][3, 1, 7] = value
    for blocks in (1, 2):
        out, lse = case.run(blocks=blocks)
        for row in (0, 2, 3, 5):
            expected = clean[row].clone()
            if row == 0:
                assert not out[0, 2:, 7].isfinite().any()
                expected[2:, 7] = out[0, 2:, 7]
                if value == value:
                    assert (out[0, 2:, 7] == value).all()
            assert out[row, out[row].isfinite()].numel() == expected.numel() - 2 * (row == 0)
            difference = (out[row] - expected).float().nan_to_num(0.0).abs().max()
            assert difference < 0.02
        assert not out[4, 2:, 7].isfinite().any()
        if value != value:
            assert out[1].isnan().all() and out[4].isnan().all() and lse[1].isnan().all()


def test_a_value_that_is_not_finite_costs_no_more_than_reading_its_tile_again():
    """The cost is not rows times keys: 64 rows, and all see it."""
    case = Case([80], [16], heads=4, seed=4)
    clean, dirty = {}, {}
    case.run(blocks=1, seed=0, record=clean)
    case.v_cache[0, 90, 0, 3] = torch.nan
    case.visible[:] = -1
    out = case.run(blocks=1, seed=0, record=dirty)[0]
    assert out[:, :, 3].isnan().all() and not out[:, :, :3].isnan().any() and not out[:, :, 4:].isnan().any()
    assert dirty["accesses"] < 1.25 * clean["accesses"]


def test_pages_that_are_not_there_read_as_zeros():
    case = Case([40], [2], page=16)
    case.block_table[0, 1] = -1
    case.block_table[0, 2] = 10**6
    case.keys[0][16:], case.values[0][16:] = 0, 0
    case.check(*case.run(blocks=1))


def test_lengths_and_bounds_are_cut_to_what_there_is():
    case = Case([20, 20], [3, 4], max_nodes=4)
    case.prefixes, case.bounds = [10**9, -5], [-3, 3, 10**9]
    out, lse = case.run(blocks=2)
    assert not out[3:].isnan().any()
    case.prefixes = [20, 20]
    case.bounds = [0, 3, 7]
    case.max_nodes = 2  # rows 2, 5 and 6 belong to no request
    out, lse = case.run(blocks=2)
    assert not out[[2, 5, 6]].any() and (lse[[2, 5, 6]] == NONE).all() and lse[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("requests", [0, 1, 200])
def test_empty_batches(requests):
    case = Case([5] * requests, [0] * requests, behind=3, heads=2)
    out, lse = case.run(blocks=3)
    assert not out.any() and (lse == NONE).all()


def test_more_requests_than_a_block_has_threads():
    case = Case([3] * 300, [int(b % 3 == 0) for b in range(300)], seed=1)
    case.check(*case.run(blocks=5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dim", [3, 16, 80])
def test_merge(dtype, dim):
    random = torch.Generator().manual_seed(dim)
    out_a, out_b = (torch.randn(2, 5, dim, generator=random).to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(2, 5, generator=random) * 4 for _ in range(2))
    lse_a[0, 1] = lse_b[0, 1] = lse_a[0, 2] = lse_b[0, 3] = NONE
    out_a[0, 1:3] = out_b[0, 1] = out_b[0, 3] = torch.nan  # where nothing was seen
    out, lse = attention_merge(out_a, lse_a, out_b, lse_b)
    exact_lse = torch.logaddexp(lse_a.double(), lse_b.double())
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-6)
    weights = [torch.nan_to_num((side.double() - exact_lse).exp()) for side in (lse_a, lse_b)]
    exact = sum(w[..., None] * o.double().nan_to_num(0.0) for w, o in zip(weights, (out_a, out_b), strict=True))
    assert ((out.double() - exact).abs() <= ROUNDING[dtype] * exact.abs() + 1e-6).all()
    assert not out[0, 1].any() and torch.equal(out[0, 2], out_b[0, 2]) and torch.equal(out[0, 3], out_a[0, 3])


# ---- real grids, streams, graphs: beyond the emulator ----


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("nodes", [3, 40], ids=["one tile", "many tiles"])
def test_long_prefixes_on_a_real_grid(cuda, dim, nodes):
    case = Case([6000, 17, 0, 2500], [nodes, 1, 0, nodes], dim, 8, 2, page=16, behind=3, seed=dim + nodes)
    op, arguments = case.on(cuda.device)
    first = op(*arguments)
    case.check(*(t.cpu() for t in first))
    for _ in range(20):
        again = op(*arguments)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


def test_streams_run_side_by_side(cuda):
    case = Case([4000], [5], heads=4, kv_heads=2)
    op, arguments = case.on(cuda.device)
    expected = op(*arguments)[0]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    for _, stream in itertools.product(range(50), streams):
        with torch.cuda.stream(stream):
            results.append(op(*arguments)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


def test_graphs_take_new_lengths_and_run_beside_eager_calls(cuda):
    case = Case([3000], [6], heads=4, kv_heads=2)
    op, arguments = case.on(cuda.device)
    graphs = []
    for _ in range(6):  # some of them dropped
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers = [op(*arguments) for _ in range(3)]
        graphs = [*graphs[-2:], (graph, layers)]
    for prefix in (3000, 64, 1, 2999):
        arguments[3].fill_(prefix)
        expected = op(*arguments)
        for graph, layers in graphs:
            graph.replay()
            eager = op(*arguments)
            for out, lse in (*layers, eager):
                assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_compiled_with_graphs(cuda):
    case = Case([500], [4], heads=2)
    op, arguments = case.on(cuda.device)
    compiled = torch.compile(lambda q, *rest: op(q, *rest)[0] + 1, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*arguments).clone()
    assert torch.equal(out, op(*arguments)[0] + 1)


def test_rows_that_cannot_be_copied_16_bytes_at_a_time_are_refused(cuda):
    case = Case([20], [2], heads=2, kv_heads=2)
    op, arguments = case.on(cuda.device)
    padded = torch.zeros(*case.k_cache.shape[:3], 68, dtype=case.k_cache.dtype, device=cuda.device)
    with pytest.raises(RuntimeError, match="k_cache must have strides that are multiples of 8"):
        op(arguments[0], padded[..., :64], *arguments[2:])
    with pytest.raises(RuntimeError, match="v_cache must start at a multiple of 16 bytes"):
        op(*arguments[:2], torch.zeros_like(padded[..., :72])[..., 4:68], *arguments[3:])
