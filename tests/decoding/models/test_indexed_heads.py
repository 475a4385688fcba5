"""MiniMax-M3: each head of an indexer chooses blocks of tokens for itself. transformers' blocks begin at the first column, so
padding on the left moves them: its text of each prompt alone counts."""

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
    generate,
    pack_trees,
    testing,
)
from pass_ext.decoding.models import indexed
from pass_ext.decoding.models.parts import cache_name
from pass_ext.integrations.transformers.processors import NotedRows
from pass_ext.testing import assert_same_bits
from pass_ext.training.lookahead.states import with_states

pytestmark = pytest.mark.skipif(not hasattr(transformers.models, "minimax_m3_vl"), reason="before transformers 5.24")

NAME = "minimax_m3_vl_text"
NEW = 14
SPARSE = "minimax_m3_sparse"
GREEDY = dict(eos_token_id=None, pad_token_id=0)


def model_with(*kinds, seed=0, **changes):
    """A model whose layers are of these kinds; a row attends to 2 blocks of 2 tokens."""
    from transformers import AutoModelForCausalLM

    from benchmarks.architectures.models import tiny_config

    shape = tiny_config(NAME).to_dict() | dict(layer_types=list(kinds), num_hidden_layers=len(kinds)) | changes
    shape["mlp_layer_types"] = ["dense"] * len(kinds)
    torch.manual_seed(seed)
    config = type(tiny_config(NAME))(**shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 / (parameter.shape[-1] ** 0.5 if "embed" not in name else 1.5))
    return model


@pytest.fixture(scope="module")
def model():
    return model_with(SPARSE, SPARSE)


