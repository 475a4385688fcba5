"""Models whose layers attend to compressed entries of windows of tokens (DeepSeek-V4): transformers' texts with every method,
each row of a tree as its own text, refusals."""

import random
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from support.generation import greedy_of_transformers, methods_for
from support.kinds import GREEDY, KINDS, check_texts, compressing, few_methods, text_of
from support.kinds import model_of as made_once
from support.small_models import prompts, ragged_prompts

import pass_ext
from pass_ext import EarlyExitDraft, NGram, Session, Speculative, Tree, generate
from pass_ext.decoding.models.features import compressed, compressors
from pass_ext.integrations.transformers import use
from pass_ext.testing import assert_same_bits

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.cache_utils, "DynamicIndexedLayer"), reason="before transformers 5.24"
)

NAME = "deepseek_v4"
NEW = 9
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
END = 2  # the token that ends texts


KIND = KINDS[NAME]
model_of = partial(compressing, NAME, 0)


@pytest.fixture
def model():
    return made_once(NAME)


# ---- texts ----


@pytest.mark.parametrize("layers", [1, 2])
def test_an_early_exit_after_layers_of_either_kind(model, layers):
    methods = {"early exit": Speculative(EarlyExitDraft(model, layers), 3)}
    check_texts(KIND, model, *ragged_prompts(6), methods)


@pytest.mark.parametrize(
    "changes",
    [
        dict(sparse=1, heavy=1, index_topk=3),
        dict(sparse=4, heavy=5, index_topk=1, sliding_window=3),
        dict(sparse=3, heavy=2, index_topk=100),
        dict(sparse=7, heavy=100),  # prompts and texts without a whole window
    ],
    ids=str,
)
def test_windows_of_all_sizes(changes):
    model = model_of(**changes)
    check_texts(KIND, model, *ragged_prompts(3, longest=9), few_methods(model), 2 * NEW)


def test_layers_of_one_kind():
    for kind in (SPARSE, HEAVY, "sliding_attention"):
        model = model_of(layer_types=[kind] * 3)
        check_texts(KIND, model, *ragged_prompts(3), {"ngram": NGram(shortest=1)})


# ---- the rows of a tree ----


@torch.no_grad()
def logits_alone(model, text):
    return model(torch.tensor([text]), use_cache=False).logits[0, -1]


def each_row_of_trees(model, steps=6, nodes=12):
    """Grows two texts by random paths of random trees -> the logits of each row, and those of its own path alone."""
    chance, session = random.Random(0), Session(model, 2, 200)
    texts, found = [[], []], []  # the second begins later
    with session.model.attached():
        for step in range(steps):
            trees, ids, paths = [], [], []
            for text in texts:
                parents = [
                    -1,
                    *(chance.randrange(max(0, row - 3), row) for row in range(1, chance.randrange(2, nodes))),
                ]
                if text is texts[1] and step in (0, 3):
                    trees.append(None)
                    paths.append([])
                    continue
                tokens = [chance.randrange(3, 90) for _ in parents]
                rows = [[row] for row in range(len(parents))]
                for path in rows:
                    while parents[path[0]] >= 0:
                        path.insert(0, parents[path[0]])
                trees.append(Tree(parents))
                ids += tokens
                found += [[*text, *(tokens[node] for node in path)] for path in rows]
                paths.append(rows[chance.randrange(len(rows))])
                text += [tokens[node] for node in paths[-1]]
            packed = session.packed(trees)
            logits = session.call(packed, torch.tensor(ids))
            found[-len(ids) :] = zip(found[-len(ids) :], logits, strict=True)
            path = torch.tensor([[*path, *[-1] * (nodes - len(path))] for path in paths], dtype=torch.int32)
            accepted = torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32).clamp(min=0)
            session.commit(packed, path, accepted)
    assert session.prefix_lens.tolist() == [len(text) for text in texts]
    return [(logits, logits_alone(model, text)) for text, logits in found]


def worst_row(model):
    return max(float((ours - theirs).abs().max() / theirs.std()) for ours, theirs in each_row_of_trees(model))


