"""read_cache and write_cache: the contents of one cache, put into another, continue the text alike; refusals name the cache.
The cache by its names in transformers before 5.24 and since.
"""

import weakref

import pytest
import torch
from torch.nn.functional import pad

transformers = pytest.importorskip("transformers")

from packaging.version import Version  # noqa: E402
from support.small_models import SIZES, prompts, small_model  # noqa: E402

from pass_ext.decoding.models.cache import full_cache, texts_in_cache  # noqa: E402
from pass_ext.decoding.models.parts import cache_name, given_cache  # noqa: E402
from pass_ext.integrations.transformers import cache_length, custom_generate, read_cache, write_cache  # noqa: E402

NOW = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"
AT_LEAST_5 = int(transformers.__version__.split(".")[0]) >= 5


def make_cache(kind, model, columns=16):
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=columns)
    return transformers.DynamicCache(config=model.config) if kind == "dynamic" else transformers.DynamicCache()


@torch.no_grad()
def forward(model, ids, cache, begin):
    where = {} if AT_LEAST_5 else {"cache_position": torch.arange(begin, begin + ids.shape[1])}
    return model(ids, past_key_values=cache, use_cache=True, **where).logits


@pytest.mark.parametrize("target", ["dynamic", "bare", "static"])
@pytest.mark.parametrize("source", ["dynamic", "static"])
def test_another_cache_continues_alike(source, target):
    model = small_model("llama")
    ids = prompts(2, 9)[0]
    whole = forward(model, ids, make_cache("dynamic", model), 0)
    source_cache, target_cache = make_cache(source, model), make_cache(target, model)
    assert cache_length(source_cache) == 0
    forward(model, ids[:, :6], source_cache, 0)
    for layer in range(2):
        keys, values = read_cache(source_cache, layer)
        assert keys.shape == values.shape == (2, 2, 6, 16)
        assert keys.data_ptr() == source_cache.layers[layer].keys.data_ptr(), "a view"
        write_cache(target_cache, layer, keys, values)
        assert cache_length(target_cache, layer) == 6
    torch.testing.assert_close(forward(model, ids[:, 6:], target_cache, 6), whole[:, 6:], atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("starts", [[0, 0], [2, 2], [0, 2], [3, 3]])
def test_texts_in_a_cache_are_its_columns(starts):
    """Copies only where the texts begin at several columns, or one ends after the cache."""
    model = small_model("llama")
    cache = make_cache("dynamic", model)
    forward(model, prompts(2, 9)[0], cache, 0)
    columns = (torch.tensor(starts)[:, None] + torch.arange(7)).clamp(max=8)
    for layer, pair in enumerate(texts_in_cache(cache, range(2), torch.tensor(starts), 7, model)):
        for found, stored in zip(pair, read_cache(cache, layer), strict=True):
            expected = torch.stack([rows[:, at] for rows, at in zip(stored, columns, strict=True)]).transpose(1, 2)
            assert torch.equal(found, expected)
            is_view = found.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
            assert is_view == (starts in ([0, 0], [2, 2]))


def test_a_full_cache_keeps_the_first_rows_as_they_are():
    """Those of a larger tensor are copied, and so is what comes later; its memory does not wait for the garbage collector."""
    whole, keys, values, more = torch.randn(4, 1, 2, 6, 16).unbind()
    cache = full_cache(small_model("llama").config)
    kept = cache.update(keys.clone(), values.clone(), 0)
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in read_cache(cache, 0)]
    copied = cache.update(whole, values, 1)[0]
    assert torch.equal(copied, whole) and copied.data_ptr() != whole.data_ptr()
    assert torch.equal(cache.update(more, more, 0)[0], torch.cat([keys, more], 2)) and cache_length(cache) == 12
    layer = weakref.ref(cache.layers[0])
    del cache
    assert layer() is None


def test_a_static_layer_keeps_its_addresses_and_forgets_the_rest():
    model = small_model("llama")
    cache, ids = make_cache("static", model), prompts(1, 9)[0]
    forward(model, ids, cache, 0)
    layer = cache.layers[0]
    tensors = [layer.keys, layer.values, *([layer.cumulative_length] if AT_LEAST_5 else [])]
    new = torch.randn(2, 1, 2, 4, 16)
    write_cache(cache, 0, new[0], new[1])
    assert all(now is then for now, then in zip([layer.keys, layer.values], tensors, strict=False))
    if AT_LEAST_5:
        assert layer.cumulative_length is tensors[2]
    assert torch.equal(layer.keys[:, :, :4], new[0]) and not layer.keys[:, :, 4:].any()
    assert torch.equal(layer.values[:, :, :4], new[1]) and not layer.values[:, :, 4:].any()
    assert [cache_length(cache, i) for i in range(2)] == [4, 9]


