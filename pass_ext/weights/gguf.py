"""``stored_model``: a transformers model whose weights are a GGUF file's own numbers.

    tensor of the file -> rows in transformers' order -> packed, in place of the linear layer or the table of embeddings

Each tensor goes from the mapped file to its packed form, one after the other, so that memory peaks near the file's size. What
has no packed form (norms, formats that are not read, layers of other classes) becomes dense, as transformers makes it.
transformers' own tables give the config, the names and the order of rows, but of gpt_oss (``gguf_oss.py``).
"""

from __future__ import annotations

import logging
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from inspect import signature
from mmap import MADV_DONTNEED
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pass_ext.huge_pages import mapped
from pass_ext.weights import gguf_oss
from pass_ext.weights.experts import PackedExperts, can_be_packed, fill_experts, in_two_tensors, sizes_of
from pass_ext.weights.form import OUTPUTS
from pass_ext.weights.formats import FORMATS, pack_gguf
from pass_ext.weights.gguf_rotation import FACTORS, has_scaling, scaling_of, state
from pass_ext.weights.model import empty_model, fill, finished, holder_of, is_lookup, packed_layer

_log = logging.getLogger("pass_ext")
_PIECE = 1 << 18
"""Numbers that are packed at once: what this makes of them stays in the cache."""


class Opened(NamedTuple):
    """A file before its numbers are read."""

    name: str
    model: Any
    """Without numbers."""
    tensors: Sequence[Any]
    names: Mapping[str, str]
    processor: Any


def opened(file: Path, dtype: torch.dtype) -> Opened:
    """What ``stored_model`` needs. It keeps nothing of the vocabulary. ValueError for a file that cannot be read."""
    refuse_unread(file)
    reader = reader_of(file)
    model = empty_model(config_of(file), dtype)
    return Opened(file.name, model, reader.tensors, *_tables_of(model, reader, file))


def stored_model(file: Opened, dtype: torch.dtype, *, is_dense: bool = False) -> Any:
    """The model, frozen and in eval mode. dtype: of all that is not packed, and with ``is_dense`` of everything. ValueError for
    a file that cannot be read."""
    model, names, processor = file.model, file.names, file.processor
    table, filled, foreign = model.get_input_embeddings(), set[str](), list[str]()
    whole: dict[str, Any] = {"tensors": {}}  # tensors that the processor makes of several of the file
    experts = _experts_of(file)
    for place, tensors in experts.items():
        filled.update(_place_experts(model, place, tensors, is_dense=is_dense))
    done = {tensor.name for tensors in experts.values() for tensor in tensors.values()}
    for tensor in file.tensors:
        if tensor.name in done:
            continue
        name = names.get(tensor.name, "")
        module = holder_of(model, name)
        packed = None
        if not is_dense and (type(module) is nn.Linear or (module is table and is_lookup(module))):
            packed = _packed(tensor, processor, module)
        if packed is not None:
            layer = packed_layer(module, packed, dtype)
            model.set_submodule(name.removesuffix(".weight"), layer)
            filled.add(name)
            continue
        made = processor.process(
            weights=dense(tensor), name=tensor.name, tensor_key_mapping=names, parsed_parameters=whole
        )
        if made.name in names:
            filled.add(fill(model, names[made.name], made.weights))
        elif made.name is not None and not (tensor.name == FACTORS and has_scaling(model.config)):
            foreign.append(tensor.name)
    if foreign:
        raise ValueError(
            f"{file.name} has tensors for which {type(model).__name__} has no place: {', '.join(foreign[:5])}"
            f"{', …' * (len(foreign) > 5)}"
        )
    filled.update(fill(model, name, weights) for name, weights in whole["tensors"].items())
    return finished(model, filled, file.name)


def config_of(file: Path) -> Any:
    """The model's config. ValueError for a file that states too little, or a rotation that is not read."""
    from transformers import AutoConfig

    reader = reader_of(file)
    if is_oss(file):
        return gguf_oss.config_of(reader, file)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    for key, field in reader.fields.items():  # transformers leaves it at its default
        if key.endswith(".expert_feed_forward_length") and hasattr(config, "moe_intermediate_size"):
            config.moe_intermediate_size = int(field.parts[field.data[0]][0])
    if scaling := scaling_of(reader, architecture_of(reader), file):
        state(config, scaling)
    return config


