"""Which transformers models ``generate`` takes: those it would decode wrongly are refused by name and left as they were."""

import pytest
import torch

pytest.importorskip("transformers")

from pass_ext import generate

_SHAPE = dict(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=96,
    max_position_embeddings=64,
)
_DECODER = dict(
    vocab_size=97,
    d_model=64,
    decoder_layers=1,
    encoder_layers=1,
    num_hidden_layers=1,
    decoder_attention_heads=4,
    decoder_ffn_dim=96,
    is_decoder=True,
    is_encoder_decoder=False,
)
IDS = torch.tensor([[5, 6, 7]])


def model_of(architecture, **shape):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **shape)).eval().requires_grad_(False)


@pytest.mark.parametrize("architecture", ["bart", "mbart", "blenderbot", "pegasus"])
def test_models_that_take_no_positions(architecture):
    model = model_of(architecture, **_DECODER)
    with pytest.raises(ValueError, match=rf"{architecture}: \w+ForCausalLM.forward takes no position_ids"):
        generate(model, IDS, max_new_tokens=2)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("bert", {}, "BertSelfAttention is not causal"),
        ("doge", {"keep_window_size": 4}, "DogeAttention hands down an attention_mask"),
        ("gpt_oss", {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}, r"attention sinks \(s_aux\)"),
    ],
)
def test_what_attention_is_handed_down(architecture, changes, message):
    model = model_of(architecture, **_SHAPE, **changes)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        generate(model, IDS, max_new_tokens=2)
    assert model.config._attn_implementation == before


def test_unknown_tensors_are_refused(monkeypatch):
    from transformers.models.llama import modeling_llama

    model = model_of("llama", **_SHAPE)
    forward = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(
        modeling_llama.LlamaAttention, "forward", lambda *a, **k: forward(*a, **k, position_bias=torch.ones(3))
    )
    with pytest.raises(ValueError, match="LlamaAttention hands down 'position_bias'"):
        generate(model, IDS, max_new_tokens=2)
