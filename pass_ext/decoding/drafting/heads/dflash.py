"""``DFlashHead``: a drafter of the DFlash family as its file has it: DFlash, DSpark and DFlash-2, in their own form, in that of
speculators, and transformers' ``muse_glimmer_assistant``.

    own form       target_layer_ids i: the output of layer i; row 0 of a block is the last token, row i drafts the i-th after it
    speculators    aux_hidden_state_layer_ids i: the input of layer i; with sample_from_anchor row i drafts the one behind that
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pass_ext.decoding.drafting.heads.block_model import BlockLayer, BlockWeights
from pass_ext.decoding.drafting.heads.local_convolution import LocalConvolution
from pass_ext.decoding.drafting.heads.transition import Transition
from pass_ext.decoding.models.early_exit import packed_model
from pass_ext.decoding.models.module_ops import is_light_linear
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.models.parts import decoder_layers, unwrapped
from pass_ext.decoding.models.taps import Tap
from pass_ext.decoding.models.vocabulary import MOST_PADDING
from pass_ext.ops.layer import LayerWeights
from pass_ext.ops.linear import linear_rows

_OWN_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
"""Names of ``muse_glimmer_assistant`` -> those of all others."""


class Confidence(NamedTuple):
    """DSpark's chance that a draft is right, known before it is drawn: ``sigmoid(weight · [h, left[token in front]] + bias)``,
    left of its transition."""

    weight: Tensor
    """``[1, d]``, or ``[1, d + r]`` with the token in front."""
    bias: Tensor | None

    def of(self, hidden: Tensor, before: Tensor) -> Tensor:
        """``[n]``. hidden: ``[n, d]``. before: ``[n, r]``."""
        known = torch.cat((hidden, before), -1)[:, : self.weight.shape[1]].float()
        return torch.sigmoid(nn.functional.linear(known, self.weight, self.bias))[:, 0]


@dataclass(frozen=True, eq=False)
class DFlashHead:
    """A drafter for one model."""

    model: Any
    """The target."""
    weights: BlockWeights
    taps: tuple[Tap, ...]
    block: int
    """Rows of a block."""
    first: int
    """The first row that drafts."""
    transition: Transition | None
    """None: each draft is independent of the one in front."""
    confidence: Confidence | None
    targets: Tensor | None
    """``[Vd]``, the target's number of each token of the draft; None: the same."""

    @property
    def length(self) -> int:
        """Tokens that a block drafts."""
        return self.block - self.first

    def __repr__(self) -> str:
        kind = "DFlash" if self.transition is None else "DFlash-2" if self.transition.offers else "DSpark"
        return f"DFlashHead({kind}, {len(self.weights.layers)} layers, length={self.length}, taps={list(self.taps)})"


class _Settings(NamedTuple):
    """A config, whatever its form."""

    of_layers: Mapping[str, Any]
    """A transformers config of the layers."""
    of_drafter: Mapping[str, Any]
    is_speculators: bool
    kind: str
    """dflash, dflash2 or dspark."""


def dflash_head(config: Mapping[str, Any], tensors: Mapping[str, Tensor], model: Any) -> DFlashHead:
    """Reads a drafter for a model.

    Args:
        config: of its ``config.json``.
        tensors: by name; each is read once.
        model: the target, as ``generate`` takes it.
    """
    target, settings = packed_model(model), _settings(config)
    if not target.has_table:
        raise ValueError(
            "DFlash reads rows of the model's input embeddings, which must be a plain tensor in memory here: they are "
            "quantised, offloaded or divided among ranks"
        )
    source = _Tensors(tensors, target.table)
    fc, taps = source("fc.weight"), _taps(settings, model)
    _check_target(settings, target, model, fc, taps)
    table = source.given("embed_tokens.weight")
    table = target.table.detach() if table is None else table
    if table.shape[1] != len(fc):
        raise ValueError(f"DFlash: rows are {len(fc)} wide, and the model's input embeddings {table.shape[1]}")
    drafter, transition = settings.of_drafter, _transition(settings, source)
    scale = float(drafter.get("input_embedding_scale") or 1.0)
    targets = source.given("d2t")
    if targets is not None:
        targets = torch.arange(len(targets), device=targets.device) + targets
    layers = [_layer(number, settings, source) for number in range(settings.of_layers["num_hidden_layers"])]
    frequencies, rotary_scale = _rotary(settings.of_layers, len(layers[0].weights.k_norm), table.device)  # type: ignore[arg-type]
    weights = BlockWeights(
        table, fc, source("hidden_norm.weight"), layers, source("norm.weight"), _output_layer(source, target, model, targets),
        frequencies, len(layers[0].weights.k_norm), float(settings.of_layers.get("rms_norm_eps", 1e-6)),  # type: ignore[arg-type]
        _mask(settings, source, table, scale), rotary_scale, scale,
        float(drafter.get("output_multiplier") or drafter.get("logit_scale") or 1.0),
        float(drafter.get("final_logit_softcapping") or 0.0),
    )  # fmt: skip
    block = _required(drafter, "block_size")
    first = 0 if drafter.get("sample_from_anchor", settings.kind == "dspark") else 1
    if not 2 <= block - first + 1 <= 64:
        raise ValueError(f"DFlash: block_size must give 1 to 63 drafts, got {block}")
    return DFlashHead(unwrapped(model), weights, taps, block, first, transition, _confidence(source), targets)


