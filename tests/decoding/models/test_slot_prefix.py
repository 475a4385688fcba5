"""Learned keys and values of look-ahead slots: texts that they never change, rows that see them, the same hidden states as in
training, used sessions, and models that they do not fit.
"""

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import Decoder, slots_for
from support.small_models import ARCHITECTURES, MASKS_KNOW_WINDOWS, WITHOUT_WINDOWS, prompts, small_model

import pass_ext
from pass_ext import PaSS, Plain, Tree, generate, pack_trees
from pass_ext.decoding.models.adapt import packed_model
from pass_ext.decoding.models.hidden_rows import kept_hidden
from pass_ext.decoding.models.patching import layer_stack
from pass_ext.decoding.models.patching.layer_adapters import adapter_sizes
from pass_ext.decoding.session.session import Session
from pass_ext.decoding.session.slot_prefix import RowPrefix, SlotPrefix
from pass_ext.modules.slot_adapters import SlotAdapters
from pass_ext.reference.attention import attention_terms
from pass_ext.testing import assert_error_within, assert_same_bits
from pass_ext.training.common.frozen_model import text_rows
from pass_ext.training.lookahead.forward import slot_rows
from pass_ext.training.lookahead.prefix import fresh_prefix

IDS = torch.tensor([[5, 6, 7, 8, 9]])
OPTIONS = dict(max_new_tokens=10, eos_token_id=[])
TREE = Tree.from_branching((4, 2, 1))


