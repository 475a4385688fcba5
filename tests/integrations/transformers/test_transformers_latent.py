"""custom_generate with models whose caches hold latents: transformers' own text, and caches that both continue."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.small_models import SIZES, prompts  # noqa: E402

import pass_ext  # noqa: E402

IDS = prompts(2, 8)[0]


@pytest.fixture(scope="module")
def deepseek():
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "deepseek_v3",
        **SIZES,
        num_key_value_heads=4,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval().float().requires_grad_(False)


def run(model, **options):
    return model.generate(
        IDS,
        attention_mask=torch.ones_like(IDS),
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )


def new_cache(kind, model):
    return (
        transformers.DynamicCache() if kind == "dynamic" else transformers.StaticCache(model.config, max_cache_len=16)
    )


def test_texts(deepseek):
    expected = run(deepseek)
    assert torch.equal(run(deepseek, custom_generate=pass_ext.custom_generate(pass_ext.NGram(shortest=1))), expected)
    got = run(deepseek, custom_generate=pass_ext.custom_generate(), return_dict_in_generate=True, use_cache=False)
    assert torch.equal(got.sequences, expected) and got.past_key_values is None


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_we_continue_from_their_cache(deepseek, kind):
    cache = new_cache(kind, deepseek)
    deepseek(IDS[:, :5], past_key_values=cache)
    expected = run(deepseek)
    for layer in cache.layers:
        assert layer.keys.shape[1] == layer.values.shape[1] == 1, "latents"
    read = []
    hook = deepseek.model.layers[0].input_layernorm.register_forward_pre_hook(lambda _, x: read.append(x[0].shape[1]))
    got = run(deepseek, past_key_values=cache, custom_generate=pass_ext.custom_generate(pass_ext.NGram(shortest=1)))
    hook.remove()
    assert torch.equal(got, expected)
    assert read[0] == 2 * 3, "the three tokens of each text that the cache does not hold"


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_they_continue_from_our_cache(deepseek, kind):
    """It holds what theirs holds, and their text goes on."""
    ours, theirs = new_cache(kind, deepseek), new_cache(kind, deepseek)
    got = run(deepseek, past_key_values=ours, custom_generate=pass_ext.custom_generate(pass_ext.NGram(shortest=1)))
    assert torch.equal(got, run(deepseek, past_key_values=theirs))
    for mine, layer in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(mine.keys, layer.keys)
        torch.testing.assert_close(mine.values, layer.values)
    longer = torch.ones_like(got)
    options = dict(attention_mask=longer, max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0)
    rest = [deepseek.generate(got, past_key_values=cache, **options) for cache in (ours, theirs)]
    assert torch.equal(*rest)
