"""The module LookaheadEmbedding: initialisation, injection and learning, save and load, and refusals."""

import pytest
import torch
from safetensors import safe_open

import pass_ext
from pass_ext import LookaheadEmbedding, reference
from pass_ext.modules.files import fingerprint_of


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
            "fingerprint": fingerprint_of(table),
        }


def test_another_models_embeddings_are_refused_with_every_difference(tmp_path):
    LookaheadEmbedding.from_table(4, table_of(), base_model="tiny").save(tmp_path / "x")
    message = (
        r"belongs to another model; hidden size: it has 16, this model has 24; "
        r"vocabulary: it has 100, this model has 50; base model: it has 'tiny', this model has 'big'"
    )
    with pytest.raises(ValueError, match=message):
        LookaheadEmbedding.load(tmp_path / "x", table=table_of(50, 24), base_model="big")
    LookaheadEmbedding.load(tmp_path / "x", table=table_of())  # no name given: nothing to compare with


def test_nonsense_sizes_are_refused():
    with pytest.raises(ValueError, match="num_lookahead must be a whole number, 1 or more, got 0"):
        LookaheadEmbedding(0, 16)
    with pytest.raises(ValueError, match=r"table must be \[V, d\].*got shape \[16\]"):
        LookaheadEmbedding.from_table(2, torch.zeros(16))


def test_state_dict_moves_with_a_model():
    model = torch.nn.ModuleDict({"slots": LookaheadEmbedding(2, 8)})
    assert list(model.state_dict()) == ["slots.weight"]
    assert pass_ext.LookaheadEmbedding is LookaheadEmbedding


def full_embedding():
    """All optional parts present and away from zero."""
    embedding = LookaheadEmbedding.from_table(
        3, table_of(), rank=4, deep_layers=5, base_model="tiny", dtype=torch.bfloat16
    )
    with torch.no_grad():
        for parameter in embedding.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    embedding.hit_rates = ((0.5, 0.25), (0.4, 0.125), (0.3, 0.0))
    embedding.training_record = {"command": "train", "seed": 3}
    return embedding


def test_every_part_survives_a_file(tmp_path):
    embedding = full_embedding()
    embedding.save(tmp_path / "x.safetensors")
    again = LookaheadEmbedding.load(tmp_path / "x.safetensors", table=table_of())
    assert set(again.state_dict()) == {"weight", "transition_left", "transition_right", "deep"}
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in embedding.state_dict().items())
    assert again.hit_rates == embedding.hit_rates and again.training_record == embedding.training_record
    assert (again.rank, again.deep_layers) == (4, 5) and "rank=4, deep_layers=5" in repr(again)


def test_a_file_of_slots_alone_has_no_other_parts(tmp_path):
    LookaheadEmbedding(2, 8, base_model="tiny", vocabulary=100).save(tmp_path / "alone")
    alone = LookaheadEmbedding.load(tmp_path / "alone")
    assert list(alone.state_dict()) == ["weight"] and (alone.rank, alone.deep_layers) == (0, 0)
    assert alone.hit_rates is None and alone.training_record == {}


def test_transition_tables_hold_every_tokens_side():
    embedding, table = full_embedding(), table_of()
    left, right = embedding.transition_tables(table)
    assert left.shape == right.shape == (100, 4) and left.dtype == torch.float32
    wide = table.double()
    score = (wide[7] @ embedding.transition_left.double()) @ (wide[9] @ embedding.transition_right.double())
    torch.testing.assert_close((left[7] @ right[9]).double(), score, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="no transition score"):
        LookaheadEmbedding(2, 16).transition_tables(table)


def test_no_transition_score_before_training_and_yet_a_gradient():
    table = table_of(dtype=torch.float32)
    embedding = LookaheadEmbedding.from_table(2, table, rank=3)
    left, right = embedding.transition_tables(table)
    assert (right == 0).all() and 0.2 < left.square().mean().sqrt() < 5
    (gradient,) = torch.autograd.grad((left @ right.T).sum(), embedding.transition_right)
    assert gradient.abs().max() > 0


def test_shipped_adapters_load_by_name():
    slots, adapted = (LookaheadEmbedding.from_pretrained(f"smollm2-135m-instruct{end}") for end in ("-slots", ""))
    assert slots.adapters is None and adapted.adapters is not None and adapted.adapters.layers == 30
    assert all(torch.isfinite(parameter).all() for parameter in adapted.parameters())
    assert all(bool(up.any()) for _, _, up in adapted.adapters.pairs()), "every adapter was trained"
    assert (adapted.dim, adapted.vocabulary, adapted.base_model) == (slots.dim, slots.vocabulary, slots.base_model)
    assert len(adapted.hit_rates) == adapted.num_lookahead
    assert "--start smollm2-135m-instruct " in adapted.training_record["earlier_runs"][0]["command"]
    file = pass_ext.modules.files.PRETRAINED / "smollm2-135m-instruct.safetensors"
    assert file.stat().st_size < 6_000_000


def test_shipped_parameters_load_by_name(tmp_path):
    shipped = LookaheadEmbedding.from_pretrained("smollm2-135m-instruct-slots")
    assert shipped.dim == 576 and shipped.vocabulary == 49152 and "SmolLM2-135M-Instruct" in shipped.base_model
    assert all(torch.isfinite(parameter).all() for parameter in shipped.parameters())
    assert shipped.hit_rates is not None and len(shipped.hit_rates) == shipped.num_lookahead
    for row in shipped.hit_rates:
        assert len(row) == 16 and 0 < sum(row) <= 1.0001
    assert shipped.training_record["command"].startswith("python -m pass_ext train")
    file = pass_ext.modules.files.PRETRAINED / "smollm2-135m-instruct-slots.safetensors"
    assert file.stat().st_size < 500_000
    assert torch.equal(LookaheadEmbedding.from_pretrained(file).weight, shipped.weight)
    with pytest.raises(
        ValueError, match="'gpt-9' is neither a file nor one of the shipped names: smollm2-135m-instruct"
    ):
        LookaheadEmbedding.from_pretrained("gpt-9")
    with pytest.raises(ValueError, match="hidden size: it has 576, this model has 16"):
        LookaheadEmbedding.from_pretrained("smollm2-135m-instruct-slots", table=table_of())
