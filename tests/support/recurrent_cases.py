"""Steps of recurrent layers: random trees and inputs, and the same path as steps of one token."""

import random as plain_random

import pytest
import torch
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from pass_ext.layers import recurrent_tree, state_commit_

DECAYS = ("head", "channel", "element")


def int32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def random_tree(nodes, seed=0, bushy=True):
    """Parents of a tree; not bushy: mostly a chain."""
    drawn = plain_random.Random(f"{nodes}/{seed}")
    return [-1 if i == 0 else drawn.randrange(i) if bushy or i % 5 == 0 else i - 1 for i in range(nodes)]


def packed(trees):
    """The parents of all requests."""
    return int32([parent for tree in trees for parent in tree])


def path_to(parents, node):
    """The nodes from the root to this one."""
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def bounds_of(sizes):
    return int32([0, *sizes]).cumsum(0).int()


def moved(arguments, device):
    """The arguments with every tensor, also those in lists and updates, on a device; one tensor stays one, and expanded."""
    there = {}

    def put(tensor):
        if id(tensor) not in there:
            own = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
            there[id(tensor)] = own.to(device).expand(tensor.shape) if own.shape != tensor.shape else tensor.to(device)
        return there[id(tensor)]

    return tree_map_only(torch.Tensor, put, arguments)


def skip_unless_values_are_read(backend):
    """Skips where no value is refused: on a GPU."""
    if not backend.name.startswith("cpu"):
        pytest.skip("a check of values would wait for the GPU")


class Layer:
    """Random inputs of a recurrent layer for packed nodes, and its call."""

    def __init__(self, rows, key_heads=2, heads=4, dk=16, dv=32, *, dtype=torch.float32, decay="head", form="delta",
                 seed=0, slots=1, device="cpu"):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator)

        self.form, self.heads, self.scale = form, heads, dk**-0.5
        self.q = functional.normalize(normal(rows, key_heads, dk), dim=-1).to(dtype).to(device)
        self.k = functional.normalize(normal(rows, key_heads, dk), dim=-1).to(dtype).to(device)
        self.v = normal(rows, heads, dv).to(dtype).to(device)
        shape = {"head": (rows, heads), "channel": (rows, heads, dk), "element": (rows, heads, dv)}[decay]
        self.log_decay = -normal(*shape).abs().to(device)
        self.decay_rates = normal(heads, dk, dv).abs().to(device) if decay == "element" else None
        self.beta = torch.rand(rows, heads, generator=generator).to(device)
        self.states = normal(slots, heads, dk, dv).to(device)

    def inputs(self, rows=slice(None)):
        return [x[rows] for x in (self.q, self.k, self.v, self.log_decay, self.beta)]

    def options(self):
        return dict(form=self.form, scale=self.scale, decay_rates=self.decay_rates)

    def run(self, parents, cu_nodes, function=recurrent_tree, states=None, rows=slice(None), **options):
        states = self.states if states is None else states
        parents, cu_nodes = (x.to(self.q.device) for x in (parents, cu_nodes))
        return function(*self.inputs(rows), states, parents, cu_nodes, **self.options(), **options)

    def to(self, target):
        """The same numbers on another device or in another dtype."""
        other = object.__new__(Layer)
        other.__dict__ = {
            name: x.to(target) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for name, x in self.__dict__.items()
        }
        return other

    def double(self):
        """The same numbers in float64, for the reference."""
        return self.to(torch.float64)

    def token_by_token(self, state, rows):
        """(out of each row, the state after them): a step of one token and its commit, for each row in order."""
        device, state, outs = self.q.device, state.clone(), []
        bounds, root = int32([0, 1], device), int32([-1], device)
        for row in rows:
            out, update = self.run(root, bounds, states=state, rows=slice(row, row + 1))
            outs.append(out[0])
            state_commit_([state], [update], bounds, int32([[0]], device), int32([0], device))
        return torch.stack(outs), state


def commit(states, update, cu_nodes, paths, **options):
    """state_commit_ for the paths of each request, lists of nodes; none: a request without nodes."""
    device, width = states[0].device, max(1, *map(len, paths))
    path = int32([[*nodes, *[-1] * (width - len(nodes))] for nodes in paths], device)
    accepted = int32([max(0, len(nodes) - 1) for nodes in paths], device)
    state_commit_(states, update, cu_nodes.to(device), path, accepted, **options)
