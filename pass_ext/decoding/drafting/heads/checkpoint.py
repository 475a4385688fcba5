"""``HeadCheckpoint``: the config and, by name, the tensors of a head's checkpoint, each read when it is asked for.

    a folder                          config.json, and *.safetensors or *.bin
    one of these files                with config.json beside it
    a GGUF file                       alone, with MTP layers
    a name on the Hub                 the same files, downloaded

Of a quantised layer ``names`` has the weight that its tensors make; ``linear`` packs it as they have it.
Whatever is missing or does not fit is refused with a ValueError that begins with the path.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pass_ext.decoding.arguments import type_of
from pass_ext.weights.blocks import without_blocks
from pass_ext.weights.folder import Read, layout_of, read_grouped, sorted_tensors
from pass_ext.weights.form import INPUTS
from pass_ext.weights.gguf_mtp import mtp_tensors
from pass_ext.weights.grouped import LAYOUTS, Grouped
from pass_ext.weights.layers import PackedLinear
from pass_ext.weights.rounding import rounded

_log = logging.getLogger("pass_ext")
_CONFIG = "config.json"
_ENDINGS = ".safetensors", ".bin"
_GGUF = ".gguf"
_WITHOUT_EFFECT = ("rotary_emb.inv_freq", "optimizer", "training_args")
"""Parts of names of tensors that every loader leaves out."""
_ABOUT = (
    "architectures", "auto_map", "dtype", "has_no_defaults_at_init", "model_type", "speculators_config",
    "speculators_model_type", "speculators_version", "torch_dtype", "transformers_version",
)  # fmt: skip
"""Settings that tell about a checkpoint."""

Module = TypeVar("Module", bound=nn.Module)


class HeadCheckpoint:
    """An open checkpoint. Attributes: ``path``, as it was given; ``folder``, of its files; ``config``, a dictionary; ``names``
    of its tensors.

    Args:
        bits: linear layers are rounded to so many, 4 or 8; None: they are as the checkpoint has them.
        call: the function whose name errors begin with.
    """

    def __init__(self, path: str | os.PathLike[str], bits: int | None = None, call: str = "load_drafter") -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(
                f"{call}: path must be a folder, a file of weights or a name on the Hub, got {type_of(path)}"
            )
        self.path, self._bits, self._call = os.fspath(path), bits, call
        self.folder, files = _files_of(self.path, call)
        is_gguf = any(file.suffix == _GGUF for file in files)
        self.config: dict[str, Any] = (
            {"model_type": "a GGUF file"} if is_gguf else self._read_config(self.folder / _CONFIG)
        )
        self._readers: dict[str, Callable[[], Tensor]] = {}
        for file in files:
            self._readers |= self._open(file)
        if not self._readers:
            names = ", ".join(file.name for file in files) or f"{self.folder}, in {' or '.join(_ENDINGS)} files"
            raise self.refusal(f"there are no tensors in {names}{self.absent}")
        self._layers: dict[str, dict[str, Read]] = {}
        self.layout = self._take_quantised()
        """How its quantised layers are written, one of ``LAYOUTS``; None: it has none that can be read."""
        if bits is not None and self.layout is not None:
            raise self.refusal(f"its layers are quantised by {self.layout}: give no bits, got {bits}")
        self.names = frozenset(self._readers) | {f"{name}.weight" for name in self._layers}
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def refusal(self, problem: str) -> ValueError:
        """The error for a problem of this checkpoint."""
        return ValueError(f"{self._call}: {self.path}: {problem}")

    @property
    def absent(self) -> str:
        """What to say about files that an index names and that are not there; "": all are."""
        named: set[str] = set()
        for index in self.folder.glob("*.index.json"):
            named |= set(self._read_config(index).get("weight_map", {}).values())
        absent = sorted(name for name in named if not (self.folder / name).is_file())
        return f"; its index names files that are not there: {', '.join(absent)}" if absent else ""

    def name_unknown(self, settings: Collection[str], known: Collection[str]) -> None:
        """Names the settings that nothing reads in the log."""
        if unknown := sorted(set(settings).difference(known, _ABOUT)):
            _log.warning("%s: %s: settings that pass_ext does not know: %s", self._call, self.path, ", ".join(unknown))

    def _take_quantised(self) -> str | None:
        """Takes quantised layers out of the tensors, and what tells of them out of the config; those in blocks stay, as
        numbers."""
        told = self.config.get("quantization_config") or {}
        layout, has_blocks = layout_of(told), told.get("quant_method") == "fp8" and bool(told.get("weight_block_size"))
        if layout not in LAYOUTS and not has_blocks:
            return None
        self.config = {name: value for name, value in self.config.items() if name != "quantization_config"}
        if layout is None:
            self._readers = without_blocks(self._readers, *told["weight_block_size"])
            return None
        self._readers, self._layers = sorted_tensors(self._readers, layout)
        for name in self._layers:  # some tools write zeros for layers without biases
            if (read := self._readers.get(f"{name}.bias")) is not None and not read().any():
                del self._readers[f"{name}.bias"]
        return layout

    def quantised(self, name: str) -> Mapping[str, Read] | None:
        """The tensors that make the weight of this name; None: it is a tensor."""
        parts = self._layers.get(name.removesuffix(".weight"))
        if parts is not None:
            self._used.add(name)
        return parts

    def linear(
        self, name: str, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, bias: Any = None
    ) -> nn.Linear | PackedLinear:
        """The linear layer whose weight has this name, with this bias: packed on the CPU, if the weight is rounded, or is
        quantised and has a packed form."""
        if self._bits is not None:
            if device.type != "cpu" or inputs % INPUTS:
                raise self.refusal(
                    f"bits={self._bits} is for layers on the CPU with a multiple of {INPUTS} inputs, and {name!r} has {inputs} "
                    f"on {device}: give no bits"
                )
            dense = self.tensor(name, (outputs, inputs))
            if not dense.is_floating_point() or not dense.half().isfinite().all():
                raise self.refusal(f"tensor {name!r} must hold numbers of float16 to be rounded: give no bits")
            return PackedLinear(rounded(dense, self._bits), outputs, bias)
        if device.type == "cpu" and self.quantised(name) is not None:
            weight = self._grouped(name, (outputs, inputs))
            packed = weight.packed()
            if packed is not None:
                return PackedLinear(packed, outputs, bias, weight.order)
        layer = nn.Linear(inputs, outputs, bias=False, device="meta")
        layer.bias = bias
        layer.weight = nn.Parameter(self.tensor(name, (outputs, inputs)).to(device, dtype), requires_grad=False)
        return layer

    def _grouped(self, name: str, shape: Sequence[int]) -> Grouped:
        assert self.layout is not None
        parts = self._layers[name.removesuffix(".weight")]
        try:
            return read_grouped(self.layout, name, parts, *shape)
        except ValueError as error:
            raise self.refusal(f"tensor {error}") from error

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor of this name, which must have this shape; the numbers of a quantised one."""
        found = self._read(name) if self.quantised(name) is None else self._grouped(name, shape).dense()
        if list(found.shape) != list(shape):
            raise self.refusal(
                f"tensor {name!r} must be {list(shape)} by its config and the model, got {list(found.shape)}"
            )
        self._used.add(name)
        return found

    def beside(self, file: str) -> Any:
        """What ``torch.save`` has written into a file of the folder; None if there is no such file."""
        place = self.folder / file
        if not place.is_file():
            return None
        try:
            return torch.load(place, map_location="cpu", weights_only=True)
        except Exception as error:
            raise self.damaged(file, error) from error

    def _read(self, name: str) -> Tensor:
        if name not in self:
            why = self.absent or ": the download is incomplete, or the head is of another form"
            raise self.refusal(f"it has no tensor {name!r}, which its config asks for{why}")
        try:
            found = self._readers[name]()
        except ValueError as error:
            raise self.refusal(f"tensor {error}") from error
        except Exception as error:  # as each format says it
            raise self.damaged(name, error) from error
        if found.dtype in (torch.float8_e4m3fn, torch.int8):
            raise self.refusal(f"tensor {name!r} holds {str(found.dtype).removeprefix('torch.')} and has no scales")
        return found

    def any_tensor(self, name: str) -> Tensor:
        """The tensor of this name, of any shape."""
        found = self._read(name)
        self._used.add(name)
        return found

    def leave(self, names: Collection[str]) -> None:
        """Takes these tensors, which belong to something else, for used."""
        self._used.update(names)

    @property
    def unused(self) -> list[str]:
        """The names of the tensors that nothing has asked for."""
        left = self.names - self._used
        return sorted(name for name in left if not any(part in name for part in _WITHOUT_EFFECT))

    def fill(self, module: Module, names: Callable[[str], str], dtype: torch.dtype, device: torch.device) -> Module:
        """Gives every parameter and buffer of a module, made on the meta device, its tensor.

        Args:
            names: the name in the checkpoint of one in the module.
            dtype: of those that are floating-point numbers.
        """
        tensors: dict[str, Tensor] = {}
        for name, place in module.state_dict().items():
            layer, _, part = name.rpartition(".")
            linear = module.get_submodule(layer)
            is_packed = self._bits is not None or self.quantised(names(name)) is not None
            if part == "weight" and isinstance(linear, nn.Linear) and is_packed:
                made = self.linear(names(name), linear.out_features, linear.in_features, dtype, device, linear.bias)
                module.set_submodule(layer, made)
                tensors |= {f"{layer}.{own}": x for own, x in made.state_dict().items() if own != "bias"}
                continue
            found = self.tensor(names(name), place.shape)
            if found.is_floating_point() != place.is_floating_point():
                raise self.refusal(f"tensor {names(name)!r} must hold {place.dtype}, got {found.dtype}")
            tensors[name] = found.to(device, dtype if found.is_floating_point() else place.dtype)
        module.load_state_dict(tensors, assign=True)
        return module.requires_grad_(False).eval()

    def _read_config(self, file: Path) -> dict[str, Any]:
        try:
            config = json.loads(file.read_text())
        except FileNotFoundError:
            raise self.refusal(f"there is no {file}, which says what kind of head it is") from None
        except (OSError, ValueError) as error:
            raise self.refusal(f"{file} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise self.refusal(f"{file} must hold a JSON object, got {type(config).__name__}")
        return config

    def _open(self, file: Path) -> Mapping[str, Callable[[], Tensor]]:
        """A reader for each tensor of a file; of a GGUF file, for each of its MTP layers."""
        if file.suffix == _GGUF:
            try:
                return mtp_tensors(file)
            except ValueError as error:
                raise self.refusal(str(error)) from error
        try:
            if file.suffix == ".safetensors":
                from safetensors import safe_open

                opened = safe_open(file, framework="pt")
                return {name: partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118
            held = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            return {name: partial(Tensor.detach, x) for name, x in held.items() if isinstance(x, Tensor)}
        except Exception as error:
            raise self.damaged(file.name, error) from error

    def damaged(self, what: str, error: Exception) -> ValueError:
        """The error for a part of this checkpoint that cannot be read."""
        return self.refusal(f"{what} is damaged, or was cut off: fetch it again ({type(error).__name__}: {error})")


def _files_of(path: str, call: str) -> tuple[Path, list[Path]]:
    """The folder of a checkpoint and the files of its tensors."""
    if not path:
        raise FileNotFoundError(f"{call}: path is empty: give a folder, a file of weights or a name on the Hub")
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix not in (*_ENDINGS, _GGUF):
            raise ValueError(f"{call}: a file must end in {', '.join(_ENDINGS)} or {_GGUF}, got {path}")
        return place.parent, [place]
    if place.is_dir():
        return place, _weights_in(place)
    if place.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise FileNotFoundError(f"{call}: no such file or folder: {path}")
    folder = _downloaded(path, "*.safetensors", call)
    return folder, _weights_in(folder) or _weights_in(_downloaded(path, "*.bin", call))


def _weights_in(folder: Path) -> list[Path]:
    """Its safetensors files; if there are none, those of ``torch.save``."""
    return next((found for end in _ENDINGS if (found := sorted(folder.glob(f"*{end}")))), [])


def _downloaded(name: str, files: str, call: str) -> Path:
    """The local folder of a repository on the Hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "mask_embedding.pt", files]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"{call}: {name} is no file, no folder, and nothing that the Hub gives: {error}"
        ) from error
