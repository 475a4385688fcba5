"""What runs on a model with dense weights runs on one with packed weights, or is refused by its name."""

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import slots_for
from support.grammars import random_automaton
from support.packed_models import packed_copy
from support.small_models import VOCABULARY, ragged_prompts, small_model

import pass_ext
from benchmarks.architectures.models import tiny_model
from pass_ext import EarlyExitDraft, MultiCandidate, NGram, PaSS, Session, Speculative, Tree, generate
from pass_ext.integrations.transformers import custom_generate
from pass_ext.modules.slot_adapters import SlotAdapters
from pass_ext.training.lookahead.adapters import adapter_sizes
from pass_ext.weights.experts import PackedExperts
from pass_ext.weights.layers import PackedEmbedding, PackedLinear

IDS, MASK = ragged_prompts(3)
NEW = 12
OPTIONS = dict(max_new_tokens=NEW, attention_mask=MASK, eos_token_id=[])
# A family -> how it runs, and what is packed beside linear layers and the table of embeddings.
FAMILIES = {
    "llama": ("fused", ()),
    "gemma": ("fused", ()),
    "gemma3_text": ("fused", ()),  # its table is multiplied
    "phi3": ("fused", ()),  # joined products
    "gpt_neox": ("module", ()),
    "qwen2_moe": ("module", (PackedExperts,)),
    "gpt_oss": ("module", (PackedExperts,)),
    "deepseek_v3": ("module", ()),
}


def model_of(family, dtype=torch.bfloat16):
    changes = dict(intermediate_size=64) if family == "gpt_oss" else {}
    return packed_copy(small_model(family, **changes).to(dtype))


@pytest.fixture(scope="module")
def model():
    return model_of("llama")


def adapted_slots(model):
    adapters = SlotAdapters(adapter_sizes(model, 3), 3, scale=0.7)
    for parameter in adapters.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return slots_for(model, 3, adapters=adapters)


def methods_for(model, *, few=False):
    found = {
        "ngram": NGram(longest=2, shortest=1, tokens=4, branches=2),
        "slots": PaSS(slots_for(model, 3), tree=Tree.from_branching((3, 2)), rows=24),
    }
    return (
        found
        if few
        else found
        | {
            "chosen rows": PaSS(slots_for(model, 3, rank=3), rows=12),
            "early exit": Speculative(EarlyExitDraft(model, 1), 3),
            "tree of drafts": MultiCandidate(EarlyExitDraft(model, 1), (2, 2)),
        }
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_writes_plains_text(family):
    model, (way, more) = model_of(family), FAMILIES[family]
    kinds = {type(part) for part in model.modules()}
    assert kinds.issuperset({PackedLinear, PackedEmbedding, *more})
    plain = generate(model, IDS, **OPTIONS)
    assert plain.stats.backend.startswith(way)
    for name, method in methods_for(model, few=family not in ("llama", "gpt_oss")).items():
        assert torch.equal(generate(model, IDS, method, **OPTIONS).sequences, plain.sequences), name
    for row, seen in enumerate(MASK.bool()):
        alone = generate(model, IDS[row][seen][None], max_new_tokens=NEW, eos_token_id=[])
        assert torch.equal(alone.sequences[0, -NEW:], plain.sequences[row, -NEW:])


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_hybrids_write_plains_text(family):
    model = packed_copy(tiny_model(family).to(torch.bfloat16))
    assert any(isinstance(part, PackedLinear) for part in model.modules())
    plain = generate(model, IDS, **OPTIONS).sequences
    for method in methods_for(model, few=True).values():
        assert torch.equal(generate(model, IDS, method, **OPTIONS).sequences, plain)


def by_seed(model):
    sampled = dict(OPTIONS, temperature=0.9, seeds=3)
    plain = generate(model, IDS, **sampled).sequences
    for method in methods_for(model).values():
        assert torch.equal(generate(model, IDS, method, **sampled).sequences, plain)


def slot_adapters(model):
    plain = generate(model, IDS, **OPTIONS).sequences
    assert torch.equal(generate(model, IDS, PaSS(adapted_slots(model), rows=12), **OPTIONS).sequences, plain)


def grammars(model):
    options = dict(OPTIONS, grammar=[random_automaton(VOCABULARY, seed=seed) for seed in range(3)])
    plain = generate(model, IDS, **options).sequences
    assert torch.equal(generate(model, IDS, NGram(shortest=1), **options).sequences, plain)


def sessions(model):
    ids = IDS[:, -5:]
    whole = generate(model, ids, max_new_tokens=NEW, eos_token_id=[]).sequences
    session = Session(model)
    half = generate(model, ids, max_new_tokens=NEW // 2, eos_token_id=[], session=session).sequences
    rest = generate(model, half, NGram(shortest=1), max_new_tokens=NEW // 2, eos_token_id=[], session=session)
    assert torch.equal(rest.sequences, whole)


def caches_of_8_bits(model):
    texts = [
        generate(model, IDS, method, session=Session(model, cache_dtype=torch.int8), **OPTIONS).sequences
        for method in (None, NGram(shortest=1))
    ]
    assert torch.equal(*texts)


def batch_invariant(model):
    plain = generate(model, IDS, **OPTIONS).sequences
    session = Session(model, batch_invariant=True)
    assert torch.equal(generate(model, IDS, NGram(shortest=1), session=session, **OPTIONS).sequences, plain)


def transformers_generate(model):
    options = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    ours = model.generate(IDS[:1], attention_mask=MASK[:1], custom_generate=custom_generate(NGram()), **options)
    expected = generate(model, IDS[:1], attention_mask=MASK[:1], max_new_tokens=NEW, eos_token_id=[]).sequences
    assert torch.equal(ours, expected)


def lora_is_refused_by_peft(model):
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match="PackedLinear"):
        peft.get_peft_model(packed_copy(small_model("llama")), peft.LoraConfig(task_type="CAUSAL_LM"))


def slots_know_their_table(model):
    """By its numbers: slots for the dense model fit the packed one."""
    table = model.get_input_embeddings()(torch.arange(VOCABULARY))
    options = dict(OPTIONS, max_new_tokens=2)
    generate(model, IDS, PaSS(pass_ext.LookaheadEmbedding.from_table(3, table), rows=12), **options)
    with pytest.raises(ValueError, match="embedding table: it was trained with that of an unnamed model"):
        generate(model, IDS, PaSS(pass_ext.LookaheadEmbedding.from_table(3, table.flip(0)), rows=12), **options)


CONTRACT = (by_seed, slot_adapters, grammars, sessions, caches_of_8_bits, batch_invariant, transformers_generate,
            lora_is_refused_by_peft, slots_know_their_table)  # fmt: skip


@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.__name__)
def test_what_runs_on_dense_weights_runs_on_packed_ones(model, case):
    case(model)


@pytest.mark.parametrize("family", ["gpt_oss", "gpt_neox", "gemma3_text"])
def test_sessions_that_are_batch_invariant_take_packed_weights(family):
    batch_invariant(model_of(family))


def test_gradients_pass_through_a_packed_model_to_its_slots(model):
    """As training needs it of its frozen target."""
    slots = slots_for(model, 3)
    rows = slots.weight[None].to(torch.bfloat16)
    model(inputs_embeds=rows).logits.float().square().mean().backward()
    assert slots.weight.grad.isfinite().all() and bool(slots.weight.grad.abs().sum() > 0)
