"""Multi-token prediction: the decoder layer after a model's own layers, in the model's own checkpoint.

    x_j = fc(cat(norm_e(embedding of token j + 1), norm_h(h_j)))     h_j: the model's state of token j after its final norm
    s_{j+1} = norm(layer(x_j))                                       a layer as the model has them, that attends to all rows
    logits of token j + 2 = head(s_{j+1})                            embedding and head are the model's

Below the text's last token h_j is s_j, the head's own state after its norm, so that one layer drafts any number of tokens.
Two names of the same parts are in use: Qwen's ``mtp.*``, and DeepSeek's ``model.layers.L.*`` of a model of L layers. After a
model with several streams it has the form of ``mtp_streams.py``.

The layer runs as a transformers model of one layer, by whatever computes the model's own: fused ops, latents, experts, packed
weights.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pass_ext.decoding.drafting.heads.checkpoint import HeadCheckpoint
from pass_ext.decoding.drafting.heads.head import HeadModule, TargetFacts
from pass_ext.decoding.drafting.heads.mtp_layer import model_of_one_layer
from pass_ext.decoding.drafting.heads.mtp_streams import has_streams, read_streams
from pass_ext.decoding.models.packed import StepAttend
from pass_ext.decoding.models.parts import decoder_of, unwrapped
from pass_ext.decoding.models.taps import Taps
from pass_ext.decoding.models.transformers import TransformersModel


class Names(NamedTuple):
    """What the parts are called in a checkpoint, after a prefix."""

    fc: str
    embedding_norm: str
    state_norm: str
    norm: str
    layer: str
    """Prefix of the layer's own names."""


_QWEN = Names("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight", "layers.0.")
_DEEPSEEK = Names("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight", "")
_SHARED = "embed_tokens.weight", "shared_head.head.weight"
"""Copies of the model's own that DeepSeek's checkpoints have."""


class MtpHead(HeadModule):
    """The head.

    Args:
        fc: ``[d, 2 d]``.
        embedding_norm, state_norm: norms as the model's final one.
        layer: the model of one layer, whose final norm is the head's and whose embedding and output layer are the target's.
    """

    kind = "MTP"
    method = "Mtp"
    taps = ("last",)

    def __init__(
        self, fc: nn.Module, embedding_norm: nn.Module, state_norm: nn.Module, layer: Any, target: TargetFacts
    ) -> None:
        super().__init__()
        self.target_width = self.state_width = self.embedding_width = target.width
        self.target_vocabulary, self.target_name, self.num_layers = target.vocabulary, target.name, 1
        self.fc, self.embedding_norm, self.state_norm = fc, embedding_norm, state_norm
        self._layer = TransformersModel(layer)
        self._no_rows = torch.empty(0, dtype=torch.int64, device=target.device)

    def attached(self) -> AbstractContextManager[Any]:
        return self._layer.attached()

    def take(self, states: Tensor) -> Tensor:
        return states[:, 0]

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attend: StepAttend) -> tuple[Tensor, Tensor]:
        rows = self.fc(torch.cat((self.embedding_norm(embedded), self.state_norm(states)), 1))
        attend.taps = taps = Taps(("last",))
        self._layer(rows, positions, attend, self._no_rows)
        normed = taps.states[:, 0]
        return normed, normed

    def logits(self, rows: Tensor) -> Tensor:
        return self._layer.output(rows)


def has_mtp(checkpoint: HeadCheckpoint) -> bool:
    """Whether a checkpoint has such a head."""
    return has_streams(checkpoint) or _place_in(checkpoint) is not None


def read_mtp(checkpoint: HeadCheckpoint, target: TargetFacts) -> HeadModule:
    """The head in a model's own checkpoint."""
    if has_streams(checkpoint):
        return read_streams(checkpoint, target)
    place = _place_in(checkpoint)
    assert place is not None
    prefix, names = place
    model, width = unwrapped(target.model), target.width
    decoder = decoder_of(model)
    if not isinstance(getattr(decoder, "norm", None), nn.Module) or not hasattr(model, "config"):
        raise checkpoint.refusal(
            f"its MTP layer continues a transformers model whose decoder has a final norm, and the model is a {target.name}"
        )
    others = set(names[:-1]) | set(_SHARED)
    inner = {name.removeprefix(prefix) for name in checkpoint.names if name.startswith(prefix)}
    checkpoint.leave({name for name in checkpoint.names if not name.startswith(prefix)} | {prefix + x for x in _SHARED})
    own = sorted(name for name in inner if name not in others and name.startswith(names.layer))

    def weight_of(name: str, *shape: int) -> nn.Parameter:
        found = checkpoint.tensor(prefix + name, shape)
        return nn.Parameter(found.to(target.device, target.dtype), requires_grad=False)

    def norm_of(name: str) -> nn.Module:
        norm: nn.Module = copy.deepcopy(decoder.norm)
        norm.weight = weight_of(name, width)
        return norm.eval()

    fc = checkpoint.linear(prefix + names.fc, width, 2 * width, target.dtype, target.device)
    no_row = torch.zeros(1, width)  # what stands at the ends is replaced
    tensors = {"model.embed_tokens.weight": no_row, "model.norm.weight": no_row[0], "lm_head.weight": no_row}
    quantised = {}
    for name in own:
        at = f"model.layers.0.{name.removeprefix(names.layer)}"
        parts = checkpoint.quantised(prefix + name)
        if parts is not None:
            quantised[at.removesuffix(".weight")] = parts
        else:
            tensors[at] = checkpoint.any_tensor(prefix + name)
    layer = model_of_one_layer(checkpoint, tensors, target, quantised)
    decoder_of(layer).norm = norm_of(names.norm)
    return MtpHead(fc, norm_of(names.embedding_norm), norm_of(names.state_norm), layer, target)


def _place_in(checkpoint: HeadCheckpoint) -> tuple[str, Names] | None:
    """The prefix and the names of the first MTP layer."""
    for names in (_QWEN, _DEEPSEEK):
        found = [
            name.removesuffix(names.fc)
            for name in checkpoint.names
            if name.endswith("." + names.fc) and (names is not _QWEN or name.endswith("mtp." + names.fc))
        ]
        if found:
            return min(found, key=lambda prefix: (len(prefix), prefix)), names
    return None
