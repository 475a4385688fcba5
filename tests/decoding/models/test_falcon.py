"""Falcon: layers with attention of their own, which call PyTorch's with the mask that they are given."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from packaging.version import Version
from support.generation import greedy_of_transformers
from support.kinds import GREEDY, few_methods
from support.small_models import ragged_prompts

from benchmarks.architectures.models import tiny_model
from pass_ext import NGram, generate

if Version(transformers.__version__) < Version("5.24"):
    pytest.skip("the model is that of transformers 5.24", allow_module_level=True)

NEW = 12
IDS, MASK = ragged_prompts(5)
FORMS = {  # those of 40b and 180B are in the table of kinds
    "7b": dict(multi_query=True, new_decoder_architecture=False, parallel_attn=True),
    "11B": dict(new_decoder_architecture=True, num_ln_in_parallel_attn=1),
    "as many heads of keys": dict(
        multi_query=False, num_kv_heads=4, new_decoder_architecture=False, parallel_attn=False, bias=True
    ),
}


def falcon(form, seed=0, attention="eager", **changes):
    from transformers import FalconConfig, FalconForCausalLM

    config = tiny_model("falcon").config.to_dict() | dict(num_kv_heads=2) | FORMS[form] | changes
    torch.manual_seed(seed)
    model = FalconForCausalLM._from_config(FalconConfig.from_dict(config), attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval().requires_grad_(False)


def ours(model, method=None, **options):
    return generate(model, IDS, method, max_new_tokens=NEW, attention_mask=MASK, eos_token_id=[], **options).sequences


@pytest.mark.parametrize("form", FORMS)
def test_every_form_writes_transformers_texts(form):
    model = falcon(form)
    want, drawn = greedy_of_transformers(model, IDS, MASK, NEW, **GREEDY), ours(model, temperature=0.8, seeds=3)
    for name, method in few_methods(model).items():
        assert torch.equal(ours(model, method), want), name
        assert torch.equal(ours(model, method, temperature=0.8, seeds=3), drawn), name
    assert len(want[:, -NEW:].unique()) > 10
    assert model.config._attn_implementation == "eager"


def test_a_model_that_was_built_for_sdpa():
    model = falcon("7b", attention="sdpa")
    assert torch.equal(ours(model, NGram(shortest=1)), greedy_of_transformers(model, IDS, MASK, NEW, **GREEDY))
    assert model.config._attn_implementation == "sdpa"
    assert all(layer.self_attention.config is model.config for layer in model.transformer.h)


def test_a_scale_of_its_own(monkeypatch):
    model = falcon("7b", attention="sdpa")
    plain = greedy_of_transformers(model, IDS, MASK, NEW, **GREEDY)
    with_options(monkeypatch, scale=1.5)
    want = greedy_of_transformers(model, IDS, MASK, NEW, **GREEDY)
    assert torch.equal(ours(model, NGram(shortest=1)), want) and not torch.equal(plain, want)


# ---- refusals ----


def test_alibi_is_refused():
    with pytest.raises(ValueError, match=r"^falcon adds a bias by the distance of tokens to its mask \(alibi\),"):
        ours(falcon("as many heads of keys", alibi=True))


def test_attention_that_is_not_pytorchs(monkeypatch):
    model = falcon("7b")
    attention = type(model.transformer.h[0].self_attention)
    monkeypatch.setattr(attention, "forward", lambda self, hidden_states, **others: (hidden_states, None))
    with pytest.raises(ValueError, match=r"^falcon: FalconForCausalLM has attention of its own and takes no other"):
        ours(model)


def with_options(monkeypatch, **options):
    """Has all attention by PyTorch take these."""
    attend = torch.nn.functional.scaled_dot_product_attention
    other = lambda *inputs, **named: attend(*inputs, **{**named, **options})  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", other)


def test_dropout_is_refused(monkeypatch):
    model = falcon("7b")
    with_options(monkeypatch, dropout_p=0.1)
    with pytest.raises(ValueError, match=r"^pass_ext attention: falcon, layer 0: .* asks for dropout 0\.1"):
        ours(model)
