"""SlotAdapters in a LookaheadEmbedding: its file, damaged ones, and what cannot be made."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pass_ext import LookaheadEmbedding
from pass_ext.modules.slot_adapters import AdapterSize, SlotAdapters

SIZES = {
    "10.mlp.up_proj": AdapterSize(16, 24, 3),
    "0.self_attn.q_proj": AdapterSize(16, 8, 2),
    "2.self_attn.q_proj": AdapterSize(16, 8, 2),
}


def embedding_with(count=1, dtype=torch.bfloat16, **more):
    torch.manual_seed(1)
    adapters = SlotAdapters(SIZES, count, scale=0.25, dtype=dtype)
    for parameter in adapters.parameters():
        torch.nn.init.normal_(parameter)
    return LookaheadEmbedding(
        3, 16, rank=2, deep_layers=11, base_model="tiny", vocabulary=50, adapters=adapters, dtype=dtype, **more
    )


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_file_gives_the_same_adapters(tmp_path, count, dtype):
    embedding = embedding_with(count, dtype)
    embedding.save(tmp_path / "slots.safetensors")
    again = LookaheadEmbedding.load(tmp_path / "slots.safetensors")
    assert repr(again) == repr(embedding)
    assert again.adapters.places == ["0.self_attn.q_proj", "2.self_attn.q_proj", "10.mlp.up_proj"]
    assert (again.adapters.count, again.adapters.scale, again.adapters.layers) == (count, 0.25, 11)
    old, new = embedding.state_dict(), again.state_dict()
    assert list(old) == list(new) and all(
        torch.equal(old[name], new[name]) and new[name].dtype == dtype for name in old
    )


def test_the_names_in_the_file(tmp_path):
    embedding_with().save(tmp_path / "slots.safetensors")
    with safe_open(tmp_path / "slots.safetensors", "pt") as file:
        names = {name for name in file.keys() if name.startswith("adapter.")}  # noqa: SIM118
        metadata = file.metadata()
    assert names == {f"adapter.{place}.{side}" for place in SIZES for side in ("down", "up")}
    assert metadata["adapter_count"] == "1" and metadata["adapter_scale"] == "0.25"


def test_a_file_without_adapters(tmp_path):
    LookaheadEmbedding(3, 16).save(tmp_path / "slots.safetensors")
    assert LookaheadEmbedding.load(tmp_path / "slots.safetensors").adapters is None
    with safe_open(tmp_path / "slots.safetensors", "pt") as file:
        assert not any(key.startswith("adapter") for key in file.metadata())


Q = "adapter.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t, m: t.pop(f"{Q}.up"), r"'adapter.0.self_attn.q_proj.up' must be a tensor with a size 2"),
        (lambda t, m: t.update({f"{Q}.up": torch.zeros(1, 3, 8)}), r"up' must be of shape \[1, 2, 8\], got \[1, 3, 8\]"),
        (lambda t, m: t.update({f"{Q}.bias": torch.zeros(8)}), r"must be down or up of a place, got .*q_proj.bias"),
        (lambda t, m: t.update({f"{Q}.up": torch.full((1, 2, 8), torch.inf)}), r"up' must be finite"),
        (lambda t, m: t.update({"adapter.x.down": torch.ones(1, 2, 16), "adapter.x.up": torch.ones(1, 2, 8)}),
         r"the adapters must be of places .* got \"place must be a layer's number"),
        (lambda t, m: t.update({f"{Q}.down": torch.ones(1, 129, 16), f"{Q}.up": torch.ones(1, 129, 8)}),
         "from 1 to 128, got 129"),
        (lambda t, m: m.pop("adapter_count"), r"metadata 'adapter_count' must be a whole number"),
        (lambda t, m: m.update(adapter_count="2"), r"metadata 'adapter_count' must be 1 or 3, the slots, got 2"),
        (lambda t, m: m.update(adapter_scale="inf"), r"metadata 'adapter_scale' must be a finite number, got 'inf'"),
        (lambda t, m: m.pop("adapter_scale"), r"metadata 'adapter_scale' must be a finite number, but it is missing"),
    ],
    ids=range(10),
)  # fmt: skip
def test_damaged_files(tmp_path, damage, message):
    path = tmp_path / "slots.safetensors"
    embedding_with(dtype=torch.float32).save(path)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    damage(tensors, metadata)
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ValueError, match=message) as refusal:
        LookaheadEmbedding.load(path)
    assert str(refusal.value).startswith(f"{path} is damaged")


def test_fresh_adapters_add_nothing_and_have_a_gradient():
    adapters = SlotAdapters(SIZES, 3)
    for _, down, up in adapters.pairs():
        assert not up.any() and down.std() > 0.1
    assert [down.shape[0] for _, down, _ in adapters.pairs(2)] == [2, 2, 2]
    assert [down.shape[0] for _, down, _ in SlotAdapters(SIZES).pairs(2)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlotAdapters({}), "got 0 places"),
        (lambda: SlotAdapters(SIZES, 0), "got 3 places and count 0"),
        (lambda: SlotAdapters({"q_proj": AdapterSize(4, 4, 2)}), "place must be a layer's number and a name there"),
        (lambda: SlotAdapters({"0.q": AdapterSize(4, 4, 129)}), "rank of 0.q must be from 1 to 128, got 129"),
        (lambda: LookaheadEmbedding(4, 16, adapters=SlotAdapters(SIZES, 3)), "one for each of 4 slots, got 3"),
    ],
    ids=range(5),
)
def test_what_cannot_be_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()
