"""Windows in a transformers model's masks and attention calls: both are read, and disagreements are refused."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from emulator.ops import EMULATED
from support.generation import greedy_of_transformers, methods_for
from support.gpu_widths import use_widths_of_a_gpu
from support.small_models import MASKS_KNOW_WINDOWS, ODD_HEADS, SINKS, WIDE, ragged_prompts, small_model
from transformers import masking_utils
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

import pass_ext
from benchmarks.architectures.models import tiny_model
from pass_ext import NGram, Plain, Session, generate
from pass_ext.decoding.models.row_attention import KEY, reach_of, window_of

IDS = torch.tensor([[5, 6, 7, 5, 6]])
ENDS = [5, 6, 7]


def assert_text_of_transformers(model, methods=("plain", "ngram", "one pass", "one pass, deep")):
    ids, mask = ragged_prompts(8)
    want = greedy_of_transformers(model, ids, mask, 16, eos_token_id=ENDS)
    for name in methods:
        method = methods_for(model)[name]
        got = generate(model, ids, method, max_new_tokens=16, attention_mask=mask, eos_token_id=ENDS)
        assert torch.equal(got.sequences, want), name
        custom = pass_ext.custom_generate(method)
        got = greedy_of_transformers(model, ids, mask, 16, eos_token_id=ENDS, custom_generate=custom)
        assert torch.equal(got, want), f"{name}, custom_generate"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", MASKS_KNOW_WINDOWS)
def test_windows_that_the_mask_alone_knows(architecture, attention):
    model = small_model(architecture)
    model.set_attn_implementation(attention)
    ids, mask = ragged_prompts(8)
    whole = small_model(architecture, sliding_window=2048)
    assert not torch.allclose(model(ids, attention_mask=mask).logits, whole(ids, attention_mask=mask).logits)
    assert_text_of_transformers(model)


def test_our_attention_is_for_our_own_calls():
    """As all parts that a mirror has of ours."""
    model = small_model("llama")
    generate(model, IDS, Plain(), max_new_tokens=2)
    model.set_attn_implementation(KEY)
    with pytest.raises(RuntimeError, match=f"^attention '{KEY}' is for pass_ext's own calls of a model$"):
        model(IDS)


@pytest.mark.parametrize("architecture", ODD_HEADS)
def test_models_that_take_views_of_attentions_result(architecture):
    """Heads of 24 are padded to 32; the result is cut back to 24 and contiguous."""
    assert_text_of_transformers(small_model(architecture), ["plain", "ngram"])


@pytest.mark.parametrize(
    ("codes", "cached"), [(None, [192, 128]), (torch.int8, [16 + 256, 16 + 256])], ids=["16 bits", "8 bits"]
)
@pytest.mark.usefixtures("one_thread")
def test_values_narrower_than_keys_have_caches_of_that_size_on_a_gpu(codes, cached, monkeypatch):
    """One layer has a window, both have sinks, and steps of one and of several rows go through the emulated kernels."""
    widths = dict(head_dim=192, v_head_dim=128, swa_head_dim=192, swa_v_head_dim=128)
    model = tiny_model("mimo_v2_flash", seed=20, **widths).bfloat16()  # no two tokens are near each other
    ids, mask = ragged_prompts(2, longest=9)
    options = dict(max_new_tokens=6, attention_mask=mask, eos_token_id=[])
    want = generate(model, ids, session=Session(model, cache_dtype=codes), **options).sequences
    use_widths_of_a_gpu(monkeypatch)
    with EMULATED.active():
        for method in (Plain(), NGram(shortest=1, tokens=3)):
            session = Session(model, cache_dtype=codes)
            assert torch.equal(generate(model, ids, method, session=session, **options).sequences, want), method
            assert [[rows.shape[-1] for rows in layer] for layer in session.caches] == [cached] * 2


def test_masks_in_which_pictures_see_themselves():
    """A text without pictures is causal, or has a window; with one it is refused."""
    windowed = masking_utils.sliding_window_causal_mask_function(7)
    for picture, reach in ((-1, (7, -1)), (0, None)):
        blocks = torch.tensor([[-1, picture, -1]])
        assert reach_of(masking_utils.or_masks(windowed, masking_utils.blockwise_overlay(blocks))) == reach
    assert reach_of(masking_utils.or_masks(windowed, windowed)) is None


def test_chunks_and_queries_scaled_by_their_place():
    """Llama 4 has chunks in layers that rotate, and in the others queries that grow with their place."""
    model = small_model("llama4_text")
    ids, mask = ragged_prompts(8)
    texts = {}
    for changes in ({}, {"attention_chunk_size": 2048}, {"attn_scale": 0.0}):
        texts[str(changes)] = small_model("llama4_text", **changes)(ids, attention_mask=mask).logits
    assert not any(torch.allclose(texts["{}"], other, atol=0.1) for name, other in texts.items() if name != "{}")
    methods = methods_for(model)
    # transformers scales a padded row by its column, so each row alone.
    for row, seen in zip(ids, mask.bool(), strict=True):
        prompt = row[seen][None]
        want = greedy_of_transformers(model, prompt, torch.ones_like(prompt), 16, eos_token_id=ENDS)
        for name in ("plain", "ngram", "one pass", "one pass, deep"):
            got = generate(model, prompt, methods[name], max_new_tokens=16, eos_token_id=ENDS)
            assert torch.equal(got.sequences, want), name


@pytest.mark.parametrize("architecture", SINKS)
def test_models_with_sinks(architecture):
    model = small_model(architecture)
    ids, mask = ragged_prompts(8)
    with_sinks = model(ids, attention_mask=mask).logits
    assert_text_of_transformers(model)
    for layer in model.model.layers:
        layer.self_attn.sinks.fill_(-100.0)
    without = model(ids, attention_mask=mask).logits
    assert not torch.allclose(with_sinks, without, atol=0.1), "the text must depend on the sinks"


@pytest.mark.parametrize("architecture", WIDE)
def test_models_with_wide_heads(architecture):
    """Of 512, and of latents of 32 numbers with rotated keys of 64 in place of 192 beside 128. The caches have these widths."""
    model = small_model(architecture)
    assert_text_of_transformers(model, ["plain", "ngram", "one pass"])
    session = pass_ext.Session(model)
    generate(model, IDS, max_new_tokens=2, session=session)
    widths = [tuple(cache.shape[-1] for cache in layer) for layer in session.caches]
    assert widths == {"gemma4_text": [(256, 256), (512, 512)], "deepseek_v3": [(96, 32)] * 2}[architecture]


def call_with(monkeypatch, attention, change):
    """Makes the attention layers of a transformers file call with changed options."""
    forward = attention.forward

    def changed(self, *arguments, **options):
        interface, name = transformers.AttentionInterface._global_mapping, self.config._attn_implementation
        called = interface[name]
        interface[name] = lambda *tensors, **options: called(*tensors, **change(options))
        try:
            return forward(self, *arguments, **options)
        finally:
            interface[name] = called

    monkeypatch.setattr(attention, "forward", changed)


def test_a_window_that_any_model_keeps_from_the_call(monkeypatch):
    model = small_model("mistral")
    model.set_attn_implementation("sdpa")
    call_with(monkeypatch, modeling_mistral.MistralAttention, lambda options: {**options, "sliding_window": None})
    assert_text_of_transformers(model)


@pytest.mark.parametrize(
    ("architecture", "window", "message"),
    [
        ("mistral", 5, r"mistral, layer 0: MistralAttention says sliding_window=5, its mask has a window of 7"),
        ("llama", 5, r"llama, layer 0: LlamaAttention says sliding_window=5, its mask has no window"),
    ],
)
def test_call_and_mask_that_disagree(monkeypatch, architecture, window, message):
    model = small_model(architecture)
    before = model.config._attn_implementation
    attention = {"mistral": modeling_mistral.MistralAttention, "llama": modeling_llama.LlamaAttention}[architecture]
    call_with(monkeypatch, attention, lambda options: {**options, "sliding_window": window})
    with pytest.raises(ValueError, match=message):
        generate(model, IDS, max_new_tokens=2)
    assert model.config._attn_implementation == before


def test_a_window_that_the_cache_alone_knows():
    """transformers' generate cuts this model's cache to 7 keys, but its mask shows all, so its text depends on the steps."""
    model = small_model("llama", sliding_window=7)
    with pytest.raises(
        ValueError, match=r"llama, layer 0: .* mask has no window, but transformers' cache keeps the last 7"
    ):
        generate(model, IDS, max_new_tokens=2)
    generate(small_model("llama", sliding_window=7, layer_types=["full_attention"] * 2), IDS, max_new_tokens=2)


def prefix(batch, head, query, key):
    return (query < 2) & (key < 2)


def without_last(mask):
    return torch.cat([mask[:, :-1], torch.zeros_like(mask[:, -1:])], 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda call: {**call, "or_mask_function": prefix}, "the mask that llama makes is neither causal, nor a sliding"),
        (lambda call: {**call, "and_mask_function": prefix}, "the mask that llama makes is neither causal, nor a sliding"),
        (lambda call: {**call, "attention_mask": without_last(call["attention_mask"])}, "llama changes the attention_mask"),
        (lambda call: {**call, "attention_mask": call["attention_mask"][:, 1:]}, "llama changes the attention_mask"),
    ],
)  # fmt: skip
def test_other_masks_are_refused(monkeypatch, change, message):
    model, make = small_model("llama"), modeling_llama.create_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **given: make(**change(given)))
    with pytest.raises(ValueError, match=f"llama, layer 0: .*{message}"):
        generate(model, IDS, max_new_tokens=2)


@pytest.mark.parametrize(
    ("change", "is_causal"),
    [(lambda mask: mask, True), (lambda mask: mask + 1, False), (lambda mask: mask.tril(-1), False)],
    ids=["causal", "adds to what is seen", "shows what comes later"],
)
def test_mask_tensors_that_are_causal_alone(monkeypatch, change, is_causal):
    """Models of transformers 4 turn a mask of ones into such a tensor."""

    def tensor_of(inputs_embeds, **_):
        rows = inputs_embeds.shape[1]
        mask = torch.full((rows, rows), torch.finfo(inputs_embeds.dtype).min).triu(1)
        return change(mask)[None, None]

    model = small_model("llama")
    want = generate(model, IDS, max_new_tokens=4).sequences
    model = small_model("llama")
    monkeypatch.setattr(modeling_llama, "create_causal_mask", tensor_of)
    if is_causal:
        assert torch.equal(generate(model, IDS, max_new_tokens=4).sequences, want)
        return
    with pytest.raises(ValueError, match="llama, layer 0: LlamaAttention hands down an attention_mask of its own"):
        generate(model, IDS, max_new_tokens=4)


def test_positions_of_trees_are_no_packed_texts(monkeypatch):
    """If a model does not pass its attention_mask on, transformers takes the rows of a tree for several texts."""
    model, make = small_model("llama"), modeling_llama.create_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **given: make(**{**given, "attention_mask": None}))
    with pytest.raises(ValueError, match="layer 0: the mask"):
        generate(model, IDS.repeat(2, 1), NGram(shortest=1), max_new_tokens=4)


@pytest.mark.parametrize(
    "compute",
    [
        lambda mask: mask.dtype, lambda mask: mask[:, :, -1:], lambda mask: 1 - mask, lambda mask: mask == 0,
        lambda mask: torch.ones(2) * mask, lambda mask: torch.where(mask, 0.0, 1.0), lambda mask: mask.to(torch.float32),
    ],
)  # fmt: skip
def test_models_that_compute_with_their_mask(monkeypatch, compute):
    model, forward = small_model("llama"), modeling_llama.LlamaAttention.forward

    def computing(self, *arguments, attention_mask, **options):
        compute(attention_mask)
        return forward(self, *arguments, attention_mask=attention_mask, **options)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", computing)
    with pytest.raises(ValueError, match="llama computes with its attention_mask"):
        generate(model, IDS, max_new_tokens=2)


def test_patterns():
    windowed = masking_utils.sliding_window_causal_mask_function
    assert window_of(masking_utils.causal_mask_function) == -1
    assert [window_of(windowed(width)) for width in (1, 7)] == [1, 7]
    chunked = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    assert window_of(chunked) is None and reach_of(chunked) == (-1, 4)
    others = [
        prefix,
        masking_utils.sliding_window_overlay(7),
        masking_utils.and_masks(windowed(7), masking_utils.causal_mask_function),
        masking_utils.or_masks(masking_utils.sliding_window_overlay(7), masking_utils.causal_mask_function),
        masking_utils.and_masks(masking_utils.causal_mask_function, masking_utils.sliding_window_overlay(7)),
    ]
    assert [window_of(other) for other in others] == [None] * len(others)
