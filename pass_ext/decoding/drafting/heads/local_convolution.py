"""``LocalConvolution``: a convolution over the rows of a block, whose kernel depends on the row (DFlash-2).

    y[t] = sum over taps j of  (base[j] + delta[t, j]) ∘ x[t - j],    x in front of the block is 0

One stands in front of attention or the MLP and one after it. The rows in front of the first give the deltas of both, one
number for each tap and group of channels.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from pass_ext.ops.linear import linear_rows


class LocalConvolution(NamedTuple):
    """The convolutions around attention or an MLP."""

    base: Tensor
    """``[2, taps, d]``: of the one in front, and of the one after."""
    deltas: Tensor
    """``[2 * taps * groups, d]``, the weight of the product that gives the deltas."""

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The rows ``[blocks, rows, d]`` convolved, and the deltas for ``after``."""
        deltas = linear_rows(x, self.deltas).unflatten(-1, (2, self.base.shape[1], -1))
        return _convolved(x, self.base[0], deltas[..., 0, :, :]), deltas[..., 1, :, :]

    def after(self, x: Tensor, deltas: Tensor) -> Tensor:
        """The output ``[blocks, rows, d]`` of what stands between both, convolved."""
        return _convolved(x, self.base[1], deltas)


def _convolved(x: Tensor, base: Tensor, deltas: Tensor) -> Tensor:
    channels = x.shape[-1] // deltas.shape[-1]
    kernels = base + deltas.repeat_interleave(channels, -1)
    out = kernels[..., 0, :] * x
    for tap in range(1, len(base)):
        out = out + kernels[..., tap, :] * F.pad(x, (0, 0, tap, 0))[:, : x.shape[1]]
    return out
