"""A small Llama with random weights as a folder that vLLM and transformers load, and texts that n-grams often guess.

Token v is most often followed by its successor in a cycle of length CYCLE, so texts repeat themselves.
"""

import json

import torch
from safetensors.torch import save_file

CYCLE = 8
WIDTH, LAYERS, HEADS, INNER = 64, 2, 2, 96


def successor(token):
    return token // CYCLE * CYCLE + (token + 1) % CYCLE


def write_small_llama(folder, vocabulary, dtype=torch.float32, seed=0):
    """Writes config.json and model.safetensors into the folder."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale):
        return torch.randn(*shape, generator=generator) * scale

    embedding = normal(vocabulary, WIDTH, scale=1.0)
    head = normal(vocabulary, WIDTH, scale=0.1)
    for token in range(vocabulary):
        head[successor(token)] += 0.07 * embedding[token]
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(WIDTH)}
    for i in range(LAYERS):
        shapes = {
            **{f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"},
            "mlp.gate_proj": (INNER, WIDTH),
            "mlp.up_proj": (INNER, WIDTH),
            "mlp.down_proj": (WIDTH, INNER),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.{name}.weight"] = normal(*shape, scale=0.08)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = torch.ones(WIDTH)
    save_file(
        {name: t.to(dtype) for name, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=vocabulary, hidden_size=WIDTH,
        intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        head_dim=WIDTH // HEADS, max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=10000.0, hidden_act="silu",
        tie_word_embeddings=False, torch_dtype=str(dtype).split(".")[1], bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
