"""Adapters of look-ahead slots in a generation: texts that they never change, rows that they change, architectures, used
sessions, the fused layers beside them, and models that take none.
"""

from copy import deepcopy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from support.generation import Decoder, slots_for
from support.small_models import ARCHITECTURES, MASKS_KNOW_WINDOWS, prompts, small_model

import pass_ext
from pass_ext import PaSS, Plain, Session, Tree, generate
from pass_ext.decoding.models import fused_forward, parts
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.models.slots import CallSlots, PlacedAdapters, PlacedSlots
from pass_ext.modules.slot_adapters import AdapterSize, SlotAdapters
from pass_ext.ops import adapter
from pass_ext.testing import assert_same_bits
from pass_ext.training.lookahead.adapters import adapter_sizes

IDS = torch.tensor([[5, 6, 7, 8, 9]])
OPTIONS = dict(max_new_tokens=10, eos_token_id=[])
TREE = Tree.from_branching((4, 2, 1))


def adapted_slots(model, *, ranks=3, each=False, count=3, size=1.0, seed=5, **more):
    """Slots with large random adapters."""
    adapters = SlotAdapters(adapter_sizes(model, ranks), count if each else 1, scale=0.7)
    lookahead = slots_for(model, count, adapters=adapters, **more)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, *sides in adapters.pairs():
            for side in sides:
                side.copy_(torch.randn(side.shape, generator=generator) * size)
    return lookahead


def method_of(lookahead, **more):
    return PaSS(lookahead, tree=TREE, rows=24, slots=3, **more)


@pytest.fixture
def added(monkeypatch):
    """The places whose adapters are added, call by call; not by layer_stack."""
    places = []
    add, listed = CallSlots.adapt_, fused_forward._of_each_layer

    def of_each_layer(placed, plan):
        found = listed(placed, plan)
        places.extend(placed.pairs if found else ())
        return found

    monkeypatch.setattr(fused_forward, "_of_each_layer", of_each_layer)
    monkeypatch.setattr(CallSlots, "adapt_", lambda self, place, *rest: places.append(place) or add(self, place, *rest))
    return places


# ---- texts ----


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("options", [{}, dict(passes=2)], ids=str)
def test_large_random_adapters_change_no_text(llama, each, size, options):
    """Only the number of calls may change."""
    ids, mask = prompts(3, 9, padding=(0, 2, 5))
    lookahead = adapted_slots(llama, each=each, size=size, rank=2, deep_layers=2)
    for sampling in ({}, dict(temperature=1.0, seeds=[1, 2, 3])):
        arguments = dict(OPTIONS, attention_mask=mask, **sampling)
        plain = generate(llama, ids, Plain(), **arguments)
        got = generate(llama, ids, method_of(lookahead, **options), **arguments)
        assert torch.equal(got.sequences, plain.sequences)
        assert got.stats.num_draft_tokens > 0


def test_rule_rejection_draws_from_adapted_slots(llama):
    """The law needs the slots' own distribution: with q from other rows than the drafts, enumeration would differ; here the
    rule only has to run to its end with logits of any size."""
    lookahead = adapted_slots(llama, size=30.0)
    got = generate(
        llama, IDS, PaSS(lookahead, tree=Tree.chain(3), rows=24, slots=3), rule="rejection", temperature=1.0,
        seeds=[3], **OPTIONS,
    )  # fmt: skip
    assert got.sequences.shape[1] == IDS.shape[1] + OPTIONS["max_new_tokens"]


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MASKS_KNOW_WINDOWS])
def test_architectures(architecture, added):
    """Linear layers under all their names, joined ones, and a mixture's experts, which get none."""
    model = small_model(architecture)
    lookahead = adapted_slots(model)
    places = lookahead.adapters.places
    assert {place.partition(".")[0] for place in places} == {"0", "1"}
    assert not any("experts" in place.split(".") for place in places)
    plain = generate(model, IDS, Plain(), **OPTIONS)
    got = generate(model, IDS, method_of(lookahead), **OPTIONS)
    assert torch.equal(got.sequences, plain.sequences)
    assert set(added) == set(places)
    assert not any(part._forward_hooks for part in model.modules()), "the model has hooks left"


# ---- rows ----


