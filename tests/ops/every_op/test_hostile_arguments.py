"""Arguments that no user should pass, at every op: dual tensors, tensors on meta, fake or without storage, negated and
conjugated views, sizes beyond int32, integers that do not fit. The result is right, or the message names op and argument.
"""

import math

import pytest
import torch
from support.calls import (
    OPS,
    PUBLIC,
    arguments_of,
    call,
    detached,
    keywords_of,
    listed,
    named,
    places_of,
    replaced,
    results_of,
    samples_of,
    written_by,
)
from support.faces import function_of
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import pass_ext
from pass_ext import reference

# ---- forward-mode derivatives ----


def forward_mode_cases(op):
    for sample in map(detached, samples_of(op)):
        for where, tensor in places_of(sample):
            if tensor.is_floating_point():
                yield sample, where, tensor


def is_right_or_refused(op, sample, where, tensor, run):
    """`run(function, tensor)` is the derivative of function at tensor in direction tensor + 1, or a refusal."""

    def function(kernel):
        return lambda value: kernel(op, replaced(sample, where, value))

    def of_reference(op, changed):
        return getattr(reference, op)(**keywords_of(op, changed))

    try:
        actual = run(function(call), tensor)
    except RuntimeError as error:
        assert f"pass_ext::{op}: no forward-mode derivative is implemented, but {listed(op, where)} carries one" in str(
            error
        )
        return False
    torch.testing.assert_close(actual, run(function(of_reference), tensor))
    return True


def with_dual_tensors(function, tensor):
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(function(forward_ad.make_dual(tensor, tensor + 1)))
    return torch.zeros_like(result.primal) if result.tangent is None else result.tangent


def with_func(function, tensor):
    return torch.func.jvp(function, (tensor,), (tensor + 1,))[1]


def with_vmap_inside(function, tensor):
    return torch.func.jvp(torch.func.vmap(function), (tensor[None],), (tensor[None] + 1,))[1]


def with_vmap_outside(function, tensor):
    return torch.func.vmap(lambda each: with_func(function, each))(tensor[None])


RUNS = [with_dual_tensors, with_func, with_vmap_inside, with_vmap_outside]


WITH_FLOATS = [op for op in PUBLIC if any(True for _ in forward_mode_cases(op))]


@pytest.mark.parametrize("op", WITH_FLOATS)
def test_forward_mode_derivatives_are_right_or_refused(op):
    for sample, where, tensor in forward_mode_cases(op):
        assert is_right_or_refused(op, sample, where, tensor, with_dual_tensors) == (op == "lookahead_embed")


@pytest.mark.parametrize("run", RUNS[1:], ids=lambda run: run.__name__)
@pytest.mark.parametrize("op", WITH_FLOATS)
def test_derivatives_by_torch_func_are_right_or_refused(op, run):
    for sample, where, tensor in list(forward_mode_cases(op))[:2]:
        assert is_right_or_refused(op, sample, where, tensor, run) == (op == "lookahead_embed")


def test_no_tangent_is_no_derivative():
    """Inside a level, tensors without a tangent are computed as usual."""
    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    with forward_ad.dual_level():
        inside = pass_ext.layers.linear_rows(x, weight)
        undone = pass_ext.layers.linear_rows(forward_ad.unpack_dual(forward_ad.make_dual(x, x)).primal, weight)
    assert torch.equal(inside, pass_ext.layers.linear_rows(x, weight)) and torch.equal(undone, inside)


