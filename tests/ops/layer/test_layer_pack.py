"""layer_pack: packed layers give layer_stack the bits of the listed ones; whatever happens to a weight or a key afterwards, a
call computes with the weights as they are now, or refuses.
"""

import copy
import gc
import os
import pickle
import threading
import weakref

import pytest
import torch
from test_layer_stack import ALL, DIM, FLOATS, WIDTH, assert_same, case_of
from torch import nn

import pass_ext

_stack = torch.ops.pass_ext.layer_stack.default


def packed(case):
    return case | dict(layers=pass_ext.layers.layer_pack(case["layers"], head_dim=DIM))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(plain=True),
        dict(biases=True, norms=("input_norm", "mlp_norm", "q_norm", "k_norm")),
        dict(norms=("attention_norm", "output_norm")),
        dict(norms=()),
        dict(adapted=ALL),
    ],
    ids=str,
)
def test_the_bits_of_the_listed_layers(cpu, dtype, options):
    case = case_of(dtype, **options)
    once = packed(case)
    for changes in ({}, dict(x=case["x"].flip(0))):
        assert_same(pass_ext.layers.layer_stack(**once | changes), pass_ext.layers.layer_stack(**case | changes))


def test_rows_of_a_joined_weight(cpu):
    """A weight's rows may be strided, and begin inside its storage."""
    case = case_of(torch.bfloat16)
    layer = case["layers"][1]
    wide = torch.cat([torch.full_like(layer.up_weight, float("nan")), layer.up_weight], dim=1)
    case["layers"][1] = layer._replace(up_weight=wide[:, WIDTH:])
    assert_same(pass_ext.layers.layer_stack(**packed(case)), pass_ext.layers.layer_stack(**case))


def test_numbers_that_change_inside_a_weight_are_seen(cpu):
    case = case_of(torch.float32)
    once = packed(case)
    former = pass_ext.layers.layer_stack(**once)
    case["layers"][1].down_weight.mul_(2)
    case["layers"][2].mlp_norm.add_(1)
    now = pass_ext.layers.layer_stack(**once)
    assert not torch.equal(now[0], former[0])
    assert_same(now, pass_ext.layers.layer_stack(**case))


REPLACED = {
    "elsewhere": lambda w: w.clone(),
    "another dtype there": lambda w: w.view(torch.float16),
    "transposed there": lambda w: w.t(),
    "other rows there": lambda w: w[:-1],
    "nothing": lambda w: w.new_empty(0),
}


@pytest.mark.parametrize("change", REPLACED)
@pytest.mark.parametrize("part", ["q_weight", "down_weight", "mlp_norm"])
def test_replaced_data_is_refused(cpu, change, part):
    case = case_of(torch.bfloat16)
    once, weight = packed(case), getattr(case["layers"][2], part)
    former = weight.data
    if change == "transposed there" and part == "mlp_norm":
        weight.data = former.as_strided(former.shape, (0,))
    else:
        weight.data = REPLACED[change](former)
    message = rf"layer_stack: layer 2: {part} must be as layer_pack found it, got .* .its data was replaced."
    with pytest.raises(RuntimeError, match=message):
        pass_ext.layers.layer_stack(**once)
    weight.data = former
    assert_same(pass_ext.layers.layer_stack(**once), pass_ext.layers.layer_stack(**case))


@pytest.mark.parametrize("left", [0, 2])
def test_freed_memory_is_refused(cpu, left):
    """FSDP frees a storage between layers."""
    case = case_of(torch.bfloat16)
    once = packed(case)
    weight = case["layers"][1].gate_weight
    numbers, storage = weight.clone(), weight.untyped_storage()
    storage.resize_(left)
    with pytest.raises(RuntimeError, match="layer_stack: layer 1: gate_weight must have its elements in memory"):
        pass_ext.layers.layer_stack(**once)
    storage.resize_(numbers.numel() * 2)
    weight.copy_(numbers)
    once = packed(case)
    assert_same(pass_ext.layers.layer_stack(**once), pass_ext.layers.layer_stack(**case))


def test_weights_live_as_long_as_their_pack():
    case = case_of(torch.float32)
    expected, once = pass_ext.layers.layer_stack(**case), packed(case)
    weights = [weakref.ref(tensor) for layer in case.pop("layers") for tensor in layer if tensor is not None]
    gc.collect()
    assert_same(pass_ext.layers.layer_stack(**once), expected)
    del once["layers"]
    gc.collect()
    assert [weight() for weight in weights] == [None] * len(weights)


def key_arguments(case):
    """The arguments of the op, as the function gives them."""
    pack, seen = case["layers"], []

    class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            if function is _stack:
                seen.append(arguments)
            return function(*arguments, **keywords or {})

    with Recorded():
        pass_ext.layers.layer_stack(**case)
    assert seen[0][2][0] is pack.key
    return list(seen[0])


def test_a_key_that_is_none_is_refused():
    once = packed(case_of(torch.float32))
    arguments = key_arguments(once)
    key = once["layers"].key
    _stack(*arguments)
    for other in (key.clone(), torch.zeros_like(key), key[1:], torch.tensor([key.data_ptr()]), key.new_empty(0)):
        arguments[2] = [other]
        with pytest.raises(
            RuntimeError, match="weights must be a key that layer_pack made in this process and that was not"
        ):
            _stack(*arguments)
    arguments[2] = [key.float()]
    with pytest.raises(RuntimeError, match="weights must have 9 tensors for each of 1 or more layers"):
        _stack(*arguments)
    key.zero_()  # its numbers are not read
    arguments[2] = [key]
    _stack(*arguments)


