"""The layer ops as chains of ``linear_rows`` and the step ops of this package."""

import torch
from torch import Tensor

from pass_ext.reference.linear import linear_rows
from pass_ext.reference.step import step_gate, step_rms_norm, step_rotary


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
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v = rotated(normed(products of normed(x)))."""

    def normed(rows: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None or not len(weight):
            return rows
        groups = rows.unflatten(1, (-1, len(weight)))
        return step_rms_norm(groups, weight, eps=eps, form=form)[0].flatten(1)

    x = normed(x, input_norm)
    q, k, v = linear_rows(x, q_weight, q_bias), linear_rows(x, k_weight, k_bias), linear_rows(x, v_weight, v_bias)
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
) -> Tensor:
    """m = residual + o(attended); m + down(activation(gate(n)) up(n)), n = normed(m)."""

    def normed(rows: Tensor, weight: Tensor | None) -> Tensor:
        return rows if weight is None else step_rms_norm(rows, weight, eps=eps, form=form)[0]

    def scaled(rows: Tensor) -> Tensor:
        return rows if scale == 1.0 else (rows.float() * torch.tensor(scale)).to(rows.dtype)

    middle = residual + scaled(normed(linear_rows(attended, o_weight, o_bias), attention_norm))
    x = normed(middle, mlp_norm)
    gate, up = linear_rows(x, gate_weight, gate_bias), linear_rows(x, up_weight, up_bias)
    hidden = step_gate(gate, up, activation=activation)
    return middle + scaled(normed(linear_rows(hidden, down_weight, down_bias), output_norm))
