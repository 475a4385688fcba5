"""state_commit_ on every backend: against the reference; its bits are those of steps of one token, see test_recurrent.py and
test_convolution.py."""

import math

import emulator
import pytest
import torch
from support.recurrent_cases import DECAYS, Layer, bounds_of, commit, int32, moved, skip_unless_values_are_read

from pass_ext import reference
from pass_ext.layers import RecurrentUpdate, state_commit_
from pass_ext.testing import assert_error_within, assert_same_bits, cpu_backends

BEST_CPU = cpu_backends()[-1].name
SIZES = [6, 0, 9, 1]
PATHS = [[0, 2, 5], [], [0, 1, 3, 4, 8], [0]]


def model(device, dtype=torch.float32):
    """(states, updates) of layers of every kind."""
    rows, states, updates = sum(SIZES), [], []
    shapes = ((2, 4, 16, 32), (1, 1, 128, 128), (3, 3, 17, 16), (1, 5, 33, 47), (4, 4, 1, 100), (1, 2, 256, 7))
    for i, shape in enumerate(shapes):
        layer = Layer(rows, *shape, dtype=dtype, decay=DECAYS[i % 3], slots=4, seed=i)
        states.append(layer.states)
        updates.append(RecurrentUpdate(layer.k, layer.v.float(), layer.log_decay, layer.decay_rates))
    for channels, taps in ((24, 4), (5, 2), (64, 3)):
        generator = torch.Generator().manual_seed(channels)
        states.insert(1, torch.randn(4, channels, taps - 1, generator=generator).to(dtype))
        updates.insert(1, torch.randn(rows, channels, generator=generator).to(dtype))
    return moved((states, updates), device)


def step_on(device):
    width = max(map(len, PATHS))
    path = int32([[*nodes, *[-1] * (width - len(nodes))] for nodes in PATHS])
    return moved((bounds_of(SIZES), path, int32([max(0, len(nodes) - 1) for nodes in PATHS])), device)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_all_layers_in_one_call(backend, dtype, threads):
    states, updates = model(backend.device, dtype)
    before = [state.clone() for state in states]
    plain = [state.clone() for state in states]
    exact = [state.double() for state in states]
    step = step_on(backend.device)
    reference.state_commit_(plain, updates, *step)
    doubled = [
        update.double() if isinstance(update, torch.Tensor) else tuple(x if x is None else x.double() for x in update)
        for update in updates
    ]
    reference.state_commit_(exact, doubled, *step)
    count = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        state_commit_(states, updates, *step)
    finally:
        torch.set_num_threads(count)
    for own, first, near, truth in zip(states, before, plain, exact, strict=True):
        if own.dim() == 3:
            assert_same_bits(own, near)
        else:
            assert_error_within(own, near, truth)
        assert_same_bits(own[1], first[1])  # a request without nodes


def test_strides_and_pools(backend):
    """The same bits, and not a number written beside them."""
    states, updates = model(backend.device)
    expected = [state.clone() for state in states]
    step = step_on(backend.device)
    state_commit_(expected, updates, *step)
    turned = [state.transpose(-1, -2).clone(memory_format=torch.contiguous_format).mT for state in states]
    state_commit_(turned, updates, *step)
    wide = [torch.full((4, *(2 * n + 3 for n in state.shape[1:])), math.pi, device=backend.device) for state in states]
    parts = [
        w[(slice(None), *(slice(2, 2 + 2 * n, 2) for n in state.shape[1:]))].copy_(state)
        for w, state in zip(wide, states, strict=True)
    ]
    state_commit_(parts, updates, *step)
    pools = [torch.full((9, *state.shape[1:]), math.pi, device=backend.device) for state in states]
    slots = [7, 3, 0, 4]
    for pool, state in zip(pools, states, strict=True):
        pool[slots] = state
    state_commit_(pools, updates, *step, state_index=torch.tensor([7, -1, 0, 4], device=backend.device))
    for i, own in enumerate(expected):
        assert_same_bits(turned[i], own)
        assert_same_bits(parts[i], own)
        parts[i].fill_(math.pi)
        assert (wide[i] == torch.tensor(math.pi, device=backend.device)).all()
        assert_same_bits(pools[i][slots], own)
        assert (pools[i][[1, 2, 5, 6, 8]] == torch.tensor(math.pi, device=backend.device)).all()


