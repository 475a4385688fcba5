"""Inkling: attention whose logits get a learned bias by distance, in layers that keep states of convolutions too."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from emulator.ops import KERNELS
from support.generation import greedy_of_transformers, methods_for, slots_for
from support.gpu_widths import use_widths_of_a_gpu
from support.small_models import ragged_prompts

import pass_ext
from benchmarks.architectures.models import tiny_model
from pass_ext import (
    EarlyExitDraft,
    MultiCandidate,
    NGram,
    PaSS,
    Plain,
    Session,
    Speculative,
    Tree,
    attention_tree,
    generate,
    pack_trees,
    testing,
)
from pass_ext.decoding.models.parts import cache_name
from pass_ext.decoding.session.distance_bias import DistanceBias
from pass_ext.integrations.transformers.processors import NotedRows
from pass_ext.layers import dequantize_rows, quantize_rows
from pass_ext.testing import assert_error_within, assert_same_bits
from pass_ext.training.lookahead.states import with_states

pytestmark = pytest.mark.skipif(not hasattr(transformers.models, "inkling"), reason="before transformers 5.24")

NAME = "inkling_text"
NEW = 14
GREEDY = dict(eos_token_id=None, pad_token_id=0)
DENSE = dict(mlp_layer_types=["dense", "dense"])


@pytest.fixture(scope="module")
def model():
    """Biases of 5 and 6 distances, the second in a window of 6; queries and biases grow with the position from 8 on."""
    return tiny_model(NAME)


def model_with(**changes):
    """The model, built from a changed config: its layers take their sizes from there."""
    return tiny_model(NAME, **DENSE, **changes)


def alone(model, ids, mask, new=NEW):
    """transformers' text of each prompt alone, behind its padding, which would count as positions."""
    texts = [
        greedy_of_transformers(model, row[own][None], None, new, **GREEDY)
        for row, own in zip(ids, mask.bool(), strict=True)
    ]
    behind = [text[0, int(own.sum()) :] for text, own in zip(texts, mask, strict=True)]
    return torch.cat((ids, torch.stack(behind)), 1)


def some_methods(model):
    slots = slots_for(model)
    return (
        Plain(),
        NGram(shortest=1),
        PaSS(slots, tree=Tree([-1, 0, 0, 1, 1, 2]), rows=24),
        PaSS(slots, passes=2, tree=Tree.from_branching((2, 2)), rows=24),
    )


def test_every_method(model):
    ids, mask = ragged_prompts(8)
    want = alone(model, ids, mask)
    draft = EarlyExitDraft(model, 1)
    drafted = {
        "speculative": Speculative(tiny_model(NAME, seed=1), 3),
        "candidates": MultiCandidate(model, (2, 2, 1)),
        "early exit": Speculative(draft, 3),
        "tree of an early exit": MultiCandidate(draft, (2, 2)),
    }
    for name, method in (methods_for(model) | drafted).items():
        got = generate(model, ids, method, max_new_tokens=NEW, attention_mask=mask, eos_token_id=[]).sequences
        assert torch.equal(got, want), name


