"""attn_implementation="pass_ext": generations and single forwards against transformers' own sdpa, and refusals."""

import functools

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.small_models import ARCHITECTURES, SINKS, WITHOUT_WINDOWS, prompts, small_model  # noqa: E402

from pass_ext import Tree, pack_trees  # noqa: E402
from pass_ext.integrations import transformers as hooks  # noqa: E402

hooks.register()
AT_LEAST_5 = int(transformers.__version__.split(".")[0]) >= 5


# Scores so wide that every mask, window and softcap changes the result.
sharp_model = functools.partial(small_model, sharpness=15.0)


def generate(model, ids, mask, implementation, **options):
    model.set_attn_implementation(implementation)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **options}
    return model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **options)


def sdpa_or_eager(model):
    """sdpa, or eager for Gemma 2: it has a softcap, which sdpa refuses (5.x) or leaves out (4.57)."""
    return "eager" if model.config.model_type == "gemma2" else "sdpa"


@torch.no_grad()
def logits(model, implementation, *args, **options):
    model.set_attn_implementation(implementation)
    return model(*args, **options).logits


# ---- whole generations ----


@pytest.mark.parametrize("padding", [(), (0, 5, 2)], ids=["full", "left-padded"])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name,changes", [(name, {}) for name in ARCHITECTURES] + [*WITHOUT_WINDOWS.items()], ids=str)
def test_generate_gives_the_tokens_of_sdpa(name, changes, cache, padding):
    model = sharp_model(name, **changes)
    ids, mask = prompts(3, 9, padding=padding)
    expected = generate(model, ids, mask, sdpa_or_eager(model), cache_implementation=cache)
    assert torch.equal(generate(model, ids, mask, "pass_ext", cache_implementation=cache), expected)
    assert len(set(expected[0, 9:].tolist())) > 3, "a model that repeats itself shows little"


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_beams_and_several_sequences(name):
    model = sharp_model(name)
    ids, mask = prompts(2, 7, padding=(3, 0))
    for options in ({"num_beams": 3, "num_return_sequences": 2}, {"num_return_sequences": 3, "do_sample": True}):
        torch.manual_seed(1)
        expected = generate(model, ids, mask, "sdpa", **options)
        torch.manual_seed(1)
        assert torch.equal(generate(model, ids, mask, "pass_ext", **options), expected)


# ---- single forwards ----


@pytest.mark.parametrize("window", [1, 2, 4, 5])
def test_the_window_is_that_of_transformers_at_its_edge(window):
    ids, mask = prompts(2, 11, padding=(0, 3))
    model = sharp_model("mistral", sliding_window=window)
    expected = logits(model, "sdpa", ids, attention_mask=mask)
    ours = logits(model, "pass_ext", ids, attention_mask=mask)
    seen = mask.bool()
    torch.testing.assert_close(ours[seen], expected[seen], atol=3e-5, rtol=1e-5)
    other = logits(sharp_model("mistral", sliding_window=window + 1), "sdpa", ids, attention_mask=mask)
    assert (other - expected)[seen].abs().max() > 1e-2, "the test must notice a window that is off by one"


@pytest.mark.parametrize("name", SINKS)
def test_sinks_are_those_of_eager(name):
    model = sharp_model(name, sharpness=3.0)
    ids, mask = prompts(2, 11, padding=(0, 3))
    expected = logits(model, "eager", ids, attention_mask=mask)
    ours = logits(model, "pass_ext", ids, attention_mask=mask)
    torch.testing.assert_close(ours[mask.bool()], expected[mask.bool()], atol=3e-5, rtol=1e-5)
    written = [generate(model, ids, mask, implementation) for implementation in ("eager", "pass_ext")]
    assert torch.equal(*written)


def test_more_rows_than_a_call_takes():
    model = sharp_model("llama", max_position_embeddings=1200)
    ids, mask = prompts(2, 1100, padding=(0, 1030))
    expected = logits(model, "sdpa", ids, attention_mask=mask, logits_to_keep=40)
    ours = logits(model, "pass_ext", ids, attention_mask=mask, logits_to_keep=40)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_right_padding_of_one_forward():
    model = sharp_model("qwen2")
    ids, mask = prompts(2, 8)
    mask[0, 5:] = 0
    expected = logits(model, "sdpa", ids, attention_mask=mask)
    ours = logits(model, "pass_ext", ids, attention_mask=mask)
    torch.testing.assert_close(ours[mask.bool()], expected[mask.bool()], atol=3e-5, rtol=1e-5)


