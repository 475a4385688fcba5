"""What every kind of head has in common: drafts by its formulas, on the CPU, on the kernels of a GPU and in graphs; Plain's
texts over all caches and samplings, in sessions that go on and inside transformers; requests of a batch as alone."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from emulator.ops import EMULATED
from support.generation import assert_as_alone, unpadded
from support.grammars import random_automaton
from support.head_kinds import KINDS, head_of_kind
from support.pairwise import pairwise
from support.recorded import Recorded
from support.small_models import whole_prompts
from support.taped_graphs import use_taped_graphs

from pass_ext import NGram, Plain, Session, custom_generate, generate
from pass_ext.decoding.models import parts
from pass_ext.drafting import Assistant

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not hasattr(transformers.cache_utils, "DynamicIndexedLayer"), reason="DeepSeek-V4 came with transformers 5.24"
    ),
]

LIMITS = dict(max_new_tokens=12, eos_token_id=[])


@pytest.fixture(scope="module", params=KINDS)
def head(request, tmp_path_factory):
    return head_of_kind(request.param, tmp_path_factory.mktemp("head"))


def check_drafts(head, recorded, session=None, kernels=nullcontext(), longest=9, **limits):  # noqa: B008
    """Greedy texts of a ragged batch are the CPU's by Plain, and drafts the formulas'."""
    ids, mask = head.prompts(2, longest=longest)
    options = dict(attention_mask=mask, **{**LIMITS, **limits})
    want = generate(head.target, ids, Plain(), **options).sequences
    with kernels:
        got = generate(head.target, ids, recorded, session=session, **options)
    assert torch.equal(got.sequences, want)
    compared = 0
    for b, whole in enumerate(unpadded(want, mask)):
        for text, candidates in recorded.of(b):
            levels = min(recorded.method.length, len(whole) - len(text) - 1)
            assert list(candidates.tokens) == head.chain(text, levels)
            compared += levels
    assert compared >= options["max_new_tokens"] / 2
    return got


@pytest.fixture
def on_a_gpu(head, monkeypatch):
    """The head with a target that decodes as on a GPU, where layer_stack has no kernel."""
    monkeypatch.setattr(parts, "stack_of", lambda *_: None)
    return head._replace(target=copy.deepcopy(head.target))  # the way of another one is known already


def test_drafts_are_those_of_the_formulas(head):
    check_drafts(head, Recorded(head.method))


SLOW = ("P-EAGLE", "MTP of a hybrid", "DFlash", "DSpark")  # the ops of EAGLE-3, the other MTP layers and DFlash-2


@pytest.mark.parametrize(
    "head", [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in KINDS], indirect=True
)
def test_drafts_are_those_of_the_formulas_on_the_kernels_of_a_gpu(on_a_gpu):
    check_drafts(on_a_gpu, Recorded(on_a_gpu.method), kernels=EMULATED.active(), longest=5, max_new_tokens=5)


NO_GRAPH = {
    "qwen3_next": "transformers asks CUDA whether a graph is being recorded",
    "deepseek_v4": "the windows that its compressors close depend on the texts' lengths",
}


def test_calls_of_a_repeated_shape_are_graphs(on_a_gpu, monkeypatch):
    """The target's and the head's, as a draft model's are. An assistant has none: it reads texts of every length."""
    target, method = on_a_gpu.target, on_a_gpu.method
    if target.config.model_type in NO_GRAPH:
        pytest.skip(NO_GRAPH[target.config.model_type])
    replayed = use_taped_graphs(monkeypatch)
    check_drafts(on_a_gpu, Recorded(method), Session(target, cuda_graphs=True))
    assert len({id(model) for model in replayed}) == (1 if isinstance(method, Assistant) else 2)


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow), 8])  # 8 shows the same
def test_texts_are_plains(head, count):
    """Greedy and by seed, with requests that differ and end at different places; beside n-grams."""
    ids, mask = head.prompts(count)
    mixed = dict(
        temperature=[0.8, 0.0, 1.2, 0.5, 0.9, 1.0, 0.3, 0.7][:count], top_k=[0, 5] * (count // 2) + [7] * (count % 2),
        top_p=0.95, seeds=list(range(count)),
    )  # fmt: skip
    for options in ({}, mixed, *([dict(mixed, rule="coupled_inverse")] if count < 8 else [])):
        options = dict(LIMITS, attention_mask=mask, **options) | dict(eos_token_id=[3, 9])
        want = generate(head.target, ids, Plain(), **options)
        for method in (head.method, replace(head.method, length=2, ngram=NGram(shortest=1))):
            got = generate(head.target, ids, method, **options)
            assert torch.equal(got.sequences, want.sequences) and got.lengths == want.lengths


def test_they_are_right_now_and_then(head):
    """Three prompts are those of the texts that some have learnt."""
    rates = []
    for count in (3, 8):
        ids, mask = head.prompts(count)
        found = generate(head.target, ids, head.method, attention_mask=mask, **LIMITS)
        rates.append(found.stats.mean_acceptance_length)
    assert max(rates) > 1.02


@pytest.mark.parametrize("dtype", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.slow)])
def test_caches_in_8_bits(head, dtype):
    """The target's; all methods write the same text over the same cache."""
    if head.target.config.model_type == "deepseek_v4":
        pytest.skip("this model's cache has no form in 8 bits")
    ids, mask = head.prompts(3)
    options = dict(attention_mask=mask, temperature=[0.0, 0.8, 1.1], seeds=[1, 2, 3], **LIMITS)
    want, got = (
        generate(head.target, ids, method, session=Session(head.target, cache_dtype=dtype), **options)
        for method in (Plain(), head.method)
    )
    assert torch.equal(got.sequences, want.sequences) and got.stats.num_draft_tokens > 20


