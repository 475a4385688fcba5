"""``write_gguf``: a small model with random weights as a GGUF file."""

import gguf
import numpy as np

HIDDEN, LAYERS, FFN, VOCABULARY = 32, 2, 64, 258


def write_gguf(path, kind="F32", *, tied=False, missing=()):
    """Writes a llama of two small layers with a token per byte, its matrices in this format; returns the path. missing: tensors
    that it leaves out."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    writer = gguf.GGUFWriter(path, "llama")
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
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*bytes_to_unicode().values(), "ab", "<end>"])
    writer.add_token_types([1] * (VOCABULARY - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(VOCABULARY - 1)
    writer.add_eos_token_id(VOCABULARY - 1)
    random = np.random.default_rng(0)

    def add(name, *shape):
        numbers, own = (random.standard_normal(shape) / 5).astype(np.float32), gguf.GGMLQuantizationType[kind]
        if name in missing:
            return
        if kind == "F32" or len(shape) == 1:
            writer.add_tensor(name, numbers)
        else:
            writer.add_tensor(name, gguf.quantize(numbers, own), raw_dtype=own)

    add("token_embd.weight", VOCABULARY, HIDDEN)
    if not tied:
        add("output.weight", VOCABULARY, HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", HIDDEN, HIDDEN)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{name}.weight", FFN, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, FFN)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
