"""The error messages of attention_tree: each check of its arguments, and on the CPU of the numbers in them."""

import math
import re

import pytest
import torch
from attention_cases import UNALIGNED
from attention_checks import solved
from support.paths import ROOT
from support.steps import to

import pass_ext
from pass_ext.ops.attention import HEAD_DIMS, TWO_WIDTHS

DENSE, PAGED = dict(window=50), dict(window=50, layout="paged 16", new=True)  # needs 12 slots; and 9 in pages of 16


def case_of(options):
    """Two requests of 3 and 4 nodes after 5 and 9 tokens: q [7, 4, 64], 2 key heads."""
    return solved([5, 9], [3, 4], **options)[0]


def integers(*values):
    return torch.tensor(values, dtype=torch.int32)


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def test_the_head_sizes_are_those_of_the_kernels():
    header = ROOT / "csrc" / "core" / "attention.h"
    (sizes,) = re.findall(r"constexpr int32_t kHeadDims\[\] = \{([\d, ]+)\};", header.read_text())
    assert tuple(map(int, sizes.split(", "))) == HEAD_DIMS
    tiles = (ROOT / "csrc" / "cuda" / "attention_tile.cuh").read_text()
    (widths,) = re.findall(r"constexpr int32_t kWideKeyDim = (\d+), kNarrowValueDim = (\d+);", tiles)
    assert tuple(map(int, widths)) == TWO_WIDTHS


