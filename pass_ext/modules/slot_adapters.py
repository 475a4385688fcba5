"""``SlotAdapters``: low-rank adapters of a model's linear layers for the rows of look-ahead slots alone.

    out = layer(x) + scale * (x @ down[k].T) @ up[k]    k: the slot, or 0 if all slots share an adapter

A place is a linear layer: the number of its decoder layer and its name there, "3.self_attn.q_proj".

``read_peft_folder``: the LoRA adapters of a folder in PEFT's format as ``SlotAdapters`` that all slots share.

    adapter_config.json            lora_alpha, r, alpha_pattern, use_rslora: scale = alpha / r, or alpha / sqrt(r)
    adapter_model.safetensors      ...layers.3.self_attn.q_proj.lora_A.weight [r, in], lora_B.weight [out, r]

What a PEFT folder may hold beside plain LoRA of linear layers (DoRA, biases, whole modules, embeddings) is refused: rows of
slots would get another product than the one that was trained.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pass_ext.ops.adapter import MAX_RANK

_PLACE = re.compile(r"[0-9]+(\.[A-Za-z_][A-Za-z0-9_]*|\.[0-9]+)+")
_TENSOR = re.compile(
    r"(?P<model>.*\.(?:layers|h|blocks))\.(?P<place>[0-9]+\..+)\.lora_(?P<side>[AB])\.(?:default\.)?weight"
)
# Option -> the value that changes nothing.
_PLAIN: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora", "use_bdlora"), (False, None)),
    **dict.fromkeys(
        (
            "modules_to_save",
            "layer_replication",
            "target_parameters",
            "trainable_token_indices",
            "alora_invocation_tokens",
        ),
        (None, [], {}),
    ),
}


class AdapterSize(NamedTuple):
    """The sizes of one adapter."""

    inputs: int
    outputs: int
    rank: int


class SlotAdapters(nn.Module):
    """Adapters by place. The product is zero before training, and yet has a gradient: ``down`` is random and ``up`` zero.

    Args:
        sizes: place -> sizes of its adapter.
        count: K, 1 if all slots share an adapter, else the number of slots.
        scale: of every product.

    Attributes:
        sizes: as given.
        down, up: ``[K, r, in]`` and ``[K, r, out]`` by place; ``pair`` finds both.
    """

    def __init__(
        self,
        sizes: Mapping[str, AdapterSize],
        count: int = 1,
        *,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not sizes or count < 1:
            raise ValueError(
                f"adapters need a place and a count of at least 1, got {len(sizes)} places and count {count}"
            )
        self.count, self.scale = count, float(scale)
        self.sizes = dict(sizes)
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        options: dict[str, object] = {"device": device, "dtype": dtype}
        for place, (inputs, outputs, rank) in sorted(sizes.items(), key=lambda item: _order(item[0])):
            if not _PLACE.fullmatch(place):
                raise ValueError(
                    f"place must be a layer's number and a name there, as '3.self_attn.q_proj', got {place!r}"
                )
            if not 1 <= rank <= MAX_RANK:
                raise ValueError(f"the rank of {place} must be from 1 to {MAX_RANK}, got {rank}")
            self.down[_key(place)] = nn.Parameter(torch.randn(count, rank, inputs, **options) * inputs**-0.5)  # type: ignore[call-overload]
            self.up[_key(place)] = nn.Parameter(torch.zeros(count, rank, outputs, **options))  # type: ignore[call-overload]

    @property
    def places(self) -> list[str]:
        """All places, layer by layer."""
        return [key.replace("/", ".") for key in self.down]

    def pair(self, place: str) -> tuple[Tensor, Tensor]:
        """``down`` and ``up`` of a place."""
        return self.down[_key(place)], self.up[_key(place)]

    def pairs(self, slots: int | None = None) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(place, down, up) of the first ``slots`` slots; None: of all."""
        shared = slots in (None, self.count) or self.count == 1  # a shared adapter is there for any number of slots
        for place, down, up in zip(self.places, self.down.values(), self.up.values(), strict=True):
            yield place, *((down, up) if shared else (down[:slots], up[:slots]))

    @property
    def layers(self) -> int:
        """The number of the last layer with an adapter, plus 1."""
        return 1 + max(int(place.partition(".")[0]) for place in self.places)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        ranks = sorted({down.shape[1] for _, down, _ in self.pairs()})
        shared = "shared by all slots" if self.count == 1 else f"for each of {self.count} slots"
        return f"{len(self.places)} places, rank {', '.join(map(str, ranks))}, {shared}, scale={self.scale:g}"


