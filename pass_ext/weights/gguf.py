"""``stored_model``: a transformers model whose weights are a GGUF file's own numbers.

    tensor of the file -> rows in transformers' order -> packed, in place of the linear layer or the table of embeddings

Each tensor goes from the mapped file to its packed form, one after the other, so that memory peaks near the file's size. What
has no packed form (norms, formats that are not read, layers of other classes) becomes dense, as transformers makes it.
transformers' own tables give the config, the names and the order of rows.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from mmap import MADV_DONTNEED
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from pass_ext.weights.form import OUTPUTS, form_of
from pass_ext.weights.formats import FORMATS, pack_gguf
from pass_ext.weights.layers import PackedEmbedding, PackedLinear

_PIECE = 1 << 19
"""Numbers that are packed at once: what this makes of them stays in the cache."""


def stored_model(file: Path, dtype: torch.dtype) -> Any:
    """The model, frozen and in eval mode. dtype: of all that is not packed. ValueError for a file that cannot be read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    reader = _reader_of(file)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with _without_init():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    names, processor = _tables_of(model, reader)
    table, filled = model.get_input_embeddings(), set[str]()
    whole: dict[str, Any] = {"tensors": {}}  # tensors that the processor makes of several of the file
    for tensor in reader.tensors:
        name = names.get(tensor.name, "")
        module = _holder(model, name)
        packed = None
        if type(module) is nn.Linear or (module is table and type(module) is nn.Embedding):
            packed = _packed(tensor, processor, module)
        if packed is not None:
            layer = _layer_of(module, packed, dtype)
            model.set_submodule(name.removesuffix(".weight"), layer)
            filled.add(name)
            continue
        made = processor.process(
            weights=_dense(tensor), name=tensor.name, tensor_key_mapping=names, parsed_parameters=whole
        )
        if made.name in names:
            filled.add(_fill(model, names[made.name], made.weights))
    filled.update(_fill(model, name, weights) for name, weights in whole["tensors"].items())
    _tie(model)
    missing = [name for name, _ in model.named_parameters() if name not in filled]
    if missing:
        raise ValueError(f"{file.name} has no tensors for {', '.join(missing[:5])}{', …' * (len(missing) > 5)}")
    if any(isinstance(part, (PackedLinear, PackedEmbedding)) for part in model.modules()):
        model.save_pretrained = _refuse_to_save
    return model.eval().requires_grad_(False)


def formats_of(model: nn.Module) -> dict[str, int]:
    """The bytes of a model's weights by what they are: "4 bits", "8 bits", or a dtype."""
    found: Counter[str] = Counter()
    holders = {parameter: module for module in model.modules() for parameter in module._parameters.values()}
    for parameter, module in holders.items():
        if parameter is not None:
            is_packed = isinstance(module, (PackedLinear, PackedEmbedding)) and parameter is module.weight
            kind = f"{form_of(parameter).bits} bits" if is_packed else str(parameter.dtype).removeprefix("torch.")
            found[kind] += parameter.nbytes
    return dict(found)


def _refuse_to_save(*arguments: Any, **options: Any) -> NoReturn:
    raise ValueError(
        "a model whose weights are those of a GGUF file is saved as that file: keep it, or load the model with weights='dense'"
    )


# ---- the file ----


def _reader_of(file: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(str(file))
    except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
        raise ValueError(f"{file} is no GGUF file, or damaged, or was cut off: {error}") from error


def _tables_of(model: Any, reader: Any) -> tuple[Mapping[str, str], Any]:
    """transformers' names of the file's tensors, and what puts a tensor's numbers in its order."""
    from transformers import modeling_gguf_pytorch_utils as theirs

    architecture = theirs.read_field(reader, "general.architecture")[0]
    kinds: dict[str, Any] = theirs.TENSOR_PROCESSORS
    processor = kinds.get(architecture, theirs.TensorProcessor)(config=model.config.to_dict())
    return theirs.get_gguf_hf_weights_map(model, processor), processor


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
    """So many strings, each behind its length in eight bytes, and the place behind them."""
    strings: list[Any] = []
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", stored, begin)
        begin += 8 + length
        strings.append(_String(stored[begin - length : begin]))
    return strings, begin


def _packed(tensor: Any, processor: Any, module: Any) -> Tensor | None:
    """A tensor of the file, packed; None if it has a format, a shape or an order that has no packed form."""
    kind, shape = tensor.tensor_type.name, [int(size) for size in reversed(tensor.shape)]
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


def _in_pieces(kind: str, stored: Any, order: Any, width: int) -> Tensor:
    """The rows of a tensor in this order, packed. Memory holds what packing needs for a few of them, not for all."""
    rows = max(1, _PIECE // width // OUTPUTS) * OUTPUTS
    groups, packed = -(-len(order) // OUTPUTS), torch.empty(0)
    for first in range(0, len(order), rows):
        piece = pack_gguf(kind, torch.from_numpy(stored[order[first : first + rows]]))
        packed = piece.new_empty(groups, *piece.shape[1:]) if first == 0 else packed
        packed[first // OUTPUTS :][: len(piece)] = piece
        stored._mmap.madvise(MADV_DONTNEED)  # else the pages of the file that were read are this process's memory
    return packed


def _dense(tensor: Any) -> Any:
    from gguf import dequantize

    try:
        return dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ValueError(f"tensor {tensor.name} is {tensor.tensor_type.name}, which is not read: {error}") from error


# ---- the model ----


def _without_init() -> AbstractContextManager[Any]:
    """Inside, modules get memory that nobody writes to, which takes none until then."""
    is_new = find_spec("transformers.initialization") is not None  # transformers 5
    there = import_module("transformers.initialization" if is_new else "transformers.modeling_utils")
    context: AbstractContextManager[Any] = there.no_init_weights()
    return context


def _holder(model: nn.Module, name: str) -> nn.Module | None:
    """The module whose weight is called so; None: there is none."""
    place, _, kind = name.rpartition(".")
    try:
        return model.get_submodule(place) if kind == "weight" else None
    except AttributeError:
        return None


def _layer_of(module: Any, packed: Tensor, dtype: torch.dtype) -> nn.Module:
    if isinstance(module, nn.Linear):
        return PackedLinear(packed, module.out_features, module.bias)
    return PackedEmbedding(packed, module.num_embeddings, dtype)


def _fill(model: nn.Module, name: str, weights: Any) -> str:
    """Writes the numbers into the parameter or buffer of this name, which it returns."""
    place, _, own = name.rpartition(".")
    target = getattr(model.get_submodule(place), own)
    numbers = torch.from_numpy(np.array(weights)) if isinstance(weights, np.ndarray) else weights
    if target.shape != numbers.shape:
        raise ValueError(f"{name} must be {list(target.shape)}, and the file has {list(numbers.shape)}")
    with torch.no_grad():
        target.copy_(numbers)
    return name


def _tie(model: Any) -> None:
    """Gives the output layer the weight of the table of embeddings, where the config says so."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not model.config.get_text_config(decoder=True).tie_word_embeddings:
        return
    if isinstance(table, PackedEmbedding):
        model.set_output_embeddings(PackedLinear(table.weight, table.num_embeddings, head.bias))
    else:
        head.weight = table.weight