def test_minus_one_is_skipped_and_counts_end_the_path(backend):
    layer = Layer(5, device=backend.device)
    update = RecurrentUpdate(layer.k, layer.v, layer.log_decay)
    x, kept = moved((torch.randn(5, 8), torch.randn(1, 8, 3)), backend.device)
    expected = layer.states.clone()
    ours, kept_too = layer.states.clone(), kept.clone()
    commit([expected, kept], [update, x], bounds_of([5]), [[0, 3]])
    step = moved((bounds_of([5]), int32([[0, -1, 3, 4, 2]]), int32([2])), backend.device)
    state_commit_([ours, kept_too], [update, x], *step)
    assert_same_bits(ours, expected)
    assert_same_bits(kept_too, kept)


def test_a_path_longer_than_the_window(backend):
    kept, x = moved((torch.randn(1, 3, 3), torch.randn(8, 3)), backend.device)
    commit([kept], [x], bounds_of([8]), [list(range(8))])
    assert_same_bits(kept[0], x[-3:].T)


def test_a_long_path(backend):
    layer = Layer(700, 1, 1, 32, 16, decay="channel", device=backend.device)
    exact = layer.states.double()
    update = RecurrentUpdate(layer.k, layer.v, layer.log_decay)
    plain = layer.states.clone()
    step = moved((bounds_of([700]), int32([range(700)]), int32([699])), backend.device)
    reference.state_commit_([plain], [update], *step)
    doubled = RecurrentUpdate(layer.k.double(), layer.v.double(), layer.log_decay.double())
    reference.state_commit_([exact], [doubled], *step)
    state_commit_([layer.states], [update], *step)
    assert_error_within(layer.states, plain, exact)


def test_nothing_to_do(backend):
    state_commit_([], [], int32([0]), int32([]).view(0, 1), int32([]))
    layer = Layer(0, slots=2, device=backend.device)
    before = layer.states.clone()
    update = RecurrentUpdate(layer.k, layer.v, layer.log_decay)
    state_commit_(
        [layer.states], [update], *moved((int32([0, 0, 0]), int32([[-1], [0]]), int32([0, 7])), backend.device)
    )
    assert_same_bits(layer.states, before)


# ---- refusals ----