def _key(place: str) -> str:
    return place.replace(".", "/")  # names of parameters have no dots


def _order(place: str) -> tuple[int, str]:
    number, _, name = place.partition(".")
    return (int(number) if number.isdigit() else -1), name


def read_peft_folder(path: str | os.PathLike[str]) -> tuple[SlotAdapters, str]:
    """The adapters, and the name of the model that they are for ("" if unknown). A damaged folder is a ValueError that begins
    with the path; a missing file a FileNotFoundError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(path)
    file = folder / "adapter_model.safetensors"
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
    except ValueError as error:
        raise _refusal(folder, "adapter_config.json", "JSON", str(error)) from error
    if not isinstance(config, dict):
        raise _refusal(folder, "adapter_config.json", "an object", config)
    _check_config(folder, config)
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise _refusal(folder, file.name, "a safetensors file", str(error)) from error
    sides = _sides_by_place(folder, tensors)
    rank = config["r"]
    scale = _scale(config, float(config["lora_alpha"]), rank)
    sizes, scales = {}, {}
    for place, (names, down, up) in sides.items():
        if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1] or not down.shape[0]:
            raise _refusal(folder, names, "[r, in] and [out, r]", f"{list(down.shape)} and {list(up.shape)}")
        sizes[place] = AdapterSize(down.shape[1], up.shape[0], down.shape[0])
        scales[place] = _scale(config, _alpha_of(config, names), down.shape[0])
    first = next(iter(sides.values()))[1]
    try:
        adapters = SlotAdapters(sizes, scale=scale, dtype=first.dtype)
    except ValueError as error:
        raise _refusal(folder, "the adapters", "of places and ranks that there can be", str(error)) from error
    with torch.no_grad():
        for place, down, up in adapters.pairs():
            down.copy_(sides[place][1][None])
            up.copy_((sides[place][2].float() * (scales[place] / scale)).T[None])
    return adapters, str(config.get("base_model_name_or_path") or "")


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise _refusal(folder, "peft_type", "'LORA'", config.get("peft_type"))
    for name, plain in _PLAIN.items():
        if name in config and config[name] not in plain:
            raise _refusal(folder, name, repr(plain[0]), config[name])
    for name in ("r", "lora_alpha"):
        value: Any = config.get(name)
        if type(value) not in (int, float) or not value > 0:
            raise _refusal(folder, name, "a number above 0", value)


def _sides_by_place(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, Tensor, Tensor]]:
    """Place -> (the module's name, lora_A, lora_B)."""
    found: dict[str, dict[str, Tensor]] = {}
    modules: dict[str, str] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise _refusal(folder, "every tensor", "lora_A or lora_B of a linear layer in a decoder layer", name)
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise _refusal(folder, name, "finite floating-point numbers", f"{tensor.dtype} with others")
        found.setdefault(match["place"], {})[match["side"]] = tensor
        modules[match["place"]] = f"{match['model']}.{match['place']}"
    if not found:
        raise _refusal(folder, "adapter_model.safetensors", "lora_A and lora_B of linear layers", "no tensor")
    for place, sides in found.items():
        if len(sides) < 2:
            raise _refusal(folder, modules[place], "with lora_A and lora_B", f"lora_{next(iter(sides))} alone")
    return {place: (modules[place], sides["A"], sides["B"]) for place, sides in found.items()}


def _alpha_of(config: Mapping[str, Any], module: str) -> float:
    """The alpha of a module: PEFT takes the first pattern that matches the end of its name."""
    for pattern, alpha in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return float(alpha)
    return float(config["lora_alpha"])


def _scale(config: Mapping[str, Any], alpha: float, rank: int) -> float:
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _refusal(folder: Path, part: str, wanted: str, got: object) -> ValueError:
    return ValueError(
        f"{folder} is no folder of LoRA adapters that slots can have: {part} must be {wanted}, got {got!r}"
    )
