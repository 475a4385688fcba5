"""Heads with quantised layers, or with layers that are rounded on loading, draft with these bits: drafts are those of the
formulas on the exact numbers."""

import copy
import json

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from support.generation import unpadded
from support.heads import MASKED, PlainEagle3, eagle3_checkpoint, write_checkpoint
from support.mtp import PlainMtp, write_layer
from support.quantised_folders import KINDS, SHAPE, quantised_layer, quantization_config, write_folder
from support.recorded import Recorded
from support.small_models import BYTES, ragged_prompts, small_model

from pass_ext import Plain, generate, load_drafter
from pass_ext.checkpoint import load_checkpoint
from pass_ext.decoding.drafting.heads.checkpoint import HeadCheckpoint
from pass_ext.decoding.drafting.heads.head import Head
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.layers import unpack_weight
from pass_ext.weights.experts import PackedExperts
from pass_ext.weights.layers import PackedLinear
from pass_ext.weights.rounding import rounded

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = dict(max_new_tokens=12, eos_token_id=[])
SOME = ["gptq", "gptq, act order", "awq", "compressed-tensors, zeros", "compressed-tensors, bytes"]


def quantise(tensors, names, kind):
    """Gives linear layers of these names random integers in the layout of a kind -> their exact weights."""
    exact = {}
    for name in names:
        parts, exact[name] = quantised_layer(kind, *tensors.pop(f"{name}.weight").shape, torch.float32)
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    return exact


def packed_in(module):
    return {name for name, part in module.named_modules() if isinstance(part, PackedLinear)}


def check(target, method, plain, vocabulary, length=3):
    """Greedy drafts of a ragged batch are the formula's, texts Plain's, by seed too."""
    ids, mask = ragged_prompts(3, longest=9, vocabulary=vocabulary)
    options = dict(attention_mask=mask, **LIMITS)
    want = generate(target, ids, Plain(), **options).sequences
    recorded = Recorded(method)
    assert torch.equal(generate(target, ids, recorded, **options).sequences, want)
    compared = 0
    for b, whole in enumerate(unpadded(want, mask)):
        for text, candidates in recorded.of(b):
            levels = min(length, len(whole) - len(text) - 1)
            assert list(candidates.tokens) == plain.chain(text, levels)
            compared += levels
    assert compared > 30
    warm = dict(options, temperature=[0.7, 1.0, 0.0], seeds=[1, 2, 3])
    assert torch.equal(
        generate(target, ids, method, **warm).sequences, generate(target, ids, Plain(), **warm).sequences
    )


@pytest.mark.parametrize("kind", SOME)
def test_eagle3(kind, tmp_path):
    """It runs by one op."""
    target = small_model("llama", num_hidden_layers=4)
    masked = MASKED if kind == "awq" else {}
    config, tensors = eagle3_checkpoint(tmp_path, target, drafted=90, sharpness=1.0, inner=96, **masked)
    names = [name.removesuffix(".weight") for name in tensors if "_proj" in name or name.startswith("fc.")]
    stored = dict(load_file(tmp_path / "model.safetensors"))
    exact = quantise(stored, names, kind)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(dict(config, quantization_config=quantization_config(kind))))
    method = load_drafter(tmp_path, target)
    assert packed_in(method.head) == set(names)
    plain = PlainEagle3(config, tensors | {f"{name}.weight": weight for name, weight in exact.items()}, target)
    check(target, method, plain, 97, length=method.length)
    assert (Head(method.head, packed_model(target))._shadow._fused is None) == ("act order" in kind)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("masked", [{}, MASKED], ids=["EAGLE-3", "P-EAGLE"])
def test_a_dense_head_is_rounded(masked, bits, tmp_path):
    """Drafts are the formula's on the rounded numbers."""
    target = small_model("llama", num_hidden_layers=4)
    config, tensors = eagle3_checkpoint(tmp_path, target, drafted=90, sharpness=1.0, inner=96, **masked)
    method = load_drafter(tmp_path, target, bits=bits)
    names = [name for name in tensors if "_proj." in name or name in ("fc.weight", "lm_head.weight")]
    assert packed_in(method.head) == {name.removesuffix(".weight") for name in names}
    for name in names:
        layer = method.head.get_submodule(name.removesuffix(".weight"))
        assert torch.equal(layer.weight, rounded(tensors[name], bits))
        tensors[name] = unpack_weight(layer.weight, layer.out_features)
    check(target, method, PlainEagle3(config, tensors, target), 97, length=method.length)


