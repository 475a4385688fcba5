"""Models whose indexers choose the keys that a row attends to: transformers' texts with every method, caches, refusals."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from support.generation import greedy_of_transformers, methods_for, slots_for
from support.kinds import GREEDY, earliest_of_equals
from support.small_models import prompts, ragged_prompts

import pass_ext
from benchmarks.architectures.models import tiny_model
from pass_ext import NGram, PaSS, Plain, Session, Tree, generate
from pass_ext.decoding.models import layer_attention
from pass_ext.decoding.models.features import indexed
from pass_ext.decoding.models.features.latents import Latents
from pass_ext.decoding.models.parts import cache_name
from pass_ext.decoding.session import session as sessions
from pass_ext.integrations.transformers.processors import NotedRows
from pass_ext.layers import dequantize_rows, quantize_rows
from pass_ext.ops.quantize import CODE_HEADER, MOST_OF_CODES
from pass_ext.testing import assert_error_within, assert_same_bits

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.cache_utils, "DynamicIndexedLayer"), reason="before transformers 5.24"
)

FAMILIES = ("deepseek_v32", "axk2", "dots3_note_text", "glm_moe_dsa", "hy_v4")
CODES = tuple(MOST_OF_CODES)
NEW = 8
# A row attends to 4 tokens of up to 20. Of 16 numbers of a latent, 8 of a rotated key and 16 of an indexer's key.
ROW = (48, 16)
# A layer of another choice has no key of its own; one with a window has latents of 32 numbers and none either.
LAYERS = {"hy_v4": [ROW, (32, 16)], "dots3_note_text": [ROW, (48, 32)]}


@pytest.fixture(scope="module")
def deepseek():
    return tiny_model("deepseek_v32")


def widths(session):
    return [(keys.shape[-1], values.shape[-1]) for keys, values in session.caches]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_writes_transformers_texts(family):
    model = tiny_model(family)
    ids, mask = ragged_prompts(8)
    want = greedy_of_transformers(model, ids, mask, NEW, **GREEDY)
    options = dict(max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
    session = Session(model, capacity=64)
    assert torch.equal(generate(model, ids, session=session, **options).sequences, want)
    assert widths(session) == LAYERS.get(family, [ROW] * 2)
    assert all(values.data_ptr() == keys.data_ptr() for keys, values in session.caches)
    slots = slots_for(model)
    for method in (
        NGram(shortest=1),
        PaSS(slots, tree=Tree([-1, 0, 0, 1, 1, 2]), rows=24),
        PaSS(slots, passes=2, tree=Tree.from_branching((2, 2)), rows=24),
    ):
        used = session if isinstance(method, NGram) else None
        assert torch.equal(generate(model, ids, method, session=used, **options).sequences, want), method
    custom = pass_ext.custom_generate(NGram(shortest=1))
    assert torch.equal(greedy_of_transformers(model, ids, mask, NEW, **GREEDY, custom_generate=custom), want)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_differ_by_ties_alone(family, heads, monkeypatch):
    """With one head of the indexer half of all scores are 0, with four many, and which of equal ones PyTorch's topk takes
    nobody promises. Where transformers takes the earlier tokens too, it writes the same texts."""
    model = tiny_model(family, index_n_heads=heads)
    ids, mask = ragged_prompts(8)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "topk", earliest_of_equals)  # of indexers; experts are chosen by torch.topk
        want = greedy_of_transformers(model, ids, mask, NEW, **GREEDY)
    options = dict(max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
    for method in (Plain(), NGram(shortest=1)):
        assert torch.equal(generate(model, ids, method, **options).sequences, want), method


@pytest.mark.parametrize("family", ["glm_moe_dsa", "hy_v4"])
def test_layers_that_share_a_choice(family):
    """They have no indexer, so their caches have no keys of one."""
    model = shared(family, ["full", "shared", "full", "shared"])
    ids, mask = ragged_prompts(4)
    want = greedy_of_transformers(model, ids, mask, NEW, **GREEDY)
    for method in (Plain(), NGram(shortest=1), PaSS(slots_for(model), tree=Tree.from_branching((2, 2)), rows=24)):
        session = Session(model)
        got = generate(model, ids, method, session=session, max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
        assert torch.equal(got.sequences, want), method
        assert widths(session) == [ROW, (32, 16)] * 2


def shared(family, kinds):
    from transformers import AutoModelForCausalLM

    from benchmarks.architectures.models import tiny_config

    shape = tiny_config(family).to_dict() | dict(
        num_hidden_layers=len(kinds), indexer_types=kinds, layer_types=None, mlp_layer_types=["dense"] * len(kinds)
    )
    config = type(tiny_config(family))(**shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 / (parameter.shape[-1] ** 0.5 if "embed" not in name else 1.5))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("one_thread")
def test_a_row_chooses_what_it_chooses_alone(dtype):
    """Its logits have the same bits. With one head of the indexer half of all scores are 0, so that most choices are ties."""
    model = tiny_model("deepseek_v32", index_n_heads=1, mlp_layer_types=["dense"] * 2).to(dtype)
    ids, mask = ragged_prompts(3, longest=9)
    for method in (
        Plain(),
        NGram(shortest=1, tokens=4),
        PaSS(slots_for(model), tree=Tree.from_branching((3, 2)), rows=24),
    ):
        together = NotedRows()
        options = dict(max_new_tokens=NEW, eos_token_id=[])
        batch = generate(model, ids, method, attention_mask=mask, logits_processor=together, **options)
        for row, seen in enumerate(mask.bool()):
            alone = NotedRows()
            text = generate(model, ids[row][seen][None], logits_processor=alone, **options)
            for mine, theirs in zip(together.of(batch), alone.of(text), strict=True):
                assert_same_bits(mine[row], theirs[0])


def test_of_equal_scores_the_earlier_tokens_count_more():
    """All scores are 0: a row attends to the first 3 tokens that it sees, in a tree too."""
    rows = indexed.IndexRows(torch.zeros(5, 2, 8), torch.zeros(5, 8), torch.ones(5, 2), 1.0, 3)
    tree = pass_ext.pack_trees([Tree([-1, 0, 0, 1, 2])])
    for prefix, want in (
        (0, [[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 1, 3], [0, 2, 4]]),
        (2, [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]]),
        (1, [[0, 1, -1], [0, 1, 2], [0, 1, 3], [0, 1, 2], [0, 1, 3]]),
    ):
        held = torch.zeros(1, 4, 1, 8)
        chosen = indexed.chosen_keys(rows, held, torch.tensor([prefix]), tree, torch.tensor([5]))
        assert chosen.tolist() == want
    few = rows._replace(most=7)
    assert indexed.chosen_keys(few, held, torch.tensor([2]), tree, torch.tensor([5])) is None


def test_all_lists_are_made_where_the_rows_are():
    """A tensor that is made without a device is without numbers here."""
    generator, tree = torch.Generator().manual_seed(0), pass_ext.pack_trees([Tree([-1, 0, 0, 1, 2]), Tree.chain(2)])
    q, weights, keys, held = (
        torch.randn(shape, generator=generator) for shape in ((8, 4, 8), (8, 4), (8, 8), (2, 20, 1, 8))
    )
    step = torch.tensor([9, 17], dtype=torch.int32), tree, torch.tensor([5, 3])
    for blocks in (None, indexed.Blocks(3, lambda members, places: members.sum(1) + places[:, None])):
        rows = indexed.IndexRows(q, keys, weights, 1.0, 3, blocks)
        want = indexed.chosen_keys(rows, held, *step)
        with torch.device("meta"):
            lists = indexed.chosen_keys(rows, held, *step)
        assert lists.device == q.device and torch.equal(lists, want)


def test_vectors_of_slots_are_added_to_every_stream():
    """A layer of hy_v4 has four streams; a call has four rows, so that vectors added to the wrong sizes would fit."""
    model = tiny_model("hy_v4")
    method = methods_for(model)["one pass, deep"]
    ids, mask = ragged_prompts(6)
    want = greedy_of_transformers(model, ids, mask, NEW, **GREEDY)
    got = generate(model, ids, method, max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
    assert torch.equal(got.sequences, want)
    slots, session, text = method.lookahead, Session(model, 1, 64), torch.tensor([5, 6, -1, -2])
    session.set_slots(slots, 2)
    with session.model.attached():
        logits = session.call(session.packed([Tree.chain(3)]), text)
    rows = torch.cat((model.get_input_embeddings()(text[:2]), slots.weight[:2]))
    for number, layer in enumerate(model.model.layers):
        vectors = torch.cat((torch.zeros(2, 64), slots.deep[number, :2]))[None, :, None]
        layer.register_forward_pre_hook(lambda _, inputs, vectors=vectors: (inputs[0] + vectors, *inputs[1:]))
    alone = model(inputs_embeds=rows[None]).logits[0]
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("most", [100, 500])
def test_long_prompts_attend_to_expanded_heads_or_by_lists(most, monkeypatch):
    """Pieces attend to expanded heads up to the length from which an indexer chooses, and by lists from there."""
    monkeypatch.setattr("pass_ext.decoding.session.reading.MAX_TREE_NODES", 300)
    monkeypatch.setattr(indexed, "_MOST_PRODUCTS", 100_000)  # scores of 10 rows at once
    expanded, heads = [], Latents.heads
    monkeypatch.setattr(Latents, "heads", lambda self, keys: expanded.append(len(keys)) or heads(self, keys))
    model = tiny_model("deepseek_v32", index_topk=most, max_position_embeddings=1024)
    ids = torch.randint(3, 90, (2, 700), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :300] = 0
    want = greedy_of_transformers(model, ids, mask, 8, **GREEDY)
    for method in (None, NGram(shortest=1)):
        expanded.clear()
        got = generate(model, ids, method, max_new_tokens=8, attention_mask=mask, eos_token_id=[])
        assert torch.equal(got.sequences, want)
        assert sorted(set(expanded)) == ([] if most == 100 else [400])


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_transformers_caches_of_families_go_in_and_out(family):
    """Its indexers' keys too: whoever goes on writes the same text. Caches of layers with a window hold the last keys only."""
    whole = family != "dots3_note_text"
    model = tiny_model(family) if whole else dots3_of(layer_types=["indexed_attention"] * 2)
    ids, mask = ragged_prompts(4)
    want = greedy_of_transformers(model, ids, mask, 2 * NEW, **GREEDY)
    options = dict(**GREEDY, return_dict_in_generate=True)
    custom = pass_ext.custom_generate(NGram(shortest=1))
    for first, second in ((custom, None), (None, custom), (custom, custom)):
        cache = None
        for tokens, how, given in ((NEW, first, ids), (NEW, second, want[:, : ids.shape[1] + NEW])):
            seen = torch.cat((mask, mask.new_ones(len(mask), given.shape[1] - ids.shape[1])), 1)
            past = {} if cache is None else {cache_name(type(model).forward): cache}
            if how is not None:
                past["custom_generate"] = how
            with torch.no_grad():
                result = model.generate(
                    given, attention_mask=seen, max_new_tokens=tokens, do_sample=False, **past, **options
                )
            cache = result.past_key_values
        assert torch.equal(result.sequences, want)


