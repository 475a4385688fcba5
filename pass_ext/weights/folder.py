"""``folder_model``: a transformers model whose weights are those of a quantised checkpoint: a folder of safetensors files.

    tensors of a layer -> ``Grouped`` -> packed, in place of the linear layer; or dense, in it

Layer by layer from the mapped files, so that memory peaks near their size. What a layer has no packed form for is dense.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.weights.experts import PackedExperts, can_be_packed, fill_experts, sizes_of
from pass_ext.weights.formats import fp4, fp4_scales, pack_parts
from pass_ext.weights.grouped import LAYOUTS, Grouped, grouped
from pass_ext.weights.layers import PackedLinear
from pass_ext.weights.model import empty_model, fill, finished, holder_of

Read = Callable[[], Tensor]

_IGNORED = re.compile(r"rotary_emb\.inv_freq$|masked_bias$")
"""Buffers of older versions of transformers, which it computes today."""


def layout_of(config: Mapping[str, Any]) -> str | None:
    """The layout, one of ``LAYOUTS``, of a checkpoint with this ``quantization_config``; None: it is not read here."""
    method = config.get("quant_method")
    if method == "gptq":
        kind = config.get("checkpoint_format") or "gptq"
        return kind if kind in ("gptq", "gptq_v2") else None
    if method == "awq":
        kind = config.get("version") or config.get("format") or "gemm"
        return "awq" if str(kind).lower() == "gemm" and config.get("bits", config.get("w_bit", 4)) == 4 else None
    if method == "mxfp4":
        return "mxfp4"
    if method == "compressed-tensors":
        groups = (config.get("config_groups") or {}).values()
        is_sparse = (config.get("sparsity_config") or {}).get("format", "dense") != "dense"
        others = is_sparse or config.get("kv_cache_scheme") or not all(map(_keeps_weights_alone, groups))
        return None if others else "compressed-tensors"
    return None


def _keeps_weights_alone(group: Mapping[str, Any]) -> bool:
    """True for integers in groups, where activations stay as they are."""
    weights = group.get("weights") or {}
    activations = group.get("input_activations") or group.get("output_activations")
    return not activations and weights.get("type", "int") == "int" and weights.get("strategy") in ("group", "channel")


def folder_model(folder: Path, layout: str, dtype: torch.dtype, *, dense: bool) -> Any:
    """The model, frozen and in eval mode. dtype: of all that is not packed, with ``dense`` of everything. ValueError for
    files that are no such checkpoint."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = empty_model(config, dtype)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    own, filled, unknown = model.state_dict(keep_vars=True).keys(), set[str](), list[str]()
    with ExitStack() as files:
        plain, layers = sorted_tensors(_tensors_of(folder, files), layout)
        for name, read in plain.items():
            if name in own:
                filled.add(fill(model, name, read()))
            elif not (_IGNORED.search(name) or (name.endswith(".bias") and not read().any())):
                unknown.append(name)
        placed, without_place = place_layers(model, layers, layout, dense=dense)
        filled |= placed
        unknown += without_place
    mtp = _mtp_layers([*plain, *layers])
    if unknown := [name for name in unknown if not name.startswith(mtp)]:
        raise ValueError(
            f"{folder.name} has tensors for which {type(model).__name__} has no place: {', '.join(unknown[:5])}"
            f"{', …' * (len(unknown) > 5)}"
        )
    return finished(model, filled, folder.name)


def _mtp_layers(names: Collection[str]) -> tuple[str, ...]:
    """How the names of tensors of MTP layers begin, which transformers leaves out, and ``load_drafter`` reads."""
    return "mtp.", *(name.partition("eh_proj")[0] for name in names if ".eh_proj" in name)


def place_layers(
    model: nn.Module, layers: Mapping[str, Mapping[str, Read]], layout: str, *, dense: bool
) -> tuple[set[str], list[str]]:
    """Puts quantised weights into a model, by the names of its linear layers and experts: packed, or dense where they have no
    packed form -> the names of the weights that it has filled, and of layers that the model has no place for."""
    left, filled, unknown = {name: dict(parts) for name, parts in layers.items()}, set[str](), list[str]()
    for place, experts in _experts_of(model, left).items():
        filled.update(_place_experts(model, place, experts, layout, dense=dense))
    for name, parts in left.items():
        module = holder_of(model, f"{name}.weight")
        if layout == "mxfp4" and can_be_packed(module):
            filled.update(_place_fp4(model, name, parts))
            continue
        if type(module) is not nn.Linear:
            unknown.append(name)
            continue
        weight = read_grouped(layout, name, parts, *module.weight.shape)
        packed = None if dense else weight.packed()
        if packed is None:
            fill(model, f"{name}.weight", weight.dense())
        else:
            model.set_submodule(name, PackedLinear(packed, module.out_features, module.bias, weight.order))
        filled.add(f"{name}.weight")
    return filled, unknown


def read_grouped(layout: str, name: str, parts: Mapping[str, Read], outputs: int, width: int) -> Grouped:
    """The weight of a layer of this name ``[outputs, width]``."""
    try:
        return grouped(layout, {part: read() for part, read in parts.items()}, outputs, width)
    except (ValueError, RuntimeError) as error:  # RuntimeError: of tensors that have other shapes
        raise ValueError(f"{name} {error}") from error


# ---- experts ----