def test_packed_texts_do_not_see_each_other():
    """transformers recognises texts packed into one row by their position ids; the mask is then one of blocks."""
    model = sharp_model("llama")
    ids, _ = prompts(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
    ours = logits(model, "pass_ext", ids, position_ids=positions, use_cache=False)
    apart = torch.cat([logits(model, "sdpa", ids[:, a:b]) for a, b in ((0, 4), (4, 7), (7, 9))], 1)
    torch.testing.assert_close(ours, apart, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_dense_mask_of_the_user_is_followed(name, dtype):
    model = sharp_model(name)
    ids, tree = prompts(2, 10)[0], Tree([-1, 0, 0, 1, 2])
    mask = torch.ones(2, 1, 5, 10, dtype=torch.bool)
    mask[:, 0, :, 5:] = (tree.visible >> torch.arange(5) & 1).bool()
    mask[1, :, :, :2] = False
    mask_argument = mask if dtype == torch.bool else torch.where(mask, 0.0, torch.finfo(dtype).min)
    positions = tree.positions(5).expand(2, -1)
    results = []
    for implementation in ("sdpa", "pass_ext"):
        cache = transformers.DynamicCache()
        logits(model, "sdpa", ids[:, :5], past_key_values=cache, use_cache=True)
        results.append(
            logits(
                model,
                implementation,
                ids[:, 5:],
                attention_mask=mask_argument,
                position_ids=positions,
                past_key_values=cache,
            )
        )
    torch.testing.assert_close(results[1], results[0], atol=3e-5, rtol=1e-5)


def test_a_mask_that_was_written_to_is_read_again():
    model, ids = sharp_model("llama"), prompts(1, 6)[0]
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    logits(model, "pass_ext", ids, attention_mask=mask)
    mask[..., 2:, 1] = False
    expected = logits(model, "sdpa", ids, attention_mask=mask)
    torch.testing.assert_close(logits(model, "pass_ext", ids, attention_mask=mask), expected, atol=3e-5, rtol=1e-5)


# ---- trees ----

TREES = [Tree([-1, 0, 1, 0]), Tree([-1, 0, 0, 1, 1, 2, 5])]


def tree_forward(model, implementation, static, trees, padding, **options):
    """Logits of one tree step after 6 columns of prompt."""
    batch, nodes = len(trees), max(map(len, trees))
    ids, mask = prompts(batch, 6, padding=padding)
    rows = prompts(batch, nodes, seed=5)[0]
    prefix = mask.sum(1)
    positions = torch.stack(
        [
            torch.nn.functional.pad(tree.positions(int(n)), (0, nodes - len(tree)))
            for tree, n in zip(trees, prefix, strict=True)
        ]
    )
    if static:
        config = model.config
        cache = transformers.StaticCache(config=config, max_cache_len=24)
    else:
        cache = transformers.DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    logits(model, implementation, ids, attention_mask=mask, past_key_values=cache, use_cache=True,
           position_ids=(mask.cumsum(1) - 1).clamp(min=0))  # fmt: skip
    extra = {} if AT_LEAST_5 else {"cache_position": torch.arange(6, 6 + nodes)}
    return logits(
        model, implementation, rows, position_ids=positions, past_key_values=cache, use_cache=True, **extra, **options
    ), prefix, cache  # fmt: skip


def dense_mask(trees, padding, columns):
    nodes = max(map(len, trees))
    mask = torch.zeros(len(trees), 1, nodes, columns, dtype=torch.bool)
    for b, tree in enumerate(trees):
        mask[b, 0, : len(tree), padding[b] : 6] = True
        bits = tree.visible >> torch.arange(len(tree)) & 1
        mask[b, 0, : len(tree), 6 : 6 + len(tree)] = bits.bool()
    return mask


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("padding", [(0, 0), (2, 2), (0, 4)])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "opt"])
def test_a_tree_step_equals_a_dense_mask(name, padding, static):
    """In place on transformers' cache: ragged trees, ragged prefixes."""
    if name == "opt" and not AT_LEAST_5:
        pytest.skip("OPT in transformers 4.57 builds masks itself")
    model = sharp_model(name)
    packed = pack_trees(TREES)
    columns = 24 if static else 6 + packed.max_nodes
    expected, prefix, filled = tree_forward(
        model, "sdpa", static, TREES, padding, attention_mask=dense_mask(TREES, padding, columns)
    )
    step = hooks.TreeStep(packed.visible, packed.cu_nodes, prefix, packed.max_nodes, packed.depths)
    ours, _, cache = tree_forward(model, "pass_ext", static, TREES, padding, pass_ext_tree=step)
    for b, tree in enumerate(TREES):
        torch.testing.assert_close(ours[b, : len(tree)], expected[b, : len(tree)], atol=3e-5, rtol=1e-5)
    # transformers 4.57 does not count the columns of a static cache whose keys are 0, as those of padding are here.
    assert int(cache.get_seq_length()) == int(filled.get_seq_length()), "the nodes are in the cache, after the prefix"
    chain, _, _ = tree_forward(model, "pass_ext", static, TREES, padding)
    assert (chain - ours)[1].abs().max() > 1e-2, "without the step it is a chain"


