"""Sessions with keys and values in 8 bits: the text of every method is Plain's over the same cache."""

import pytest
import torch

pytest.importorskip("transformers")

from emulator.ops import EMULATED
from support.generation import methods_for, slots_for
from support.small_models import prompts, ragged_prompts, small_model

from pass_ext import (
    EarlyExitDraft,
    MultiCandidate,
    NGram,
    PaSS,
    Plain,
    Session,
    Speculative,
    Tree,
    generate,
)
from pass_ext.decoding.models import fused_forward, parts
from pass_ext.decoding.session import session as sessions
from pass_ext.integrations.transformers.processors import NotedRows
from pass_ext.layers import dequantize_rows, quantize_rows
from pass_ext.ops.quantize import MOST_OF_CODES
from pass_ext.testing import assert_same_bits

CODES = tuple(MOST_OF_CODES)
NEW = 14
LATENT = dict(qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
# Of latents over codes, texts of every method are in test_contract.py.
FAMILIES = {"llama": {}, "gemma2": {}, "qwen3": {}, "deepseek_v3": LATENT, "gpt_oss": {}}


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"deepseek_v3"}))
def test_every_method_writes_plains_text(family, codes):
    model = small_model(family, **FAMILIES[family])
    ids, mask = ragged_prompts(6)
    options = dict(max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
    session = Session(model, cache_dtype=codes)
    want = generate(model, ids, session=session, **options)
    assert {cache.dtype for layer in session.caches for cache in layer} == {codes}
    methods = methods_for(model)
    if family == "llama":
        draft = EarlyExitDraft(model, 1)
        methods |= {"early exit": Speculative(draft, 3), "its tree": MultiCandidate(draft, (2, 2))}
    for name, method in methods.items():
        got = generate(model, ids, method, session=Session(model, cache_dtype=codes), **options)
        assert torch.equal(got.sequences, want.sequences), name
    sampled = dict(options, temperature=0.9, seeds=3)
    want = generate(model, ids, session=Session(model, cache_dtype=codes), **sampled).sequences
    for name in ("ngram", "one pass"):
        got = generate(model, ids, methods[name], session=Session(model, cache_dtype=codes), **sampled).sequences
        assert torch.equal(got, want), f"{name}, sampled"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.usefixtures("one_thread")
def test_a_row_has_the_bits_that_it_has_alone(family, dtype):
    model = small_model(family, **FAMILIES[family]).to(dtype)
    ids, mask = ragged_prompts(3, longest=9)
    options = dict(max_new_tokens=NEW, eos_token_id=[])
    for method in (NGram(shortest=1, tokens=4), PaSS(slots_for(model), tree=Tree.from_branching((3, 2)), rows=24)):
        together = NotedRows()
        session = Session(model, cache_dtype=torch.int8)
        batch = generate(model, ids, method, attention_mask=mask, logits_processor=together, session=session, **options)
        for row, seen in enumerate(mask.bool()):
            alone, session = NotedRows(), Session(model, cache_dtype=torch.int8)
            text = generate(model, ids[row][seen][None], logits_processor=alone, session=session, **options)
            for mine, theirs in zip(together.of(batch), alone.of(text), strict=True):
                assert_same_bits(mine[row], theirs[0])


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_layers_are_one_call_as_with_other_caches(codes, monkeypatch):
    """Bytes of rows in fp8 that are no number as fp8 do not make the own forward unlike the model's."""
    calls = []
    stack = fused_forward._stack
    monkeypatch.setattr(fused_forward, "_stack", lambda *given: calls.append(given[4][0].dtype) or stack(*given))
    model, ids = small_model("llama").bfloat16(), prompts(2, 5)[0]
    session = Session(model, cache_dtype=codes)
    result = generate(model, ids, NGram(shortest=1), max_new_tokens=NEW, eos_token_id=[], session=session)
    assert set(calls) == {codes} and len(calls) >= result.stats.model_calls
    assert result.stats.backend == generate(model, ids, max_new_tokens=2, eos_token_id=[]).stats.backend


def test_caches_hold_the_models_numbers_rounded():
    """And the text is that of the rounded ones."""
    model = small_model("llama")
    ids, mask = ragged_prompts(8)
    options = dict(max_new_tokens=16, attention_mask=mask, eos_token_id=[])
    whole = Session(model)
    plain = generate(model, ids, session=whole, **options).sequences
    for codes in CODES:
        session = Session(model, cache_dtype=codes)
        text = generate(model, ids, session=session, **options).sequences
        assert torch.equal(text, plain) == (codes is torch.int8), "coarse numbers show"
        for numbers, stored in zip(whole.caches[0], session.caches[0], strict=True):
            numbers, stored = numbers[1:2, : mask[1].sum()], stored[1:2, : mask[1].sum()]
            expected = dequantize_rows(quantize_rows(numbers, codes))
            torch.testing.assert_close(dequantize_rows(stored), expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_session_is_used_again_grows_and_begins_with_a_past(family, monkeypatch):
    monkeypatch.setattr(sessions, "_FIRST_POSITIONS", 10)
    model, ids = small_model(family, **FAMILIES[family]), prompts(3, 8)[0]
    options = dict(max_new_tokens=NEW, eos_token_id=[])
    session = Session(model, capacity=40, cache_dtype=torch.float8_e4m3fn)
    want = generate(model, ids, session=session, **options).sequences
    assert torch.equal(generate(model, ids, NGram(shortest=1), session=session, **options).sequences, want)
    stored = [(keys[:, :5], values[:, :5]) for keys, values in session.caches]
    whole = Session(model)
    generate(model, ids, session=whole, **options)
    for past in (stored, [(keys.clone(), values.clone()) for keys, values in stored]):
        begun = Session(model, past=(past, [5, 3, 4]), cache_dtype=torch.float8_e4m3fn)
        assert torch.equal(generate(model, ids, NGram(shortest=1), session=begun, **options).sequences, want)
    session.past = stored, 4
    assert torch.equal(generate(model, ids, session=session, **options).sequences, want)
    # Keys and values in the model's dtype are rounded, those of the first layer as they would have been at once.
    past = [(keys[:, :5], values[:, :5]) for keys, values in whole.caches]
    begun = Session(model, past=(past, 5), cache_dtype=torch.float8_e4m3fn)
    generate(model, ids, session=begun, **options)
    assert torch.equal(begun.caches[0][0][:, :5].view(torch.uint8), stored[0][0].view(torch.uint8))


def test_long_prompts_of_latents(monkeypatch):
    """Many rows attend to heads that are expanded from what is stored, as few rows attend to what is stored."""
    model = small_model("deepseek_v3", **LATENT, max_position_embeddings=1024)
    ids = torch.randint(3, 97, (2, 600), generator=torch.Generator().manual_seed(0))
    rows = []
    for most in (1024, 200):  # rows at a time
        monkeypatch.setattr("pass_ext.decoding.session.reading.MAX_TREE_NODES", most)
        noted, session = NotedRows(), Session(model, cache_dtype=torch.float8_e5m2)
        result = generate(model, ids, max_new_tokens=2, eos_token_id=[], session=session, logits_processor=noted)
        rows.append(noted.of(result)[0])
    assert (rows[0] - rows[1]).abs().max() < 0.01 * rows[0].std()


def test_other_dtypes_are_refused():
    model = small_model("llama")
    for wrong in (torch.float16, "int8", 8):
        with pytest.raises(ValueError, match=r"cache_dtype must be torch.int8, .*float8_e5m2 or None, got"):
            Session(model, cache_dtype=wrong)
    past = [(torch.zeros(1, 3, 2, 16, dtype=torch.int8),) * 2] * 2
    with pytest.raises(ValueError, match=r"layer 0: .*torch.int8"):
        generate(model, prompts(1, 5)[0], max_new_tokens=2, session=Session(model, past=(past, 3)))


@pytest.mark.usefixtures("one_thread")
def test_the_kernels_of_a_gpu(monkeypatch):
    """On the emulator, where layer_stack has no kernel."""
    monkeypatch.setattr(parts, "stack_of", lambda *_: None)
    model, ids = small_model("llama"), prompts(2, 5)[0]
    options = dict(max_new_tokens=6, eos_token_id=[])
    want = generate(model, ids, session=Session(model, cache_dtype=torch.int8), **options).sequences
    with EMULATED.active():
        for method in (Plain(), NGram(shortest=1, tokens=3)):
            session = Session(model, cache_dtype=torch.int8)
            assert torch.equal(generate(model, ids, method, session=session, **options).sequences, want)
            assert session.caches[0][0].dtype is torch.int8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    """Rows of drafts are quantised before they are attended to, so a text may differ from Plain's in near ties alone."""
    model, (ids, mask) = small_model("llama").cuda(), ragged_prompts(6)
    options = dict(max_new_tokens=NEW, attention_mask=mask.cuda(), eos_token_id=[])
    for codes in CODES:
        session = Session(model, cache_dtype=codes)
        want = generate(model, ids.cuda(), session=session, **options).sequences
        assert {cache.dtype for layer in session.caches for cache in layer} == {codes}
        for name, method in methods_for(model).items():
            got = generate(model, ids.cuda(), method, session=Session(model, cache_dtype=codes), **options).sequences
            assert torch.equal(got, want), name
