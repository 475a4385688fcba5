"""MTP layers of models' own checkpoints: drafts are those of the formula, token by token, and texts are Plain's."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file
from support.chi_square import chi_square_tail, counted, law_of_two
from support.generation import unpadded
from support.heads import plain_loop
from support.mtp import model_with_mtp
from support.recorded import Recorded
from support.small_models import ragged_prompts

from pass_ext import Plain, generate, load_drafter
from pass_ext.__main__ import main
from pass_ext.drafting import Mtp

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = dict(max_new_tokens=20, eos_token_id=[])
FAMILIES = ("qwen3_next", "deepseek_v3", "glm4_moe", "qwen3_5_text", "deepseek_v4")


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_the_formula(family, tmp_path):
    target, plain = model_with_mtp(tmp_path, family)
    method = load_drafter(tmp_path, target)
    assert method == Mtp(method.head, length=4)
    prompt = torch.randint(3, 90, (1, 11), generator=torch.Generator().manual_seed(1))
    got = generate(target, prompt, recorded := Recorded(method), **LIMITS)
    text, calls, drafts = plain_loop(plain, target, prompt[0].tolist(), 20, 4)
    assert got.sequences[0].tolist() == text
    assert got.stats.model_calls == calls
    assert recorded.tokens() == drafts


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_drafts_are_those_of_transformers(family, tmp_path):
    """Its own MtpModel reads the same checkpoint, and drafts one token for its one layer after each text."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("transformers has no MtpModel")
    model_with_mtp(tmp_path, family, num_mtp_layers=1, mtp_mlp_layer_types=["sparse"])
    target = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    count = target.config.num_hidden_layers  # transformers knows the layer of the published sizes by its number
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{count}\..*"]
    mtp = layers.MtpModel.from_pretrained(target).eval()
    prompt = torch.randint(3, 90, (1, 11), generator=torch.Generator().manual_seed(3))
    generate(target, prompt, recorded := Recorded(load_drafter(tmp_path, target)), **LIMITS)
    compared = 0
    for text, candidates in recorded.of():
        with torch.no_grad():
            ids = torch.tensor([text])
            states = target.model(ids[:, :-1]).last_hidden_state
            cache = transformers.cache_utils.MtpCache(config=target.config.get_mtp_config())
            places = torch.arange(1, len(text))[None]
            found, _, _ = mtp(ids[:, 1:], states, None, places, mtp_cache=cache)
        assert found[0].tolist() == candidates.tokens[:1]
        compared += 1
    assert compared > 5


# ---- a layer that is often right ----


def texts_of(target):
    """Those that the tests below begin with."""
    ids, mask = ragged_prompts(3, longest=12, seed=5)
    return unpadded(generate(target, ids, attention_mask=mask, max_new_tokens=20, eos_token_id=[]).sequences, mask)


@pytest.fixture(scope="module", params=["qwen3_next", "deepseek_v3"])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    target, plain = model_with_mtp(folder, request.param, texts=texts_of)
    return target, plain, load_drafter(folder, target)


def test_it_takes_the_calls_of_a_plain_loop(trained):
    target, plain, method = trained
    ids, mask = ragged_prompts(3, longest=12, seed=5)
    got = generate(target, ids, method, attention_mask=mask, **LIMITS)
    assert got.stats.mean_acceptance_length > 1.5
    for b in range(3):
        prompt = ids[b][mask[b].bool()]
        alone = generate(target, prompt[None], recorded := Recorded(method), **LIMITS)
        text, calls, drafts = plain_loop(plain, target, prompt.tolist(), 20, 4)
        assert alone.sequences[0].tolist() == text and got.sequences[b][-20:].tolist() == text[-20:]
        assert alone.stats.model_calls == calls
        assert recorded.tokens() == drafts


def test_texts_of_trees_are_plains(trained):
    """test_heads.py has chains."""
    target, _, method = trained
    ids, mask = ragged_prompts(3, longest=12, seed=3)
    sampled = dict(temperature=0.8, top_p=0.9, seeds=[0, 1, 2])
    for options in ({}, sampled, dict(sampled, rule="coupled_inverse")):
        options = dict(LIMITS, attention_mask=mask, **options)
        want = generate(target, ids, Plain(), **options).sequences
        assert torch.equal(generate(target, ids, replace(method, branching=(2, 2)), **options).sequences, want)