SHAPES = [
    (DENSE, {"q": zeros(7, 4, 64).double()}, r"q must be bfloat16, float16 or float32, got float64\[7, 4, 64\]"),
    (DENSE, {"q": zeros(28, 64)}, r"q must have shape \[N, Hq, D\], got bfloat16\[28, 64\]"),
    (
        DENSE,
        {"q": zeros(7, 4, 72)},
        r"q must have a head size that is a multiple of 16, at most 576, got .*\[7, 4, 72\]",
    ),
    (DENSE, {"q": zeros(7, 4, 592)}, r"q must have a head size that is a multiple of 16, at most 576, got"),
    (DENSE, {"q": zeros(7, 4, 0)}, r"q must have a head size that is a multiple of 16, at most 576, got"),
    (DENSE, {"q": zeros(7, 3, 64)}, r"q must have a multiple of the 2 heads of k_cache, got bfloat16\[7, 3, 64\]"),
    (DENSE, {"max_nodes": 0}, r"max_nodes must be in \[1, 1024\], got 0"),
    (DENSE, {"max_nodes": 1025}, r"max_nodes must be in \[1, 1024\], got 1025"),
    (DENSE, {"k_cache": zeros(2, 13, 2, 64).half()}, r"k_cache must be bfloat16, got float16\[2, 13, 2, 64\]"),
    (DENSE, {"v_cache": zeros(2, 13, 2, 64).float()}, r"v_cache must be bfloat16, got float32\[2, 13, 2, 64\]"),
    (DENSE, {"k_cache": zeros(2, 13, 64)}, r"k_cache must have shape \[B, S, Hkv, D\], got bfloat16\[2, 13, 64\]"),
    (
        PAGED,
        {"k_cache": zeros(5, 16, 64)},
        r"k_cache must have shape \[pages, page, Hkv, D\], got bfloat16\[5, 16, 64\]",
    ),
    (DENSE, {"k_cache": zeros(2, 13, 2, 80)}, r"k_cache must have 64 \(q's head size D\) in dimension 3"),
    (DENSE, {"v_cache": zeros(2, 13, 2, 72)}, r"v_cache must have a head size that is a multiple of 16, at most 512"),
    (DENSE, {"v_cache": zeros(2, 13, 2, 528)}, r"v_cache must have a head size that is a multiple of 16, at most 512"),
    (DENSE, {"k_cache": zeros(2, 13, 64, 2).transpose(2, 3)}, r"k_cache must be contiguous in its last dimension"),
    (DENSE, {"v_cache": zeros(2, 13, 64, 2).transpose(2, 3)}, r"v_cache must be contiguous in its last dimension"),
    (DENSE, {"v_cache": zeros(2, 14, 2, 64)}, r"v_cache must have 13 \(as k_cache\) in dimension 1"),
    (DENSE, {"v_cache": zeros(2, 13, 1, 64)}, r"v_cache must have 2 \(as k_cache\) in dimension 2"),
    (DENSE, {"k_cache": zeros(2, 13, 0, 64), "v_cache": zeros(2, 13, 0, 64)}, r"q must have a multiple of the 0 heads"),
    (
        DENSE,
        {"k_cache": zeros(3, 13, 2, 64), "v_cache": zeros(3, 13, 2, 64)},
        r"k_cache must have 2 \(the requests of cu_nodes",
    ),
    (
        PAGED,
        {"k_cache": zeros(5, 0, 2, 64), "v_cache": zeros(5, 0, 2, 64)},
        r"k_cache must have pages of at least 1 slot",
    ),
    (PAGED, {"k_new": None}, r"k_new and v_new must come together, got only v_new"),
    (PAGED, {"v_new": None}, r"k_new and v_new must come together, got only k_new"),
    (PAGED, {"k_new": zeros(7, 2, 64).half()}, r"k_new must be bfloat16, got float16\[7, 2, 64\]"),
    (PAGED, {"v_new": zeros(7, 128)}, r"v_new must have shape \[N, Hkv, D\], got bfloat16\[7, 128\]"),
    (PAGED, {"k_new": zeros(8, 2, 64)}, r"k_new must have 7 \(the packed nodes of q\) in dimension 0"),
    (PAGED, {"v_new": zeros(7, 4, 64)}, r"v_new must have 2 \(the heads of k_cache\) in dimension 1"),
    (PAGED, {"v_new": zeros(7, 2, 80)}, r"v_new must have 64 \(the width of its cache\) in dimension 2"),
    (PAGED, {"k_new": zeros(7, 64, 2).transpose(1, 2)}, r"k_new must be contiguous in its last dimension"),
    (DENSE, {"cu_nodes": torch.tensor([0.0, 3.0, 7.0])}, r"cu_nodes must be int32, got float32\[3\]"),
    (DENSE, {"cu_nodes": integers([0, 3, 7])}, r"cu_nodes must have shape \[n\], one number each, got int32\[1, 3\]"),
    (DENSE, {"cu_nodes": integers()}, r"cu_nodes must have shape \[B \+ 1\], got int32\[0\]"),
    (
        DENSE,
        {"cu_nodes": integers(0, 0, 3, 3, 7, 7)[::2]},
        r"cu_nodes must be contiguous, got int32\[3\] on .* with stride 2",
    ),
    (DENSE, {"prefix_lens": torch.tensor([5.0, 9.0])}, r"prefix_lens must be int32, got float32\[2\]"),
    (DENSE, {"prefix_lens": integers(5)}, r"prefix_lens must have 2 \(the requests of cu_nodes\) in dimension 0"),
    (DENSE, {"prefix_lens": integers(5, 5, 9, 9)[::2]}, r"prefix_lens must be contiguous"),
    (DENSE, {"visible": zeros(7, 1).int()}, r"visible must be int64, got int32\[7, 1\]"),
    (DENSE, {"visible": zeros(7).long()}, r"visible must have shape \[N, ceil\(max_nodes / 64\)\]"),
    (DENSE, {"visible": zeros(6, 1).long()}, r"visible must have 7 \(the packed nodes\) in dimension 0"),
    (DENSE, {"visible": zeros(7, 2).long()}, r"visible must have 1 \(ceil\(max_nodes / 64\)\) in dimension 1"),
    (DENSE, {"max_nodes": 65}, r"visible must have 2 \(ceil\(max_nodes / 64\)\) in dimension 1"),
    (DENSE, {"visible": zeros(2, 7).long().t(), "max_nodes": 65}, r"visible must be contiguous in its last"),
    (PAGED, {"block_table": torch.zeros(2, 3)}, r"block_table must be int32, got float32\[2, 3\]"),
    (
        PAGED,
        {"block_table": integers(0, 1)},
        r"block_table must have shape \[B, pages of one request\], got int32\[2\]",
    ),
    (PAGED, {"block_table": zeros(3, 3).int()}, r"block_table must have 2 \(the requests of cu_nodes\)"),
    (PAGED, {"block_table": zeros(3, 2).int().t()}, r"block_table must be contiguous in its last dimension"),
    (PAGED, {"block_table": zeros(2, 0).int()}, r"block_table must have at least 1 page for each request"),
    (DENSE, {"window": 0}, "window must be positive, or -1 for none, got 0"),
    (DENSE, {"window": -2}, "window must be positive, or -1 for none, got -2"),
    (DENSE, {"window": 2**31}, "window must be positive, or -1 for none, got 2147483648"),
    (DENSE, {"chunk": 0}, "chunk must be positive, or -1 for none, got 0"),
    (DENSE, {"chunk": 2**31}, "chunk must be positive, or -1 for none, got 2147483648"),
    ({}, {"chunk": 8}, r"depths must be given with a chunk \(tree_prepare makes them\), got None"),
    (DENSE, {"depths": None}, r"depths must be given with a window \(tree_prepare makes them\), got None"),
    (DENSE, {"depths": torch.zeros(7)}, r"depths must be int32, got float32\[7\]"),
    (DENSE, {"depths": integers(0, 0)}, r"depths must have 7 \(the packed nodes of q\) in dimension 0"),
    (DENSE, {"softcap": -1.0}, "softcap must be positive in float32, or 0 for none, got -1"),
    (DENSE, {"softcap": math.inf}, "softcap must be positive in float32, or 0 for none, got inf"),
    (DENSE, {"softcap": math.nan}, "softcap must be positive in float32, or 0 for none, got nan"),
    (DENSE, {"softcap": 1e39}, "softcap must be positive in float32, or 0 for none, got 1e.39"),
    (DENSE, {"softcap": 1e-50}, "softcap must be positive in float32, or 0 for none, got 1e-50"),
    (DENSE, {"sinks": torch.zeros(4).int()}, r"sinks must be float32, got int32\[4\]"),
    (DENSE, {"sinks": torch.zeros(1, 4)}, r"sinks must have shape \[Hq\], got float32\[1, 4\]"),
    (DENSE, {"sinks": torch.zeros(2)}, r"sinks must have 4 \(q's heads\) in dimension 0, got float32\[2\]"),
    (DENSE, {"sinks": torch.zeros(8)[::2]}, r"sinks must be contiguous in its last dimension"),
    (DENSE, {"key_lists": torch.zeros(7, 3)}, r"key_lists must be int32, got float32\[7, 3\]"),
    (DENSE, {"key_lists": integers(0, 0)}, r"key_lists must have shape \[N, keys of a row\], got int32\[2\]"),
    (DENSE, {"key_lists": zeros(6, 3).int()}, r"key_lists must have 7 \(the packed nodes of q\) in dimension 0"),
    (DENSE, {"key_lists": zeros(7, 0).int()}, r"key_lists must have room for at least 1 key, got int32\[7, 0\]"),
    (DENSE, {"key_lists": zeros(3, 7).int().t()}, r"key_lists must be contiguous in its last dimension"),
    (DENSE, {"scale": math.nan}, "scale must be finite, got nan"),
    (DENSE, {"scale": 1e300}, "scale must be finite, got inf"),
]

