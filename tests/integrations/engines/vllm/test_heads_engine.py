"""vLLM's own proposers with heads that pass_ext runs too: the same texts by the same drafts, step by step.

A drafter that is slightly wrong still writes the right text; only its drafts show it.
"""

import shlex
from dataclasses import replace

import pytest
import torch
from support.heads import MASKED, PlainEagle3, eagle3_checkpoint, learn
from support.mtp import model_with_mtp
from support.recorded import Recorded
from support.small_models import save_byte_model, small_model
from vllm_job import run_engine

import pass_ext
from pass_ext.__main__ import main
from pass_ext.decoding.drafting.heads.eagle3 import save_eagle3

NEW, LENGTH, PROMPTS = 40, 3, 4
OPTIONS = dict(max_new_tokens=NEW, eos_token_id=[])
BLANK = 5
"""A token whose embedding is zeros, the second of prompts of MTP layers: GLM's of vLLM reads zeros in its place."""

pytestmark = pytest.mark.timeout(1200)


def prompts():
    return torch.randint(3, 97, (PROMPTS, 10), generator=torch.Generator().manual_seed(3))


def prompts_with_blanks():
    found = prompts()
    found[:, 1] = BLANK
    return found


def texts_of(target, ids):
    return pass_ext.generate(target, ids, **OPTIONS).sequences.tolist()


def check_drafts(folder, target, method, speculation, prompts, length=LENGTH, often=0.5):
    """vLLM writes the texts of pass_ext by the same drafts in each step, in fewer than so many steps of each token."""
    ours = []
    for ids in prompts:
        recorded = Recorded(replace(method, length=length))
        text = pass_ext.generate(target, ids[None], recorded, **OPTIONS).sequences[0, 10:].tolist()
        ours.append((text, recorded.tokens()))
    sampling = dict(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    theirs = run_engine(
        folder / "engine",
        folder / "target",
        [{"prompts": prompts.tolist(), "sampling": sampling, "batch": 1}],
        drafts=True,
        dtype="float32",
        max_model_len=256,
        speculative_config={"num_speculative_tokens": length, **speculation},
    )
    assert theirs["texts"][0] == [text for text, _ in ours]
    for (_, drafts), found in zip(ours, theirs["drafts"], strict=True):
        # vLLM drafts at a text's end as anywhere, where pass_ext drafts what may still be written.
        assert [ids[: len(mine)] for mine, ids in zip(drafts, found, strict=False)] == drafts
    assert sum(len(drafts) for _, drafts in ours) < often * PROMPTS * NEW


@pytest.mark.parametrize(
    "settings",
    [
        dict(norm_before_residual=True),
        dict(norm_before_residual=True, fc_norm=True, norm_output=True),
        dict(norm_before_residual=True, layers=2, **MASKED),
    ],
    ids=["EAGLE-3", "EAGLE-3.1", "P-EAGLE"],
)
def test_vllm_drafts_the_same_with_a_saved_head(settings, tmp_path):
    target = small_model("llama", num_hidden_layers=6, hidden_size=128, head_dim=32, max_position_embeddings=512)
    target.save_pretrained(tmp_path / "target")
    config, tensors = eagle3_checkpoint(
        tmp_path / "head", target, drafted=90, taps=(1, 3, 4), dim=32, sharpness=1.0, **settings
    )
    plain = PlainEagle3(config, tensors, target)
    learn(plain, texts_of(target, prompts()))
    method = pass_ext.load_drafter(tmp_path / "head", target)
    method.head.load_state_dict(plain.tensors)
    save_eagle3(method.head, tmp_path / "head")
    is_masked = "mask_token_id" in settings
    speculation = {"method": "eagle3", "model": str(tmp_path / "head"), "parallel_drafting": is_masked}
    check_drafts(tmp_path, target, method, speculation, prompts(), often=0.75 if is_masked else 0.5)


def test_vllm_drafts_the_same_with_a_head_that_was_trained(tmp_path):
    """By the command, whose folder vLLM reads as it is."""
    from transformers import AutoModelForCausalLM

    sizes = dict(num_hidden_layers=4, hidden_size=128, head_dim=32, max_position_embeddings=512)
    save_byte_model(tmp_path / "target", **sizes)
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / f"texts/part {number}.txt").write_text(f"line {number} of a text\n" * 40)
    places = f"--model {tmp_path}/target --data {tmp_path}/texts --out {tmp_path}/head"
    options = "--taps 1 2 3 --vocabulary 200 --inner 96 --continuations 64 --sample-tokens 40 --sample-temperatures 0"
    main(["train-head", *shlex.split(f"{places} {options} --document-tokens 500 --length 24 --steps 120")])
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    method = pass_ext.load_drafter(tmp_path / "head", target)
    ids = torch.tensor([list(f"line {number} of"[:10].encode()) for number in range(10, 10 + PROMPTS)])
    check_drafts(tmp_path, target, method, {"method": "eagle3", "model": str(tmp_path / "head")}, ids, often=0.75)


MTP = {
    # On a CPU vLLM computes recurrent layers in bfloat16 alone, so all layers attend; so does the layer that drafts, in any
    # Qwen3-Next. Its Qwen3.5 imports torchvision, which has no build for this torch; its layer has the same form and names.
    "qwen3_next": (dict(layer_types=["full_attention"] * 2, head_dim=32), LENGTH),
    # A second draft differs: vLLM feeds back GLM's state in front of its norm, transformers, and vLLM for DeepSeek, after it.
    "glm4_moe": (dict(head_dim=32), 1),
}


@pytest.mark.parametrize("family", MTP)
def test_vllm_drafts_the_same_with_an_mtp_layer(family, tmp_path):
    changes, length = MTP[family]
    changes = dict(changes, num_nextn_predict_layers=1, hidden_size=128, max_position_embeddings=512)
    ids = prompts_with_blanks()
    target, _ = model_with_mtp(
        tmp_path / "target", family, texts=lambda target: texts_of(target, ids), blank=BLANK, **changes
    )
    method = pass_ext.load_drafter(tmp_path / "target", target)
    check_drafts(tmp_path, target, method, {"method": "mtp"}, ids, length)
