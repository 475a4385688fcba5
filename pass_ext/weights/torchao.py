"""``pack_torchao``: a model that torchao has quantised, with packed weights in place of its tensors.

    Int8Tensor, IntxUnpackedToInt8Tensor      weight = scale (q - zero)
    Int4Tensor                                weight = scale q + zero, two q of 4 bits in a byte

Only weights are: where activations are quantised too, the layer stays torchao's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.weights.grouped import Grouped
from pass_ext.weights.layers import PackedLinear
from pass_ext.weights.model import refuse_to_save


def pack_torchao(model: Any, dtype: torch.dtype, *, dense: bool) -> None:
    """Replaces, in place, the linear layers whose weights are codes of torchao. dense: by their numbers in dtype."""
    replaced = 0
    for name, layer in list(model.named_modules()):
        found = grouped_of(layer.weight) if type(layer) is nn.Linear and layer.weight.is_cpu else None
        packed = None if found is None or dense else found.packed()
        if packed is not None:
            model.set_submodule(name, PackedLinear(packed, layer.out_features, layer.bias))
        elif found is not None:
            layer.weight = nn.Parameter(found.dense().to(dtype), requires_grad=False)
        replaced += found is not None
    if replaced:
        # transformers and peft would take the model for torchao's.
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
        if not dense:
            model.save_pretrained = refuse_to_save


def grouped_of(weight: Tensor) -> Grouped | None:
    """The codes of a tensor of torchao; None for any other, and where more than the weight is quantised."""
    own: Any = weight.data if isinstance(weight, nn.Parameter) else weight
    kind = type(own).__name__ if type(own).__module__.startswith("torchao.") else ""
    if kind not in ("Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor") or own.dim() != 2:
        return None
    more = "act_quant_kwargs", "act_pre_scale", "act_quant_scale", "activation_quantization"
    if any(getattr(own, name, None) is not None for name in more) or own.block_size[0] != 1:
        return None
    if kind == "Int4Tensor":
        if own.activation_dtype not in (None, torch.bfloat16):
            return None
        stored = own.qdata.view(torch.uint8)
        codes = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2) ^ 8
        scale, zero = own.scale.t(), own.zero_point.t()
        return Grouped(codes, scale, zero.double() - 8 * scale.double(), 4)
    bits = 8 if kind == "Int8Tensor" else int(str(own.target_dtype).removeprefix("torch.int"))
    middle = 1 << bits - 1
    zero = 0 if own.zero_point is None else own.zero_point.double()
    codes = (own.qdata.view(torch.uint8) + middle) & (1 << bits) - 1
    scale = own.scale if own.scale.dim() == 2 else own.scale[:, None]
    return Grouped(codes, scale, scale.double() * -(zero + middle), bits)