def tokenizer_of(file: Path) -> Any:
    """The tokenizer of a GGUF file."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer reads the config first, at which transformers fails for gpt_oss
    kind = PreTrainedTokenizerFast if is_oss(file) else AutoTokenizer
    return kind.from_pretrained(file.parent, gguf_file=file.name)


# ---- the file ----


def is_oss(file: Path) -> bool:
    """True for a file of gpt_oss, which transformers cannot convert, and ``stored_model`` can."""
    return architecture_of(reader_of(file)) == gguf_oss.ARCHITECTURE


def refuse_unread(file: Path) -> None:
    """ValueError for files with MTP layers, which would be taken for the model's own in all architectures but Qwen 3.5's."""
    reader = reader_of(file)
    architecture, mtp = architecture_of(reader), mtp_layers(file)
    if mtp and not architecture.startswith("qwen35"):
        raise ValueError(
            f"{file.name} is a GGUF file of {architecture} with an MTP layer, {', '.join(mtp)}, which would be read as "
            "one of the model's own: load the folder that it was converted from"
        )
    if mtp:
        count = "an MTP layer lies" if len(mtp) == 1 else f"{len(mtp)} MTP layers lie"
        _log.warning("%s: %s in this file, %s: load_drafter(%r, model)", file.name, count, ", ".join(mtp), str(file))


def architecture_of(reader: Any) -> str:
    """llama.cpp's name of a file's architecture; empty if it has none."""
    field = reader.fields.get("general.architecture")
    return "" if field is None else str(field.contents())


def mtp_layers(file: Path) -> list[str]:
    """The names of the layers of a file, such as "blk.46", that predict tokens after the next, in order."""
    names = (str(tensor.name).partition(".nextn.") for tensor in reader_of(file).tensors)
    return sorted({layer for layer, found, _ in names if found}, key=number_of)


def number_of(layer: str) -> int:
    """46 of "blk.46"."""
    return int(layer.removeprefix("blk."))


def reader_of(file: Path) -> Any:
    """An open file. ValueError, in a sentence, for one that is none."""
    from gguf import GGUFReader

    try:
        return GGUFReader(str(file))
    except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
        raise ValueError(f"{file} is no GGUF file, or damaged, or was cut off: {error}") from error


def _tables_of(model: Any, reader: Any, file: Path) -> tuple[Mapping[str, str], Any]:
    """transformers' names of the file's tensors, and what puts a tensor's numbers in its order."""
    from transformers import modeling_gguf_pytorch_utils as theirs

    if is_oss(file):
        return gguf_oss.names_of(model.config), theirs.TensorProcessor()
    architecture = architecture_of(reader)
    kinds: dict[str, Any] = theirs.TENSOR_PROCESSORS
    processor = kinds.get(architecture, theirs.TensorProcessor)(config=model.config.to_dict())
    table: Any = theirs.get_gguf_hf_weights_map
    takes_it = "processor" in signature(table).parameters  # transformers 5
    try:
        return (table(model, processor) if takes_it else table(model)), processor
    except NotImplementedError as error:
        raise ValueError(
            f"the weights of a GGUF file of {architecture} are not read as they lie: load_checkpoint with weights='dense' "
            "converts them"
        ) from error


@contextmanager
def read_once() -> Iterator[None]:
    """Inside, transformers reads a GGUF file once, and a table of names: else each of its calls would do so anew.

    Its vocabulary is some hundred thousand strings and numbers; an array of each, as the reader makes, takes ten times as long.
    """
    gguf: Any = import_module("gguf")
    theirs: Any = gguf.GGUFReader
    former = theirs, gguf.get_tensor_name_map

    class Reader(theirs):  # type: ignore[misc]
        data: Any
        byte_order: str
        gguf_scalar_to_np: Mapping[Any, Any]

        def _get_field_parts(self, begin: int, kind: int) -> Any:
            types, numbers = gguf.GGUFValueType, self.gguf_scalar_to_np
            if kind != types.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(begin, kind)
            item, count = struct.unpack_from("<IQ", self.data, begin)
            if item == types.STRING:
                parts, end = _strings(memoryview(self.data), begin + 12, count)
            elif item in numbers:
                flat = self._get(begin + 12, numbers[item], count)
                parts, end = list(np.asarray(flat).reshape(count, 1)), begin + 12 + flat.nbytes
            else:
                return super()._get_field_parts(begin, kind)
            return end - begin, parts, range(count), [types.ARRAY, types(item)][: 1 + count]

    gguf.GGUFReader, gguf.get_tensor_name_map = cache(Reader), cache(former[1])
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = former


class _String(bytes):
    """A string of a file: as much of an array as those need who read it."""

    __slots__ = ()

    def tobytes(self) -> bytes:
        return self


def _strings(stored: memoryview, begin: int, count: int) -> tuple[list[Any], int]:
    """So many strings, each after its length in eight bytes, and the place after them."""
    strings: list[Any] = []
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", stored, begin)
        begin += 8 + length
        strings.append(_String(stored[begin - length : begin]))
    return strings, begin


def _packed(tensor: Any, processor: Any, module: Any) -> Tensor | None:
    """A tensor of the file, packed; None if it has a format, a shape or an order that has no packed form."""
    kind, shape = tensor.tensor_type.name, _shape(tensor)
    if kind not in FORMATS or shape != list(module.weight.shape) or shape[1] % 32:
        return None
    order = np.arange(shape[0])[:, None]
    try:
        made = processor.process(
            weights=order, name=tensor.name, tensor_key_mapping={}, parsed_parameters={"tensors": {}}
        )
    except (ValueError, TypeError, KeyError, IndexError):  # it needs more than rows
        return None
    if made.name != tensor.name or made.weights.shape != order.shape or set(made.weights.flat) != set(order.flat):
        return None
    try:
        return _in_pieces(kind, tensor.data, made.weights[:, 0], shape[1])
    except ValueError as error:
        raise ValueError(f"tensor {tensor.name}: {error}") from error


