"""vLLM's own EAGLE-3 proposer with a head that pass_ext has saved: its texts, and as many steps as ``pass_ext.generate`` takes.

A drafter that is slightly wrong still writes the right text; only the number of steps shows it.
"""

from dataclasses import replace

import torch
from support.heads import PlainEagle3, eagle3_checkpoint, learn
from support.small_models import small_model
from vllm_job import run_engine

import pass_ext
from pass_ext.decoding.drafting.heads.eagle3 import save_eagle3

NEW, LENGTH, PROMPTS = 40, 3, 4


def test_vllm_drafts_with_a_saved_head_as_often_right(tmp_path):
    target = small_model("llama", num_hidden_layers=6, hidden_size=128, head_dim=32, max_position_embeddings=512)
    target.save_pretrained(tmp_path / "target")
    config, tensors = eagle3_checkpoint(
        tmp_path / "head", target, drafted=90, taps=(1, 3, 4), dim=32, sharpness=1.0, norm_before_residual=True
    )
    plain = PlainEagle3(config, tensors, target)
    prompts = torch.randint(3, 97, (PROMPTS, 10), generator=torch.Generator().manual_seed(3))
    options = dict(max_new_tokens=NEW, eos_token_id=[])
    learn(plain, pass_ext.generate(target, prompts, **options).sequences.tolist())
    method = pass_ext.load_drafter(tmp_path / "head", target)
    method.head.load_state_dict(plain.tensors)
    save_eagle3(method.head, tmp_path / "head")
    ours = [pass_ext.generate(target, ids[None], replace(method, length=LENGTH), **options) for ids in prompts]

    speculation = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": LENGTH}
    sampling = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True}
    calls = [{"prompts": prompts.tolist(), "sampling": sampling, "batch": 1}]
    theirs = run_engine(
        tmp_path / "engine",
        tmp_path / "target",
        calls,
        dtype="float32",
        max_model_len=256,
        speculative_config=speculation,
    )
    assert theirs["texts"][0] == [one.sequences[0, 10:].tolist() for one in ours]
    steps, accepted = sum(one.stats.model_calls - 1 for one in ours), sum(one.stats.num_accepted_tokens for one in ours)
    assert theirs["counters"]["spec_decode_num_drafts"] == steps < 0.5 * PROMPTS * NEW
    # vLLM counts drafts behind a text's end too.
    assert accepted <= theirs["counters"]["spec_decode_num_accepted_tokens"] <= accepted + LENGTH * PROMPTS