# Values are checked on the CPU alone: on a GPU that would need a synchronisation.
ROOM = r"k_cache must have room for the prefix and the nodes of every request, got 13 slots, but request "
PAGES = r"block_table must have room for the prefix of every request, got "
BOUNDS = r"cu_nodes must rise from 0 to at most 7 \(the packed nodes\), got "
LISTED = r"key_lists must name keys in \[0, "


def listed(row, keys):
    """Lists of the first keys, but for one row."""
    lists = torch.tensor([[0, 1, -1]]).repeat(7, 1).int()
    lists[row] = integers(*keys)
    return lists


VALUES = [
    (DENSE, {"prefix_lens": integers(5, 10)}, ROOM + "1 has prefix_lens 10 and 4 nodes"),
    (DENSE, {"prefix_lens": integers(-1, 9)}, ROOM + "0 has prefix_lens -1 and 3 nodes"),
    (DENSE, {"prefix_lens": integers(2**31 - 1, 9)}, ROOM + "0 has prefix_lens 2147483647 and 3 nodes"),
    (PAGED, {"prefix_lens": integers(5, 49)}, PAGES + "48 slots, but request 1 has prefix_lens 49 and 4 nodes"),
    (PAGED, {"block_table": zeros(2, 1).int(), "prefix_lens": integers(5, 17)}, PAGES + "16 slots, but request 1"),
    (DENSE, {"cu_nodes": integers(0, 3, 8)}, BOUNDS + "3 and 8 at 1"),
    (DENSE, {"cu_nodes": integers(0, 4, 3)}, BOUNDS + "4 and 3 at 1"),
    (DENSE, {"cu_nodes": integers(-1, 3, 7)}, BOUNDS + "-1 and 3 at 0"),
    (DENSE, {"max_nodes": 3}, "max_nodes must be at least the nodes of every request, got 3, but request 1 has 4"),
    (
        PAGED,
        {"block_table": integers([0, 1], [5, 1])},
        r"block_table must name pages in \[0, 5\) .* request 1, got 5 at 0",
    ),
    (
        PAGED,
        {"block_table": integers([-1, 1], [0, 1])},
        r"block_table must name pages in \[0, 5\) .* request 0, got -1 at 0",
    ),
    (
        DENSE,
        {"depths": integers(0, 1, 3, 0, 1, 1, 1)},
        r"depths must be in \[0, 3\) \(the nodes of request 0\), got 3 at 2",
    ),
    (
        DENSE,
        {"depths": integers(0, 1, 1, 0, -1, 1, 1)},
        r"depths must be in \[0, 4\) \(the nodes of request 1\), got -1 at 4",
    ),
    (DENSE, {"key_lists": listed(2, [0, 3, 3])}, LISTED + r"8\) .* then be -1, got 3 after 3 at row 2, 2"),
    (DENSE, {"key_lists": listed(4, [5, 4, -1])}, LISTED + r"13\) .* of request 1\) .* got 4 after 5 at row 4, 1"),
    (DENSE, {"key_lists": listed(0, [0, 8, -1])}, LISTED + r"8\) .* got 8 after 0 at row 0, 1"),
    (DENSE, {"key_lists": listed(6, [-2, -1, -1])}, LISTED + r"13\) .* got -2 at row 6, 0"),
    (DENSE, {"key_lists": listed(6, [-1, 1, -1])}, LISTED + r"13\) .* got 1 after -1 at row 6, 1"),
]