def _in_pieces(kind: str, stored: Any, order: Any, width: int, *, wide: bool = False) -> Tensor:
    """The rows of a tensor in this order, packed. Memory holds what packing needs for a few of them, not for all."""
    rows = max(1, _PIECE // width // OUTPUTS) * OUTPUTS
    groups, packed = -(-len(order) // OUTPUTS), torch.empty(0)
    for first in range(0, len(order), rows):
        piece = pack_gguf(kind, torch.from_numpy(stored[order[first : first + rows]]), wide=wide)
        packed = mapped(torch.Size((groups, *piece.shape[1:])), torch.uint8) if first == 0 else packed
        if piece.shape[1:] != packed.shape[1:]:  # its scales need another form
            return _in_pieces(kind, stored, order, width, wide=True)
        packed[first // OUTPUTS :][: len(piece)] = piece
        stored._mmap.madvise(MADV_DONTNEED)  # else the pages of the file that were read are this process's memory
    return packed


# ---- experts ----

_EXPERTS = re.compile(r"(blk\.\d+\.ffn_(gate|up|down)_exps)\.(weight|bias)")


def _experts_of(file: Opened) -> dict[str, dict[tuple[str, str], Any]]:
    """The tensors of each module of experts in two tensors, by its name: of ("gate", "weight"), …"""
    found: dict[str, dict[tuple[str, str], Any]] = defaultdict(dict)
    for tensor in file.tensors:
        match = _EXPERTS.fullmatch(tensor.name)
        place = file.names.get(match[1], "").rpartition(".")[0] if match else ""
        if match and place and in_two_tensors(file.model.get_submodule(place)):
            found[place][match[2], match[3]] = tensor
    return found


def _place_experts(
    model: nn.Module, place: str, tensors: Mapping[tuple[str, str], Any], *, is_dense: bool
) -> list[str]:
    """Puts the experts of a module there, packed or dense; the names that they fill. ValueError for other tensors than its."""
    own: Any = model.get_submodule(place)
    count, up, features = sizes_of(own)
    kinds, filled = ("weight", "bias")[: 1 + bool(own.has_bias)], set[str]()
    sizes = {"gate": (up // 2, features), "up": (up // 2, features), "down": (features, up // 2)}
    if tensors.keys() != {(part, kind) for part in sizes for kind in kinds}:
        raise ValueError(
            f"{place} must have gates, ups and downs, each with {' and '.join(kinds)}, and the file has "
            f"{', '.join(sorted(tensor.name for tensor in tensors.values()))}"
        )
    for (part, kind), tensor in tensors.items():
        shape, wanted = _shape(tensor), [count, *sizes[part][: 2 if kind == "weight" else 1]]
        if shape != wanted:
            raise ValueError(f"tensor {tensor.name} must be {wanted}, and the file has {shape}")
        if kind == "bias":
            filled.add(fill_experts(own, part, torch.from_numpy(np.array(dense(tensor), np.float32)), bias=True))
    weights = {part: tensors[part, "weight"] for part in sizes}
    has_form = all(tensor.tensor_type.name in FORMATS for tensor in weights.values())
    if has_form and can_be_packed(own) and not is_dense:
        packed = {part: _packed_experts(tensor) for part, tensor in weights.items()}
        model.set_submodule(place, PackedExperts(own, **packed))
        filled |= packed.keys()
    else:
        for part, tensor in weights.items():
            each = (torch.from_numpy(np.array(dense(tensor, expert), np.float32)) for expert in range(count))
            filled.add(fill_experts(own, part, each))
    return [f"{place}.{name}" for name in filled]


def _packed_experts(tensor: Any) -> Tensor:
    """``[E, out / 16, in / 32, bytes]``."""
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    try:
        packed = _in_pieces(tensor.tensor_type.name, rows, np.arange(len(rows)), int(tensor.shape[0]))
    except ValueError as error:
        raise ValueError(f"tensor {tensor.name}: {error}") from error
    return packed.unflatten(0, (len(tensor.data), -1))


def _shape(tensor: Any) -> list[int]:
    return [int(size) for size in reversed(tensor.shape)]


def dense(tensor: Any, part: Any = ...) -> Any:
    """The numbers of a tensor of a file, or of a part of it, as an array."""
    from gguf import dequantize

    try:
        return dequantize(tensor.data[part], tensor.tensor_type)
    except NotImplementedError as error:
        raise ValueError(f"tensor {tensor.name} is {tensor.tensor_type.name}, which is not read: {error}") from error
