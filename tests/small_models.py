"""Small random transformers models of each architecture, for tests of decoding and of the hooks."""

import torch

VOCABULARY = 97

_SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    max_position_embeddings=2048,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_GROUPED = dict(_SHAPE, num_key_value_heads=2)
ARCHITECTURES = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": dict(_GROUPED, head_dim=24),
    "mistral": dict(_GROUPED, sliding_window=7),
    "gemma": dict(_GROUPED, head_dim=16),
    "gemma2": dict(_GROUPED, head_dim=16, sliding_window=6),
    "phi": _SHAPE,
    "phi3": _GROUPED,
    "gpt_neox": _SHAPE,
    "opt": {
        key: value for key, value in _SHAPE.items() if key != "intermediate_size"
    } | dict(ffn_dim=96, word_embed_proj_dim=32),
}  # fmt: skip


def small_model(architecture, seed=0, sharpness=3.0, **changes):
    """In fp32 and eval mode; ``sharpness`` makes its laws less flat, so that no two tokens tie."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture, **{**ARCHITECTURES[architecture], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "embed" not in name:
            parameter.mul_(sharpness)
    return model


def ragged_prompts(count, longest=24, seed=0, vocabulary=VOCABULARY):
    """input_ids, padded on the left, and the mask."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    ids = torch.randint(3, vocabulary, (count, longest), generator=generator)
    mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
    return ids * mask, mask
