"""Drafters of the DFlash family: drafts are those of a plain loop from the formulas and of transformers' own network, texts are
Plain's, and rules that divide by the drafts' distribution are exact."""

import dataclasses
import itertools
import logging

import pytest
import torch

pytest.importorskip("transformers")

from support.dflash_files import (
    BLOCK,
    MASK,
    block_rows,
    counted,
    drafted,
    place_scores,
    settings,
    states_of,
    tensors,
    written,
)
from support.generation import assert_as_alone, unpadded
from support.grammars import Automaton
from support.recorded import PauseAt, Recorded
from support.small_models import prompts, ragged_prompts, small_model, whole_prompts

from benchmarks.architectures.models import tiny_model
from pass_ext import Plain, Session, Tree, generate, load_drafter
from pass_ext.decoding.drafting.candidates import draw_children
from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.drafting.heads.best_paths import best_paths
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.drafting import DFlash

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 11
LIMITS = dict(max_new_tokens=24, eos_token_id=[])
KINDS = ("dflash", "dspark", "dflash2")
CYCLE = {0: {3: 1, 4: 1, 5: 0}, 1: {6: 0, 7: 1, 1: 0}}  # a grammar
DRAFTED = [1, 2, 4, 5, 7, 8, 9]  # the mapped vocabulary


def target(family="llama", layers=3, **changes):
    return small_model(family, vocab_size=VOCABULARY, num_hidden_layers=layers, **changes)


def files(kind, own=True, mapped=False, width=64, vocabulary=VOCABULARY, seed=0, **changes):
    """The config and the tensors of a head."""
    tokens = DRAFTED if mapped else None
    return settings(kind, own, width, vocabulary, tokens, **changes), tensors(kind, width, vocabulary, tokens, seed)


@pytest.fixture
def load(tmp_path):
    """Writes a head and loads it -> the method."""
    return lambda config, found, model: load_drafter(written(tmp_path / "head", config, found), model)


def loop(kind, found, model, own=True, taps=(1, 2), **options):
    """The plain loop of a drafter beside a model."""
    options = dict(first=0 if kind == "dspark" else 1, causal=(False, kind != "dflash2" or own)) | options
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    table = table * options.pop("scale", 1.0)
    return lambda states, root, levels: drafted(found, kind, states, root, table, head, levels, **options)


def check(model, method, draft, ids, mask=None, taps=(1, 2), **limits):
    """Greedy texts are Plain's, drafts and calls those of the loop -> the statistics."""
    mask, limits = torch.ones_like(ids) if mask is None else mask, {**LIMITS, **limits}
    plain = generate(model, ids, Plain(), attention_mask=mask, **limits)
    recorded = Recorded(method)
    found = generate(model, ids, recorded, attention_mask=mask, **limits)
    assert torch.equal(found.sequences, plain.sequences)
    texts, calls = unpadded(found.sequences, mask), []
    for b, (text, prompt) in enumerate(zip(texts, mask.sum(1).tolist(), strict=True)):
        expected, drafts = counted(model, text, prompt, draft, taps)
        assert recorded.tokens(b) == [chain for chain in drafts if chain]
        calls.append(expected)
    more = plain.stats.model_calls - limits["max_new_tokens"]  # of long prompts
    assert found.stats.model_calls == max(calls) + more
    return found.stats


# ---- drafts ----


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_a_plain_loop(kind, own, load):
    model = target()
    config, found = files(kind, own, mapped=not own and kind != "dflash2")
    ids = whole_prompts(1, 20, vocabulary=VOCABULARY)
    check(model, load(config, found, model), loop(kind, found, model, own), ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [3, 8])