layer = Layer(5, 2, 4, 8, 16, slots=2)
window, rows = torch.randn(2, 6, 3), torch.randn(5, 6)
update = RecurrentUpdate(layer.k, torch.randn(5, 4, 16), layer.log_decay)
GOOD = dict(
    states=[layer.states, window], updates=[update, rows], cu_nodes=int32([0, 3, 5]), path=int32([[0, 2], [0, -1]]),
    num_accepted=int32([1, 0]), state_index=None,
)  # fmt: skip
REFUSALS = [
    ({"updates": [update]}, r"updates must have one for each of the 2 states, got 1"),
    ({"updates": [rows, rows]}, r"updates\[0\] must be k, u, log_decay and perhaps decay_rates for a state"),
    ({"updates": [update, update]}, r"updates\[1\] must be x for a state float32\[2, 6, 3\] on \S+, got 3 tensors"),
    ({"states": [layer.states.half(), window]}, r"states\[0\] must be float32, got float16"),
    ({"states": [layer.states, window[0]]}, r"states\[1\] must have shape \[B or slots, H, dk, dv\] or"),
    ({"states": [layer.states[:1].expand(2, -1, -1, -1), window]}, r"states\[0\] must not be expanded"),
    ({"states": [layer.states, layer.states], "updates": [update] * 2}, "states must be different tensors"),
    ({"states": [layer.states[:1], window]}, r"states\[0\] must have 2 \(the requests of cu_nodes; no state_index"),
    ({"updates": [update._replace(k=layer.k[:4]), rows]}, r"updates\[0\]\.k must have 5 \(the packed nodes\)|updates"),
    ({"updates": [update._replace(u=update.u.half()), rows]}, r"updates\[0\]\.u must be float32, got float16"),
    ({"updates": [update._replace(u=update.u[:, :2]), rows]}, r"updates\[0\]\.u must have 4 \(the heads of the state\)"),
    ({"updates": [update._replace(log_decay=layer.k), rows]}, r"updates\[0\]\.log_decay must have 4 \(the heads of v\)"),
    ({"updates": [update, rows.half()]}, r"updates\[1\] must be float32, got float16"),
    ({"updates": [update, rows[:, :5]]}, r"updates\[1\] must have 6 \(the channels of the state\)"),
    ({"updates": [update, rows[:4]]}, r"updates\[1\] must have 5 \(the packed nodes\)"),
    ({"path": int32([0, 2])}, r"path must have shape \[B, A\]"),
    ({"path": int32([[0, 2]])}, r"path must have 2 \(the requests of cu_nodes\)"),
    ({"path": torch.zeros(2, 1025, dtype=torch.int32)}, "path must have at most 1024 columns"),
    ({"num_accepted": int32([1])}, r"num_accepted must have 2 \(the requests of cu_nodes\)"),
    ({"state_index": int32([0])}, r"state_index must have 2"),
]  # fmt: skip
VALUES = [
    ({"num_accepted": int32([2, 0])}, r"num_accepted must be in \[0, 2\) \(path has 2 columns\), got 2 at 0"),
    ({"num_accepted": int32([1, -1])}, r"num_accepted must be in \[0, 2\).*got -1 at 1"),
    ({"path": int32([[0, 3], [0, -1]])}, r"path must be in \[-1, 3\) \(the nodes of request 0\), got 3 at \[0, 1\]"),
    ({"path": int32([[0, -2], [0, -1]])}, r"path must be in \[-1, 3\).*got -2 at \[0, 1\]"),
    ({"cu_nodes": int32([0, 3, 6])}, r"cu_nodes must rise from 0 to at most 5"),
    ({"state_index": int32([0, 2])}, r"state_index must be in \[0, 2\) .*got 2 at 1"),
    ({"state_index": int32([1, 1])}, r"state_index must give every request with nodes a slot of its own, got 1 twice"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[m[:40] for _, m in REFUSALS])
def test_bad_input_is_refused_and_nothing_is_written(backend, change, message):
    assert_refused(moved(GOOD, backend.device), moved(change, backend.device), message)


@pytest.mark.parametrize(("change", "message"), VALUES, ids=[m[:40] for _, m in VALUES])
def test_values_out_of_range_are_refused_and_nothing_is_written(backend, change, message):
    skip_unless_values_are_read(backend)
    assert_refused(GOOD, change, message)


def test_debug_mode_checks_values_on_every_device(backend, debug_mode):
    for change, message in VALUES[:-1]:  # the last needs all slots
        with pytest.raises(
            IndexError, match="pass_ext::state_commit_: " + message.replace("rise from 0 to", "rise to")
        ):
            state_commit_(**moved(GOOD | change, backend.device))
    state_commit_(**moved(GOOD | {"states": [state.clone() for state in GOOD["states"]]}, backend.device))


def assert_refused(good, change, message):
    before = [state.clone() for state in good["states"]]
    with pytest.raises((RuntimeError, ValueError), match=r"pass_ext::state_commit_: .*" + message):
        state_commit_(**good | change)
    for state, kept in zip(good["states"], before, strict=True):
        assert_same_bits(state, kept)


def test_gradients_are_refused(backend):
    good = moved(GOOD, backend.device)
    learning = good["states"][0].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="state_commit_: it overwrites states and no gradient is implemented"):
        state_commit_(**good | {"states": [learning, good["states"][1]]})


def test_a_backward_that_saved_the_state_notices(backend):
    good = moved(GOOD, backend.device)
    state = good["states"][0].clone()
    factor = torch.ones_like(state).requires_grad_()
    product = (state * factor).sum()
    state_commit_(**good | {"states": [state, good["states"][1].clone()]})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# ---- CUDA ----


