"""Recognises norms and gated MLPs, and gives a shadow's their ops.

A part is recognised by what it computes: its class's code runs on random numbers, with a stand-in in place of the module, and
must give the op's numbers. Whatever is not recognised stays as it is.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.patching.few_rows import is_autocast_enabled
from pass_ext.decoding.models.plain_tensors import is_plain
from pass_ext.ops.step import ACTIVATIONS, NORM_FORMS

_norm = torch.ops.pass_ext.step_rms_norm.default
_gate = torch.ops.pass_ext.step_gate.default

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_EPS = ("variance_epsilon", "eps")
_SEPARATE = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_JOINED = {"gate_up_proj", "chunk", "down_proj", "activation_fn"}


def computes_by_ops(module: nn.Module) -> None:
    """Gives every norm and gated MLP of a model's shadow that is recognised a forward that computes by its op.

    Calls that are compiled, that record gradients or that have tensors of another dtype compute as before. Modules whose
    ``forward`` somebody replaced stay as they are; hooks run as before. Under autocast nothing changes.
    """
    if is_autocast_enabled():
        return
    for part in module.modules():
        if "forward" not in vars(part) and type(type(part).forward) is FunctionType:
            forward = _norm_forward(part) or _gate_forward(part)
            if forward is not None:
                part.forward = forward


def _may_replace() -> bool:
    return not torch.compiler.is_compiling() and not torch.is_grad_enabled()


def _is_close(actual: Tensor, expected: Any) -> bool:
    """Equal but for rounding: in 16 bits few numbers may differ, each by a rounding or two."""
    if not isinstance(expected, Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    error, size = (actual.float() - expected.float()).abs(), expected.float().abs()
    near = error <= 4 * torch.finfo(expected.dtype).eps * size + 1e-6
    few = expected.dtype == torch.float32 or bool((error > 0).float().mean() < 0.01)
    return bool(near.all()) and few


def _random(*shape: int) -> Tensor:
    """Numbers on the CPU that take no draw from torch's generator, which the caller may have seeded."""
    generator = torch.Generator("cpu").manual_seed(len(shape))
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


# ---- norm ----


class Norm(NamedTuple):
    """A module that is an RMSNorm."""

    weight: Tensor
    eps: float
    form: int
    """Index in ``NORM_FORMS``."""


def norm_of(part: nn.Module) -> Norm | None:
    """The norm that the module computes by its class's code; None if that is anything else."""
    weight = part._parameters.get("weight")
    name = next((name for name in _EPS if isinstance(vars(part).get(name), float)), None)
    if name is None or weight is None or len(part._parameters) > 1 or part._modules or not is_plain(weight):
        return None
    kind: Any = type(part)
    form = _norm_form(kind, kind.forward, name, weight.dtype)
    if form is None or weight.dim() != 1 or not (weight.is_cpu or weight.is_cuda):
        return None
    return Norm(weight, vars(part)[name], form)


def _norm_forward(part: nn.Module) -> Callable[[Tensor], Tensor] | None:
    norm = norm_of(part)
    if norm is None:
        return None
    weight, eps, form = norm
    kind: Any = type(part)
    dtype, parameters, original = weight.dtype, part._parameters, kind.forward

    def forward(input: Tensor) -> Tensor:
        if input.dtype is dtype and parameters.get("weight") is weight and _may_replace():
            return _norm(input, weight, None, eps, form)[0]
        return original(part, input)

    return forward


@cache
def _norm_form(kind: Any, forward: Callable[..., Tensor], eps_name: str, dtype: torch.dtype) -> int | None:
    """The index of the form in which modules of this class multiply by their weight; None if they compute anything else."""
    if dtype not in _FLOATS:
        return None
    x, weight, eps = (_random(3, 4, 96) * 3).to(dtype), _random(96).to(dtype), 0.05
    try:
        stand_in = kind.__new__(kind)
        nn.Module.__init__(stand_in)
        stand_in.weight = nn.Parameter(weight, requires_grad=False)
        setattr(stand_in, eps_name, eps)
        with torch.no_grad():
            computed = forward(stand_in, x)
    except Exception:  # it needs more than a weight and an eps
        return None
    forms = range(len(NORM_FORMS))
    return next((form for form in forms if _is_close(_norm(x, weight, None, eps, form)[0], computed)), None)


# ---- gate ----


class Gate(NamedTuple):
    """A module that is a gated MLP."""

    activation: int
    """Index in ``ACTIVATIONS``."""
    module: Any
    """The module of the activation."""
    joined: bool
    """True if one product, ``gate_up_proj``, gives gate and up."""


def gate_of(part: nn.Module) -> Gate | None:
    """The gated MLP that the module computes by its class's code; None if that is anything else."""
    original: Any = type(part).forward
    names = set(original.__code__.co_names)
    if names not in (_SEPARATE, _JOINED):
        return None
    modules: dict[str, Any] = part._modules
    joined = names == _JOINED
    activation = modules.get("activation_fn" if joined else "act_fn")
    products = ("gate_up_proj",) if joined else ("gate_proj", "up_proj")
    if activation is None or any(modules.get(name) is None for name in (*products, "down_proj")):
        return None
    index = _activation(original, activation, joined=joined)
    return None if index is None else Gate(index, activation, joined)


def _gate_forward(part: nn.Module) -> Callable[[Tensor], Tensor] | None:
    gated = gate_of(part)
    if gated is None:
        return None
    index, activation, is_joined = gated
    original: Callable[..., Tensor] = type(part).forward
    modules: dict[str, Any] = part._modules

    def separate(input: Tensor) -> Tensor:
        if not _may_replace():
            return original(part, input)
        gate, up = modules["gate_proj"](input), modules["up_proj"](input)
        if gate.dtype is up.dtype and gate.dtype in _FLOATS:
            return modules["down_proj"](_gate(gate, up, index))
        return modules["down_proj"](activation(gate) * up)

    def joined(input: Tensor) -> Tensor:
        if not _may_replace() or input.dtype not in _FLOATS:
            return original(part, input)
        return modules["down_proj"](_gate(modules["gate_up_proj"](input), None, index))

    return joined if is_joined else separate


def _activation(mlp: Callable[..., Tensor], activation: nn.Module, *, joined: bool) -> int | None:
    """The index of the activation of an MLP that computes ``down(activation(gate(x)) * up(x))``; None for any other."""
    if "forward" in vars(activation) or activation._forward_hooks or activation._forward_pre_hooks:
        return None
    gate, up, both = _numbers_for_gate()

    def product(result: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda input: result if input is both else torch.full_like(result, torch.nan)

    stand_in = SimpleNamespace(gate_proj=product(gate), up_proj=product(up), gate_up_proj=product(both),
                               down_proj=lambda hidden: hidden, act_fn=activation, activation_fn=activation)  # fmt: skip
    try:
        with torch.no_grad():
            computed = mlp(stand_in, both)
    except Exception:  # it needs more than these
        return None
    arguments = (both, None) if joined else (gate, up)
    indices = range(len(ACTIVATIONS))
    return next((index for index in indices if _is_close(_gate(*arguments, index), computed)), None)


@cache
def _numbers_for_gate() -> tuple[Tensor, Tensor, Tensor]:
    gate, up = _random(2, 5, 64) * 3
    return gate, up, torch.cat([gate, up], dim=-1)
