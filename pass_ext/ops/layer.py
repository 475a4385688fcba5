"""``layer_before_attention`` and ``layer_after_attention``: a decoder layer around its attention, on the CPU, each half as one
call over the packed rows of a step.

    before   q, k, v = rotated(normed(products of normed(x)))
    after    m = residual + o(attended);  m + down(activation(gate(n)) up(n)),  n = normed(m)

Kernel: csrc/cpu/layer.cpp, which chains those of ``linear_rows`` and the step ops.
"""

import torch
from torch import Tensor

from pass_ext.ops.common.fakes import register_fake
from pass_ext.ops.common.nondifferentiable import call
from pass_ext.ops.step import ACTIVATIONS, NORM_FORMS, index_of, refuse_gradients

_before_op = torch.ops.pass_ext.layer_before_attention.default
_after_op = torch.ops.pass_ext.layer_after_attention.default


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
    """Queries, keys and values of rows ``x [N, d]``, ready for attention: ``step_rms_norm``, three ``linear_rows``, the norms
    of heads, and ``step_rotary``, with their bits.

    Args:
        x: ``[N, d]`` bfloat16, float16 or float32.
        q_weight, k_weight, v_weight: ``[heads * head_dim, d]`` in x's dtype; rows may be strided, so parts of a joined weight
            will do.
        head_dim: D, numbers of a head.
        q_bias, k_bias, v_bias: ``[heads * head_dim]``.
        input_norm: ``[d]``, the weight of a norm in front; None: none.
        q_norm, k_norm: weights of norms behind the products: ``[D]`` norms each head, ``[heads * D]`` the whole row.
        cos, sin: ``[N, D']`` as in ``step_rotary``; None: no rotary embedding.
        eps, form: of all norms, as in ``step_rms_norm``.

    Returns:
        ``(q [N, Hq, D], k [N, Hk, D], v [N, Hk, D])``, contiguous.

    A row has the same bits whatever the other rows are. For the CPU only. No gradients, reverse or forward: the op raises if an
    input requires one.
    """
    op = "layer_before_attention"
    refuse_gradients(op, x, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, input_norm, q_norm, k_norm)
    q, k, v = call(
        _before_op, x, input_norm, q_weight, q_bias, k_weight, k_bias, v_weight, v_bias, q_norm, k_norm, cos, sin, head_dim,
        eps, index_of(op, "form", form, NORM_FORMS),
    )  # fmt: skip
    return q, k, v


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
    """A decoder layer's output from its attention's: ``linear_rows``, ``step_rms_norm``, ``step_gate`` and the residual
    additions, with their bits.

    Args:
        attended: ``[N, heads * D]`` bfloat16, float16 or float32.
        residual: ``[N, d]``, the layer's input.
        o_weight: ``[d, heads * D]``.
        gate_weight, up_weight: ``[I, d]``; rows may be strided.
        down_weight: ``[d, I]``.
        o_bias, gate_bias, up_bias, down_bias: one number per output.
        attention_norm, output_norm: ``[d]``, weights of norms behind o and down, in front of the addition (gemma2, olmo2).
        mlp_norm: ``[d]``, weight of the norm in front of the MLP; None: none.
        eps, form: of all norms, as in ``step_rms_norm``.
        activation: as in ``step_gate``.
        scale: factor of both products before they are added (granite's ``residual_multiplier``); 1 beside norms behind them.

    Returns:
        ``[N, d]``.

    A row has the same bits whatever the other rows are. For the CPU only. No gradients, reverse or forward: the op raises if an
    input requires one.
    """
    op = "layer_after_attention"
    refuse_gradients(op, attended, residual, o_weight, gate_weight, up_weight, down_weight, o_bias, gate_bias, up_bias,
                     down_bias, attention_norm, mlp_norm, output_norm)  # fmt: skip
    out: Tensor = call(
        _after_op, attended, residual, o_weight, o_bias, attention_norm, mlp_norm, gate_weight, gate_bias, up_weight, up_bias,
        down_weight, down_bias, output_norm, eps, index_of(op, "form", form, NORM_FORMS),
        index_of(op, "activation", activation, ACTIVATIONS), scale,
    )  # fmt: skip
    return out


@register_fake("layer_before_attention")
def _before_shape(
    x: Tensor, input_norm: Tensor | None, q_weight: Tensor, q_bias: Tensor | None, k_weight: Tensor, k_bias: Tensor | None,
    v_weight: Tensor, v_bias: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, head_dim: int, eps: float, form: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = (x.new_empty((x.shape[0], w.shape[0] // head_dim, head_dim)) for w in (q_weight, k_weight, v_weight))
    return q, k, v


@register_fake("layer_after_attention")
def _after_shape(
    attended: Tensor, residual: Tensor, o_weight: Tensor, o_bias: Tensor | None, attention_norm: Tensor | None,
    mlp_norm: Tensor | None, gate_weight: Tensor, gate_bias: Tensor | None, up_weight: Tensor, up_bias: Tensor | None,
    down_weight: Tensor, down_bias: Tensor | None, output_norm: Tensor | None, eps: float, form: int, activation: int,
    scale: float,
) -> Tensor:  # fmt: skip
    return residual.new_empty(residual.shape)
