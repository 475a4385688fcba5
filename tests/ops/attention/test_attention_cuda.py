"""Parts that only the CUDA kernels of attention have: shares of a grid, the parts of blocks and their sum, copies in step.

On the emulator, so small; test_attention.py and test_attention_masks.py run it on every kind of case.
"""

import emulator
import pytest
import torch
from attention_cases import BITS, attention_case
from attention_checks import UNIT, assert_right, assert_same_runs, run_and_record, run_on_gpu
from support.steps import to

import pass_ext
from pass_ext.reference.attention import attention_terms


def check(case, **gpu):
    """The kernels' result of a case on such a GPU, which is right."""
    result = run_on_gpu(case, **gpu)
    assert_right(result, case, attention_terms(**case))
    return result


def copies_of(case, **gpu):
    """The kernels' copies; their result is right."""
    result, copies = run_and_record(case, **gpu)
    assert_right(result, case, attention_terms(**case))
    return copies


@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("blocks", [1, 3, 7, 16])
def test_ragged_batches_on_any_grid(group, blocks):
    """Padded requests, an empty prefix, more nodes than a word has bits, and rows without a request."""
    check(attention_case([0, 33, 130, 64], [1, 0, 70, 6], heads=(2, group), spare=2, mask=BITS), multiprocessors=blocks)


def test_the_grid_changes_rounding_only_and_the_order_of_threads_nothing():
    case = attention_case([300, 0, 70], [9, 2, 20], heads=(2, 2))
    results = {}
    for blocks in (1, 3, 7, 16):
        results[blocks] = run_on_gpu(case, multiprocessors=blocks, seed=0)
        for seed in (1, 2):
            assert_same_runs(run_on_gpu(case, multiprocessors=blocks, seed=seed), results[blocks])
    magnitude = attention_terms(**case).magnitude
    for out, lse in results.values():
        assert ((out - results[1][0]).double().abs() <= 2 * UNIT[out.dtype] * magnitude).all()
        torch.testing.assert_close(lse, results[1][1], atol=2e-5, rtol=1e-6)


def test_a_batch_of_all_sizes_longer_than_a_block_has_threads():
    """Requests of one and of three tiles of rows, the larger ones far apart; and many that are padded."""
    sizes = [(b % 16 == 0) + 39 * (b in (2, 135)) for b in range(140)]
    check(attention_case([3] * 140, sizes, heads=(1, 4)), multiprocessors=11)
    check(attention_case([3] * 300, [int(b % 3 == 0) for b in range(300)]), multiprocessors=5)


@pytest.mark.parametrize(
    ("members", "nodes", "group"),
    [(2, 3, 1), (8, 3, 1), (9, 3, 1), (20, 3, 1), (80, 3, 1), (8, 16, 4), (9, 5, 5), (12, 15, 4)],
)
def test_a_unit_that_many_blocks_share(members, nodes, group):
    """Eight threads share a column and have nine parts each on their way: some have none, and 80 members are more."""
    case = attention_case([128 * members - nodes], [nodes], heads=(1, group))
    first = check(case, multiprocessors=members, seed=1)
    for seed in (2, 3):
        assert_same_runs(run_on_gpu(case, multiprocessors=members, seed=seed), first)


def busy_blocks(case, **gpu):
    return len({block for block, _, _ in copies_of(case, **gpu)})


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(
    ("members", "nodes", "group"), [(5, 3, 1), (19, 16, 1), (10, 13, 3), (4, 5, 4)],
    ids=["some of 16 rows", "16 rows", "some of 64 rows", "few of 64 rows"],
)  # fmt: skip
def test_every_kernel_merges_the_parts_of_blocks(dim, members, nodes, group):
    """Two to eight threads share a column; at 256 columns 19 members are more than two have on their way. Values of keys of
    192 have 128."""
    tile, value_dim = 64 if dim <= 128 else 32, 128 if dim == 192 else dim
    case = attention_case([2 * tile * members - nodes], [nodes], dim=dim, value_dim=value_dim, heads=(1, group))
    assert busy_blocks(case, multiprocessors=members, seed=1) == members


def test_parts_of_very_different_weight_are_merged():
    """The largest score lies in one block's part, and all others weigh nothing beside it."""
    for place in (0, 300, 1130):
        case = attention_case([128 * 9 - 16], [16], heads=(1, 4), mask=BITS)
        case["k_cache"][0, place] = 20 * case["q"][3, 1]
        check(case, multiprocessors=9)


@pytest.mark.parametrize(
    ("tiles", "busy"), [([8], 4), ([32], 8), ([48], 12), ([200], 16), ([20, 12], 8)],
    ids=["fewest tiles", "one a multiprocessor", "between", "all", "two requests"],
)  # fmt: skip
def test_short_shares_go_to_one_block_of_a_multiprocessor(tiles, busy):
    """16 blocks fit on 8 multiprocessors: a block has two tiles at least, and more blocks than 8 have four each."""
    case = attention_case([64 * count - 3 for count in tiles], [3] * len(tiles), heads=(1, 2))
    assert busy_blocks(case, multiprocessors=8, resident_blocks=2) == busy


