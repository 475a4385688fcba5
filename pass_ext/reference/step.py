"""The step ops in plain PyTorch, as the modules of transformers compute them: fp32 inside, rounded where theirs are."""

import torch
from torch import Tensor
from torch.nn import functional


def step_rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, residual: Tensor | None = None, form: str = "llama"
) -> tuple[Tensor, Tensor]:
    """s = x + residual; out = s / sqrt(mean(s^2) + eps) times the weight. Returns (out, s)."""
    s = x if residual is None else x + residual
    normal = s.float() * torch.rsqrt(s.float().square().mean(-1, keepdim=True) + eps)
    if form == "llama":
        return weight * normal.to(x.dtype), s
    return (normal * (weight.float() if form == "olmo2" else 1.0 + weight.float())).to(x.dtype), s


def step_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """x cos + rotate_half(x) sin of the first D' numbers of every head; in x's dtype."""

    def rotate(x: Tensor) -> Tensor:
        turned, rest = x[..., : cos.shape[1]], x[..., cos.shape[1] :]
        first, second = turned.chunk(2, dim=-1)
        half = torch.cat([-second, first], dim=-1)
        return torch.cat([(turned * cos[:, None] + half * sin[:, None]).to(x.dtype), rest], dim=-1)

    return rotate(q), rotate(k)


def step_gate(gate: Tensor, up: Tensor | None = None, *, activation: str = "silu") -> Tensor:
    """activation(gate) times up; without up, gate holds both halves."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    activated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return activated * up
