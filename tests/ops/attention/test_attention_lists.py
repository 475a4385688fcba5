"""attention_tree with a list of keys for each row: the row sees no other, and its bits are those of its list."""

import pytest
import torch
from attention_cases import BITS, CHAIN, MASKS, UNIFORM, attention_case
from attention_checks import FLOATS, assert_right, assert_same_runs, check, is_small, run, runs, sized, solved
from support.steps import to

import pass_ext
from pass_ext.reference.attention import attention_mask, attention_terms


def is_cpu(backend):
    return backend.name.startswith("cpu")


@pytest.mark.by_tiles
@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("listed", [0.0, 0.1, 0.7, 1.0])
def test_a_row_sees_what_its_list_names(backend, dtype, listed):
    """All other keys are poison, as far as no other row's list names them."""
    prefixes, sizes = sized(backend, ([70, 0], [5, 3]), ([70, 0, 9, 600], [5, 0, 3, 33]))
    for options in sized(
        backend,
        [{}, dict(layout="paged 3", sinks=True, spare=3)],
        [{}, dict(layout="paged 3", sinks=True, spare=3), dict(softcap=20.0, window=9), dict(chunk=16, layout="gaps")],
    ):
        for new in (False, True):
            check(backend, prefixes, sizes, dtype=dtype, listed=listed, new=new, mask=BITS, heads=(2, 3), **options)


@pytest.mark.parametrize("mask", MASKS)
def test_lists_beside_the_bits(backend, mask):
    """A list names nodes that the row's bits hide, too: they stay hidden."""
    for new in sized(backend, [True], [False, True]):
        check(backend, [20, 3], [9, 30], mask=mask, listed=0.5, new=new, spare=2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_latent_for_keys_and_values(backend, dtype):
    if is_small(backend) and dtype != torch.bfloat16:
        pytest.skip("minutes")
    prefixes, heads = sized(backend, ([40], (1, 2)), ([700], (1, 16)))
    case, _ = solved(prefixes, [4], heads=heads, dim=576, value_dim=512, dtype=dtype, new=True, listed=0.3)
    views = {f"v_{name}": case[f"k_{name}"][..., :512] for name in ("cache", "new")}
    assert_right(run(backend, case | views), case | views, attention_terms(**case | views))


def test_lists_of_nothing(backend):
    case, _ = solved([30, 5], [4, 2], listed=0.0, sinks=True)
    out, lse = run(backend, case)
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.by_tiles
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_list_of_all_that_a_row_sees_changes_no_bit(backend, dtype):
    """On a GPU beside the same kernel without lists."""
    for prefix in sized(backend, (37, 130), (0, 37, 62, 64, 509, 1020)):
        for layout in ("rows", "paged 16"):
            options = dict(dtype=dtype, mask=CHAIN, heads=(1, 3), layout=layout, new=layout == "rows", seed=prefix)
            case = attention_case([prefix, 5], [11, 2], **options) | {"batch_invariant": True}
            keys = torch.arange(prefix + 11, dtype=torch.int32).repeat(13, 1)
            keys[11:, 7:] = -1
            assert_same_runs(run(backend, case), run(backend, case | {"key_lists": keys}))


@pytest.mark.by_tiles
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mask", [CHAIN, UNIFORM])
def test_a_row_of_a_tree_has_the_bits_of_a_row_alone(backend, dtype, mask):
    """Its path in the cache, and its list naming the same tokens there. On a GPU too: a warp has the whole list."""
    for prefix in sized(backend, [37], [0, 37, 61, 64, 700]):
        case = attention_case(
            [9, prefix], [3, 9], dtype=dtype, mask=mask, new=True, heads=(1, 3), listed=0.6, seed=prefix
        )
        bits = attention_mask(0, case["visible"][3:])[:, :9]
        together = run(backend, case)
        for node in range(9):
            path = bits[node].nonzero().flatten()
            caches = {
                f"{name}_cache": torch.cat([case[f"{name}_cache"][1:, :prefix], case[f"{name}_new"][None, 3 + path]], 1)
                for name in "kv"
            }
            places = {prefix + int(ancestor): prefix + place for place, ancestor in enumerate(path)}
            keys = case["key_lists"][3 + node].tolist()
            keys = [places.get(key, key) for key in keys if key >= 0 and (key < prefix or key in places)]
            one = case | caches | {
                "q": case["q"][3 + node : 4 + node], "k_new": None, "v_new": None, "max_nodes": 1,
                "visible": torch.ones(1, 1).long(), "cu_nodes": torch.tensor([0, 1]).int(),
                "prefix_lens": torch.tensor([prefix + len(path) - 1]).int(),
                "key_lists": torch.tensor([[*keys, -1]], dtype=torch.int32),
            }  # fmt: skip
            alone = run(backend, one)
            if is_cpu(backend) or len(keys) == sum(case["key_lists"][3 + node] >= 0):  # hidden entries move the others
                assert_same_runs(alone, [x[3 + node : 4 + node] for x in together])


def test_the_same_call_again_has_the_same_bits(backend):
    case, _ = solved([300], [9], listed=0.5, heads=(1, 8))
    assert_same_runs(runs(backend, case), runs(backend, case))


def test_entries_that_name_nothing_are_left_out_on_a_gpu(backend):
    """The CPU refuses them."""
    if is_cpu(backend):
        pytest.skip("refused: test_attention_refusals.py")
    case, _ = solved([20, 9], [3, 2], mask=CHAIN, heads=(1, 2))
    good = [[1, 7, 21], [0, 2, 22], [5, -1, -1], [3, 8, -1], [0, 10, -1]]
    bad = [
        [1, 1, 7, 3, 21, 23],  # again, lower, after the last
        [-5, 0, 2, 2**31 - 1, 22, 22],
        [5, -1, -1, -(2**31), 100, -1],
        [-1, 3, 8, 11, 11, -1],
        [0, 0, 10, -1, -1, 11],
    ]
    good, bad = (torch.tensor(rows, dtype=torch.int32) for rows in (good, bad))
    expected = run(backend, case | {"key_lists": good})
    for ours, theirs in zip(run(backend, case | {"key_lists": bad}), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_lists_of_any_integer_type(backend):
    case, _ = solved([20], [3], listed=0.5)
    wide = case | {"key_lists": case["key_lists"].long()}
    assert_same_runs(run(backend, case), run(backend, wide))


def test_debug_mode_checks_lists_on_the_gpu(cuda, debug_mode):
    case = to(solved([30, 9], [3, 4], listed=0.5)[0], cuda.device)
    pass_ext.attention_tree(**case)
    for row, keys in ((2, [3, 3]), (2, [33, -1]), (4, [-2, -1]), (6, [-1, 3])):
        lists = torch.full((7, 2), -1, dtype=torch.int32, device=cuda.device)
        lists[row] = torch.tensor(keys)
        with pytest.raises(IndexError, match=rf"key_lists must name keys in .* at row {row}"):
            pass_ext.attention_tree(**case | {"key_lists": lists})
