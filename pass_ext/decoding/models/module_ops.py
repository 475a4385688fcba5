"""``computes_by_ops``: gives linear layers, norms, gated MLPs and attention of a model's shadow forwards that use our ops.

A linear layer is recognised by its class, or a subclass by what it computes, as Falcon's. PyTorch's matrix product is slow for
few rows on the CPU; without instructions for bf16 or fp16 for any number of them. On a GPU a measurement decides
(``product_times.py``); light weights are read in less time than a launch takes, and the layer ops, which need fewer launches,
have the bits of ``linear_rows``.
A norm or gated MLP is recognised by what it computes: its class's code runs on random numbers, with a stand-in in place of the
module, and must give the op's numbers. Whatever is not recognised stays as it is.
Attention whose code calls ``apply_rotary_pos_emb`` calls the op there, if the function has the op's bits: for the many rows of
a prompt it is faster.
"""

from __future__ import annotations

import inspect
import platform
import sys
from collections.abc import Callable
from functools import cache, lru_cache, partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.modules import modules_of
from pass_ext.decoding.models.product_times import FLOATS, torch_is_faster
from pass_ext.decoding.models.rebound import globals_of, rebound
from pass_ext.ops import linear  # noqa: F401, which registers the op
from pass_ext.ops.step import ACTIVATIONS, NORM_FORMS

_linear = torch.ops.pass_ext.linear_rows.default
_norm = torch.ops.pass_ext.step_rms_norm.default
_gate = torch.ops.pass_ext.step_gate.default
_rotary = torch.ops.pass_ext.step_rotary.default

_EPS = ("variance_epsilon", "eps")
_SEPARATE = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_JOINED = {"gate_up_proj", "chunk", "down_proj", "activation_fn"}
_ROTARY = "apply_rotary_pos_emb"


def computes_by_ops(module: nn.Module, takes: Callable[..., bool]) -> None:
    """Gives every recognised part of a model's shadow a forward that computes by its op.

    Linear layers take rows if ``takes(rows, most_few_rows(...), is_torchs=...)``. Calls that are compiled, that record
    gradients or that have tensors of another dtype compute as before, and so does a part whose weight was replaced. Modules
    whose ``forward`` somebody replaced stay as they are; hooks of norms and MLPs run as before. Under autocast nothing changes.
    """
    if is_autocast_enabled():
        return
    torchs = _products_of_torch(module)
    for part in modules_of(module):
        if "forward" not in vars(part) and type(type(part).forward) is FunctionType:
            forward: Any = (
                _linear_forward(part, partial(takes, is_torchs=part in torchs))
                or _norm_forward(part)
                or _gate_forward(part)
                or _attention_forward(part)
            )
            if forward is not None:
                part.forward = forward


def is_autocast_enabled() -> bool:
    """True under autocast of any device that has our kernels."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def is_plain(tensor: Tensor) -> bool:
    """True if a kernel may read a tensor's memory as numbers of its shape and dtype.

    False for subclasses (torchao's quantised tensors, DTensor, fake tensors, which define their own operations), for sparse
    and quantised tensors, and for tensors without memory: on the meta device, or with a freed storage."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and (not tensor.numel() or tensor.untyped_storage().nbytes() > 0)
    )


def is_untouched(part: nn.Module) -> bool:
    """True for a module that computes by its class's code alone."""
    return "forward" not in vars(part) and not (part._forward_hooks or part._forward_pre_hooks)


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


# ---- linear layer ----


@lru_cache
def most_few_rows(dtype: torch.dtype, is_cpu: bool) -> int:
    """With more rows ``torch.nn.functional.linear`` may be faster."""
    if not is_cpu or platform.machine() not in ("x86_64", "AMD64"):
        return 64
    if dtype is torch.float32:
        return 256
    if dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return 64
    if dtype is torch.bfloat16 and torch.cpu._is_avx512_bf16_supported():
        return 192
    if dtype is torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return 64
    return sys.maxsize  # PyTorch converts the weights in each call


def are_few(rows: int, most: int, text_rows: int = sys.maxsize) -> bool:
    """True for at most so many rows, of the call or of each of its texts: what is few for a text is so in any batch."""
    return min(rows, text_rows) <= most


def _is_linear(part: nn.Module | None) -> TypeGuard[nn.Linear]:
    """True for an ``nn.Linear``, and for a subclass that has nothing else and whose code computes the same."""
    kind: Any = type(part)
    if kind is nn.Linear or not isinstance(part, nn.Linear) or not vars(part).keys() <= _OF_A_LINEAR:
        return kind is nn.Linear
    weight = part._parameters.get("weight")
    return weight is not None and _multiplies(kind, kind.forward, weight.dtype, part.bias is not None)


