"""A decoder layer for few rows: products, norm, rotary embedding and gate, whole layers around their attention, layers that
keep a state instead of keys, rows of keys and values in 8 bits, weights in 4 and 8 bits, and on huge pages.

A row has the same bits whatever the other rows of a call are. docs/ops/layer.md, docs/ops/step.md, docs/ops/adapter.md and
docs/ops/recurrent.md have the contracts.
"""

from pass_ext.huge_pages import to_huge_pages
from pass_ext.ops.adapter import adapter_rows, adapter_rows_
from pass_ext.ops.convolution import convolution_tree
from pass_ext.ops.layer import (
    LayerWeights,
    PackedLayers,
    layer_after_attention,
    layer_before_attention,
    layer_pack,
    layer_stack,
)
from pass_ext.ops.linear import linear_packed, linear_rows
from pass_ext.ops.quantize import dequantize_rows, quantize_rows
from pass_ext.ops.recurrent import RecurrentUpdate, recurrent_tree
from pass_ext.ops.state import state_commit_
from pass_ext.ops.step import step_gate, step_rms_norm, step_rotary
from pass_ext.weights.form import pack_weight, unpack_weight

__all__ = [
    "LayerWeights",
    "PackedLayers",
    "RecurrentUpdate",
    "adapter_rows",
    "adapter_rows_",
    "convolution_tree",
    "dequantize_rows",
    "layer_after_attention",
    "layer_before_attention",
    "layer_pack",
    "layer_stack",
    "linear_packed",
    "linear_rows",
    "pack_weight",
    "quantize_rows",
    "recurrent_tree",
    "state_commit_",
    "step_gate",
    "step_rms_norm",
    "step_rotary",
    "to_huge_pages",
    "unpack_weight",
]
