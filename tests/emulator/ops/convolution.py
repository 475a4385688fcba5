"""``convolution_tree`` on the emulator."""

import torch

from emulator import session
from emulator.ops.launching import given, name_of, pointers, seeds
from emulator.ops.recurrent import contiguous, with_contiguous_heads


def convolution_tree(x, weight, bias, states, state_index, parents, cu_nodes, silu):
    x = with_contiguous_heads(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    inputs = given(
        x=x, weight=weight.contiguous(), bias=contiguous(bias), states=states, state_index=state_index, parents=parents,
        cu_nodes=cu_nodes,
    )  # fmt: skip
    slot, channel, tap = states.stride()
    buffers = {name: (tensor, "in") for name, tensor in inputs.items()} | {"out": (out, "out")}
    with session(buffers, seed=next(seeds)) as machine:
        machine.convolution_tree(dict(
            pointers(buffers), dtype=name_of(x.dtype), rows=x.shape[0], row_distance=x.stride(0), channels=x.shape[1],
            slots=states.shape[0], slot_distance=slot, channel_distance=channel, tap_distance=tap,
            requests=cu_nodes.numel() - 1, taps=weight.shape[1], silu=int(silu),
        ))  # fmt: skip
    return out


KERNELS = {"convolution_tree": convolution_tree}
