"""Tiny models with random weights, one for each causal language model of the installed transformers.

``SIZES`` gives a size by the name of a config's field, in every part of the config; ``CHANGES`` has further settings for single
architectures. Windows are shorter than the texts, so that a wrong window changes them.
"""

from collections.abc import Mapping
from typing import Any

import torch

VOCABULARY = 97
WINDOW = 6  # shorter than the texts
_SPREAD = 1.5  # of a product's results, for input rows of spread 1

SIZES: dict[str, Any] = {
    # widths
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), 64
    ),
    **dict.fromkeys(
        ("backbone_hidden_size", "attention_hidden_size", "lru_width", "embedding_dim", "dim_model_base"), 64
    ),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "ffn_round_up_to_multiple_of"), 64),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dense_intermediate_size"), 96
    ),
    **dict.fromkeys(("ffn_hidden_size", "dff", "dim_ff", "feed_forward_size", "n_inner", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "expert_ffn_size"), 32),
    **dict.fromkeys(("shared_experts_intermediate_size", "router_hidden_size", "ple_embed_dim"), 32),
    # layers and heads
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups"), 2),
    **dict.fromkeys(("num_global_key_value_heads",), 1),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim", "attention_head_size", "dim_head", "d_head"), 16),
    **dict.fromkeys(("query_pre_attn_scalar", "swa_head_dim", "swa_v_head_dim", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("global_head_dim",), 32),
    # latent attention, indexers
    **dict.fromkeys(("kv_lora_rank", "o_lora_rank", "laurel_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "qk_head_dim"), 24),
    **dict.fromkeys(("index_head_dim",), 16),
    **dict.fromkeys(("index_n_heads",), 16),  # so that hardly any score is 0: of equal ones PyTorch takes any
    **dict.fromkeys(("index_topk",), 4),
    # experts
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_layer_interval"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "zero_expert_num"), 1),
    **dict.fromkeys(("decoder_sparse_step",), 1),
    # tokens that end, begin and pad a text, and those that stand for pictures and sound
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    **dict.fromkeys(("image_token_id", "image_token_index", "boi_token_id", "boi_token_index", "sep_token_id"), 90),
    **dict.fromkeys(("video_token_id", "eoi_token_id", "eoi_token_index", "vision_start_token_id", "cls_token_id"), 91),
    **dict.fromkeys(("audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "vision_end_token_id"), 92),
    # the text
    **dict.fromkeys(
        ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCABULARY
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 256),
    **dict.fromkeys(("context_length", "max_target_positions", "max_source_positions"), 256),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("local_attention", "attention_chunk_size"), 2 * WINDOW),
    **dict.fromkeys(("sliding_window_pattern", "full_attention_interval", "global_attn_every_n_layers"), 2),
    "use_sliding_window": True,
    "max_window_layers": 1,
    "tie_word_embeddings": False,
    "is_decoder": True,
    # recurrent layers
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
}

_HEAD_DIMS = frozenset({"head_dim", "kv_channels", "attention_head_dim", "attention_head_size", "dim_head", "d_head"})
HEAD_WIDTHS = _HEAD_DIMS | {
    *("swa_head_dim", "swa_v_head_dim", "global_head_dim", "query_pre_attn_scalar", "rotary_dim", "index_head_dim"),
    *(
        "kv_lora_rank",
        "swa_kv_lora_rank",
        "qk_nope_head_dim",
        "swa_qk_nope_head_dim",
        "qk_rope_head_dim",
        "qk_head_dim",
    ),
    *("v_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"),
}

_WINDOW_THEN_ALL = ["sliding_attention", "full_attention"]
_GEMMA4 = dict(layer_types=_WINDOW_THEN_ALL, global_head_dim=32, hidden_size_per_layer_input=0)
_SHARED_IN_TWO = dict(num_hidden_layers=4, layer_types=_WINDOW_THEN_ALL * 2, num_kv_shared_layers=2)
_RECURRENT_THEN_ALL = ["linear_attention", "full_attention"]
_ROPE_OF_EACH_KIND = {kind: dict(rope_type="default", rope_theta=1e4) for kind in _WINDOW_THEN_ALL}

_QWEN4 = dict(
    num_hidden_layers=4,
    indexer_n_heads=16,
    indexer_kv_heads=1,
    indexer_head_dim=16,
    indexer_budget=8,
    indexer_compress_ratio=2,
    ple_layer_ids=[1, 3],
    heads_per_ngram=2,
    ngram_vocab_size_base=50,
)
_INKLING = dict(
    layer_types=["hybrid_sliding", "hybrid"],
    d_rel=8,
    rel_extent=5,
    log_scaling_n_floor=8,
    log_scaling_alpha=1.0,
    logits_mup_width_multiplier=1.0,
)
_DEEPSEEK4 = dict(
    num_hidden_layers=3,
    layer_types=["compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"],
    mlp_layer_types=["hash_moe", "moe", "hash_moe"],
    compress_rates={
        "compressed_sparse_attention": 2,
        "heavily_compressed_attention": 3,
    },  # several windows in each text
    index_topk=2,
    num_key_value_heads=1,
    partial_rotary_factor=0.5,
    o_groups=2,
)
_DOTS3 = dict(
    layer_types=["indexed_attention", "sliding_attention"],
    swa_num_attention_heads=4,
    swa_num_key_value_heads=4,
    swa_q_lora_rank=24,
    swa_kv_lora_rank=32,
    swa_head_dim=24,
    swa_qk_nope_head_dim=16,
    swa_v_head_dim=16,
)
_LLAMA4 = dict(no_rope_layer_interval=2, floor_scale=4)
_SPARSE_IN_ONE = ["full_attention", "minimax_m3_sparse"]
_WINDOW_IN_ONE = ("cohere2", "flint", "kolibri1", "laguna", "mellum", "ministral", "olmo3")
_ATTENTION_IN_ONE = (
    "bailing_hybrid",
    "granitemoehybrid",
    "kimi_linear",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)

CHANGES: dict[str, dict[str, Any]] = {
    **{name: dict(layer_types=_WINDOW_THEN_ALL) for name in _WINDOW_IN_ONE},
    **{name: dict(layer_types=_RECURRENT_THEN_ALL) for name in _ATTENTION_IN_ONE},
    **{name: dict(text_config=dict(layer_types=_RECURRENT_THEN_ALL)) for name in ("qwen3_5", "qwen3_5_moe")},
    # Its first layer attends: transformers' cache counts a text by that layer. The state of the last one hardly fades.
    "minimax": dict(layer_types=["full_attention", "linear_attention", "full_attention"], num_hidden_layers=3),
    "minimax_m3_vl_text": dict(index_n_heads=2, index_block_size=2, index_topk_blocks=2, layer_types=_SPARSE_IN_ONE),
    "cohere_compass_text": dict(layer_types=_WINDOW_THEN_ALL, rope_parameters=_ROPE_OF_EACH_KIND),
    "dbrx": dict(attn_config=dict(rope_theta=1e4, kv_n_heads=2, clip_qkv=8.0)),
    "beam": dict(layer_types=_WINDOW_THEN_ALL, mlp_layer_types=["dense", "sparse"]),
    "bamba": dict(attn_layer_indices=[1]),
    "deepseek_v4": _DEEPSEEK4,
    "dots3_note_text": _DOTS3,
    "dory": dict(num_hidden_layers=4, n_input_layers=1, n_output_layers=1, layer_types=_WINDOW_THEN_ALL * 2),
    "falcon_h1": dict(mamba_d_ssm=128),
    "gemma3": dict(text_config=dict(layer_types=_WINDOW_THEN_ALL)),
    "gemma3_text": dict(layer_types=_WINDOW_THEN_ALL),
    "gemma3n_text": _SHARED_IN_TWO,
    "gemma4": dict(text_config=dict(_SHARED_IN_TWO, global_head_dim=32)),
    "gemma4_text": _GEMMA4,
    "gemma4_unified": dict(text_config=_GEMMA4),
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "hy_v4": dict(indexer_types=["full", "shared"]),
    "inkling_text": _INKLING,
    **{name: dict(layer_types=_INKLING["layer_types"]) for name in ("inkling2_text", "inkling2_loop_text")},
    "lara_mini": dict(num_hidden_layers=3, layer_types=[*_WINDOW_THEN_ALL, "linear_attention"]),
    "lfm3": dict(num_hidden_layers=3, layer_types=["conv", *_WINDOW_THEN_ALL]),
    "llama4": dict(text_config=_LLAMA4),
    "llama4_text": _LLAMA4,
    "longcat_flash": dict(head_dim=8),
    "mamba2": dict(num_heads=8),
    "qwen4_exp": dict(text_config=_QWEN4),
    "qwen4_exp_text": _QWEN4,
    "smollm3": dict(no_rope_layer_interval=2, layer_types=_WINDOW_THEN_ALL),
    "recurrent_gemma": dict(num_hidden_layers=3),
    "reformer": dict(axial_pos_shape=[16, 16], axial_pos_embds_dim=[32, 32]),
    "roc_bert": dict(pronunciation_vocab_size=VOCABULARY, shape_vocab_size=VOCABULARY),
    "blt": dict(encoder_hash_byte_group_vocab=101),
    "xlstm": dict(qk_dim_factor=1.0),
    "xmod": dict(languages=["en_XX"], default_language="en_XX"),
    "zamba": dict(attention_hidden_size=128, layers_block_type=["linear_attention", "hybrid"]),
    "zamba2": dict(layers_block_type=["linear_attention", "hybrid"]),
    "zaya": dict(num_experts_per_tok=1),
}
NOT_TRIED = {
    "dots3_note": "its text model is dots3_note_text",
    "gemma3n": "its picture encoder needs timm; its text model is gemma3n_text",
    "gemma4_assistant": "a draft that reads its target's keys and values, no model of its own",
    "gemma4_unified_assistant": "a draft that reads its target's keys and values, no model of its own",
    "musicgen": "transformers cannot build it from this config: it writes sound",
    "musicgen_melody": "transformers cannot build it from this config: it writes sound",
}


SMALL_HEADS_ONLY = {
    **dict.fromkeys(("bamba", "granitemoehybrid", "mamba2"), "the heads of its states must add up to its width"),
    "helium": "its heads must add up to its width",
    **dict.fromkeys(("deepseek_v4", "qwen4_exp", "qwen4_exp_text"), "its heads and its indexers' share a rotation"),
}
"""Why ``tiny_config(real_heads=True)`` makes no model of these."""


def model_types() -> dict[str, str]:
    """Name of an architecture's config -> name of its class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def tiny_config(
    model_type: str,
    *,
    real_heads: bool = False,
    sizes: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Any:
    """The architecture's config with these sizes, as far as it has such fields. real_heads: but heads, latents and states of a
    head as wide as its default config has them; sizes, changes: further ones, which count first."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    own = _merged(CHANGES.get(model_type, {}), changes or {})
    return kind(**_sizes(kind, {**SIZES, **(sizes or {})}, own, HEAD_WIDTHS if real_heads else frozenset()))


def _merged(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """Both, part by part; what ``then`` says counts."""
    both = {name: _merged(first[name], then[name]) for name in first.keys() & then if isinstance(then[name], dict)}
    return {**first, **then, **both}


def _sizes(kind: Any, given: Mapping[str, Any], changes: dict[str, Any], left_out: frozenset[str]) -> dict[str, Any]:
    """The keywords for a class of configs."""
    from transformers import AutoConfig

    fields = getattr(kind, "__dataclass_fields__", {})
    known = {kind.attribute_map.get(name, name) for name in fields} | set(fields)
    lists = {name for name, field in fields.items() if isinstance(field.default, (list, tuple))}
    sizes = {
        name: size
        for name, size in given.items()
        if name in known - left_out
        and (name not in lists or isinstance(size, list))  # a size alone does not fit a list
    }
    changes = {name: value for name, value in changes.items() if name not in left_out}
    has_width, is_none = bool(_HEAD_DIMS & known), "head_dim" in fields and fields["head_dim"].default is None
    if left_out and (is_none or not has_width) and getattr(whole := kind(), "num_attention_heads", None):
        head = whole.hidden_size // whole.num_attention_heads
        if is_none:
            sizes["head_dim"] = head
        else:  # a head is a part of the model's width
            width = SIZES["num_attention_heads"] * head
            sizes |= {name: width for name, size in sizes.items() if size == SIZES["hidden_size"]}
    if "kv_lora_rank" in known:
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for name, part in getattr(kind, "sub_configs", {}).items():
        part_changes = changes.get(name, {})
        if part is AutoConfig:  # then the class of the default
            part = type(getattr(kind(), name, None))
        if part is not type(None):
            sizes[name] = {**_sizes(part, given, part_changes, left_out), "model_type": part.model_type}
    return {**sizes, **{name: value for name, value in changes.items() if name not in getattr(kind, "sub_configs", {})}}


def tiny_model(model_type: str, seed: int = 0, *, real_heads: bool = False, **changes: Any) -> Any:
    """A random model of the architecture in fp32 and eval mode, without gradients. changes: of its config; real_heads: as
    ``tiny_config`` takes it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = tiny_config(model_type, real_heads=real_heads)
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            wide = parameter.shape[-1] if "embed" not in name else _SPREAD**2
            torch.nn.init.normal_(parameter, std=_SPREAD / wide**0.5)
        if name.endswith("A_log"):  # states fade slowly, so that a wrong one changes the text
            torch.nn.init.uniform_(parameter, -4.0, -2.0)
        if name.endswith("correct_output_scale"):  # zeros, which hide what layers look up by themselves
            torch.nn.init.normal_(parameter)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # the experts of each token
            table.copy_(torch.rand(len(table), config.n_routed_experts).topk(table.shape[1]).indices)
    return model.eval().requires_grad_(False)