# ---- the config ----


def _settings(config: Mapping[str, Any]) -> _Settings:
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind not in ("dflash", "dflash2", "dspark"):
            raise ValueError(f"DFlash: speculators_model_type must be dflash, dflash2 or dspark, got {kind!r}")
        if config.get("projector_type", "dflash") != "dflash":
            raise ValueError(f"DFlash: projector_type must be dflash, got {config['projector_type']!r}")
        return _Settings(_required(config, "transformer_layer_config"), config, True, kind)
    drafter = {**config, **(config.get("dflash_config") or {})}
    is_dspark = any("DSpark" in name for name in config.get("architectures") or [])
    kind = "dspark" if is_dspark else "dflash2" if drafter.get("selector_top_k") else "dflash"
    return _Settings(config, drafter, False, kind)


def _required(settings: Mapping[str, Any], name: str) -> Any:
    if settings.get(name) is None:
        raise ValueError(f"DFlash: its config has no {name}")
    return settings[name]


def _taps(settings: _Settings, model: Any) -> tuple[Tap, ...]:
    if settings.is_speculators:
        return tuple(_required(settings.of_drafter, "aux_hidden_state_layer_ids"))
    # The states of transformers end with the one behind the final norm.
    last = _layers_of(model)
    return tuple("last" if i + 1 == last else i + 1 for i in _required(settings.of_drafter, "target_layer_ids"))


def _layers_of(model: Any) -> int | None:
    return len(decoder_layers(unwrapped(model))) if hasattr(model, "config") else None


def _check_target(settings: _Settings, target: Adapted, model: Any, fc: Tensor, taps: tuple[Tap, ...]) -> None:
    """Refuses another target than the drafter was trained for."""
    layers, width = _layers_of(model), fc.shape[1] / len(taps)
    for what, its, ours in (
        ("layers", settings.of_drafter.get("num_target_layers"), layers),
        ("states", width, target.table.shape[1]),
    ):
        if its is not None and ours is not None and its != ours:
            sentence = "layers" if what == "layers" else "numbers in a state"
            raise ValueError(
                f"DFlash: made for a model with {its:g} {sentence}, and this one has {ours}: another target"
            )
    beyond = [tap for tap in taps if layers is not None and tap != "last" and not 0 <= tap <= layers]
    if beyond:
        raise ValueError(f"DFlash: made for a model with layer {beyond[0]}, and this one has {layers}: another target")
    vocabulary = settings.of_layers.get("vocab_size")
    if vocabulary is not None and abs(vocabulary - len(target.table)) > MOST_PADDING:
        raise ValueError(
            f"DFlash: made for a vocabulary of {vocabulary} tokens, and this one has {len(target.table)}: another target"
        )


def _rotary(config: Mapping[str, Any], head_dim: int, device: torch.device) -> tuple[Tensor, float]:
    """The frequencies of the rotary embedding, and the factor of cosines and sines."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if theta is None:
        raise ValueError("DFlash: its config has no rope_theta")
    if kind == "default":
        powers = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        return 1.0 / float(theta) ** powers, 1.0
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"DFlash: rope_type must be default, linear, llama3 or yarn, got {kind!r}")
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = {**config, "head_dim": head_dim, "rope_parameters": {**rope, "rope_type": kind, "rope_theta": theta}}
    known.pop("model_type", None)
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](Qwen3Config(**known), device)
    return frequencies.float(), float(scale)


def _seen(number: int, settings: _Settings) -> tuple[int, bool]:
    """How far the rows of a layer see, and whether a block's rows see none after them."""
    config, drafter = settings.of_layers, settings.of_drafter
    kinds = config.get("layer_types")
    is_sliding = kinds[number] == "sliding_attention" if kinds else bool(drafter.get("use_swa"))
    window = drafter.get("swa_window_size", config.get("sliding_window")) if is_sliding else None
    if is_sliding and window is None:
        raise ValueError(f"DFlash: layer {number} has a window, and its config no sliding_window")
    if settings.is_speculators:
        causal = is_sliding and not drafter.get("sliding_window_non_causal", settings.kind == "dflash2")
    elif config.get("model_type") == "muse_glimmer_assistant":
        causal = False
    else:
        given = config.get("is_causal", drafter.get("causal"))
        causal = bool(kinds) and is_sliding if given is None else bool(given)
    return -1 if window is None else int(window), causal


