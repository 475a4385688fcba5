"""``BlockModel``: the network of the DFlash family, which drafts a whole block of tokens in one call.

    feature[t] = norm(fc(the target's states of token t))        of the tokens in front of the block
    block      = embeddings of [the last token, mask, mask, …]
    a layer    queries of the block's rows; keys and values of the block's rows and, by the same weights, of the features
               x += o(attention);  x += mlp(norm(x));            DFlash-2: local convolutions around both
    logits     = head(norm(x)), times a factor, capped

The block's rows see all features and each other; in a causal layer not the rows after them. A call has the rows of new features
in front of each block: their keys and values are kept, those of the block are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pass_ext.decoding.drafting.heads.local_convolution import LocalConvolution
from pass_ext.decoding.models.module_ops import are_few, are_of_torch, is_plain_linear, most_few_rows
from pass_ext.decoding.models.packed import Adapted, StepAttend
from pass_ext.decoding.models.parts import unwrapped
from pass_ext.decoding.models.slots import CallSlots
from pass_ext.ops.common.uploaded import uploaded
from pass_ext.ops.layer import LayerWeights, layer_after_attention, layer_before_attention
from pass_ext.ops.linear import linear_rows
from pass_ext.ops.step import step_gate, step_rms_norm, step_rotary


class BlockLayer(NamedTuple):
    """A layer of the network."""

    weights: LayerWeights
    window: int = -1
    """How far its rows see, as in ``attention_tree``."""
    is_causal: bool = False
    sinks: Tensor | None = None
    around_attention: LocalConvolution | None = None
    around_mlp: LocalConvolution | None = None


class BlockWeights(NamedTuple):
    """The network."""

    fc: Tensor
    feature_norm: Tensor
    layers: Sequence[BlockLayer]
    norm: Tensor
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Cosines and sines of positions ``[N]``, like rows ``[N, d]``."""
    head_dim: int
    eps: float
    mask: int
    """The token that stands for a mask."""
    mask_row: Tensor | None = None
    """``[d]``, its row, if that is not of the table."""
    table: Tensor | None = None
    """``[V, d]``, its own input embeddings; None: the target's."""
    output: Tensor | None = None
    """``[Vd, d]``, its own output layer; None: the target's."""
    table_scale: float = 1.0
    logits_scale: float = 1.0
    cap: float = 0.0


