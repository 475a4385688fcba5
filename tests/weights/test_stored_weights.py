"""A model whose weights are a GGUF file's own numbers: its parts, copies and texts, beside the dense model of the same file."""

import copy
import io
import pickle
import shutil

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf
from support.gguf_files import VOCABULARY, write_gguf, write_gguf_of_experts

import pass_ext
from pass_ext.__main__ import main
from pass_ext.checkpoint import load_checkpoint
from pass_ext.decoding.models import fused_forward
from pass_ext.layers import unpack_weight
from pass_ext.weights.experts import PackedExperts
from pass_ext.weights.gguf import read_once
from pass_ext.weights.layers import PackedEmbedding, PackedLinear
from pass_ext.weights.model import formats_of

KINDS = ("Q4_0", "Q4_1", "Q8_0")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PASS_EXT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    named = {kind: write_gguf(folder / f"{kind}.gguf", kind) for kind in KINDS}
    return named | {"tied": write_gguf(folder / "tied.gguf", "Q8_0", tied=True)}


@pytest.fixture(scope="module")
def model(files):
    return load_checkpoint(files["Q4_1"], torch.bfloat16)[0]


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, VOCABULARY, (3, 300), generator=torch.Generator().manual_seed(0))


def packed_layers(model):
    return [part for part in model.modules() if isinstance(part, (PackedLinear, PackedEmbedding))]


@pytest.mark.parametrize("kind", [*KINDS, "tied"])
def test_the_numbers_are_those_of_the_dense_model(files, kind, tokens):
    """In float32; x has 16 bits."""
    model, tokenizer = load_checkpoint(files[kind], torch.float32)
    dense, its_tokenizer = load_checkpoint(files[kind], torch.float32, weights="dense")
    assert len(packed_layers(model)) == 2 * 7 + 2 and not model.training
    with torch.no_grad():
        got, expected = (each(tokens[:, :40]).logits for each in (model, dense))
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
    assert tokenizer("cab").input_ids == its_tokenizer("cab").input_ids
    assert not any(weight.requires_grad for weight in model.parameters())
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head.weight is table.weight) == (kind == "tied")
    assert torch.equal(table(tokens), dense.get_input_embeddings()(tokens))
    assert formats_of(model).keys() == {"float32", "4 bits" if kind.startswith("Q4") else "8 bits"}


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "MXFP4"])
def test_experts_have_the_numbers_of_the_file(tmp_path, tokens, kind):
    file = write_gguf_of_experts(tmp_path / "experts.gguf", kind)
    model, _ = load_checkpoint(file, torch.float32)
    dense, _ = load_checkpoint(file, torch.float32, weights="dense")
    experts = {name: part for name, part in model.named_modules() if isinstance(part, PackedExperts)}
    assert len(experts) == 2 and len(packed_layers(model)) == 2 * 4 + 2
    for name, part in experts.items():
        own = dense.get_submodule(name)
        for expert in range(4):
            gate, up, down = (unpack_weight(weight[expert], size) for weight, size in
                              ((part.gate, 768), (part.up, 768), (part.down, 32)))  # fmt: skip
            assert torch.equal(torch.cat([gate, up]), own.gate_up_proj[expert])
            assert torch.equal(down, own.down_proj[expert])
    got, expected = (each(tokens[:, :40]).logits for each in (model, dense))
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
    plain = pass_ext.generate(model, tokens[:, :30], max_new_tokens=16, eos_token_id=[]).sequences
    got = pass_ext.generate(model, tokens[:, :30], pass_ext.NGram(), max_new_tokens=16, eos_token_id=[])
    assert torch.equal(got.sequences, plain)
    assert sum(formats_of(model).values()) < 0.5 * sum(formats_of(dense).values())
    other, _ = load_checkpoint(write_gguf_of_experts(tmp_path / "narrow.gguf", kind, width=96))
    assert other.config.moe_intermediate_size == 96


def test_its_layers_run_by_the_layer_ops(model, tokens):
    assert pass_ext.generate(model, tokens[:1, :20], max_new_tokens=4).stats.backend == "fused"


def test_a_long_prompt_runs_by_them_too(model, tokens, monkeypatch):
    """Dense layers leave so many rows to PyTorch's product; packed ones have one for all."""
    pass_ext.generate(model, tokens[:1, :20], max_new_tokens=1)
    rows, stack = [], fused_forward._stack
    monkeypatch.setattr(fused_forward, "_stack", lambda x, *others: rows.append(len(x)) or stack(x, *others))
    pass_ext.generate(model, tokens[:1], max_new_tokens=3)
    assert rows == [300, 1, 1]


METHODS = {
    "NGram": lambda model: pass_ext.NGram(),
    "EarlyExitDraft": lambda model: pass_ext.Speculative(pass_ext.EarlyExitDraft(model, layers=1)),
    "PaSS": lambda model: pass_ext.PaSS(pass_ext.LookaheadEmbedding(3, 32, rank=4, dtype=torch.bfloat16)),
    "another model": lambda model: pass_ext.Speculative(copy.deepcopy(model)),
}


@pytest.mark.parametrize("name", METHODS)
def test_texts_of_all_methods_are_those_of_plain(model, tokens, name):
    method = METHODS[name](model)
    plain = pass_ext.generate(model, tokens[:, :30], max_new_tokens=24, eos_token_id=[]).sequences
    assert torch.equal(
        pass_ext.generate(model, tokens[:, :30], method, max_new_tokens=24, eos_token_id=[]).sequences, plain
    )
    alone = pass_ext.generate(model, tokens[1:2, :30], method, max_new_tokens=24, eos_token_id=[]).sequences
    assert torch.equal(alone, plain[1:2])


