"""``parts_of``: a decoder layer taken apart by the names of its parts, as the arguments of ``layer_before_attention`` and
``layer_after_attention``.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.patching.few_rows import is_plain_linear
from pass_ext.decoding.models.patching.known_parts import gate_of, norm_of

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


class LayerParts(NamedTuple):
    """What the two ops need of a layer."""

    before: tuple[Any, ...]
    """Arguments of layer_before_attention behind x, without cos and sin: (norm … k_norm), (head_dim, eps, form)."""
    after: tuple[Any, ...]
    """Arguments of layer_after_attention behind residual."""
    layer: int
    dtype: torch.dtype


def parts_of(layer: nn.Module) -> LayerParts | None:
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
    if len({tensor.device for tensor in layer.parameters()}) != 1:
        return None
    return LayerParts(before, after, index, o[0].dtype)


def _is_untouched(part: nn.Module) -> bool:
    """True for a module that computes by its class's code alone."""
    return "forward" not in vars(part) and not (part._forward_hooks or part._forward_pre_hooks)


def _norm_at(parent: nn.Module, name: str) -> Any:
    part = parent._modules[name]
    if part is None or type(type(part).forward) is not FunctionType or not _is_untouched(part):
        return None
    return norm_of(part)


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