_OF_A_LINEAR = {*vars(nn.Linear(1, 1)), "_is_hf_initialized"}


@cache
def _multiplies(kind: Any, forward: Callable[..., Tensor], dtype: torch.dtype, has_bias: bool) -> bool:
    """True if modules of this class compute what ``linear_rows`` does. By whole numbers, whose sums are exact in any order."""
    if dtype not in FLOATS:
        return False
    x, weight, bias = ((_random(*shape) * 3).round().to(dtype) for shape in ((3, 4, 96), (64, 96), (64,)))
    try:
        stand_in = kind.__new__(kind)
        nn.Module.__init__(stand_in)
        stand_in.in_features, stand_in.out_features = 96, 64
        stand_in.weight = nn.Parameter(weight, requires_grad=False)
        stand_in.bias = nn.Parameter(bias, requires_grad=False) if has_bias else None
        with torch.no_grad():
            computed = forward(stand_in, x)
    except Exception:  # it needs more than these
        return False
    exact = x.double() @ weight.double().mT
    return _is_close((exact if stand_in.bias is None else exact + bias).to(dtype), computed)


def _linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [part for part in modules_of(module) if _is_linear(part) and "weight" in part._parameters]


def _products_of_torch(module: nn.Module) -> set[nn.Module]:
    """The linear layers that PyTorch computes faster. Those in an element of a ``ModuleList`` are measured together: all
    products of a decoder layer by one library. Else keys and values of a large model could be ours and its queries not."""
    layers = [layer for part in modules_of(module) if isinstance(part, nn.ModuleList) for layer in part]
    groups = [_linear_layers(layer) for layer in layers]
    in_layers = {part for group in groups for part in group}
    groups += [[part] for part in _linear_layers(module) if part not in in_layers]
    return {part for group in groups if torch_is_faster([part.weight for part in group]) for part in group}