def test_several_texts_of_a_prompt(head):
    ids, mask = head.prompts(2)
    options = dict(attention_mask=mask, temperature=0.9, seeds=[1, 5], num_return_sequences=3, **LIMITS)
    want, got = (generate(head.target, ids, method, **options) for method in (Plain(), head.method))
    assert torch.equal(got.sequences, want.sequences)


def test_a_session_that_goes_on(head):
    """The second text begins with the first one's tokens."""
    ids = whole_prompts(1, 9, vocabulary=head.vocabulary)
    session = Session(head.target, capacity=80)
    first = generate(head.target, ids, head.method, session=session, **LIMITS).sequences
    again = generate(head.target, first, head.method, session=session, **LIMITS).sequences
    assert torch.equal(again, generate(head.target, first, Plain(), **LIMITS).sequences)


def test_inside_transformers(head):
    ids = whole_prompts(1, 9, vocabulary=head.vocabulary)
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    want = head.target.generate(ids, **options)
    assert torch.equal(head.target.generate(ids, custom_generate=custom_generate(head.method), **options), want)


RULES = ["coupled", "rejection under a grammar", "block", "coupled under a grammar", "rejection", "traversal"]


@pytest.mark.parametrize(("head", "rule"), pairwise(list(KINDS), RULES), indirect=["head"])
def test_a_request_is_drafted_for_in_a_batch_as_alone(head, rule):
    """Requests that differ in all they can, and some of which end early. Under a grammar coupled texts are Plain's."""
    rule, has_grammar = rule.partition(" ")[0], "grammar" in rule
    ids, mask = head.prompts(4, longest=9, seed=2)
    coldest = 0.0 if rule == "coupled" else 0.2  # alone, a greedy request has candidates of that rule
    of_each = dict(temperature=[0.5, 1.3, coldest, 0.9], top_k=[0, 5, 3, 4], seeds=[3, 50, 7, 1])
    if has_grammar:
        of_each["grammar"] = [*(random_automaton(head.vocabulary, seed=seed) for seed in range(3)), None]
    options = dict(rule=rule, max_new_tokens=14, eos_token_id=[] if has_grammar else [3, 9])
    found = assert_as_alone(head.target, head.method, ids, mask, of_each, **options)
    if rule == "coupled":
        want = generate(head.target, ids, Plain(), attention_mask=mask, **of_each, **options)
        assert torch.equal(found.sequences, want.sequences)
