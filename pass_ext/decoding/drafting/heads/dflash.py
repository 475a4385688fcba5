"""``DFlashHead``: a head of the DFlash family as its checkpoint has it: DFlash, DSpark and DFlash-2, in their own form and in
that of speculators, and transformers' ``muse_glimmer_assistant``.

    own form       target_layer_ids i: the output of layer i; row 0 of a block is the last token, row i drafts the i-th after it
    speculators    aux_hidden_state_layer_ids i: the input of layer i; with sample_from_anchor row i drafts the one after that
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pass_ext.decoding.drafting.heads.block_model import BlockLayer, BlockWeights
from pass_ext.decoding.drafting.heads.checkpoint import HeadCheckpoint
from pass_ext.decoding.drafting.heads.head import TargetFacts
from pass_ext.decoding.drafting.heads.layers import Rotary, known_settings, layer_config
from pass_ext.decoding.drafting.heads.local_convolution import LocalConvolution
from pass_ext.decoding.drafting.heads.transition import Transition
from pass_ext.decoding.models.taps import Tap
from pass_ext.decoding.models.vocabulary import MOST_PADDING
from pass_ext.ops.layer import LayerWeights

_MUSE = "muse_glimmer_assistant"
_MUSE_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
_MUST_BE: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "its MLPs have another activation"),
    "is_neox_style": (True, "it rotates neighbours"),
    "logit_scale": (1.0, "its logits are multiplied"),
    "markov_head_type": ("vanilla", "its Markov head reads more than the token in front"),
    "projector_type": ("dflash", "it corrects its drafts by a network of its own"),
    "quantization_config": (None, "its weights are quantised"),
    "use_aux_hidden_state": (True, "it reads one state alone"),
}
"""Settings that change the head, what they must be, and what any other value means."""
_SETTINGS = (
    "aux_hidden_state_layer_ids", "block_size", "causal", "confidence_head_with_markov", "conv_group_size",
    "conv_kernel_size", "draft_vocab_size", "final_logit_softcapping", "input_embedding_scale", "is_causal", "markov_rank",
    "mask_token_id", "num_target_layers", "output_multiplier", "sample_from_anchor", "selector_rank", "selector_top_k",
    "sliding_window_non_causal", "swa_window_size", "target_hidden_size", "target_layer_ids", "transformer_layer_config",
    "use_swa",
)  # fmt: skip
"""The settings beside those of the layers."""
_MOST_ROWS = 64  # of a block


class Confidence(NamedTuple):
    """DSpark's chance that a draft is right, known before it is drawn: ``sigmoid(weight · [h, left[token in front]] + bias)``,
    left of its transition."""

    weight: Tensor
    """``[1, d]``, or ``[1, d + r]`` with the token in front."""
    bias: Tensor | None

    def of(self, hidden: Tensor, before: Tensor) -> Tensor:
        """``[n]``. hidden: ``[n, d]``. before: ``[n, r]``."""
        known = torch.cat((hidden, before), -1)[:, : self.weight.shape[1]].float()
        bias = None if self.bias is None else self.bias.float()
        return torch.sigmoid(F.linear(known, self.weight.float(), bias))[:, 0]


class DFlashHead:
    """A head.

    Attributes:
        weights: of the network.
        taps: the states that it takes, as ``Drafter.taps`` names them.
        block: rows of a block.
        first: the first of them that drafts.
        transition: None: each draft is independent of the one in front.
        confidence: None: it has none.
        targets: ``[Vd]`` int64, the target's ids of the tokens that it drafts; None: all of them in their order.
    """

    kind: ClassVar[str] = "DFlash"

    def __init__(
        self,
        weights: BlockWeights,
        taps: tuple[Tap, ...],
        block: int,
        first: int,
        transition: Transition | None,
        confidence: Confidence | None,
        targets: Tensor | None,
    ) -> None:
        self.weights, self.taps, self.block, self.first = weights, taps, block, first
        self.transition, self.confidence, self.targets = transition, confidence, targets

    @property
    def length(self) -> int:
        """Tokens that a block drafts."""
        return self.block - self.first

    def __repr__(self) -> str:
        kind = "DFlash" if self.transition is None else "DFlash-2" if self.transition.offers else "DSpark"
        return f"DFlashHead({kind}, {len(self.weights.layers)} layers, length={self.length}, taps={list(self.taps)})"


def read_dflash(checkpoint: HeadCheckpoint, target: TargetFacts) -> DFlashHead:
    """The head of a checkpoint in any form."""
    return _Reader(checkpoint, target).head()


class _Reader:
    """Reads one checkpoint. Attributes: ``kind``, "dflash", "dspark" or "dflash2"; ``settings``, beside those of the layers."""

    def __init__(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> None:
        config = checkpoint.config
        self.checkpoint, self.target = checkpoint, target
        self.is_speculators = "speculators_model_type" in config
        if self.is_speculators:
            self.kind, self.settings = config["speculators_model_type"], config
            layers = self._required("transformer_layer_config")
        else:
            self.settings = layers = {**config, **(config.get("dflash_config") or {})}
            is_dspark = any("DSpark" in name for name in config.get("architectures") or ())
            self.kind = "dspark" if is_dspark else "dflash2" if self.settings.get("selector_top_k") else "dflash"
        for name, (only, what) in _MUST_BE.items():
            given = {**layers, **self.settings}.get(name, only)
            if given != only:
                raise checkpoint.refusal(f"its config has {name} {given!r}: {what}, which pass_ext cannot read")
        self.is_muse = layers.get("model_type") == _MUSE
        self.types, self.window = layers.get("layer_types"), layers.get("sliding_window")
        self.vocabulary = layers.get("vocab_size") or target.vocabulary
        form = "qwen3" if self.is_muse else layers.get("model_type", "llama")
        try:
            self.layers: Any = layer_config({**layers, "model_type": form})
        except ValueError as error:
            raise checkpoint.refusal(str(error)) from None
        known = [*_SETTINGS, *_MUST_BE]
        if self.is_speculators:
            checkpoint.name_unknown(config, known)
            known = [*_MUST_BE]
        checkpoint.name_unknown(layers, [*known, *known_settings(form), "dflash_config"])

    def head(self) -> DFlashHead:
        """The head."""
        settings, width = self.settings, self.layers.hidden_size
        taps = self._taps()
        block = self._required("block_size")
        first = 0 if settings.get("sample_from_anchor", self.kind == "dspark") else 1
        if not first < block <= _MOST_ROWS:
            raise self.checkpoint.refusal(f"block_size must be from {first + 1} to {_MOST_ROWS}, got {block}")
        self._check_target()
        targets, drafted = self._targets()
        output = self._own("lm_head.weight", drafted, width)
        if targets is not None and output is None:
            raise self.checkpoint.refusal("it drafts some tokens alone (d2t), and has no lm_head.weight for them")
        table = self._own("embed_tokens.weight", self.vocabulary, width)
        if table is None and width != self.target.width:
            raise self.checkpoint.refusal(
                f"its rows are {width} wide, the model's {self.target.width}, and it has no embed_tokens.weight"
            )
        weights = BlockWeights(
            self._tensor("fc.weight", width, len(taps) * self.target.width), self._tensor("hidden_norm.weight", width),
            [self._layer(number) for number in range(self.layers.num_hidden_layers)], self._tensor("norm.weight", width),
            Rotary(self.layers), self.layers.head_dim, self.layers.rms_norm_eps, self._required("mask_token_id"),
            self._mask_row(), table, output, float(settings.get("input_embedding_scale") or 1.0),
            float(settings.get("output_multiplier") or 1.0), float(settings.get("final_logit_softcapping") or 0.0),
        )  # fmt: skip
        rows = self.target.vocabulary if table is None else len(table)
        if weights.mask_row is None and not 0 <= weights.mask < rows:
            raise self.checkpoint.refusal(f"mask_token_id is {weights.mask}, and there are embeddings of {rows} tokens")
        return DFlashHead(weights, taps, block, first, self._transition(drafted), self._confidence(), targets)

    def _check_target(self) -> None:
        """Refuses another model than the head was trained for."""
        target, settings = self.target, self.settings
        for what, its, ours, most in (
            ("layers", settings.get("num_target_layers"), target.layers, 0),
            ("numbers in a state", settings.get("target_hidden_size") or self.layers.hidden_size, target.width, 0),
            ("tokens", self.vocabulary, target.vocabulary, MOST_PADDING),
        ):
            if its is not None and ours is not None and abs(its - ours) > most:
                raise self.checkpoint.refusal(f"it was trained for a model with {its} {what}, and this one has {ours}")
        beyond = [tap for tap in self._taps() if tap != "last" and target.layers is not None and tap > target.layers]
        if beyond:
            raise self.checkpoint.refusal(
                f"it takes states in front of layer {beyond[0]}, and the model has {target.layers}"
            )

    def _required(self, name: str) -> Any:
        if self.settings.get(name) is None:
            raise self.checkpoint.refusal(f"its config has no {name}")
        return self.settings[name]

    def _tensor(self, name: str, *shape: int) -> Tensor:
        name = _MUSE_NAMES.get(name, name) if self.is_muse else name
        tensor = self.checkpoint.tensor(name, shape)
        return tensor.to(self.target.device, self.target.dtype if tensor.is_floating_point() else tensor.dtype)

    def _own(self, name: str, *shape: int) -> Tensor | None:
        """A tensor that a head may have or not."""
        return self._tensor(name, *shape) if name in self.checkpoint else None

    def _mask_row(self) -> Tensor | None:
        """The row of a masked token, where a head was trained with one beside the table."""
        held = self.checkpoint.beside("mask_embedding.pt")
        row = held.get("embedding") if isinstance(held, dict) else held
        if row is None:
            return None
        width = self.layers.hidden_size
        if not isinstance(row, Tensor) or row.numel() != width:
            raise self.checkpoint.refusal(f"mask_embedding.pt must hold a row of {width} numbers")
        return row.flatten().to(self.target.device, self.target.dtype)

    def _taps(self) -> tuple[Tap, ...]:
        """The states that it takes."""
        layers = self.target.layers
        if self.is_speculators:
            taps: list[Tap] = list(self._required("aux_hidden_state_layer_ids"))
        else:  # The last states of transformers are those after the final norm.
            taps = ["last" if i + 1 == layers else i + 1 for i in self._required("target_layer_ids")]
        return tuple(taps)

    def _targets(self) -> tuple[Tensor | None, int]:
        """The target's ids of the tokens that it drafts, and their number."""
        count = self.settings.get("draft_vocab_size") or self.vocabulary
        offsets, known = self._own("d2t", count), self._own("t2d", self.vocabulary)
        if offsets is None:
            if count != self.vocabulary:
                raise self.checkpoint.refusal(
                    f"it has logits of {count} of {self.vocabulary} tokens, and no tensor 'd2t' tells which they are"
                )
            return None, count
        targets = torch.arange(count, device=offsets.device) + offsets
        lowest, highest, different = int(targets.min()), int(targets.max()), len(targets.unique())
        if lowest < 0 or highest >= self.target.vocabulary or different < count:
            raise self.checkpoint.refusal(
                f"tensor 'd2t' must lead to {count} different tokens of the model's {self.target.vocabulary}, as offsets: "
                f"token i of the head is i + d2t[i]. It leads to {different}, from {lowest} to {highest}"
            )
        if known is not None and (highest >= len(known) or not known[targets].all()):
            raise self.checkpoint.refusal("tensors 'd2t' and 't2d' must be of the same tokens, and they are not")
        return targets, count

    def _layer(self, number: int) -> BlockLayer:
        config, at, width = self.layers, f"layers.{number}.", self.layers.hidden_size
        rows, key_rows = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        inner = config.intermediate_size
        shapes = {
            "q": ("self_attn.q", rows, width), "k": ("self_attn.k", key_rows, width), "v": ("self_attn.v", key_rows, width),
            "o": ("self_attn.o", width, rows), "gate": ("mlp.gate", inner, width), "up": ("mlp.up", inner, width),
            "down": ("mlp.down", width, inner),
        }  # fmt: skip
        named: dict[str, Any] = {}
        for part, (place, *shape) in shapes.items():
            named[f"{part}_weight"] = self._tensor(f"{at}{place}_proj.weight", *shape)
            named[f"{part}_bias"] = self._own(f"{at}{place}_proj.bias", shape[0])
        for part, name, size in (
            ("input_norm", "input_layernorm", width),
            ("mlp_norm", "post_attention_layernorm", width),
            ("q_norm", "self_attn.q_norm", config.head_dim),
            ("k_norm", "self_attn.k_norm", config.head_dim),
        ):
            named[part] = self._tensor(f"{at}{name}.weight", size)
        around = (
            self._convolution(f"{at}{name}") if self.kind == "dflash2" else None
            for name in ("attention_conv", "mlp_conv")
        )
        sinks = self._own(f"{at}self_attn.attention_sink_bias", config.num_attention_heads)
        return BlockLayer(LayerWeights(**named), *self._seen(number), sinks, *around)

    def _seen(self, number: int) -> tuple[int, bool]:
        """How far the rows of a layer see, and whether a block's rows see none after them."""
        settings = self.settings
        is_sliding = self.types[number] == "sliding_attention" if self.types else bool(settings.get("use_swa"))
        window = settings.get("swa_window_size", self.window) if is_sliding else None
        if is_sliding and window is None:
            raise self.checkpoint.refusal(f"its layer {number} has a window, and its config no sliding_window")
        if self.is_speculators:
            causal = is_sliding and not settings.get("sliding_window_non_causal", self.kind == "dflash2")
        else:
            given = settings.get("is_causal", settings.get("causal"))
            causal = bool(self.types) and is_sliding and not self.is_muse if given is None else bool(given)
        return -1 if window is None else int(window), causal

    def _convolution(self, name: str) -> LocalConvolution:
        taps, channels = self._required("conv_kernel_size"), self._required("conv_group_size")
        width = self.layers.hidden_size
        deltas = self._tensor(f"{name}.kernel_projection.weight", 2 * taps * width // channels, width)
        return LocalConvolution(self._tensor(f"{name}.base_kernel", 2, taps, width), deltas)

    def _transition(self, drafted: int) -> Transition | None:
        vocabulary, width = self.vocabulary, self.layers.hidden_size
        if self.kind == "dspark":
            rank = self._required("markov_rank")
            left = self._tensor("markov_head.markov_w1.weight", vocabulary, rank)
            return Transition(left, self._tensor("markov_head.markov_w2.weight", drafted, rank))
        if self.kind == "dflash2":
            rank, at = self._required("selector_rank"), "candidate_selector."
            left = self._tensor(f"{at}predecessor_codebook", vocabulary, rank)
            right = self._tensor(f"{at}successor_codebook", drafted, rank)
            gate = self._tensor(f"{at}hidden_projection.weight", rank, width)
            return Transition(left, right, gate, int(self._required("selector_top_k")))
        return None

    def _confidence(self) -> Confidence | None:
        name, width = "confidence_head.proj.", self.layers.hidden_size
        if f"{name}weight" not in self.checkpoint:
            return None
        more = self.settings["markov_rank"] if self.settings.get("confidence_head_with_markov") else 0
        return Confidence(self._tensor(f"{name}weight", 1, width + more), self._own(f"{name}bias", 1))
