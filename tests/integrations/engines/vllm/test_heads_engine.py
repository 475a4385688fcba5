"""vLLM's own proposers with heads that pass_ext runs too: the same texts, and as many steps as ``pass_ext.generate`` takes.

A drafter that is slightly wrong still writes the right text; only the number of steps shows it.
"""

from dataclasses import replace

import pytest
import torch
from support.heads import MASKED, PlainEagle3, eagle3_checkpoint, learn
from support.mtp import model_with_mtp
from support.small_models import small_model
from vllm_job import run_engine

import pass_ext
from pass_ext.decoding.drafting.heads.eagle3 import save_eagle3

NEW, LENGTH, PROMPTS = 40, 3, 4
OPTIONS = dict(max_new_tokens=NEW, eos_token_id=[])

pytestmark = pytest.mark.timeout(1200)


def prompts():
    return torch.randint(3, 97, (PROMPTS, 10), generator=torch.Generator().manual_seed(3))


def texts_of(target):
    return pass_ext.generate(target, prompts(), **OPTIONS).sequences.tolist()


def check_steps(folder, target, method, speculation, often=0.5, apart=0.0):
    """vLLM writes the texts of pass_ext in as many steps, up to a share, and fewer than so many of each token."""
    method = replace(method, length=LENGTH)
    ours = [pass_ext.generate(target, ids[None], method, **OPTIONS) for ids in prompts()]
    theirs = run_engine(
        folder / "engine",
        folder / "target",
        [
            {
                "prompts": prompts().tolist(),
                "sampling": dict(temperature=0.0, max_tokens=NEW, ignore_eos=True),
                "batch": 1,
            }
        ],
        dtype="float32",
        max_model_len=256,
        speculative_config={"num_speculative_tokens": LENGTH, **speculation},
    )
    assert theirs["texts"][0] == [one.sequences[0, 10:].tolist() for one in ours]
    steps, accepted = sum(one.stats.model_calls - 1 for one in ours), sum(one.stats.num_accepted_tokens for one in ours)
    assert abs(theirs["counters"]["spec_decode_num_drafts"] - steps) <= apart * steps
    assert steps < often * PROMPTS * NEW
    # vLLM counts drafts after a text's end too.
    more = theirs["counters"]["spec_decode_num_accepted_tokens"] - accepted
    assert -apart * accepted <= more <= LENGTH * PROMPTS + apart * accepted


@pytest.mark.parametrize(
    "settings",
    [
        dict(norm_before_residual=True),
        dict(norm_before_residual=True, fc_norm=True, norm_output=True),
        dict(norm_before_residual=True, layers=2, **MASKED),
    ],
    ids=["EAGLE-3", "EAGLE-3.1", "P-EAGLE"],
)
def test_vllm_drafts_with_a_saved_head_as_often_right(settings, tmp_path):
    target = small_model("llama", num_hidden_layers=6, hidden_size=128, head_dim=32, max_position_embeddings=512)
    target.save_pretrained(tmp_path / "target")
    config, tensors = eagle3_checkpoint(
        tmp_path / "head", target, drafted=90, taps=(1, 3, 4), dim=32, sharpness=1.0, **settings
    )
    plain = PlainEagle3(config, tensors, target)
    learn(plain, texts_of(target))
    method = pass_ext.load_drafter(tmp_path / "head", target)
    method.head.load_state_dict(plain.tensors)
    save_eagle3(method.head, tmp_path / "head")
    is_masked = "mask_token_id" in settings
    speculation = {"method": "eagle3", "model": str(tmp_path / "head"), "parallel_drafting": is_masked}
    check_steps(tmp_path, target, method, speculation, often=0.75 if is_masked else 0.5)


MTP = {
    # vLLM has no kernel of recurrent layers on a CPU, so all layers attend; so does the layer that drafts, in any Qwen3-Next.
    # Its Qwen3.5 imports torchvision, which has no build for this torch; the layer there has Qwen3-Next's form and names.
    "qwen3_next": dict(layer_types=["full_attention"] * 2, num_nextn_predict_layers=1),
    "glm4_moe": dict(num_nextn_predict_layers=1),
}


@pytest.mark.parametrize("family", MTP)
def test_vllm_drafts_with_an_mtp_layer_as_often_right(family, tmp_path):
    changes = dict(MTP[family], head_dim=32, hidden_size=128, max_position_embeddings=512)
    target, _ = model_with_mtp(tmp_path / "target", family, texts=texts_of, **changes)
    # vLLM's layers of the GLM and DeepSeek family read zeros for a text's first embedding, which moves some drafts.
    apart = 0.1 if family == "glm4_moe" else 0.0
    check_steps(tmp_path, target, pass_ext.load_drafter(tmp_path / "target", target), {"method": "mtp"}, apart=apart)