def is_plain_linear(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """True for a linear layer without hooks, without a forward of its own, and with plain weights that ``linear_rows``
    takes."""
    if not _is_linear(layer):
        return False
    weight = layer._parameters.get("weight")  # missing where a parametrization computes it
    return (
        weight is not None
        and is_plain(weight)
        and (weight.is_cpu or weight.is_cuda)
        and weight.dtype in FLOATS
        and (layer.bias is None or (is_plain(layer.bias) and layer.bias.dtype == weight.dtype))
        and (weight.shape[1] < 2 or weight.stride(1) == 1)
        and is_untouched(layer)
    )


def are_of_torch(part: nn.Module) -> bool:
    """True if PyTorch computes the linear layers in a part faster, all together."""
    return torch_is_faster([layer.weight for layer in _linear_layers(part)])


def _linear_forward(layer: nn.Module, takes: Callable[..., bool]) -> Callable[[Tensor], Tensor] | None:
    """``linear_rows`` for rows that it takes, the class's own code otherwise."""
    if not is_plain_linear(layer):
        return None
    # Looking up `layer.weight` in each call would cost as much as a small product. The dictionary is quick to read, and shows
    # whether a weight was replaced.
    parameters = layer._parameters
    weight, bias, dtype, width = layer.weight, layer.bias, layer.weight.dtype, max(1, layer.in_features)
    is_cpu, original = weight.is_cpu, type(layer).forward
    most = most_few_rows(dtype, is_cpu)

    def forward(input: Tensor) -> Tensor:
        if (
            _may_replace()
            and input.dtype is dtype
            and input.is_cpu is is_cpu
            and parameters.get("weight") is weight
            and parameters.get("bias") is bias
            and takes(input.numel() // width, most)
        ):
            return _linear(input, weight, bias)
        return original(layer, input)

    return forward


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
    switches = frozenset((key, value) for key, value in vars(part).items() if type(value) is bool and key != "training")
    form = _norm_form(kind, kind.forward, name, weight.dtype, switches)
    if form is None or weight.dim() != 1 or not (weight.is_cpu or weight.is_cuda):
        return None
    return Norm(weight, vars(part)[name], form)


def _norm_forward(part: nn.Module) -> Callable[..., Tensor] | None:
    norm = norm_of(part)
    if norm is None:
        return None
    weight, eps, form = norm
    dtype, parameters, original = weight.dtype, part._parameters, type(part).forward

    def forward(input: Tensor, *gates: Any, **named: Any) -> Tensor:
        if gates or named:  # norms of recurrent layers may take a gate
            return original(part, input, *gates, **named)
        if input.dtype is dtype and parameters.get("weight") is weight and _may_replace():
            return _norm(input, weight, None, eps, form)[0]
        return original(part, input)

    return forward


@cache
def _norm_form(
    kind: Any, forward: Callable[..., Tensor], eps_name: str, dtype: torch.dtype, switches: frozenset[tuple[str, bool]]
) -> int | None:
    """The index of the form in which modules of this class with these switches multiply by their weight; None if they compute
    anything else."""
    if dtype not in FLOATS:
        return None
    x, weight, eps = (_random(3, 4, 96) * 3).to(dtype), _random(96).to(dtype), 0.05
    try:
        stand_in = kind.__new__(kind)
        nn.Module.__init__(stand_in)
        stand_in.weight = nn.Parameter(weight, requires_grad=False)
        vars(stand_in).update({eps_name: eps, **dict(switches)})
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
    index = _activation(original, activation, joined=joined) if is_untouched(activation) else None
    return None if index is None else Gate(index, joined)


def _gate_forward(part: nn.Module) -> Callable[[Tensor], Tensor] | None:
    gated = gate_of(part)
    if gated is None:
        return None
    original: Callable[..., Tensor] = type(part).forward
    modules: dict[str, Any] = part._modules

    def forward(input: Tensor) -> Tensor:
        if not _may_replace() or input.dtype not in FLOATS:
            return original(part, input)
        if gated.joined:
            gate, up = modules["gate_up_proj"](input), None
        else:
            gate, up = modules["gate_proj"](input), modules["up_proj"](input)
        return modules["down_proj"](_gate(gate, up, gated.activation))

    return forward


def _activation(mlp: Callable[..., Tensor], activation: nn.Module, *, joined: bool) -> int | None:
    """The index of the activation of an MLP that computes ``down(activation(gate(x)) * up(x))``; None for any other."""
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


# ---- rotary embedding ----


def _attention_forward(part: nn.Module) -> MethodType | None:
    """The class's own forward, in which ``apply_rotary_pos_emb`` is the op."""
    forward: Any = type(part).forward
    inner: Any = inspect.unwrap(forward)
    rotate = inner.__globals__.get(_ROTARY) if isinstance(inner, FunctionType) else None
    if not isinstance(rotate, FunctionType) or _ROTARY not in inner.__code__.co_names or not _rotates_halves(rotate):
        return None
    copy = _with_our_rotation(forward, rotate)
    if copy is None:
        return None
    ours = globals_of(copy)
    ours.update({**inner.__globals__, _ROTARY: ours[_ROTARY]})  # what users replaced since
    return MethodType(copy, part)


@cache
def _with_our_rotation(forward: FunctionType, rotate: FunctionType) -> FunctionType | None:
    """One copy for all layers and generations: torch.compile keeps its graphs by code object and globals."""
    return rebound(forward, {_ROTARY: _rotation(rotate)})


def _rotation(original: FunctionType) -> Callable[..., Any]:
    def apply_rotary_pos_emb(*tensors: Any, **options: Any) -> Any:
        if len(tensors) == 4 and not options and _may_replace() and _fits(*tensors):
            return _rotate(*tensors)
        return original(*tensors, **options)

    return apply_rotary_pos_emb


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """One batch, heads before rows, all of one dtype."""
    return (
        q.dim() == k.dim() == 4
        and q.shape[0] == k.shape[0] == 1
        and k.shape[2:] == q.shape[2:]
        and cos.shape == sin.shape == (1, *q.shape[2:])
        and q.dtype is k.dtype is cos.dtype is sin.dtype
        and q.dtype in FLOATS
    )


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = _rotary(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None]


@cache
def _rotates_halves(rotate: FunctionType) -> bool:
    """True if the function gives the op's bits in every dtype."""
    for dtype in FLOATS:
        q, k = (_random(1, heads, 5, 16).to(dtype) for heads in (3, 2))
        cos, sin = _random(2, 1, 5, 16).to(dtype)
        try:
            q_rotated, k_rotated = rotate(q, k, cos, sin)
            is_same = all(map(torch.equal, (q_rotated, k_rotated), _rotate(q, k, cos, sin)))
        except Exception:  # it takes other arguments, or gives another result
            return False
        if not is_same:
            return False
    return True
