"""``layer_calls``: inside a context a model's decoder layers compute few rows on the CPU by two ops around their attention,
``layer_before_attention`` and ``layer_after_attention``.

A layer is taken apart by the names of its parts, and believed by its numbers: its first call runs as before, and only if the
ops give the same bits for queries, keys, values and output do they compute the layer's further calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.packed import Attend
from pass_ext.decoding.models.patching.few_rows import MAX_FEW_ROWS, is_plain_linear
from pass_ext.decoding.models.patching.row_attention import OurCall, attending, current_call
from pass_ext.decoding.models.patching.step_modules import gate_of, norm_of
from pass_ext.ops import layer as registration  # noqa: F401

_before = torch.ops.pass_ext.layer_before_attention.default
_after = torch.ops.pass_ext.layer_after_attention.default

# Which norm is where, by the names of a layer's norms: in front of attention, behind it, in front of the MLP, behind it.
_NORMS: dict[frozenset[str], tuple[str, str, str, str]] = {
    frozenset({"input_layernorm", "post_attention_layernorm"}):
        ("input_layernorm", "", "post_attention_layernorm", ""),
    frozenset({"post_attention_layernorm", "post_feedforward_layernorm"}):
        ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    frozenset({"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}):
        ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}  # fmt: skip
_INERT = (nn.Dropout, nn.Identity)  # in eval mode
_SETTINGS = (bool, int, float, str, type(None))

_checked: MutableMapping[nn.Module, _Layer] = WeakKeyDictionary()
"""Layers with their results of the first call, which hold for all generations while weights and numbers are the same."""


@contextmanager
def layer_calls(module: nn.Module) -> Iterator[None]:
    """Replaces the forward of every decoder layer that can be taken apart, and restores it at the end, also after an error.

    Layers with hooks on their parts, or with parts of unknown types (adapters, quantised weights), stay as they are; all layers
    do while torch has hooks for every module. Calls outside a generation, with many rows, that record gradients or are compiled
    compute as before; so do all calls of a layer whose weights are replaced meanwhile.
    """
    changed: list[nn.Module] = []
    try:
        if not (torch.is_autocast_enabled("cpu") or nn.modules.module._has_any_global_hook()):
            for layer in list(module.modules()):
                parts = _parts_of(layer)
                if parts is None:
                    continue
                known = _checked.get(layer)
                if known is None or not known.parts.equal(parts):
                    known = _checked[layer] = _Layer(parts)
                layer.forward = _forward(layer, known)
                changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


def is_layer_call(layer: nn.Module) -> bool:
    """True inside ``layer_calls`` for a layer whose forward it replaced; the layer computes what it did."""
    return hasattr(vars(layer).get("forward"), "layer_call")


class _Parts(NamedTuple):
    """What the two ops need of a layer."""

    before: tuple[Any, ...]
    """Arguments of layer_before_attention behind x, without cos and sin: (norm … k_norm), (head_dim, eps, form)."""
    after: tuple[Any, ...]
    """Arguments of layer_after_attention behind residual."""
    sources: tuple[tuple[dict[str, Any], str, Any], ...]
    """(a module's parameters, a name, the tensor when the layer was taken apart)"""
    settings: tuple[Any, ...]
    """Numbers, words and truths among the attributes of the layer's modules: eps, scaling, a window …"""
    layer: int
    dtype: torch.dtype

    def equal(self, other: _Parts) -> bool:
        """True if both are of the same tensors and settings."""
        if len(self.sources) != len(other.sources) or self.settings != other.settings:
            return False
        return all(mine[2] is theirs[2] for mine, theirs in zip(self.sources, other.sources, strict=True))

    def are_current(self) -> bool:
        """True if no weight was replaced."""
        return all(parameters.get(name) is tensor for parameters, name, tensor in self.sources)


class _Layer:
    """A layer's parts, and what its first call showed."""

    def __init__(self, parts: _Parts) -> None:
        self.parts = parts
        self.is_right: bool | None = None  # None: not yet called
        self.rotates = True
        self.attention: dict[str, Any] = {}  # options of attend
        self.returns_tuple = False

    def before(self, rows: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        tensors, numbers = self.parts.before
        q, k, v = _before(rows, *tensors, cos, sin, *numbers)
        return q, k, v

    def after(self, attended: Tensor, rows: Tensor) -> Tensor:
        out: Tensor = _after(attended.view(len(rows), -1), rows, *self.parts.after)
        return out


def _forward(layer: nn.Module, known: _Layer) -> Callable[..., Any]:
    original: Callable[..., Any] = type(layer).forward.__get__(layer)
    most, dtype, parts = MAX_FEW_ROWS, known.parts.dtype, known.parts

    def forward(hidden_states: Tensor, *others: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or known.is_right is False:
            return original(hidden_states, *others, **named)
        call, rotation = current_call(), named.get("position_embeddings")
        if (
            call is None
            or others
            or hidden_states.dim() != 3
            or hidden_states.shape[0] != 1
            or not 0 < hidden_states.shape[1] <= most
            or hidden_states.dtype is not dtype
            or torch.is_grad_enabled()
            or not isinstance(rotation, tuple)
            or len(rotation) != 2
            or named.get("past_key_values") is not None
            or not parts.are_current()
        ):
            return original(hidden_states, *others, **named)
        rows, cos, sin = hidden_states[0], rotation[0][0], rotation[1][0]
        if known.is_right is None:
            return _first_call(original, known, call, hidden_states, cos, sin, named)
        q, k, v = known.before(rows, cos, sin) if known.rotates else known.before(rows, None, None)
        out = known.after(call.attend(parts.layer, q, k, v, **known.attention), rows)[None]
        return (out,) if known.returns_tuple else out

    forward.layer_call = True  # type: ignore[attr-defined]
    return forward


def _first_call(
    original: Callable[..., Any],
    known: _Layer,
    call: OurCall,
    hidden_states: Tensor,
    cos: Tensor,
    sin: Tensor,
    named: dict[str, Any],
) -> Any:
    """Calls the layer as it is, and compares."""
    seen: list[tuple[int, tuple[Tensor, ...], Tensor, dict[str, Any]]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out = call.attend(layer, q, k, v, **options)
        seen.append((layer, (q, k, v), out, options))
        return out

    recording: Attend = attend
    with attending(call, recording):
        result = original(hidden_states, **named)
    rows = hidden_states[0]
    out = result[0] if isinstance(result, tuple) and len(result) == 1 else result
    known.is_right = False
    if len(seen) != 1 or seen[0][0] != known.parts.layer or not isinstance(out, Tensor):
        return result
    _, inputs, attended, known.attention = seen[0]
    known.returns_tuple = isinstance(result, tuple)
    for known.rotates in (True, False):
        try:
            ours = known.before(rows, *((cos, sin) if known.rotates else (None, None)))
            is_same = all(map(torch.equal, ours, inputs)) and torch.equal(known.after(attended, rows)[None], out)
        except RuntimeError:  # the op refuses shapes that these parts do not have
            is_same = False
        if is_same:
            known.is_right = True
            break
    return result


def _parts_of(layer: nn.Module) -> _Parts | None:
    """The layer, taken apart by the names of its parts; None if it has others."""
    attention, mlp = layer._modules.get("self_attn"), layer._modules.get("mlp")
    if attention is None or mlp is None or "forward" in vars(layer):
        return None
    if not (_is_untouched(attention) and _is_untouched(mlp)):  # hooks on the layer itself are called all the same
        return None
    norms = {name: norm for name in layer._modules if (norm := _norm_at(layer, name)) is not None}
    places = _NORMS.get(frozenset(norms))
    rest = set(layer._modules) - set(norms) - {"self_attn", "mlp"}
    if places is None or not all(isinstance(layer._modules[name], _INERT) for name in rest):
        return None
    head_dim, index = getattr(attention, "head_dim", None), getattr(attention, "layer_idx", None)
    products, gated = _attention_products(attention), gate_of(mlp)
    if gated is None or products is None or not isinstance(head_dim, int) or not isinstance(index, int):
        return None
    if not _is_untouched(gated.module):
        return None
    inner = _mlp_products(mlp, joined=gated.joined)
    heads = {name: _norm_at(attention, name) for name in ("q_norm", "k_norm") if name in attention._modules}
    if inner is None or None in heads.values():
        return None
    all_norms = [*norms.values(), *heads.values()]
    options = {norm[1:] for norm in all_norms if norm is not None}
    if len(options) != 1:  # the ops take one eps and one form
        return None
    eps, form = options.pop()
    weight_at = {name: norm.weight for name, norm in (norms | heads).items() if norm is not None}
    q, k, v, o = products
    gate, up, down = inner
    input_norm, attention_norm, mlp_norm, output_norm = (weight_at.get(name) for name in places)
    before = (
        (input_norm, *q, *k, *v, weight_at.get("q_norm"), weight_at.get("k_norm")),
        (head_dim, eps, form),
    )
    scale = float(vars(layer).get("residual_multiplier", 1.0))
    if scale != 1.0 and (attention_norm is not None or output_norm is not None):
        return None
    after = (*o, attention_norm, mlp_norm, *gate, *up, *down, output_norm, eps, form, gated.activation, scale)
    modules = list(layer.modules())
    sources = tuple(
        (part._parameters, name, tensor)
        for part in modules
        for name, tensor in part._parameters.items()
        if tensor is not None
    )
    settings = tuple(
        (i, *item) for i, part in enumerate(modules) for item in vars(part).items() if isinstance(item[1], _SETTINGS)
    )
    return _Parts(before, after, sources, settings, index, o[0].dtype)


def _is_untouched(part: nn.Module) -> bool:
    """True for a module that computes by its class's code alone."""
    return "forward" not in vars(part) and not (part._forward_hooks or part._forward_pre_hooks)


def _norm_at(parent: nn.Module, name: str) -> Any:
    part = parent._modules[name]
    if part is None or type(type(part).forward) is not FunctionType or not _is_untouched(part):
        return None
    norm = norm_of(part)
    return norm if norm is not None and norm.weight.is_cpu else None


Linear = tuple[Tensor, Tensor | None]


def _linear_at(parent: nn.Module, name: str) -> Linear | None:
    part = parent._modules.get(name)
    return (part.weight, part.bias) if is_plain_linear(part) else None


def _attention_products(attention: nn.Module) -> tuple[Linear, ...] | None:
    """q, k, v and o; the first three may be parts of one."""
    o = _linear_at(attention, "o_proj")
    joined = _linear_at(attention, "qkv_proj")
    if joined is not None and o is not None:
        queries = o[0].shape[1]
        keys = (joined[0].shape[0] - queries) // 2
        return (*_split(joined, (queries, keys, keys)), o) if keys > 0 else None
    return _all(*(_linear_at(attention, name) for name in ("q_proj", "k_proj", "v_proj")), o)


def _mlp_products(mlp: nn.Module, *, joined: bool) -> tuple[Linear, ...] | None:
    """gate, up and down."""
    down = _linear_at(mlp, "down_proj")
    if joined:
        both = _linear_at(mlp, "gate_up_proj")
        if both is None or down is None:
            return None
        return (*_split(both, (down[0].shape[1],) * 2), down)
    return _all(_linear_at(mlp, "gate_proj"), _linear_at(mlp, "up_proj"), down)


def _all(*linears: Linear | None) -> tuple[Linear, ...] | None:
    """The linear layers; None if one is missing."""
    there = tuple(linear for linear in linears if linear is not None)
    return there if len(there) == len(linears) else None


def _split(linear: Linear, sizes: tuple[int, ...]) -> list[Linear]:
    weight, bias = linear
    weights = weight.detach().split(sizes)
    return list(zip(weights, [None] * len(sizes) if bias is None else bias.detach().split(sizes), strict=True))
