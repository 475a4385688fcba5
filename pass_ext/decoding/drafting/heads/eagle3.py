"""EAGLE-3 (Li et al., 2025): a decoder layer, or a few, above states of some of the model's layers.

    s_j = fc(cat(h_j at the taps))                                     for text, from the target's own states
    r   = s_j, or hidden_norm(s_j) if norm_before_residual
    a   = r + attention(cat(input_layernorm(embedding of token j + 1), hidden_norm(s_j)))
    y   = a + mlp(post_attention_layernorm(a))                         further layers, if any: Llama's, on y
    logits of token j + 2 = lm_head(norm(y))
    s_{j+1} = y, or norm(y) if norm_output                             for drafts, from the row above

In front of fc, norm_before_fc norms the concatenated states as a whole (``input_norm``), fc_norm each of them. Logits are of
``draft_vocab_size`` tokens; number i is the target's token i + d2t[i].

Configs and names of tensors are those of the speculators form. The original form names ``midlayer.*`` what is ``layers.0.*``
here, and has all settings in one dictionary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.drafting.heads.checkpoint import HeadCheckpoint
from pass_ext.decoding.drafting.heads.fused import FusedHead
from pass_ext.decoding.drafting.heads.head import HeadModule, TargetFacts
from pass_ext.decoding.drafting.heads.layers import DecoderLayer, RmsNorm, Rotary, known_settings, layer_config
from pass_ext.decoding.models.packed import Attend, StepAttend
from pass_ext.modules.files import write_tensors

_SETTINGS: dict[str, Any] = {
    "draft_vocab_size": None,
    "eagle_aux_hidden_state_layer_ids": None,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "norm_output": False,
    "target_hidden_size": None,
}
"""The settings beside those of the layers, and their defaults."""
_WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "use_aux_hidden_state": (True, "the head reads one state alone"),
    "quantization_config": (None, "its weights are quantised"),
    "logit_scale": (1.0, "its logits are multiplied"),
}
"""Settings that change the head, what they must be, and what any other value means."""
_FIRST, _ORIGINAL = "layers.0.", "midlayer."


class FirstLayer(DecoderLayer):
    """The layer that reads embeddings and states."""

    def __init__(self, config: Any, has: Collection[str], *, norms_residual: bool) -> None:
        super().__init__(config, 0, has, 2 * config.hidden_size)
        self._norms_residual = norms_residual
        self.hidden_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(  # type: ignore[override]
        self, embedded: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Embeddings and states ``[N, d]`` -> ``[N, d]``."""
        return self.around(*self.read(embedded, states), rotation, attend)

    def read(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The rows ``[N, 2 * d]`` that go into attention, and those ``[N, d]`` that its output is added to."""
        normed: Tensor = self.hidden_norm(states)
        rows = torch.cat((self.input_layernorm(embedded), normed), 1)
        return rows, normed if self._norms_residual else states


class Eagle3Head(HeadModule):
    """The head. Its parameters and buffers have the names of the speculators form.

    Args:
        config: in the speculators form.
        target: the model that it is for.
        has: names of tensors that the settings need not tell of, where there are some: biases, norms of heads, embeddings,
            and the vocabulary.
    """

    kind = "EAGLE-3"
    method = "Eagle3"

    def __init__(self, config: Mapping[str, Any], target: TargetFacts, has: Collection[str] = ()) -> None:
        super().__init__()
        self.config = dict(config)
        settings = {name: config.get(name, default) for name, default in _SETTINGS.items()}
        layer = layer_config(config["transformer_layer_config"])
        width, eps = layer.hidden_size, layer.rms_norm_eps
        self.taps = tuple(settings["eagle_aux_hidden_state_layer_ids"] or default_taps(target))
        self.target_width, self.target_vocabulary = settings["target_hidden_size"] or width, layer.vocab_size
        self.embedding_width = self.state_width = width
        self.num_layers = layer.num_hidden_layers
        self._norms_output = settings["norm_output"]
        draft_vocabulary = settings["draft_vocab_size"] or layer.vocab_size

        count, tapped = len(self.taps), self.target_width
        self.input_norm = RmsNorm(count * tapped, eps) if settings["norm_before_fc"] else None
        self.fc_norm = nn.ModuleList(RmsNorm(tapped, eps) for _ in range(count)) if settings["fc_norm"] else None
        self.fc = nn.Linear(count * tapped, width, bias="fc.bias" in has)
        first = FirstLayer(layer, has, norms_residual=settings["norm_before_residual"])
        self.layers = nn.ModuleList([first, *(DecoderLayer(layer, i, has) for i in range(1, self.num_layers))])
        self.rotary = Rotary(layer)
        self.norm = RmsNorm(width, eps)
        self.lm_head = nn.Linear(width, draft_vocabulary, bias=False)
        self.embed_tokens = nn.Embedding(layer.vocab_size, width) if "embed_tokens.weight" in has else None
        self.d2t: Tensor | None
        self.t2d: Tensor | None
        self.register_buffer("d2t", torch.zeros(draft_vocabulary, dtype=torch.int64) if "d2t" in has else None)
        self.register_buffer("t2d", torch.zeros(layer.vocab_size, dtype=torch.bool) if "t2d" in has else None)
        self._fused: FusedHead | None = None

    @property
    def embedding(self) -> nn.Embedding | None:
        return self.embed_tokens

    @property
    def tokens(self) -> Tensor | None:
        offsets = self.d2t
        return None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)

    def take(self, states: Tensor) -> Tensor:
        rows = states.flatten(1)
        if self.input_norm is not None:
            rows = self.input_norm(rows)
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, rows.split(self.target_width, 1), strict=True)
            rows = torch.cat([norm(part) for norm, part in parts], 1)
        taken: Tensor = self.fc(rows)
        return taken

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        rotation = self.rotary(embedded, positions)
        first, *others = self.layers
        rows = first(embedded, states, rotation, attend)
        for layer in others:
            rows = layer(rows, rotation, attend)
        normed = self.norm(rows)
        return normed, normed if self._norms_output else rows

    def logits(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(rows)
        return logits

    def fuse(self) -> None:
        self._fused = FusedHead.of([*self.layers], self.norm, self.lm_head, self.rotary)

    def step(
        self, embedded: Tensor, states: Tensor, positions: Tensor, attend: StepAttend, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self._fused is not None:
            first: Any = self.layers[0]
            first_input, residual = first.read(embedded, states)
            done = self._fused(first_input, residual, positions, attend, wanted)
            if done is not None:
                logits, rows = done
                return logits, self.norm(rows) if self._norms_output else rows
        return super().step(embedded, states, positions, attend, wanted)


def save_eagle3(
    head: Eagle3Head,
    folder: str | os.PathLike[str],
    file: str = "model.safetensors",
    notes: Mapping[str, str] | None = None,
) -> None:
    """Writes the head as a checkpoint in the speculators form, which ``load_drafter``, speculators and vLLM read. notes: go
    into the file's metadata."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(head.config, indent=2))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    write_tensors(place / file, tensors, {"format": "pt", **(notes or {})})


def read_eagle3(checkpoint: HeadCheckpoint, target: TargetFacts, kind: type[Eagle3Head] = Eagle3Head) -> Eagle3Head:
    """The head of a checkpoint in either form."""
    config = _speculators_form(checkpoint)
    if not config.get("eagle_aux_hidden_state_layer_ids") and target.layers is None:
        raise checkpoint.refusal(
            "its config names no layers (eagle_aux_hidden_state_layer_ids), and the model has no config that tells how many "
            "it has: name the three layers whose inputs the head was trained on"
        )
    is_original = any(name.startswith(_ORIGINAL) for name in checkpoint.names)
    has = {name.replace(_ORIGINAL, _FIRST) for name in checkpoint.names}
    try:
        with torch.device("meta"):
            head = kind(config, target, has)
        head.check_fits(target)
    except ValueError as error:
        raise checkpoint.refusal(str(error)) from None
    checkpoint.fill(
        head, lambda name: name.replace(_FIRST, _ORIGINAL) if is_original else name, target.dtype, target.device
    )
    _check_vocabulary(head, checkpoint)
    return head


def _speculators_form(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    """The config in that form, which nests the settings of the layers."""
    config = checkpoint.config
    if "transformer_layer_config" not in config:
        nested = config.get("eagle_config") or {}
        own = {**config, **nested}
        settings = {name: own[name] for name in (*_SETTINGS, *_WITHOUT_EFFECT) if name in own}
        layers = {
            name: value for name, value in config.items() if name not in (*settings, "eagle_config", "architectures")
        }
        config = {"speculators_model_type": "eagle3", **nested, **settings, "transformer_layer_config": layers}
    layers = config["transformer_layer_config"]
    try:
        known = known_settings(layers.get("model_type", "llama"))
    except ValueError as error:
        raise checkpoint.refusal(str(error)) from None
    checkpoint.name_unknown(config, [*_SETTINGS, *_WITHOUT_EFFECT, "mask_token_id", "transformer_layer_config"])
    checkpoint.name_unknown(layers, known)
    for name, (inert, what) in _WITHOUT_EFFECT.items():
        if config.get(name, inert) != inert:
            raise checkpoint.refusal(f"its config has {name} {config[name]!r}: {what}, which pass_ext cannot read")
    return config


def default_taps(target: TargetFacts) -> tuple[int, int, int]:
    """Near the first, the middle and the last layer: their inputs."""
    assert target.layers is not None
    return 2, target.layers // 2, target.layers - 3


def _check_vocabulary(head: Eagle3Head, checkpoint: HeadCheckpoint) -> None:
    """Refuses a mapping that does not lead to different tokens of the target."""
    tokens, drafted, vocabulary = head.tokens, head.lm_head.out_features, head.target_vocabulary
    if tokens is None:
        if drafted != vocabulary:
            raise checkpoint.refusal(
                f"it has logits of {drafted} of {vocabulary} tokens, and no tensor 'd2t' tells which they are"
            )
        return
    lowest, highest, different = int(tokens.min()), int(tokens.max()), len(tokens.unique())
    if lowest < 0 or highest >= vocabulary or different < drafted:
        raise checkpoint.refusal(
            f"tensor 'd2t' must lead to {drafted} different tokens of the model's {vocabulary}, as offsets: token i of the "
            f"head is i + d2t[i]. It leads to {different}, from {lowest} to {highest}"
        )
    known = head.t2d
    if known is not None and (int(known.sum()) != drafted or highest >= len(known) or not known[tokens].all()):
        raise checkpoint.refusal("tensors 'd2t' and 't2d' must be of the same tokens, and they are not")
