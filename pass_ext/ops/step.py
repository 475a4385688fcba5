"""``step_rms_norm``, ``step_rotary`` and ``step_gate``: the work between a model's matrix products, one fused op each, over the
packed rows of a step.

The formulas: csrc/core/step.h. Kernels: csrc/cpu/step.cpp, csrc/cuda/step.cuh.
"""

from torch import Tensor

from pass_ext._library import ops
from pass_ext.ops.common.arguments import index_of, typed
from pass_ext.ops.common.kernels import call, fake_kernel, refuse_gradients

NORM_FORMS = ("llama", "olmo2", "gemma")  # NormForm of csrc/core/step.h
ACTIVATIONS = ("silu", "gelu_tanh")  # Activation of csrc/core/step.h

_norm_op = ops.step_rms_norm.default
_rotary_op = ops.step_rotary.default
_gate_op = ops.step_gate.default


@typed("pass_ext::", page="ops/step")
def step_rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, residual: Tensor | None = None, form: str = "llama"
) -> tuple[Tensor, Tensor]:
    """RMSNorm of rows ``x [..., d]``, with the residual addition before it: ``s = x + residual``, and
    ``s / sqrt(mean(s^2) + eps)`` times ``weight [d]``.

    Args:
        x: ``[..., d]`` bfloat16, float16 or float32. Strides are free if d is contiguous; only a tensor with three or more
            uneven leading dimensions is copied.
        weight: ``[d]`` in x's dtype.
        eps: added to the mean; at least 0.
        residual: like x.
        form: how the weight w multiplies the normed row n, which is fp32: "llama" ``w * n.to(dtype)``, "olmo2"
            ``(w * n).to(dtype)``, "gemma" ``((1 + w) * n).to(dtype)``.

    Returns:
        ``(out, s)``, both ``[..., d]`` in x's dtype; s is x itself without a residual.

    Rounds where the modules of transformers round. The mean is a sum in another order than theirs: out is within 3 units in
    the last place in fp32, and in 16 bits differs by one rounding where fp32 lies that close to a tie. s has their bits.
    CPU and CUDA give the same bits. No gradients, reverse or forward: the op raises if an input requires one.

    Example:

        >>> out, total = pass_ext.layers.step_rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), residual=torch.zeros(1, 2))
        >>> out.pow(2).mean().round(decimals=3), total
        (tensor(1.), tensor([[3., 4.]]))
    """
    refuse_gradients("step_rms_norm", x, weight, residual)
    out, s = call(_norm_op, x, weight, residual, eps, index_of("step_rms_norm", "form", form, NORM_FORMS))
    return out, x if residual is None else s


@typed("pass_ext::", page="ops/step")
def step_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of the queries ``q [N, Hq, D]`` and keys ``k [N, Hk, D]`` of N packed rows, by the rows ``[N, D']`` of
    cosines and sines that transformers makes.

    Args:
        q, k: bfloat16, float16 or float32, of one dtype. Any strides with D contiguous, such as views of a joined product.
        cos, sin: ``[N, D']`` in q's dtype or float32; D' is even and at most D.

    Returns:
        ``(q, k)``, rotated and contiguous. The pairs are ``(i, i + D'/2)``, the layout of ``rotate_half``; numbers after D'
        stay.

    The bits are those of ``q * cos + rotate_half(q) * sin`` in PyTorch: with cos in q's dtype every product is rounded to it,
    with float32 only the sum. No gradients, reverse or forward: the op raises if an input requires one.

    Example:

        >>> q = torch.tensor([[[1.0, 0.0]]])
        >>> pass_ext.layers.step_rotary(q, q, torch.zeros(1, 2), torch.ones(1, 2))[0]  # a quarter turn
        tensor([[[0., 1.]]])
    """
    refuse_gradients("step_rotary", q, k, cos, sin)
    q_rotated, k_rotated = call(_rotary_op, q, k, cos, sin)
    return q_rotated, k_rotated


@typed("pass_ext::", page="ops/step")
def step_gate(gate: Tensor, up: Tensor | None = None, *, activation: str = "silu") -> Tensor:
    """The gate of an MLP, ``activation(gate) * up``, over ``gate [..., I]`` and ``up [..., I]`` or one joined product
    ``[..., 2 I]``.

    Args:
        gate: ``[..., I]`` bfloat16, float16 or float32; without ``up``, ``[..., 2 I]``: the gate's half, then up's. Strides as
            in ``step_rms_norm``.
        up: like gate.
        activation: "silu", or "gelu_tanh", which transformers calls gelu_pytorch_tanh.

    Returns:
        ``[..., I]`` in gate's dtype; activation(gate) is rounded to it, as in PyTorch, before it is multiplied.

    The activation is within 4 units in the last place of exact in fp32 (gelu_tanh: below -1, where it comes close to 0, of
    its input's). CPU and CUDA give the same bits. No gradients, reverse or forward: the op raises if an input requires one.

    Example:

        >>> pass_ext.layers.step_gate(torch.tensor([[0.0, 20.0]]), torch.tensor([[5.0, 5.0]]))
        tensor([[  0., 100.]])
    """
    refuse_gradients("step_gate", gate, up)
    out: Tensor = call(_gate_op, gate, up, index_of("step_gate", "activation", activation, ACTIVATIONS))
    return out


@fake_kernel("step_rms_norm")
def _norm_shape(x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, form: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((0,) if residual is None else x.shape)


@fake_kernel("step_rotary")
def _rotary_shape(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@fake_kernel("step_gate")
def _gate_shape(gate: Tensor, up: Tensor | None, activation: int) -> Tensor:
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // (2 if up is None else 1)))
