"""What transformers' tables lack of a GGUF file of gpt_oss: its config, and the names of its tensors.

    blk.N.ffn_gate_exps, ffn_up_exps   gates and ups of all experts, apart; with their biases
    blk.N.attn_sinks.weight            model.layers.N.self_attn.sinks

Every second layer, from the first, has the window, and the rotation ends where YaRN says, not at whole dimensions: both as in
transformers' config, for the file has neither. Experts' activation is the model's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pass_ext.weights.gguf_rotation import scaling_of

ARCHITECTURE = "gpt-oss"
"""llama.cpp's name."""

_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "expert_feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
_TOKENS = {"eos_token_id": "eos", "bos_token_id": "bos", "pad_token_id": "padding"}
_MODEL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    **{f"attn_{part}.{kind}": f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")},
    **{f"attn_output.{kind}": f"self_attn.o_proj.{kind}" for kind in ("weight", "bias")},
    **{f"ffn_gate_inp.{kind}": f"mlp.router.{kind}" for kind in ("weight", "bias")},
}


def config_of(reader: Any, file: Path) -> Any:
    """The model's config. ValueError for a file that says too little, or has a rotation that is not known here."""
    from transformers import AutoConfig

    start = f"{ARCHITECTURE}."
    said = {
        name.removeprefix(start): field.contents() for name, field in reader.fields.items() if name.startswith(start)
    }
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    missing = [f"{start}{name}" for name in (*_SIZES, "rope.freq_base") if name not in said]
    missing += [name for name in _MODEL if name not in tensors]
    if missing:
        raise ValueError(f"{file.name} is a GGUF file of {ARCHITECTURE} without {', '.join(missing)}")
    scaling = scaling_of(reader, ARCHITECTURE, file) or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn":
        scaling["truncate"] = False
    ids = {ours: reader.fields.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in _TOKENS.items()}
    return AutoConfig.for_model(
        "gpt_oss",
        **{ours: said[name] for name, ours in _SIZES.items()},
        **{ours: None if field is None else field.contents() for ours, field in ids.items()},
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        tie_word_embeddings="output.weight" not in tensors,
        rope_theta=said["rope.freq_base"],
        rope_scaling=scaling,
    )


def names_of(config: Any) -> dict[str, str]:
    """The model's names of the file's tensors; of experts, which have more than one, without its last part."""
    layers = range(config.num_hidden_layers)
    head = {} if config.tie_word_embeddings else {"output.weight": "lm_head.weight"}
    return {
        **_MODEL,
        **head,
        **{f"blk.{layer}.{name}": f"model.layers.{layer}.{ours}" for layer in layers for name, ours in _LAYER.items()},
    }
