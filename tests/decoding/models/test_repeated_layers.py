"""Layers that attend several times in a call: twice with other values (DiffLlama), or in loops (HRM-Text, Dory)."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from packaging.version import Version
from support.generation import greedy_of_transformers
from support.small_models import ragged_prompts

from benchmarks.architectures.models import tiny_model
from pass_ext import EarlyExitDraft, MultiCandidate, NGram, Session, Speculative, custom_generate, generate

if Version(transformers.__version__) < Version("5.24"):
    pytest.skip("the models are those of transformers 5.24", allow_module_level=True)

NEW = 12
GREEDY = dict(eos_token_id=None, pad_token_id=0)
IDS, MASK = ragged_prompts(5)
CALLS = {"diffllama": 4, "hrm_text": 16, "dory": 6}  # attention calls in a call of the model


@pytest.fixture(scope="module", params=CALLS)
def model(request):
    return tiny_model(request.param)


def ours(model, method=None, **options):
    return generate(model, IDS, method, max_new_tokens=NEW, attention_mask=MASK, eos_token_id=[], **options).sequences


def test_each_attention_call_has_a_cache(model):
    """In 8 bits too, where the texts are those of plain decoding."""
    session = Session(model, capacity=60, cache_dtype=torch.int8)
    want = ours(model, session=session)
    assert len(session.caches) == CALLS[model.config.model_type]
    for method in (NGram(shortest=1), MultiCandidate(model, (2, 2))):
        assert torch.equal(ours(model, method, session=session), want)


# ---- refusals ----


@pytest.mark.parametrize("name", ["diffllama", "dory"])
def test_caches_of_other_models_stay_apart(name):
    model, options = (
        tiny_model(name),
        dict(input_ids=IDS, attention_mask=MASK, do_sample=False, max_new_tokens=3, **GREEDY),
    )
    decode = custom_generate()
    with pytest.raises(ValueError, match=rf"^custom_generate: {name} caches .* cannot read or write"):
        model.generate(custom_generate=decode, return_dict_in_generate=True, **options)
    model.config.model_type = "unknown"
    with pytest.raises(ValueError, match=r"^custom_generate: unknown has layers that attend several times, and their"):
        model.generate(custom_generate=decode, return_dict_in_generate=True, **options)
    want = model.generate(**options)
    assert torch.equal(model.generate(custom_generate=decode, **options), want)


def test_an_early_exit_needs_layers_that_attend_once():
    model = tiny_model("diffllama")
    message = r"^DiffLlamaForCausalLM attends 4 times in its 2 layers, which early exit cannot cut"
    with pytest.raises(ValueError, match=message):
        EarlyExitDraft(model, 1)


def test_an_early_exit_of_layers_that_attend_again_unannounced(monkeypatch):
    """As of a model whose config does not say so."""
    model = tiny_model("diffllama")
    monkeypatch.setattr("pass_ext.decoding.models.features.repeated_attention._TWICE", "unknown")
    with pytest.raises(ValueError, match=r"^diffllama: the model has more layers than 1"):
        ours(model, Speculative(EarlyExitDraft(model, 1), 2))


def test_keys_of_the_last_loop_alone():
    """Earlier loops would see a token's last keys in later calls, and their own in the call that has the token."""
    model = tiny_model("dory", recurrent_kv_cache_mode="last_loop")
    with pytest.raises(ValueError, match=r"^dory keeps the keys of its last loop alone \(recurrent_kv_cache_mode"):
        ours(model)
    model = tiny_model("dory", recurrent_kv_cache_mode="last_loop", n_recurrent_loops=1)
    assert torch.equal(ours(model, NGram(shortest=1)), greedy_of_transformers(model, IDS, MASK, NEW, **GREEDY))
