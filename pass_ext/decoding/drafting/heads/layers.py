"""A decoder layer's parts as heads have them, in the form and with the names of Llama and Qwen 3, on packed rows.

    attention(x)   o(attend(rotated(q_norm(q(x))), rotated(k_norm(k(x))), v(x)))
    mlp(x)         down(act(gate(x)) * up(x))
    layer(x)       m + mlp(norm(m)),  m = x + attention(norm(x))

Norms of heads, and biases, are where the checkpoint has some.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.packed import Attend

FORMS = ("llama", "qwen2", "qwen3", "mistral")
"""The models whose layers have this form, as configs name them."""
_READ = (
    "attention_bias", "head_dim", "layer_types", "mlp_bias", "partial_rotary_factor", "rope_scaling", "rope_theta",
    "sliding_window",
)  # fmt: skip
"""Settings that count whatever the form: of rotations and windows, and of biases, which the tensors tell of."""


def layer_config(settings: dict[str, Any]) -> Any:
    """A transformers config of these settings, with the defaults of its model."""
    settings = dict(settings)
    config = _config_of(settings.pop("model_type", "llama"), **settings)
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config


def known_settings(form: str) -> set[str]:
    """The names of all settings of such a config."""
    return {*_config_of(form).to_dict(), *_READ}


def _config_of(form: str, **settings: Any) -> Any:
    from transformers import AutoConfig

    if form not in FORMS:
        raise ValueError(f"its layers must be of the form of {', '.join(FORMS)}, got model_type {form!r}")
    return AutoConfig.for_model(form, **settings)


class RmsNorm(nn.Module):
    """``weight * x / rms(x)`` of the last dimension, as Llama rounds it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Rotary(nn.Module):
    """Cosines and sines of positions ``[N]`` -> two ``[N, D']``, by transformers' formula for the config."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        with torch.device("cpu"):  # whatever device the weights are made on: these frequencies are in no checkpoint
            self.embedding = LlamaRotaryEmbedding(config)

    def forward(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.embedding.to(rows.device)(rows[None], positions[None])
        return cos[0], sin[0]


class Attention(nn.Module):
    """Attention of rows ``[N, width]`` -> ``[N, hidden_size]``.

    Args:
        layer: its number among those that attend.
        width: of its rows.
        has: the checkpoint's names, which tell of biases and norms of heads.
    """

    def __init__(self, config: Any, layer: int, width: int, has: Collection[str]) -> None:
        super().__init__()
        heads, key_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        prefix = f"layers.{layer}.self_attn"
        self.layer, self.dim, self.window = layer, dim, _window(config, layer)
        self.q_proj = _linear(width, heads * dim, f"{prefix}.q_proj", has)
        self.k_proj = _linear(width, key_heads * dim, f"{prefix}.k_proj", has)
        self.v_proj = _linear(width, key_heads * dim, f"{prefix}.v_proj", has)
        self.o_proj = _linear(heads * dim, config.hidden_size, f"{prefix}.o_proj", has)
        has_norms = f"{prefix}.q_norm.weight" in has
        self.q_norm = RmsNorm(dim, config.rms_norm_eps) if has_norms else nn.Identity()
        self.k_norm = RmsNorm(dim, config.rms_norm_eps) if has_norms else nn.Identity()

    def forward(self, rows: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """rotation: as ``Rotary`` gives it."""
        q, k, v = (product(rows).unflatten(1, (-1, self.dim)) for product in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(self.q_norm(q), *rotation), rotated(self.k_norm(k), *rotation)
        out: Tensor = self.o_proj(attend(self.layer, q, k, v, window=self.window).flatten(1))
        return out


class Mlp(nn.Module):
    """The gated MLP of rows ``[N, hidden_size]``."""

    def __init__(self, config: Any, layer: int, has: Collection[str]) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        width, inner, prefix = config.hidden_size, config.intermediate_size, f"layers.{layer}.mlp"
        self.gate_proj = _linear(width, inner, f"{prefix}.gate_proj", has)
        self.up_proj = _linear(width, inner, f"{prefix}.up_proj", has)
        self.down_proj = _linear(inner, width, f"{prefix}.down_proj", has)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(rows)) * self.up_proj(rows))
        return out


class DecoderLayer(nn.Module):
    """A layer on rows ``[N, hidden_size]``.

    Args:
        width: of the rows that go into attention; None: those of all others.
    """

    def __init__(self, config: Any, layer: int, has: Collection[str], width: int | None = None) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(size, eps)
        self.self_attn = Attention(config, layer, width or size, has)
        self.post_attention_layernorm = RmsNorm(size, eps)
        self.mlp = Mlp(config, layer, has)

    def forward(self, rows: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """rotation: as ``Rotary`` gives it."""
        return self.around(self.input_layernorm(rows), rows, rotation, attend)

    def around(self, normed: Tensor, residual: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """The layer from the rows that go into attention, and those that its output is added to."""
        rows = residual + self.self_attn(normed, rotation, attend)
        out: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return out


def _linear(inputs: int, outputs: int, name: str, has: Collection[str]) -> nn.Linear:
    return nn.Linear(inputs, outputs, f"{name}.bias" in has)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first D' numbers of each head of ``[N, heads, D]`` turned, half against half."""
    turned, rest = x[..., : cos.shape[1]], x[..., cos.shape[1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
    return turned if not rest.shape[-1] else torch.cat((turned, rest), -1)


def _window(config: Any, layer: int) -> int:
    """How far back a layer sees; -1: to the beginning."""
    types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    slides = types[layer] == "sliding_attention" if types else window is not None
    return window if slides and window is not None else -1
