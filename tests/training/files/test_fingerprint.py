"""The fingerprint of the model that slots and exit adapters belong to: every form of it fits, and another model is refused."""

import copy
import json
import struct

import pytest
import torch
from safetensors.torch import load_file
from support.small_models import small_model
from torch import nn

import pass_ext
from pass_ext import EarlyExitDraft, LookaheadEmbedding
from pass_ext.checkpoint import demo_model
from pass_ext.drafting import ExitAdapter
from pass_ext.modules.files import PRETRAINED, fingerprint_of

transformers = pytest.importorskip("transformers")

PROMPT = torch.tensor([[5, 6, 7, 8]])
REFUSED = (
    "belongs to another model; embedding table: it was trained with that of 'mine'.* set its attribute fingerprint to"
)


def table_of(model):
    return model.get_input_embeddings().weight


def slots_for(model):
    torch.manual_seed(0)
    return LookaheadEmbedding.from_table(3, table_of(model), base_model="mine")


def adapter_for(model):
    adapter = ExitAdapter(1, table_of(model).shape[1], 4, base_model="mine", base_vocabulary=len(table_of(model)))
    adapter.fingerprint = fingerprint_of(table_of(model))
    return adapter


def kept(module, path):
    """As its file has it."""
    module.save(path)
    return type(module).load(path)


def text_of(model, method):
    return pass_ext.generate(model, PROMPT, method, max_new_tokens=8, eos_token_id=[]).sequences


def test_slots_of_another_model_are_refused_where_they_draft(tmp_path):
    mine, other = small_model("llama"), small_model("llama", seed=1)
    slots = kept(slots_for(mine), tmp_path / "slots.safetensors")
    assert torch.equal(text_of(mine, pass_ext.PaSS(slots, rows=8)), text_of(mine, pass_ext.Plain()))
    with pytest.raises(ValueError, match=f"look-ahead embedding {REFUSED}"):
        text_of(other, pass_ext.PaSS(slots, rows=8))
    with pytest.raises(ValueError, match=REFUSED):
        LookaheadEmbedding.load(tmp_path / "slots.safetensors", table=table_of(other))
    slots.fingerprint = ""  # the switch
    assert torch.equal(text_of(other, pass_ext.PaSS(slots, rows=8)), text_of(other, pass_ext.Plain()))
    assert kept(slots, tmp_path / "any.safetensors").fingerprint == ""


def test_an_exit_adapter_of_another_model_is_refused(tmp_path):
    mine, other = small_model("llama"), small_model("llama", seed=1)
    adapter = kept(adapter_for(mine), tmp_path / "exit.safetensors")
    for model in (mine, copy.deepcopy(mine).to(torch.bfloat16)):
        EarlyExitDraft(model, adapter=adapter)
    with pytest.raises(ValueError, match=f"exit adapter {REFUSED}"):
        EarlyExitDraft(other, adapter=tmp_path / "exit.safetensors")
    adapter.fingerprint = ""
    draft = pass_ext.Speculative(EarlyExitDraft(other, adapter=adapter))
    assert torch.equal(text_of(other, draft), text_of(other, pass_ext.Plain()))


class Held(torch.Tensor):
    """A table of a type of its own, as torchao's."""


def of_dtype(dtype):
    return lambda model: model.to(dtype)


def four_bits(model):
    """Rounded to 15 levels in groups of 32, as a GGUF file or a quantised checkpoint has its table."""
    groups = table_of(model).data.view(-1, 32)
    step = groups.abs().amax(1, keepdim=True) / 7
    table_of(model).data = (groups / step).round().mul(step).view(table_of(model).shape)
    return model


def of_own_type(model):
    embedding = model.get_input_embeddings()
    embedding.weight = nn.Parameter(torch.Tensor._make_subclass(Held, embedding.weight.data), requires_grad=False)
    assert type(embedding.weight.data) is Held
    return model