def random_prefix(model, length=5, size=1.0, seed=5):
    """Large random keys and values, of the sizes that the model has."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(x.shape, generator=generator) * size for x in fresh_prefix(model, IDS, length))


def prefixed_slots(model, count=3, *, length=5, size=1.0, seed=5, **more):
    lookahead = slots_for(model, count, **more)
    lookahead.set_prefix(*random_prefix(model, length, size, seed))
    return lookahead


def method_of(lookahead, **more):
    return PaSS(lookahead, tree=TREE, rows=24, slots=3, **more)


@pytest.fixture
def merged(monkeypatch):
    """The layers that learned keys were merged into, call by call."""
    layers, merge = [], RowPrefix.merged
    monkeypatch.setattr(
        RowPrefix, "merged", lambda self, layer, *a, **more: layers.append(layer) or merge(self, layer, *a, **more)
    )
    return layers


# ---- texts ----


@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("options", [{}, dict(passes=2)], ids=str)
def test_large_random_keys_change_no_text(llama, size, options):
    """Only the number of calls may change."""
    ids, mask = prompts(3, 9, padding=(0, 2, 5))
    adapters = SlotAdapters(adapter_sizes(llama, 2))
    lookahead = prefixed_slots(llama, size=size, rank=2, deep_layers=2, adapters=adapters)
    for sampling in ({}, dict(temperature=1.0, seeds=[1, 2, 3])):
        arguments = dict(OPTIONS, attention_mask=mask, **sampling)
        plain = generate(llama, ids, Plain(), **arguments)
        got = generate(llama, ids, method_of(lookahead, **options), **arguments)
        assert torch.equal(got.sequences, plain.sequences)
        assert got.stats.num_draft_tokens > 0


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MASKS_KNOW_WINDOWS, "afmoe"])
def test_architectures(architecture, merged):
    """Windows, softcaps, head sizes that the kernel pads, and heads without groups."""
    model = small_model(architecture)
    plain = generate(model, IDS, Plain(), **OPTIONS)
    assert not merged
    got = generate(model, IDS, method_of(prefixed_slots(model)), **OPTIONS)
    assert torch.equal(got.sequences, plain.sequences)
    assert set(merged) == {0, 1} and got.stats.num_draft_tokens > 0


@pytest.mark.parametrize("law", [{}, dict(temperature=1.0, seeds=[4])], ids=["greedy", "warm"])
def test_steps_that_run_ahead_draft_as_those_that_wait(llama, law, merged):
    lookahead = prefixed_slots(llama)
    waiting, ahead = (
        generate(llama, IDS, method_of(lookahead), run_ahead=run_ahead, **OPTIONS, **law) for run_ahead in (False, True)
    )
    assert torch.equal(waiting.sequences, ahead.sequences) and merged
    assert waiting.stats.acceptance_histogram == ahead.stats.acceptance_histogram


def test_rule_rejection_draws_from_slots_with_learned_keys(llama):
    """Other learned keys make other drafts, and with them other draws."""

    def text(**prefix):
        method = PaSS(prefixed_slots(llama, **prefix), tree=Tree.chain(3), rows=24, slots=3)
        return generate(llama, IDS, method, rule="rejection", temperature=1.0, seeds=[3], **OPTIONS)

    small, large = text(size=1.0), text(size=30.0)
    assert small.sequences.tolist() == text(size=1.0).sequences.tolist() != large.sequences.tolist()


# ---- rows ----


def logits_of(model, lookahead, ids):
    """Logits of a chain of rows, tokens and slots, by a session."""
    packed = packed_model(model)
    with torch.no_grad(), packed.attached():
        session = Session(packed, 1, 40)
        session.set_slots(lookahead.weight.detach(), None, None, lookahead.prefix)
        return session.call(pack_trees([Tree.chain(len(ids) - 1)]), torch.tensor(ids)).clone()


def test_rows_in_front_of_slots_keep_their_bits(llama):
    """A chain, so tokens in front of the first slot see no slot."""
    ids = [5, 6, 7, -1, -2, -3]
    prefixed, bare = (logits_of(llama, slots, ids) for slots in (prefixed_slots(llama), slots_for(llama, 3)))
    assert_same_bits(prefixed[:3], bare[:3])
    assert ((prefixed[3:] - bare[3:]).abs().amax(1) > 1e-2).all()


@pytest.mark.parametrize("more", [{}, dict(deep_layers=2), dict(rank=4)], ids=str)
def test_one_call_for_all_layers_with_learned_keys(merged, monkeypatch, more):
    """The first call with slots goes layer by layer, the others are one; drafts are those of layers never fused."""
    model = small_model("llama", head_dim=64)
    stacked, op = [], layer_stack._stack
    names = [argument.name for argument in op._schema.arguments]
    monkeypatch.setattr(
        layer_stack, "_stack", lambda *a: stacked.append(dict(zip(names, a, strict=True))["slot_keys"]) or op(*a)
    )
    lookahead = prefixed_slots(model, **more)
    got = generate(model, IDS, method_of(lookahead), **OPTIONS)
    assert len(stacked) >= got.stats.model_calls - 3 and merged == [0, 1]
    assert any(keys is not None for keys in stacked)
    with monkeypatch.context() as patch:
        patch.setattr(layer_stack.LayerStack, "can_run", lambda *_: False)
        apart = generate(model, IDS, method_of(lookahead), **OPTIONS)
    assert torch.equal(got.sequences, apart.sequences) and len(merged) > 4
    assert got.stats.acceptance_histogram == apart.stats.acceptance_histogram


def test_all_layers_at_once_give_the_bits_of_layers_apart(monkeypatch):
    model = small_model("llama", head_dim=64)
    lookahead = prefixed_slots(model)

    def calls():
        packed = packed_model(model)
        with torch.no_grad(), packed.attached():
            session = Session(packed, 2, 40)
            session.set_slots(lookahead.weight.detach(), None, None, lookahead.prefix)
            trees = pack_trees([Tree.from_branching((2, 1)), Tree.chain(2)])
            ids = ([5, 6, 7, 8, 9, 1, 2, 3], [5, 6, -1, -2, 9, 1, -1, -2], [5, 6, 7, -1, -2, 1, 2, 3])
            return [session.call(trees, torch.tensor(row)).clone() for row in (*ids, *ids)]

    together = calls()
    monkeypatch.setattr(layer_stack.LayerStack, "can_run", lambda *_: False)
    for ours, theirs in zip(together, calls(), strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_attention_over_the_learned_keys_too(backend, dtype, softcap):
    """Against fp64: rows of slots as if the learned keys stood in front of the text, rows of tokens to the bit."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape, size=1.0):
        return (torch.randn(*shape, generator=generator) * size).to(dtype)

    trees = pack_trees([Tree.from_branching((2, 1)), None, Tree.chain(2)])
    rows, (kv_heads, heads, dim) = len(trees.depths), (2, 6, 64)
    lengths = torch.tensor([4, 0, 7], dtype=torch.int32)
    q, k, v = random(rows, heads, dim, size=2.0), random(rows, kv_heads, dim), random(rows, kv_heads, dim)
    k_cache, v_cache = random(3, 9, kv_heads, dim), random(3, 9, kv_heads, dim)
    keys, values = random(3, 5, kv_heads, dim), random(3, 5, kv_heads, dim)
    ids = torch.tensor([4, 5, -1, -2, 6, 9, -1, -2])[:rows]
    options = dict(scale=0.2, softcap=softcap)
    call = (trees.cu_nodes, trees.visible, trees.max_nodes)
    here = [x.to(backend.device) for x in (q, k, v, k_cache, v_cache, lengths, ids, keys, values)]
    placed = type(trees)(*(x.to(backend.device) if isinstance(x, torch.Tensor) else x for x in trees))
    with backend.active():
        q_, k_, v_, k_cache_, v_cache_, lengths_, ids_, keys_, values_ = here
        prefix = RowPrefix(SlotPrefix(keys_, values_), ids_, placed)
        out, lse = pass_ext.attention_tree(
            q_,
            k_cache_,
            v_cache_,
            lengths_,
            placed.cu_nodes,
            placed.visible,
            placed.max_nodes,
            k_new=k_,
            v_new=v_,
            **options,
        )
        got = prefix.merged(1, q_, k_, v_, (dim, dim), out, lse, **options)
    tokens = ids >= 0
    assert 0 < tokens.sum() < rows
    assert_same_bits(got.cpu()[tokens], out.cpu()[tokens])
    longer = [
        torch.cat([learned[1].expand(3, -1, -1, -1), cache], 1)
        for learned, cache in ((keys, k_cache), (values, v_cache))
    ]

    def exact(precision):
        return attention_terms(
            q, *longer, lengths + 5, *call, k_new=k, v_new=v, precision=precision, **options
        ).out[~tokens]  # fmt: skip

    plain = exact(torch.float32).to(dtype)
    assert_error_within(got.cpu()[~tokens], plain, exact(torch.float64), factor=4.0 if dtype is torch.bfloat16 else 2.0)