def test_ragged_batches(kind, count, load):
    """Some prompts have one token; texts end at different steps."""
    model = target()
    config, found = files(kind, seed=1)
    batch = ragged_prompts(count, vocabulary=VOCABULARY)
    stats = check(model, load(config, found, model), loop(kind, found, model), *batch)
    assert count == 3 or stats.mean_acceptance_length > 1.01


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
def test_other_targets(family, load):
    """Gemma's embeddings are multiplied, those of a block are not."""
    model = target(family)
    config, found = files("dflash", seed=1)
    ids = whole_prompts(1, 9, vocabulary=VOCABULARY)
    check(model, load(config, found, model), loop("dflash", found, model), ids)


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_hybrid_and_latent_targets(family, load):
    model = tiny_model(family)
    table = model.get_input_embeddings().weight
    config, found = files("dflash", width=table.shape[1], vocabulary=len(table))
    method, ids = load(config, found, model), prompts(2, 9)[0]
    check(model, method, loop("dflash", found, model), ids, max_new_tokens=12)
    plain, tree = (generate(model, ids, each, **LIMITS) for each in (Plain(), dataclasses.replace(method, rows=9)))
    assert torch.equal(tree.sequences, plain.sequences)


def test_long_prompts_are_read_in_pieces(load):
    model = target()
    config, found = files("dflash2")
    ids, mask = ragged_prompts(3, longest=1100, vocabulary=VOCABULARY)
    mask[0], ids[0, ids[0] == 0] = 1, 3
    check(model, load(config, found, model), loop("dflash2", found, model), ids, mask, max_new_tokens=6)


def test_a_session_that_goes_on(load):
    """The states of a prompt's first tokens are not known: ``past`` has none. The block's rows see those that are."""
    model = target()
    config, found = files("dflash")
    method, ids = load(config, found, model), whole_prompts(2, 20, vocabulary=VOCABULARY)
    first = Session(model, capacity=100)
    text = generate(model, ids, Plain(), session=first, **LIMITS).sequences
    futures = generate(model, text, Plain(), **LIMITS).sequences
    second = Session(model, capacity=100, past=([(k[:, :25], v[:, :25]) for k, v in first.caches], 25))
    recorded, draft = Recorded(method), loop("dflash", found, model)
    assert torch.equal(generate(model, text, recorded, session=second, **LIMITS).sequences, futures)
    for b in range(2):
        drafts = counted(model, futures[b].tolist(), text.shape[1], lambda states, *rest: draft(states[25:], *rest))[1]
        assert recorded.tokens(b) == [chain for chain in drafts if chain]


@pytest.mark.parametrize(
    "wrong",
    [dict(mask=MASK + 1), dict(causal=(True, True)), dict(causal=(False, False)), dict(window=10), dict(window=None)],
    ids=str,
)
def test_every_part_of_a_block_counts(wrong, load):
    """A drafter that is slightly wrong writes the right text: the drafts show it."""
    model, ids = target(), whole_prompts(1, 20, vocabulary=VOCABULARY)
    config, found = files("dflash")
    method = load(config, found, model)
    with pytest.raises(AssertionError):
        check(model, method, loop("dflash", found, model, **wrong), ids)


def test_taps_are_outputs_in_one_form_and_inputs_in_the_other(load):
    """Layer i's output is the input of layer i + 1; transformers' last states are those after the final norm."""
    model = target()
    found = tensors("dflash", 64, VOCABULARY)
    config = settings("dflash")
    assert load(config, found, model).head.taps == (1, 2)
    config["dflash_config"]["target_layer_ids"] = [0, 2]
    method = load(config, found, model)
    assert method.head.taps == (1, "last")
    ids, draft = whole_prompts(1, 20, vocabulary=VOCABULARY), loop("dflash", found, model)
    check(model, method, draft, ids, taps=(1, 3))
    with pytest.raises(AssertionError):
        check(model, method, draft, ids, taps=(0, 2))
    config = settings("dflash", own=False, aux_hidden_state_layer_ids=[1, 3])
    assert load(config, found, model).head.taps == (1, 3)


