"""A decoder layer for few rows: products, norm, rotary embedding and gate, and whole layers around their attention.

A row has the same bits whatever the other rows of a call are. docs/ops/layer.md, docs/ops/step.md and docs/ops/adapter.md have
the contracts.
"""

from pass_ext.ops.adapter import adapter_rows, adapter_rows_
from pass_ext.ops.layer import (
    LayerWeights,
    PackedLayers,
    layer_after_attention,
    layer_before_attention,
    layer_pack,
    layer_stack,
)
from pass_ext.ops.linear import linear_rows
from pass_ext.ops.step import step_gate, step_rms_norm, step_rotary

__all__ = [
    "LayerWeights",
    "PackedLayers",
    "adapter_rows",
    "adapter_rows_",
    "layer_after_attention",
    "layer_before_attention",
    "layer_pack",
    "layer_stack",
    "linear_rows",
    "step_gate",
    "step_rms_norm",
    "step_rotary",
]
