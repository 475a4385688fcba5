"""Which transformers models ``generate`` takes: what it would decode wrongly is refused by name, with the model left as it was."""

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