def test_bits_of_zeros_in_rows_of_tokens():
    """A sum with a side of weight 0 would turn -0.0 into 0.0."""
    trees = pack_trees([Tree.chain(1)])
    q, k = torch.ones(2, 1, 64), torch.ones(2, 1, 64)
    prefix = RowPrefix(SlotPrefix(*torch.ones(2, 1, 3, 1, 64)), torch.tensor([3, -1]), trees)
    out = torch.full((2, 1, 64), -0.0)
    assert_same_bits(prefix.merged(0, q, k, k, (64, 64), out, torch.zeros(2, 1), scale=1.0, softcap=0.0)[:1], out[:1])


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "afmoe"])
@torch.no_grad()
def test_hidden_states_are_those_of_training(architecture):
    """Rows of groups behind several places of a text, in one training forward and call by call of a session."""
    model = small_model(architecture, **WITHOUT_WINDOWS.get(architecture, {}))
    lookahead = prefixed_slots(model, size=2.0)
    text, anchors = torch.arange(5, 25)[None], torch.tensor([[2, 7, 19]])
    _, past = text_rows(model, text)
    theirs = slot_rows(model, lookahead, anchors, past)[0]
    bare = slots_for(model, 3)
    _, past = text_rows(model, text)
    assert (slot_rows(model, bare, anchors, past)[0] - theirs).abs().amax(-1).min() > 1e-2
    packed = packed_model(model)
    with kept_hidden(packed) as hidden:
        for number, anchor in enumerate(anchors[0].tolist()):
            session = Session(packed, 1, 40)
            session.set_slots(lookahead.weight.detach(), None, None, lookahead.prefix)
            ids = [*text[0, : anchor + 1].tolist(), -1, -2, -3]
            session.call(pack_trees([Tree.chain(len(ids) - 1)]), torch.tensor(ids))
            torch.testing.assert_close(hidden.rows[-3:], theirs[number], rtol=1e-4, atol=1e-4)


