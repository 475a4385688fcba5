"""Look-ahead slots as token ids of a vLLM model: id V + i is slot i.

    row n of the embedding   = weight[i]            where ids[n] = V + i, else the token's own
    input of layer l, row n += deep[l, i]           where ids[n] = V + i

Hooks do it: the one before the model writes each row's slot into a buffer of fixed address; those around the embedding and
before each layer read that buffer. So the same code serves eager calls, torch.compile and CUDA graphs, no name in the model's
state changes, and the ids of slots never index its table. A multimodal model's rows are made before its call, by the same
embedding, whose own call notes their slots then.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from pass_ext.modules.lookahead import LookaheadEmbedding


class SlotRows:
    """The slots of one model, attached for its life.

    Args:
        model: a vLLM model, as ``load_model`` hands it over.
        lookahead: the look-ahead embeddings; their device and dtype become the model's.
        vocabulary: V, the first id of a slot.
        most_rows: the rows of the longest call.
        layers: the model's number of decoder layers.

    Attributes:
        table: ``[V, d]``, the model's input embeddings, of all ranks together.
    """

    def __init__(
        self, model: nn.Module, lookahead: LookaheadEmbedding, vocabulary: int, most_rows: int, layers: int
    ) -> None:
        language = language_model(model)
        embedding = input_embedding(language)
        # Outside inference mode: an inference tensor has no version, by which the transition tables notice a change.
        with torch.inference_mode(False), torch.no_grad():
            like = next(embedding.parameters())
            # By the layer itself: its table may be sharded among ranks, or quantised.
            self.table: Tensor = embedding(torch.arange(vocabulary, device=like.device))
            lookahead.check_fits(self.table)
            self._vocabulary, self._has_slots = vocabulary, True
            self._slots = torch.zeros(most_rows, dtype=torch.int32, device=like.device)
            self._rows = _after_zeros(lookahead.weight, self.table)
            self._deep = None if lookahead.deep is None else _after_zeros(lookahead.deep, self.table)
        if lookahead.deep is not None:
            for index, layer in enumerate(layer_list(language, layers)):
                layer.register_forward_pre_hook(self._shifted(index), with_kwargs=True)
        for module in (model,) if language is model else (model, embedding):
            module.register_forward_pre_hook(self._noted, with_kwargs=True)
        embedding.register_forward_pre_hook(self._known)
        embedding.register_forward_hook(self._embedded)

    def _noted(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = inputs[0] if inputs else named.get("input_ids")
        if ids is not None:
            slots = ids.sub(self._vocabulary - 1).clamp_(min=0)
            self._slots[: len(ids)] = slots
            # On a GPU the answer would have to be waited for, and a compiled graph is made once for all calls.
            self._has_slots = not ids.is_cpu or torch.compiler.is_compiling() or bool(slots.any())

    def _known(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, *others = inputs
        return ids.clamp(max=self._vocabulary - 1), *others

    def _embedded(self, module: nn.Module, inputs: tuple[Any, ...], rows: Tensor) -> Tensor:
        if not (torch.compiler.is_compiling() or self._has_slots):
            return rows
        slots = self._slots[: len(rows)]
        return torch.where(slots[:, None] > 0, self._rows.index_select(0, slots).to(rows.dtype), rows)

    def _shifted(self, index: int) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if self._deep is None or not (torch.compiler.is_compiling() or self._has_slots):
                return None
            rows = named["hidden_states"] if "hidden_states" in named else inputs[1]
            shifted = rows + self._deep[index].index_select(0, self._slots[: len(rows)])
            if "hidden_states" in named:
                return inputs, {**named, "hidden_states": shifted}
            return (inputs[0], shifted, *inputs[2:]), named

        return hook


def _after_zeros(vectors: Tensor, table: Tensor) -> Tensor:
    """``[..., L + 1, d]``: a row of zeros, for tokens, and then the slots' vectors."""
    known = vectors.detach().to(table.device, table.dtype)
    return torch.cat([torch.zeros_like(known[..., :1, :]), known], dim=-2)


def language_model(model: nn.Module) -> nn.Module:
    """The part of a vLLM model that reads text: all of a model of text alone."""
    if not getattr(model, "supports_multimodal", False):
        return model
    if getattr(model, "requires_raw_input_tokens", False):
        raise ValueError(
            f"PaSS: {type(model).__name__} reads token ids beside its rows, and those of slots are none of its own"
        )
    return cast(nn.Module, cast(Any, model).get_language_model())


def input_embedding(model: nn.Module) -> nn.Module:
    """The layer that turns a vLLM model's token ids into rows."""
    found = {
        id(m): m
        for name, m in model.named_modules()
        if name.split(".")[-1] in ("embed_tokens", "wte", "word_embeddings")
    }
    if len(found) != 1:
        raise ValueError(
            f"PaSS: {type(model).__name__} has {len(found)} input embeddings that pass_ext knows; it needs one"
        )
    return next(iter(found.values()))


def layer_list(model: nn.Module, layers: int) -> nn.ModuleList:
    """The decoder layers of a vLLM model, called with ``(positions, hidden_states, ...)``."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return module
    raise ValueError(f"PaSS: {type(model).__name__} has no list of {layers} layers that slots could shift the input of")
