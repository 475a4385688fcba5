"""GPT-Neo, Bloom and MPT: attention by code of a model's own, unscaled, in windows, with biases by the position of a key."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from packaging.version import Version
from support.generation import greedy_of_transformers
from support.kinds import GREEDY
from support.small_models import ragged_prompts
from transformers.models.mpt.configuration_mpt import MptAttentionConfig

from benchmarks.architectures.models import tiny_model
from pass_ext import NGram, generate
from pass_ext.decoding.models.features.key_biases import KeyBias, key_biases

if Version(transformers.__version__) < Version("5.24"):
    pytest.skip("the layers are those of transformers 5.24", allow_module_level=True)

NAMES = ("gpt_neo", "bloom", "mpt")
NEW = 12
IDS, MASK = ragged_prompts(9)


def ours(model, method=None, **options):
    return generate(model, IDS, method, max_new_tokens=NEW, attention_mask=MASK, eos_token_id=[], **options).sequences


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt_neo", dict(window_size=3, attention_types=[[["local", "global"], 1]])),
        ("bloom", dict(n_head=6, hidden_size=96, apply_residual_connection_post_layernorm=True)),
        ("mpt", dict(n_heads=6, d_model=96)),
        ("mpt", dict(attn_config=MptAttentionConfig(clip_qkv=0.5, softmax_scale=0.7))),
    ],
    ids=str,
)
def test_other_forms(name, changes):
    model = tiny_model(name, **changes)
    assert torch.equal(ours(model, NGram(shortest=1)), greedy_of_transformers(model, IDS, MASK, NEW, **GREEDY))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.125, 128**-0.5, 0.7])
def test_columns_add_the_bias(dtype, scale):
    """Their product is within 2^-22 of the bias, at far positions too; float16 has no smaller numbers than 2^-24."""
    bias = KeyBias(torch.tensor([2**-0.5, 2**-8, 0.3]), scale, torch.float32)
    positions = torch.tensor([0, 1, 17, 2047, 30_000])
    q, k = torch.zeros(3, 16, dtype=dtype), torch.zeros(5, 3, 16, dtype=dtype)
    logits = torch.einsum("hd,nhd->nh", bias.queries(q).double(), bias.keys(k, positions).double()) * scale
    torch.testing.assert_close(logits, positions[:, None] * bias.slopes.double(), rtol=2**-22, atol=1e-7)


def test_mpts_slopes_are_those_of_its_form_for_any_number_of_heads():
    slopes = key_biases(tiny_model("mpt", n_heads=6, d_model=96))[0].slopes
    torch.testing.assert_close(slopes, 2.0 ** -torch.tensor([2.0, 4.0, 6.0, 8.0, 1.0, 3.0]))


# ---- refusals ----


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_that_computes_something_else(name, monkeypatch):
    model = tiny_model(name)
    classes = ("GPTNeoSelfAttention", "BloomAttention", "MptAttention")
    layer = next(part for part in model.modules() if type(part).__name__ in classes)
    method = "_attn" if name == "gpt_neo" else "forward"
    theirs = getattr(type(layer), method)
    other = lambda self, *rows, **named: (theirs(self, *rows, **named)[0] * 1.01, None)  # noqa: E731
    monkeypatch.setattr(type(layer), method, other)
    with pytest.raises(ValueError, match=rf"^{name} has {type(layer).__name__}, which computes something else"):
        ours(model)
