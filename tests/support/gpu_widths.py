"""Caches as wide as on a GPU, where a session pads rows to the widths of kernels, for sessions on the CPU."""

import torch

from pass_ext.decoding.models import layer_attention
from pass_ext.decoding.session import session
from pass_ext.ops.attention import padded_widths


def use_widths_of_a_gpu(monkeypatch) -> None:
    """Pads as on a GPU until the test ends."""

    def padded(keys, values, _device, *, in_codes):
        return padded_widths(keys, values, torch.device("cuda"), in_codes=in_codes)

    for module in (session, layer_attention):
        monkeypatch.setattr(module, "padded_widths", padded)
