"""EAGLE-3 heads with models of other kinds: texts are Plain's and drafts are the formula's."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from support.heads import PlainEagle3, eagle3_checkpoint
from support.recorded import Recorded
from support.small_models import ragged_prompts

from benchmarks.architectures.models import tiny_model
from pass_ext import Plain, generate, load_drafter

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
