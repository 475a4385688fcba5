"""Slots as ids of a model with vLLM's structure: rows of slots get their vectors, rows of tokens keep their bits."""

import pytest
import torch
from torch import nn

from pass_ext import LookaheadEmbedding
from pass_ext.integrations.vllm.slot_rows import SlotRows

VOCABULARY, WIDTH, LAYERS, SLOTS = 23, 8, 3, 4


class Layer(nn.Module):
    """Called as vLLM calls decoder layers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, positions, hidden_states, residual):
        residual = hidden_states if residual is None else hidden_states + residual
        return self.linear(residual) * positions[:, None], residual


class Model(nn.Module):
    """Keeps the input of every layer."""

    def __init__(self, layers=LAYERS):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.model.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, input_ids, positions, inputs_embeds=None):
        rows = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        residual, seen = None, []
        for i, layer in enumerate(self.model.layers):
            if i % 2:
                rows, residual = layer(positions, hidden_states=rows, residual=residual)
            else:
                rows, residual = layer(positions, rows, residual)
            seen.append(residual)
        return rows + residual, torch.stack(seen)


@pytest.fixture
def lookahead():
    torch.manual_seed(1)
    slots = LookaheadEmbedding(SLOTS, WIDTH, deep_layers=LAYERS, vocabulary=VOCABULARY)
    nn.init.normal_(slots.weight)
    nn.init.normal_(slots.deep)
    return slots


IDS = torch.tensor([3, VOCABULARY + 2, 0, VOCABULARY - 1, VOCABULARY, VOCABULARY + 3])
POSITIONS = torch.arange(6.0)


def by_hand(model, lookahead, ids):
    """What the formulas of slot_rows.py say."""
    table = torch.cat([model.model.embed_tokens.weight, lookahead.weight])
    rows, residual, seen = table[ids], 0.0, []
    for layer, deep in zip(model.model.layers, lookahead.deep, strict=True):
        residual = rows + residual + torch.cat([torch.zeros(VOCABULARY, WIDTH), deep])[ids]
        rows = layer.linear(residual) * POSITIONS[: len(ids), None]
        seen.append(residual)
    return rows + residual, torch.stack(seen)


@torch.no_grad()
def test_rows_of_slots_get_their_vectors_at_the_embedding_and_at_every_layer(lookahead):
    torch.manual_seed(0)
    model = Model()
    expected = by_hand(model, lookahead, IDS)
    SlotRows(model, lookahead, VOCABULARY, 16, LAYERS)
    for name in ("positional", "keyword"):
        result = model(IDS, POSITIONS) if name == "positional" else model(input_ids=IDS, positions=POSITIONS)
        for ours, exact in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, exact)


@torch.no_grad()
def test_rows_of_tokens_keep_their_bits_beside_slots_and_after_them(lookahead):
    torch.manual_seed(0)
    model, tokens = Model(), IDS < VOCABULARY
    plain = model(IDS.clamp(max=VOCABULARY - 1), POSITIONS)
    SlotRows(model, lookahead, VOCABULARY, 16, LAYERS)
    ours = model(IDS, POSITIONS)
    assert torch.equal(ours[0][tokens], plain[0][tokens]) and torch.equal(ours[1][:, tokens], plain[1][:, tokens])
    assert not torch.equal(ours[0][~tokens], plain[0][~tokens])
    alone = model(torch.zeros(6, dtype=torch.long), POSITIONS)  # the buffer of the call before must not linger
    assert torch.equal(alone[1][0], model.model.embed_tokens.weight[:1].expand(6, -1))


class Pictured(nn.Module):
    """A multimodal model: vLLM asks it for rows first, and calls it with them."""

    supports_multimodal = True

    def __init__(self, language):
        super().__init__()
        self.tower = nn.ModuleList(nn.Linear(2, 2) for _ in range(LAYERS))  # as many layers, which read no text
        self.language = language

    def get_language_model(self):
        return self.language

    def embed_input_ids(self, ids):
        return self.language.model.embed_tokens(ids)

    def forward(self, input_ids, positions, inputs_embeds):
        return self.language(input_ids, positions, inputs_embeds)


@torch.no_grad()
def test_rows_that_are_made_before_the_call_of_a_multimodal_model(lookahead):
    torch.manual_seed(0)
    language = Model()
    model = Pictured(language)
    SlotRows(model, lookahead, VOCABULARY, 16, LAYERS)
    for ids in (IDS, IDS.clamp(max=VOCABULARY - 1), IDS):  # the slots of the call before must not linger
        rows = model.embed_input_ids(ids)
        result = model(input_ids=None, positions=POSITIONS, inputs_embeds=rows)
        for ours, exact in zip(result, by_hand(language, lookahead, ids), strict=True):
            torch.testing.assert_close(ours, exact)


def test_models_that_read_ids_beside_their_rows_are_refused(lookahead):
    model = Pictured(Model())
    model.requires_raw_input_tokens = True
    with pytest.raises(ValueError, match="Pictured reads token ids beside its rows"):
        SlotRows(model, lookahead, VOCABULARY, 16, LAYERS)


@torch.no_grad()
def test_no_name_of_the_models_state_changes(lookahead):
    model = Model()
    before = list(model.state_dict())
    SlotRows(model, lookahead, VOCABULARY, 16, LAYERS)
    assert list(model.state_dict()) == before


@torch.no_grad()
def test_the_compiled_model_computes_the_same(lookahead):
    torch.manual_seed(0)
    model = Model()
    SlotRows(model, lookahead, VOCABULARY, 16, LAYERS)
    expected = model(IDS, POSITIONS)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for ours, exact in zip(compiled(IDS, POSITIONS), expected, strict=True):
        assert torch.equal(ours, exact)
    assert torch.equal(compiled(IDS[:3], POSITIONS[:3])[0], expected[0][:3])


@torch.no_grad()
def test_slots_without_vectors_for_layers_leave_the_layers_alone():
    lookahead = LookaheadEmbedding(SLOTS, WIDTH, vocabulary=VOCABULARY)
    model = Model(layers=1)
    SlotRows(model, lookahead, VOCABULARY, 16, layers=7)
    assert torch.equal(model(IDS, POSITIONS)[1][0][1], lookahead.weight[2])


@torch.no_grad()
def test_the_table_is_read_through_the_layer_so_that_shards_and_quantised_weights_serve(lookahead):
    class Halved(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 2

    model = Model()
    model.model.embed_tokens = Halved(VOCABULARY, WIDTH)
    with (
        torch.inference_mode()
    ):  # such a table has no version, and transition tables of it would be computed in every step
        rows = SlotRows(model, lookahead, VOCABULARY, 16, LAYERS)
    assert torch.equal(rows.table, model.model.embed_tokens.weight * 2) and not rows.table.is_inference()


def test_models_that_do_not_fit_are_refused_by_name(lookahead):
    with pytest.raises(ValueError, match=r"has no list of 5 layers"):
        SlotRows(Model(), lookahead, VOCABULARY, 16, 5)
    with pytest.raises(ValueError, match=r"Linear has 0 input embeddings"):
        SlotRows(nn.Linear(2, 2), lookahead, VOCABULARY, 16, LAYERS)
    with pytest.raises(ValueError, match=r"vocabulary"):
        SlotRows(Model(), LookaheadEmbedding(SLOTS, WIDTH, vocabulary=99), VOCABULARY, 16, LAYERS)
    with pytest.raises(ValueError, match=r"hidden size"):
        SlotRows(Model(), LookaheadEmbedding(SLOTS, WIDTH + 1), VOCABULARY, 16, LAYERS)
