"""gpt_oss from a GGUF file: its config, numbers and texts are those of the dense model with the file's numbers."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from support.gguf_files import VOCABULARY, write_gguf_of_oss

import pass_ext
from pass_ext.checkpoint import load_checkpoint
from pass_ext.layers import unpack_weight
from pass_ext.weights.experts import PackedExperts
from pass_ext.weights.layers import PackedEmbedding, PackedLinear
from pass_ext.weights.model import formats_of


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PASS_EXT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    file = tmp_path_factory.mktemp("oss") / "oss.gguf"
    return file, write_gguf_of_oss(file)


@pytest.fixture(scope="module")
def tokens():
    """Longer than the window and than the context that the rotation was trained for."""
    return torch.randint(0, VOCABULARY, (2, 90), generator=torch.Generator().manual_seed(0))


def numbers_are_those_of(model, exact, tokens):
    expected = exact(tokens).logits
    assert (model(tokens).logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_the_numbers_are_the_files(written, tokens):
    file, exact = written
    model, tokenizer = load_checkpoint(file, torch.float32)
    numbers_are_those_of(model, exact, tokens)
    for name, part in exact.named_modules():
        ours, weight = model.get_submodule(name), getattr(part, "weight", None)
        if name.endswith("experts"):
            assert isinstance(ours, PackedExperts)
            for expert in range(4):
                gate, up, down = (unpack_weight(each[expert], len(other)) for each, other in
                                  ((ours.gate, range(96)), (ours.up, range(96)), (ours.down, range(64))))  # fmt: skip
                assert torch.equal(gate.t(), part.gate_up_proj[expert][:, ::2])
                assert torch.equal(up.t(), part.gate_up_proj[expert][:, 1::2])
                assert torch.equal(down.t(), part.down_proj[expert])
        elif isinstance(ours, PackedLinear):
            assert torch.equal(unpack_weight(ours.weight, ours.out_features), weight)
    experts = 2 * 4 * 3 * 96 * 64
    assert formats_of(model)["4 bits"] == experts * 21 // 32 and "8 bits" in formats_of(model)
    assert isinstance(model.get_input_embeddings(), PackedEmbedding)
    assert tokenizer("cab").input_ids == [66, 256] and tokenizer.eos_token_id == model.config.eos_token_id == 257


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_weights_are_the_same_numbers(written, dtype):
    file, exact = written
    dense, _ = load_checkpoint(file, dtype, weights="dense")
    assert not any(isinstance(part, (PackedExperts, PackedLinear)) for part in dense.modules())
    for model in (dense, load_checkpoint(file, dtype, weights="dense")[0]):  # converted, and kept
        state = model.state_dict()
        assert all(torch.equal(state[name], weight.to(dtype)) for name, weight in exact.state_dict().items())


def test_the_config_is_the_files(written):
    model, _ = load_checkpoint(written[0])
    own, exact = model.config, written[1].config
    for name in ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads", "vocab_size",
                 "num_local_experts", "num_experts_per_tok", "sliding_window", "layer_types", "max_position_embeddings",
                 "tie_word_embeddings", "num_hidden_layers"):  # fmt: skip
        assert getattr(own, name) == getattr(exact, name), name
    assert own.rms_norm_eps == pytest.approx(exact.rms_norm_eps)
    rotation, expected = model.model.rotary_emb, written[1].model.rotary_emb
    assert torch.equal(rotation.inv_freq, expected.inv_freq)
    assert rotation.attention_scaling == expected.attention_scaling != 1


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (dict(kind="BF16"), {}),  # as its makers' file has the attention
        (dict(experts="Q8_0"), {}),
        (dict(experts="BF16"), {}),  # dense
        (dict(intermediate_size=80, experts="F32"), {}),  # no whole blocks: dense
        (dict(tie_word_embeddings=True), {}),
        (
            dict(rope_parameters=dict(rope_type="default", rope_theta=20000.0)),
            {"rope.scaling.type": None, "rope.scaling.factor": None, "rope.scaling.original_context_length": None},
        ),
        (
            dict(
                rope_parameters=dict(
                    rope_type="yarn", rope_theta=20000.0, factor=8.0, original_max_position_embeddings=64,
                    truncate=False, beta_fast=16.0, beta_slow=2.0,
                )
            ),
            {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.finetuned": 1},
        ),
    ],
)  # fmt: skip
def test_files_of_other_kinds_have_their_numbers(tmp_path, tokens, options, changes):
    file = tmp_path / "oss.gguf"
    exact = write_gguf_of_oss(file, changes=changes, **options)
    model, _ = load_checkpoint(file, torch.float32)
    numbers_are_those_of(model, exact, tokens)
    assert model.config.tie_word_embeddings == options.get("tie_word_embeddings", False)
    is_dense = options.get("experts") in ("BF16", "F32")
    assert any(isinstance(part, PackedExperts) for part in model.modules()) != is_dense


def test_texts_are_plains(written, tokens):
    model, _ = load_checkpoint(written[0])
    options = dict(max_new_tokens=24, eos_token_id=[])
    plain = pass_ext.generate(model, tokens, **options)
    assert len(plain.sequences[0].unique()) > 20
    slots = pass_ext.PaSS(pass_ext.LookaheadEmbedding(3, 64, rank=4, dtype=torch.bfloat16), rows=12)
    for method in (pass_ext.NGram(), slots):
        assert torch.equal(pass_ext.generate(model, tokens, method, **options).sequences, plain.sequences)
        alone = pass_ext.generate(model, tokens[1:], method, **options).sequences
        assert torch.equal(alone, plain.sequences[1:])
    sampled = dict(options, temperature=0.9, seeds=3)
    expected = pass_ext.generate(model, tokens, **sampled).sequences
    assert torch.equal(pass_ext.generate(model, tokens, slots, **sampled).sequences, expected)


# ---- what is no such file ----


def without(name):
    return lambda tensors: tensors.pop(name)


def renamed(name, other):
    return lambda tensors: tensors.update({other: tensors.pop(name)})


def cut(name, rows):
    def damage(tensors):
        numbers, stored, own = tensors[name]
        tensors[name] = numbers, stored[:rows], own

    return damage


FAULTS = {
    "no sinks": (without("blk.1.attn_sinks.weight"), {}, r"oss\.gguf has no tensors for model\.layers\.1\.self_attn\.sinks"),
    "no bias of a query": (without("blk.0.attn_q.bias"), {}, r"has no tensors for model\.layers\.0\.self_attn\.q_proj\.bias"),
    "no table": (without("token_embd.weight"), {}, r"oss\.gguf is a GGUF file of gpt-oss without token_embd\.weight"),
    "no ups": (
        without("blk.0.ffn_up_exps.weight"), {},
        r"layers\.0\.mlp\.experts must have gates, ups and downs, each with weight and bias, and the file has blk\.0\.ffn_down",
    ),
    "no biases of downs": (without("blk.1.ffn_down_exps.bias"), {}, r"layers\.1\.mlp\.experts must have gates, ups and downs"),
    "no experts": (
        lambda tensors: [tensors.pop(name) for name in list(tensors) if "blk.1.ffn" in name], {},
        r"has no tensors for model\.layers\.1\.mlp\.router\.weight, .*experts\.gate_up_proj",
    ),
    "fewer experts": (
        cut("blk.0.ffn_down_exps.weight", 3), {},
        r"tensor blk\.0\.ffn_down_exps\.weight must be \[4, 64, 96\], and the file has \[3, 64, 96\]",
    ),
    "fewer biases": (
        cut("blk.0.ffn_gate_exps.bias", 3), {},
        r"tensor blk\.0\.ffn_gate_exps\.bias must be \[4, 96\], and the file has \[3, 96\]",
    ),
    "a foreign tensor": (
        renamed("blk.0.attn_norm.weight", "blk.0.attn_rest.weight"), {},
        r"oss\.gguf has tensors for which GptOssForCausalLM has no place: blk\.0\.attn_rest\.weight",
    ),
    "no window": (
        lambda tensors: None, {"attention.sliding_window": None},
        r"oss\.gguf is a GGUF file of gpt-oss without gpt-oss\.attention\.sliding_window",
    ),
    "another rotation": (
        lambda tensors: None, {"rope.scaling.type": "longrope"},
        r"oss\.gguf has a rotation that is not read: linear ones .* the file has factor 8\.0, .*, type longrope",
    ),
    "a rotation of another kind": (
        lambda tensors: None, {"rope.scaling.attn_factor": 2.0}, r"is not read: .* the file has attn_factor 2\.0",
    ),
    "a rotation with a part": (
        lambda tensors: None, {"rope.scaling.original_context_length": None}, r"is not read: .* YaRN with .* has factor 8\.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_files_that_cannot_be_read_are_refused_in_a_sentence(tmp_path, name):
    damage, changes, message = FAULTS[name]
    file = tmp_path / "oss.gguf"
    write_gguf_of_oss(file, damage=damage, changes=changes)
    for weights in ("stored", "dense"):
        with pytest.raises(ValueError, match=message):
            load_checkpoint(file, torch.float32, weights=weights)


def test_exponents_that_are_no_numbers_are_refused(tmp_path):
    def damage(tensors):
        tensors["blk.1.ffn_up_exps.weight"][1][..., 0] = 255

    write_gguf_of_oss(tmp_path / "oss.gguf", damage=damage)
    with pytest.raises(ValueError, match=r"tensor blk\.1\.ffn_up_exps\.weight: the scales of MXFP4 must be finite"):
        load_checkpoint(tmp_path / "oss.gguf")
