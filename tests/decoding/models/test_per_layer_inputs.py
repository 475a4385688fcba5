"""Gemma 3n and 4: layers with embeddings of their own, and layers that share the keys and values of an earlier one."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from packaging.version import Version
from support.generation import greedy_of_transformers, slots_for
from support.small_models import ragged_prompts

from benchmarks.architectures.models import tiny_model
from pass_ext import (
    EarlyExitDraft,
    NGram,
    PaSS,
    Plain,
    Session,
    Tree,
    custom_generate,
    generate,
)

if Version(transformers.__version__) < Version("5.24"):
    pytest.skip("layers share keys by transformers' cache", allow_module_level=True)

NEW = 12
GREEDY = dict(eos_token_id=None, pad_token_id=0)
IDS, MASK = ragged_prompts(5)


@pytest.fixture(scope="module", params=["gemma3n_text", "gemma4"])
def model(request):
    """Of its four layers two have keys of their own, one of them a window."""
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def gemma():
    return tiny_model("gemma3n_text")


def ours(model, method=None, **options):
    return generate(model, IDS, method, max_new_tokens=NEW, attention_mask=MASK, eos_token_id=[], **options).sequences


def test_the_embeddings_of_layers_change_the_text(gemma):
    other = tiny_model("gemma3n_text")
    other.model.embed_tokens_per_layer.weight.mul_(-1)
    want = greedy_of_transformers(other, IDS, MASK, NEW, **GREEDY)
    assert torch.equal(ours(other, NGram(shortest=1)), want)
    assert not torch.equal(ours(gemma), want)


@pytest.mark.parametrize("deep_layers", [0, 4])
def test_a_slot_counts_as_padding(gemma, deep_layers):
    """And its vectors are added to each of the four streams of a layer's input."""
    slots, session = slots_for(gemma, rank=3, deep_layers=deep_layers), Session(gemma, 1, 64)
    session.set_slots(slots, 2)
    text, tokens = torch.tensor([5, 6, -1, -2]), torch.tensor([[5, 6, 0, 0]])
    with session.model.attached():
        logits = session.call(session.packed([Tree.chain(3)]), text)
    rows = torch.cat((gemma.get_input_embeddings()(text[:2]), slots.weight[:2]))
    hooks = []
    for number in range(deep_layers):
        vectors = torch.cat((torch.zeros(2, 64), slots.deep[number, :2]))
        add = lambda _, inputs, vectors=vectors: (inputs[0] + vectors, *inputs[1:])  # noqa: E731
        hooks.append(gemma.model.layers[number].register_forward_pre_hook(add))
    alone = gemma(inputs_embeds=rows[None], per_layer_inputs=gemma.model.get_per_layer_inputs(tokens)).logits[0]
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)
    without = gemma(inputs_embeds=rows[None]).logits[0]
    assert not torch.allclose(logits, without, rtol=1e-4, atol=1e-4)


def test_layers_that_share_keys_have_one_cache(model):
    """And no memory is kept for more; gemma4's second cache is unlike the first."""
    session = Session(model)
    ours(model, NGram(shortest=1), session=session)
    assert len(session.caches) == 2
    assert held(session) == sum(cache.nbytes for pair in session.caches for cache in pair)


def held(session):
    """Bytes of memory of a session's caches."""
    storages = [cache.untyped_storage() for pair in session.caches for cache in pair]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_caches_without_windows_go_out_and_in():
    """Where layers share keys, transformers' caches have layers that hold nothing."""
    gemma = tiny_model("gemma3n_text", layer_types=["full_attention"] * 4)
    decode = custom_generate(NGram(shortest=1))
    options = dict(input_ids=IDS, attention_mask=MASK, do_sample=False, **GREEDY)
    want = gemma.generate(max_new_tokens=NEW, **options)
    half = gemma.generate(max_new_tokens=5, custom_generate=decode, return_dict_in_generate=True, **options)
    longer = torch.cat([MASK, MASK.new_ones(len(MASK), 5)], 1)
    options.update(input_ids=half.sequences, attention_mask=longer)
    for who in ({}, {"custom_generate": decode}):
        cache = copy.deepcopy(half.cache)
        assert torch.equal(gemma.generate(max_new_tokens=NEW - 5, cache=cache, **who, **options), want), who


# ---- refusals ----


def test_another_way_to_look_tokens_up(monkeypatch):
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextModel

    model = tiny_model("gemma3n_text")
    monkeypatch.delattr(Gemma3nTextModel, "project_per_layer_inputs")
    with pytest.raises(
        ValueError, match=r"^gemma3n_text looks tokens up again in every layer, and Gemma3nTextModel has no"
    ):
        ours(model)


def test_keys_that_only_a_cache_of_transformers_has():
    """As in transformers 4, whose shared layers compute keys of their own without a cache."""
    model = tiny_model("gemma3n_text")
    model.model.layers[3].self_attn.k_proj = torch.nn.Linear(64, 32)
    with pytest.raises(ValueError, match=r"^gemma3n_text has layers that read the keys of other layers"):
        ours(model)


def test_an_early_exit_cuts_no_layers_that_hang_together():
    for changes, what in (
        ({}, "one table of embeddings for all its layers"),
        (dict(hidden_size_per_layer_input=0), "layers that share the keys of others"),
    ):
        model = tiny_model("gemma3n_text")
        for name, value in changes.items():
            setattr(model.config, name, value)
        with pytest.raises(ValueError, match=f"Gemma3nForCausalLM has {what}"):
            EarlyExitDraft(model, 1)


def test_a_layer_that_stops_sharing_is_named(gemma, monkeypatch):
    """Caches are found by the order of attention calls, so a later call must make as many."""
    model, calls = tiny_model("gemma3n_text"), []
    forward = model.model.layers[3].self_attn.forward

    def attends_once(*inputs, **named):
        calls.append(1)
        return forward(*inputs, **named) if len(calls) == 1 else (named["hidden_states"], None)

    model.model.layers[3].self_attn.forward = attends_once
    message = r"^gemma3n_text: layers attended in the order \[0, 1, 2\], in the first call in the order \[0, 1, 2, 3\]"
    with pytest.raises(ValueError, match=message):
        generate(model, IDS, Plain(), max_new_tokens=3, attention_mask=MASK, eos_token_id=[])


def test_slots_with_two_passes_alone(gemma):
    ids = IDS[:1, -3:]
    method = PaSS(slots_for(gemma), passes=2, tree=Tree.chain(3), rows=24)
    want = greedy_of_transformers(gemma, ids, torch.ones_like(ids), NEW, **GREEDY)
    assert torch.equal(generate(gemma, ids, method, max_new_tokens=NEW, eos_token_id=[]).sequences, want)
