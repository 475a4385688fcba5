"""``state_commit_`` on the emulator."""

import torch

from emulator import session
from emulator.ops.launching import given, pointers, seeds
from emulator.ops.recurrent import contiguous, kind_of, layout_of, with_contiguous_heads

TYPES = (torch.bfloat16, torch.float16, torch.float32)  # RowType of csrc/core/recurrent.h


def recurrent_state(state, k, u, log_decay, decay_rates=None):
    """(inputs, numbers) of a recurrent state and its update."""
    k = with_contiguous_heads(k)
    inputs = given(k=k, u=u.contiguous(), log_decay=log_decay.contiguous(), decay_rates=contiguous(decay_rates))
    numbers = layout_of(state) | dict(
        heads=state.shape[1], key_heads=k.shape[1], dk=state.shape[2], dv=state.shape[3], key_row=k.stride(0),
        key_head=k.stride(1), key_type=TYPES.index(k.dtype), decay=kind_of(log_decay, decay_rates),
    )  # fmt: skip
    return inputs, numbers


def convolution_state(state, x):
    """The same of a convolution's."""
    x, size = with_contiguous_heads(x), state.element_size()
    slot, channel, tap = (stride * size for stride in state.stride())
    return {"x": x}, dict(
        window_slots=state.shape[0], window_slot=slot, channel=channel, tap=tap, channels=state.shape[1],
        inputs=state.shape[2], x_row=x.stride(0) * size, bytes=size,
    )  # fmt: skip


def state_commit(states, updates, parts, cu_nodes, path, num_accepted, state_index) -> None:
    if not states:
        return
    buffers = {
        name: (tensor, "in")
        for name, tensor in given(
            cu_nodes=cu_nodes, path=path, num_accepted=num_accepted, state_index=state_index
        ).items()
    }
    numbers = dict(
        requests=cu_nodes.numel() - 1, rows=updates[0].shape[0], width=path.shape[1], path_stride=path.stride(0),
        recurrents=0, convolutions=0,
    )  # fmt: skip
    rest = iter(updates)
    for state, count in zip(states, parts, strict=True):
        update = [next(rest) for _ in range(count)]
        name, kind, describe = (
            ("recurrent", "recurrents", recurrent_state)
            if state.dim() == 4
            else ("window", "convolutions", convolution_state)
        )
        place = f" {numbers[kind]}"
        numbers[kind] += 1
        inputs, own = describe(state, *update)
        buffers[name + place] = (state, "inout")
        buffers |= {key + place: (tensor, "in") for key, tensor in inputs.items()}
        numbers |= {key + place: value for key, value in own.items()}
    with session(buffers, seed=next(seeds)) as machine:
        machine.state_commit(numbers | pointers(buffers))


KERNELS = {"state_commit_": state_commit}
