"""MiniMax-M3: each head of an indexer chooses blocks of tokens for itself. transformers' blocks begin at the first column, so
padding on the left moves them: its text of each prompt alone counts."""

from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from support.kinds import KINDS, check_texts, few_methods, some_methods, sparse
from support.kinds import model_of as made_once
from support.small_models import ragged_prompts

from benchmarks.architectures.models import tiny_model
from pass_ext import (
    Session,
    Tree,
    generate,
    pack_trees,
)
from pass_ext.decoding.models.features import indexed

pytestmark = pytest.mark.skipif(not hasattr(transformers.models, "minimax_m3_vl"), reason="before transformers 5.24")

NAME = "minimax_m3_vl_text"
NEW = 9
SPARSE = "minimax_m3_sparse"
KIND = KINDS[NAME]
model_with = partial(sparse, NAME)


@pytest.mark.parametrize(
    ("kinds", "changes"),
    [
        (("full_attention", SPARSE), dict(index_block_size=3)),
        ((SPARSE, "full_attention", SPARSE), dict(index_block_size=1, index_topk_blocks=4)),
        ((SPARSE, SPARSE), dict(index_topk_blocks=1)),
        ((SPARSE, SPARSE), dict(index_topk_blocks=3, index_local_blocks=2)),
        ((SPARSE, SPARSE), dict(index_local_blocks=0, index_block_size=4)),
        ((SPARSE, SPARSE), dict(index_n_heads=1, num_key_value_heads=4)),
        ((SPARSE, SPARSE), dict(index_n_heads=2, num_key_value_heads=4, num_attention_heads=8)),
    ],
    ids=str,
)
def test_texts_are_transformers_own(kinds, changes):
    model = model_with(layer_types=list(kinds), **changes)
    check_texts(KIND, model, *ragged_prompts(6), few_methods(model))


def test_experts_and_layers_without_an_indexer():
    model, (ids, mask) = tiny_model(NAME), ragged_prompts(6)
    check_texts(KIND, model, ids, mask, some_methods(model))
    session = Session(model)
    generate(model, ids, session=session, max_new_tokens=2, attention_mask=mask)
    assert [tuple(keys.shape[2:]) for keys, _ in session.caches] == [(2, 16), (2, 16 + 16)]


@pytest.mark.parametrize("local", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_row_chooses_as_its_text_alone(size, local):
    """Random trees after texts of every length: blocks that end, or only begin, in rows of different branches."""
    generator = torch.Generator().manual_seed(size)
    for prefix in range(2 * size + 2):
        parents = [-1, *(int(torch.randint(row, (), generator=generator)) for row in range(1, 14))]
        tree = pack_trees([Tree(parents)])
        q, held, keys = (torch.randn(shape, generator=generator) for shape in ((14, 3, 8), (prefix, 8), (14, 8)))
        rows = indexed.IndexRows(q, keys, None, 1.0, 3, indexed.HeadBlocks(size, local))
        step = held[None, :, None], torch.tensor([prefix]), tree, torch.tensor([14])
        chosen, whole = indexed.chosen_keys(rows, *step), torch.cat((held, keys))
        assert (chosen is None) == (-(-(prefix + 14) // size) <= 3)
        for row in range(14 if chosen is not None else 0):
            path = [row]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            text = [*range(prefix), *(prefix + node for node in path)]
            blocks = [text[first : first + size] for first in range(0, len(text), size)]
            for head in range(3):
                scores = [max(float(q[row, head] @ whole[key]) for key in block) for block in blocks]
                order = sorted(range(len(blocks)), key=lambda at: (at < len(blocks) - local, -scores[at]))
                want = sorted(key for at in order[:3] for key in blocks[at])
                got = chosen[row, head]
                assert got[got >= 0].tolist() == want and not (got[: len(want)] < 0).any(), (prefix, row, head)


def test_of_equal_scores_the_earlier_blocks_count_more():
    rows = indexed.IndexRows(torch.zeros(4, 1, 8), torch.zeros(4, 8), None, 1.0, 2, indexed.HeadBlocks(2, 1))
    held, step = torch.zeros(1, 4, 1, 8), (torch.tensor([4]), pack_trees([Tree([-1, 0, 0, 1])]), torch.tensor([4]))
    lists = indexed.chosen_keys(rows, held, *step)
    assert lists[:, 0].tolist() == [[0, 1, 4, -1], [0, 1, 4, 5], [0, 1, 4, 6], [0, 1, 7, -1]]
    with torch.device("meta"):
        assert torch.equal(indexed.chosen_keys(rows, held, *step), lists)


# ---- refused ----


def test_heads_that_have_no_share_of_the_kv_heads():
    model = model_with(index_n_heads=4)
    with pytest.raises(ValueError, match="2 KV heads are a multiple of the 4 heads that choose for themselves"):
        generate(model, ragged_prompts(1)[0], max_new_tokens=2)


def test_an_indexers_key_that_cannot_be_divided_among_heads():
    model = model_with(index_head_dim=26, num_key_value_heads=4)
    with pytest.raises(ValueError, match="26 numbers of the indexer's key are a multiple of the 4 KV heads"):
        generate(model, ragged_prompts(1)[0], max_new_tokens=2)


@pytest.mark.parametrize("change", ["mean", "lowest", "without the own block"])
def test_indexers_that_choose_otherwise_are_not_believed(change, monkeypatch):
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as module

    class Changed(module.MiniMaxM3VLIndexer):
        def forward(self, *inputs, **named):
            with monkeypatch.context() as patched:
                if change == "mean":
                    patched.setattr(torch.Tensor, "amax", lambda x, dim: x.clamp(min=-9.0).mean(dim))
                elif change == "lowest":
                    patched.setattr(torch.Tensor, "topk", lambda x, n, dim: torch.topk(-x, n, dim))
                elif change == "without the own block":
                    patched.setattr(torch.Tensor, "scatter_", lambda x, *_: x)
                return super().forward(*inputs, **named)

    check_refused(Changed)


def test_indexers_that_choose_for_other_heads_are_not_believed():
    """They have the forward of those that do not."""
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as module

    class Changed(module.MiniMaxM3VLIndexer):
        def build_block_mask(self, chosen, *rest):
            return super().build_block_mask(chosen.flip(1), *rest)

    generate(made_once(NAME), ragged_prompts(1)[0], max_new_tokens=2)
    check_refused(Changed)


def check_refused(kind):
    model = model_with()
    for layer in model.model.layers:
        layer.self_attn.indexer.__class__ = kind
    with pytest.raises(
        ValueError, match="keys that Changed chooses for each row, by scores of another form than MiniMax"
    ):
        generate(model, ragged_prompts(1)[0], max_new_tokens=2)