# ---- the tensors ----


class _Tensors:
    """The tensors of a file, in the target's dtype, on its device."""

    def __init__(self, tensors: Mapping[str, Tensor], like: Tensor) -> None:
        self._tensors, self._like = {_OWN_NAMES.get(name, name): tensor for name, tensor in tensors.items()}, like

    def given(self, name: str) -> Tensor | None:
        """The tensor of this name, if there is one."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        tensor = tensor.detach().to(self._like.device)
        return tensor.to(self._like.dtype) if tensor.is_floating_point() else tensor

    def __call__(self, name: str) -> Tensor:
        tensor = self.given(name)
        if tensor is None:
            raise ValueError(f"DFlash: there is no tensor {name}: the file is not whole, or of another kind")
        return tensor


def _layer(number: int, settings: _Settings, source: _Tensors) -> BlockLayer:
    def its(name: str) -> Tensor:
        return source(f"layers.{number}.{name}")

    if settings.of_layers.get("hidden_act", "silu") != "silu":
        raise ValueError(f"DFlash: hidden_act must be silu, got {settings.of_layers['hidden_act']!r}")
    products = {"self_attn": "qkvo", "mlp": ("gate", "up", "down")}
    named: dict[str, Any] = {
        f"{part}_weight": its(f"{place}.{part}_proj.weight") for place, parts in products.items() for part in parts
    }
    for part in "qkvo":
        named[f"{part}_bias"] = source.given(f"layers.{number}.self_attn.{part}_proj.bias")
    for part, name in (
        ("input_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
        ("q_norm", "self_attn.q_norm"),
        ("k_norm", "self_attn.k_norm"),
    ):
        named[part] = its(f"{name}.weight")
    around: list[LocalConvolution | None] = [None, None]
    if settings.kind == "dflash2":
        around = [
            LocalConvolution(its(f"{name}.base_kernel"), its(f"{name}.kernel_projection.weight"))
            for name in ("attention_conv", "mlp_conv")
        ]
    sinks = source.given(f"layers.{number}.self_attn.attention_sink_bias")
    return BlockLayer(LayerWeights(**named), *_seen(number, settings), sinks, *around)


def _transition(settings: _Settings, source: _Tensors) -> Transition | None:
    if settings.kind == "dspark":
        kind = settings.of_drafter.get("markov_head_type", "vanilla")
        if kind != "vanilla":
            raise ValueError(f"DFlash: markov_head_type must be vanilla, got {kind!r}")
        return Transition(source("markov_head.markov_w1.weight"), source("markov_head.markov_w2.weight"))
    if settings.kind == "dflash2":
        # z-lab's and speculators' files, and those that save embeddings
        left, right = (
            source.given(f"candidate_selector.{name}.weight")
            if source.given(f"candidate_selector.{name}") is None
            else source(f"candidate_selector.{name}")
            for name in ("predecessor_codebook", "successor_codebook")
        )
        if left is None or right is None:
            raise ValueError("DFlash: there is no tensor candidate_selector.predecessor_codebook or successor_codebook")
        gate = source("candidate_selector.hidden_projection.weight")
        return Transition(left, right, gate, int(_required(settings.of_drafter, "selector_top_k")))
    return None


def _confidence(source: _Tensors) -> Confidence | None:
    weight, bias = source.given("confidence_head.proj.weight"), source.given("confidence_head.proj.bias")
    return None if weight is None else Confidence(weight.float(), None if bias is None else bias.float())


def _mask(settings: _Settings, source: _Tensors, table: Tensor, scale: float) -> Tensor:
    """The row of a masked token."""
    given = source.given("mask_embedding")
    if given is not None:
        return given.flatten()
    token = _required(settings.of_drafter, "mask_token_id")
    if not 0 <= token < len(table):
        raise ValueError(f"DFlash: mask_token_id is {token}, and the table of embeddings has {len(table)} rows")
    return table[token] * scale


def _output_layer(source: _Tensors, target: Adapted, model: Any, targets: Tensor | None) -> Callable[[Tensor], Tensor]:
    weight = source.given("lm_head.weight")
    if weight is not None:
        if targets is None and abs(len(weight) - len(target.table)) > MOST_PADDING:
            raise ValueError(f"DFlash: it drafts {len(weight)} tokens, and there is no tensor d2t that says which")
        return partial(linear_rows, weight=weight)
    if targets is not None:
        raise ValueError("DFlash: there is a tensor d2t, but no lm_head.weight for its tokens")
    get_head = getattr(unwrapped(model), "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"DFlash: the file has no lm_head.weight, and {type(model).__name__} no get_output_embeddings() that gives its own"
        )
    if is_light_linear(head):
        return partial(linear_rows, weight=head.weight.detach(), bias=head.bias)
    return head
