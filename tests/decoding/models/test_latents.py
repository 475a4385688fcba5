"""Models with multi-head latent attention: caches of latents, texts of transformers, and layers that keep expanded heads."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from support.generation import greedy_of_transformers, slots_for
from support.small_models import WIDE, prompts, ragged_prompts, small_model
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import pass_ext
from benchmarks.architectures.models import tiny_model
from pass_ext import NGram, PaSS, Session, Tree, generate
from pass_ext.decoding.models.features import latents
from pass_ext.decoding.models.parts import cache_name
from pass_ext.decoding.session import session as sessions
from pass_ext.modules.slot_adapters import AdapterSize, SlotAdapters

pytestmark = pytest.mark.skipif(not hasattr(DeepseekV3Attention, "expand_kv"), reason="before transformers 5.24")

FAMILIES = (
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu", "axk1"),
    *("kimi_linear", "bailing_hybrid"),
)
NEW = 8


@pytest.fixture(scope="module")
def deepseek():
    return small_model("deepseek_v3", **SMALL)


# Latents of 32 numbers and rotated keys of 8; heads of 16 + 8 numbers, and values of 24.
SMALL = dict(qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
ONE, EXPANDED = (1, 48, 32), (4, 32, 32)  # heads and padded widths of a layer's caches


def shapes(session):
    return {(keys.shape[2], keys.shape[3], values.shape[3]) for keys, values in session.caches}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_caches_latents_and_writes_transformers_texts(family):
    model = tiny_model(family)
    ids, mask = ragged_prompts(8)
    want = greedy_of_transformers(model, ids, mask, NEW, eos_token_id=None, pad_token_id=0)
    options = dict(max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
    session = Session(model, capacity=64)
    assert torch.equal(generate(model, ids, session=session, **options).sequences, want)
    assert shapes(session) == {(1, 32, 16)}, "16 numbers of a latent and 8 of a rotated key, padded"
    assert all(values.data_ptr() == keys.data_ptr() for keys, values in session.caches)
    slots = slots_for(model)
    for method in (
        NGram(shortest=1),
        PaSS(slots, tree=Tree([-1, 0, 0, 1, 1, 2]), rows=24),
        PaSS(slots, passes=2, tree=Tree.from_branching((2, 2)), rows=24),
    ):
        used = session if isinstance(method, NGram) else None
        got = generate(model, ids, method, session=used, **options).sequences
        assert torch.equal(got, want), method
    custom = pass_ext.custom_generate(NGram(shortest=1))
    got = greedy_of_transformers(model, ids, mask, NEW, eos_token_id=None, pad_token_id=0, custom_generate=custom)
    assert torch.equal(got, want), "custom_generate"


def test_long_prompts_attend_to_expanded_heads(deepseek, monkeypatch):
    """More rows than products of ours take, in pieces, after a beginning that the session holds, and in a ragged batch."""
    monkeypatch.setattr("pass_ext.decoding.session.reading.MAX_TREE_NODES", 300)
    model = small_model("deepseek_v3", **SMALL, max_position_embeddings=1024)
    expanded, heads = [], latents.Latents.heads
    monkeypatch.setattr(latents.Latents, "heads", lambda self, keys: expanded.append(len(keys)) or heads(self, keys))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (2, 700), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :300] = 0
    want = greedy_of_transformers(model, ids, mask, 8, eos_token_id=None, pad_token_id=0)
    for method in (None, NGram(shortest=1)):
        expanded.clear()
        got = generate(model, ids, method, max_new_tokens=8, attention_mask=mask, eos_token_id=[])
        assert torch.equal(got.sequences, want)
        assert sorted(set(expanded)) == [400, 700], "the last pieces, of 300 rows, after their beginnings"


def test_pasts_with_and_without_padding(deepseek, monkeypatch):
    monkeypatch.setattr(sessions, "_FIRST_POSITIONS", 10)
    ids = prompts(3, 8)[0]
    options = dict(max_new_tokens=NEW, eos_token_id=[])
    session = Session(deepseek, capacity=40)
    want = generate(deepseek, ids, session=session, **options).sequences
    assert shapes(session) == {ONE} and all(v.data_ptr() == k.data_ptr() for k, v in session.caches)
    views = [(keys[:, :5], values[:, :5]) for keys, values in session.caches]
    copies = [(keys.clone(), values.clone()) for keys, values in views]
    cut = [(keys[..., :40].clone(), values.clone()) for keys, values in views]  # without the padding
    for past in (views, copies, cut):
        begun = Session(deepseek, past=(past, [5, 3, 4]))
        assert torch.equal(generate(deepseek, ids, NGram(shortest=1), session=begun, **options).sequences, want)
    one = Session(deepseek, past=([(k[:1], v[:1]) for k, v in copies], 4))
    several = generate(deepseek, ids[:1], session=one, num_return_sequences=2, temperature=0.8, seeds=3, **options)
    fresh = generate(deepseek, ids[:1], num_return_sequences=2, temperature=0.8, seeds=3, **options)
    assert torch.equal(several.sequences, fresh.sequences)


@pytest.mark.parametrize("how", ["parameter", "data", "in place"])
def test_weights_changed_meanwhile_expand_what_was_cached_before_too(how):
    """As transformers has it, whose caches hold latents too."""
    ids = prompts(1, 7)[0]

    def changed(model):
        layer = model.model.layers[0].self_attn.kv_b_proj
        weight = -layer.weight.flip(0)
        if how == "parameter":
            layer.weight = nn.Parameter(weight, requires_grad=False)
        elif how == "data":
            layer.weight.data = weight
        else:
            layer.weight.copy_(weight)

    model, written = small_model("deepseek_v3", **SMALL), []

    class Streamer:
        put = end = lambda *_: None

        def put_step(self, tokens, accepted):
            written.append(len(tokens))
            if len(written) == 5:
                changed(model)

    session = Session(model, run_ahead=False)
    got = generate(model, ids, max_new_tokens=NEW, eos_token_id=[], session=session, streamer=Streamer()).sequences

    model, cache, text = small_model("deepseek_v3", **SMALL), transformers.DynamicCache(), ids
    for new in range(NEW):
        if new == sum(written[:5]):
            changed(model)
        past = {cache_name(type(model).forward): cache}
        logits = model(text[:, cache.get_seq_length() :], **past).logits
        text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(got, text)
    assert not torch.equal(
        got, generate(small_model("deepseek_v3", **SMALL), ids, max_new_tokens=NEW, eos_token_id=[]).sequences
    )


def biased(part):
    part.kv_b_proj.bias = nn.Parameter(torch.zeros(part.kv_b_proj.out_features), requires_grad=False)


def hooked(part):
    part.kv_b_proj.register_forward_hook(lambda *_: None)


def replaced(part):
    part.expand_kv = part.expand_kv


@pytest.mark.parametrize("change", [biased, hooked, replaced])
def test_layers_that_expand_otherwise_keep_their_heads(change):
    model = small_model("deepseek_v3", **SMALL)
    ids, mask = ragged_prompts(4)
    want = greedy_of_transformers(model, ids, mask, NEW, eos_token_id=None, pad_token_id=0)
    for layer in model.model.layers:
        change(layer.self_attn)
    session = Session(model)
    options = dict(max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
    assert torch.equal(generate(model, ids, session=session, **options).sequences, want)
    assert shapes(session) == {EXPANDED}
    with pytest.raises(ValueError, match=r"deepseek_v3 caches latent keys and values \(kv_lora_rank\)"):
        greedy_of_transformers(
            model, ids, mask, 2, custom_generate=pass_ext.custom_generate(), return_dict_in_generate=True
        )


def test_methods_that_compute_something_else_are_not_believed(monkeypatch):
    expand = DeepseekV3Attention.expand_kv

    def doubled(self, latents, rotated):
        keys, values = expand(self, latents, rotated)
        return keys, 2 * values

    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", doubled)
    model = small_model("deepseek_v3", **SMALL)
    ids, mask = ragged_prompts(4)
    want = greedy_of_transformers(model, ids, mask, NEW, eos_token_id=None, pad_token_id=0)
    session = Session(model)
    got = generate(model, ids, session=session, max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
    assert torch.equal(got.sequences, want) and shapes(session) == {EXPANDED}


def test_adapters_of_the_layer_that_expands_are_refused(deepseek):
    place = "0.self_attn.kv_b_proj"
    slots = slots_for(deepseek, adapters=SlotAdapters({place: AdapterSize(32, 160, 2)}))
    with pytest.raises(ValueError, match=f"adapter for {place}, which expands latents"):
        generate(deepseek, prompts(1, 5)[0], PaSS(slots, rows=8), max_new_tokens=2)


def test_real_head_sizes():
    """DeepSeek-V3's 128 + 64 and 128 numbers of a head."""
    model = small_model("deepseek_v3", kv_lora_rank=512)
    assert WIDE["deepseek_v3"]["qk_nope_head_dim"] == 128
    ids, mask = ragged_prompts(4)
    want = greedy_of_transformers(model, ids, mask, NEW, eos_token_id=None, pad_token_id=0)
    session = Session(model, capacity=64)
    options = dict(max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
    for method in (None, NGram(shortest=1)):
        assert torch.equal(generate(model, ids, method, session=session, **options).sequences, want)
    assert shapes(session) == {(1, 576, 512)}
