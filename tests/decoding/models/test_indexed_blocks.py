"""Qwen4: indexers that choose whole blocks of tokens, and layers that look up n-grams of tokens. test_hybrid_models.py has its
states and transformers' caches."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from support.generation import greedy_of_transformers
from support.kinds import GREEDY, earliest_of_equals, few_methods, model_of, ragged, some_methods
from support.small_models import prompts

from benchmarks.architectures.models import tiny_model
from pass_ext import Session, Tree, generate, pack_trees
from pass_ext.decoding.models.features import indexed

pytestmark = pytest.mark.skipif(not hasattr(transformers.models, "qwen4_exp"), reason="before transformers 5.24")

NAME = "qwen4_exp_text"
NEW = 8
END = 2  # the token that ends texts, beyond which no n-gram reaches


@pytest.mark.parametrize(
    "changes",
    [
        dict(indexer_n_heads=1),
        dict(indexer_n_heads=2, indexer_compress_ratio=3, indexer_budget=6),
        dict(indexer_n_heads=3, ple_layer_ids=[]),
        dict(indexer_n_heads=4, indexer_compress_ratio=1, indexer_budget=4, ngram_size=4, ple_embed_dim=36),
    ],
    ids=str,
)
def test_texts_are_transformers_own(changes, monkeypatch):
    """Of blocks with equal scores, of which 0 is common with few heads, transformers takes the earlier ones here too."""
    model, (ids, mask) = tiny_model(NAME, **changes), ragged()
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "topk", earliest_of_equals)
        want = greedy_of_transformers(model, ids, mask, 2 * NEW, **GREEDY)
    for method in few_methods(model).values():
        got = generate(model, ids, method, max_new_tokens=2 * NEW, attention_mask=mask, eos_token_id=[])
        assert torch.equal(got.sequences, want), method


def test_a_model_of_text_and_pictures():
    model, (ids, mask) = tiny_model("qwen4_exp"), ragged()
    want = greedy_of_transformers(model, ids, mask, NEW, **GREEDY)
    for method in some_methods(model).values():
        got = generate(model, ids, method, max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
        assert torch.equal(got.sequences, want), method


@pytest.mark.parametrize("name", ["qwen4_exp_text", "minimax_m3_vl_text"])
@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_key_lies_after_codes_in_the_models_dtype(name, codes):
    """Each KV head has half of the indexer's key after it."""
    model, session = model_of(name), Session(model_of(name), cache_dtype=codes)
    generate(model, prompts(2, 5)[0], session=session, max_new_tokens=2)
    assert [tuple(x.shape[2:]) for x in session.caches[0]] == [(2, 16 + 16 + 4 * 16), (2, 16 + 16)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_row_chooses_as_its_text_alone(size):
    """Random trees after texts of every length: the best blocks of each row's own text, and the tokens after its last block."""
    generator = torch.Generator().manual_seed(size)
    for prefix in range(3 * size + 2):
        parents = [-1, *(int(torch.randint(row, (), generator=generator)) for row in range(1, 14))]
        tree = pack_trees([Tree(parents)])
        q, held, keys = (torch.randn(shape, generator=generator) for shape in ((14, 3, 8), (prefix, 8), (14, 8)))
        blocks = indexed.Blocks(size, lambda members, places: members.sum(1) + places[:, None])
        rows = indexed.IndexRows(q, keys, torch.ones(14, 3), 1.0, 2, blocks)
        chosen = indexed.chosen_keys(rows, held[None, :, None], torch.tensor([prefix]), tree, torch.tensor([14]))
        whole = torch.cat((held, keys))
        for row in range(14):
            path = [row]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            text = [*range(prefix), *(prefix + node for node in path)]
            members = [text[first : first + size] for first in range(0, len(text) - size + 1, size)]
            scores = [
                float((q[row] @ (whole[block].sum(0) + number * size)).relu().sum())
                for number, block in enumerate(members)
            ]
            best = sorted(range(len(members)), key=lambda number: (-scores[number], number))[:2]
            want = [key for number in best for key in members[number]] + text[len(members) * size :]
            if chosen is not None:
                got = chosen[row]
                assert got[got >= 0].tolist() == sorted(want) and not (got[: len(want)] < 0).any(), (prefix, row)
        assert (chosen is None) == ((prefix + 14) // size <= 2)


# ---- refused ----


def test_an_indexers_key_that_cannot_be_divided_among_heads():
    model = tiny_model(NAME, indexer_head_dim=25)
    with pytest.raises(ValueError, match="25 numbers of the indexer's key are a multiple of the 2 KV heads"):
        generate(model, prompts(1, 5)[0], max_new_tokens=2)


@pytest.mark.parametrize("change", ["lowest", "largest", "unrotated"])
def test_indexers_that_choose_otherwise_are_not_believed(change, monkeypatch):
    from transformers.models.qwen4_exp import modeling_qwen4_exp as module

    class Changed(module.Qwen4ExpTextQSAIndexer):
        def forward(self, hidden, places, mask, cache):
            with monkeypatch.context() as patched:
                if change == "lowest":
                    patched.setattr(torch.Tensor, "topk", lambda x, n, dim: torch.topk(-x, n, dim))
                elif change == "largest":
                    patched.setattr(torch.Tensor, "mean", lambda x, dim, **more: x.amax(dim, **more))
                else:
                    patched.setattr(module, "apply_rotary_pos_emb", lambda x, **_: x)
                return super().forward(hidden, places, mask, cache)

    model = tiny_model(NAME)
    for layer in model.model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.indexer.__class__ = Changed
    with pytest.raises(
        ValueError, match="attends to the keys that Changed chooses for each row, by scores of another form"
    ):
        generate(model, prompts(1, 5)[0], max_new_tokens=2)


@pytest.mark.parametrize("change", ["tokens", "convolution"])
def test_ngrams_that_are_looked_up_otherwise_are_not_believed(change, monkeypatch):
    from transformers.models.qwen4_exp import modeling_qwen4_exp as module

    class Changed(module.Qwen4ExpTextPLELayer):
        def forward(self, *inputs, **named):
            return super().forward(*inputs, **named)

        def _short_conv(self, hidden, cache):
            out = super()._short_conv(hidden, cache)
            return out + 0.01 if change == "convolution" else out

    model = tiny_model(NAME)
    for layer in model.model.layers:
        if layer.ple is not None:
            layer.ple.__class__ = Changed
    if change == "tokens":

        def shifted(self, tokens, shift):
            return tokens.roll(2 * shift, 1)  # farther back than n tokens

        monkeypatch.setattr(module.Qwen4ExpTextNGramEmbedding, "_shift_right_ignore_eos", shifted)
    with pytest.raises(
        ValueError, match=f"{NAME} looks up n-grams of tokens in Changed, which computes something else"
    ):
        generate(model, prompts(1, 5)[0], max_new_tokens=2)


def with_class(model, kind):
    """The model with another class of its indexers or of its layers that look up n-grams."""
    for part in list(model.modules()):
        if issubclass(kind, type(part)) and type(part) is not torch.nn.Module:
            part.__class__ = kind
    return model


@pytest.mark.parametrize("name", ["Qwen4ExpTextQSAIndexer", "Qwen4ExpTextPLELayer"])
def test_a_comparison_for_which_memory_is_short_says_nothing_about_the_model(name):
    from transformers.models.qwen4_exp import modeling_qwen4_exp as module

    base, is_short = getattr(module, name), True

    class Large(base):
        def forward(self, *inputs, **named):
            return self._computed(super().forward, *inputs, **named)

        def _short_conv(self, *inputs):
            return self._computed(super()._short_conv, *inputs)

        def _computed(self, function, *inputs, **named):
            if is_short:
                raise torch.OutOfMemoryError("too large")
            return function(*inputs, **named)

    ids = prompts(1, 5)[0]
    want = generate(tiny_model(NAME), ids, max_new_tokens=2).sequences
    model = with_class(tiny_model(NAME), Large)
    with pytest.raises(torch.OutOfMemoryError, match="too large"):
        generate(model, ids, max_new_tokens=2)
    is_short = False
    assert torch.equal(generate(model, ids, max_new_tokens=2).sequences, want)


def test_taps_that_are_too_far_apart_are_refused_alone():
    """Before and after another model of the same class."""
    from transformers.models.qwen4_exp import modeling_qwen4_exp as module

    class Apart(module.Qwen4ExpTextPLELayer):
        def forward(self, *inputs, **named):
            return super().forward(*inputs, **named)

    ids = prompts(1, 5)[0]
    for changes in (dict(ngram_size=8, ple_embed_dim=84), {}, dict(ngram_size=8, ple_embed_dim=84)):
        model = with_class(tiny_model(NAME, **changes), Apart)
        if changes:
            with pytest.raises(ValueError, match=f"{NAME} has Apart, whose convolution has taps 8 tokens apart"):
                generate(model, ids, max_new_tokens=2)
        else:
            generate(model, ids, max_new_tokens=2)


def test_layers_of_each_size_are_compared():
    from transformers.models.qwen4_exp import modeling_qwen4_exp as module

    class Sized(module.Qwen4ExpTextPLELayer):
        def forward(self, *inputs, **named):
            return super().forward(*inputs, **named)

        def _short_conv(self, hidden, cache):
            return super()._short_conv(hidden, cache) + 0.01 * (self.conv1d.dilation == (4,))

    ids = prompts(1, 5)[0]
    for _ in range(2):
        generate(with_class(tiny_model(NAME), Sized), ids, max_new_tokens=2)
        with pytest.raises(ValueError, match="in Sized, which computes something else"):
            generate(with_class(tiny_model(NAME, ngram_size=4, ple_embed_dim=36), Sized), ids, max_new_tokens=2)