def test_a_released_key_is_refused():
    once = packed(case_of(torch.float32))
    arguments, other = key_arguments(once), packed(case_of(torch.float32, seed=1))
    del once
    gc.collect()
    with pytest.raises(RuntimeError, match=r"and that was not released, got int64\[3, 20\] on cpu"):
        _stack(*arguments)
    pass_ext.layers.layer_stack(**other)


def test_a_key_whose_memory_moved_is_refused():
    once = packed(case_of(torch.float32))
    once["layers"].key.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"weights\[0\] must have its elements in memory"):
        pass_ext.layers.layer_stack(**once)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda way: way.__name__)
def test_packs_are_neither_copied_nor_pickled(way):
    once = packed(case_of(torch.float32))
    with pytest.raises(TypeError, match="PackedLayers cannot be copied or pickled: pack the copied weights"):
        way(once["layers"])
    pass_ext.layers.layer_stack(**once)


def test_threads_call_while_others_pack_and_release():
    """Each call has the result of its own pack."""
    cases = [case_of(torch.bfloat16, seed=seed) for seed in range(3)]
    expected, errors = [pass_ext.layers.layer_stack(**case) for case in cases], []
    ends = threading.Event()

    def pack_and_release():
        while not ends.is_set():
            for case in cases:
                pass_ext.layers.layer_pack(case["layers"], head_dim=DIM)

    def run(index):
        try:
            for _ in range(60):
                assert_same(pass_ext.layers.layer_stack(**packed(cases[index])), expected[index])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    releasing = threading.Thread(target=pack_and_release)
    for thread in [releasing, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    ends.set()
    releasing.join()
    assert errors == []


def test_a_forked_process_has_the_packs():
    """It releases its own, and not its parent's."""
    case = case_of(torch.bfloat16)
    once, expected = packed(case), pass_ext.layers.layer_stack(**case)
    child = os.fork()
    if child == 0:
        try:
            same = torch.equal(pass_ext.layers.layer_stack(**once)[0], expected[0])
            del once["layers"]
            os._exit(0 if same else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_same(pass_ext.layers.layer_stack(**once), expected)


def test_in_a_compiled_function():
    case = packed(case_of(torch.float32))
    x = case.pop("x")
    compiled = torch.compile(lambda x: pass_ext.layers.layer_stack(x + 1, **case)[0] * 2, backend="aot_eager")
    assert torch.equal(compiled(x), pass_ext.layers.layer_stack(x + 1, **case)[0] * 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(head_dim=32), "layer_stack: head_dim must be 64, of the packed layers, got 32"),
        (
            dict(x=torch.ones(12, WIDTH, dtype=torch.bfloat16)),
            r"layer_stack: x must be float32, got bfloat16\[12, 72\]",
        ),
        (dict(x=torch.ones(12, 71)), r"layer_stack: x must have 72 .d, of the packed layers. in dimension 1"),
        (dict(windows=(-1, 5)), r"layer_stack: windows must have 3 items .3 layers., got 2"),
        (dict(scale=0.5, norms=("output_norm",)), "layer_stack: scale must be 1 beside attention_norm or output_norm"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_calls_that_do_not_fit_the_pack(cpu, changes, message):
    changes = dict(changes)
    once = packed(case_of(torch.float32, norms=changes.pop("norms", ("input_norm",))))
    with pytest.raises(RuntimeError, match=message):
        pass_ext.layers.layer_stack(**once | changes)


def test_other_parts_than_packed_are_refused():
    once = packed(case_of(torch.float32))
    arguments = key_arguments(once)
    arguments[3] ^= 1  # without input_norm
    with pytest.raises(RuntimeError, match=r"layer_stack: parts must be [0-9]+, of the packed layers, got [0-9]+"):
        _stack(*arguments)


@pytest.mark.parametrize(
    ("changes", "head_dim", "message"),
    [
        (dict(up_weight=torch.ones(99, WIDTH)), DIM, "layer_pack: layer 1: up_weight must have 100 .the rows of gate_weight."),
        (dict(q_weight=torch.ones(384, WIDTH).half()), DIM, "layer_pack: layer 1: q_weight must be float32, got float16"),
        (dict(mlp_norm=None), DIM, "layer_pack: layers must all have the same optional parts"),
        ({}, 0, "layer_pack: head_dim must be at least 1, got 0"),
        ({}, 36, "q_weight and k_weight must have multiples of 36"),
        (dict(up_weight=nn.Parameter(torch.ones(100, WIDTH))), DIM, "layer_pack: no gradient is implemented"),
    ],
    ids=str,
)  # fmt: skip
def test_layers_that_cannot_be_packed(changes, head_dim, message):
    layers = list(case_of(torch.float32)["layers"])
    layers[1] = layers[1]._replace(**changes)
    with pytest.raises((RuntimeError, ValueError), match=message):
        pass_ext.layers.layer_pack(layers, head_dim=head_dim)


def test_no_layers_and_a_first_weight_of_no_shape():
    with pytest.raises(ValueError, match="layer_pack: layers must be 1 or more, got none"):
        pass_ext.layers.layer_pack([], head_dim=DIM)
    layers = list(case_of(torch.float32)["layers"])
    layers[0] = layers[0]._replace(q_weight=torch.tensor(1.0))
    with pytest.raises(RuntimeError, match=r"layer_pack: q_weight must have shape \[out, in\]"):
        pass_ext.layers.layer_pack(layers, head_dim=DIM)