def test_chains_by_rules_that_divide_have_the_models_distribution(trained):
    """The second new token is drawn beside drafts."""
    target, _, method = trained
    prompt = [5, 17, 40]
    law = law_of_two(target, prompt, 0.5, 4)
    for rule in ("rejection", "block"):
        found = generate(
            target, torch.tensor([prompt]), method, max_new_tokens=2, eos_token_id=[], num_return_sequences=600,
            temperature=0.5, top_k=4, seeds=1, rule=rule,
        ).sequences[:, 3:]  # fmt: skip
        assert chi_square_tail(counted(found, 97), law) > 1e-4


# ---- checkpoints that do not fit ----


def test_what_does_not_fit_is_refused(tmp_path):
    target, _ = model_with_mtp(tmp_path, "deepseek_v3")
    model_with_mtp(tmp_path / "other", "qwen3_next")
    words = (
        r"no tensors for .*kv_a_layernorm.weight.* of DeepseekV3ForCausalLM; the checkpoint is of Qwen3NextForCausalLM$"
    )
    with pytest.raises(ValueError, match=words):
        load_drafter(tmp_path / "other", target)
    llama, _ = model_with_mtp(tmp_path / "llama", "llama")
    words = (
        r"no tensors for model.layers.0.mlp.down_proj.weight, .* of LlamaForCausalLM; the checkpoint is of Qwen3NextFor"
    )
    with pytest.raises(ValueError, match=words):
        load_drafter(tmp_path / "other", llama)
    narrow, _ = model_with_mtp(tmp_path / "narrow", "llama", intermediate_size=80)
    words = r"has model.layers.0.mlp.down_proj.weight of \[64, 96\], and a layer of LlamaForCausalLM of \[64, 80\]$"
    with pytest.raises(ValueError, match=words):
        load_drafter(tmp_path / "llama", narrow)
    with pytest.raises(
        ValueError, match="MTP head belongs to another model; class: it has 'DeepseekV3ForCausalLM', this"
    ):
        generate(llama, torch.tensor([[3, 4, 5]]), load_drafter(tmp_path, target), max_new_tokens=3)
    of_streams, _ = model_with_mtp(tmp_path / "streams", "deepseek_v4")
    with pytest.raises(ValueError, match=r"continues a model with streams \(hc_head\), and the model is a DeepseekV3"):
        load_drafter(tmp_path / "streams", target)
    tensors = load_file(tmp_path / "streams/model.safetensors")
    del tensors["mtp.0.attn.wq_a.weight"]
    save_file(tensors, tmp_path / "streams/model.safetensors")
    with pytest.raises(ValueError, match=r"no tensors for model.layers.0.self_attn.q_a_proj.weight of DeepseekV4"):
        load_drafter(tmp_path / "streams", of_streams)
    wide, _ = model_with_mtp(tmp_path / "wide", "deepseek_v3", hidden_size=96)
    with pytest.raises(ValueError, match=r"eh_proj.weight' must be \[96, 192\] .* got \[64, 128\]"):
        load_drafter(tmp_path, wide)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.self_attn.o_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensors for model.layers.0.self_attn.o_proj.weight of DeepseekV3"):
        load_drafter(tmp_path, target)


def test_a_part_that_was_not_fetched_is_named(tmp_path):
    """The layer in a file of its own, of which all, or half, or nothing is there."""
    target, _ = model_with_mtp(tmp_path, "qwen3_next")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    layer = sorted(name for name in tensors if name.startswith("mtp."))
    files = {name: f"{1 + (name in layer) + (name in layer[:5])}.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert isinstance(load_drafter(tmp_path, target), Mtp)
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no tensors? .*its index names files that are not there: 2\.safetensors$"):
        load_drafter(tmp_path, target)
    (tmp_path / "3.safetensors").unlink()
    words = r"none; its index names files that are not there: 2\.safetensors, 3\.safetensors\. A whole model"
    with pytest.raises(ValueError, match=words):
        load_drafter(tmp_path, target)
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"there are no tensors in .*: 1\.safetensors, 2\.safetensors, 3\.safetensors$"
    ):
        load_drafter(tmp_path, target)


def test_a_layer_of_another_form_is_named(tmp_path):
    target, _ = model_with_mtp(tmp_path, "qwen3_next")
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("mtp.", "model.mtp_layers.0."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    words = r"its MTP layer has a form that is not read, with a tensor model\.mtp_layers\.0\.fc\.weight: read are"
    with pytest.raises(ValueError, match=words):
        load_drafter(tmp_path, target)


def test_info_says_whose_layer_it_is(tmp_path, capsys):
    model_with_mtp(tmp_path, "qwen3_next")
    capsys.readouterr()
    assert main(["info", str(tmp_path), "--drafter", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert (
        "the model of this checkpoint (Qwen3NextForCausalLM)" in said
        and "yes; it reads the model's states at last" in said
    )