@pytest.fixture
def no_vmap_fallback():
    """Torch's fallback loops over the batch if an op has no rule, and warns on stderr."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


def embedding_case(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([[3, -1, 0], [-2, 4, 4]])
    table, lookahead = (torch.randn(rows, 4, dtype=dtype, generator=generator) for rows in (5, 2))
    return ids, table, lookahead


def bent(embed):
    """A function of both tables that is not linear, so that second derivatives are not zero."""
    ids = embedding_case()[0]
    return lambda table, lookahead: (embed(ids, table, lookahead) ** 3).sum()


TRANSFORMS = {
    "grad": lambda f, *x: torch.func.grad(f, argnums=(0, 1))(*x),
    "jacfwd": lambda f, *x: torch.func.jacfwd(f, argnums=(0, 1))(*x),
    "jacrev": lambda f, *x: torch.func.jacrev(f, argnums=(0, 1))(*x),
    "hessian": lambda f, *x: torch.func.hessian(f, argnums=(0, 1))(*x),
    "reverse over reverse": lambda f, *x: torch.func.jacrev(torch.func.grad(f))(*x),
    "forward over forward": lambda f, *x: torch.func.jacfwd(torch.func.jacfwd(f))(*x),
    "vmap over grad": lambda f, *x: torch.func.vmap(torch.func.grad(f))(*(torch.stack([each, 2 * each]) for each in x)),
    "vjp": lambda f, *x: torch.func.vjp(f, *x)[1](torch.tensor(2.0, dtype=torch.float64)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func_of_the_embedding(transform, no_vmap_fallback):
    tables = embedding_case()[1:]
    actual = TRANSFORMS[transform](bent(pass_ext.lookahead_embed), *tables)
    expected = TRANSFORMS[transform](bent(reference.lookahead_embed), *tables)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "in_dims", [(0, None, None), (1, None, None), (None, 0, None), (None, None, 1), (None, 1, 0), (0, 0, 1)]
)
def test_vmap_of_the_embedding(in_dims, no_vmap_fallback):
    ids, table, lookahead = embedding_case(torch.float32)
    batch = [
        each if dim is None else torch.stack([each, each.flip(0), each.roll(1, 0)], dim)
        for each, dim in zip((ids, table, lookahead), in_dims, strict=True)
    ]
    actual, expected = (
        torch.func.vmap(f, in_dims)(*batch) for f in (pass_ext.lookahead_embed, reference.lookahead_embed)
    )
    assert torch.equal(actual, expected)


def test_compiled_derivatives_of_the_embedding():
    """The compiler would trace a custom function's forward alone, and drop tangents."""
    ids, table, lookahead = embedding_case(torch.float32)

    def tangent(embed):
        return lambda table: torch.func.jvp(lambda each: embed(ids, each, lookahead), (table,), (table + 1,))[1]

    actual = torch.compile(tangent(pass_ext.lookahead_embed), backend="eager")(table)
    torch.testing.assert_close(actual, tangent(reference.lookahead_embed)(table))


def test_forward_over_reverse_of_the_embedding():
    ids, table, lookahead = embedding_case()
    tangents = {}
    for embed in (pass_ext.lookahead_embed, reference.lookahead_embed):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(table.clone().requires_grad_(), table + 1)
            gradient = torch.autograd.grad((embed(ids, dual, lookahead) ** 3).sum(), dual)[0]
            tangents[embed] = forward_ad.unpack_dual(gradient).tangent
    first, second = tangents.values()
    torch.testing.assert_close(first, second)


# ---- devices, storage, views ----


@pytest.mark.parametrize("op", OPS)
def test_a_tensor_on_meta_beside_real_ones_is_refused(op):
    for sample in samples_of(op):
        sample = detached(sample)
        if len(list(places_of(sample))) == 1:
            continue  # a tensor alone is on no other device
        for where, tensor in places_of(sample):
            mixed = replaced(sample, where, tensor.to("meta"))
            with pytest.raises(RuntimeError, match=rf"pass_ext::{op}: .* must be on the device of "):
                getattr(torch.ops.pass_ext, op)(*mixed)
            if op in PUBLIC:
                with pytest.raises(RuntimeError, match=rf"pass_ext::{op}: .* must be on the device of "):
                    call(op, mixed)


@pytest.mark.parametrize("op", OPS)
def test_a_tensor_without_its_storage_is_refused(op):
    for sample in samples_of(op):
        sample = detached(sample)
        for where, tensor in places_of(sample):
            for left in (0, tensor.element_size()):
                gone = tensor.clone()
                if gone.numel() * gone.element_size() == left:
                    continue
                gone.untyped_storage().resize_(left)
                with pytest.raises(
                    RuntimeError, match=f"pass_ext::{op}: .* must have its elements in memory"
                ) as raised:
                    getattr(torch.ops.pass_ext, op)(*replaced(sample, where, gone))
                assert named(op, where) in str(raised.value)


