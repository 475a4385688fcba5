"""Inkling: attention whose logits get a learned bias by distance, in layers that keep states of convolutions too."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from support.kinds import KINDS, check_texts, few_methods
from support.small_models import ragged_prompts

from benchmarks.architectures.models import tiny_model
from pass_ext import (
    NGram,
    Plain,
    Session,
    Tree,
    attention_tree,
    generate,
    pack_trees,
)
from pass_ext.decoding.models.features.distance_bias import DistanceBias
from pass_ext.layers import dequantize_rows, quantize_rows
from pass_ext.testing import assert_error_within

pytestmark = pytest.mark.skipif(not hasattr(transformers.models, "inkling"), reason="before transformers 5.24")

NAME = "inkling_text"
NEW = 14
DENSE = dict(mlp_layer_types=["dense", "dense"])


def model_with(**changes):
    """The model, built from a changed config: its layers take their sizes from there."""
    return tiny_model(NAME, **DENSE, **changes)


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
    """Biases of 5 and 6 distances, the second in a window of 6; queries and biases grow with the position from 8 on."""
    model = model_with(**changes)
    check_texts(KINDS[NAME], model, *ragged_prompts(6), few_methods(model))


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
