"""Models from quantised checkpoints: GPTQ, AWQ, compressed-tensors. Their numbers are the checkpoint's, exactly."""

import pickle

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from support.quantised_folders import KINDS, write_folder, write_fp4_folder
from support.small_models import byte_tokenizer, save_byte_model

import pass_ext
from pass_ext.checkpoint import load_checkpoint
from pass_ext.weights.experts import PackedExperts
from pass_ext.weights.folder import layout_of
from pass_ext.weights.grouped import Grouped
from pass_ext.weights.layers import PackedLinear
from pass_ext.weights.model import formats_of
from pass_ext.weights.torchao import grouped_of

LAYERS = 2 * 7


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    written = {}

    def get(kind):
        if kind not in written:
            folder = tmp_path_factory.mktemp("quantised") / "model"
            written[kind] = folder, write_folder(folder, kind)
        return written[kind]

    return get


def numbers_of(layer):
    """The weight of a packed layer, in the order of its inputs."""
    weight = pass_ext.layers.unpack_weight(layer.weight, layer.out_features)
    return weight if layer.order is None else weight[:, layer.order.argsort()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_the_checkpoints(folder_of, kind):
    folder, exact = folder_of(kind)
    model, tokenizer = load_checkpoint(folder, torch.float32)
    packed = {name: part for name, part in model.named_modules() if isinstance(part, PackedLinear)}
    assert len(packed) == LAYERS and not model.training
    for name, layer in packed.items():
        assert torch.equal(numbers_of(layer), exact.get_submodule(name).weight)
        assert (layer.order is not None) == ("act order" in kind)
    dense, _ = load_checkpoint(folder, torch.float32, weights="dense")
    state = dense.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in exact.state_dict().items())
    ids = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(0))
    expected = exact(ids).logits
    assert (model(ids).logits - expected).abs().max() < 3e-4 * expected.abs().max()
    assert formats_of(model).keys() == {"float32", "8 bits" if KINDS[kind]["bits"] == 8 else "4 bits"}
    assert tokenizer("ab").input_ids and not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize(("width", "groups"), [(64, 4), (65, 1), (130, 2)])
def test_groups_that_are_no_whole_blocks_are_dense(width, groups):
    codes = torch.arange(3 * width, dtype=torch.uint8).view(3, width) % 16
    scale, offset = torch.full((3, groups), 0.5), torch.full((3, groups), -4.0, dtype=torch.float64)
    weight = Grouped(codes, scale, offset, 4)
    assert weight.packed() is None and torch.equal(weight.dense(), codes * 0.5 - 4)


def test_a_name_on_the_hub_is_a_folder_once_it_is_fetched(folder_of, monkeypatch):
    import huggingface_hub
    import transformers

    folder, asked = folder_of("awq")[0], []
    config = transformers.AutoConfig.from_pretrained(folder)
    find = transformers.AutoConfig.from_pretrained
    monkeypatch.setattr(
        transformers.AutoConfig,
        "from_pretrained",
        lambda path, **more: config if path == "an/awq" else find(path, **more),
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or str(folder))
    model, _ = load_checkpoint("an/awq")
    assert asked == ["an/awq"] and isinstance(model.model.layers[0].mlp.up_proj, PackedLinear)


def test_keywords_of_from_pretrained_leave_the_folder_to_transformers(folder_of):
    """Which then needs a package of its own for such weights, and names it."""
    with pytest.raises(ImportError, match=r"GPTQ|gptq"):
        load_checkpoint(folder_of("gptq")[0], device_map="cpu")


@pytest.mark.parametrize("kind", ["gptq", "gptq, act order", "awq"])
def test_texts_are_plains(folder_of, kind):
    model, _ = load_checkpoint(folder_of(kind)[0])
    ids = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(0))
    plain = pass_ext.generate(model, ids, max_new_tokens=24, eos_token_id=[])
    assert plain.stats.backend.startswith("module" if "act order" in kind else "fused")
    for method in (pass_ext.NGram(), pass_ext.Speculative(pass_ext.EarlyExitDraft(model, layers=1))):
        got = pass_ext.generate(model, ids, method, max_new_tokens=24, eos_token_id=[])
        assert torch.equal(got.sequences, plain.sequences)


# ---- experts ----