def logits_of(model, lookahead, ids, monkeypatch, *, by_training_form=False):
    """Logits of a chain of rows, tokens and slots, by a session."""
    from pass_ext.decoding.session.session import Session
    from pass_ext.tree import pack_trees

    if by_training_form:
        monkeypatch.setattr(
            CallSlots, "adapt_", lambda self, place, out, x: out.copy_(
                adapter.adapter_rows(out, x, self.ids, *self.adapters.pairs[place], self.adapters.scale)
            )
        )  # fmt: skip
    packed = packed_model(model)
    with torch.no_grad(), packed.attached():
        session = Session(packed, 1, 40)
        session.set_slots(lookahead, lookahead.num_lookahead)
        return session.call(pack_trees([Tree.chain(len(ids) - 1)], torch.device("cpu")), torch.tensor(ids)).clone()


def test_rows_in_front_of_slots_keep_their_bits(llama, monkeypatch):
    """A chain, so tokens in front of the first slot see no slot."""
    with_adapters, without = adapted_slots(llama), slots_for(llama, 3)
    with_adapters.weight.data.copy_(without.weight)
    ids = [5, 6, 7, -1, -2, -3]
    adapted, bare = (logits_of(llama, slots, ids, monkeypatch) for slots in (with_adapters, without))
    assert_same_bits(adapted[:3], bare[:3])
    assert ((adapted[3:] - bare[3:]).abs().amax(1) > 1e-2).all()


@pytest.mark.parametrize("each", [False, True])
def test_logits_are_those_of_the_training_form(llama, each, monkeypatch):
    lookahead = adapted_slots(llama, each=each, size=0.3)
    ids = [5, -1, -2, -3, 6, -1]
    ours = logits_of(llama, lookahead, ids, monkeypatch)
    torch.testing.assert_close(
        ours, logits_of(llama, lookahead, ids, monkeypatch, by_training_form=True), rtol=1e-4, atol=1e-4
    )


def test_adapters_that_are_zero_change_no_logits(llama, monkeypatch):
    fresh = SlotAdapters(adapter_sizes(llama, 4))
    lookahead, bare = slots_for(llama, 3), slots_for(llama, 3)
    lookahead.adapters = fresh
    ids = [5, 6, -1, -2]
    assert_same_bits(logits_of(llama, lookahead, ids, monkeypatch), logits_of(llama, bare, ids, monkeypatch))


@pytest.mark.parametrize("kinds", [("q",), ("o", "down"), ("gate", "up")], ids="-".join)
def test_ranks_per_kind(llama, kinds, added):
    lookahead = adapted_slots(llama, ranks=dict.fromkeys(kinds, 2))
    generate(llama, IDS, method_of(lookahead), **OPTIONS)
    assert {place.rpartition(".")[2] for place in added} == {f"{kind}_proj" for kind in kinds}


# ---- the fused layers ----


@pytest.fixture
def fused(monkeypatch):
    """Whether each call of the op in front of attention has adapters."""
    calls, before = [], fused_forward._before
    monkeypatch.setattr(fused_forward, "_before", lambda *a: calls.append(bool(a[-2])) or before(*a))
    return calls


def test_fused_layers_take_adapters_in_calls_with_slots(llama, fused, monkeypatch):
    """Calls without slots, of the same attached model too, give them none."""
    hooked, add = [], CallSlots.adapt_
    monkeypatch.setattr(CallSlots, "adapt_", lambda self, place, *rest: hooked.append(place) or add(self, place, *rest))
    monkeypatch.setattr(parts, "stack_of", lambda *_: None)  # as on a GPU
    llama = deepcopy(llama)  # how the model itself is run is known already
    plain = generate(llama, IDS, Plain(), **OPTIONS)
    assert fused and not any(fused)
    fused.clear()
    lookahead = adapted_slots(llama)
    packed = packed_model(llama)
    with packed.attached():
        got = generate(llama, IDS, method_of(lookahead), **OPTIONS)
        assert any(fused) and not hooked, "a layer ran as modules in a call with slots"
        fused.clear()
        again = generate(llama, IDS, Plain(), **OPTIONS)
        assert fused and not any(fused), "adapters were left after"
    assert torch.equal(got.sequences, plain.sequences) and torch.equal(again.sequences, plain.sequences)
    for layer in llama.model.layers:
        assert "forward" not in vars(layer)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "phi3"])
