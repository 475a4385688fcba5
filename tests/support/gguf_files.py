"""``write_gguf``, ``write_gguf_of_experts``: a small model with random weights as a GGUF file."""

import gguf
import numpy as np

HIDDEN, LAYERS, FFN, VOCABULARY, EXPERTS = 32, 2, 64, 258, 4


def write_gguf(path, kind="F32", *, tied=False, missing=(), mtp=False, architecture="llama"):
    """Writes a llama of two small layers with a token per byte, its matrices in this format; returns the path. missing: tensors
    that it leaves out. mtp: with parts of an MTP layer."""
    matrices = {"token_embd": (VOCABULARY, HIDDEN)} | ({} if tied else {"output": (VOCABULARY, HIDDEN)})
    vectors = {"output_norm": HIDDEN}
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrices[f"blk.{layer}.{name}"] = HIDDEN, HIDDEN
        matrices |= {f"blk.{layer}.{name}": (FFN, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        matrices[f"blk.{layer}.ffn_down"] = HIDDEN, FFN
        vectors |= {f"blk.{layer}.{name}": HIDDEN for name in ("attn_norm", "ffn_norm")}
    if mtp:
        matrices[f"blk.{LAYERS}.nextn.eh_proj"] = HIDDEN, 2 * HIDDEN
        vectors |= {f"blk.{LAYERS}.nextn.{name}": HIDDEN for name in ("enorm", "hnorm")}
    return _write(path, architecture, kind, matrices, vectors, missing, lambda writer: None)


def write_gguf_of_experts(path, kind, *, width=768, missing=()):
    """Writes a qwen3_moe of two small layers in the same way. width: of an expert; transformers knows no other than 768."""
    heads = HIDDEN // 2

    def more(writer):
        writer.add_key_length(heads)
        writer.add_value_length(heads)
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(width)

    matrices, vectors = dict.fromkeys(("token_embd", "output"), (VOCABULARY, HIDDEN)), {"output_norm": HIDDEN}
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrices[f"blk.{layer}.{name}"] = HIDDEN, HIDDEN
        matrices |= {f"blk.{layer}.{name}": (EXPERTS, width, HIDDEN) for name in ("ffn_gate_exps", "ffn_up_exps")}
        matrices[f"blk.{layer}.ffn_down_exps"] = EXPERTS, HIDDEN, width
        matrices[f"blk.{layer}.ffn_gate_inp"] = EXPERTS, HIDDEN
        vectors |= {f"blk.{layer}.{name}": HIDDEN for name in ("attn_norm", "ffn_norm")}
        vectors |= {f"blk.{layer}.{name}": heads for name in ("attn_q_norm", "attn_k_norm")}
    return _write(path, "qwen3moe", kind, matrices, vectors, missing, more)


def _write(path, architecture, kind, matrices, vectors, missing, more):
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // 2)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    more(writer)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*bytes_to_unicode().values(), "ab", "<end>"])
    writer.add_token_types([1] * (VOCABULARY - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(VOCABULARY - 1)
    writer.add_eos_token_id(VOCABULARY - 1)
    random, own = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    for name, shape in (matrices | vectors).items():
        numbers = (random.standard_normal(shape) / 5).astype(np.float32)
        if f"{name}.weight" in missing:
            continue
        if kind == "F32" or name in vectors or name.endswith("ffn_gate_inp"):
            writer.add_tensor(f"{name}.weight", numbers)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quantize(numbers, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
