"""MTP layers of GGUF files: drafts are those of the same weights from safetensors, and load_checkpoint names the layers."""

import logging

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("transformers.integrations.gguf")  # which reads Qwen 3.5

from support.gguf_files import qwen35_files, write_gguf
from support.heads import plain_loop
from support.recorded import Recorded
from support.small_models import BYTES, ragged_prompts, small_model

from pass_ext import Plain, generate, load_drafter
from pass_ext.__main__ import main
from pass_ext.checkpoint import load_checkpoint
from pass_ext.weights.gguf_mtp import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = dict(max_new_tokens=14, eos_token_id=[])


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PASS_EXT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_drafts_are_those_of_the_same_weights_from_safetensors(family, kind, tmp_path, no_cache, caplog):
    file, _ = qwen35_files(tmp_path, family, kind)
    with caplog.at_level(logging.WARNING, "pass_ext"):
        target, _ = load_checkpoint(file, torch.float32, weights="dense")
    assert f"tiny.gguf: an MTP layer lies in this file, blk.2: load_drafter({str(file)!r}, model)" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "pass_ext"):
        method, other = load_drafter(file, target), load_drafter(tmp_path / "model", target)
    assert "no use for" not in caplog.text
    for (name, one), (_, two) in zip(method.head.state_dict().items(), other.head.state_dict().items(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=3e-7, msg=name)  # of norms, which lie there as w + 1
    ids, mask = ragged_prompts(3, longest=9, vocabulary=BYTES)
    options = dict(LIMITS, attention_mask=mask)
    mine, its = Recorded(method), Recorded(other)
    got, want = (generate(target, ids, recorded, **options) for recorded in (mine, its))
    assert [mine.tokens(b) for b in range(3)] == [its.tokens(b) for b in range(3)] and len(mine.tokens()) > 3
    assert got.stats.model_calls == want.stats.model_calls
    assert torch.equal(got.sequences, generate(target, ids, Plain(), **options).sequences)


def test_drafts_and_calls_are_those_of_the_formula(tmp_path, no_cache):
    file, plain = qwen35_files(tmp_path, "qwen3_5_text", "F32")
    target, _ = load_checkpoint(file, torch.float32, weights="dense")
    plain.target = target
    prompt = torch.randint(3, 90, (1, 11), generator=torch.Generator().manual_seed(1))
    got = generate(target, prompt, recorded := Recorded(load_drafter(file, target)), **LIMITS)
    text, calls, drafts = plain_loop(plain, target, prompt[0].tolist(), 14, 4)
    assert got.sequences[0].tolist() == text and got.stats.model_calls == calls and recorded.tokens() == drafts


def test_info_says_what_the_file_is(tmp_path, capsys):
    file, _ = qwen35_files(tmp_path, "qwen3_5_text", "F32")
    assert main(["info", "--drafter", str(file)]) == 0
    said = capsys.readouterr().out
    assert "a GGUF file" in said and "Mtp" in said


def test_files_of_other_architectures_are_refused_by_name(tmp_path):
    """By load_checkpoint too: transformers counts the layer among the model's own."""
    target = small_model("llama", num_hidden_layers=2)
    file = write_gguf(tmp_path / "tiny.gguf", mtp=True)
    words = r"tiny\.gguf: its MTP layer blk\.2 is not read: of qwen35 and qwen35moe .* is of llama\. Give the folder"
    with pytest.raises(ValueError, match=words):
        load_drafter(file, target)
    for weights in ("stored", "dense"):
        with pytest.raises(
            ValueError, match=r"tiny\.gguf is a GGUF file of llama with an MTP layer, blk\.2, which would be"
        ):
            load_checkpoint(file, torch.float32, weights=weights)
    with pytest.raises(ValueError, match=r"tiny\.gguf: it has no MTP layer"):
        load_drafter(write_gguf(file), target)
    file.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"load_drafter: .*tiny\.gguf is no GGUF file, or damaged"):
        load_drafter(file, target)


def test_weights_as_they_lie_are_refused_with_the_way_out(tmp_path):
    file, _ = qwen35_files(tmp_path, "qwen3_5_text", "Q8_0")
    with pytest.raises(ValueError, match=r"a GGUF file of qwen35 are not read as they lie: .*weights='dense'"):
        load_checkpoint(file, torch.float32)


def test_no_other_architecture_with_mtp_layers_is_read_from_gguf_files():
    """Where this fails transformers has learnt another one, and ARCHITECTURES lacks it."""
    import gguf
    from transformers.integrations.gguf import GGUF_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    parts = {part for part in gguf.MODEL_TENSOR if part.name.startswith("NEXTN_")}
    with_mtp = {gguf.MODEL_ARCH_NAMES[kind] for kind, own in gguf.MODEL_TENSORS.items() if parts & set(own)}
    assert with_mtp and not (with_mtp & {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_ARCHS}) - set(ARCHITECTURES)