@pytest.mark.parametrize("anchor", [True, False])
def test_the_first_row_drafts_or_not(anchor, load):
    model, ids = target(), whole_prompts(1, 20, vocabulary=VOCABULARY)
    config, found = files("dspark", own=False, sample_from_anchor=anchor)
    method = load(config, found, model)
    assert method.head.length == BLOCK - (0 if anchor else 1)
    check(model, method, loop("dspark", found, model, own=False, first=0 if anchor else 1), ids)


@pytest.mark.parametrize("causal", [None, True, False])
def test_what_the_rows_of_a_block_see(causal, load):
    """Without a word in the config the rows of a layer with a window see none after them."""
    model, ids = target(), whole_prompts(1, 20, vocabulary=VOCABULARY)
    config, found = files("dflash", **({} if causal is None else {"is_causal": causal}))
    seen = (False, True) if causal is None else (causal, causal)
    check(model, load(config, found, model), loop("dflash", found, model, causal=seen), ids)
    if causal is not True:
        config, found = files("dflash", own=False, sliding_window_non_causal=causal is False)
        check(model, load(config, found, model), loop("dflash", found, model, causal=seen), ids)


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_factors_and_a_cap(kind, load):
    """Of the logits, and of the block's embeddings."""
    model, ids = target(), whole_prompts(1, 20, vocabulary=VOCABULARY)
    config, found = files(kind)
    config["dflash_config"] |= dict(output_multiplier=0.4, final_logit_softcapping=1.5, input_embedding_scale=3.0)
    method = load(config, found, model)
    check(model, method, loop(kind, found, model, factor=0.4, cap=1.5, scale=3.0), ids)


def test_a_row_of_its_own_for_masks(load, tmp_path):
    model, ids = target(), whole_prompts(1, 20, vocabulary=VOCABULARY)
    config, found = files("dflash")
    draft, row = loop("dflash", found, model), 3 * torch.randn(64)
    (tmp_path / "head").mkdir()
    torch.save({"embedding": row, "mask_token_id": MASK}, tmp_path / "head/mask_embedding.pt")
    method = load(config, found, model)
    with pytest.raises(AssertionError):
        check(model, method, draft, ids)
    table = model.get_input_embeddings().weight.index_put((torch.tensor([MASK]),), row)
    check(
        model, method, lambda *given: drafted(found, "dflash", *given[:2], table, model.lm_head.weight, given[2]), ids
    )


def test_biases_and_sinks(load):
    """Of the products of attention, and logits of each head that take weight."""
    model, ids = target(), whole_prompts(1, 20, vocabulary=VOCABULARY)
    config, found = files("dflash", attention_bias=True)
    for i in range(2):
        for part, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            found[f"layers.{i}.self_attn.{part}_proj.bias"] = torch.randn(rows)
        found[f"layers.{i}.self_attn.attention_sink_bias"] = torch.randn(4) + 2
    check(model, load(config, found, model), loop("dflash", found, model), ids)


# ---- transformers' own ----


