"""Small transformers models with random weights, one of each architecture that the integration is tested with."""

import functools

import pytest
import torch

transformers = pytest.importorskip("transformers")

VOCABULARY = 97
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GATED = {**_SHAPE, "intermediate_size": 96, "num_key_value_heads": 2}

# Name -> config class and what it differs in. Those whose name ends in a number have sliding windows.
_CONFIGS = {
    "llama": ("LlamaConfig", {**_GATED, "head_dim": 16}),
    "qwen2": ("Qwen2Config", _GATED),
    "qwen3": ("Qwen3Config", {**_GATED, "head_dim": 16}),
    "mistral": ("MistralConfig", {**_GATED, "head_dim": 16, "sliding_window": None}),
    "gemma": ("GemmaConfig", {**_GATED, "head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {
            **_GATED,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * 2,
        },
    ),
    "phi": ("PhiConfig", _GATED),
    "phi3": ("Phi3Config", _GATED),
    "gpt_neox": ("GPTNeoXConfig", {**_SHAPE, "intermediate_size": 96}),
    "opt": ("OPTConfig", {**_SHAPE, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "mistral_4": ("MistralConfig", {**_GATED, "head_dim": 16, "sliding_window": 4}),
    "gemma2_4": (
        "Gemma2Config",
        {
            **_GATED,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "tie_word_embeddings": False,
            "sliding_window": 4,
        },
    ),
    "stablelm": ("StableLmConfig", _GATED),
    "gpt_oss": ("GptOssConfig", {**_GATED, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "bloom": ("BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
}
FULL_ATTENTION = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi", "phi3", "gpt_neox", "opt"]
SLIDING = ["mistral_4", "gemma2_4"]


@functools.cache
def _weights(name):
    torch.manual_seed(sum(map(ord, name)))
    kind, shape = _CONFIGS[name]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model.state_dict()


def tiny_model(name, **changes):
    """A fresh model in fp32 with a config of its own; the same weights each time, if ``changes`` leaves their shapes alone."""
    kind, shape = _CONFIGS[name]
    config = getattr(transformers, kind)(**{**shape, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(_weights(name))
    return model


def prompts(rows, columns, seed=0, padding=()):
    """``(input_ids, attention_mask)``: random ids, with so many columns of padding left of each row."""
    ids = torch.randint(3, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, columns in enumerate(padding):
        ids[row, :columns], mask[row, :columns] = 0, 0
    return ids, mask
