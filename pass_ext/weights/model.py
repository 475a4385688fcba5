"""How a transformers model without numbers gets those of a file: ``empty_model``, then ``fill`` or ``packed_layer``, then
``finished``. And ``formats_of``: what a model's weights are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pass_ext.huge_pages import mapped
from pass_ext.weights.form import form_of
from pass_ext.weights.layers import Packed, PackedEmbedding, PackedLinear


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """A causal model whose parameters have memory that nobody has written to, which takes none until then."""
    from transformers import AutoModelForCausalLM

    with _without_init(), _Mapped():
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


class _Mapped(TorchFunctionMode):
    """``torch.empty`` as ``mapped`` memory: a weight that a packed one replaces leaves no hole, which scratch memory would
    fill."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty and kwargs.get("device") is None:
            like = torch.empty(*args, **{**kwargs, "device": "meta"})
            if like.numel():
                return mapped(like.shape, like.dtype)
        return function(*args, **kwargs)


def _without_init() -> AbstractContextManager[Any]:
    is_new = find_spec("transformers.initialization") is not None  # transformers 5
    there = import_module("transformers.initialization" if is_new else "transformers.modeling_utils")
    context: AbstractContextManager[Any] = there.no_init_weights()
    return context


def holder_of(model: nn.Module, name: str) -> nn.Module | None:
    """The module whose weight is called so; None: there is none."""
    place, _, kind = name.rpartition(".")
    try:
        return model.get_submodule(place) if kind == "weight" else None
    except AttributeError:
        return None


def packed_layer(module: Any, packed: Tensor, dtype: torch.dtype) -> nn.Module:
    """The layer with this weight in place of the module."""
    if isinstance(module, nn.Linear):
        return PackedLinear(packed, module.out_features, module.bias)
    scale = None if type(module) is nn.Embedding else float(module.embed_scale)
    return PackedEmbedding(packed, module.num_embeddings, dtype, scale)


def is_lookup(module: Any) -> bool:
    """True for a table of embeddings whose class looks rows up, and at most multiplies them by its ``embed_scale``."""
    kind: Any = type(module)
    if kind is nn.Embedding:
        return True
    scale = getattr(module, "embed_scale", None)
    if not isinstance(module, nn.Embedding) or scale is None or len(module._parameters) > 1 or module._modules:
        return False
    rows, ids = torch.linspace(-1, 1, 24, dtype=torch.bfloat16).view(3, 8), torch.tensor([2, 0, 1])
    stand_in = kind.__new__(kind)
    vars(stand_in).update(vars(module))
    stand_in._parameters = {"weight": nn.Parameter(rows, requires_grad=False)}
    stand_in.padding_idx = None
    try:
        made = kind.forward(stand_in, ids)
    except Exception:  # it needs more than these
        return False
    return torch.equal(made, rows[ids] * torch.tensor(float(scale), dtype=rows.dtype))


def fill(model: nn.Module, name: str, weights: Any) -> str:
    """Writes the numbers into the parameter or buffer of this name, which it returns."""
    place, _, own = name.rpartition(".")
    target = getattr(model.get_submodule(place), own)
    numbers = torch.from_numpy(np.array(weights)) if isinstance(weights, np.ndarray) else weights
    if target.shape != numbers.shape:
        raise ValueError(f"{name} must be {list(target.shape)}, and the file has {list(numbers.shape)}")
    with torch.no_grad():
        target.copy_(numbers)
    return name


def finished(model: Any, filled: Collection[str], source: str) -> Any:
    """The model, frozen and in eval mode, with its output layer tied. ValueError if the source has not filled a parameter."""
    _tie(model)
    missing = [name for name, _ in model.named_parameters() if name not in filled]
    if missing:
        raise ValueError(f"{source} has no tensors for {', '.join(missing[:5])}{', …' * (len(missing) > 5)}")
    if any(isinstance(part, Packed) for part in model.modules()):
        model.save_pretrained = refuse_to_save
    return model.eval().requires_grad_(False)


def _tie(model: Any) -> None:
    """Gives the output layer the weight of the table of embeddings, where the config says so."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not model.config.get_text_config(decoder=True).tie_word_embeddings:
        return
    if isinstance(table, PackedEmbedding):
        model.set_output_embeddings(PackedLinear(table.weight, table.num_embeddings, head.bias))
    else:
        head.weight = table.weight


def refuse_to_save(*arguments: Any, **options: Any) -> NoReturn:
    """``save_pretrained`` of a model with packed weights."""
    raise ValueError(
        "a model whose weights are a file's own is saved as that file: keep it, or load the model with weights='dense'"
    )


def formats_of(model: nn.Module) -> dict[str, int]:
    """The bytes of a model's weights by what they are: "4 bits", "8 bits", or a dtype."""
    found: Counter[str] = Counter()
    holders = {parameter: module for module in model.modules() for parameter in module._parameters.values()}
    for parameter, module in holders.items():
        if parameter is not None:
            is_packed = isinstance(module, Packed) and parameter.dtype is torch.uint8
            kind = (
                f"{form_of(parameter.flatten(0, -3)).bits} bits"
                if is_packed
                else str(parameter.dtype).removeprefix("torch.")
            )
            found[kind] += parameter.nbytes
    return dict(found)