def assistant(seed):
    """transformers' network beside a model."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    torch.manual_seed(seed)
    config = MuseGlimmerAssistantConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        sliding_window=16, layer_types=["full_attention", "sliding_attention"], block_size=6, mask_token_id=MASK,
        target_layer_ids=[0, 1], rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    network = MuseGlimmerAssistantModel(config).eval().float().requires_grad_(False)
    for parameter in network.parameters():
        if parameter.dim() > 1:
            parameter.mul_(30)
    return network


@pytest.mark.parametrize("seed", [1, 2])
def test_drafts_are_those_of_transformers(seed, load):
    model = target()
    network, ids = assistant(seed), whole_prompts(1, 20, vocabulary=VOCABULARY)
    method = load(network.config.to_dict(), network.state_dict(), model)
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    theirs = model.generate(
        ids, assistant_model=network, speculation_type="dflash", do_sample=False, max_new_tokens=24, eos_token_id=None
    )
    handle.remove()
    ours = generate(model, ids, method, **LIMITS)
    assert ours.sequences.tolist() == theirs.tolist()
    assert ours.stats.model_calls == len(calls) < 24


@pytest.mark.parametrize("mode", ["coupled", "without", "with"])
def test_places_are_drawn_at_once_as_one_by_one(mode):
    """Each with the noise of its own place in the text."""
    logits, levels = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(1)), torch.arange(5)
    sampling = SamplingParams(temperature=2.0, seeds=[3, 8]).for_batch(2, logits.device)
    places = torch.tensor([4, 9])
    at_once = draw_children(logits.flatten(0, 1), 1, mode, sampling, places, levels + 1, levels)[0].view(2, 5)
    for i in range(5):
        alone = draw_children(logits[:, i].contiguous(), 1, mode, sampling, places, i + 1, levels[i : i + 1])[0]
        assert torch.equal(at_once[:, i], alone[:, 0])
    assert len(set(at_once.flatten().tolist())) > 5


# ---- texts ----


@pytest.mark.parametrize("kind", KINDS)
def test_texts_by_seed_are_plain_s(kind, load):
    """Chains and trees are judged by the target's own noise; one text of the batch is greedy."""
    model, (ids, mask) = target(), ragged_prompts(3, vocabulary=VOCABULARY)
    method = load(*files(kind, own=kind == "dflash2", mapped=kind != "dflash2", seed=1), model)
    sampled = dict(attention_mask=mask, temperature=[0.9, 0.0, 1.3], top_p=0.95, seeds=[3, 1, 4], **LIMITS)
    plain = generate(model, ids, Plain(), **sampled)
    for rows in (None, 12):
        found = generate(model, ids, dataclasses.replace(method, rows=rows), **sampled)
        assert torch.equal(found.sequences, plain.sequences)
        assert found.stats.mean_acceptance_length > 1.02


@pytest.mark.parametrize("rule", ["rejection", "traversal", "coupled_inverse", "typical"])
def test_other_rules_write_whole_texts(rule, load):
    model, (ids, mask) = target(), ragged_prompts(3, vocabulary=VOCABULARY)
    method = load(*files("dspark", own=False, mapped=True), model)
    found = generate(model, ids, method, attention_mask=mask, temperature=1.0, seeds=5, rule=rule, **LIMITS)
    assert found.lengths == (24,) * 3


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_drafts_are_drawn_from_what_a_grammar_allows(kind, load):
    model, ids = target(), whole_prompts(2, 20, vocabulary=VOCABULARY)
    recorded = Recorded(load(*files(kind, seed=1), model))
    plain, found = (
        generate(model, ids, each, grammar=Automaton(CYCLE), temperature=0.9, seeds=4, **LIMITS)
        for each in (Plain(), recorded)
    )
    assert torch.equal(found.sequences, plain.sequences)
    assert {token for b in range(2) for chain in recorded.tokens(b) for token in chain} <= {1, 3, 4, 5, 6, 7}


@pytest.mark.parametrize("kind", KINDS)
def test_states_wait_while_drafting_pauses(kind, load, monkeypatch):
    """With length "auto" it pauses at the pace of the generation. Later drafts are those of a head that has read all along."""
    monkeypatch.setattr(DraftContext, "pace", lambda self, **_: PauseAt([step for step in range(24) if step % 3]))
    model, (ids, mask) = target(), ragged_prompts(3, vocabulary=VOCABULARY)
    config, found = files(kind, seed=1)
    recorded = Recorded(dataclasses.replace(load(config, found, model), length="auto"))
    texts = unpadded(generate(model, ids, recorded, attention_mask=mask, **LIMITS).sequences, mask)
    assert texts == unpadded(generate(model, ids, Plain(), attention_mask=mask, **LIMITS).sequences, mask)
    draft = loop(kind, found, model)
    for b, whole in enumerate(texts):
        assert 3 < len(recorded.of(b)) < 10
        for text, candidates in recorded.of(b):
            assert candidates.tokens == draft(states_of(model, text[:-1]), text[-1], len(whole) - len(text) - 1)