def test_a_text_does_not_depend_on_how_its_prompt_is_cut(model, tokens):
    """A prompt of many rows, of one more at a time, and one that is read in pieces have the same bits."""
    whole = pass_ext.generate(model, tokens[:1], max_new_tokens=40, eos_token_id=[], logprobs=0)
    for more in (1, 13):
        again = pass_ext.generate(
            model, whole.sequences[:, : 300 + more], max_new_tokens=40 - more, eos_token_id=[], logprobs=0
        )
        assert torch.equal(again.sequences, whole.sequences)
        assert torch.equal(again.logprobs[0].raw, whole.logprobs[0].raw[more:])


def test_fused_forward_and_the_model_as_it_is_give_the_same_text(model, tokens):
    expected = pass_ext.generate(model, tokens[:2, :50], max_new_tokens=16, eos_token_id=[])
    hooked = copy.deepcopy(model)
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    got = pass_ext.generate(hooked, tokens[:2, :50], max_new_tokens=16, eos_token_id=[])
    assert got.stats.backend.startswith("module") and expected.stats.backend == "fused"
    assert torch.equal(got.sequences, expected.sequences)


def test_copies_pickles_and_state_dicts_have_the_weights(files, model, tokens):
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = load_checkpoint(files["Q4_1"], torch.bfloat16)[0]
    for part in packed_layers(other):
        part.weight.data.zero_()
    other.load_state_dict(torch.load(buffer))
    with torch.no_grad():
        expected = model(tokens[:, :9]).logits
        for same in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(same(tokens[:, :9]).logits, expected)
        wide = copy.deepcopy(model).to(torch.float32)
        assert wide(tokens[:, :9]).logits.dtype == torch.float32
        torch.testing.assert_close(wide(tokens[:, :9]).logits, expected.float(), atol=0.1, rtol=0.1)
    assert all(part.weight.dtype == torch.uint8 for part in packed_layers(wide))


def test_gradients_reach_the_input(model):
    layer = model.model.layers[0].mlp.down_proj
    weight = pass_ext.layers.unpack_weight(layer.weight, layer.out_features)
    x = torch.randn(2, 3, layer.in_features, requires_grad=True)
    out = torch.randn(2, 3, layer.out_features)
    layer(x).backward(out)
    torch.testing.assert_close(x.grad, out @ weight)


def test_what_cannot_be_done_with_it_is_refused(files, model, tmp_path):
    with pytest.raises(ValueError, match="saved as that file: keep it, or load the model with weights='dense'"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(ValueError, match="weights must be 'stored' or 'dense', got 'packed'"):
        load_checkpoint(files["Q4_1"], weights="packed")
    with pytest.raises(ValueError, match="device_map of from_pretrained need weights='dense' with a GGUF file"):
        load_checkpoint(files["Q4_1"], device_map="cpu")


def test_a_file_is_read_as_its_own_reader_does(files):
    theirs = gguf.GGUFReader(files["Q4_1"])
    with read_once():
        ours = gguf.GGUFReader(files["Q4_1"])
        assert gguf.GGUFReader(files["Q4_1"]) is ours
    assert gguf.GGUFReader is type(theirs)
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        assert (ours.fields[name].types, ours.fields[name].contents()) == (field.types, field.contents())
        assert ours.fields[name].offset == field.offset
    assert [tensor.name for tensor in ours.tensors] == [tensor.name for tensor in theirs.tensors]
    assert all((mine.data == its.data).all() for mine, its in zip(ours.tensors, theirs.tensors, strict=True))


@pytest.mark.parametrize("numbers", [1, 600, 1 << 19])
def test_a_tensor_is_packed_whole_in_pieces_of_any_size(files, numbers, monkeypatch):
    whole = load_checkpoint(files["tied"])[0].state_dict()
    monkeypatch.setattr("pass_ext.weights.gguf._PIECE", numbers)
    pieces = load_checkpoint(files["tied"])[0].state_dict()
    assert all(torch.equal(weight, pieces[name]) for name, weight in whole.items())


def test_damaged_files_are_refused_in_a_sentence(files, tmp_path):
    whole = files["Q4_1"].read_bytes()
    cuts = [(f"cut{at}.gguf", whole[:at]) for at in (30, 1000, 3000, 4000, 6000, len(whole) * 2 // 3)]
    for name, content in (*cuts, ("foreign.gguf", b"no model" * 100)):
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is no GGUF file, or damaged, or was cut off"):
            load_checkpoint(file)
    file = write_gguf(tmp_path / "part.gguf", "Q4_0", missing=("blk.1.ffn_up.weight", "output_norm.weight"))
    with pytest.raises(
        ValueError, match=r"part.gguf has no tensors for model.layers.1.mlp.up_proj.weight, model.norm.weight"
    ):
        load_checkpoint(file)
    file = write_gguf_of_experts(tmp_path / "experts.gguf", "Q8_0", missing=("blk.1.ffn_up_exps.weight",))
    with pytest.raises(
        ValueError, match=r"layers.1.mlp.experts must have gates, ups and downs, each with weight, and the"
    ):
        load_checkpoint(file)


def test_info_names_formats_and_bytes(files, tmp_path, capsys):
    assert main(["info", str(shutil.copy(files["Q4_0"], tmp_path))]) == 0
    said = capsys.readouterr().out
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 2 * 272 * 32  # outputs are whole groups of 16
    assert "llama: fused" in said and f"{matrices * 20 / 32 / 1e6:,.1f} MB in 4 bits" in said