def test_fused_layers_give_the_bits_of_modules(architecture, each, monkeypatch):
    """Layer by layer, with the adapters in both ops, logits are those of the modules with hooks."""
    model = small_model(architecture)
    lookahead = adapted_slots(model, ranks=dict(q=3, v=2, gate=4, down=5, o=1), each=each)
    monkeypatch.setattr(parts, "stack_of", lambda *_: None)
    ids = [5, -1, -3, 6, -2, -1]
    ours = logits_of(model, lookahead, ids, monkeypatch)
    monkeypatch.setattr(fused_forward, "_of_each_layer", lambda *_: None)
    assert_same_bits(ours, logits_of(model, lookahead, ids, monkeypatch))
    bare = slots_for(model, 3)
    bare.weight.data.copy_(lookahead.weight)
    assert not torch.equal(ours, logits_of(model, bare, ids, monkeypatch))


def test_one_call_for_all_layers_with_adapters(fused, monkeypatch):
    """No call goes layer by layer; drafts are those of layers never fused."""
    model = small_model("llama", head_dim=64)
    stacked, op = [], fused_forward._stack
    monkeypatch.setattr(fused_forward, "_stack", lambda *a: stacked.append(1) or op(*a))
    lookahead = adapted_slots(model, deep_layers=2)
    got = generate(model, IDS, method_of(lookahead), **OPTIONS)
    assert len(stacked) >= got.stats.model_calls - 3 and not fused
    model.register_forward_hook(lambda *_: None)  # it runs as it is then
    apart = generate(model, IDS, method_of(lookahead), **OPTIONS)
    assert torch.equal(got.sequences, apart.sequences)
    assert got.stats.num_accepted_tokens == apart.stats.num_accepted_tokens
    assert got.stats.model_calls == apart.stats.model_calls


# ---- sessions ----


def test_used_sessions_take_later_adapters(llama):
    first, second = adapted_slots(llama, seed=1), adapted_slots(llama, seed=2)
    fresh = generate(llama, IDS, method_of(second), **OPTIONS)
    used = Session(llama)
    generate(llama, IDS, method_of(first), session=used, **OPTIONS)
    got = generate(llama, IDS, method_of(second), session=used, **OPTIONS)
    assert torch.equal(got.sequences, fresh.sequences)
    assert got.stats.acceptance_histogram == fresh.stats.acceptance_histogram
    for others in (
        slots_for(llama, 3),
        adapted_slots(llama, ranks=4),
        first,
    ):  # without adapters, of another rank, and again
        fresh = generate(llama, IDS, method_of(others), **OPTIONS)
        got = generate(llama, IDS, method_of(others), session=used, **OPTIONS)
        assert torch.equal(got.sequences, fresh.sequences)
        assert got.stats.acceptance_histogram == fresh.stats.acceptance_histogram


# ---- other models ----


class AdaptedDecoder(Decoder):
    """The small decoder with a linear layer in front of its attention, which slots adapt."""

    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))

    def __call__(self, rows, positions, attend, wanted, adapt=None):
        queries = rows @ self.weight.T
        if adapt is not None:
            adapt("0.q_proj", queries, rows)
            adapt("0.other", queries, rows)  # no adapter there
        x = attend(0, queries.unflatten(1, (1, 64)), *(rows.unflatten(1, (1, 64)),) * 2).flatten(1) - rows
        return (x if wanted is None else x[wanted]) @ self.embedding.T


def test_callable_models(added):
    torch.manual_seed(0)
    adapters = SlotAdapters({"0.q_proj": AdapterSize(64, 64, 4)})
    nn.init.normal_(adapters.pair("0.q_proj")[1])
    lookahead = pass_ext.LookaheadEmbedding(3, 64, adapters=adapters)
    model, ids = AdaptedDecoder(), torch.tensor([[1, 2, 3]])
    plain = generate(model, ids, Plain(), **OPTIONS)
    got = generate(model, ids, method_of(lookahead), **OPTIONS)
    assert torch.equal(got.sequences, plain.sequences)
    assert set(added) == {"0.q_proj", "0.other"}
    with pytest.raises(TypeError, match="give its __call__ a parameter adapt"):
        generate(Decoder(), ids, method_of(lookahead), **OPTIONS)


