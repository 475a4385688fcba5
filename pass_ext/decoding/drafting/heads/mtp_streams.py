"""Multi-token prediction after a model whose rows are several streams (DeepSeek-V4: four).

    x_j[i]  = e_proj(enorm(embedding of token j + 1)) + h_proj(hnorm(h_j[i]))    h_j: the streams after the model's last layer
    s_{j+1} = layer(x_j)                                                         a layer with streams and the model's window
    logits of token j + 2 = head(norm(hc_head(s_{j+1})))                         hc_head: a sum of the streams by weights

Below the text's last token h_j is s_j. The tensors are ``mtp.0.*``, named as those of the model's own layers.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.drafting.heads.checkpoint import HeadCheckpoint
from pass_ext.decoding.drafting.heads.head import HeadModule, TargetFacts
from pass_ext.decoding.drafting.heads.mtp_layer import model_of_one_layer
from pass_ext.decoding.models.packed import StepAttend
from pass_ext.decoding.models.parts import decoder_layers, decoder_of, unwrapped
from pass_ext.decoding.models.taps import Taps
from pass_ext.decoding.models.transformers import TransformersModel

_PREFIX = "mtp.0."
_SHARED = "emb.tok_emb.weight", "head.weight"
"""Copies of the model's own."""


class StreamsHead(HeadModule):
    """The head.

    Args:
        e_proj, h_proj: ``[d, d]``.
        enorm, hnorm: norms as the model's final one.
        layer: the model of one layer, whose ends are the head's.
        streams: how many.
    """

    kind = "MTP"
    method = "Mtp"

    def __init__(
        self,
        e_proj: nn.Linear,
        h_proj: nn.Linear,
        enorm: nn.Module,
        hnorm: nn.Module,
        layer: Any,
        streams: int,
        target: TargetFacts,
    ) -> None:
        super().__init__()
        self.target_width = self.embedding_width = target.width
        self.state_width, self.target_vocabulary, self.num_layers = streams * target.width, target.vocabulary, 1
        self.target_name = target.name
        self.taps = (len(decoder_layers(unwrapped(target.model))),)
        self.e_proj, self.h_proj, self.enorm, self.hnorm = e_proj, h_proj, enorm, hnorm
        decoder = decoder_of(layer)
        self.hc_head, self.norm = decoder.hc_head, decoder.norm
        decoder.hc_head, decoder.norm = nn.Identity(), nn.Identity()  # it gives its streams
        decoder_layers(layer)[0].register_forward_pre_hook(_parted)
        self._layer = TransformersModel(layer)
        self._no_rows = torch.empty(0, dtype=torch.int64, device=target.device)

    def attached(self) -> AbstractContextManager[Any]:
        return self._layer.attached()

    def take(self, states: Tensor) -> Tensor:
        return states[:, 0].flatten(1)

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attend: StepAttend) -> tuple[Tensor, Tensor]:
        streams = states.unflatten(1, (-1, self.target_width))
        rows = self.e_proj(self.enorm(embedded))[:, None] + self.h_proj(self.hnorm(streams))
        attend.taps = taps = Taps(("last",))
        self._layer(rows.flatten(1), positions, attend, self._no_rows)
        given = taps.states[:, 0]
        return self.norm(self.hc_head(given[None])[0]), given.flatten(1)

    def logits(self, rows: Tensor) -> Tensor:
        return self._layer.output(rows)


def _parted(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The layer's streams, which the model takes for one row ``[1, N, streams * d]`` and has copied for each stream."""
    copied = inputs[0]
    return (copied[:, :, 0].unflatten(2, (copied.shape[2], -1)), *inputs[1:])


def has_streams(checkpoint: HeadCheckpoint) -> bool:
    """Whether a checkpoint has such a head."""
    return f"{_PREFIX}hc_head_fn" in checkpoint


def read_streams(checkpoint: HeadCheckpoint, target: TargetFacts) -> StreamsHead:
    """The head in a model's own checkpoint."""
    model, width = unwrapped(target.model), target.width
    decoder = decoder_of(model)
    streams = getattr(getattr(model, "config", None), "hc_mult", None)
    if not isinstance(streams, int) or not hasattr(decoder, "hc_head"):
        raise checkpoint.refusal(
            f"its MTP layer continues a model with streams (hc_head), and the model is a {target.name}"
        )
    inner = {name.removeprefix(_PREFIX) for name in checkpoint.names if name.startswith(_PREFIX)}
    own = sorted(inner - set(_SHARED) - {f"{x}.weight" for x in ("e_proj", "h_proj", "enorm", "hnorm")})
    left = {name for name in checkpoint.names if not name.startswith("mtp.")}
    checkpoint.leave(left | {_PREFIX + name for name in _SHARED})

    def linear(name: str) -> nn.Linear:
        made = nn.Linear(width, width, bias=False, device="meta")
        found = checkpoint.tensor(f"{_PREFIX}{name}.weight", (width, width))
        made.weight = nn.Parameter(found.to(target.device, target.dtype), requires_grad=False)
        return made

    def norm(name: str) -> nn.Module:
        made: nn.Module = copy.deepcopy(decoder.norm)
        found = checkpoint.tensor(f"{_PREFIX}{name}.weight", (width,))
        made.weight = nn.Parameter(found.to(decoder.norm.weight), requires_grad=False)
        return made.eval()

    no_row = torch.zeros(1, width)  # what stands at the ends of the model is replaced
    tensors = {"embed.weight": no_row, "head.weight": no_row}
    for name in own:
        is_end = name == "norm.weight" or name.startswith("hc_head_")
        tensors[name if is_end else f"layers.0.{name}"] = checkpoint.any_tensor(_PREFIX + name)
    types = dict(layer_types=["sliding_attention"], mlp_layer_types=["moe"])
    layer = model_of_one_layer(checkpoint, tensors, target, types=types)
    return StreamsHead(linear("e_proj"), linear("h_proj"), norm("enorm"), norm("hnorm"), layer, streams, target)
