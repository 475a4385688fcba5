"""Loading models: a GGUF file is converted once and kept, what is kept is the same model, and nothing is left half written."""

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf
import numpy as np
from small_models import small_model

from pass_ext import checkpoint
from pass_ext.checkpoint import load_checkpoint, plain_copy

HIDDEN, LAYERS, FFN, VOCABULARY = 32, 2, 64, 258


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("PASS_EXT_CACHE", str(folder))
    return folder


@pytest.fixture
def file(tmp_path):
    """A llama of two small layers with a token per byte, as a GGUF file."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
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
        writer.add_tensor(name, (random.standard_normal(shape) / 5).astype(np.float32))

    add("token_embd.weight", VOCABULARY, HIDDEN)
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


def same(model, other):
    ids = torch.arange(20)[None]
    with torch.no_grad():
        return torch.equal(model(ids).logits, other(ids).logits)


def test_a_gguf_file_is_converted_once(file, cache, monkeypatch):
    model, tokenizer = load_checkpoint(file, torch.float32)
    (folder,) = (cache / "models").iterdir()
    assert folder.name.startswith("tiny-") and not hasattr(model.config, "quantization_config")
    monkeypatch.setattr(checkpoint, "plain_copy", None)  # a second conversion would raise
    again, same_tokenizer = load_checkpoint(str(file), torch.float32)
    assert same(model, again) and not any(weight.requires_grad for weight in again.parameters())
    text = "cab <end> naïve ab"
    assert tokenizer(text).input_ids == same_tokenizer(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == same_tokenizer.decode(tokenizer(text).input_ids)
    assert again.generation_config.eos_token_id == model.generation_config.eos_token_id


def test_another_dtype_or_another_file_is_another_model(file, cache):
    load_checkpoint(file, torch.float32)
    assert load_checkpoint(file, torch.bfloat16)[0].dtype == torch.bfloat16
    assert len(list((cache / "models").iterdir())) == 2
    os.utime(file, (1, 1))
    load_checkpoint(file, torch.float32)
    assert len(list((cache / "models").iterdir())) == 3


def test_large_models_are_not_kept(file, cache, monkeypatch):
    monkeypatch.setattr(checkpoint, "MOST_KEPT", 1000)
    load_checkpoint(file, torch.float32)
    assert not cache.exists()


def test_a_model_that_cannot_be_kept_loads_all_the_same(file, cache, monkeypatch):
    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    model, _ = load_checkpoint(file, torch.float32)
    assert model.dtype == torch.float32 and list((cache / "models").iterdir()) == []


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such model file: .*no\.gguf"):
        load_checkpoint(tmp_path / "no.gguf", torch.float32)
    with pytest.raises(OSError):
        load_checkpoint(str(Path(tmp_path, "nothing")), torch.float32)


def test_a_plain_copy_computes_the_same():
    model = small_model("llama")
    assert same(plain_copy(model, torch.float32), model)
    assert plain_copy(model, torch.bfloat16).dtype == torch.bfloat16 and model.dtype == torch.float32
