"""The head that training begins with: the best linear one, by least squares.

    x_j     the model's states of token j at the taps, each over its root mean square, and so the embedding of token j + 1
    y_j     the model's last state of token j + 1, over its root mean square
    W       the solution of (sum of x_j^T x_j + RIDGE · n) W = sum of x_j^T y_j

``fc`` has the part of W for the states. That for the embedding is cut to the rank that half of the heads have room for; their
keys equal their queries, and are made of the embedding alone, so each row attends to itself and to rows of the same token. The
other heads and the MLP begin with outputs of zero. A step of training costs as much as thousands of rows here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

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
    solved = _solution(model, head.taps, hidden, lengths, factors, ranks)
    width, tapped = head.fc.out_features, head.fc.in_features
    head.fc.weight.copy_(solved[:tapped].T)
    layer: Any = head.layers[0]
    attention, dim = layer.self_attn, layer.self_attn._dim
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
        rows = slice(number * dim, (number + 1) * dim)
        attention.q_proj.weight[rows, :width] = own
        attention.k_proj.weight[rows, :width] = own
    layer.mlp.down_proj.weight.zero_()


def norm_factors(model: Any) -> Tensor:
    """``[d]`` float32: what the model's last norm multiplies the numbers of a state by, over its root mean square."""
    norm, weight = exit_parts(model).norm, model.get_output_embeddings().weight
    signs = torch.ones_like(weight[:1])
    signs[:, ::2] = -1  # mean 0, root mean square 1
    factors: Tensor = (norm(signs) * signs)[0].float()
    return factors


def _solution(
    model: Any, taps: Sequence[Any], hidden: Hidden, lengths: Sequence[int], factors: Tensor, ranks: Ranks
) -> Tensor:
    """W, ``[taps · d + d, d]``."""
    starts = accumulate(lengths, initial=0)
    places = torch.cat(
        [torch.arange(start, start + length - 1) for start, length in zip(starts, lengths, strict=False)]
    )
    places = places[torch.linspace(0, len(places) - 1, min(ROWS, len(places))).long()]
    embeddings, device, width = model.get_input_embeddings(), factors.device, len(factors)
    wide = (len(taps) + 1) * width
    squares, products = torch.zeros(wide, wide, device=device), torch.zeros(wide, width, device=device)
    count = torch.zeros((), device=device)
    for rows in places.split(_CHUNK):
        states = [hidden.behind[int(tap)][rows].to(device) for tap in taps]
        x = torch.cat([_over_rms(part) for part in (*states, embeddings(hidden.tokens[rows + 1].long().to(device)))], 1)
        y = (hidden.final[rows + 1].to(device).float() / factors).nan_to_num(0, 0, 0)
        squares += x.T @ x
        products += x.T @ y
        count += len(rows)
    ranks.total_([squares, products, count])
    return torch.linalg.solve(squares + RIDGE * count * torch.eye(wide, device=device), products)


def _over_rms(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