def test_an_indexers_keys_of_any_width():
    """20 numbers, padded to 32 in the cache, of layers whose other keys are padded to 32 too."""
    model = tiny_model("deepseek_v32", index_head_dim=20)
    ids, mask = ragged_prompts(4)
    want = greedy_of_transformers(model, ids, mask, NEW, **GREEDY)
    options = dict(max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
    session = Session(model)
    assert torch.equal(generate(model, ids, NGram(shortest=1), session=session, **options).sequences, want)
    assert widths(session) == [(32 + 32, 16)] * 2
    texts = want[:, ids.shape[1] :]
    fresh = dict(max_new_tokens=4, attention_mask=torch.ones_like(texts), eos_token_id=[])
    for codes in (None, torch.int8):
        session = Session(model, cache_dtype=codes)
        alone = generate(model, texts, session=session, **fresh).sequences
        past = [(keys[:, :5], values[:, :5]) for keys, values in session.caches]
        begun = Session(model, past=(past, 5), cache_dtype=codes)
        assert torch.equal(generate(model, texts, session=begun, **fresh).sequences, alone)
    cache, own = (transformers.DynamicCache(config=model.config) for _ in range(2))
    name, custom = cache_name(type(model).forward), pass_ext.custom_generate(NGram(shortest=1))
    greedy_of_transformers(model, texts[:, :8], None, 2, **GREEDY, custom_generate=custom, **{name: cache})
    model(texts[:, :8], **{name: own})
    for layer, theirs in zip(cache.layers, own.layers, strict=True):
        torch.testing.assert_close(layer.indexer_keys[:, :8], theirs.indexer_keys, rtol=1e-5, atol=1e-5)


def test_real_head_sizes():
    """Latents of 512 and 64 numbers, and 128 of an indexer's key: rows of 704."""
    model = tiny_model("deepseek_v32")
    config = dict(
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, index_head_dim=128, head_dim=64,
        qk_head_dim=192,
    )  # fmt: skip
    shape = model.config.to_dict() | config
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(type(model.config)(**shape), attn_implementation="eager")
    model = model.float().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "embed" not in name:
            parameter.mul_(3.0)
    ids, mask = ragged_prompts(4)
    want = greedy_of_transformers(model, ids, mask, NEW, **GREEDY)
    session = Session(model, capacity=64)
    options = dict(max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
    for method in (None, NGram(shortest=1)):
        assert torch.equal(generate(model, ids, method, session=session, **options).sequences, want)
    assert widths(session) == [(704, 512)] * 2
    texts = want[:, ids.shape[1] :]
    alone = generate(model, texts, max_new_tokens=4, eos_token_id=[], session=session).sequences
    begun = Session(model, past=([(keys[:, :5].clone(), values[:, :5].clone()) for keys, values in session.caches], 5))
    assert torch.equal(generate(model, texts, max_new_tokens=4, eos_token_id=[], session=begun).sequences, alone)


# ---- caches in 8 bits ----


def test_layers_that_share_a_choice_over_codes():
    model = shared("glm_moe_dsa", ["full", "shared", "full", "shared"])
    ids, mask = ragged_prompts(4)
    options = dict(max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
    session = Session(model, cache_dtype=torch.int8)
    want = generate(model, ids, session=session, **options).sequences
    assert widths(session) == [(16 + 32 + 4 * 16, 16 + 16), (16 + 32, 16 + 16)] * 2
    for method in (NGram(shortest=1), PaSS(slots_for(model), tree=Tree.from_branching((2, 2)), rows=24)):
        got = generate(model, ids, method, session=Session(model, cache_dtype=torch.int8), **options).sequences
        assert torch.equal(got, want), method


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_attention_over_codes_against_float64_of_what_is_stored(codes, monkeypatch):
    """The listed keys' latents, decoded, of draft rows too."""
    compared, attend = [], layer_attention.attention_tree

    def attended(q, keys, values, prefix_lens, cu_nodes, *rest, k_new, key_lists, scale, **options):
        result = attend(
            q, keys, values, prefix_lens, cu_nodes, *rest, k_new=k_new, key_lists=key_lists, scale=scale, **options
        )
        bounds, width = cu_nodes.tolist(), values.shape[-1] - CODE_HEADER
        for row, owner in enumerate(rows_of(cu_nodes) if key_lists is not None else ()):
            stored = torch.cat((keys[owner, : prefix_lens[owner]], k_new[bounds[owner] : bounds[owner + 1]]))[:, 0]
            numbers = dequantize_rows(stored[key_lists[row][key_lists[row] >= 0].long()])
            plain, exact = (
                (q[row].to(dtype) @ numbers.to(dtype).T * scale).softmax(1) @ numbers[:, :width].to(dtype)
                for dtype in (torch.float32, torch.float64)
            )
            compared.append((result[0][row], plain, exact))
        return result

    monkeypatch.setattr(layer_attention, "attention_tree", attended)
    ids, mask = ragged_prompts(4)
    model = tiny_model("deepseek_v32")
    options = dict(max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
    generate(model, ids, NGram(shortest=1), session=Session(model, cache_dtype=codes), **options)
    assert len(compared) > 100
    assert_error_within(*(torch.stack(results) for results in zip(*compared, strict=True)))


def rows_of(cu_nodes):
    """The request of each row."""
    return torch.repeat_interleave(torch.arange(len(cu_nodes) - 1), cu_nodes.diff()).tolist()


def test_codes_of_latents_and_an_indexers_own_keys_are_kept(monkeypatch):
    """Where a cache grows, in `past`, and in one whose numbers are coded as it is taken."""
    monkeypatch.setattr(sessions, "_FIRST_POSITIONS", 10)
    codes, model, ids = torch.float8_e4m3fn, tiny_model("deepseek_v32"), prompts(3, 8)[0]
    options = dict(max_new_tokens=NEW, eos_token_id=[])
    session, whole = Session(model, capacity=40, cache_dtype=codes), Session(model, capacity=40)
    want = generate(model, ids, session=session, **options).sequences
    generate(model, ids, session=whole, **options)
    stored, numbers = (x.caches[0][0][:, :8] for x in (session, whole))
    assert torch.equal(stored[..., -64:].view(torch.float32), numbers[..., -16:])
    assert torch.equal(stored[..., :-64].view(torch.uint8), quantize_rows(numbers[..., :-16], codes).view(torch.uint8))
    assert torch.equal(generate(model, ids, NGram(shortest=1), session=session, **options).sequences, want)
    views = [(keys[:, :5], values[:, :5]) for keys, values in session.caches]
    for past in (views, [(keys.clone(), values.clone()) for keys, values in views]):
        begun = Session(model, past=(past, [5, 3, 4]), cache_dtype=codes)
        assert torch.equal(generate(model, ids, NGram(shortest=1), session=begun, **options).sequences, want)
    session.past = views, 4
    assert torch.equal(generate(model, ids, session=session, **options).sequences, want)
    in_numbers = [(keys[:, :5], values[:, :5]) for keys, values in whole.caches]
    for past in (in_numbers, [(keys.clone(), values.clone()) for keys, values in in_numbers]):
        begun = Session(model, past=(past, 5), cache_dtype=codes)
        generate(model, ids, session=begun, **options)
        assert torch.equal(begun.caches[0][0][:, :5].view(torch.uint8), views[0][0].view(torch.uint8))


@pytest.mark.parametrize("most", [100, 500])
def test_long_prompts_over_codes(most, monkeypatch):
    """Pieces attend to heads that are expanded from what is stored, or by lists, as few rows do."""
    model = tiny_model("deepseek_v32", index_topk=most, max_position_embeddings=1024)
    ids = torch.randint(3, 90, (2, 600), generator=torch.Generator().manual_seed(0))
    rows = []
    for piece in (1024, 200):
        monkeypatch.setattr("pass_ext.decoding.session.reading.MAX_TREE_NODES", piece)
        noted, session = NotedRows(), Session(model, cache_dtype=torch.int8)
        result = generate(model, ids, max_new_tokens=2, eos_token_id=[], session=session, logits_processor=noted)
        rows.append(noted.of(result)[0])
    assert (rows[0] - rows[1]).abs().max() < 0.01 * rows[0].std()


# ---- on a GPU ----


# ---- latents as wide as those of dots3_note_text's layers with a window ----


def test_latents_too_wide_for_attention_are_expanded():
    """1024 + 64 numbers; the layer beside, with an indexer, still keeps its latents."""
    model = dots3_of(swa_kv_lora_rank=1024, swa_head_dim=80)
    ids, mask = ragged_prompts(4)
    want = greedy_of_transformers(model, ids, mask, NEW, **GREEDY)
    options = dict(max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
    for method in (Plain(), NGram(shortest=1), PaSS(slots_for(model), tree=Tree.from_branching((2, 2)), rows=24)):
        session = Session(model)
        assert torch.equal(generate(model, ids, method, session=session, **options).sequences, want), method
        assert widths(session) == [ROW, (80, 16)]
    custom = pass_ext.custom_generate(NGram(shortest=1))
    assert torch.equal(greedy_of_transformers(model, ids, mask, NEW, **GREEDY, custom_generate=custom), want)
    with pytest.raises(ValueError, match=r"dots3_note_text caches latent keys and values \(kv_lora_rank\)"):
        greedy_of_transformers(model, ids, mask, NEW, **GREEDY, custom_generate=custom, return_dict_in_generate=True)


@pytest.mark.parametrize(("rank", "refused"), [(512, False), (513, True)])
def test_an_indexer_beside_latents_too_wide_is_refused_at_the_start(rank, refused):
    model = dots3_of(kv_lora_rank=rank)
    if refused:
        with pytest.raises(ValueError, match=r"^dots3_note_text attends .* by latents .* up to 512 numbers"):
            Session(model)
    else:
        assert torch.equal(
            generate(model, prompts(1, 5)[0], max_new_tokens=2, eos_token_id=[]).sequences[:, :5], prompts(1, 5)[0]
        )


def dots3_of(**changes):
    from benchmarks.architectures import models

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.CHANGES, "dots3_note_text", {**models.CHANGES["dots3_note_text"], **changes})
        return tiny_model("dots3_note_text")


# ---- refused ----


def test_layers_that_keep_expanded_heads_are_refused():
    model = tiny_model("deepseek_v32")
    model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="decodes that for layers that attend by latents"):
        generate(model, prompts(1, 5)[0], max_new_tokens=2)


@pytest.mark.parametrize("change", ["lowest", "squared", "no relu"])
def test_indexers_that_choose_otherwise_are_not_believed(change, monkeypatch):
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as module

    class Changed(module.DeepseekV32Indexer):
        def forward(self, *inputs, **named):
            if change == "lowest":
                lists = super().forward(*inputs, **named)
                return lists.new_zeros(lists.shape)
            functional = module.F
            module.F = type("F", (), {"relu": staticmethod((lambda x: x) if change == "no relu" else torch.square)})
            try:
                return super().forward(*inputs, **named)
            finally:
                module.F = functional

    model = tiny_model("deepseek_v32")
    for layer in model.model.layers:
        layer.self_attn.indexer.__class__ = Changed
    with pytest.raises(ValueError, match="attends to the keys that Changed chooses"):
        generate(model, prompts(1, 5)[0], max_new_tokens=2)