def test_all_layers_of_a_shape_share_a_launch_and_a_state_is_read_and_written_once(backend):
    if backend.name != "emulated":
        pytest.skip("only the emulator counts launches and bytes")
    sizes, step = [5, 0, 2], (bounds_of([5, 0, 2]), int32([[0, 2, 4], [-1] * 3, [0, -1, -1]]), int32([2, 0, 0]))
    layers = [Layer(7, 1, 2, 16, 40, slots=3, seed=seed) for seed in range(5)]
    windows = [torch.randn(3, 20, 3) for _ in range(5)]
    states = [state for layer, window in zip(layers, windows, strict=True) for state in (layer.states, window)]
    updates = []
    for layer in layers:
        updates += [RecurrentUpdate(layer.k, layer.v, layer.log_decay), torch.randn(7, 20)]
    before = emulator.load().count_launches()
    state_commit_(states, updates, *step)
    assert emulator.load().count_launches() - before == 2
    counted = emulator.load().count_bytes()
    for place in range(5):
        assert counted[f"states[{2 * place}]"] == (2 * 4 * 2 * 16 * 40,) * 2, sizes  # of the two requests with nodes
        assert counted[f"states[{2 * place + 1}]"][1] == 2 * 4 * 20 * 3


def test_more_states_than_one_launch_takes(backend):
    layers = [Layer(3, 1, 1, 2, 3, seed=seed, device=backend.device) for seed in range(200)]
    updates = [RecurrentUpdate(layer.k, layer.v, layer.log_decay) for layer in layers]
    windows = moved([torch.randn(1, 2, 2) for _ in range(250)], backend.device)
    inputs = moved([torch.randn(3, 2) for _ in windows], backend.device)
    states = [layer.states for layer in layers] + windows
    expected = [state.clone() for state in states]
    step = moved((bounds_of([3]), int32([[0, 2]]), int32([1])), backend.device)
    reference.state_commit_(expected, [*updates, *inputs], *step)
    state_commit_(states, [*updates, *inputs], *step)
    for own, other in zip(states, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)


def test_what_does_not_exist_is_left_out(backend):
    """Nodes, counts, slots and bounds out of range, on CUDA."""
    if backend.name.startswith("cpu"):
        pytest.skip("the CPU refuses")
    layer = Layer(6, slots=2, device=backend.device)
    update = RecurrentUpdate(layer.k, layer.v, layer.log_decay)
    x, window = moved((torch.randn(6, 8), torch.randn(2, 8, 3)), backend.device)
    bounds = bounds_of([3, 3])

    def committed(cu_nodes, path, accepted, index=None):
        states = layer.states.clone(), window.clone()
        tensors = moved((cu_nodes, int32(path), int32(accepted)), backend.device)
        state_commit_(
            states, [update, x], *tensors, state_index=None if index is None else int32(index, backend.device)
        )
        return states

    def assert_same(ours, theirs, request=slice(None)):
        for own, other in zip(ours, theirs, strict=True):
            assert_same_bits(own[request], other[request])

    good = committed(bounds, [[0, 2], [0, 1]], [1, 1])
    for bad in (-(2**31), -2, 3, 2**31 - 1):
        assert_same(committed(bounds, [[0, bad, 2], [0, 1, -1]], [2, 1]), good)
    assert_same(committed(bounds, [[0, 2], [0, 1]], [2**31 - 1, 99]), good)
    for bad in (-1, -(2**31)):
        assert_same(committed(bounds, [[0, 2], [0, 1]], [1, bad]), (layer.states, window), 1)
    for bad in (-(2**31), -1, 2, 2**31 - 1):
        ours = committed(bounds, [[0, 2], [0, 1]], [1, 1], [0, bad])
        assert_same(ours, good, 0)
        assert_same(ours, (layer.states, window), 1)
    for bad in (-1, 7, 2**31 - 1):
        ours = committed(int32([0, 3, bad]), [[0, 2], [0, 1]], [1, 1])
        assert_same(ours, good, 0)
        assert_same(ours, (layer.states, window), 1)