# ---- trees ----


def test_the_best_paths_of_a_lattice():
    """Against all paths, in the order of their products."""
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(3, 4, 4, generator=generator).softmax(-1).tolist()
    tokens = [[5, 3, 8, 1], [2, 9, 4, 7], [6, 0, 3, 5]]
    parents, found = best_paths(tokens, chances, 20)
    paths = []
    for length in (1, 2, 3):
        for numbers in itertools.product(range(4), repeat=length):
            reach = 1.0
            for place, (before, number) in enumerate(itertools.pairwise((0, *numbers))):
                reach *= chances[place][before][number]
            paths.append((reach, tuple(tokens[place][number] for place, number in enumerate(numbers))))
    expected = {path for _, path in sorted(paths, reverse=True)[:20]}
    tree, seen = Tree(parents), set()
    for node in range(1, len(parents)):
        seen.add(tuple(found[v] for v in tree.path(node)[1:]))
    assert seen == expected and len(parents) == 21


@pytest.mark.parametrize("kind", KINDS)
def test_trees_hold_the_best_paths(kind, load):
    """By the formula of the kind; greedy texts are Plain's, and trees accept more than chains."""
    model, (ids, mask) = target(), ragged_prompts(8, vocabulary=VOCABULARY)
    config, found = files(kind, seed=1)
    method = load(config, found, model)
    plain = generate(model, ids, Plain(), attention_mask=mask, **LIMITS)
    recorded = Recorded(dataclasses.replace(method, rows=8))
    tree = generate(model, ids, recorded, attention_mask=mask, **LIMITS)
    chain = generate(model, ids, method, attention_mask=mask, **LIMITS)
    assert torch.equal(tree.sequences, plain.sequences)
    assert tree.stats.mean_acceptance_length > chain.stats.mean_acceptance_length
    # The first tree of a text, by all paths of three tokens.
    text = unpadded(tree.sequences, mask)[0]
    prompt = int(mask[0].sum())
    table, head = model.get_input_embeddings().weight, model.lm_head.weight
    rows = block_rows(
        found, kind, states_of(model, text[:prompt]), text[prompt], table, first=0 if kind == "dspark" else 1
    )
    chances = {(): 1.0}
    for path in [path for n in range(1, 4) for path in itertools.product(range(VOCABULARY), repeat=n)]:
        before, row = ([text[prompt], *path][-2], rows[len(path) - 1])
        chances[path] = chances[path[:-1]] * float(
            place_scores(found, kind, row, before, head @ row, VOCABULARY).softmax(-1)[path[-1]]
        )
    _, first = recorded.of()[0]
    parents, tokens = first.tree.parents, first.tokens
    nodes = Tree(parents)
    paths = {tuple(tokens[v - 1] for v in nodes.path(node)[1:]) for node in range(1, len(parents))}
    shallow = {path for path in paths if len(path) <= 3}
    least = min(chances[path] for path in shallow)
    assert len(parents) == 8 and shallow >= {
        path for path, chance in chances.items() if path and chance > least * 1.0001
    }


# ---- refusals ----


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(num_target_layers=7), "trained for a model with 7 layers, and this one has 3"),
        (dict(vocab_size=9000), "trained for a model with 9000 tokens, and this one has 11"),
        (dict(block_size=None), "its config has no block_size"),
        (dict(block_size=1), "block_size must be from 2 to 64, got 1"),
        (dict(hidden_act="gelu"), "its config has hidden_act 'gelu': its MLPs have another activation"),
        (dict(quantization_config={"bits": 4}), "its weights are quantised, which pass_ext cannot read"),
        (dict(model_type="gpt2"), "its layers must be of the form of llama, .* got model_type 'gpt2'"),
        (dict(dflash_config=dict(target_layer_ids=[0, 1], mask_token_id=99)), "mask_token_id is 99"),
        (
            dict(dflash_config=dict(target_layer_ids=[0, 9], mask_token_id=6)),
            "in front of layer 10, and the model has 3",
        ),
        (dict(dflash_config=dict(target_layer_ids=[0], mask_token_id=6)), r"'fc.weight' must be \[64, 64\]"),
    ],
    ids=str,
)
def test_other_targets_and_configs_are_refused(changes, message, load):
    with pytest.raises(ValueError, match=message):
        load(*files("dflash", **changes), target())