@pytest.mark.parametrize("sparse, heavy", [(2, 3), (3, 5)])
def test_each_row_is_its_own_path_alone(sparse, heavy):
    assert worst_row(model_of(sparse, heavy)) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("one_thread")
@torch.no_grad()
def test_an_entry_has_the_bits_that_it_has_alone(dtype):
    """With heads that are rotated as a whole, because torch's cos rounds what is after whole vectors otherwise."""
    model = model_of(3, 4, head_dim=32, index_head_dim=32, partial_rotary_factor=1.0).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for layer in (0, 1):
        compressor, parents, before = model.model.layers[layer].self_attn.compressor, [-1, 0, 0, 1, 2, 2, 4, 5], 7
        hidden, queries = (torch.randn(1, before + 8, n, generator=generator).to(dtype) for n in (64, 24))
        of_all = compressors.compressed_rows(compressor, hidden, queries, torch.arange(before + 8)[None])

        def made(rows, held, tree, prefix, of_all=of_all):
            given = of_all._replace(sources=of_all.sources[rows])
            if of_all.indexed is not None:
                index = of_all.indexed
                index = index._replace(q=index.q[rows], weights=index.weights[rows], keys=index.keys[rows])
                given = given._replace(indexed=index)
            call = compressed.CallEntries(torch.tensor([prefix], dtype=torch.int32), pass_ext.pack_trees([tree]))
            return call.of_layer(given, held)[0]

        text = made(range(before), None, Tree.chain(before - 1), 0)
        held = text[None].expand(1, before, -1)
        together = made(range(before, before + 8), held, Tree(parents), before)
        closing = 0
        for row in range(8):
            path = [row]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            rows = [*range(before), *(before + node for node in path)]
            closing += len(rows) % compressor.compress_rate == 0
            alone = made(rows, None, Tree.chain(len(rows) - 1), 0)
            assert_same_bits(together[row], alone[-1])
            last = torch.cat((held, together[None, path[:-1]]), 1)
            assert_same_bits(made(rows[-1:], last, Tree.chain(0), len(rows) - 1)[0], alone[-1])
        assert 0 < closing < 8


@torch.no_grad()
def test_all_tensors_are_made_where_the_rows_are(model):
    """A tensor that is made without a device is without numbers here."""
    generator = torch.Generator().manual_seed(0)
    trees = pass_ext.pack_trees([Tree([-1, 0, 0, 1, 2]), None, Tree.chain(2)])
    lengths = torch.tensor([9, 3, 16], dtype=torch.int32)
    for layer in (0, 1):
        compressor = model.model.layers[layer].self_attn.compressor
        hidden, queries = (torch.randn(1, 8, n, generator=generator) for n in (64, 24))
        rows = compressors.compressed_rows(compressor, hidden, queries, torch.arange(8)[None])
        held = torch.randn(3, 20, rows.sources.shape[1] + (0 if layer else 64), generator=generator)
        want = compressed.CallEntries(lengths, trees).of_layer(rows, held)
        with torch.device("meta"):
            got = compressed.CallEntries(lengths, trees).of_layer(rows, held)
        assert all(map(torch.equal, got, want))


# ---- sessions ----


# ---- on a GPU ----


# ---- routers by token, slots ----


