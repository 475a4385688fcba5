"""``PackedExperts``: the experts of a mixture with packed weights, in place of a module that has them in two tensors.

    out[r] = sum over experts e of row r, in their order, of  weight[r, e] down[e](gate(up[e](x[r])))

gate is the module's own: its activation, and how it takes gate and up from one product. A row's sum has one order, whatever
other rows there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.weights.form import INPUTS, OUTPUTS
from pass_ext.weights.layers import Packed, product


class PackedExperts(Packed):
    """The experts.

    Args:
        own: the model's module, whose gate it uses, and whose parameters it takes away.
        up: a packed weight ``[E, out / 16, in / 32, bytes]``; its outputs are in the module's order, or, with ``gate``, ups.
        down: the same.
        gate: the same, of gates.

    Gradients reach the input and the routing weights.
    """

    def __init__(self, own: Any, up: Tensor, down: Tensor, gate: Tensor | None = None) -> None:
        super().__init__()
        self.count, self.up_features, self.features = sizes_of(own)
        self.gate_up_proj_bias = own.gate_up_proj_bias if own.has_bias else None
        self.down_proj_bias = own.down_proj_bias if own.has_bias else None
        for name in list(own._parameters):
            delattr(own, name)
        self.own = own
        self.up, self.down = (nn.Parameter(each, requires_grad=False) for each in (up, down))
        self.gate = None if gate is None else nn.Parameter(gate, requires_grad=False)

    def forward(self, hidden_states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in experts.unique().tolist():
            if expert < self.count:  # beyond: rows of other ranks
                rows, places = torch.where(experts == expert)
                made = self._expert(expert, hidden_states[rows]) * weights[rows, places, None]
                out = out.index_add(0, rows, made.to(out.dtype))
        return out

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        if self.gate is None:
            both = product(x, self.up[expert], None, self.up_features)
        else:
            parts = [product(x, weight[expert], None, self.up_features // 2) for weight in (self.gate, self.up)]
            both = torch.cat(parts, dim=-1) if self.own.is_concatenated else torch.stack(parts, dim=-1).flatten(-2)
        if self.gate_up_proj_bias is not None:
            both = both + self.gate_up_proj_bias[expert]
        bias = None if self.down_proj_bias is None else self.down_proj_bias[expert]
        return product(self.own._apply_gate(both), self.down[expert], bias, self.features)

    def extra_repr(self) -> str:
        return f"{self.count} experts, {self.features}, {self.up_features}"


def in_two_tensors(module: Any) -> bool:
    """True for a module that has all experts' gates and ups in one tensor, and their downs in another."""
    own = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return all(isinstance(each, nn.Parameter) for each in own) and hasattr(module, "is_transposed")  # transformers 5


def can_be_packed(module: Any) -> bool:
    """True for a module whose experts ``PackedExperts`` computes: gated, in two tensors, with whole blocks."""
    if not in_two_tensors(module) or not getattr(module, "has_gate", False):
        return False
    if getattr(module, "has_post_expert_norm", False):
        return False
    _, up, features = sizes_of(module)
    return up % (2 * OUTPUTS) == 0 and up // 2 % INPUTS == 0 and features % INPUTS == 0


def sizes_of(module: Any) -> tuple[int, int, int]:
    """Experts, outputs of gates and ups together, and features that come in and go out."""
    count, first, second = module.gate_up_proj.shape
    return (count, second, first) if module.is_transposed else (count, first, second)


def fill_experts(module: Any, part: str, numbers: Iterable[Tensor], *, bias: bool = False) -> str:
    """Writes the numbers of all experts' gate, up or down, weights ``[out, in]`` or biases ``[out]``, into the module's own
    parameter, whose name it returns."""
    name = f"{'down' if part == 'down' else 'gate_up'}_proj{'_bias' * bias}"
    for target, each in zip(getattr(module, name).detach(), numbers, strict=True):
        rows = target.t() if module.is_transposed and not bias else target
        if part != "down" and module.is_concatenated:
            rows = rows[: len(each)] if part == "gate" else rows[len(each) :]
        elif part != "down":
            rows = rows[int(part == "up") :: 2]
        rows.copy_(each)
    return name
