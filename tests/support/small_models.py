"""Small transformers models with random weights, one of each architecture, and prompts for them."""

import torch

VOCABULARY = 97

SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
)
_SHAPE = dict(SIZES, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=0)
_GROUPED = dict(_SHAPE, num_key_value_heads=2)
_OPT = {key: value for key, value in _SHAPE.items() if key != "intermediate_size"}
# Its softcap is low and its scores are wide, so that the cap changes results.
_GEMMA2 = dict(_GROUPED, head_dim=16, query_pre_attn_scalar=16, attn_logit_softcapping=2.0, tie_word_embeddings=False)

# Two have sliding windows; gemma2 has them in every other layer.
ARCHITECTURES = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": dict(_GROUPED, head_dim=24),
    "mistral": dict(_GROUPED, sliding_window=7),
    "gemma": dict(_GROUPED, head_dim=16),
    "gemma2": dict(_GEMMA2, sliding_window=6),
    "phi": _SHAPE,
    "phi3": _GROUPED,
    "gpt_neox": _SHAPE,
    "opt": dict(_OPT, ffn_dim=96, word_embed_proj_dim=32),
}
# test_architectures.py has judged these by every method, so other tests over all architectures are slow for them.
JUDGED = ("qwen2", "qwen3", "mistral", "phi3")
_MOE = dict(num_experts_per_tok=2, sliding_window=7)
_QWEN_MOE = dict(num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32, use_sliding_window=True)
# Their window is known to the mask alone, not to the attention call; qwen2_moe has it in every other layer.
MASKS_KNOW_WINDOWS = {
    "phimoe": dict(_GROUPED, **_MOE, num_local_experts=4),
    "qwen2_moe": dict(_GROUPED, **_MOE, **_QWEN_MOE),
}
ODD_HEADS = {
    "afmoe": dict(
        _GROUPED, head_dim=24, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_dense_layers=1
    ),
    "jetmoe": dict(_GROUPED, kv_channels=24, num_local_experts=2, num_experts_per_tok=2),
}
SINKS = {
    "gpt_oss": dict(_GROUPED, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=7),
    "granite_swa": dict(_GROUPED, sliding_window=7, layer_types=["sliding_attention", "full_attention"]),
}
_CHUNKS = dict(attention_chunk_size=8, no_rope_layers=[1, 0], floor_scale=4, attn_scale=0.5)
CHUNKS = {"llama4_text": dict(_GROUPED, **_CHUNKS, head_dim=16, num_local_experts=2, intermediate_size_mlp=96)}
_LATENT = dict(_SHAPE, kv_lora_rank=32, q_lora_rank=24, first_k_dense_replace=2)
# Its table's rows are multiplied, and two of its layers have a window.
SCALED = {
    "gemma3_text": dict(
        _GROUPED, head_dim=16, query_pre_attn_scalar=16, num_hidden_layers=3, sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}  # fmt: skip
# Real head sizes: of the global layers, and of keys and values.
WIDE = {
    "gemma4_text": dict(
        _GROUPED, head_dim=256, global_head_dim=512, num_global_key_value_heads=1, hidden_size_per_layer_input=0,
        sliding_window=7, layer_types=["sliding_attention", "full_attention"],
    ),
    "deepseek_v3": dict(
        _LATENT, num_key_value_heads=4, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    ),
}  # fmt: skip
WITHOUT_WINDOWS = {"mistral": dict(sliding_window=None), "gemma2": dict(layer_types=["full_attention"] * 2)}
REFUSED = {
    "stablelm": _GROUPED,
    "bloom": dict(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4),
}
_ALL = ARCHITECTURES | MASKS_KNOW_WINDOWS | ODD_HEADS | SINKS | CHUNKS | SCALED | WIDE | REFUSED


def small_model(architecture, seed=0, sharpness=3.0, **changes):
    """A model in fp32 and eval mode, without gradients; ``sharpness`` makes its distributions less flat, so that no two tokens
    tie.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture, **{**_ALL[architecture], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "embed" not in name:
            parameter.mul_(sharpness)
        if name.endswith("sinks"):
            parameter.normal_(1.0)  # as heavy as a few keys
    return model


BYTES = 256  # also the id of the end of text


def byte_tokenizer():
    """A token per byte, and one for the end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)} | {"<end>": BYTES}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


def save_byte_model(folder, **changes):
    """A model of two small layers, or with these settings, in a folder, with its tokenizer -> the model."""
    ids = dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"), BYTES)
    model = small_model("llama", vocab_size=BYTES + 1, **ids, **changes)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def prompts(rows, columns, seed=0, padding=()):
    """``(input_ids, attention_mask)``: random ids, with so many columns of padding left of each row."""
    ids = torch.randint(3, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, columns in enumerate(padding):
        ids[row, :columns], mask[row, :columns] = 0, 0
    return ids, mask


def ragged_prompts(count, longest=24, seed=0, vocabulary=VOCABULARY):
    """The same with random padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    ids = torch.randint(3, vocabulary, (count, longest), generator=generator)
    mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
    return ids * mask, mask


def whole_prompts(count, longest=24, seed=0, vocabulary=VOCABULARY):
    """Prompts ``[count, longest]`` without padding or special tokens."""
    return torch.randint(3, vocabulary, (count, longest), generator=torch.Generator().manual_seed(seed))


class Tokens:
    """A tokenizer with the parts that stop strings need: token i is the letter chr(97 + i)."""

    all_special_ids = ()

    def get_vocab(self):
        return {chr(97 + i): i for i in range(VOCABULARY)}

    def _convert_id_to_token(self, token):
        return chr(97 + token)

    def convert_ids_to_tokens(self, tokens):
        return [chr(97 + token) for token in tokens]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) - 97 for letter in text]}

    def __len__(self):
        return VOCABULARY