def test_heads_and_settings_that_do_not_fit_are_refused(load):
    model, ids = target(), whole_prompts(1, 5, vocabulary=VOCABULARY)
    config, found = files("dflash")
    with pytest.raises(ValueError, match="trained for a model with 64 numbers in a state, and this one has 32"):
        load(config, found, small_model("llama", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3))
    config, markov = files("dspark", markov_head_type="rnn")
    config["dflash_config"]["markov_head_type"] = "rnn"
    with pytest.raises(ValueError, match="its config has markov_head_type 'rnn'"):
        load(config, markov, model)
    short = dict(found)
    del short["layers.1.mlp.down_proj.weight"]
    with pytest.raises(ValueError, match=r"no tensor 'layers.1.mlp.down_proj.weight'"):
        load(files("dflash")[0], short, model)
    method = load(files("dflash")[0], found, model)
    with pytest.raises(ValueError, match="length must be at most 4, what a block of this head drafts, got 5"):
        generate(model, ids, dataclasses.replace(method, length=5), **LIMITS)
    with pytest.raises(ValueError, match="rows must be None, a chain, for rule 'rejection'"):
        generate(model, ids, dataclasses.replace(method, rows=9), rule="rejection", temperature=1.0, **LIMITS)
    with pytest.raises(TypeError, match="head must be one that load_drafter"):
        generate(model, ids, DFlash(model), **LIMITS)
    with pytest.raises(ValueError, match='DFlash: length, if not "auto", must be'):
        DFlash(method.head, length=0)
    with pytest.raises(ValueError, match='DFlash: rows, if not None or "auto", must be'):
        DFlash(method.head, rows=1)


@pytest.mark.parametrize("of_layers", [False, True])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_settings_that_nothing_reads_are_named(kind, own, of_layers, load, caplog):
    config, found = files(kind, own)
    place = {(False, False): config, (False, True): config.get("transformer_layer_config"), (True, True): config}
    with caplog.at_level(logging.WARNING, "pass_ext"):
        load(config, found, target())
        assert caplog.text == ""
        place.get((own, of_layers), config.get("dflash_config"))["residual_factor"] = 0.5
        load(config, found, target())
    assert "does not know: residual_factor" in caplog.text


def test_a_shorter_length_drafts_less_of_a_shorter_block(load):
    model, ids = target(), whole_prompts(1, 20, vocabulary=VOCABULARY)
    config, found = files("dflash", seed=1)
    method = dataclasses.replace(load(config, found, model), length=2)
    check(model, method, loop("dflash", found, model, block=3), ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_has_the_trees_that_it_has_alone(load, kind):
    """Requests that differ in all they can, and some of which end early; test_heads.py has chains."""
    model, (ids, mask) = target(), ragged_prompts(4, seed=2, vocabulary=VOCABULARY)
    method = dataclasses.replace(load(*files(kind), model), length=3, rows=9)
    of_each = dict(temperature=[0.5, 1.3, 0.0, 0.9], top_k=[0, 5, 3, 4], seeds=[3, 50, 7, 1])
    for grammar in (None, Automaton(CYCLE)):
        if grammar is not None:
            of_each["grammar"] = [grammar, None, Automaton(CYCLE, start=1), grammar]
        options = dict(max_new_tokens=20, eos_token_id=[] if grammar else [3, 9])
        assert_as_alone(model, method, ids, mask, of_each, **options)