def test_heads_that_are_not_rounded(tmp_path):
    target = small_model("llama", num_hidden_layers=4)
    config, _ = eagle3_checkpoint(tmp_path / "dense", target)
    for bits in (5, 16, 4.0):
        with pytest.raises(ValueError, match=f"bits must be 4, 8 or None, got {bits}"):
            load_drafter(tmp_path / "dense", target, bits=bits)
    name = "layers.0.mlp.gate_proj"
    stored = dict(load_file(tmp_path / "dense/model.safetensors"))
    quantise(stored, [name], "gptq")
    (tmp_path / "dense/config.json").write_text(
        json.dumps(dict(config, quantization_config=quantization_config("gptq")))
    )
    save_file(stored, tmp_path / "dense/model.safetensors")
    with pytest.raises(ValueError, match="its layers are quantised by gptq: give no bits, got 4"):
        load_drafter(tmp_path / "dense", target, bits=4)
    plain = PlainMtp(target, small_model("llama", num_hidden_layers=5), torch.Generator().manual_seed(0))
    write_checkpoint(tmp_path / "mtp", {}, write_layer(plain, "model.layers.4."), "model.safetensors")
    with pytest.raises(ValueError, match="bits are of EAGLE-3 and P-EAGLE, and this head is for Mtp"):
        load_drafter(tmp_path / "mtp", target, bits=8)
    eagle3_checkpoint(tmp_path / "odd", target, inner=72)
    with pytest.raises(ValueError, match=r"'layers\.0\.mlp\.down_proj\.weight' has 72 on cpu"):
        load_drafter(tmp_path / "odd", target, bits=8)
    eagle3_checkpoint(tmp_path / "whole", target)
    with pytest.raises(ValueError, match=r"'fc\.weight' has 96 on meta: give no bits"):
        HeadCheckpoint(tmp_path / "whole", 4).linear("fc.weight", 32, 96, torch.float32, torch.device("meta"))
    stored = dict(load_file(tmp_path / "whole/model.safetensors"))
    for number in (torch.nan, 70_000.0):
        stored["fc.weight"][0, 0] = number
        save_file(stored, tmp_path / "whole/model.safetensors")
        with pytest.raises(ValueError, match=r"'fc\.weight' must hold numbers of float16 to be rounded: give no bits"):
            load_drafter(tmp_path / "whole", target, bits=4)


@pytest.mark.parametrize("kind", SOME[:4])
def test_an_mtp_layer_of_a_quantised_checkpoint(kind, tmp_path):
    """The target runs with its stored weights too; the folder's MTP layer is left to the drafter."""
    exact_target = write_folder(tmp_path / "model", kind)
    count = exact_target.config.num_hidden_layers
    longer = small_model("llama", **SHAPE, num_hidden_layers=count + 1)
    plain = PlainMtp(exact_target, longer, torch.Generator().manual_seed(0))
    file = tmp_path / "model/model.safetensors"
    tensors, prefix = load_file(file), f"model.layers.{count}."
    added = write_layer(plain, prefix)
    names = [name.removesuffix(".weight") for name in added if "_proj" in name]
    exact = quantise(added, names, kind)
    save_file({**tensors, **{name: x.contiguous() for name, x in added.items()}}, file)
    for name, weight in exact.items():
        own = name.removeprefix(prefix)
        (plain.fc if own == "eh_proj" else plain.layer.get_submodule(own)).weight.copy_(weight)
    target, _ = load_checkpoint(tmp_path / "model", torch.float32)
    plain.target = target
    method = load_drafter(tmp_path / "model", target)
    assert len(packed_in(method.head) | packed_in(method.head._layer.model)) == len(names) == 8
    check(target, method, plain, BYTES, length=method.length)


def test_experts_of_an_mtp_layer(tmp_path):
    """One tensor set for each expert, joined in packed form."""
    exact_target = write_folder(tmp_path / "model", "gptq", architecture="qwen2_moe")
    count, config = exact_target.config.num_hidden_layers, exact_target.config
    longer_config = copy.deepcopy(config)
    longer_config.num_hidden_layers = count + 1
    if getattr(longer_config, "layer_types", None):
        longer_config.layer_types = [*config.layer_types, "full_attention"]
    longer = type(exact_target)(longer_config).eval().requires_grad_(False)
    plain = PlainMtp(exact_target, longer, torch.Generator().manual_seed(0))
    file, prefix = tmp_path / "model/model.safetensors", f"model.layers.{count}."
    tensors, added = load_file(file), write_layer(plain, prefix)
    experts = plain.layer.mlp.experts
    for part in ("gate_up_proj", "down_proj"):
        del added[f"{prefix}mlp.experts.{part}"]
    sizes = {"gate": (64, 128), "up": (64, 128), "down": (128, 64)}
    own = {f"{prefix}mlp.experts.{i}.{part}_proj.weight": torch.empty(size)
           for i in range(len(experts.gate_up_proj)) for part, size in sizes.items()}  # fmt: skip
    exact = quantise(own, [name.removesuffix(".weight") for name in own], "gptq")
    for i in range(len(experts.gate_up_proj)):
        gate, up, down = (exact[f"{prefix}mlp.experts.{i}.{part}_proj"] for part in sizes)
        experts.gate_up_proj[i].copy_(torch.cat([gate, up]))
        experts.down_proj[i].copy_(down)
    save_file({**tensors, **{name: x.contiguous() for name, x in (added | own).items()}}, file)
    target, _ = load_checkpoint(tmp_path / "model", torch.float32)
    plain.target = target
    method = load_drafter(tmp_path / "model", target)
    assert any(isinstance(part, PackedExperts) for part in method.head._layer.model.modules())
    check(target, method, plain, BYTES, length=method.length)


def test_a_layer_that_lacks_a_part_is_refused_by_name(tmp_path):
    target = small_model("llama", num_hidden_layers=4)
    config, _ = eagle3_checkpoint(tmp_path, target)
    stored = dict(load_file(tmp_path / "model.safetensors"))
    quantise(stored, ["layers.0.mlp.up_proj"], "gptq")
    del stored["layers.0.mlp.up_proj.scales"]
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(dict(config, quantization_config=KINDS["gptq"])))
    with pytest.raises(
        ValueError, match=r"tensor layers.0.mlp.up_proj.* has the tensors .*, which are no weight of gptq"
    ):
        load_drafter(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps(dict(config, quantization_config=dict(quant_method="fp8"))))
    with pytest.raises(ValueError, match="its weights are quantised"):
        load_drafter(tmp_path, target)
