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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", _library.op_names())
def test_opcheck(op, device):
    if device == "cuda" and op in _library.CPU_ONLY:
        pytest.skip(_library.CPU_ONLY[op])
    overload = getattr(torch.ops.pass_ext, op).default
    names, seen = [argument.name for argument in overload._schema.arguments], set()
    for arguments in SAMPLES[op](device):
        kind = tuple(
            kind_of(value) for name, value in zip(names, arguments, strict=True) if name not in ("rule", "mode")
        )
        if kind not in seen:
            seen.add(kind)
            result = torch.library.opcheck(overload, arguments)
            assert set(result.values()) == {"SUCCESS"}


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
