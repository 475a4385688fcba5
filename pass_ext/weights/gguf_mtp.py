"""The MTP layers of a GGUF file of Qwen 3.5, by the names that they have in its makers' checkpoint.

    blk.L.nextn.eh_proj, enorm, hnorm, shared_head_norm    mtp.fc, pre_fc_norm_embedding, pre_fc_norm_hidden, norm
    blk.(L + i).attn_q, …                                  mtp.layers.i.self_attn.q_proj, …

L is the number of the model's own layers. llama.cpp writes the weight of a norm as w + 1, and experts with gates and ups apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pass_ext.weights.gguf import architecture_of, dense, mtp_layers, number_of, reader_of

ARCHITECTURES = "qwen35", "qwen35moe"
"""Those of llama.cpp whose MTP layers are read: transformers reads their files, and their form is known."""

_ENDS = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_EXPERTS = "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"


def mtp_tensors(file: Path) -> dict[str, Callable[[], Tensor]]:
    """What reads each tensor of the layers, in float32. ValueError for a file that has none, or of another architecture."""
    reader = reader_of(file)
    architecture, layers = architecture_of(reader), mtp_layers(file)
    if not layers:
        raise ValueError("it has no MTP layer: a head of another kind is read from safetensors")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"its MTP layer {', '.join(layers)} is not read: of {' and '.join(ARCHITECTURES)} such layers are, and the file is "
            f"of {architecture}. Give the folder that it was converted from"
        )
    first = number_of(layers[0])
    found: dict[str, Callable[[], Tensor]] = {}
    experts: dict[str, dict[str, Any]] = {}
    for tensor in reader.tensors:
        block, _, part = tensor.name.removeprefix("blk.").removesuffix(".weight").partition(".")
        if not tensor.name.startswith("blk.") or int(block) < first:
            continue
        layer = f"mtp.layers.{int(block) - first}."
        if part in _EXPERTS:
            experts.setdefault(layer, {})[part] = tensor
        elif part in _LAYER:
            found[f"{layer}{_LAYER[part]}.weight"] = partial(_numbers, tensor)
        elif part in _ENDS and int(block) == first:
            found[f"mtp.{_ENDS[part]}.weight"] = partial(_numbers, tensor)
        else:  # the drafter names it as one that it has no use for
            found[f"mtp.{tensor.name}"] = partial(_numbers, tensor)
    for layer, parts in experts.items():
        gate, up, down = (parts.get(part) for part in _EXPERTS)
        if gate is not None and up is not None:
            found[f"{layer}mlp.experts.gate_up_proj"] = partial(_joined, gate, up)
        if down is not None:
            found[f"{layer}mlp.experts.down_proj"] = partial(_numbers, down)
    return found


def _numbers(tensor: Any) -> Tensor:
    numbers = torch.from_numpy(np.array(dense(tensor), np.float32))
    if "norm.weight" in tensor.name:
        return numbers - 1
    return numbers[None] if numbers.ndim == 1 else numbers  # the gate of the shared expert: one row


def _joined(gate: Any, up: Any) -> Tensor:
    """``[E, 2 inner, d]``."""
    return torch.cat((_numbers(gate), _numbers(up)), 1)
