"""``EarlyExitModel``: the first k layers of a transformers model as a packed model, ``head(norm(adapter(h)))`` behind them.

Layers, embeddings, norm and head are the target's own objects, so its keys and values equal the target's, layer by layer
(``shares_layers``).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.early_exit.draft import EarlyExitDraft, exit_parts
from pass_ext.decoding.models.packed import StepAttend
from pass_ext.decoding.models.plain_tensors import is_plain
from pass_ext.decoding.models.slots import CallSlots
from pass_ext.decoding.models.transformers import TransformersModel


class EarlyExitModel(TransformersModel):
    """The first k layers of a model as a draft model.

    Attributes:
        shares_layers: k; ``attend`` is called for layers 0 to k - 1. Their keys and values of a text equal those of the
            ``shared_model``.
        vocabulary: ``[S]`` int64, the tokens that the head is computed for; all others have logits of -inf. None: all.
    """

    def __init__(self, draft: EarlyExitDraft) -> None:
        self.shares_layers, self.shared_model = draft.layers, draft.model
        self.vocabulary: Tensor | None = None
        head = exit_parts(draft.model).head
        cut = first_layers(draft.model, draft.layers)
        if draft.adapter is not None:
            adapter = copy.deepcopy(draft.adapter).to(head.weight.device, head.weight.dtype).requires_grad_(False)
            decoder = cut.get_decoder()
            decoder.norm = nn.Sequential(adapter, decoder.norm)
            if adapter.vocabulary is not None:
                if not is_plain(head.weight):
                    raise ValueError(
                        f"EarlyExitDraft: the adapter's vocabulary takes {len(adapter.vocabulary)} rows of the model's head, "
                        f"which must be a plain tensor in memory, got {type(head.weight).__name__} on {head.weight.device}; "
                        "use an adapter for the whole vocabulary"
                    )
                self.vocabulary = adapter.vocabulary.to(head.weight.device, torch.int64)
                cut.set_output_embeddings(rows_of_head(head, self.vocabulary))
        super().__init__(cut)
        self._tokens = (
            draft.model.get_input_embeddings().weight.shape[0] if self.vocabulary is None else head.out_features
        )

    def __call__(
        self,
        rows: Tensor,
        positions: Tensor,
        attend: StepAttend,
        wanted: Tensor | None,
        slots: CallSlots | None = None,
    ) -> Tensor:
        """Calls the layers as ``Adapted`` does; the logits are as wide as the target's."""
        logits = super().__call__(rows, positions, attend, wanted, slots)
        if self.vocabulary is None:
            return logits
        return logits.new_full((len(logits), self._tokens), -torch.inf).index_copy_(1, self.vocabulary, logits)


def rows_of_head(head: nn.Linear, vocabulary: Tensor) -> nn.Linear:
    """A head for these tokens only, in their order; its weights are a copy."""
    fewer = nn.Linear(head.in_features, len(vocabulary), bias=head.bias is not None, device="meta")
    fewer.weight = nn.Parameter(head.weight.detach()[vocabulary], requires_grad=False)
    if head.bias is not None:
        fewer.bias = nn.Parameter(head.bias.detach()[vocabulary], requires_grad=False)
    return fewer


def first_layers(model: Any, count: int) -> Any:
    """The model without its later layers, sharing all weights; hooks on the model and its layers stay with the model."""
    part, decoder = _shallow(model), _shallow(model.get_decoder())
    setattr(part, model.base_model_prefix, decoder)
    part.config = decoder.config = copy.deepcopy(model.config)
    part.config.num_hidden_layers = count
    if getattr(part.config, "layer_types", None):
        part.config.layer_types = part.config.layer_types[:count]
    decoder.layers = nn.ModuleList(_shallow(layer) for layer in decoder.layers[:count])
    return part


def _shallow(module: nn.Module) -> Any:
    """A copy with the same parameters and children; changes of its children and hooks leave the module alone."""
    other = copy.copy(module)
    other.__dict__["_modules"] = dict(module._modules)
    for hooks in (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs",
    ):
        other.__dict__[hooks] = type(module.__dict__[hooks])()
    return other
