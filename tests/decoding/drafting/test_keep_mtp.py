"""A model that was tuned and saved by transformers has no MTP layer; ``keep_mtp`` brings it back."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from safetensors import safe_open
from support.mtp import model_with_mtp
from transformers import AutoModelForCausalLM

from pass_ext import generate, load_drafter
from pass_ext.drafting import keep_mtp

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
@pytest.mark.parametrize("shard", ["1GB", "40KB"])
def test_a_saved_model_has_the_mtp_layer_of_its_checkpoint(family, shard, tmp_path):
    target, _ = model_with_mtp(tmp_path / "own", family)
    own = load_drafter(tmp_path / "own", target)
    AutoModelForCausalLM.from_pretrained(tmp_path / "own").save_pretrained(tmp_path / "saved", max_shard_size=shard)
    told = r"tells of an MTP layer, and it has no tensors of one: .*keep_mtp\(path, folder\)"
    with pytest.raises(ValueError, match=told if family == "deepseek_v3" else "or MTP layers .* this one has none"):
        load_drafter(tmp_path / "saved", target)

    names = keep_mtp(tmp_path / "own", tmp_path / "saved")
    index = tmp_path / "saved" / "model.safetensors.index.json"
    assert index.exists() == (shard == "40KB")
    for name, file in json.loads(index.read_text())["weight_map"].items() if index.exists() else ():
        with safe_open(tmp_path / "saved" / file, "pt") as stored:
            assert name in set(stored.keys())
    assert not index.exists() or set(names) <= json.loads(index.read_text())["weight_map"].keys()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval().requires_grad_(False)
    kept = load_drafter(tmp_path / "saved", saved)
    assert all(map(torch.equal, kept.head.state_dict().values(), own.head.state_dict().values()))
    assert len(names) >= 10 and kept.length == own.length
    ids = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(1))
    got = generate(saved, ids, kept, max_new_tokens=12, eos_token_id=[])
    assert torch.equal(got.sequences, generate(target, ids, max_new_tokens=12, eos_token_id=[]).sequences)
    assert got.stats.num_draft_tokens > 12


def test_what_has_no_mtp_layer_is_refused(tmp_path):
    target, _ = model_with_mtp(tmp_path / "own", "deepseek_v3")
    target.save_pretrained(tmp_path / "without")
    with pytest.raises(ValueError, match=r"^keep_mtp: .*it has no MTP layers: give the checkpoint that the model came"):
        keep_mtp(tmp_path / "without", tmp_path / "own")
    with pytest.raises(ValueError, match="folder must be that of a saved model"):
        keep_mtp(tmp_path / "own", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^keep_mtp: no such file or folder"):
        keep_mtp(tmp_path / "none", tmp_path / "own")
    with pytest.raises(ValueError, match=r"^keep_mtp: .* there are no tensors in"):
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "config.json").write_text("{}")
        keep_mtp(tmp_path / "empty", tmp_path / "own")
