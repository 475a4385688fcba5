"""MTP layers of checkpoints in 8-bit floats with a scale for each block, and experts in 4-bit ones: drafts are those of the
formula on the exact numbers."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from support.mtp import model_with_mtp
from support.recorded import Recorded
from support.small_models import ragged_prompts

from pass_ext import Plain, generate, load_drafter

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 48, 32
LIMITS = dict(max_new_tokens=14, eos_token_id=[])
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_blocks(weight, block, of_powers):
    """A weight -> its 8-bit floats, its scales, and their exact numbers."""
    rows, inputs = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    codes, numbers, scales = torch.zeros_like(weight), torch.zeros_like(weight), torch.zeros(rows, inputs)
    for i in range(rows):
        for j in range(inputs):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale = weight[place].abs().max() / 448
            scales[i, j] = scale.log2().ceil().exp2() if of_powers else scale
            codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn).float()
            numbers[place] = codes[place] * scales[i, j]
    return codes.to(torch.float8_e4m3fn), scales, numbers


def in_four_bits(weight):
    """A weight in blocks of 32 inputs -> bytes of two numbers, exponents, and the exact numbers."""
    parts = weight.unflatten(1, (-1, 32))
    scales = (parts.abs().amax(-1) / 6).log2().ceil().exp2()
    codes = (parts / scales[..., None])[..., None].sub(E2M1).abs().argmin(-1)
    numbers = (E2M1[codes] * scales[..., None]).flatten(1)
    codes = codes.flatten(1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8), scales, numbers


def quantised(folder, family, form):
    """Writes a model with an MTP layer whose matrices lie in blocks -> the model, and their exact numbers by name."""
    target, _ = model_with_mtp(folder, family)
    file, exact = folder / "model.safetensors", {}
    tensors = load_file(file)
    prefix = "mtp." if family in ("deepseek_v4", "qwen3_next") else "model.layers.2."
    for name in [name for name in tensors if name.startswith(prefix)]:
        if tensors[name].ndim != 2 or not name.endswith(".weight") or name.endswith((".gate.weight", "tokens.weight")):
            continue
        layer, is_expert = name.removesuffix(".weight"), ".experts." in name and form == "fp4"
        codes, scales, exact[name] = (
            in_four_bits(tensors[name]) if is_expert else in_blocks(tensors[name], BLOCK, form == "fp4")
        )
        tensors[name] = codes
        if form == "float32":
            tensors[f"{layer}.weight_scale_inv"] = scales
        else:
            tensors[f"{layer}.scale"] = scales.to(torch.float8_e8m0fnu)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    told = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=list(BLOCK))
    (folder / "config.json").write_text(json.dumps(dict(config, quantization_config=told)))
    return target, exact


@pytest.mark.parametrize(
    ("family", "form"),
    [("deepseek_v4", "fp4"), ("deepseek_v4", "float32"), ("deepseek_v3", "float32"), ("qwen3_next", "float32")],
)
def test_drafts_are_those_of_the_exact_numbers(family, form, tmp_path):
    """Those of a checkpoint that has them as tensors; test_mtp.py compares such drafts with the formula."""
    target, exact = quantised(tmp_path / "blocks", family, form)
    assert len(exact) > 10
    model_with_mtp(tmp_path / "dense", family)
    file = tmp_path / "dense/model.safetensors"
    save_file({**load_file(file), **{name: x.contiguous() for name, x in exact.items()}}, file, {"format": "pt"})
    target.config.quantization_config = dict(
        quant_method="gptq", bits=4
    )  # the target may be quantised, the head is dense
    method, other = (load_drafter(tmp_path / kind, target) for kind in ("blocks", "dense"))
    for (name, one), (_, two) in zip(method.head.state_dict().items(), other.head.state_dict().items(), strict=True):
        assert torch.equal(one, two), name
    ids, mask = ragged_prompts(3, longest=9)
    options = dict(LIMITS, attention_mask=mask)
    mine, its = Recorded(method), Recorded(other)
    got, want = (generate(target, ids, each, **options) for each in (mine, its))
    assert [mine.tokens(b) for b in range(3)] == [its.tokens(b) for b in range(3)] and len(mine.tokens()) > 3
    assert got.stats.model_calls == want.stats.model_calls
    assert torch.equal(got.sequences, generate(target, ids, Plain(), **options).sequences)


def test_blocks_of_another_size_than_the_config_says_are_equal_ones(tmp_path):
    """As MXFP8 has them, whose exponents some files store as bytes."""
    target, exact = quantised(tmp_path, "deepseek_v3", "float32")
    name = "model.layers.2.eh_proj"
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    codes, scales, numbers = in_blocks(exact[f"{name}.weight"], (1, 32), True)
    tensors |= {f"{name}.weight": codes, f"{name}.weight_scale_inv": (scales.log2() + 127).to(torch.uint8)}
    save_file(tensors, file, {"format": "pt"})
    assert torch.equal(load_drafter(tmp_path, target).head.fc.weight, numbers)


@pytest.mark.parametrize("shape", [(3, 3), (0, 2), (2,)])
def test_scales_that_do_not_fit_are_refused_by_name(shape, tmp_path):
    target, _ = quantised(tmp_path, "deepseek_v3", "float32")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.eh_proj.weight_scale_inv"] = torch.ones(shape)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"model\.layers\.2\.eh_proj\.weight: a weight \[64, 128\].* cannot have scales"
    ):
        load_drafter(tmp_path, target)


def test_a_layer_without_its_scales_is_refused(tmp_path):
    target, _ = quantised(tmp_path, "deepseek_v3", "float32")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.eh_proj.weight_scale_inv"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.2\.eh_proj\.weight' holds float8_e4m3fn and has no scales"):
        load_drafter(tmp_path, target)