@pytest.mark.parametrize("kind", ["awq", "gptq, act order", "compressed-tensors, zeros", "mxfp4"])
def test_experts_have_the_numbers_of_the_checkpoint(tmp_path, kind):
    if kind == "mxfp4":
        exact = write_fp4_folder(tmp_path / "model")
    else:
        exact = write_folder(tmp_path / "model", kind, architecture="qwen2_moe")
    model, _ = load_checkpoint(tmp_path / "model", torch.float32)
    experts = [part for part in model.modules() if isinstance(part, PackedExperts)]
    assert len(experts) == (0 if "act order" in kind else 2), "an order of inputs for each expert: dense"
    ids = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(0))
    expected = exact(ids).logits
    assert (model(ids).logits - expected).abs().max() < 3e-4 * expected.abs().max()
    if kind != "mxfp4":  # which transformers makes dense by itself
        dense, _ = load_checkpoint(tmp_path / "model", torch.float32, weights="dense")
        state = dense.state_dict()
        assert all(torch.equal(state[name], weight) for name, weight in exact.state_dict().items())
    plain = pass_ext.generate(model, ids, max_new_tokens=16, eos_token_id=[])
    got = pass_ext.generate(model, ids, pass_ext.NGram(), max_new_tokens=16, eos_token_id=[])
    assert torch.equal(got.sequences, plain.sequences)
    alone = pass_ext.generate(model, ids[1:], max_new_tokens=16, eos_token_id=[])
    assert torch.equal(alone.sequences, plain.sequences[1:])


def test_a_row_of_experts_has_the_bits_that_it_has_alone(tmp_path):
    write_fp4_folder(tmp_path / "model")
    model, _ = load_checkpoint(tmp_path / "model")
    experts = next(part for part in model.modules() if isinstance(part, PackedExperts))
    x, chosen = torch.randn(40, 64).bfloat16(), torch.stack([torch.randperm(4)[:2] for _ in range(40)])
    weights = torch.rand(40, 2).bfloat16()
    whole = experts(x, chosen, weights)
    for row in range(40):
        alone = experts(x[row : row + 1], chosen[row : row + 1], weights[row : row + 1])
        assert torch.equal(alone[0], whole[row])
    copied = pickle.loads(pickle.dumps(experts))
    assert torch.equal(copied(x, chosen, weights), whole)
    x.requires_grad_()
    experts(x, chosen, weights).sum().backward()
    assert x.grad.isfinite().all() and x.grad.abs().sum() > 0


# ---- what is no such checkpoint ----


def cut(name, rows):
    def damage(tensors):
        tensors[name] = tensors[name][:rows]

    return damage


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


Q = "model.layers.0.self_attn.q_proj"
FAULTS = {
    "a layer without zeros": ("gptq", lambda t: t.pop(f"{Q}.qzeros"), rf"{Q} has the tensors g_idx, qweight, scales, "),
    "other sizes": ("gptq", cut(f"{Q}.qweight", 12), rf"{Q} must "),
    "fewer scales": ("gptq", cut(f"{Q}.scales", 3), rf"{Q} must "),
    "no words": ("awq", cut(f"{Q}.qweight", 100), rf"{Q} must be a weight \[128, 128\] in whole groups"),
    "NaN": ("awq", lambda t: t[f"{Q}.scales"].fill_(torch.nan), rf"{Q} must have scales that are finite numbers"),
    "groups of other lengths": (
        "gptq", lambda t: t[f"{Q}.g_idx"].fill_(1), rf"{Q} must have groups of 32 inputs each, got others",
    ),
    "another shape": (
        "compressed-tensors", put(f"{Q}.weight_shape", torch.tensor([128, 64])), rf"{Q} must be a weight \[128, 128\]",
    ),
    "a layer that the model has not": (
        "awq", put("model.layers.7.mlp.up_proj.scales", torch.ones(2, 2)), "has no place: model.layers.7.mlp.up_proj",
    ),
    "a bias that the model has not": (
        "gptq", put(f"{Q}.bias", torch.ones(128)), f"LlamaForCausalLM has no place: {Q}.bias",
    ),
    "a tensor too few": (
        "awq", lambda t: t.pop("model.norm.weight"), "has no tensors for model.norm.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_checkpoints_that_cannot_be_read_are_refused_in_a_sentence(tmp_path, name):
    kind, damage, message = FAULTS[name]
    write_folder(tmp_path / "model", kind, damage=damage)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "model")


def test_files_that_are_damaged_or_missing_are_refused(tmp_path):
    write_folder(tmp_path / "model", "awq")
    file = tmp_path / "model" / "model.safetensors"
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"no model" * 100):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"model.safetensors is missing, damaged or was cut off"):
            load_checkpoint(tmp_path / "model")
    file.unlink()
    with pytest.raises(ValueError, match=r"must have model.safetensors or an index"):
        load_checkpoint(tmp_path / "model")