def test_a_team_of_every_size_stays_on_few_multiprocessors():
    """Requests of one to three tiles of rows need six blocks, though one multiprocessor would do for so little work."""
    assert busy_blocks(attention_case([10] * 3, [3, 20, 40], heads=(1, 4)), multiprocessors=1, resident_blocks=16) == 6


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
    case = attention_case([64 * 5] * len(nodes), nodes, heads=(kv_heads, group))
    read, copied, distinct = bytes_from_memory(copies_of(case, multiprocessors=blocks))
    assert copied > 2 * distinct  # every tile of rows does copy them
    assert read <= 1.05 * distinct


def test_a_value_that_is_not_finite_costs_no_more_than_reading_its_tile_again():
    """The cost is not rows times keys: 64 rows, and all see it."""
    case = attention_case([80], [16], heads=(1, 4))
    run_on_gpu(case, multiprocessors=1, seed=0)
    clean = emulator.load().count_accesses()
    case["v_cache"][0, 90, 0, 3] = torch.nan
    case["visible"][:] = -1
    out, _ = run_on_gpu(case, multiprocessors=1, seed=0)
    assert out[:, :, 3].isnan().all() and not out[:, :, :3].isnan().any() and not out[:, :, 4:].isnan().any()
    assert emulator.load().count_accesses() < 1.25 * clean


def test_pages_that_are_not_there_read_as_zeros():
    case = attention_case([40], [2], layout="paged 16")
    gone = case | {"block_table": case["block_table"].clone()}
    gone["block_table"][0, 1:3] = torch.tensor([-1, 10**6])
    for cache in (case["k_cache"], case["v_cache"]):
        cache[case["block_table"][0, 1:3]] = 0
    assert_right(run_on_gpu(gone, multiprocessors=1), case, attention_terms(**case))


def test_rows_that_cannot_be_copied_16_bytes_at_a_time_are_refused(backend):
    if backend.name.startswith("cpu"):
        pytest.skip("the CPU reads rows at any address")
    case = to(attention_case([20], [2]), backend.device)
    padded = torch.zeros(*case["k_cache"].shape[:3], 72, dtype=torch.bfloat16, device=backend.device)
    with pytest.raises(RuntimeError, match="k_cache must have strides that are multiples of 8"):
        pass_ext.attention_tree(**case | {"k_cache": padded[..., :68].contiguous()[..., :64]})
    with pytest.raises(RuntimeError, match="v_cache must start at a multiple of 16 bytes"):
        pass_ext.attention_tree(**case | {"v_cache": padded[..., 4:68]})


# ---- real grids, streams, graphs: beyond the emulator ----


def on_gpu(cuda, *arguments, **options):
    case = attention_case(*arguments, **options)
    return case, to(case, cuda.device)


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("nodes", [3, 40], ids=["one tile", "many tiles"])
def test_long_prefixes_on_a_real_grid(cuda, dim, nodes):
    case, moved = on_gpu(
        cuda, [6000, 17, 0, 2500], [nodes, 1, 0, nodes], dim=dim, heads=(2, 4), layout="paged 16", spare=3
    )
    first = pass_ext.attention_tree(**moved)
    assert_right(tuple(tensor.cpu() for tensor in first), case, attention_terms(**case))
    for _ in range(20):
        assert_same_runs(pass_ext.attention_tree(**moved), first)


def test_streams_run_side_by_side(cuda):
    _, case = on_gpu(cuda, [4000], [5])
    expected = pass_ext.attention_tree(**case)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    for stream in 50 * streams:
        with torch.cuda.stream(stream):
            results.append(pass_ext.attention_tree(**case))
    torch.cuda.synchronize()
    for result in results:
        assert_same_runs(result, expected)


def test_graphs_take_new_lengths_and_run_beside_eager_calls(cuda):
    _, case = on_gpu(cuda, [3000], [6])
    graphs = []
    for _ in range(6):  # some of them dropped
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers = [pass_ext.attention_tree(**case) for _ in range(3)]
        graphs = [*graphs[-2:], (graph, layers)]
    for prefix in (3000, 64, 1, 2999):
        case["prefix_lens"].fill_(prefix)
        expected = pass_ext.attention_tree(**case)
        for graph, layers in graphs:
            graph.replay()
            for result in (*layers, pass_ext.attention_tree(**case)):
                assert_same_runs(result, expected)


def test_compiled_with_graphs(cuda):
    _, case = on_gpu(cuda, [500], [4])
    compiled = torch.compile(
        lambda case: pass_ext.attention_tree(**case)[0] + 1, mode="reduce-overhead", fullgraph=True
    )
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(case).clone()
    assert torch.equal(out, pass_ext.attention_tree(**case)[0] + 1)
