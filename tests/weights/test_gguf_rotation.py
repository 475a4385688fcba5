"""The rotation that a GGUF file states beside its base: linear, YaRN, and Llama 3's factors; and tensors without a place."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from support.gguf_files import VOCABULARY, write_gguf
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import pass_ext
from pass_ext.checkpoint import load_checkpoint
from pass_ext.weights.gguf import config_of

BASE = 10000.0 ** -(np.arange(8) / 8)
"""The frequencies of ``write_gguf``."""


def llama3_factors(factor=8.0, low=1.0, high=4.0, trained=8192):
    """As its makers define them, frequency by frequency."""
    found = []
    for length in 2 * math.pi / BASE:
        if length < trained / high:
            found.append(1.0)
        elif length > trained / low:
            found.append(factor)
        else:
            share = (trained / length - low) / (high - low)
            found.append(1 / ((1 - share) / factor + share))
    return np.array(found, np.float32)


def yarn(**options):
    config = AutoConfig.for_model(
        "llama", hidden_size=32, num_attention_heads=2, max_position_embeddings=512, rope_theta=10000.0,
        rope_scaling=dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64, **options),
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")


YARN = {"type": "yarn", "factor": 8.0, "original_context_length": 64}
ROTATIONS = {
    "linear": (dict(scaling={"type": "linear", "factor": 4.0}), lambda: (BASE / 4, 1.0)),
    "a factor alone": (dict(scaling={"factor": 4.0}), lambda: (BASE / 4, 1.0)),
    "YaRN": (dict(scaling=YARN), yarn),
    "YaRN, its bounds": (
        dict(scaling=YARN | {"yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0, "finetuned": 1}),
        lambda: yarn(beta_fast=8.0, beta_slow=2.0),
    ),
    "Llama 3": (dict(more={"rope_freqs.weight": llama3_factors()}), lambda: (BASE / llama3_factors(), 1.0)),
    "Llama 3.2": (dict(more={"rope_freqs.weight": llama3_factors(32.0)}), lambda: (BASE / llama3_factors(32.0), 1.0)),
    "none": (dict(scaling={"type": "none"}), lambda: (BASE, 1.0)),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_the_rotation_is_the_files(tmp_path, monkeypatch, name):
    monkeypatch.setenv("PASS_EXT_CACHE", str(tmp_path))
    options, expected = ROTATIONS[name]
    file, (frequencies, scale) = write_gguf(tmp_path / "tiny.gguf", "Q8_0", **options), expected()
    tokens = torch.randint(0, VOCABULARY, (1, 100), generator=torch.Generator().manual_seed(0))
    model, dense = (load_checkpoint(file, torch.float32, weights=weights)[0] for weights in ("stored", "dense"))
    for each in (model, dense):
        rotation = each.model.rotary_emb
        np.testing.assert_allclose(rotation.inv_freq.numpy(), frequencies, rtol=1e-5)
        assert rotation.attention_scaling == scale
    got, exact = model(tokens).logits, dense(tokens).logits
    assert (got - exact).abs().max() < 1e-4 * exact.abs().max()
    plain = pass_ext.generate(model, tokens, max_new_tokens=8, eos_token_id=[])
    assert plain.stats.backend == "fused"
    text = model.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(plain.sequences, text)


def test_of_gemma_3_it_is_that_of_layers_without_a_window(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", architecture="gemma3", scaling={"type": "linear", "factor": 8.0})
    rotation = config_of(file).rope_parameters
    assert rotation["full_attention"].items() >= {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}.items()
    assert rotation["sliding_attention"]["rope_type"] == "default"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(scaling={"type": "longrope", "factor": 4.0}), r"a rotation that is not read: linear .* type longrope"),
        (dict(scaling={"type": "linear"}), r"a rotation that is not read: linear ones with a factor"),
        (dict(scaling=YARN | {"yarn_log_multiplier": 0.1}), r"is not read: .* yarn_log_multiplier 0\.1"),
        (
            dict(more={"rope_freqs.weight": llama3_factors(high=8.0)}),
            r"its rope_freqs\.weight is not as Llama 3\.1 has it",
        ),
        (
            dict(more={"blk.0.attn_q.bias": np.zeros(32, np.float32)}),
            r"tiny\.gguf has tensors for which LlamaForCausalLM has no place: blk\.0\.attn_q\.bias",
        ),
    ],
)
def test_what_would_be_dropped_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        load_checkpoint(write_gguf(tmp_path / "tiny.gguf", **options))
