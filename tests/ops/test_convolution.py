"""convolution_tree on every backend: against the reference and torch's convolution, and to the bit steps of one token."""

import math

import emulator
import pytest
import torch
from support.pairwise import pairwise
from support.recurrent_cases import (
    bounds_of,
    commit,
    int32,
    moved,
    packed,
    path_to,
    random_tree,
    skip_unless_values_are_read,
)
from torch.utils._python_dispatch import _disable_current_modes

from pass_ext import reference
from pass_ext.layers import convolution_tree, state_commit_
from pass_ext.testing import assert_error_within, assert_same_bits, cpu_backends

BEST_CPU = cpu_backends()[-1].name
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
CHANNELS = (1, 16, 37, 200)


def make_case(rows, channels, taps, dtype=torch.float32, *, slots=1, seed=0, device="cpu"):
    """x, weight, bias, states."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, channels), (channels, taps), (channels,), (slots, channels, taps - 1)
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]


def tree_on(backend, *tensors):
    return [tensor.to(backend.device) for tensor in tensors]


def doubled(tensors):
    return [None if x is None else x.double() for x in tensors]


@pytest.mark.sanitizer
@pytest.mark.parametrize(("dtype", "channels"), pairwise(FLOATS, CHANNELS, "best"))
@pytest.mark.parametrize("taps", [2, 3, 4, 8])
def test_values_are_as_close_to_exact_as_pytorchs(backend, dtype, channels, taps):
    sizes = [9, 0, 1, 240]
    x, weight, bias, states = make_case(sum(sizes), channels, taps, dtype, slots=4, device=backend.device)
    tree = tree_on(backend, packed(map(random_tree, sizes)), bounds_of(sizes))
    for own_bias in (bias, None):
        for activation in (None, "silu"):
            inputs = [x, weight, own_bias, states]
            out = convolution_tree(*inputs, *tree, activation=activation)
            plain = reference.convolution_tree(*inputs, *tree, activation=activation)
            exact = reference.convolution_tree(*doubled(inputs), *tree, activation=activation)
            assert out.dtype == dtype
            assert_error_within(out, plain, exact)


def test_a_chain_is_torchs_convolution(backend):
    x, weight, bias, states = make_case(11, 20, 4, device=backend.device)
    out = convolution_tree(x, weight, bias, states, *tree_on(backend, int32(range(-1, 10)), bounds_of([11])))
    whole = torch.cat([states[0], x.T], 1)[None]
    exact = torch.nn.functional.conv1d(whole.double(), weight.double()[:, None], bias.double(), groups=20)[0].T
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("taps", [2, 4])
def test_a_path_has_the_bits_of_steps_of_one_token(backend, dtype, taps):
    sizes = [13, 0, 24]
    trees = [random_tree(size, seed=3) for size in sizes]
    x, weight, bias, states = make_case(37, 21, taps, dtype, slots=3, device=backend.device)
    parents, cu_nodes = tree_on(backend, packed(trees), bounds_of(sizes))
    root, bounds, first, none = tree_on(backend, int32([-1]), bounds_of([1]), int32([[0]]), int32([0]))
    out = convolution_tree(x, weight, bias, states, parents, cu_nodes, activation="silu")
    for b in (0, 2):
        path = path_to(trees[b], sizes[b] - 1)
        state = states[b : b + 1].clone()
        for node in path:
            row = slice(int(cu_nodes[b]) + node, int(cu_nodes[b]) + node + 1)
            alone = convolution_tree(x[row], weight, bias, state, root, bounds, activation="silu")
            assert_same_bits(alone, out[row])
            state_commit_([state], [x[row]], bounds, first, none)
        committed = states.clone()
        commit([committed], [x], cu_nodes, [path if r == b else [] for r in range(3)])
        assert_same_bits(committed[b], state[0])


@pytest.mark.parametrize("poison", [math.nan, math.inf, 3e38], ids=str)
def test_rejected_branches_and_memory_that_nobody_owns_leave_no_trace(backend, poison):
    parents = random_tree(20, seed=5)
    path = path_to(parents, 19)
    x, weight, bias, states = make_case(26, 33, 4, slots=4, device=backend.device)
    rows = [3 + node for node in path]
    tree = tree_on(backend, int32([7, -9, 99, *parents, 5, 5, -7]), int32([3, 3, 23, 23]))
    index = int32([3, 2, 99], backend.device)
    clean = convolution_tree(x, weight, bias, states, *tree, state_index=index)
    x[[row for row in range(26) if row not in rows]] = poison
    states[[0, 1, 3]] = poison
    out = convolution_tree(x, weight, bias, states, *tree, state_index=index)
    assert_same_bits(out[rows], clean[rows])
    assert (out[:3] == 0).all() and (out[23:] == 0).all()


def test_states_and_rows_may_be_strided(backend):
    x, weight, bias, states = make_case(9, 24, 4, torch.bfloat16, slots=2, device=backend.device)
    tree = tree_on(backend, int32([*random_tree(4), *random_tree(5)]), bounds_of([4, 5]))
    expected = convolution_tree(x, weight, bias, states, *tree)
    wide = torch.full((9, 50), math.nan, device=backend.device).bfloat16()
    wide[:, 3:27] = x
    kept = torch.full((2, 24, 4), math.nan, device=backend.device).bfloat16()
    kept[..., 1:] = states
    turned = states.transpose(1, 2).contiguous().transpose(1, 2)
    pool = torch.full((5, 24, 3), math.nan, device=backend.device).bfloat16()
    pool[[4, 1]] = states
    assert_same_bits(convolution_tree(wide[:, 3:27], weight, bias, kept[..., 1:], *tree), expected)
    joined = torch.stack([weight, weight], -1)[..., 0]
    assert_same_bits(convolution_tree(x, joined, bias, turned, *tree), expected)
    index = torch.tensor([4, 1], device=backend.device)
    assert_same_bits(convolution_tree(x, weight, bias, pool, *tree, state_index=index), expected)


@pytest.mark.parametrize(("rows", "channels"), [(0, 8), (3, 0)])
def test_nothing_to_do(backend, rows, channels):
    case = make_case(rows, channels, 4, device=backend.device)
    out = convolution_tree(*case, *tree_on(backend, int32(random_tree(rows)), bounds_of([rows])))
    assert out.shape == (rows, channels)


# ---- refusals ----

x, weight, bias, states = make_case(5, 6, 4, slots=2)
GOOD = dict(
    x=x, weight=weight, bias=bias, states=states, parents=int32([-1, 0, 0, -1, 0]), cu_nodes=int32([0, 3, 5]),
    activation=None, state_index=None,
)  # fmt: skip
REFUSALS = [
    ({"x": x.double()}, r"x must be bfloat16, float16 or float32, got float64"),
    ({"x": x[0]}, r"x must have shape \[N, C\], got float32\[6\]"),
    ({"weight": weight.half()}, r"weight must be float32, got float16"),
    ({"weight": weight[:, None]}, r"weight must have shape \[C, K\], got float32\[6, 1, 4\]"),
    ({"weight": weight[:5]}, r"weight must have 6 \(the channels of x\) in dimension 0"),
    ({"weight": weight[:, :1]}, r"weight must have 2 to 8 \(K\) in dimension 1"),
    ({"weight": torch.zeros(6, 9)}, r"weight must have 2 to 8 \(K\) in dimension 1, got float32\[6, 9\]"),
    ({"bias": bias[:2]}, r"bias must have 6 \(the channels of x\)"),
    ({"bias": bias.half()}, r"bias must be float32"),
    ({"states": states.half()}, r"states must be float32, got float16"),
    ({"states": states[..., :2]}, r"states must have 3 \(K - 1, one less than weight has\) in dimension 2"),
    ({"states": states[:, :4]}, r"states must have 6 \(the channels of x\) in dimension 1"),
    ({"states": states[:1]}, r"states must have 2 \(the requests of cu_nodes; no state_index was given\)"),
    ({"parents": int32([-1])}, r"parents must have 5 \(the packed nodes\)"),
    ({"activation": "gelu"}, r"activation must be one of silu, got 'gelu'"),
]
VALUES = [
    ({"parents": int32([-1, 0, 2, -1, 0])}, r"parents must be -1 or an earlier node .*got 2 at flat index 2"),
    ({"cu_nodes": int32([0, 3, 6])}, r"cu_nodes must rise from 0 to at most 5"),
    ({"state_index": int32([0, 2])}, r"state_index must be in \[0, 2\) .*got 2 at 1"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[m[:40] for _, m in REFUSALS])
def test_bad_input_is_refused_in_words(backend, change, message):
    with pytest.raises((RuntimeError, ValueError), match="pass_ext::convolution_tree: .*" + message):
        convolution_tree(**moved(GOOD | change, backend.device))


@pytest.mark.parametrize(("change", "message"), VALUES, ids=[m[:40] for _, m in VALUES])
def test_values_out_of_range_are_refused(backend, change, message):
    skip_unless_values_are_read(backend)
    with pytest.raises((RuntimeError, ValueError), match="pass_ext::convolution_tree: .*" + message):
        convolution_tree(**moved(GOOD | change, backend.device))


# ---- CUDA ----


def test_bits_are_the_cpus_and_a_state_is_read_once(backend):
    if backend.name.startswith("cpu"):
        pytest.skip("about the CUDA kernels")
    sizes = [30, 0, 9]
    for channels, taps, dtype in ((200, 4, torch.bfloat16), (37, 2, torch.float32), (64, 8, torch.float16)):
        case, tree = make_case(39, channels, taps, dtype, slots=3), (packed(map(random_tree, sizes)), bounds_of(sizes))
        with _disable_current_modes():
            expected = convolution_tree(*case, *tree, activation="silu")
        out = convolution_tree(*moved((*case, *tree), backend.device), activation="silu")
        assert_same_bits(out, expected)
        if backend.name == "emulated":
            counted, size = emulator.load().count_bytes(), dtype.itemsize
            assert counted["states"] == (2 * channels * (taps - 1) * size, 0)
            assert counted["weight"] == (2 * channels * taps * size, 0)
            assert counted["output 0"] == (0, 39 * channels * size)


def test_malformed_trees_leave_other_requests_as_they_are(backend):
    if backend.name.startswith("cpu"):
        pytest.skip("the CPU refuses")
    sizes = [4, 6, 5]
    trees = [random_tree(size) for size in sizes]
    case = make_case(15, 20, 4, slots=3, device=backend.device)
    tree = tree_on(backend, packed(trees), bounds_of(sizes))
    clean, others = convolution_tree(*case, *tree), [*range(4), *range(10, 15)]
    for bad in (-(2**31), -9, 2, 5, 2**31 - 1):
        given = [*trees[0], *(bad if i == 2 else parent for i, parent in enumerate(trees[1])), *trees[2]]
        meant = [*given[:6], -1, *given[7:]]
        out = convolution_tree(*case, int32(given, backend.device), tree[1])
        assert_same_bits(out, convolution_tree(*case, int32(meant, backend.device), tree[1]))
        assert_same_bits(out[others], clean[others])
        index = int32([0, bad if bad != 2 else 3, 2], backend.device)
        out = convolution_tree(*case, *tree, state_index=index)
        assert (out[4:10] == 0).all()
        assert_same_bits(out[others], clean[others])
    for bounds in ([0, 9, 4, 15], [-1, 4, 8, 15], [0, 4, 10, 16]):
        assert (convolution_tree(*case, tree[0], int32(bounds, backend.device)) == 0).all()