def test_other_caches_are_refused():
    model = small_model("llama")
    rows = torch.zeros(1, 2, 3, 16)
    sliding = make_cache("dynamic", small_model("mistral"))
    for call in (lambda: read_cache(sliding, 0), lambda: write_cache(sliding, 0, rows, rows)):
        with pytest.raises(ValueError, match=r"DynamicSlidingWindowLayer.*only DynamicLayer and StaticLayer"):
            call()
    with pytest.raises(ValueError, match="offloading"):
        read_cache(transformers.DynamicCache(config=model.config, offloading=True), 0)
    with pytest.raises(TypeError, match="got tuple"):
        read_cache(((rows, rows),), 0)
    with pytest.raises(ValueError, match="is empty"):
        read_cache(make_cache("dynamic", model), 1)
    with pytest.raises(ValueError, match="2 layers so far, got layer 2"):
        read_cache(make_cache("dynamic", model), 2)


def test_content_that_does_not_fit_is_refused():
    model = small_model("llama")
    cache = make_cache("static", model, columns=4)
    forward(model, prompts(1, 3)[0], cache, 0)
    for shape in ((1, 2, 5, 16), (2, 2, 3, 16), (1, 2, 3, 8)):
        with pytest.raises(ValueError, match=r"is static and holds \[1, 2, 4, 16\]"):
            write_cache(cache, 0, torch.zeros(shape), torch.zeros(shape))
    with pytest.raises(ValueError, match="must be"):
        write_cache(cache, 0, torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 4, 16))


HEADS = {
    # The layers of one model have different heads.
    "gemma4_text": dict(
        head_dim=16,
        global_head_dim=32,
        num_key_value_heads=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
        hidden_size_per_layer_input=0,
    ),
    # Values are not as wide as keys.
    "mimo_v2_flash": dict(
        head_dim=24,
        v_head_dim=16,
        swa_head_dim=24,
        swa_v_head_dim=16,
        num_key_value_heads=2,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        layer_types=["full_attention", "full_attention"],
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
    ),
}


@pytest.mark.parametrize("architecture", HEADS)
def test_custom_generate_hands_back_heads_of_their_own_sizes(architecture):
    """transformers continues from a cache of pass_ext, and pass_ext from a cache of transformers."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if architecture not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {architecture}")
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **SIZES, **HEADS[architecture])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    ids, mask = prompts(2, 9, padding=(0, 3))
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, **options).sequences
    half = model.generate(ids, attention_mask=mask, max_new_tokens=4, custom_generate=custom_generate(), **options)
    assert torch.equal(half.sequences, expected[:, :13])
    filled, seen = transformers.DynamicCache(), pad(mask, (0, 3), value=1)
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    model(half.sequences[:, :-1], attention_mask=seen, position_ids=positions, past_key_values=filled)
    options.update(attention_mask=pad(mask, (0, 4), value=1), max_new_tokens=4)
    theirs = model.generate(half.sequences, past_key_values=half.past_key_values, **options)
    ours = model.generate(half.sequences, past_key_values=filled, custom_generate=custom_generate(), **options)
    assert torch.equal(theirs.sequences, expected) and torch.equal(ours.sequences, expected)


# ---- names ----


def _former(ids, past_key_values=None, use_cache=True):
    """A forward of another package, that has not followed."""


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_found_by_either_name(name):
    cache = transformers.DynamicCache()
    assert given_cache({name: cache, "use_cache": True}) is cache
    assert given_cache({name: None}) is given_cache({}) is None


def test_a_forward_is_asked_for_its_own_name():
    model = small_model("llama")
    assert cache_name(_former) == "past_key_values"
    assert cache_name(model.forward) == cache_name(model.get_decoder().forward) == NOW
    ids = torch.tensor([[5, 6, 7]])
    result = model(ids, use_cache=True)
    assert cache_name(type(result)) == NOW
    assert result[NOW].get_seq_length() == 3
