"""``FusedHead``: the decoder layers of a head, its norm and its output layer as one call of ``layer_stack``, with the bits of
their parts.

    states = layers(residual), the first of which multiplies rows of its own        logits = output(norm(states))

It is for the CPU and for few rows; for the many of a prompt PyTorch's products are faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.drafting.heads.layers import Rotary
from pass_ext.decoding.models import parts
from pass_ext.decoding.models.module_ops import gate_of, is_untouched, most_few_rows, norm_of
from pass_ext.decoding.models.packed import StepAttend
from pass_ext.decoding.models.rotation_table import RotationTable
from pass_ext.decoding.models.shadow import takes_rows_of_our_call
from pass_ext.ops.layer import PackedLayers

_stack = torch.ops.pass_ext.layer_stack.default


class FusedHead:
    """The weights as the op takes them. norm, output: of norm and output layer. rotary: of the layers."""

    def __init__(self, stack: parts.StackArguments, norm: Tensor, output: Tensor, rotary: Rotary) -> None:
        self._stack, self._ends, self._rotary = stack, (norm, output), rotary
        self._rotations = RotationTable(rotary.embedding)
        self._packed = PackedLayers(stack.weights, stack.parts, stack.numbers[0])
        self._most = most_few_rows(norm.dtype, is_cpu=True)

    @classmethod
    def of(cls, layers: Sequence[Any], norm: nn.Module, output: nn.Module, rotary: Rotary) -> FusedHead | None:
        """The head of these parts; None: the op does not compute it, or somebody has hooks in it."""
        if not all(is_untouched(part) for whole in (*layers, norm, output) for part in whole.modules()):
            return None
        found, final, product = [_parts_of(layer) for layer in layers], norm_of(norm), parts.weights_of(output)
        if None in found or final is None or product is None or product[1] is not None:
            return None
        options = [
            dict(scale=layer.self_attn.dim**-0.5, softcap=0.0, window=layer.self_attn.window, sinks=None, chunk=-1)
            for layer in layers
        ]
        stack = parts.stack_of(found, options)  # type: ignore[arg-type]
        if stack is None or final[1:] != stack.numbers[1:3]:
            return None
        return cls(stack, final.weight, product[0], rotary)

    def __call__(
        self, first_input: Tensor, residual: Tensor, positions: Tensor, attend: StepAttend, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Logits of the rows wanted, and the rows ``[N, d]`` in front of the norm; None for rows or caches that the op is not
        made for. first_input: ``[N, width]``, what the first layer's attention multiplies; residual: its rows."""
        stack, norm = self._stack, self._ends[0]
        if residual.dtype is not norm.dtype or torch.is_grad_enabled():
            return None
        if not takes_rows_of_our_call(len(residual), self._most):
            return None
        layers = len(stack.windows)
        caches = attend.of_all_layers(layers, residual, stack.key_heads, stack.numbers[0])
        if caches is None:
            return None
        (cos, sin), at = self._rotations.at(residual, positions, self._rotary)
        logits, new, states = _stack(
            residual, first_input, [self._packed.key], stack.parts, *caches, cos, sin, at, [1] * layers, stack.windows, None,
            None, [], 0, 1.0, *self._ends, wanted, [layers], *stack.numbers,
        )  # fmt: skip
        attend.take(new)
        return logits, states[0]


def _parts_of(layer: Any) -> parts.LayerParts | None:
    attention, mlp = layer.self_attn, layer.mlp
    places = [(attention, name) for name in "qkvo"] + [(mlp, name) for name in ("gate", "up", "down")]
    products = [parts.weights_of(getattr(part, f"{name}_proj")) for part, name in places]
    gate, norm = gate_of(mlp), norm_of(layer.post_attention_layernorm)
    if gate is None or norm is None or None in products:
        return None
    q, k, v, o, *of_mlp = (tensors for tensors in products if tensors is not None)
    heads = [getattr(part, "weight", None) for part in (attention.q_norm, attention.k_norm)]
    before = layer.input_layernorm.weight, *q, *k, *v, *heads
    after = *o, None, norm.weight, *(tensor for tensors in of_mlp for tensor in tensors), None
    return parts.LayerParts(before, after, attention.dim, norm.eps, norm.form, gate.activation, 1.0)