def test_a_slot_has_the_experts_of_the_token_that_ends_texts(model):
    method = methods_for(model)["one pass, deep"]
    slots, session, text = method.lookahead, Session(model, 1, 64), torch.tensor([5, 6, 7, -1, -2])
    session.set_slots(slots, 2)
    with session.model.attached():
        logits = session.call(session.packed([Tree.chain(4)]), text)
    other = model_of()
    rows = torch.cat((other.get_input_embeddings()(text[:3]), slots.weight[:2]))
    ids = text.where(text >= 0, END)[None]
    for number, layer in enumerate(other.model.layers):
        vectors = torch.cat((torch.zeros(3, 64), slots.deep[number, :2]))[None, :, None]
        layer.register_forward_pre_hook(lambda _, inputs, vectors=vectors: (inputs[0] + vectors, *inputs[1:]))
        if layer.mlp.is_hash:
            layer.mlp.gate.register_forward_pre_hook(lambda _, inputs: (inputs[0], ids))
    alone = other(inputs_embeds=rows[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


# ---- in transformers ----


def test_custom_generate_without_caches(model):
    ids, mask = ragged_prompts(4)
    want = text_of(KIND, model, ids, mask, NEW)
    custom = pass_ext.custom_generate(NGram(shortest=1))
    assert torch.equal(greedy_of_transformers(model, ids, mask, NEW, **GREEDY, custom_generate=custom), want)
    more = dict(**GREEDY, custom_generate=custom, return_dict_in_generate=True)
    with pytest.raises(
        ValueError, match=f"{NAME} caches windows, and entries that its compressors have made, which pass_"
    ):
        greedy_of_transformers(model, ids, mask, NEW, **more)
    with_scores = greedy_of_transformers(model, ids, mask, NEW, **more, use_cache=False, output_logits=True)
    assert torch.equal(with_scores.sequences, want) and len(with_scores.logits) == NEW


# ---- refused ----


def test_a_compressor_with_other_parts():
    model = model_of()
    del model.model.layers[1].self_attn.compressor.compress_rate
    with pytest.raises(
        ValueError, match=f"{NAME} attends to entries that DeepseekV4HCACompressor .* cannot be compared"
    ):
        generate(model, prompts(1, 5)[0], max_new_tokens=2)


def test_pass_ext_as_the_models_attention():
    model = model_of()
    use(model)
    with pytest.raises(ValueError, match="DeepseekV4Attention has compressed entries after its keys"):
        greedy_of_transformers(model, *ragged_prompts(2), 2, **GREEDY)


def test_heads_of_odd_sizes():
    for changes in (dict(head_dim=24), dict(index_head_dim=24)):
        with pytest.raises(ValueError, match="heads have a multiple of 16 numbers, here"):
            generate(model_of(**changes), prompts(1, 5)[0], max_new_tokens=2)


def test_layers_without_a_compressor():
    model = model_of()
    for layer, named in ((1, HEAVY), (0, f"{SPARSE}, {HEAVY}")):
        model.model.layers[layer].self_attn.compressor = None
        with pytest.raises(ValueError, match=f"{NAME} has layers of the kind {named} without a compressor"):
            generate(model, prompts(1, 5)[0], max_new_tokens=2)


@pytest.mark.parametrize("kind", ["CSA", "HCA"])
@pytest.mark.parametrize("change", ["sums", "softmax", "unrotated", "chosen"])
def test_compressors_that_compute_otherwise_are_not_believed(kind, change, monkeypatch):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as module

    base = getattr(module, f"DeepseekV4{kind}Compressor")

    class Changed(base):
        def forward(self, *inputs):
            with monkeypatch.context() as patched:
                if change == "sums":
                    patched.setattr(torch.Tensor, "sum", lambda x, dim: x.amax(dim))
                elif change == "softmax":
                    patched.setattr(torch.Tensor, "softmax", lambda x, dim, dtype: (2 * x).float().softmax_(dim))
                elif change == "unrotated":
                    patched.setattr(module, "apply_rotary_pos_emb", lambda x, *_: x)
                entries, bias = super().forward(*inputs)
                return entries, bias.roll(1, -1) if change == "chosen" else bias

    if change == "softmax":
        monkeypatch.setattr(torch.Tensor, "softmax_", lambda x, dim: torch.softmax(x, dim), raising=False)
    model = model_of()
    for layer in model.model.layers:
        if type(layer.self_attn.compressor) is base:
            layer.self_attn.compressor.__class__ = Changed
    with pytest.raises(
        ValueError, match=f"{NAME} attends to entries that Changed makes of windows of tokens, which compu"
    ):
        generate(model, prompts(1, 5)[0], max_new_tokens=2)
