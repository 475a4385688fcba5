"""``recurrent_tree`` on the emulator."""

import torch

from emulator import session
from emulator.ops.launching import given, name_of, pointers, seeds

DECAYS = ("head", "channel", "element")  # Decay of csrc/core/recurrent.h


def with_contiguous_heads(x):
    return x if x.stride(-1) == 1 else x.contiguous()


def kind_of(log_decay, decay_rates):
    return DECAYS.index("element" if decay_rates is not None else "channel" if log_decay.dim() == 3 else "head")


def layout_of(states):
    slot, head, row, column = states.stride()
    return dict(slots=states.shape[0], slot=slot, head=head, row=row, column=column)


def contiguous(tensor):
    return tensor if tensor is None else tensor.contiguous()


def recurrent_tree(q, k, v, log_decay, decay_rates, beta, states, state_index, parents, cu_nodes, form, scale):
    out, u = torch.empty(v.shape, dtype=v.dtype), torch.empty(v.shape)
    heads = {name: with_contiguous_heads(x) for name, x in dict(q=q, k=k, v=v).items()}
    inputs = given(
        **heads, log_decay=contiguous(log_decay), decay_rates=contiguous(decay_rates), beta=contiguous(beta),
        states=states, state_index=state_index, parents=parents, cu_nodes=cu_nodes,
    )  # fmt: skip
    numbers = {}
    for name, x in heads.items():
        numbers[f"{name}_row_distance"], numbers[f"{name}_head_distance"], _ = x.stride()
    buffers = {name: (tensor, "in") for name, tensor in inputs.items()} | {"out": (out, "out"), "u": (u, "out")}
    with session(buffers, seed=next(seeds)) as machine:
        machine.recurrent_tree(dict(
            pointers(buffers), **numbers, **layout_of(states), dtype=name_of(v.dtype), rows=v.shape[0],
            requests=cu_nodes.numel() - 1, heads=v.shape[1], key_heads=k.shape[1], dk=k.shape[2], dv=v.shape[2],
            decay=kind_of(log_decay, decay_rates), form=form, scale=float(scale),
        ))  # fmt: skip
    return out, u


KERNELS = {"recurrent_tree": recurrent_tree}