def alone(model, ids, mask, new=NEW):
    """transformers' text of each prompt alone, behind its padding."""
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
        "speculative": Speculative(model_with(SPARSE, SPARSE, seed=1), 3),
        "candidates": MultiCandidate(model, (2, 2, 1)),
        "early exit": Speculative(draft, 3),
        "tree of an early exit": MultiCandidate(draft, (2, 2)),
    }
    for name, method in (methods_for(model) | drafted).items():
        got = generate(model, ids, method, max_new_tokens=NEW, attention_mask=mask, eos_token_id=[]).sequences
        assert torch.equal(got, want), name


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
    model, (ids, mask) = model_with(*kinds, **changes), ragged_prompts(6)
    want = alone(model, ids, mask)
    for method in some_methods(model):
        got = generate(model, ids, method, max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
        assert torch.equal(got.sequences, want), method


def test_experts_and_layers_without_an_indexer():
    model, (ids, mask) = tiny_model(NAME), ragged_prompts(6)
    want = alone(model, ids, mask)
    for method in some_methods(model):
        session = Session(model)
        got = generate(model, ids, method, session=session, max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
        assert torch.equal(got.sequences, want), method
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
        chosen, whole = indexed.chosen_keys(rows, *step).lists, torch.cat((held, keys))
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
    lists = indexed.chosen_keys(rows, held, *step).lists
    assert lists[:, 0].tolist() == [[0, 1, 4, -1], [0, 1, 4, 5], [0, 1, 4, 6], [0, 1, 7, -1]]
    with torch.device("meta"):
        assert torch.equal(indexed.chosen_keys(rows, held, *step).lists, lists)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("one_thread")
def test_a_row_has_the_bits_that_it_has_alone(dtype):
    model = model_with(SPARSE, SPARSE).to(dtype)
    ids, mask = ragged_prompts(3, longest=9)
    options = dict(max_new_tokens=NEW, eos_token_id=[])
    for method in (NGram(shortest=1, tokens=4), PaSS(slots_for(model), tree=Tree.from_branching((3, 2)), rows=24)):
        together = NotedRows()
        batch = generate(model, ids, method, attention_mask=mask, logits_processor=together, **options)
        for row, seen in enumerate(mask.bool()):
            noted = NotedRows()
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


@pytest.mark.parametrize("most", [20, 100])
def test_long_prompts_are_read_in_pieces(most, monkeypatch):
    """Blocks of 4 tokens; 300 is no multiple of them, so that one is in two pieces."""
    monkeypatch.setattr("pass_ext.decoding.session.reading.MAX_TREE_NODES", 150)
    monkeypatch.setattr(indexed, "_MOST_PRODUCTS", 20_000)  # scores of some rows at once
    model = model_with(SPARSE, SPARSE, index_block_size=4, index_topk_blocks=most, max_position_embeddings=1024)
    ids = torch.randint(3, 90, (2, 500), generator=torch.Generator().manual_seed(0))
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
    assert [tuple(x.shape[2:]) for x in session.caches[0]] == [(2, 16 + 16 + 4 * 16), (2, 16 + 16)]
    for method in others:
        got = generate(model, ids, method, session=Session(model, cache_dtype=codes), **options).sequences
        assert torch.equal(got, want), method


def test_transformers_caches_go_in_and_out(model):
    """The indexers' keys too. Prompts of one length, as padding would move transformers' blocks."""
    ids = ragged_prompts(3)[0][:, -4:]
    want = greedy_of_transformers(model, ids, torch.ones_like(ids), 2 * NEW, **GREEDY)
    custom = pass_ext.custom_generate(NGram(shortest=1))
    for first, second in ((custom, None), (None, custom), (custom, custom)):
        cache = None
        for how, given in ((first, ids), (second, want[:, : ids.shape[1] + NEW])):
            past = {} if cache is None else {cache_name(type(model).forward): cache}
            if how is not None:
                past["custom_generate"] = how
            options = dict(past, **GREEDY, return_dict_in_generate=True)
            result = greedy_of_transformers(model, given, torch.ones_like(given), NEW, **options)
            cache = result.past_key_values
        assert torch.equal(result.sequences, want)


@pytest.mark.usefixtures("one_thread")
def test_kernels_and_widths_of_a_gpu_on_the_emulator(model, monkeypatch):
    """A call for each head's lists reads its share of the caches' heads."""
    ids, mask = ragged_prompts(2, longest=7)
    options = dict(max_new_tokens=4, attention_mask=mask, eos_token_id=[])
    want = generate(model, ids, **options).sequences
    use_widths_of_a_gpu(monkeypatch)
    with testing.rerouted_backend("emulated", KERNELS).active():
        session = Session(model)
        assert torch.equal(
            generate(model, ids, NGram(shortest=1, tokens=3), session=session, **options).sequences, want
        )
    assert [tuple(x.shape[2:]) for x in session.caches[0]] == [(2, 64 + 16), (2, 64)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(model):
    """The CPU's texts."""
    ids, mask = ragged_prompts(6)
    options = dict(max_new_tokens=NEW, eos_token_id=[])
    want = generate(model, ids, attention_mask=mask, **options).sequences
    model = model_with(SPARSE, SPARSE).cuda()
    for method in (Plain(), NGram(shortest=1)):
        session = Session(model, cuda_graphs=False)
        got = generate(model, ids.cuda(), method, session=session, attention_mask=mask.cuda(), **options)
        assert torch.equal(got.sequences.cpu(), want), method


# ---- refused ----


def test_slots_are_not_trained():
    """Training's call takes rows for columns of one text."""
    with pytest.raises(SystemExit, match=f"slots cannot be trained for {NAME}: its indexers choose blocks of columns"):
        with_states(tiny_model(NAME), 64)


def test_heads_that_have_no_share_of_the_kv_heads():
    model = model_with(SPARSE, SPARSE, index_n_heads=4)
    with pytest.raises(ValueError, match="2 KV heads are a multiple of the 4 heads that choose for themselves"):
        generate(model, ragged_prompts(1)[0], max_new_tokens=2)


def test_an_indexers_key_that_cannot_be_divided_among_heads():
    model = model_with(SPARSE, SPARSE, index_head_dim=26, num_key_value_heads=4)
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


def test_indexers_that_choose_for_other_heads_are_not_believed(model):
    """They have the forward of those that do not."""
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as module

    class Changed(module.MiniMaxM3VLIndexer):
        def build_block_mask(self, chosen, *rest):
            return super().build_block_mask(chosen.flip(1), *rest)

    generate(model, ragged_prompts(1)[0], max_new_tokens=2)
    check_refused(Changed)


def check_refused(kind):
    model = model_with(SPARSE, SPARSE)
    for layer in model.model.layers:
        layer.self_attn.indexer.__class__ = kind
    with pytest.raises(
        ValueError, match="keys that Changed chooses for each row, by scores of another form than MiniMax"
    ):
        generate(model, ragged_prompts(1)[0], max_new_tokens=2)