def test_a_strided_tensor_without_storage_is_not_copied():
    x = torch.randn(6, 4).t()
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="linear_rows: x must have its elements in memory"):
        pass_ext.layers.linear_rows(x, torch.randn(3, 6))


def a_commit(**changed):
    step = [torch.tensor(v, dtype=torch.int32) for v in ([2], [0, 3], [[0, 2]], [1])]
    arguments = dict(zip(("prefix_lens", "cu_nodes", "path", "num_accepted"), step, strict=True))
    arguments |= dict(caches=[torch.zeros(1, 9, 2, 8)], new=[torch.arange(48.0).reshape(3, 2, 8)]) | changed
    pass_ext.cache_commit_(**arguments)
    return arguments["caches"][0]


def test_fake_new_rows_reach_the_fake_kernel():
    mode = FakeTensorMode()
    with mode:
        caches, new = [torch.zeros(1, 9, 2, 8)], [torch.zeros(3, 2, 8)]
        step = [torch.zeros(size, dtype=torch.int32) for size in ((1,), (2,), (1, 2), (1,))]
        assert pass_ext.cache_commit_(caches, *step, new=new) is None
    with pytest.raises(Exception, match=r"[Ff]ake"):  # a fake tensor beside real ones: torch's own message
        a_commit(new=new)


def test_negated_and_conjugated_new_rows_are_committed_as_what_they_say():
    rows = torch.arange(48.0).reshape(3, 2, 8)
    negated = torch.complex(rows, rows).conj().imag
    assert negated.is_neg()
    assert torch.equal(a_commit(new=[negated])[0, 2:4], -rows[[0, 2]])
    conjugated = torch.complex(rows, rows + 1).conj()
    caches = [torch.zeros(1, 9, 2, 8, dtype=torch.complex64)]
    assert torch.equal(a_commit(caches=caches, new=[conjugated])[0, 2:4], conjugated.resolve_conj()[[0, 2]])


def test_a_negated_or_conjugated_cache_is_refused():
    cache = torch.zeros(1, 9, 2, 8, dtype=torch.complex64).conj()
    rows = torch.arange(48.0).reshape(3, 2, 8)
    for view, new in ((cache, torch.complex(rows, rows)), (torch.zeros(1, 9, 2, 8)._neg_view(), rows)):
        with pytest.raises(RuntimeError, match=r"mutable TensorLists with .* before calling pass_ext::cache_commit_"):
            a_commit(caches=[view], new=[new])


def test_zero_tensors_are_zeros_or_refused():
    """Torch makes them in derivatives; they have no memory."""
    zero = torch._efficientzerotensor((3, 2, 8))
    with pytest.raises(RuntimeError, match=r"new\[0\] must be contiguous in its last dimension"):
        a_commit(new=[zero])
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        a_commit(caches=[torch._efficientzerotensor((1, 9, 2, 8))])
    assert torch.equal(
        pass_ext.layers.linear_rows(torch._efficientzerotensor((2, 4)), torch.randn(3, 4)), torch.zeros(2, 3)
    )


# ---- sizes ----


def an_attention(**changed):
    arguments = dict(
        q=torch.randn(2, 2, 64), k_cache=torch.randn(1, 8, 2, 64), v_cache=torch.randn(1, 8, 2, 64),
        prefix_lens=torch.tensor([3]), cu_nodes=torch.tensor([0, 2]), visible=torch.tensor([[1], [3]]), max_nodes=2,
    )  # fmt: skip
    return pass_ext.attention_tree(**(arguments | changed))


HUGE = 2**32


@pytest.mark.parametrize("q_heads", [0, 2, HUGE])
def test_attention_with_too_many_heads(q_heads):
    cache = torch.zeros(64).expand(1, 8, HUGE, 64)
    q = torch.zeros(1).expand(2, q_heads, 64)
    with pytest.raises(RuntimeError, match=r"pass_ext::attention_tree: (q|k_cache) must have less than 1048577 heads"):
        an_attention(q=q, k_cache=cache, v_cache=cache)


