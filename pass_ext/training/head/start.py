"""The head that training begins with: the best linear one, by least squares.

    x_j     the model's states of token j at the taps, each over its root mean square, and so the embedding of token j + 1
    y_j     the model's last state of token j + 1, over its root mean square
    W       the solution of (A + RIDGE · mean of A's diagonal) W = sum of x_j^T y_j,  A = sum of x_j^T x_j

``fc`` has the part of W for the states. That for the embedding is cut to the rank that half of the heads have room for; their
keys equal their queries, and are made of the embedding alone, so each row attends to itself and to rows of the same token. The
other heads begin with outputs of zero. The MLP reads x_j W by random weights, and what it puts out is fitted, again by least
squares, to what x_j W lacks of y_j. A step of training costs as much as thousands of rows here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pass_ext.decoding.drafting.heads.eagle3 import Eagle3Head
from pass_ext.decoding.models.early_exit import exit_parts
from pass_ext.training.common.ranks import Ranks
from pass_ext.training.draft.loop import Hidden

RIDGE = 0.003
ROWS = 32_768  # of a rank, at most
_CHUNK = 4096
_SHARPNESS = 12.0  # a row's score of itself, those of other tokens being about a quarter of it


@torch.no_grad()
def begin_linear(head: Eagle3Head, model: Any, hidden: Hidden, lengths: Sequence[int], ranks: Ranks) -> None:
    """Gives the head its first weights. hidden: of this rank's share of the texts. lengths: of the texts of this share."""
    factors = norm_factors(model)
    head.norm.weight.copy_(factors)
    layer: Any = head.layers[0]
    rows, mlp = _Rows(model, head.taps, hidden, lengths, factors), layer.mlp
    solved = _least_squares(rows.pairs(), ranks)
    for product, spread in ((mlp.gate_proj, 2.0), (mlp.up_proj, 1.0)):
        nn.init.normal_(product.weight, std=spread / product.in_features**0.5)

    def lacking() -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in rows.pairs():
            found = x @ solved
            read = _over_rms(found)
            yield mlp.act_fn(mlp.gate_proj(read)) * mlp.up_proj(read), y - found

    mlp.down_proj.weight.copy_(_least_squares(lacking(), ranks).T)
    width, tapped = head.fc.out_features, head.fc.in_features
    head.fc.weight.copy_(solved[:tapped].T)
    attention, dim = layer.self_attn, layer.self_attn.dim
    count = (attention.q_proj.out_features // dim + 1) // 2
    rank = min(count * dim, width)
    left, scales, right = torch.linalg.svd(solved[tapped:], full_matrices=False)
    scales = scales[:rank].sqrt()
    for product in (attention.q_proj, attention.k_proj, attention.v_proj):
        product.weight[: count * dim] = 0
    attention.v_proj.weight[:rank, :width] = (left[:, :rank] * scales).T
    attention.o_proj.weight.zero_()
    attention.o_proj.weight[:, :rank] = right[:rank].T * scales
    for number in range(count):
        own = torch.linalg.qr(torch.randn(width, dim)).Q.T.to(factors) * (_SHARPNESS / dim**0.5) ** 0.5
        for product in (attention.q_proj, attention.k_proj):
            product.weight[number * dim : (number + 1) * dim, :width] = own


def norm_factors(model: Any) -> Tensor:
    """``[d]`` float32: what the model's last norm multiplies the numbers of a state by, over its root mean square."""
    norm, weight = exit_parts(model).norm, model.get_output_embeddings().weight
    signs = torch.ones_like(weight[:1])
    signs[:, ::2] = -1  # mean 0, root mean square 1
    factors: Tensor = (norm(signs) * signs)[0].float()
    return factors


class _Rows(NamedTuple):
    model: Any
    taps: Sequence[Any]
    hidden: Hidden
    lengths: Sequence[int]
    factors: Tensor

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """x ``[n, taps · d + d]`` and y ``[n, d]`` of some rows after the other, at most ROWS of them."""
        starts = accumulate(self.lengths, initial=0)
        texts = zip(starts, self.lengths, strict=False)
        places = torch.cat([torch.arange(start, start + length - 1) for start, length in texts])
        places = places[torch.linspace(0, len(places) - 1, min(ROWS, len(places))).long()]
        hidden, embeddings, device = self.hidden, self.model.get_input_embeddings(), self.factors.device
        for rows in places.split(_CHUNK):
            embedded = embeddings(hidden.tokens[rows + 1].long().to(device))
            states = [hidden.after[int(tap)][rows].to(device) for tap in self.taps]
            x = torch.cat([_over_rms(part) for part in (*states, embedded)], 1)
            yield x, (hidden.final[rows + 1].to(device).float() / self.factors).nan_to_num(0, 0, 0)


def _least_squares(pairs: Iterator[tuple[Tensor, Tensor]], ranks: Ranks) -> Tensor:
    """W, of x and y of all ranks."""
    sums: list[Tensor] = []
    for x, y in pairs:
        parts = [x.T @ x, x.T @ y]
        sums = parts if not sums else [total.add_(part) for total, part in zip(sums, parts, strict=True)]
    ranks.total_(sums)
    squares, products = sums
    squares.diagonal().add_(RIDGE * squares.diagonal().mean())
    return torch.linalg.solve(squares, products)


def _over_rms(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