def test_a_tree_step_through_windows():
    """Windows count text positions, so siblings see equally far back."""
    model = sharp_model("mistral", sliding_window=4)
    tree = TREES[1]
    packed = pack_trees([tree])
    mask = dense_mask([tree], (0,), 6 + len(tree))
    position = torch.cat([torch.arange(6), tree.positions(6)])
    mask &= position > tree.positions(6)[:, None] - 4
    # A sliding cache of transformers drops columns; a cache made without the config keeps them.
    ids, rows = prompts(1, 6)[0], prompts(1, len(tree), seed=5)[0]
    results = []
    step = hooks.TreeStep(packed.visible, packed.cu_nodes, torch.tensor([6]), packed.max_nodes, packed.depths)
    for implementation, options in (("sdpa", {"attention_mask": mask}), ("pass_ext", {"pass_ext_tree": step})):
        cache = transformers.DynamicCache()
        logits(model, "sdpa", ids, past_key_values=cache, use_cache=True)
        results.append(
            logits(model, implementation, rows, position_ids=tree.positions(6)[None], past_key_values=cache, **options)
        )
    torch.testing.assert_close(results[1], results[0], atol=3e-5, rtol=1e-5)
    flat = hooks.TreeStep(packed.visible, packed.cu_nodes, torch.tensor([6]), packed.max_nodes)
    with pytest.raises(ValueError, match="expected depths"):
        logits(model, "pass_ext", rows, past_key_values=transformers.DynamicCache(), pass_ext_tree=flat)


def test_tree_steps_that_do_not_fit_are_refused():
    model = sharp_model("llama")
    packed = pack_trees(TREES)
    mask = torch.ones(2, 6 + packed.max_nodes, dtype=torch.long)
    mask[1, 0] = 0
    for prefix, message in (
        ([6, 6], r"expected prefix_lens \[6, 5\]"),
        ([7, 5], "columns before"),
        ([6], "2 requests"),
    ):
        step = hooks.TreeStep(packed.visible, packed.cu_nodes, torch.tensor(prefix), packed.max_nodes)
        with pytest.raises(ValueError, match=message):
            tree_forward(model, "pass_ext", False, TREES, (0, 0), pass_ext_tree=step, attention_mask=mask)
    few = hooks.TreeStep(packed.visible, packed.cu_nodes, torch.tensor([6, 6]), packed.max_nodes - 1)
    with pytest.raises(ValueError, match="at most max_nodes = 6"):
        tree_forward(model, "pass_ext", False, TREES, (0, 0), pass_ext_tree=few)


# ---- what is refused ----


def test_use_switches_or_raises():
    model = sharp_model("llama")
    assert hooks.use(model) is model
    assert model.config._attn_implementation == "pass_ext"
    for name in ("bloom", "stablelm"):
        model = sharp_model(name)
        before = model.config._attn_implementation
        with pytest.raises(ValueError, match=f"{name}.*stays with '{before}'"):
            hooks.use(model)
        assert model.config._attn_implementation == before


