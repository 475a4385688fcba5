"""The module LookaheadEmbedding: initialisation, injection and learning, save and load, and what it refuses."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import pass_ext
from pass_ext import LookaheadEmbedding, reference


def table_of(rows=100, dim=16, dtype=torch.bfloat16):
    return (torch.randn(rows, dim, generator=torch.Generator().manual_seed(1)) * 0.1 + 0.3).to(dtype)


def test_it_injects_its_rows():
    table, embedding = table_of(), LookaheadEmbedding(4, 16, dtype=torch.float32)
    ids = torch.tensor([[5, -1, -2], [-4, 99, 0]])
    assert torch.equal(embedding(ids, table), reference.lookahead_embed(ids, table, embedding.weight))


def test_starts_from_the_models_own_embeddings():
    table = table_of()
    embedding = LookaheadEmbedding.from_table(4, table, base_model="tiny", dtype=torch.float32)
    mean, deviation = table.float().mean(0), table.float().std(0)
    assert embedding.weight.dtype == torch.float32 and embedding.vocabulary == 100 and embedding.base_model == "tiny"
    assert ((embedding.weight - mean).abs() < 0.1 * deviation).all()
    assert not torch.equal(embedding.weight[0], embedding.weight[1])
    chosen = LookaheadEmbedding.from_table(2, table, ids=torch.tensor([7]))
    assert chosen.weight.dtype == table.dtype
    torch.testing.assert_close(chosen.weight.float(), table[7].float().expand(2, -1), atol=0.05, rtol=0)


def test_it_learns_while_the_table_stays():
    table, goal = table_of(dtype=torch.float32).requires_grad_(False), torch.randn(16)
    embedding = LookaheadEmbedding.from_table(3, table)
    optimizer, before = torch.optim.Adam(embedding.parameters(), lr=0.1), table.clone()
    for _ in range(100):
        loss = (embedding(torch.tensor([4, -2]), table)[1] - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1e-2
    assert torch.equal(table, before)
    assert (embedding.weight.grad[[0, 2]] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_save_and_load_round_trip(tmp_path, dtype):
    table = table_of()
    embedding = LookaheadEmbedding.from_table(4, table, base_model="tiny-model", dtype=dtype)
    embedding.save(tmp_path / "slots.safetensors")
    again = LookaheadEmbedding.load(tmp_path / "slots.safetensors", table=table, base_model="tiny-model")
    assert torch.equal(again.weight, embedding.weight) and again.weight.dtype == dtype
    assert (again.base_model, again.vocabulary, again.num_lookahead, again.dim) == ("tiny-model", 100, 4, 16)
    assert "num_lookahead=4, dim=16, base_model='tiny-model'" in repr(again)
    with safe_open(tmp_path / "slots.safetensors", framework="pt") as file:
        assert file.metadata() == {
            "format": "pass_ext.lookahead.1",
            "base_model": "tiny-model",
            "vocabulary": "100",
            "hidden_size": "16",
            "num_lookahead": "4",
        }


def test_another_models_embeddings_are_refused_with_every_difference(tmp_path):
    LookaheadEmbedding.from_table(4, table_of(), base_model="tiny").save(tmp_path / "x")
    message = (
        r"belong to another model; hidden size: they have 16, this model has 24; "
        r"vocabulary: they have 100, this model has 50; base model: they have 'tiny', this model has 'big'"
    )
    with pytest.raises(ValueError, match=message):
        LookaheadEmbedding.load(tmp_path / "x", table=table_of(50, 24), base_model="big")
    LookaheadEmbedding.load(tmp_path / "x", table=table_of())  # no name given: nothing to compare with


def test_files_that_are_something_else_are_refused(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(ValueError, match="is no look-ahead embedding file: its format is None"):
        LookaheadEmbedding.load(tmp_path / "other")
    metadata = {
        "format": "pass_ext.lookahead.1",
        "base_model": "",
        "vocabulary": "9",
        "hidden_size": "8",
        "num_lookahead": "2",
    }
    save_file({"lookahead": torch.zeros(3, 8)}, tmp_path / "damaged", metadata=metadata)
    with pytest.raises(ValueError, match=r"damaged: its metadata says \[2, 8\], the tensor is \[3, 8\]"):
        LookaheadEmbedding.load(tmp_path / "damaged")
    with pytest.raises(FileNotFoundError):
        LookaheadEmbedding.load(tmp_path / "absent")


def test_nonsense_sizes_are_refused():
    with pytest.raises(ValueError, match="at least 1, got 0 and 16"):
        LookaheadEmbedding(0, 16)
    with pytest.raises(ValueError, match=r"table must be \[V, d\].*got shape \[16\]"):
        LookaheadEmbedding.from_table(2, torch.zeros(16))


def test_state_dict_moves_with_a_model():
    model = torch.nn.ModuleDict({"slots": LookaheadEmbedding(2, 8)})
    assert list(model.state_dict()) == ["slots.weight"]
    assert pass_ext.LookaheadEmbedding is LookaheadEmbedding