def test_attention_with_no_heads_has_an_empty_result():
    assert an_attention(q=torch.zeros(2, 0, 64))[0].shape == (2, 0, 64)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, HUGE, 2, 64), "k_cache must have less than .* slots"),
        ((HUGE, 8, 2, 64), "k_cache must have less than 2147483648 pages"),
    ],
)
def test_attention_with_too_large_a_cache(shape, message):
    cache = torch.zeros(64).expand(shape)
    table = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=f"pass_ext::attention_tree: {message}"):
        an_attention(k_cache=cache, v_cache=cache, block_table=table)


def test_attention_with_too_many_slots_in_all_pages():
    cache = torch.zeros(64).expand(1, 2**30, 2, 64)
    with pytest.raises(RuntimeError, match=r"block_table must give a request at most .* slots, got int32.1, 4. on cpu"):
        an_attention(k_cache=cache, v_cache=cache, block_table=torch.zeros(1, 4, dtype=torch.int32))


def test_attention_with_too_many_rows():
    q = torch.zeros(1).expand(HUGE, 1, 64)
    with pytest.raises(RuntimeError, match="attention_tree: q must have less than 2147483648 rows"):
        an_attention(q=q, visible=torch.zeros(1, 1, dtype=torch.int64).expand(HUGE, 1))


@pytest.mark.parametrize("dim", [2**31, HUGE])
def test_merging_rows_too_wide(dim):
    out, lse = torch.ones(1, dtype=torch.bfloat16).expand(1, dim), torch.zeros(1)
    with pytest.raises(RuntimeError, match="attention_merge: out_a must have less than 2147483648 numbers in a row"):
        pass_ext.attention_merge(out, lse, out, lse)


def test_too_many_draft_rows():
    target, draft = torch.randn(2, 5), torch.zeros(1, 5).expand(HUGE, 5)
    tree = torch.tensor([0, 1]), torch.tensor([-1, 0]), torch.tensor([0, 2]), 1
    rows = torch.tensor([0, -1])
    with pytest.raises(RuntimeError, match="accept_tree: draft_logits must have less than 2147483648 rows"):
        pass_ext.accept_tree(target, *tree, rule="rejection", draft_logits=draft, draft_rows=rows)


def test_too_many_pages_or_slots_to_commit():
    with pytest.raises(RuntimeError, match=r"caches\[0\] must not be expanded"):
        a_commit(caches=[torch.zeros(8).expand(1, HUGE, 2, 8)])
    with pytest.raises(RuntimeError, match=r"caches\[0\] must have less than 2\^31 elements in every dimension"):
        a_commit(caches=[torch.zeros(1, 0, 2, 8).expand(1, 0, 2, 8).as_strided((1, 0, HUGE, 8), (0, 0, 8, 1))])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pass_ext.layers.linear_rows(torch.zeros(1, 1).expand(2**38, 1), torch.zeros(4096, 1)),
            r"linear_rows: out of memory: the result float32\[274877906944, 4096\] needs 4503599627370496 bytes",
        ),
        (
            lambda: pass_ext.lookahead_embed(
                torch.zeros(1, dtype=torch.int64).expand(2**48), torch.zeros(3, 4), torch.zeros(1, 4)
            ),
            r"lookahead_embed: out of memory: a contiguous copy of ids int64\[281474976710656\] needs 2251799813685248 bytes",
        ),
        (
            lambda: torch.ops.pass_ext.lookahead_embed_backward(
                torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), 2**61, False, torch.float32
            ),
            r"lookahead_embed_backward: out of memory: the result float32\[2305843009213693952, 2\] needs 18446744073709551616",
        ),
        (
            lambda: pass_ext.tree_mask(torch.zeros(0, 16, dtype=torch.int64), torch.zeros(1025, dtype=torch.int32), 1024,
                                       torch.zeros(1024, dtype=torch.int32), 2**31 - 1, torch.float32),
            r"tree_mask: out of memory: the result float32\[1024, 1, 1024, 2147483647\] needs 9007199250546688 bytes",
        ),
    ],
    ids=["linear_rows", "lookahead_embed", "lookahead_embed_backward", "tree_mask"],
)  # fmt: skip
def test_out_of_memory_says_op_shape_and_bytes(call, message):
    with pytest.raises(RuntimeError, match="pass_ext::" + message):
        call()


# ---- integers ----

# Integer arguments that an op takes in any integer dtype: all except words of bits, and packed weights.
WORDS = {"visible", "allowed", "draft_allowed", "answers", "state", "table", "weight"}