def assert_refused(device, options, change, message):
    case = case_of(options)
    pass_ext.attention_tree(**to(case, device))  # the case is right without the change
    with pytest.raises(RuntimeError, match="pass_ext::attention_tree: .*" + message):
        pass_ext.attention_tree(**to(case | change, device))


@pytest.mark.quick_on("best")
@pytest.mark.parametrize(("options", "change", "message"), SHAPES, ids=[m[:32] for _, _, m in SHAPES])
def test_bad_input_is_refused_in_words(backend, options, change, message):
    assert_refused(backend.device, options, change, message)


@pytest.mark.quick_on("best")
@pytest.mark.parametrize(
    ("options", "change", "message"), VALUES, ids=[f"{i} {m[:24]}" for i, (_, _, m) in enumerate(VALUES)]
)
def test_numbers_that_do_not_fit_are_refused_on_the_cpu(backend, options, change, message):
    if not backend.name.startswith("cpu"):
        pytest.skip("a GPU clamps them; with set_debug(True) it checks them")
    assert_refused(backend.device, options, change, message)


def test_unused_numbers_are_not_checked(backend):
    """Numbers of padded requests and of rows without a request, and table entries after the last slot in use."""
    case, _ = solved([5, 9, 7], [3, 4, 0], layout="paged 16", window=50, spare=2)
    pass_ext.attention_tree(**to(case, backend.device))


def test_tensors_on_two_devices_are_refused(cuda):
    for options in (DENSE, PAGED):
        case = to(case_of(options), cuda.device)
        for name, value in case.items():
            if isinstance(value, torch.Tensor) and name != "q":
                with pytest.raises(RuntimeError, match=f"{name} must be on the device of q"):
                    pass_ext.attention_tree(**case | {name: value.cpu()})


def test_addresses_that_16_bytes_do_not_divide_are_refused_on_a_gpu(backend):
    """Only in 16 bits: rows are copied 16 bytes at a time."""
    if backend.name.startswith("cpu"):
        pytest.skip("the CPU reads rows at any address")
    case = case_of(dict(layout=UNALIGNED))
    with pytest.raises(RuntimeError, match=r"k_cache must (start at a multiple|have strides that are multiples) of"):
        pass_ext.attention_tree(**to(case, backend.device))
