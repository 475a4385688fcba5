"""custom_generate with models whose cache holds latent keys and values: transformers' own text, and caches refused."""

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


def test_text_without_exchange(deepseek):
    expected = run(deepseek)
    assert torch.equal(run(deepseek, custom_generate=pass_ext.custom_generate(pass_ext.NGram(shortest=1))), expected)
    got = run(deepseek, custom_generate=pass_ext.custom_generate(), return_dict_in_generate=True, use_cache=False)
    assert torch.equal(got.sequences, expected) and got.past_key_values is None


@pytest.mark.parametrize("given", ["filled cache", "dictionary"])
def test_exchange_is_refused(deepseek, given):
    cache = transformers.DynamicCache()
    deepseek(IDS[:, :-1], past_key_values=cache)
    options = {"past_key_values": cache} if given == "filled cache" else {"return_dict_in_generate": True}
    with pytest.raises(ValueError, match=r"deepseek_v3 caches latent keys and values \(kv_lora_rank\)"):
        run(deepseek, custom_generate=pass_ext.custom_generate(), **options)
