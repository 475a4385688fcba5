"""Drafters of the DFlash family: drafts are those of a plain loop from the formulas and of transformers' own network, texts are
Plain's, and rules that divide by the drafts' distribution are exact."""

import pytest
import torch

pytest.importorskip("transformers")

from support.dflash_files import BLOCK, MASK, counted, drafted, settings, tensors, written
from support.generation import unpadded
from support.small_models import prompts, ragged_prompts, small_model, whole_prompts

from benchmarks.architectures.models import tiny_model
from pass_ext import Plain, Session, generate, load_drafter
from pass_ext.decoding.drafting.heads.block_drafter import dflash_drafters

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 11
LIMITS = dict(max_new_tokens=24, eos_token_id=[])
KINDS = ("dflash", "dspark", "dflash2")
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


class Spy:
    """A method that drafts as ``DFlash`` does, and keeps the chains of each request."""

    def __init__(self, method):
        self.method, self.chains = method, None

    def drafters(self, context):
        drafters = dflash_drafters(self.method, context)
        self.chains, propose = [[] for _ in context.texts], drafters[0].propose

        def kept(batch):
            proposal = propose(batch)
            for chains, candidates in zip(self.chains, proposal.candidates, strict=True):
                if candidates is not None:
                    chains.append(list(candidates.tokens))
            return proposal

        drafters[0].propose = kept
        return drafters


def check(model, method, draft, ids, mask=None, taps=(1, 2), **limits):
    """Greedy texts are Plain's, drafts and calls those of the loop -> the statistics."""
    mask, limits = torch.ones_like(ids) if mask is None else mask, {**LIMITS, **limits}
    plain = generate(model, ids, Plain(), attention_mask=mask, **limits)
    spy = Spy(method)
    found = generate(model, ids, spy, attention_mask=mask, **limits)
    assert torch.equal(found.sequences, plain.sequences)
    texts, calls = unpadded(found.sequences, mask), []
    for text, prompt, chains in zip(texts, mask.sum(1).tolist(), spy.chains, strict=True):
        expected, drafts = counted(model, text, prompt, draft, taps)
        assert chains == [chain for chain in drafts if chain]
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
    check(model, load(config, found, model), loop("dflash", found, model), *prompts(2, 9), max_new_tokens=12)


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
    first = Session(model, room=100)
    text = generate(model, ids, Plain(), session=first, **LIMITS).sequences
    futures = generate(model, text, Plain(), **LIMITS).sequences
    second = Session(model, room=100, past=([(k[:, :25], v[:, :25]) for k, v in first.caches], 25))
    spy, draft = Spy(method), loop("dflash", found, model)
    assert torch.equal(generate(model, text, spy, session=second, **LIMITS).sequences, futures)
    for b, chains in enumerate(spy.chains):
        drafts = counted(model, futures[b].tolist(), text.shape[1], lambda states, *rest: draft(states[25:], *rest))[1]
        assert chains == [chain for chain in drafts if chain]


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
    """Layer i's output is the input of layer i + 1; transformers' last states are those behind the final norm."""
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
