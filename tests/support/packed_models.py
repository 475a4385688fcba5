"""``packed_copy``: a small model with its weights in 8 bits, whatever its family."""

import copy
import sys

import torch
from support.paths import ROOT
from torch import nn

sys.path.append(str(ROOT))  # for benchmarks; at the end, so that an installed pass_ext stays the one that is tested
from benchmarks.harness.packed_weights import packed as packed_weight
from pass_ext.weights.experts import PackedExperts, can_be_packed
from pass_ext.weights.layers import PackedLinear
from pass_ext.weights.model import is_lookup, packed_layer


def packed(weight):
    return packed_weight(weight.detach().float().contiguous(), 8)


def packed_copy(model):
    """A copy whose linear layers, table of embeddings and experts have the nearest numbers of 8 bits."""
    model = copy.deepcopy(model)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is table.weight
    for name, layer in list(model.named_modules()):
        if can_be_packed(layer):
            up, down = (getattr(layer, each) for each in ("gate_up_proj", "down_proj"))
            if layer.is_transposed:
                up, down = up.transpose(1, 2), down.transpose(1, 2)
            each = [torch.stack([packed(weight) for weight in weights]) for weights in (up, down)]
            model.set_submodule(name, PackedExperts(layer, *each))
        elif type(layer) is nn.Linear and layer.in_features % 32 == 0 and not (is_tied and layer is head):
            model.set_submodule(name, packed_layer(layer, packed(layer.weight), layer.weight.dtype))
    if is_lookup(table):
        model.set_input_embeddings(packed_layer(table, packed(table.weight), table.weight.dtype))
        if is_tied:
            model.set_output_embeddings(PackedLinear(model.get_input_embeddings().weight, table.num_embeddings))
    return model.requires_grad_(False)