def test_models_without_these_layers(llama):
    lookahead = slots_for(llama, 3)
    for place, size, message in (
        ("7.self_attn.q_proj", (64, 64), "7.self_attn.q_proj .* the model has no such layer"),
        ("0.self_attn.other", (64, 64), "the model has no such layer"),
        ("0.self_attn.q_proj", (64, 32), r"\(in, out\) = \(64, 32\), the model has \(64, 64\)"),
        ("0.self_attn", (64, 64), "the model has None"),
    ):
        lookahead.adapters = SlotAdapters({place: AdapterSize(*size, 2)})
        with pytest.raises(ValueError, match=message):
            generate(llama, IDS, method_of(lookahead), **OPTIONS)
    assert not any(part._forward_hooks for part in llama.modules())


def test_tensor_parallelism_is_refused(llama):
    packed = packed_model(llama)
    packed.logit_shards = object()
    with pytest.raises(ValueError, match="cannot be used under tensor parallelism"):
        packed.check_adapters(PlacedAdapters(1.0, {}, []))


def test_kinds_that_there_are_not(llama):
    with pytest.raises(ValueError, match=r"ranks must be of the kinds q, k, v, .* got query"):
        adapter_sizes(llama, {"query": 4})
    with pytest.raises(ValueError, match="has no linear layer of the kinds qkv"):
        adapter_sizes(llama, {"qkv": 4})


@pytest.mark.parametrize("change", ["none", "a rank", "a layer less", "a size"])
def test_placed_adapters_of_like_layers_are_one_tensor(change):
    """Layers of another rank or size have another one; either way the pairs hold the parameters' numbers."""
    sizes = {f"{i}.mlp.{name}": (6, 4, 3) for i in range(3) for name in ("up_proj", "down_proj")}
    sizes |= {"a rank": {"1.mlp.up_proj": (6, 4, 2)}, "a size": {"1.mlp.up_proj": (5, 4, 3)}}.get(change, {})
    if change == "a layer less":
        del sizes["1.mlp.up_proj"]
    adapters = SlotAdapters({place: AdapterSize(*size) for place, size in sizes.items()}, 2, dtype=torch.float32)
    for parameter in adapters.parameters():
        torch.nn.init.normal_(parameter)
    placed = PlacedAdapters.of(adapters, 2, torch.zeros(1, dtype=torch.bfloat16))
    lengths = {"none": [3, 3], "a layer less": [3, 2]}.get(change, [3, 2, 1])
    assert sorted((len(down) for _, down, _ in placed.stacks), reverse=True) == lengths
    assert placed.pairs.keys() == sizes.keys()
    for place, down, up in adapters.pairs(2):
        for copy, parameter in zip(placed.pairs[place], (down, up), strict=True):
            assert torch.equal(copy, parameter.bfloat16()) and copy.is_contiguous()
    held = {side.data_ptr() for _, *stacks in placed.stacks for stack in stacks for side in stack}
    assert held == {side.data_ptr() for pair in placed.pairs.values() for side in pair}


def test_the_first_slot_alone_asks_for_adapters():
    weight, deep, adapters = torch.ones(1, 4), torch.ones(2, 1, 4), PlacedAdapters(1.0, {}, [])
    with_both, without_slot = PlacedSlots(weight, deep, adapters), torch.tensor([3, 0, 1])
    assert PlacedSlots(weight, None, adapters).of_call(torch.tensor([3, 0, -1])).adapters is adapters
    assert PlacedSlots(weight, None, adapters).of_call(without_slot) is None
    assert with_both.of_call(without_slot).adapters is None and with_both.of_call(without_slot).deep is deep
    assert PlacedSlots(weight).of_call(torch.tensor([-1])) is None


def test_layers_in_another_dtype_than_the_table():
    """Quantised layers may compute in another dtype than the table's."""
    placed = PlacedAdapters(1.0, {"0.q": (torch.ones(1, 2, 3), torch.ones(1, 2, 4))}, [])
    out, x = torch.zeros(2, 4, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bfloat16)
    slots = PlacedSlots(torch.ones(1, 3), None, placed)
    slots.of_call(torch.tensor([-1, 0])).adapt_("0.q", out, x)
    assert (out[0] == 6).all() and (out[1] == 0).all()