class BlockModel(Adapted):
    """The network as a session calls it. ``prepare`` comes before each call.

    Args:
        weights: of the network.
        target: the model that it drafts for.
        block: rows of a block.
        first: the first row that drafts: 0, or 1 if the masks stand where the drafts do.
    """

    name = "the block drafter"

    def __init__(self, weights: BlockWeights, target: Adapted, block: int, first: int) -> None:
        # Not as Adapted does it: it is its own model.
        self.model, self.caches = self, len(weights.layers)
        self.table = _table_of(target) if weights.table is None else weights.table
        self._mask = self.table[weights.mask] * weights.table_scale if weights.mask_row is None else weights.mask_row
        self._output = _output_of(target) if weights.output is None else partial(linear_rows, weight=weights.output)
        self._weights, self._block, self._first = weights, block, first
        self._to_keys, self._key_bias, self._layers = _with_joined_keys(weights.layers)

    @property
    def hidden(self) -> Tensor:
        """``[blocks, drafts, d]``, the rows that the last call's logits are of."""
        return self.left[0]

    def features(self, states: Tensor) -> Tensor:
        """``[n, d]`` from the target's states ``[n, taps, d']``."""
        weights = self._weights
        states = states.flatten(1).to(weights.fc)
        return step_rms_norm(_product(states, weights.fc), weights.feature_norm, eps=weights.eps)[0]

    def prepare(self, features: Tensor, counts: Sequence[int], *, has_blocks: bool) -> None:
        """Prepares the next call, whose rows are so many features of each request and, after them, a block each."""
        device = features.device
        block = self._block if has_blocks else 0
        ends = list(accumulate(count + block for count in counts))
        of_block = [row for end in ends for row in range(end - block, end)]
        of_features = [
            row for end, count in zip(ends, counts, strict=True) for row in range(end - block - count, end - block)
        ]
        # All rows of a request are visible to each other.
        words = -(-max(count + block for count in counts) // 64)
        bits = [[_word(count + block - 64 * word) for word in range(words)] for count in counts]
        sizes = [count + block for count in counts]
        visible = uploaded(bits, device).repeat_interleave(uploaded(sizes, device), 0, output_size=sum(sizes))
        self.beside = features, uploaded(of_features, device), uploaded(of_block, device), visible

    def embed(self, ids: Tensor, slots: Tensor) -> Tensor:
        """The rows of the call; an id of -1 is a mask."""
        features, of_features, of_block, _ = self.beside
        rows = self.table.new_empty(len(ids), self.table.shape[1])
        rows[of_features] = features
        own = ids[of_block]
        embedded = F.embedding(own.clamp(min=0), self.table) * self._weights.table_scale
        is_mask = (own < 0) | (own == self._weights.mask)
        rows[of_block] = torch.where(is_mask[:, None], self._mask, embedded)
        return rows

    def __call__(
        self, rows: Tensor, positions: Tensor, attend: StepAttend, wanted: Tensor | None, slots: CallSlots | None = None
    ) -> Tensor:
        """The logits of the drafting rows ``[blocks * drafts, Vd]``."""
        weights, (_, of_features, of_block, visible) = self._weights, self.beside
        cos, sin = weights.rotary(rows, positions)
        turns = cos[of_block], sin[of_block]
        x, size = rows[of_block], weights.head_dim
        kept = _product(rows[of_features], self._to_keys, self._key_bias)
        kept = kept.unflatten(1, (len(self._layers), 2, -1, size))
        for number, layer in enumerate(self._layers):
            normed = step_rms_norm(kept[:, number, 0], layer.weights.k_norm, eps=weights.eps)[0]  # type: ignore[arg-type]
            keys = step_rotary(normed, normed, cos[of_features], sin[of_features])[1]
            q, k, v, deltas = self._before(layer, x, turns)
            all_k, all_v = (rows.new_empty(len(rows), *keys.shape[1:]) for _ in range(2))
            all_k[of_features], all_v[of_features] = keys, kept[:, number, 1]
            all_k[of_block], all_v[of_block] = k, v
            # Nobody needs what the features attend to.
            all_q = rows.new_zeros(len(rows), q.shape[1] if len(x) else keys.shape[1], size)
            if len(x):
                all_q[of_block] = q
            seen = None if layer.is_causal else visible
            out = attend(number, all_q, all_k, all_v, window=layer.window, sinks=layer.sinks, visible=seen)
            if len(x):
                x = self._after(layer, out[of_block].flatten(1), x, deltas)
        x = x.unflatten(0, (-1, self._block))[:, self._first :]
        hidden = step_rms_norm(x, weights.norm, eps=weights.eps)[0]
        self.left = (hidden,)
        logits = self._output(hidden.flatten(0, 1)) * weights.logits_scale
        return torch.tanh(logits / weights.cap) * weights.cap if weights.cap else logits

    def _before(
        self, layer: BlockLayer, x: Tensor, turns: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values of the block's rows, and the deltas of the convolution after attention."""
        weights, convolution, eps, deltas = layer.weights, layer.around_attention, self._weights.eps, None
        norm = weights.input_norm
        if convolution is not None:
            normed = step_rms_norm(x, norm, eps=eps)[0]  # type: ignore[arg-type]
            x, deltas = convolution.before(self._in_blocks(normed))
            x, norm = x.flatten(0, 1), None
        q, k, v = layer_before_attention(
            x, weights.q_weight, weights.k_weight, weights.v_weight, head_dim=self._weights.head_dim, q_bias=weights.q_bias,
            k_bias=weights.k_bias, v_bias=weights.v_bias, input_norm=norm, q_norm=weights.q_norm, k_norm=weights.k_norm,
            cos=turns[0], sin=turns[1], eps=eps,
        )  # fmt: skip
        return q, k, v, deltas

    def _after(self, layer: BlockLayer, attended: Tensor, x: Tensor, deltas: Tensor | None) -> Tensor:
        """The block's rows after the layer."""
        weights, eps = layer.weights, self._weights.eps
        if deltas is None or layer.around_attention is None or layer.around_mlp is None:
            return layer_after_attention(
                attended, x, weights.o_weight, weights.gate_weight, weights.up_weight, weights.down_weight,
                o_bias=weights.o_bias, mlp_norm=weights.mlp_norm, eps=eps,
            )  # fmt: skip
        out = self._in_blocks(linear_rows(attended, weights.o_weight, weights.o_bias))
        x = x + layer.around_attention.after(out, deltas).flatten(0, 1)
        normed = step_rms_norm(x, weights.mlp_norm, eps=eps)[0]  # type: ignore[arg-type]
        inner, deltas = layer.around_mlp.before(self._in_blocks(normed))
        gated = step_gate(linear_rows(inner, weights.gate_weight), linear_rows(inner, weights.up_weight))
        return x + layer.around_mlp.after(linear_rows(gated, weights.down_weight), deltas).flatten(0, 1)

    def _in_blocks(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, self._block))


def _table_of(target: Adapted) -> Tensor:
    if not target.has_table:
        raise ValueError(
            "DFlash reads rows of the model's input embeddings, which must be a plain tensor in memory here: they are "
            "quantised, offloaded or divided among ranks"
        )
    return target.table.detach()


def _output_of(target: Adapted) -> Callable[[Tensor], Tensor]:
    get_head = getattr(unwrapped(target.model), "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    if not isinstance(head, nn.Module):
        raise ValueError(
            "DFlash: the head has no output layer of its own, and "
            f"{type(target.model).__name__} no get_output_embeddings() that gives the model's"
        )
    if not is_plain_linear(head) or are_of_torch(head):
        return head
    return partial(linear_rows, weight=head.weight.detach(), bias=head.bias)


def _with_joined_keys(layers: Sequence[BlockLayer]) -> tuple[Tensor, Tensor | None, list[BlockLayer]]:
    """The weights of keys and values of all layers as one, for the features; and the layers, whose own are parts of it."""
    weights = [weight for layer in layers for weight in (layer.weights.k_weight, layer.weights.v_weight)]
    joined = torch.cat(weights)
    parts = iter(joined.split([len(weight) for weight in weights]))
    own = [
        layer._replace(weights=layer.weights._replace(k_weight=next(parts), v_weight=next(parts))) for layer in layers
    ]
    biases = [bias for layer in layers for bias in (layer.weights.k_bias, layer.weights.v_bias) if bias is not None]
    return joined, torch.cat(biases) if biases else None, own


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Of a few rows, or of the many of a prompt."""
    is_few = are_few(len(x), most_few_rows(x.dtype, x.is_cpu))
    return linear_rows(x, weight, bias) if is_few else F.linear(x, weight, bias)


def _word(bits: int) -> int:
    """An int64 whose first so many bits are set."""
    return -1 if bits >= 64 else (1 << max(bits, 0)) - 1