@pytest.mark.parametrize(
    "changes",
    [
        dict(rel_extent=1, log_scaling_n_floor=None),
        dict(rel_extent=17),
        dict(rel_extent=200, layer_types=["hybrid", "hybrid"]),
        dict(sliding_window_size=2, rel_extent=2),
        dict(sliding_window_size=20, layer_types=["hybrid_sliding", "hybrid_sliding"]),
    ],
    ids=str,
)
def test_texts_are_transformers_own(changes):
    model, (ids, mask) = model_with(**changes), ragged_prompts(6)
    want = alone(model, ids, mask)
    for method in some_methods(model):
        got = generate(model, ids, method, max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
        assert torch.equal(got.sequences, want), method


@pytest.mark.parametrize(
    ("count", "window", "codes"),
    [
        *((count, window, None) for count in (1, 7, 16, 70, 129) for window in (-1, 4, 130)),
        (70, -1, torch.int8),
        (7, 130, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_attention_against_float64(count, window, codes):
    """Random trees of two requests, one of them without text; deep ones, so that nodes are far from each other too."""
    generator = torch.Generator().manual_seed(count)
    trees = [
        Tree([-1, *(int(torch.randint(max(0, row - 3), row, (), generator=generator)) for row in range(1, size))])
        for size in (200, 60)
    ]
    packed, lens, scale = pack_trees(trees), torch.tensor([150, 0], dtype=torch.int32), 0.25
    q, bias, held, new = (
        torch.randn(shape, generator=generator)
        for shape in ((260, 4, 16), (260, 4, count), (2, 2, 170, 2, 16), (2, 260, 2, 16))
    )
    caches = (held, new) if codes is None else (quantize_rows(held, codes), quantize_rows(new, codes))
    if codes is not None:
        held, new = (dequantize_rows(x, torch.float32) for x in caches)
    for unused in (caches[0][:, 0, 150:], caches[0][:, 1]):  # must not be read
        unused.view(torch.uint8).fill_(255)  # NaN

    def attention(q, keys, values, k, v, prefix_lens=lens, window=window, **options):
        return attention_tree(
            q, keys, values, prefix_lens, packed.cu_nodes, packed.visible, packed.max_nodes, k_new=k, v_new=v,
            depths=packed.depths, scale=scale, window=window, **options,
        )  # fmt: skip

    got = DistanceBias(packed, lens, 170, count, window).attend(attention, q, bias, *map(tuple, caches), scale)
    first, plain, exact = 0, [], []
    for tree, length, request in zip(trees, lens.tolist(), range(2), strict=True):
        for node in range(tree.num_nodes):
            path = [node]
            while tree.parents[path[0]] >= 0:
                path.insert(0, tree.parents[path[0]])
            keys, values = (
                torch.cat((h[request, :length], n[[first + i for i in path]])).repeat_interleave(2, 1)
                for h, n in zip(held, new, strict=True)
            )
            away = torch.arange(len(keys)).flip(0)
            for results, dtype in ((plain, torch.float32), (exact, torch.float64)):
                logits = torch.einsum("hd,khd->hk", q[first + node].to(dtype), keys.to(dtype)) * scale
                added = bias[first + node].to(dtype)[:, away.clamp(max=count - 1)].masked_fill(away >= count, 0.0)
                logits = (logits + added).masked_fill(away >= (window if window >= 0 else len(keys)), -torch.inf)
                results.append(torch.einsum("hk,khd->hd", logits.softmax(1), values.to(dtype)))
        first += tree.num_nodes
    assert_error_within(got, torch.stack(plain), torch.stack(exact), 3.0)  # parts are rounded before they are joined


@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("one_thread")
def test_a_row_has_the_bits_that_it_has_alone(dtype, is_invariant):
    """Without experts, whose router calls a function that is refused in a batch-invariant session."""
    model = model_with().to(dtype)
    ids, mask = ragged_prompts(3, longest=9)
    options = dict(max_new_tokens=NEW, eos_token_id=[])
    for method in (NGram(shortest=1, tokens=4), PaSS(slots_for(model), tree=Tree.from_branching((3, 2)), rows=24)):
        together, options["session"] = NotedRows(), Session(model, batch_invariant=is_invariant)
        batch = generate(model, ids, method, attention_mask=mask, logits_processor=together, **options)
        for row, seen in enumerate(mask.bool()):
            noted, options["session"] = NotedRows(), Session(model, batch_invariant=is_invariant)
            text = generate(model, ids[row][seen][None], logits_processor=noted, **options)
            for mine, theirs in zip(together.of(batch), noted.of(text), strict=True):
                assert_same_bits(mine[row], theirs[0])


def test_sampled_texts_are_a_function_of_the_seed(model):
    ids, mask = ragged_prompts(6)
    options = dict(max_new_tokens=NEW, attention_mask=mask, eos_token_id=[], temperature=0.9, seeds=5)
    first, *others = some_methods(model)
    want = generate(model, ids, first, **options).sequences
    for method in (*others, MultiCandidate(model, (2, 2, 1))):
        assert torch.equal(generate(model, ids, method, **options).sequences, want), method


def test_long_prompts_are_read_in_pieces(monkeypatch):
    """Of 150 tokens, which are more than the biases reach."""
    monkeypatch.setattr("pass_ext.decoding.session.reading.MAX_TREE_NODES", 150)
    model = model_with(rel_extent=70, sliding_window_size=90, max_position_embeddings=1024)
    ids = torch.randint(3, 90, (2, 400), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :199] = 0
    want = alone(model, ids, mask, 8)
    for method in (Plain(), NGram(shortest=1)):
        got = generate(model, ids, method, max_new_tokens=8, attention_mask=mask, eos_token_id=[])
        assert torch.equal(got.sequences, want)


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_caches_in_8_bits(model, codes):
    ids, mask = ragged_prompts(6)
    options = dict(max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
    first, *others = some_methods(model)
    session = Session(model, cache_dtype=codes)
    want = generate(model, ids, first, session=session, **options).sequences
    assert [tuple(x.shape[2:]) for x in session.caches[0]] == [(2, 16 + 16)] * 2
    for method in others:
        got = generate(model, ids, method, session=Session(model, cache_dtype=codes), **options).sequences
        assert torch.equal(got, want), method


def test_transformers_caches_go_in_and_out(model):
    """Those that custom_generate returns hold all keys, also of layers with a window."""
    ids = ragged_prompts(3)[0][:, -4:]
    want = greedy_of_transformers(model, ids, torch.ones_like(ids), 2 * NEW, **GREEDY)
    custom = pass_ext.custom_generate(NGram(shortest=1))
    for second in (None, custom):
        cache = None
        for how, given in ((custom, ids), (second, want[:, : ids.shape[1] + NEW])):
            past = {} if cache is None else {cache_name(type(model).forward): cache}
            if how is not None:
                past["custom_generate"] = how
            options = dict(past, **GREEDY, return_dict_in_generate=True)
            result = greedy_of_transformers(model, given, torch.ones_like(given), NEW, **options)
            cache = result.past_key_values
        assert torch.equal(result.sequences, want)


@pytest.mark.usefixtures("one_thread")
def test_kernels_and_widths_of_a_gpu_on_the_emulator(monkeypatch):
    model = model_with()
    ids, mask = ragged_prompts(2, longest=7)
    options = dict(max_new_tokens=4, attention_mask=mask, eos_token_id=[])
    want = generate(model, ids, **options).sequences
    use_widths_of_a_gpu(monkeypatch)
    with testing.rerouted_backend("emulated", KERNELS).active():
        session = Session(model)
        got = generate(model, ids, NGram(shortest=1, tokens=3), session=session, **options).sequences
    assert torch.equal(got, want)
    assert [tuple(x.shape[2:]) for x in session.caches[0]] == [(2, 64), (2, 64)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    """The CPU's texts."""
    model, (ids, mask) = model_with(), ragged_prompts(6)
    options = dict(max_new_tokens=NEW, eos_token_id=[])
    want = generate(model, ids, attention_mask=mask, **options).sequences
    model = model.cuda()
    for method in (Plain(), NGram(shortest=1)):
        for graphs in (False, None):
            session = Session(model, cuda_graphs=graphs)
            got = generate(model, ids.cuda(), method, session=session, attention_mask=mask.cuda(), **options)
            assert torch.equal(got.sequences.cpu(), want), (method, graphs)


# ---- refused ----


def test_slots_are_not_trained(model):
    with pytest.raises(
        SystemExit, match=f"slots cannot be trained for {NAME}: its attention takes distances or positions"
    ):
        with_states(model, 4)


@pytest.mark.parametrize("change", ["reach", "sign"])
def test_biases_that_are_looked_up_otherwise_are_not_believed(change):
    from transformers.models.inkling import modeling_inkling as module

    class Changed(module.InklingRelativeLogits):
        def forward(self, states, rows, keys):
            bias = super().forward(states, rows, keys)
            if change == "sign":
                return -bias
            return bias.masked_fill(rows[:, None] - keys == self.rel_extent - 1, 0.0)

    model = model_with()
    for layer in model.model.layers:
        layer.self_attn.rel_logits_proj.__class__ = Changed
    with pytest.raises(
        ValueError, match="a bias by distance to its attention, by Changed, which computes something else"
    ):
        generate(model, ragged_prompts(1)[0], max_new_tokens=2)


@pytest.mark.parametrize("name", ["inkling2_text", "inkling2_loop_text"])
def test_biases_of_other_modules(name):
    with pytest.raises(ValueError, match=f"{name}.*hands down 'position_bias'"):
        generate(tiny_model(name, layer_types=["full_attention"] * 2), ragged_prompts(1)[0], max_new_tokens=2)
