"""The layer ops as chains of ``linear_rows``, the step ops and ``attention_tree`` of this package."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pass_ext.reference.adapter import adapter_rows_
from pass_ext.reference.attention import attention_tree, quantized
from pass_ext.reference.linear import linear_rows
from pass_ext.reference.step import step_gate, step_rms_norm, step_rotary

# A linear layer's name -> down [K, r, in] and up [K, r, out].
Adapters = Mapping[str, tuple[Tensor, Tensor]]


def _adapted(name: str, out: Tensor, x: Tensor, ids: Tensor | None, adapters: Adapters | None, scale: float) -> Tensor:
    """A linear layer's output with what its adapters add to the rows of slots."""
    if ids is None or not adapters or name not in adapters:
        return out
    return adapter_rows_(out, x, ids, *adapters[name], scale)


def layer_before_attention(
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    *,
    head_dim: int,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    input_norm: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 1e-6,
    form: str = "llama",
    ids: Tensor | None = None,
    adapters: Adapters | None = None,
    adapter_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v = rotated(normed(products of normed(x))); after each product what ``adapter_rows_`` adds."""
    adapt = partial(_adapted, ids=ids, adapters=adapters, scale=adapter_scale)

    def normed(rows: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None or not len(weight):
            return rows
        groups = rows.unflatten(1, (-1, len(weight)))
        return step_rms_norm(groups, weight, eps=eps, form=form)[0].flatten(1)

    x = normed(x, input_norm)
    linears = (("q", q_weight, q_bias), ("k", k_weight, k_bias), ("v", v_weight, v_bias))
    q, k, v = (adapt(name, linear_rows(x, weight, bias), x) for name, weight, bias in linears)
    heads = [rows.unflatten(1, (-1, head_dim)) for rows in (normed(q, q_norm), normed(k, k_norm), v)]
    if cos is not None and sin is not None:
        heads[:2] = step_rotary(heads[0], heads[1], cos, sin)
    return heads[0], heads[1], heads[2]


def layer_after_attention(
    attended: Tensor,
    residual: Tensor,
    o_weight: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    o_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    attention_norm: Tensor | None = None,
    mlp_norm: Tensor | None = None,
    output_norm: Tensor | None = None,
    eps: float = 1e-6,
    form: str = "llama",
    activation: str = "silu",
    scale: float = 1.0,
    ids: Tensor | None = None,
    adapters: Adapters | None = None,
    adapter_scale: float = 1.0,
) -> Tensor:
    """m = residual + o(attended); m + down(activation(gate(n)) up(n)), n = normed(m); after each product what
    ``adapter_rows_`` adds.
    """
    adapt = partial(_adapted, ids=ids, adapters=adapters, scale=adapter_scale)

    def normed(rows: Tensor, weight: Tensor | None) -> Tensor:
        return rows if weight is None else step_rms_norm(rows, weight, eps=eps, form=form)[0]

    def scaled(rows: Tensor) -> Tensor:
        return rows if scale == 1.0 else (rows.float() * torch.tensor(scale)).to(rows.dtype)

    def product(name: str, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return adapt(name, linear_rows(rows, weight, bias), rows)

    middle = residual + scaled(normed(product("o", attended, o_weight, o_bias), attention_norm))
    x = normed(middle, mlp_norm)
    gate, up = product("gate", x, gate_weight, gate_bias), product("up", x, up_weight, up_bias)
    hidden = step_gate(gate, up, activation=activation)
    return middle + scaled(normed(product("down", hidden, down_weight, down_bias), output_norm))


def layer_pack(layers: Sequence[Any], *, head_dim: int) -> Sequence[Any]:
    """The layers: what is known of them already changes no result."""
    return layers


def layer_stack(
    x: Tensor,
    layers: Sequence[Any],
    caches: Sequence[tuple[Tensor, Tensor]] | Tensor,
    prefix_lens: Tensor,
    cu_nodes: Tensor,
    visible: Tensor,
    max_nodes: int,
    *,
    head_dim: int,
    first_input: Tensor | None = None,
    depths: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    rotates: Sequence[int] | None = None,
    windows: Sequence[int] | None = None,
    ids: Tensor | None = None,
    deep: Tensor | None = None,
    adapters: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    adapter_scale: float = 1.0,
    final_norm: Tensor | None = None,
    head: Tensor | None = None,
    wanted: Tensor | None = None,
    taps: Sequence[int] = (),
    eps: float = 1e-6,
    form: str = "llama",
    activation: str = "silu",
    scale: float = 1.0,
    attention_scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """x = after(attention_tree(before(x + deep[l])), x + deep[l]) for every layer; head normed(x[wanted]).

    Keys and values are as the caches are, in 8 bits too. States: x in front of each layer, and after the last one.

    layers: ``LayerWeights`` of each. first_input: what q, k and v of layer 0 are of, in place of its normed x. adapters: what
    ``adapter_rows_`` adds after each product, by its linear layer's name.
    """

    pairs = list(caches.unflatten(0, (-1, 2))) if isinstance(caches, Tensor) else caches
    rotations: list[tuple[Tensor | None, Tensor | None]] = [(None, None), (None, None)]
    if cos is not None and sin is not None:
        tables = zip(*(part if part.dim() == 3 else part[None] for part in (cos, sin)), strict=True)
        rotations[1:] = [pair if positions is None else (pair[0][positions], pair[1][positions]) for pair in tables]
    new: list[Tensor] = []
    states: list[Tensor] = []
    norm: dict[str, Any] = dict(eps=eps, form=form)
    for index, (weights, (k_cache, v_cache)) in enumerate(zip(layers, pairs, strict=True)):
        if deep is not None and ids is not None:
            x = torch.where((ids < 0)[:, None], x + deep[index][(-1 - ids.long()).clamp(min=0)], x)
        states.append(x)
        cos, sin = rotations[1 if rotates is None else rotates[index]]
        of_layer = {name: (down[index], up[index]) for name, (down, up) in (adapters or {}).items()}
        added: dict[str, Any] = dict(ids=ids, adapters=of_layer, adapter_scale=adapter_scale)
        given = first_input if index == 0 else None
        q, k, v = layer_before_attention(
            x if given is None else given, weights.q_weight, weights.k_weight, weights.v_weight, head_dim=head_dim,
            q_bias=weights.q_bias, k_bias=weights.k_bias, v_bias=weights.v_bias,
            input_norm=weights.input_norm if given is None else None, q_norm=weights.q_norm,
            k_norm=weights.k_norm, cos=cos, sin=sin, **added, **norm,
        )  # fmt: skip
        k, v = quantized(k, k_cache.dtype), quantized(v, v_cache.dtype)
        new += k, v
        attended, _ = attention_tree(
            q, k_cache, v_cache, prefix_lens, cu_nodes, visible, max_nodes, k_new=k, v_new=v, depths=depths,
            scale=attention_scale, softcap=softcap, window=-1 if windows is None else windows[index],
        )  # fmt: skip
        x = layer_after_attention(
            attended.to(x.dtype).flatten(1), x, weights.o_weight, weights.gate_weight, weights.up_weight,
            weights.down_weight, o_bias=weights.o_bias, gate_bias=weights.gate_bias, up_bias=weights.up_bias,
            down_bias=weights.down_bias, attention_norm=weights.attention_norm, mlp_norm=weights.mlp_norm,
            output_norm=weights.output_norm, activation=activation, scale=scale, **added, **norm,
        )  # fmt: skip
    states.append(x)
    tapped = torch.stack([states[tap] for tap in taps]) if taps else x.new_empty(0, *x.shape)
    x = x if wanted is None else x[wanted]
    x = x if final_norm is None else step_rms_norm(x, final_norm, **norm)[0]
    return x if head is None else linear_rows(x, head), torch.stack(new), tapped