_FP4_PARTS = {f"{part}_{kind}" for part in ("gate_up_proj", "down_proj") for kind in ("blocks", "scales")}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj")
Experts = dict[str, dict[int, dict[str, Read]]]
"""gate, up and down -> number -> tensors."""


def _experts_of(model: nn.Module, layers: dict[str, dict[str, Read]]) -> dict[str, Experts]:
    """Takes the experts of modules that have all of them in two tensors out of the layers."""
    found: dict[str, Experts] = {}
    for name in list(layers):
        match = _EXPERT.fullmatch(name)
        module = holder_of(model, f"{match[1]}.weight") if match else None
        if match and can_be_packed(module):
            found.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = layers.pop(name)
    return found


def _place_experts(model: nn.Module, place: str, experts: Experts, layout: str, *, dense: bool) -> list[str]:
    """Puts the experts of a module there; the names that they fill."""
    own: Any = model.get_submodule(place)
    count, up, features = sizes_of(own)
    sizes = {"gate": (up // 2, features), "up": (up // 2, features), "down": (features, up // 2)}
    weights: dict[str, list[Grouped]] = {}
    for part, size in sizes.items():
        given = experts.get(part, {})
        if set(given) != set(range(count)):
            raise ValueError(f"{place} must have {count} experts with {part}_proj, got {len(given)}")
        weights[part] = [
            read_grouped(layout, f"{place}.{each}.{part}_proj", given[each], *size) for each in range(count)
        ]
    packed = {} if dense else {part: _stacked(each) for part, each in weights.items()}
    ups, downs, gates = (packed.get(part) for part in ("up", "down", "gate"))
    if ups is None or downs is None or gates is None:
        for part, each in weights.items():
            fill_experts(own, part, [weight.dense() for weight in each])
        return [f"{place}.gate_up_proj", f"{place}.down_proj"]
    model.set_submodule(place, PackedExperts(own, ups, downs, gates))
    return [f"{place}.{part}" for part in packed]


def _stacked(weights: list[Grouped]) -> Tensor | None:
    """The packed weights of all experts, in one form; None: they have none."""
    if any(weight.order is not None for weight in weights):
        return None
    made = [packed for weight in weights if (packed := weight.packed()) is not None]
    if len({packed.shape for packed in made}) > 1:
        made = [packed for weight in weights if (packed := weight.packed(wide=True)) is not None]
    return torch.stack(made) if made and len(made) == len(weights) else None


def _place_fp4(model: nn.Module, place: str, parts: Mapping[str, Read]) -> list[str]:
    """Puts the experts of gpt-oss there: blocks ``[E, out, in / 32, 16]`` of two numbers in a byte, and exponents."""
    own: Any = model.get_submodule(place)
    count, up, features = sizes_of(own)
    if parts.keys() != _FP4_PARTS:
        raise ValueError(f"{place} must have {', '.join(sorted(_FP4_PARTS))}, got {', '.join(sorted(parts))}")
    packed: list[Tensor] = []
    for part, (outputs, width) in {"gate_up_proj": (up, features), "down_proj": (features, up // 2)}.items():
        blocks, exponents = parts[f"{part}_blocks"](), parts[f"{part}_scales"]()
        if blocks.shape != (count, outputs, width // 32, 16) or exponents.shape != blocks.shape[:3]:
            raise ValueError(
                f"{place}.{part} must be {count} weights [{outputs}, {width}] in blocks of 32, and the file has "
                f"{list(blocks.shape)} and {list(exponents.shape)}"
            )
        scales = fp4_scales(exponents[..., None], blocks)
        codes = (torch.stack([each & 15, each >> 4], dim=-1).flatten(-2) for each in blocks)
        made = [pack_parts(f"{place}.{part}", fp4(*each), 4) for each in zip(codes, scales, strict=True)]
        packed.append(torch.stack(made))
    model.set_submodule(place, PackedExperts(own, *packed))
    return [f"{place}.up", f"{place}.down"]


# ---- the files ----


def _tensors_of(folder: Path, files: ExitStack) -> dict[str, Read]:
    """What reads each tensor of a folder, by its name."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    )
    if not index.is_file() and not (folder / names[0]).is_file():
        names = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(names) != 1 and not index.is_file():
        raise ValueError(f"{folder} must have model.safetensors or an index of its safetensors files, got {names}")
    found: dict[str, Read] = {}
    for name in names:
        try:
            file = files.enter_context(safe_open(folder / name, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / name} is missing, damaged or was cut off: {error}") from error
        found.update((tensor, partial(file.get_tensor, tensor)) for tensor in file.keys())  # noqa: SIM118
    return found


def sorted_tensors(tensors: Mapping[str, Read], layout: str) -> tuple[dict[str, Read], dict[str, dict[str, Read]]]:
    """The plain tensors, and those of each quantised layer by the last part of their names."""
    marks = {part for _, needed, more in LAYOUTS.get(layout, ()) for part in needed | more} - {"weight"} or _FP4_PARTS
    layers: dict[str, dict[str, Read]] = {
        place: {} for place, _, part in (name.rpartition(".") for name in tensors) if part in marks
    }
    plain: dict[str, Read] = {}
    for name, read in tensors.items():
        place, _, part = name.rpartition(".")
        if place in layers and part in marks | {"weight"}:
            layers[place][part] = read
        else:
            plain[name] = read
    return plain, layers
