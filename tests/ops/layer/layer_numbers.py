"""Random tensors for the layer ops."""

import torch


class Numbers:
    """Random tensors of one dtype."""

    def __init__(self, seed, dtype):
        self._generator, self._dtype = torch.Generator().manual_seed(seed), dtype

    def __call__(self, *shape, dtype=None):
        scale = shape[1] ** -0.5 if len(shape) == 2 else 1.0
        numbers = torch.randn(shape, generator=self._generator, dtype=torch.float64) * scale
        return numbers.to(dtype or self._dtype)
