"""The decoder layer of an MTP head, as a transformers model of one layer: of the model's class, with its embedding and output
layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from pass_ext.decoding.drafting.heads.checkpoint import HeadCheckpoint
from pass_ext.decoding.drafting.heads.head import TargetFacts
from pass_ext.decoding.models.parts import unwrapped
from pass_ext.weights.folder import Read, place_layers


def model_of_one_layer(
    checkpoint: HeadCheckpoint,
    tensors: Mapping[str, Tensor],
    target: TargetFacts,
    quantised: Mapping[str, Mapping[str, Read]] = MappingProxyType({}),
    types: Mapping[str, list[str]] = MappingProxyType({}),
) -> Any:
    """The model's class with one layer.

    Args:
        tensors: that it has, named as in its checkpoints; transformers joins experts that a checkpoint has apart.
        quantised: tensors of linear layers and experts, by their names, in the checkpoint's layout.
        types: settings of the layer that differ from those of the model's last one.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model = unwrapped(target.model)
    config = copy.deepcopy(model.config.get_text_config(decoder=True))
    if hasattr(config, "quantization_config"):  # the tensors here are the layer's numbers
        del config.quantization_config
    count = config.num_hidden_layers
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == count:  # of each layer: the last one's
            setattr(config, name, value[-1:])
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    for name, value in types.items():
        setattr(config, name, value)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 1, None
    for name in ("first_k_dense_replace", "num_dense_layers"):
        if hasattr(config, name):
            setattr(config, name, 0)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        layer, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            dtype=target.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
        )
        placed: set[str] = set()
        unknown: list[str] = []
        if checkpoint.layout is not None:
            is_dense = target.device.type != "cpu"
            placed, unknown = place_layers(layer, quantised, checkpoint.layout, dense=is_dense)
    except (RuntimeError, ValueError) as error:
        raise _misfit(checkpoint, target, f"does not fit a layer of {target.name}: {error}") from error
    places = layer.state_dict().keys() - placed
    missing = [
        name
        for name in report["missing_keys"]
        if name in places and not name.endswith(("embed_tokens.weight", "lm_head.weight"))
    ]
    if missing:
        raise _misfit(checkpoint, target, f"has no tensors for {', '.join(sorted(missing))} of {target.name}")
    for name, found, wanted in sorted(report["mismatched_keys"]):
        raise _misfit(
            checkpoint, target, f"has {name} of {list(found)}, and a layer of {target.name} of {list(wanted)}"
        )
    for name in sorted((*report["unexpected_keys"], *unknown)):
        raise _misfit(checkpoint, target, f"has a tensor {name}, and a layer of {target.name} has not")
    layer.requires_grad_(False).eval().to(target.device)
    layer.set_input_embeddings(model.get_input_embeddings())
    layer.set_output_embeddings(model.get_output_embeddings())
    layer.config._attn_implementation = model.config._attn_implementation
    return layer


def _misfit(checkpoint: HeadCheckpoint, target: TargetFacts, problem: str) -> ValueError:
    """The error for a layer that is none of the target's; it names the class of the checkpoint where that is another one."""
    known = checkpoint.config.get("architectures") or [target.name]
    whose = "" if target.name in known else f"; the checkpoint is of {' or '.join(known)}"
    return checkpoint.refusal(f"its MTP layer {problem}{whose}{checkpoint.absent}")