def test_registering_twice_changes_nothing():
    hooks.register()
    from transformers import AttentionInterface

    assert AttentionInterface()["pass_ext"] is hooks.attention


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("llama", {"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])}, "left"),
        ("llama", {"attention_mask": torch.full((1, 1, 5, 5), -3.0)}, "bias"),
        ("llama", {"attention_mask": torch.ones(1, 2, 5, 5, dtype=torch.bool)}, r"\[1, 1, 5, keys\]"),
        ("llama", {"alibi": torch.ones(5)}, "alibi"),
        ("llama", {"pass_ext_tree": 3}, "TreeStep"),
    ],
)
def test_unimplemented_arguments_are_refused(name, given, message):
    model = sharp_model(name)
    with pytest.raises((ValueError, TypeError), match=message):
        logits(model, "pass_ext", prompts(1, 5)[0], **given)


def test_a_dense_mask_whose_prefix_differs_between_rows_is_refused():
    model, ids = sharp_model("llama"), prompts(1, 8)[0]
    cache = transformers.DynamicCache()
    logits(model, "sdpa", ids[:, :5], past_key_values=cache, use_cache=True)
    mask = torch.ones(1, 1, 3, 8, dtype=torch.bool).tril(5)
    mask[0, 0, 1, 2] = False
    with pytest.raises(ValueError, match="same columns"):
        logits(model, "pass_ext", ids[:, 5:], attention_mask=mask, past_key_values=cache)


def test_training_is_refused():
    model, ids = sharp_model("llama", attention_dropout=0.1).requires_grad_(), prompts(1, 5)[0]
    model.set_attn_implementation("pass_ext")
    with pytest.raises(RuntimeError, match=r"no gradients.*sdpa"):
        model(ids)
    with pytest.raises(ValueError, match=r"dropout 0\.1"):
        logits(model.train(), "pass_ext", ids)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("doge", dict(keep_window_size=4), r"doge computes with its attention mask \(\.dtype\)"),
        (
            "deepseek_v32",
            dict(
                num_key_value_heads=4,
                kv_lora_rank=16,
                q_lora_rank=24,
                qk_rope_head_dim=8,
                qk_nope_head_dim=16,
                v_head_dim=16,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                moe_intermediate_size=32,
                index_head_dim=16,
                index_n_heads=4,
                index_topk=4,
            ),
            r"deepseek_v32 computes with its attention mask \(slices\)",
        ),
    ],
)
def test_models_that_compute_with_the_mask_are_refused(architecture, changes, message):
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if architecture not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {architecture}")
    shape = dict(vocab_size=97, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **shape, **changes)).eval()
    with pytest.raises((AttributeError, TypeError), match=message):
        logits(model, "pass_ext", prompts(1, 5)[0])


def test_heads_that_are_too_wide_are_refused():
    query = torch.zeros(1, 1, 2, 592)
    with pytest.raises(ValueError, match="up to 576 of keys and 512 of values, these are 592 and 592"):
        hooks.attention(torch.nn.Module(), query, query, query, None)


def test_a_layer_and_a_mask_with_different_windows_are_refused():
    query = torch.zeros(1, 1, 2, 64)
    mask = hooks.masks.causal(1, 2, 0, None, 5, query.device)
    with pytest.raises(ValueError, match="Module says sliding_window=3, its mask has a window of 5"):
        hooks.attention(torch.nn.Module(), query, query, query, mask, sliding_window=3)
    for window in (5, None):
        out, _ = hooks.attention(torch.nn.Module(), query, query, query, mask, sliding_window=window)
        assert out.shape == (1, 2, 1, 64)


@pytest.mark.slow
def test_compiled_forward_with_a_static_cache():
    """One graph: nothing in the forward needs a number on the host."""
    model = hooks.use(sharp_model("llama"))
    ids = prompts(1, 6)[0]
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        eager = model(ids).logits
        for step in range(6):
            extra = {"cache_position": torch.tensor([step])}
            ours = compiled(ids[:, step : step + 1], past_key_values=cache, use_cache=True,
                            position_ids=torch.tensor([[step]]), **extra).logits  # fmt: skip
            torch.testing.assert_close(ours[:, 0], eager[:, step], atol=3e-5, rtol=1e-5)