def offloaded(model):
    return pytest.importorskip("accelerate").cpu_offload(model, execution_device=torch.device("cpu")) or model


FORMS = [of_dtype(torch.float32), of_dtype(torch.bfloat16), of_dtype(torch.float16), four_bits, of_own_type, offloaded]


@pytest.mark.parametrize("form", FORMS, ids=["fp32", "bf16", "fp16", "four bits", "own type", "offloaded"])
def test_every_form_of_one_model_fits_and_none_of_another(form):
    slots = slots_for(small_model("llama", tie_word_embeddings=False))
    mine = form(small_model("llama", tie_word_embeddings=False))
    other = form(small_model("llama", seed=1, tie_word_embeddings=False))
    text_of(mine, pass_ext.PaSS(slots, rows=8))
    with pytest.raises(ValueError, match=REFUSED):
        text_of(other, pass_ext.PaSS(slots, rows=8))


@pytest.mark.parametrize("value", ["00", "g" * 64, "A" * 64])
def test_a_damaged_fingerprint_gets_a_sentence(tmp_path, value):
    slots = slots_for(small_model("llama"))
    slots.fingerprint = value
    slots.save(tmp_path / "x")
    with pytest.raises(ValueError, match="x is damaged: metadata 'fingerprint' must be 64 hexadecimal digits, got"):
        LookaheadEmbedding.load(tmp_path / "x")


def test_shipped_files_name_their_model():
    found = {module.fingerprint for module in map(LookaheadEmbedding.from_pretrained, LookaheadEmbedding.shipped())}
    assert found == {ExitAdapter.from_pretrained("smollm2-135m-instruct").fingerprint} and len(found.pop()) == 64
    with pytest.raises(ValueError, match=r"trained with that of 'SmolLM2-135M-Instruct.Q4_1'"):
        LookaheadEmbedding.from_pretrained("smollm2-135m-instruct-slots", table=torch.randn(49152, 576))


def test_shipped_files_fit_their_model_as_its_gguf_file_holds_it():
    gguf = pytest.importorskip("gguf")
    stored = next(one for one in gguf.GGUFReader(demo_model()).tensors if one.name == "token_embd.weight")
    assert stored.tensor_type == gguf.GGMLQuantizationType.Q8_0
    table = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type))
    for name in LookaheadEmbedding.shipped():
        for dtype in (torch.float32, torch.bfloat16):
            LookaheadEmbedding.from_pretrained(name, table=table.to(dtype))
        with pytest.raises(ValueError, match="belongs to another model"):
            LookaheadEmbedding.from_pretrained(name, table=table.roll(1, 1))
    ExitAdapter.from_pretrained("smollm2-135m-instruct").check_fits(table, 30)


def test_the_command_writes_metadata_alone(tmp_path):
    from tools.fingerprints import write_fingerprint

    path = tmp_path / "smollm2-135m-instruct-slots.safetensors"
    path.write_bytes((PRETRAINED / path.name).read_bytes())
    before, tensors = LookaheadEmbedding.load(path), load_file(path)
    table = torch.randn(49152, 576)
    write_fingerprint(path, table)
    after = LookaheadEmbedding.load(path, table=table)
    assert after.fingerprint == fingerprint_of(table) != before.fingerprint
    assert (after.training_record, after.hit_rates) == (before.training_record, before.hit_rates)
    for name, tensor in load_file(path).items():
        assert torch.equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8)), name
    with pytest.raises(ValueError, match=r"is for an embedding table of \[49152, 576\], the model's is \[9, 576\]"):
        write_fingerprint(path, table[:9])
    with pytest.raises(ValueError, match="is no look-ahead embedding or exit adapter file: its format is 'pass_ext"):
        write_fingerprint(next(PRETRAINED.glob("*decision*.safetensors")), table)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert length % 8 == 0 and json.loads(path.read_bytes()[8 : 8 + length])
