"""Every op that torch lists in the namespace, so that none is forgotten: opcheck, and a kernel for each device."""

import pytest
import torch
from support.calls import DEVICES
from support.faces import function_of
from support.samples import SAMPLES

from pass_ext import _library


def test_every_op_has_samples():
    assert set(SAMPLES) == set(_library.op_names())


def kind_of(value):
    """What fake kernels and derivatives may see of an argument: the numbers in a tensor they may not."""
    if isinstance(value, list):
        return tuple(map(kind_of, value))
    return (value.dtype, value.shape, value.stride(), value.requires_grad) if torch.is_tensor(value) else value


def form_of(value):
    """What decides how a call is traced: which arguments are given, their axes and gradients, not their sizes or types."""
    if isinstance(value, list):
        return tuple(map(form_of, value))
    return (value.dim(), value.requires_grad) if torch.is_tensor(value) else value is None or value is True


OF_KINDS = ("test_schema", "test_autograd_registration", "test_faketensor")
OF_FORMS = (*OF_KINDS, "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", _library.op_names())
def test_opcheck(op, device):
    if device == "cuda" and op in _library.CPU_ONLY:
        pytest.skip(_library.CPU_ONLY[op])
    overload = getattr(torch.ops.pass_ext, op).default
    names, seen = [argument.name for argument in overload._schema.arguments], set()
    for arguments in SAMPLES[op](device):
        values = [value for name, value in zip(names, arguments, strict=True) if name not in ("rule", "mode")]
        kind, form = tuple(map(kind_of, values)), ("form", *map(form_of, values))
        if kind not in seen:
            # Tracing takes a tenth of a second and more: once for each form.
            result = torch.library.opcheck(overload, arguments, test_utils=OF_KINDS if form in seen else OF_FORMS)
            assert set(result.values()) == {"SUCCESS"}
        seen |= {kind, form}


@pytest.mark.parametrize("op", _library.op_names())
def test_every_op_has_a_kernel_or_a_refusal_on_each_device(op):
    for key in ("CPU", "CUDA", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pass_ext::{op}", key), key


@pytest.mark.parametrize("op", _library.CPU_ONLY)
def test_an_op_without_a_cuda_kernel_says_what_to_do(op):
    with pytest.raises(RuntimeError, match=f"{op}: got a CUDA tensor, but .*for the CPU"):
        _library._refusal(op, _library.CPU_ONLY[op])()


def test_no_op_is_registered_under_a_name_that_the_package_does_not_mention():
    """`import pass_ext` offers the forward ops; the others are their gradients."""
    for op in _library.op_names():
        assert function_of(op) is not None or op.endswith("_backward")
