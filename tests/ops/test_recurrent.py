"""recurrent_tree on every backend: against the reference, and to the bit against steps of one token."""

import math

import emulator
import pytest
import torch
from support.pairwise import pairwise
from support.recurrent_cases import (
    DECAYS,
    Layer,
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

import pass_ext
from pass_ext import reference
from pass_ext.layers import convolution_tree, recurrent_tree, state_commit_
from pass_ext.ops.recurrent import FORMS
from pass_ext.testing import assert_error_within, assert_same_bits, cpu_backends

BEST_CPU = cpu_backends()[-1].name
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = (  # key heads, heads, dk, dv
    (2, 4, 16, 32), (1, 1, 128, 128), (3, 3, 17, 16), (1, 5, 33, 47), (4, 4, 1, 100), (1, 2, 256, 7), (2, 2, 6, 256),
)  # fmt: skip


# ---- values ----


@pytest.mark.sanitizer
@pytest.mark.parametrize(("shape", "decay"), pairwise(SHAPES, DECAYS, "best"))
@pytest.mark.parametrize("form", FORMS)
def test_values_are_as_close_to_exact_as_a_plain_recurrence(backend, shape, decay, form):
    sizes = [9, 0, 1, 20]
    layer = Layer(sum(sizes), *shape, decay=decay, form=form, slots=len(sizes), device=backend.device)
    tree = packed(map(random_tree, sizes)), bounds_of(sizes)
    out, update = layer.run(*tree)
    # On the CPU: the kernels have the same bits everywhere, and sums of PyTorch on a GPU have another order.
    plain = layer.to("cpu").run(*tree, function=reference.recurrent_tree)
    exact = layer.double().run(*tree, function=reference.recurrent_tree)
    assert_error_within(out, plain[0], exact[0])
    assert_error_within(update.u, plain[1], exact[1])
    assert update.k is not None and update.u.dtype == torch.float32


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_type(backend, dtype, form):
    layer = Layer(30, 1, 3, 32, 40, dtype=dtype, form=form, device=backend.device)
    tree = int32(random_tree(30)), bounds_of([30])
    out, update = layer.run(*tree)
    exact = layer.double().run(*tree, function=reference.recurrent_tree)
    plain = layer.run(*tree, function=reference.recurrent_tree)
    assert out.dtype == dtype
    assert_error_within(out, plain[0], exact[0])
    assert_error_within(update.u, plain[1], exact[1])


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_the_algebra_is_the_walk(decay, form, backend):
    if backend.name != BEST_CPU:
        pytest.skip("no kernel runs")
    sizes = [12, 0, 3]
    layer = Layer(17, 2, 4, 9, 6, decay=decay, form=form, slots=3).double()
    tree = int32([*random_tree(12), *random_tree(3), -1, 0]), bounds_of(sizes)
    for walked, at_once in zip(
        layer.run(*tree, function=reference.recurrent_tree),
        layer.run(*tree, function=reference.recurrent_tree_algebra),
        strict=True,
    ):
        assert (walked - at_once).abs().max() < 1e-13


def test_gradients_of_the_algebra(backend):
    """Against autograd through the recurrence, token by token along each path."""
    if backend.name != BEST_CPU:
        pytest.skip("no kernel runs")
    parents = random_tree(7)
    for decay in DECAYS:
        for form in FORMS:
            layer = Layer(7, 1, 2, 4, 3, decay=decay, form=form).double()
            leaves = [layer.q, layer.k, layer.v, layer.log_decay, layer.beta, layer.states]
            for leaf in leaves:
                leaf.requires_grad_()
            q, k, v, g, beta, states = leaves
            rates, grad = layer.decay_rates, torch.randn(7, 2, 3, dtype=torch.float64)
            after, outs = [], []
            for i, parent in enumerate(parents):
                log = g[i][:, None] * rates if rates is not None else g[i].reshape(2, -1, 1)
                state = log.exp() * (after[parent] if parent >= 0 else states[0])
                recalled = torch.einsum("hcd,c->hd", state, k[i, 0]) if form == "delta" else 0
                u = beta[i][:, None] * (v[i] - recalled)
                after.append(state + k[i, 0][None, :, None] * u[:, None])
                outs.append(torch.einsum("hcd,c->hd", after[-1], q[i, 0] * layer.scale))
            expected = torch.autograd.grad((torch.stack(outs) * grad).sum(), leaves)
            out, _ = layer.run(int32(parents), bounds_of([7]), function=reference.recurrent_tree_algebra)
            for ours, theirs in zip(torch.autograd.grad((out * grad).sum(), leaves), expected, strict=True):
                assert (ours - theirs).abs().max() < 1e-12


def test_decays_at_their_ends(backend):
    """ln D = -inf forgets all, 0 keeps all; NaN shows."""
    layer = Layer(4, 1, 1, 16, 16, form="additive", device=backend.device)
    layer.log_decay[:, 0] = torch.tensor([0.0, -math.inf, -100.0, math.nan])
    out, update = layer.run(int32([-1, -1, -1, -1]), bounds_of([4]))
    own = torch.einsum("nc,nc->n", layer.q[:, 0], layer.k[:, 0])[:, None] * layer.scale * update.u[:, 0]
    kept = torch.einsum("c,cd->d", layer.q[0, 0] * layer.scale, layer.states[0, 0])
    torch.testing.assert_close(out[0, 0], own[0] + kept, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out[1:3, 0], own[1:3], rtol=1e-5, atol=1e-6)
    assert out[3].isnan().all()


# ---- bits ----


def assert_paths_have_the_bits_of_steps(layer, sizes, trees, out, update, state_of):
    """Every leaf's path of every request: its out, and the state that a commit leaves."""
    cu_nodes = bounds_of(sizes)
    for b, parents in enumerate(trees):
        first = int(cu_nodes[b])
        leaves = sorted(set(range(len(parents))) - set(parents))
        for leaf in leaves[:3] + leaves[-1:]:
            path = path_to(parents, leaf)
            rows = [first + node for node in path]
            outs, state = layer.token_by_token(state_of(b), rows)
            assert_same_bits(out[rows], outs)
            states = torch.cat([state_of(r) for r in range(len(trees))]).contiguous()
            commit([states], [update], cu_nodes, [path if r == b else [] for r in range(len(trees))])
            assert_same_bits(states[b], state[0])


@pytest.mark.sanitizer
@pytest.mark.parametrize(("shape", "decay"), pairwise(SHAPES, DECAYS, "best"))
@pytest.mark.parametrize("form", FORMS)
def test_a_path_has_the_bits_of_steps_of_one_token(backend, shape, decay, form):
    sizes = [13, 0, 1, 24]
    trees = [random_tree(size, seed=3) for size in sizes]
    layer = Layer(sum(sizes), *shape, decay=decay, form=form, slots=len(sizes), device=backend.device)
    out, update = layer.run(packed(trees), bounds_of(sizes))

    def state_of(b):
        return layer.states[b : b + 1]

    assert_paths_have_the_bits_of_steps(layer, sizes, [tree or [] for tree in trees], out, update, state_of)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_chain_has_the_bits_of_steps_and_of_every_tree_around_it(backend, dtype):
    """The chain's rows stand among others in a tree; the others' numbers differ."""
    chain = Layer(10, 1, 2, 32, 48, dtype=dtype, decay="channel", device=backend.device)
    alone, update = chain.run(int32(range(-1, 9)), bounds_of([10]))
    outs, state = chain.token_by_token(chain.states, range(10))
    assert_same_bits(alone, outs)
    committed = chain.states.clone()
    commit([committed], [update], bounds_of([10]), [list(range(10))])
    assert_same_bits(committed, state)
    for seed in range(4):
        parents, places = [-1], [0]  # node 0 is the chain's first
        drawn = torch.Generator().manual_seed(seed)
        while len(places) < 10:
            is_chains = int(torch.randint(3, (), generator=drawn)) == 0
            parents.append(places[-1] if is_chains else int(torch.randint(-1, len(parents), (), generator=drawn)))
            if is_chains:
                places.append(len(parents) - 1)
        around = Layer(len(parents), 1, 2, 32, 48, dtype=dtype, decay="channel", seed=seed + 9, device=backend.device)
        for ours, theirs in zip(around.inputs(), chain.inputs(), strict=True):
            ours[places] = theirs
        out, update = around.run(int32(parents), bounds_of([len(parents)]), states=chain.states)
        assert_same_bits(out[places], alone)
        committed = chain.states.clone()
        commit([committed], [update], bounds_of([len(parents)]), [places])
        assert_same_bits(committed, state)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_request_has_the_bits_that_it_has_alone(backend, threads):
    sizes = [5, 0, 40, 1, 17]
    trees = [random_tree(size, seed=1) for size in sizes]
    layer = Layer(sum(sizes), 2, 6, 64, 64, decay="channel", slots=5, device=backend.device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, update = layer.run(packed(trees), bounds_of(sizes))
    finally:
        torch.set_num_threads(before)
    for b, (first, last) in enumerate(zip(bounds_of(sizes).tolist(), bounds_of(sizes).tolist()[1:], strict=False)):
        rows = slice(first, last)
        own = layer.run(int32(trees[b]), bounds_of([sizes[b]]), states=layer.states[b : b + 1], rows=rows)
        assert_same_bits(out[rows], own[0])
        assert_same_bits(update.u[rows], own[1].u)


def test_trees_of_1024_nodes(backend):
    shapes = {
        "chain": list(range(-1, 1023)),
        "star": [-1, *[0] * 1023],
        "binary": [(i - 1) // 2 if i else -1 for i in range(1024)],
        "roots": [-1] * 1024,
        "random": random_tree(1024),
        "comb": [-1 if i == 0 else i - 2 + i % 2 if i > 1 else 0 for i in range(1024)],
    }
    layer = Layer(1024, 1, 1, 16, 16, device=backend.device)
    for name, parents in shapes.items():
        out, update = layer.run(int32(parents), bounds_of([1024]))
        path = path_to(parents, 1023)[:40]
        outs, state = layer.token_by_token(layer.states, path)
        assert_same_bits(out[path], outs), name
        committed = layer.states.clone()
        commit([committed], [update], bounds_of([1024]), [path])
        assert_same_bits(committed, state)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 3e38], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_rejected_branches_and_memory_that_nobody_owns_leave_no_trace(backend, form, poison):
    parents = random_tree(20, seed=5)
    path = path_to(parents, 19)
    layer = Layer(26, 1, 3, 17, 33, decay="channel", form=form, slots=4, device=backend.device)
    rows = [3 + node for node in path]  # rows 0 to 2 and 23 to 25 belong to no request
    tree = int32([7, -9, 99, *parents, 5, 5, -7]), int32([3, 3, 23, 23])
    index = int32([3, 2, 99], backend.device)
    clean, clean_update = layer.run(*tree, state_index=index)
    committed = layer.states.clone()
    commit([committed], [clean_update], tree[1], [[], path, []], state_index=index)
    others = [row for row in range(26) if row not in rows]
    for x in layer.inputs():
        x[others] = poison
    layer.states[[0, 1, 3]] = poison
    out, update = layer.run(*tree, state_index=index)
    assert_same_bits(out[rows], clean[rows])
    assert (out[:3] == 0).all() and (out[23:] == 0).all() and (update.u[23:] == 0).all()
    states = layer.states.clone()
    commit([states], [update], tree[1], [[], path, []], state_index=index)
    assert_same_bits(states[2], committed[2])
    assert_same_bits(states[[0, 1, 3]], layer.states[[0, 1, 3]])


# ---- layouts ----


def test_states_by_strides_and_by_index(backend):
    sizes = [6, 0, 11]
    layer = Layer(17, 1, 2, 24, 40, slots=3, device=backend.device)
    tree = int32([*random_tree(6), *random_tree(11)]), bounds_of(sizes)
    expected, _ = layer.run(*tree)
    transposed = layer.states.transpose(2, 3).contiguous().transpose(2, 3)
    pool = torch.full((9, 2, 24, 40), math.nan, device=backend.device)
    pool[[7, 0, 4]] = layer.states
    wide = torch.full((3, 4, 50, 120), math.nan, device=backend.device)
    strided = wide[:, 1::2, 3:27, 5:85:2].copy_(layer.states)
    shared = layer.states[:1].expand(3, -1, -1, -1)
    assert_same_bits(layer.run(*tree, states=transposed)[0], expected)
    assert_same_bits(layer.run(*tree, states=strided)[0], expected)
    for dtype in (torch.int32, torch.int64, torch.int16):
        index = torch.tensor([7, -1, 4], dtype=dtype, device=backend.device)
        assert_same_bits(layer.run(*tree, states=pool, state_index=index)[0], expected)
    assert_same_bits(layer.run(*tree, states=shared)[0][:6], expected[:6])
    same = int32([0, 0, 0], backend.device)
    assert_same_bits(layer.run(*tree, state_index=same)[0], layer.run(*tree, states=shared)[0])


def test_inputs_may_be_views_of_a_joined_product(backend):
    layer = Layer(8, 2, 4, 16, 16, dtype=torch.bfloat16, device=backend.device)
    tree = int32(random_tree(8)), bounds_of([8])
    expected, update = layer.run(*tree)
    joined = torch.cat([layer.q.flatten(1), layer.k.flatten(1), layer.v.flatten(1)], 1)
    q, k, v = joined.split([32, 32, 64], 1)
    layer.q, layer.k, layer.v = q.unflatten(1, (2, 16)), k.unflatten(1, (2, 16)), v.unflatten(1, (4, 16))
    layer.beta = layer.beta.t().contiguous().t()
    out, strided_update = layer.run(*tree)
    assert_same_bits(out, expected)
    assert_same_bits(strided_update.u, update.u)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (layer.q, layer.k, layer.v)]
    layer.q, layer.k, layer.v = turned
    assert_same_bits(layer.run(*tree)[0], expected)


def test_without_beta_it_is_one(backend):
    layer = Layer(8, device=backend.device)
    tree = moved((int32(random_tree(8)), bounds_of([8])), backend.device)
    layer.beta.fill_(1)
    expected, _ = layer.run(*tree)
    layer.beta = None
    out, _ = recurrent_tree(layer.q, layer.k, layer.v, layer.log_decay, None, layer.states, *tree, **layer.options())
    assert_same_bits(out, expected)


@pytest.mark.parametrize(("rows", "heads", "dv"), [(0, 2, 16), (3, 0, 16), (3, 2, 0)])
def test_nothing_to_do(backend, rows, heads, dv):
    layer = Layer(rows, 1, heads, 16, dv, slots=1, device=backend.device)
    out, update = layer.run(int32(random_tree(rows)), bounds_of([rows]))
    assert out.shape == update.u.shape == (rows, heads, dv)
    out, _ = layer.run(int32(random_tree(rows)), int32([0]), states=layer.states[:0])
    assert (out == 0).all()


def test_the_state_is_not_written(backend):
    layer = Layer(9, device=backend.device)
    before = layer.states.clone()
    layer.run(int32(random_tree(9)), bounds_of([9]))
    assert_same_bits(layer.states, before)


# ---- refusals ----

good = Layer(5, 2, 4, 8, 16, slots=2)
GOOD = dict(
    q=good.q, k=good.k, v=good.v, log_decay=good.log_decay, beta=good.beta, states=good.states,
    parents=int32([-1, 0, 0, -1, 0]), cu_nodes=int32([0, 3, 5]), state_index=None, decay_rates=None,
)  # fmt: skip
REFUSALS = [
    ({"v": good.v.double()}, r"v must be bfloat16, float16 or float32, got float64\[5, 4, 16\]"),
    ({"v": good.v[0]}, r"v must have shape \[N, H, dv\], got float32\[4, 16\]"),
    ({"k": good.k.half()}, r"k must be float32, got float16"),
    ({"k": good.k[:4]}, r"k must have 5 \(the packed nodes of v\) in dimension 0"),
    ({"k": torch.zeros(5, 3, 8)}, r"k must have a number of heads that divides 4 \(the heads of v\)"),
    ({"k": torch.zeros(5, 2, 257)}, r"k must have 1 to 256 \(dk\) in dimension 2, got float32\[5, 2, 257\]"),
    ({"k": torch.zeros(5, 2, 0)}, r"k must have 1 to 256 \(dk\)"),
    ({"q": good.q[:, :1]}, r"q must have 2 \(the heads of k\) in dimension 1"),
    ({"q": good.q[..., :7]}, r"q must have 8 \(dk, the width of k\) in dimension 2"),
    ({"log_decay": good.log_decay.half()}, r"log_decay must be float32, got float16"),
    ({"log_decay": good.log_decay[0]}, r"log_decay must have shape \[N, H\] or \[N, H, dk\], got float32\[4\]"),
    ({"log_decay": torch.zeros(5, 4, 16)}, r"log_decay must have 8 \(dk, the width of k\) in dimension 2"),
    ({"decay_rates": torch.zeros(4, 8, 16)}, r"log_decay must have shape \[N, H, dv\] beside decay_rates"),
    ({"log_decay": torch.zeros(5, 4, 16), "decay_rates": torch.zeros(4, 8, 15)}, r"decay_rates must have 16 \(dv"),
    ({"log_decay": torch.zeros(5, 4, 16), "decay_rates": torch.zeros(4, 8)}, r"decay_rates must have shape \[H, dk, dv\]"),
    ({"beta": good.beta[:, :3]}, r"beta must have 4 \(the heads of v\) in dimension 1"),
    ({"beta": good.beta.bfloat16()}, r"beta must be float32, got bfloat16"),
    ({"states": good.states.half()}, r"states must be float32, got float16"),
    ({"states": good.states[0]}, r"states must have shape \[B or slots, H, dk, dv\]"),
    ({"states": good.states.mT}, r"states must have 8 \(dk, the width of k\) in dimension 2"),
    ({"states": good.states[:1]}, r"states must have 2 \(the requests of cu_nodes; no state_index was given\)"),
    ({"state_index": int32([0])}, r"state_index must have 2 \(the requests of cu_nodes\)"),
    ({"state_index": torch.zeros(2)}, r"state_index must be int32, got float32\[2\]"),
    ({"parents": int32([-1, 0, 0])}, r"parents must have 5 \(the packed nodes\)"),
    ({"cu_nodes": int32([])}, r"cu_nodes must have shape \[B \+ 1\]"),
    ({"form": "gated"}, r"form must be one of delta, additive, got 'gated'"),
]  # fmt: skip
VALUES = [
    ({"parents": int32([-1, 1, 0, -1, 0])}, r"parents must be -1 or an earlier node .*got 1 at flat index 1, node 1 of"),
    ({"parents": int32([-1, 0, 0, -2, 0])}, r"parents must be .*got -2 at flat index 3, node 0 of request 1"),
    ({"cu_nodes": int32([0, 3, 6])}, r"cu_nodes must rise from 0 to at most 5 .*got 3 and 6 at 1"),
    ({"cu_nodes": int32([0, 4, 3])}, r"cu_nodes must rise .*got 4 and 3 at 1"),
    ({"cu_nodes": int32([-1, 3, 5])}, r"cu_nodes must rise .*got -1 and 3 at 0"),
    ({"state_index": int32([0, 2])}, r"state_index must be in \[0, 2\) \(the slots of the states\), got 2 at 1"),
    ({"state_index": int32([-1, 1])}, r"state_index must be in \[0, 2\).*got -1 at 0"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[m[:40] for _, m in REFUSALS])
def test_bad_input_is_refused_in_words(backend, change, message):
    with pytest.raises((RuntimeError, ValueError), match="pass_ext::recurrent_tree: .*" + message):
        recurrent_tree(**moved(GOOD | change, backend.device))


@pytest.mark.parametrize(("change", "message"), VALUES, ids=[m[:40] for _, m in VALUES])
def test_values_out_of_range_are_refused(backend, change, message):
    skip_unless_values_are_read(backend)
    with pytest.raises(RuntimeError, match="pass_ext::recurrent_tree: .*" + message):
        recurrent_tree(**GOOD | change)


def test_debug_mode_checks_values_on_every_device(backend, debug_mode):
    for change, message in VALUES:
        with pytest.raises(
            IndexError, match="pass_ext::recurrent_tree: " + message.replace("rise from 0 to", "rise to")
        ):
            recurrent_tree(**moved(GOOD | change, backend.device))
    recurrent_tree(**moved(GOOD, backend.device))


def test_a_request_of_too_many_nodes_is_refused(backend):
    skip_unless_values_are_read(backend)
    layer = Layer(1025, 1, 1, 1, 1, device=backend.device)
    with pytest.raises(RuntimeError, match=r"cu_nodes must give a request at most 1024 nodes, got 1025 for request 0"):
        layer.run(int32(range(-1, 1024)), bounds_of([1025]))


def test_compiles_whole(backend):
    if backend.name != BEST_CPU:
        pytest.skip("what is compiled does not depend on which CPU kernel runs after the op")
    layer = Layer(9, slots=2)

    def step(q, k, v, g, beta, states, parents, cu_nodes):
        out, update = recurrent_tree(q * 2, k, v, g, beta, states, parents, cu_nodes)
        pass_ext.layers.state_commit_([states], [update], cu_nodes, int32([[0, -1], [0, 1]]), int32([0, 1]))
        return out.sum(-1)

    tree = int32([*random_tree(4), *random_tree(5)]), bounds_of([4, 5])
    ours, theirs = layer.states.clone(), layer.states.clone()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(*layer.inputs(), ours, *tree), step(*layer.inputs(), theirs, *tree))
    assert_same_bits(ours, theirs)


# ---- CUDA: bits, bytes, malformed trees ----


def skip_unless_cuda(backend):
    if backend.name.startswith("cpu"):
        pytest.skip("about the CUDA kernels; the CPU refuses such values")


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_bits_are_the_cpus(backend, decay, form):
    skip_unless_cuda(backend)
    sizes = [30, 0, 7]
    tree = packed(map(random_tree, sizes)), bounds_of(sizes)
    for shape in ((1, 2, 128, 40), (2, 2, 16, 24), (1, 1, 100, 9)):
        layer = Layer(37, *shape, decay=decay, form=form, slots=3, dtype=torch.bfloat16)
        with _disable_current_modes():
            out, update = layer.run(*tree)
        there = Layer(37, *shape, decay=decay, form=form, slots=3, dtype=torch.bfloat16, device=backend.device)
        got, own = there.run(*tree)
        assert_same_bits(got, out)
        assert_same_bits(own.u, update.u)
        path = [path_to(random_tree(30), 29), [], [0, 1]]
        with _disable_current_modes():
            commit([layer.states], [update], tree[1], path)
        commit([there.states], [own], tree[1], path)
        assert_same_bits(there.states, layer.states)


def test_bits_do_not_depend_on_the_size_of_blocks(backend):
    """A step of 1,000 rows, of which requests own 12, has other blocks: their shared memory is for a tree of so many."""
    skip_unless_cuda(backend)
    layer, tree = (
        Layer(1000, 1, 1, 128, 40, device=backend.device),
        (int32([*random_tree(12), *[0] * 988]), int32([0, 12])),
    )
    out, update = layer.run(*tree)
    alone, own = layer.run(tree[0][:12], tree[1], rows=slice(12))
    assert_same_bits(out[:12], alone)
    assert_same_bits(update.u[:12], own.u)
    assert (out[12:] == 0).all() and (update.u[12:] == 0).all()


def test_a_tree_that_is_larger_than_the_others_has_its_bits(backend):
    """Shared memory is for trees of the usual size in the batch."""
    skip_unless_cuda(backend)
    for own_tree in (random_tree(300), [-1, *[0] * 39], random_tree(40)):
        large = len(own_tree)
        sizes = [1] * 15 + [large] + [2] * 15
        trees, rows = [random_tree(size) for size in sizes], slice(15, 15 + large)
        trees[15] = own_tree
        layer = Layer(sum(sizes), 1, 1, 100, 40, slots=31, device=backend.device)
        out, update = layer.run(packed(trees), bounds_of(sizes))
        alone, own = layer.run(int32(own_tree), bounds_of([large]), states=layer.states[15:16], rows=rows)
        assert_same_bits(out[rows], alone)
        assert_same_bits(update.u[rows], own.u)


def test_a_state_is_read_once(backend):
    """Whatever the tree; and out and u are written once."""
    if backend.name != "emulated":
        pytest.skip("only the emulator counts bytes")
    for heads, dk, dv in ((2, 128, 64), (1, 33, 7), (1, 256, 16)):
        for parents in (random_tree(30), list(range(-1, 29)), [-1] * 30):
            layer = Layer(30, 1, heads, dk, dv, dtype=torch.bfloat16, slots=2)
            pool = torch.cat([layer.states] * 2)
            layer.run(int32(parents), bounds_of([30]), states=pool, state_index=int32([2]))
            counted = emulator.load().count_bytes()
            assert counted["states"] == (4 * heads * dk * dv, 0)
            assert counted["output 0"] == (0, 2 * 30 * heads * dv) and counted["output 1"] == (0, 4 * 30 * heads * dv)


WORST = (-(2**31), -7, -2, 3, 11, 40, 2**31 - 1)


def test_a_parent_that_is_no_earlier_node_makes_a_root(backend):
    skip_unless_cuda(backend)
    sizes = [11, 6, 9]
    trees = [random_tree(size) for size in sizes]
    layer = Layer(26, 1, 2, 20, 24, decay="channel", slots=3, device=backend.device)
    clean, clean_update = layer.run(packed(trees), bounds_of(sizes))
    for bad in WORST:
        given = [*trees[0], *(bad if i % 2 == 0 else parent for i, parent in enumerate(trees[1])), *trees[2]]
        meant = [parent if -1 <= parent < i else -1 for i, parent in enumerate(given[11:17])]
        out, update = layer.run(int32(given), bounds_of(sizes))
        expected, expected_update = layer.run(int32([*trees[0], *meant, *trees[2]]), bounds_of(sizes))
        assert_same_bits(out, expected)
        assert_same_bits(update.u, expected_update.u)
        others = [*range(11), *range(17, 26)]
        assert_same_bits(out[others], clean[others])
        assert_same_bits(update.u[others], clean_update.u[others])


def test_a_state_that_does_not_exist_gives_0(backend):
    skip_unless_cuda(backend)
    sizes = [4, 5, 6]
    layer = Layer(15, 1, 2, 20, 24, slots=3, device=backend.device)
    tree = packed(map(random_tree, sizes)), bounds_of(sizes)
    clean, _ = layer.run(*tree)
    for bad in (-(2**31), -1, 3, 2**31 - 1):
        out, update = layer.run(*tree, state_index=int32([0, bad, 2], backend.device))
        assert (out[4:9] == 0).all() and (update.u[4:9] == 0).all()
        assert_same_bits(out[[*range(4), *range(9, 15)]], clean[[*range(4), *range(9, 15)]])
        states = layer.states.clone()
        commit([states], [update], tree[1], [[0], [0, 1], []], state_index=int32([0, bad, 2], backend.device))
        assert_same_bits(states[1:], layer.states[1:])


@pytest.mark.parametrize(
    "bounds", [[0, 9, 4, 12], [-3, 4, 8, 12], [0, 4, 8, 13], [2**31 - 1] * 4, [12, 8, 4, 0]], ids=str
)
def test_bounds_that_do_not_divide_the_rows_give_0(backend, bounds):
    skip_unless_cuda(backend)
    layer = Layer(12, 1, 2, 20, 24, slots=3, device=backend.device)
    out, update = layer.run(int32([-1, 0, 1, 2] * 3), int32(bounds))
    assert (out == 0).all() and (update.u == 0).all()
    commit([layer.states], [update], int32(bounds), [[0, 1, 2, 3]] * 3)  # in bounds, whatever it leaves


def test_nodes_beyond_1024_give_0(backend):
    skip_unless_cuda(backend)
    layer = Layer(1103, 1, 1, 2, 3, device=backend.device, slots=2)
    parents = random_tree(1100)
    out, _ = layer.run(int32([*parents, -1, 0, 1]), bounds_of([1100, 3]))
    cut, _ = layer.run(int32([*parents[:1024], -1, 0, 1]), bounds_of([1024, 3]), rows=[*range(1024), 1100, 1101, 1102])
    assert_same_bits(out[[*range(1024), 1100, 1101, 1102]], cut)
    assert (out[1024:1100] == 0).all()


def test_replays_in_a_cuda_graph(cuda):
    """Other trees, bounds and slots than those of the capture; a layer's three ops."""
    layer = Layer(24, 1, 2, 128, 64, dtype=torch.bfloat16, slots=5, device=cuda.device)
    x, weight = torch.randn(24, 40, device=cuda.device), torch.randn(40, 4, device=cuda.device)
    window = torch.randn(5, 40, 3, device=cuda.device)
    parents, cu_nodes = int32([-1] * 24, cuda.device), int32([0, 8, 16, 24], cuda.device)
    index, path = int32([0, 1, 2], cuda.device), int32([[0] * 6] * 3, cuda.device)
    accepted = int32([0, 0, 0], cuda.device)

    def step(states, windows):
        mixed = convolution_tree(x, weight, None, windows, parents, cu_nodes, activation="silu", state_index=index)
        out, update = layer.run(parents, cu_nodes, states=states, state_index=index)
        state_commit_([states, windows], [update, x], cu_nodes, path, accepted, state_index=index)
        return mixed, out

    static = layer.states.clone(), window.clone()
    step(*(state.clone() for state in static))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(*static)
    for sizes, slots in (([9, 0, 15], [4, -1, 0]), ([0, 0, 0], [0, 1, 2]), ([1, 20, 2], [3, 2, 1])):
        trees = [random_tree(size) for size in sizes]
        parents.fill_(-1)[: sum(sizes)] = packed(trees).to(cuda.device)
        for mine, values in ((cu_nodes, bounds_of(sizes)), (index, int32(slots))):
            mine.copy_(values)
        paths = [path_to(tree, size - 1)[:6] for tree, size in zip(trees, sizes, strict=True)]
        path.copy_(int32([[*nodes, *[-1] * (6 - len(nodes))] for nodes in paths]))
        accepted.copy_(int32([max(0, len(nodes) - 1) for nodes in paths]))
        ours = [state.clone() for state in static]
        expected = step(*ours)
        graph.replay()
        for got, want in zip((*results, *static), (*expected, *ours), strict=True):
            assert_same_bits(got, want)
