"""Folders of LoRA adapters that the peft package wrote, read for the rows of slots; and folders that are refused."""

import json

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

import peft
from safetensors.torch import load_file, save_file
from support.small_models import small_model

from pass_ext import LookaheadEmbedding, PaSS, Plain, Tree, generate
from pass_ext.ops.adapter import adapter_rows


def lora_folder(path, architecture="qwen3", **options):
    """A folder, and the PeftModel that wrote it."""
    config = dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]) | options
    torch.manual_seed(0)
    model = peft.get_peft_model(small_model(architecture), peft.LoraConfig(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(path)
    return model.eval()


def module_at(model, place):
    number, _, name = place.partition(".")
    return model.base_model.model.model.layers[int(number)].get_submodule(name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(use_rslora=True),
        dict(rank_pattern={"down_proj": 2}, alpha_pattern={"self_attn.q_proj": 3, "layers.1.mlp.gate_proj": 24}),
        dict(layers_to_transform=[1], target_modules=["v_proj"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_every_linear_layer_adds_what_peft_adds(tmp_path, architecture, options):
    model = lora_folder(tmp_path, architecture, **options)
    lookahead = LookaheadEmbedding.from_peft(tmp_path, model.get_input_embeddings().weight)
    adapters = lookahead.adapters
    written = sum("lora_A" in name for name, _ in model.named_parameters())
    assert len(adapters.places) == written and adapters.count == 1
    for place, down, up in adapters.pairs():
        module = module_at(model, place)
        x = torch.randn(3, down.shape[2])
        alone = module.base_layer(x)
        got = adapter_rows(alone, x, torch.tensor([-1, 5, -4]), down, up, adapters.scale)
        torch.testing.assert_close(got[[0, 2]], module(x)[[0, 2]], rtol=1e-4, atol=1e-4)
        assert torch.equal(got[1], alone[1])


def test_slots_are_the_embeddings_of_random_tokens(tmp_path):
    table = lora_folder(tmp_path).get_input_embeddings().weight
    first, same, other = (LookaheadEmbedding.from_peft(tmp_path, table, num_lookahead=6, seed=s) for s in (1, 1, 2))
    assert torch.equal(first.weight, same.weight) and not torch.equal(first.weight, other.weight)
    assert ((first.weight[:, None] == table).all(2).any(1)).all()
    assert first.num_lookahead == 6 and first.vocabulary == len(table) and first.hit_rates is None


def test_a_text_and_a_file(tmp_path):
    lora_folder(tmp_path)
    model, ids = small_model("qwen3"), torch.tensor([[5, 6, 7]])
    lookahead = LookaheadEmbedding.from_peft(tmp_path, model.get_input_embeddings().weight)
    options = dict(max_new_tokens=8, eos_token_id=[])
    got = generate(model, ids, PaSS(lookahead, tree=Tree.chain(3), rows=24, slots=3), **options)
    assert torch.equal(got.sequences, generate(model, ids, Plain(), **options).sequences)
    lookahead.save(tmp_path / "slots.safetensors")
    again = LookaheadEmbedding.load(tmp_path / "slots.safetensors").adapters
    assert again.places == lookahead.adapters.places and again.scale == lookahead.adapters.scale
    assert all(map(torch.equal, again.parameters(), lookahead.adapters.parameters()))


def change_config(**changes):
    def change(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def change_tensors(change):
    def change_file(folder):
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return change_file


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_config(peft_type="LOHA"), r"peft_type must be 'LORA', got 'LOHA'"),
        (change_config(use_dora=True), r"use_dora must be False, got True"),
        (change_config(bias="all"), r"bias must be 'none', got 'all'"),
        (change_config(modules_to_save=["lm_head"]), r"modules_to_save must be None, got \['lm_head'\]"),
        (change_config(r=0), r"r must be a number above 0, got 0"),
        (change_config(lora_alpha="8"), r"lora_alpha must be a number above 0, got '8'"),
        (change_tensors(lambda t: t.pop(NAME)), r"q_proj must be with lora_A and lora_B, got 'lora_B alone'"),
        (change_tensors(lambda t: t.update({NAME: t[NAME][:2].clone()})), r"must be \[r, in\] and \[out, r\], got '\[2, 64\]"),
        (change_tensors(lambda t: t.update({NAME: t[NAME] * float("nan")})), r"must be finite floating-point numbers"),
        (change_tensors(lambda t: t.update({"lm_head.lora_A.weight": t[NAME].clone()})), r"every tensor must be lora_A"),
        (lambda f: (f / "adapter_config.json").write_text("{"), r"adapter_config.json must be JSON"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"no"), r"must be a safetensors file"),
    ],
    ids=range(12),
)  # fmt: skip
def test_refused_folders(tmp_path, damage, message):
    table = lora_folder(tmp_path).get_input_embeddings().weight
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as refusal:
        LookaheadEmbedding.from_peft(tmp_path, table)
    assert str(refusal.value).startswith(str(tmp_path))


def test_folders_that_lack_a_file(tmp_path):
    table = lora_folder(tmp_path).get_input_embeddings().weight
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        LookaheadEmbedding.from_peft(tmp_path, table)