def integer_places(op, sample):
    for where, tensor in places_of(sample):
        is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        name = arguments_of(op)[where[0]]
        if is_integer and name not in WORDS and where[0] not in written_by(op):
            yield where, tensor


WITH_INTEGERS = [op for op in PUBLIC if any(True for sample in samples_of(op) for _ in integer_places(op, sample))]


@pytest.mark.parametrize("op", WITH_INTEGERS)
def test_any_integer_dtype_gives_the_same_result(op):
    dtypes = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    for sample in samples_of(op):
        sample = detached(sample)
        expected = results_of(op, sample)
        for where, tensor in integer_places(op, sample):
            for dtype in dtypes:
                if (dtype in dtypes[4:] and (tensor < 0).any()) or tensor.abs().max() > torch.iinfo(dtype).max:
                    continue
                actual = results_of(op, replaced(sample, where, tensor.to(dtype)))
                for left, right in zip(actual, expected, strict=True):
                    torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", WITH_INTEGERS)
def test_integers_that_do_not_fit_are_refused_and_named(op):
    """2^32 more is the same int32, 2^64 more the same int64."""
    for sample in samples_of(op):
        sample = detached(sample)
        for where, tensor in integer_places(op, sample):
            wrapped = tensor.to(torch.int64) + 2**32
            if tensor.dtype == torch.int64:  # the dtype that the kernel reads
                wrapped = torch.full_like(tensor, -1).to(torch.uint64)
            name = arguments_of(op)[where[0]]
            with pytest.raises(
                ValueError, match=f"pass_ext::{op}: {name} must fit int(32|64), in .*, got [0-9]+ at flat"
            ):
                call(op, replaced(sample, where, wrapped))


def test_integers_that_do_not_fit_stay_out_of_range_unchecked():
    """Under vmap and compile, as on CUDA, values are not checked: they become the nearest number that int32 has."""
    from pass_ext.ops.common.arguments import integers

    values = torch.tensor([2**32, -(2**40), 7, 2**31 - 1])
    expected = torch.tensor([2**31 - 1, -(2**31), 7, 2**31 - 1], dtype=torch.int32)
    assert torch.equal(torch.func.vmap(lambda row: integers("op", "argument", row))(values[None])[0], expected)
    compiled = torch.compile(lambda row: integers("op", "argument", row), backend="eager", fullgraph=True)
    assert torch.equal(compiled(values), expected)
    unsigned = torch.tensor([2**63 + 5, 3], dtype=torch.uint64)
    clamped = torch.func.vmap(lambda row: integers("op", "argument", row, torch.int64))(unsigned[None])[0]
    assert clamped.tolist() == [2**63 - 1, 3]


LAW = ("temperature", "top_k", "top_p", "min_p")
COLUMNS = {"draft_sample": (*LAW, "seeds", "positions", "nodes"), "accept_chain": (*LAW, "seeds", "positions")}
COLUMNS["accept_chain"] += tuple(f"draft_{name}" for name in LAW)
COLUMNS["accept_tree"] = COLUMNS["accept_chain"]
INTEGERS = {"top_k", "draft_top_k", "seeds", "positions", "nodes"}


