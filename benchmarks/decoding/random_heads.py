"""Checkpoints of heads with random weights, for a model of any size: one of each form that ``load_drafter`` reads.

Their drafts are never right, so a text beside them shows what drafting costs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BLOCK, RANK, OFFERED, CHANNELS = 16, 256, 16, 16
"""Of DFlash's forms: rows of a block; the rank of transitions; tokens that a selector offers; channels of a group."""


class _Tensors(dict[str, Tensor]):
    """Random tensors by their names in a checkpoint."""

    def add(self, name: str, *shape: int) -> None:
        """A matrix whose products keep the size of rows."""
        self[name] = (torch.randn(shape) / shape[-1] ** 0.5).to(torch.bfloat16)

    def norms(self, width: int, *names: str) -> None:
        """Norms that change nothing."""
        self.update({name: torch.ones(width, dtype=torch.bfloat16) for name in names})

    def layer(self, at: str, config: Any, width: int | None = None) -> None:
        """A decoder layer in Llama's form. width: of the rows that go into its attention."""
        d, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        width = width or d
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            self.add(f"{at}self_attn.{name}_proj.weight", heads * dim, width)
        self.add(f"{at}self_attn.v_proj.weight", config.num_key_value_heads * dim, width)
        self.add(f"{at}self_attn.o_proj.weight", d, config.num_attention_heads * dim)
        for name, shape in (("gate", (inner, d)), ("up", (inner, d)), ("down", (d, inner))):
            self.add(f"{at}mlp.{name}_proj.weight", *shape)
        self.norms(d, f"{at}input_layernorm.weight", f"{at}post_attention_layernorm.weight")


def eagle3(folder: Path, target: Any, drafted: int | None = None, layers: int = 1, masked: bool = False) -> None:
    """EAGLE-3, or P-EAGLE. drafted: tokens that it has logits for; None: all."""
    config, tensors = target.config, _Tensors()
    d, vocabulary, count = config.hidden_size, config.vocab_size, config.num_hidden_layers
    tensors.add("fc.weight", d, 3 * d)
    tensors.add("lm_head.weight", drafted or vocabulary, d)
    tensors.norms(d, "norm.weight", "layers.0.hidden_norm.weight")
    for number in range(layers):
        tensors.layer(f"layers.{number}.", config, d if number else 2 * d)
    if drafted is not None:
        tokens = torch.randperm(vocabulary)[:drafted].sort().values
        tensors["d2t"] = tokens - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, tokens, True)
    more: dict[str, Any] = {}
    if masked:
        tensors.add("mask_hidden", 1, 1, 3 * d)
        more = dict(mask_token_id=0)
    _write(folder, tensors, dict(
        speculators_model_type="peagle" if masked else "eagle3", draft_vocab_size=drafted or vocabulary,
        eagle_aux_hidden_state_layer_ids=[2, count // 2, count - 3], **more,
        transformer_layer_config=_layer_settings(config, layers, "llama"),
    ))  # fmt: skip


def mtp(folder: Path, target: Any) -> None:
    """An MTP layer, by DeepSeek's names."""
    config, tensors = target.config, _Tensors()
    d, at = config.hidden_size, f"model.layers.{config.num_hidden_layers}."
    tensors.add(f"{at}eh_proj.weight", d, 2 * d)
    tensors.norms(d, *(f"{at}{name}.weight" for name in ("enorm", "hnorm", "shared_head.norm")))
    tensors.layer(at, config)
    _write(folder, tensors, {"architectures": [type(target).__name__]})


def dflash(folder: Path, target: Any, kind: str = "dflash", layers: int = 5, block: int = BLOCK) -> None:
    """DFlash, DSpark ("dspark") or DFlash-2 ("dflash2")."""
    config, tensors = target.config, _Tensors()
    d, vocabulary, count = config.hidden_size, config.vocab_size, config.num_hidden_layers
    taps = [1 + i * (count - 4) // (layers - 1) for i in range(layers)]
    tensors.add("fc.weight", d, len(taps) * d)
    tensors.norms(d, "hidden_norm.weight", "norm.weight")
    for number in range(layers):
        at = f"layers.{number}."
        tensors.layer(at, config)
        tensors.norms(config.head_dim, f"{at}self_attn.q_norm.weight", f"{at}self_attn.k_norm.weight")
        for name in ("attention_conv", "mlp_conv") if kind == "dflash2" else ():
            tensors.add(f"{at}{name}.base_kernel", 2, 2, d)
            tensors.add(f"{at}{name}.kernel_projection.weight", 2 * 2 * d // CHANNELS, d)
    settings: dict[str, Any] = dict(mask_token_id=0, target_layer_ids=taps)
    if kind == "dspark":
        tensors.add("markov_head.markov_w1.weight", vocabulary, RANK)
        tensors.add("markov_head.markov_w2.weight", vocabulary, RANK)
        settings |= dict(markov_rank=RANK, markov_head_type="vanilla")
    if kind == "dflash2":
        tensors.add("candidate_selector.hidden_projection.weight", RANK, d)
        tensors.add("candidate_selector.predecessor_codebook", vocabulary, RANK)
        tensors.add("candidate_selector.successor_codebook", vocabulary, RANK)
        settings |= dict(conv_kernel_size=2, conv_group_size=CHANNELS, selector_rank=RANK, selector_top_k=OFFERED)
    name = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel", "dflash2": "DFlash2DraftModel"}[kind]
    _write(folder, tensors, dict(
        _layer_settings(config, layers, "qwen3"), architectures=[name], block_size=block, num_target_layers=count,
        dflash_config=settings,
    ))  # fmt: skip


def assistant(folder: Path, target: Any) -> None:
    """Gemma 4's assistant, of four layers half as wide as the model's."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    text = target.config.get_text_config(decoder=True)
    own = dict(
        hidden_size=text.hidden_size // 2, intermediate_size=text.intermediate_size // 2, num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0, num_kv_shared_layers=0,
    )  # fmt: skip
    settings = Gemma4TextConfig(**{**text.to_dict(), **own})
    made = Gemma4AssistantForCausalLM(
        Gemma4AssistantConfig(text_config=settings, backbone_hidden_size=text.hidden_size)
    )
    made.to(torch.bfloat16).save_pretrained(folder)


FORMS: dict[str, Callable[[Path, Any], None]] = {
    "EAGLE-3": lambda folder, target: eagle3(folder, target, 8192),
    "EAGLE-3, all tokens": eagle3,
    "P-EAGLE": lambda folder, target: eagle3(folder, target, 8192, layers=4, masked=True),
    "MTP": mtp,
    "DFlash": dflash,
    "DSpark": lambda folder, target: dflash(folder, target, "dspark", block=7),
    "DFlash-2": lambda folder, target: dflash(folder, target, "dflash2", block=8),
}
"""For a model with layers in Llama's form. EAGLE-3 drafts as many tokens as ``train-head`` chooses."""


def _layer_settings(config: Any, layers: int, model_type: str) -> dict[str, Any]:
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "rms_norm_eps", "hidden_act", "max_position_embeddings",
    )  # fmt: skip
    named = {name: getattr(config, name) for name in names}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return dict(named, model_type=model_type, num_hidden_layers=layers, rope_parameters=rope)


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