# ---- sessions ----


def test_used_sessions_take_later_keys(llama):
    first, second = prefixed_slots(llama, seed=1), prefixed_slots(llama, seed=2)
    fresh = generate(llama, IDS, method_of(second), **OPTIONS)
    used = generate(llama, IDS, method_of(first), keep_cache=True, **OPTIONS).session
    places = [x.data_ptr() for x in used.prefix]
    got = generate(llama, IDS, method_of(second), session=used, **OPTIONS)
    assert torch.equal(got.sequences, fresh.sequences)
    assert got.stats.acceptance_histogram == fresh.stats.acceptance_histogram
    assert [x.data_ptr() for x in used.prefix] == places, "recorded calls read the same memory"
    assert all(map(torch.equal, used.prefix, second.prefix))
    with pytest.raises(ValueError, match="differ in whether slots have learned keys and values"):
        generate(llama, IDS, method_of(slots_for(llama, 3)), session=used, **OPTIONS)
    with pytest.raises(ValueError, match="differ in the number or sizes of the slots' learned keys"):
        generate(llama, IDS, method_of(prefixed_slots(llama, length=4)), session=used, **OPTIONS)


# ---- other models ----


def test_callable_models_need_nothing_more(merged):
    """Their attention is ``attend``, which merges."""
    lookahead = pass_ext.LookaheadEmbedding(3, 64)
    lookahead.set_prefix(*torch.randn(2, 1, 5, 1, 64, generator=torch.Generator().manual_seed(3)) * 30)
    ids = torch.tensor([[1, 2, 3]])
    plain = generate(Decoder(), ids, Plain(), **OPTIONS)
    got = generate(Decoder(), ids, method_of(lookahead), **OPTIONS)
    assert torch.equal(got.sequences, plain.sequences) and set(merged) == {0}


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 5, 2, 16), r"for 1 layers, \[2, 16\] each \(KV heads, D\); the model's layer 1 has \[2, 16\]"),
        ((3, 5, 2, 16), "learned keys and values for 3 layers, the model has 2"),
        ((2, 5, 4, 16), r"\[4, 16\] each .* the model's layer 0 has \[2, 16\]"),
        ((2, 5, 2, 8), r"\[2, 8\] each .* the model's layer 0 has \[2, 16\]"),
    ],
    ids=range(4),
)
def test_models_that_do_not_fit_are_refused(llama, shape, message):
    lookahead = slots_for(llama, 3)
    lookahead.set_prefix(torch.ones(shape), torch.ones(shape))
    with pytest.raises(ValueError, match=message):
        generate(llama, IDS, method_of(lookahead), **OPTIONS)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((3, 5, 2, 64), "for 3 layers, the model has 2"), ((2, 5, 4, 64), r"\[4, 64\] each .* layer 0 has \[2, 64\]")],
    ids=range(2),
)
def test_a_model_whose_layers_are_one_call_refuses_the_same(shape, message):
    model = small_model("llama", head_dim=64)
    generate(model, IDS, Plain(), **OPTIONS)  # shows what its layers compute
    lookahead = slots_for(model, 3)
    lookahead.set_prefix(torch.ones(shape), torch.ones(shape))
    with pytest.raises(ValueError, match=message):
        generate(model, IDS, method_of(lookahead), **OPTIONS)


def test_a_model_that_repeats_heads_behind_its_cache_is_refused():
    model = small_model("jetmoe")
    with pytest.raises(ValueError, match=r"jetmoe: these look-ahead slots .*, \[2, 24\] each .* layer 0 has \[4, 24\]"):
        generate(model, IDS, method_of(prefixed_slots(model)), **OPTIONS)


def test_tensor_parallelism_is_refused(llama):
    packed = packed_model(llama)
    packed.logit_shards = object()
    lookahead = prefixed_slots(llama)
    with pytest.raises(ValueError, match=r"llama: look-ahead slots with learned keys .* tensor parallelism"):
        Session(packed, 1, 40).set_slots(lookahead.weight, None, None, lookahead.prefix)
