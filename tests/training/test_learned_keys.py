"""Learned keys and values in a LookaheadEmbedding: its file, older files, damaged ones, and what cannot be made."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pass_ext import LookaheadEmbedding
from pass_ext.modules.slot_adapters import AdapterSize, SlotAdapters


def embedding_with(*, dtype=torch.bfloat16, value_dim=4, adapters=None):
    torch.manual_seed(1)
    embedding = LookaheadEmbedding(
        3, 16, rank=2, deep_layers=2, base_model="tiny", vocabulary=50, dtype=dtype, adapters=adapters
    )
    embedding.set_prefix(torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3, value_dim))
    return embedding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("value_dim", [4, 6])
@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_file_gives_the_same_keys(tmp_path, dtype, value_dim, is_adapted):
    adapters = SlotAdapters({"0.q_proj": AdapterSize(16, 8, 2)}, dtype=dtype) if is_adapted else None
    embedding = embedding_with(dtype=dtype, value_dim=value_dim, adapters=adapters)
    embedding.save(tmp_path / "slots.safetensors")
    with safe_open(tmp_path / "slots.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pass_ext.lookahead.4"
        assert {"prefix_keys", "prefix_values"} < set(file.keys())
    again = LookaheadEmbedding.load(tmp_path / "slots.safetensors")
    assert repr(again) == repr(embedding) and "prefix_length=5" in repr(again)
    old, new = embedding.state_dict(), again.state_dict()
    assert list(old) == list(new) and all(
        torch.equal(old[name], new[name]) and new[name].dtype == dtype for name in old
    )
    assert [list(x.shape) for x in again.prefix] == [[2, 5, 3, 4], [2, 5, 3, value_dim]]


def test_files_without_are_as_before(tmp_path):
    LookaheadEmbedding(3, 16).save(tmp_path / "slots.safetensors")
    with safe_open(tmp_path / "slots.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pass_ext.lookahead.2" and list(file.keys()) == ["lookahead"]
    again = LookaheadEmbedding.load(tmp_path / "slots.safetensors")
    assert again.prefix is None and again.prefix_keys is None and again.prefix_length == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("prefix_values"), "'prefix_values' must be a tensor with a size 3 of at least 1, but it is missing"),
        (lambda t: t.pop("prefix_keys"), "'prefix_keys' must be a tensor with a size 0 of at least 1, but it is missing"),
        (lambda t: t.update(prefix_values=torch.ones(2, 4, 3, 4)),
         r"'prefix_values' must be of shape \[2, 5, 3, 4\], got \[2, 4, 3, 4\]"),
        (lambda t: t.update(prefix_keys=torch.ones(2, 5, 3)),
         r"'prefix_keys' must be a tensor with a size 3 .* got \[2, 5, 3\]"),
        (lambda t: t.update(prefix_keys=torch.ones(2, 0, 3, 4)), "'prefix_keys' must be a tensor with a size 1 of at least 1"),
        (lambda t: t.update(prefix_keys=torch.full((2, 5, 3, 4), torch.nan)), "'prefix_keys' must be finite"),
        (lambda t: t.update(prefix_keys=torch.ones(2, 5, 3, 4, dtype=torch.int32)), "'prefix_keys' must be of type F16"),
    ],
    ids=range(7),
)  # fmt: skip
def test_damaged_files(tmp_path, damage, message):
    path = tmp_path / "slots.safetensors"
    embedding_with(dtype=torch.float32).save(path)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    damage(tensors)
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ValueError, match=message) as refusal:
        LookaheadEmbedding.load(path)
    assert str(refusal.value).startswith(f"{path} is damaged")


def test_keys_are_copied_in_the_type_of_the_slots():
    keys = torch.randn(2, 5, 3, 4)
    embedding = LookaheadEmbedding(3, 16, dtype=torch.bfloat16)
    embedding.set_prefix(keys, keys)
    assert torch.equal(embedding.prefix_keys, keys.bfloat16()) and embedding.prefix_values.requires_grad
    assert embedding.prefix_keys.data_ptr() != embedding.prefix_values.data_ptr()


@pytest.mark.parametrize(
    "shapes",
    [
        ((5, 3, 4),) * 2,
        ((2, 5, 3, 4), (2, 5, 2, 4)),
        ((2, 0, 3, 4),) * 2,
        ((2, 5, 3, 4), (2, 5, 3)),
        ((2, 5, 3, 4), (2, 5, 3, 4, 7)),
    ],
    ids=range(5),
)
def test_keys_that_cannot_be(shapes):
    with pytest.raises(ValueError, match=r"must be \[layers, P, KV heads, D\], alike but for D, got"):
        LookaheadEmbedding(3, 16).set_prefix(*map(torch.ones, shapes))
