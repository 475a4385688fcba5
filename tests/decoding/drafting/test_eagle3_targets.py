"""EAGLE-3 heads with models of other kinds, over other caches, under grammars and inside transformers: texts are Plain's and
drafts are the formula's."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from support.grammars import Automaton
from support.heads import MASKED, PlainEagle3, eagle3_checkpoint
from support.recorded import Recorded
from support.small_models import ragged_prompts, small_model

from benchmarks.architectures.models import tiny_model
from pass_ext import Plain, Session, custom_generate, generate, load_drafter

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = dict(max_new_tokens=16, eos_token_id=[])


def loaded(folder, target, **options):
    config, tensors = eagle3_checkpoint(folder, target, **options)
    return load_drafter(folder, target), PlainEagle3(config, tensors, target)


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3", "gemma2", "qwen3"])
def test_hybrid_latent_and_other_targets(family, tmp_path):
    """With layers that keep a state, that attend by latents, whose embeddings are scaled, that norm their heads."""
    target = tiny_model(family)
    taps = (0, 1, target.config.num_hidden_layers - 1)
    method, plain = loaded(tmp_path, target, taps=taps, norm_before_residual=True)
    ids, mask = ragged_prompts(3, longest=9, seed=2)
    ids = ids % target.config.vocab_size
    chain = Recorded(method)
    for shape in (chain, replace(method, branching=(2, 2))):
        for sampling in (dict(temperature=[0.0, 0.8, 1.1], seeds=[1, 2, 3]), {}):
            want = generate(target, ids, Plain(), attention_mask=mask, **LIMITS, **sampling)
            got = generate(target, ids, shape, attention_mask=mask, **LIMITS, **sampling)
            assert torch.equal(got.sequences, want.sequences) and got.stats.num_draft_tokens > 20
    texts, parts = chain.steps[1]
    assert [part.tokens for part in parts] == [plain.chain(text, 3) for text in texts]


@pytest.fixture(scope="module")
def target():
    return small_model("llama", num_hidden_layers=4)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_caches_in_8_bits(dtype, target, tmp_path):
    method, _ = loaded(tmp_path, target)
    ids, mask = ragged_prompts(3, longest=9, seed=2)
    options = dict(attention_mask=mask, temperature=[0.0, 0.8, 1.1], seeds=[1, 2, 3], **LIMITS)
    want = generate(target, ids, Plain(), session=Session(target, cache_dtype=dtype), **options)
    got = generate(target, ids, method, session=Session(target, cache_dtype=dtype), **options)
    assert torch.equal(got.sequences, want.sequences) and got.stats.num_draft_tokens > 20


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("masks", [{}, MASKED], ids=["level by level", "at once"])
def test_grammars(masks, rule, target, tmp_path):
    """Drafts keep to the grammar; by rule "coupled" texts are Plain's under it."""
    method, _ = loaded(tmp_path, target, drafted=None, **masks)
    ids, mask = ragged_prompts(3, longest=9, seed=2)
    table = {state: {token: (state + token) % 3 for token in range(3 + state, 80, 2)} for state in range(3)}
    options = dict(attention_mask=mask, temperature=0.9, seeds=[1, 2, 3], **LIMITS)
    made = generate(target, ids, method, grammar=[Automaton(table) for _ in range(3)], rule=rule, **options)
    for text in made.sequences[:, ids.shape[1] :].tolist():
        state = 0
        for token in text:
            state = table[state][token]
    assert made.stats.num_draft_tokens > 20
    if rule == "coupled":
        want = generate(target, ids, Plain(), grammar=[Automaton(table) for _ in range(3)], **options)
        assert torch.equal(made.sequences, want.sequences)


def test_inside_transformers(target, tmp_path):
    method, _ = loaded(tmp_path, target)
    ids, mask = ragged_prompts(3, longest=9, seed=2)
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(
        target.generate(ids, custom_generate=custom_generate(method), **options), target.generate(ids, **options)
    )


def test_several_texts_of_a_prompt(target, tmp_path):
    method, _ = loaded(tmp_path, target)
    ids, mask = ragged_prompts(2, longest=60, seed=2)
    options = dict(attention_mask=mask, temperature=0.9, seeds=[1, 5], num_return_sequences=3, **LIMITS)
    want = generate(target, ids, Plain(), **options).sequences
    assert torch.equal(generate(target, ids, method, **options).sequences, want)