def with_columns(op, **columns):
    torch.manual_seed(3)
    arguments = dict(temperature=0.7, seeds=5, positions=0) | columns
    logits = torch.randn(2, 4, 9)
    if op == "draft_sample":
        result = pass_ext.draft_sample(logits[0][:2], 3, **arguments)
    elif op == "accept_chain":
        result = pass_ext.accept_chain(logits, torch.zeros(2, 3, dtype=torch.int64), rule="coupled", **arguments)
    else:
        tree = torch.zeros(8, dtype=torch.int64), torch.tensor([-1, 0, 0, 1, -1, 0, 1, 1]), torch.tensor([0, 4, 8]), 2
        result = pass_ext.accept_tree(logits.flatten(0, 1), *tree, **arguments)
    return [each.tolist() for each in result]


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in COLUMNS.items() for name in names])
def test_parameters_are_taken_as_number_list_tuple_and_tensor(op, name):
    one = 3 if name in INTEGERS else 0.5
    kind = torch.int64 if name in INTEGERS else torch.float64
    expected = with_columns(op, **{name: torch.tensor([one, one], dtype=kind)})
    for same in (one, [one, one], (one, one), torch.tensor(one, dtype=kind)):
        assert with_columns(op, **{name: same}) == expected, same
    two = with_columns(op, **{name: torch.tensor([one, 2 * one], dtype=kind)})
    assert with_columns(op, **{name: [one, 2 * one]}) == two


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in COLUMNS.items() for name in names])
def test_parameters_that_are_no_such_number_are_refused(op, name):
    for value in ("7", [None, 1], {}):
        with pytest.raises(TypeError, match=f"pass_ext::{op}: {name} must be (integers|numbers) .*, got "):
            with_columns(op, **{name: value})
    with pytest.raises(RuntimeError, match=rf"pass_ext::{op}: {name} must have 2 \(one for each (row|request)"):
        with_columns(op, **{name: [1, 1, 1]})
    if name not in INTEGERS:
        return
    for value in (1.5, 2.0, [1, 2.5], True, math.nan):
        with pytest.raises(TypeError, match=f"pass_ext::{op}: {name} must be integers .*, got .* of type"):
            with_columns(op, **{name: value})
    for value in (torch.tensor([1.0, 2.0]), torch.tensor(1.5)):
        with pytest.raises(RuntimeError, match=rf"pass_ext::{op}: {name} must be int(32|64), got float32\[2\] on cpu"):
            with_columns(op, **{name: value})
    for value in (2**63, -(2**63) - 1, [0, 2**64]):
        with pytest.raises(ValueError, match=rf"pass_ext::{op}: {name} must be in \[-[0-9]+, [0-9]+\], got -?[0-9]+"):
            with_columns(op, **{name: value})


@pytest.mark.parametrize("op", COLUMNS)
def test_seeds_need_positions_where_something_is_drawn(op):
    for temperature in (0.7, [0.7, 0.0], torch.tensor([0.7, 0.7]), torch.tensor(0.0)):
        with pytest.raises(
            ValueError, match=f"pass_ext::{op}: positions must be given with seeds unless .*got None; pass"
        ):
            with_columns(op, temperature=temperature, positions=None)
    for law in (dict(temperature=0), dict(temperature=[0.0, 0]), dict(seeds=None)):
        with_columns(op, positions=None, **law)
    greedy = op != "draft_sample" or dict(mode="coupled")
    if greedy is not True:
        with pytest.raises(ValueError, match="draft_sample: positions must be given"):
            with_columns(op, temperature=None, positions=None)  # 1 in the other modes
        with_columns(op, positions=None, mode="top")
    with_columns(op, temperature=None, positions=None, **({} if greedy is True else greedy))


@pytest.mark.parametrize("name", ["shard_combine", "shard_best"])
def test_shards_need_positions_with_seeds_where_something_is_drawn(name):
    *_, sample = samples_of(name)
    keywords = keywords_of(name, sample) | {"positions": None}
    if name == "shard_best":
        keywords |= {"mode": "without"}
    with pytest.raises(ValueError, match=f"pass_ext::{name}: positions must be given with seeds"):
        function_of(name)(**keywords)


def test_seeds_at_the_ends_of_int64():
    for seed in (2**63 - 1, -(2**63)):
        assert with_columns("draft_sample", seeds=seed) == with_columns(
            "draft_sample", seeds=torch.tensor([seed, seed])
        )


@pytest.mark.parametrize(("op", "depth"), [("accept_chain", 3), ("accept_tree", 2)])
def test_positions_that_end_before_the_last_draft(op, depth):
    last = 2**63 - 1 - depth
    with_columns(op, positions=[0, last])
    with pytest.raises(
        RuntimeError, match=f"pass_ext::{op}: positions must be at most {last}, .*, got {last + 1} at 1"
    ):
        with_columns(op, positions=[0, last + 1])


@pytest.mark.parametrize("node", [-1, 2**24])
def test_nodes_that_a_draw_does_not_tell_apart(node):
    with pytest.raises(RuntimeError, match=rf"draft_sample: nodes must be in \[0, 16777216\), got {node} at 1"):
        with_columns("draft_sample", nodes=[0, node])