def test_experts_that_are_missing_or_damaged_are_refused(tmp_path):
    def without_one(tensors):
        for name in [name for name in tensors if ".experts.2.up_proj" in name]:
            del tensors[name]

    write_folder(tmp_path / "awq", "awq", architecture="qwen2_moe", damage=without_one)
    with pytest.raises(ValueError, match=r"mlp.experts must have 4 experts with up_proj, got 3"):
        load_checkpoint(tmp_path / "awq")
    place = "model.layers.0.mlp.experts.down_proj"
    write_fp4_folder(tmp_path / "nan", damage=lambda tensors: tensors[f"{place}_scales"].fill_(255))
    with pytest.raises(ValueError, match=f"scales of {place} must be finite"):
        load_checkpoint(tmp_path / "nan")
    write_fp4_folder(tmp_path / "few", damage=lambda tensors: tensors.pop(f"{place}_scales"))
    with pytest.raises(
        ValueError, match=r"experts must have down_proj_blocks, down_proj_scales, .*, got down_proj_blocks, gate"
    ):
        load_checkpoint(tmp_path / "few")
    write_fp4_folder(tmp_path / "cut", damage=cut(f"{place}_scales", 3))
    with pytest.raises(ValueError, match=rf"{place} must be 4 weights \[64, 64\] in blocks of 32"):
        load_checkpoint(tmp_path / "cut")


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (dict(quant_method="gptq", bits=4), "gptq"),
        (dict(quant_method="gptq", bits=4, checkpoint_format="gptq_v2"), "gptq_v2"),
        (dict(quant_method="gptq", bits=4, checkpoint_format="marlin"), None),
        (dict(quant_method="awq", bits=4, version="gemv"), None),
        (dict(quant_method="awq", bits=4, version="GEMM"), "awq"),
        (dict(quant_method="bitsandbytes", load_in_4bit=True), None),
        (
            dict(quant_method="compressed-tensors", config_groups={"a": {"weights": {"strategy": "group"}}}),
            "compressed-tensors",
        ),
        (
            dict(
                quant_method="compressed-tensors",
                config_groups={"a": {"weights": {}, "input_activations": {"num_bits": 8}}},
            ),
            None,
        ),
        (dict(quant_method="compressed-tensors", config_groups={"a": {"weights": {"type": "float"}}}), None),
        (dict(quant_method="compressed-tensors", config_groups={}, kv_cache_scheme={"num_bits": 8}), None),
    ],
)
def test_what_changes_more_than_integers_is_left_to_transformers(config, layout):
    assert layout_of(config) == layout


# ---- torchao ----


def torchao_configs():
    quantization = pytest.importorskip("torchao.quantization")
    group = quantization.PerGroup(32)
    return {
        "Int8Tensor": quantization.Int8WeightOnlyConfig(),
        "IntxUnpackedToInt8Tensor": quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group),
    }


@pytest.mark.parametrize("name", ["Int8Tensor", "IntxUnpackedToInt8Tensor"])
def test_a_folder_of_torchao_has_its_numbers(tmp_path, name):
    from transformers import AutoModelForCausalLM, TorchAoConfig

    save_byte_model(tmp_path / "dense")
    config = TorchAoConfig(torchao_configs()[name])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config, dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "quantised")
    byte_tokenizer().save_pretrained(tmp_path / "quantised")
    model, _ = load_checkpoint(tmp_path / "quantised")
    dense, _ = load_checkpoint(tmp_path / "quantised", weights="dense")
    for place, layer in theirs.named_modules():
        if type(layer) is nn.Linear and type(layer.weight.data).__name__ == name:
            codes = layer.weight.data
            zero = 0 if codes.zero_point is None else codes.zero_point.double()
            grouped = codes.qdata.view(*codes.scale.shape, -1).double()
            exact = (grouped - (zero[..., None] if torch.is_tensor(zero) else 0)) * codes.scale.double()[..., None]
            packed = model.get_submodule(place)
            assert torch.equal(numbers_of(packed).double(), exact.view(codes.shape))
            assert torch.equal(dense.get_submodule(place).weight, exact.view(codes.shape).bfloat16())
    ids = torch.randint(0, 256, (1, 30), generator=torch.Generator().manual_seed(0))
    assert sum(isinstance(part, PackedLinear) for part in model.modules()) == LAYERS
    assert pass_ext.generate(model, ids, max_new_tokens=4).stats.backend == "fused"
    with pytest.raises(ValueError, match="is saved as that file"):
        model.save_pretrained(tmp_path / "again")


def test_codes_of_torchao_in_4_bits():
    """As its kernels for GPUs have them: two codes in a byte, the first in the lower half, and zeros that are numbers."""
    Int4Tensor = pytest.importorskip("torchao.quantization").Int4Tensor
    codes = torch.randint(-8, 8, (16, 64), dtype=torch.int8)
    scale, zero = (torch.rand(2, 16).bfloat16() for _ in range(2))
    stored = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    weight = Int4Tensor(stored, scale, zero, block_size=[1, 32], shape=torch.Size([16, 64]))
    exact = codes.view(16, 2, 32).double() * scale.t().double()[..., None] + zero.t().double()[..., None]
    found = grouped_of(weight)
    assert torch.equal(found.dense(), exact.view(16, 64).float())
    assert torch.equal(pass_ext.layers.unpack_weight(found.packed(), 16), exact.view(16, 64).float())
    weight.act_pre_scale = torch.ones(64)
    assert grouped_of(weight) is None, "inputs are multiplied"
