"""The accept step in a real vLLM engine on the CPU, against vLLM's own sampler and against the model's exact law."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from integrations.engines.vllm.small_llama import CYCLE, LAYERS, WIDTH, write_small_llama
from support.chi_square import chi_square_tail
from support.paths import ROOT
from vllm_job import run_alone

from pass_ext import LookaheadEmbedding

HERE = Path(__file__).parent
VOCABULARY = 16
NGRAMS = dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=2, prompt_lookup_min=1)
PROMPTS = [[(i + j) % CYCLE + CYCLE * (i % 2) for j in range(6 + i)] * 2 for i in range(8)]
GREEDY = dict(temperature=0, max_tokens=40)
MIX = [
    dict(temperature=0),
    dict(temperature=0.8, seed=3),
    dict(temperature=1.0, seed=4, top_k=5),
    dict(temperature=0.7, seed=-5, top_p=0.8),
    dict(temperature=1.3, seed=2**62, top_k=7, top_p=0.9),
    dict(temperature=0.9, seed=7, repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.2),
    dict(temperature=1.0, seed=8, min_tokens=12, stop_token_ids=list(range(4))),
    dict(temperature=1.0, seed=9, allowed_token_ids=list(range(0, 16, 2)), bad_words_token_ids=[[2], [4, 6]]),
]
PENALTIES = dict(GREEDY, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.25)
CONSTRAINED = dict(GREEDY, bad_words_token_ids=[[3], [1, 2], [9, 10, 11]], allowed_token_ids=list(range(1, 16)))
LAW = dict(temperature=2.0, top_k=8, top_p=0.95, max_tokens=4)
LAW_PROMPT = [0, 1, 2, 3, 4, 5, 6, 7] * 2
CALLS = {
    "greedy": dict(prompts=PROMPTS, params=[GREEDY] * 8),
    "greedy alone": dict(prompts=PROMPTS, params=[GREEDY] * 8, batch=False),
    "mix": dict(prompts=PROMPTS, params=[dict(max_tokens=40, **params) for params in MIX]),
    "mix alone": dict(prompts=PROMPTS, params=[dict(max_tokens=40, **params) for params in MIX], batch=False),
    "penalties": dict(prompts=PROMPTS, params=[PENALTIES] * 8),
    "constrained": dict(prompts=PROMPTS, params=[CONSTRAINED] * 8),
    "logprobs": dict(prompts=PROMPTS, params=[dict(GREEDY, logprobs=3)] * 8),
}
SEEDED_CHUNKS = {  # 3 x 90 rows do not fit into one step: prompts are read in parts
    "chunks": dict(
        prompts=[[(i + j) % VOCABULARY for j in range(90)] for i in range(3)],
        params=[dict(temperature=1.0, seed=i, max_tokens=8) for i in range(3)],
    )
}
MANY = {"law": dict(prompts=[LAW_PROMPT] * 4000, params=[LAW] * 4000)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_small_llama(folder, VOCABULARY)
    return folder


@pytest.fixture(scope="module")
def start(folder, tmp_path_factory):
    """Starts an engine in a process of its own, runs calls, and gives (result, log)."""

    def run(calls, plugin="on", version=None, fails=False, **engine):
        place = tmp_path_factory.mktemp("engine")
        job = dict(engine=dict(model=str(folder), dtype="float32", **engine), version=version, calls=calls)
        (place / "job.json").write_text(json.dumps(job))
        arguments = [HERE / "one_engine.py", place / "job.json", place / "result.json"]
        environment = {"PASS_EXT_VLLM": plugin, "VLLM_LOGGING_LEVEL": "INFO"}
        status = run_alone(arguments, place / "log", environment, cwd=ROOT)
        log = (place / "log").read_text()
        assert (status != 0) == fails, log[-6000:]
        return (None if fails else json.loads((place / "result.json").read_text())), log

    return run


def tokens(result, call):
    return [text["tokens"] for text in result["calls"][call]]


@pytest.fixture(scope="module")
def untouched(start):
    """vLLM as it is: the plugin is installed and off."""
    return start(CALLS, plugin="off")


@pytest.fixture(scope="module")
def plain(start):
    """Our accept step, no speculation."""
    return start(CALLS | SEEDED_CHUNKS)


@pytest.fixture(scope="module")
def ngrams(start):
    """Our accept step, n-gram drafts, rule "coupled"."""
    return start(CALLS | SEEDED_CHUNKS | MANY, speculative_config=NGRAMS)


@pytest.fixture(scope="module")
def with_slots(start, tmp_path_factory):
    """Drafts by PaSS with random slots, by rule: ids after the vocabulary are among the drafts of every call."""
    file = tmp_path_factory.mktemp("slots") / "slots.safetensors"
    torch.manual_seed(0)
    slots = LookaheadEmbedding(3, WIDTH, rank=2, deep_layers=LAYERS, vocabulary=VOCABULARY)
    for parameter in slots.parameters():
        torch.nn.init.normal_(parameter)
    slots.save(file)
    method = dict(method="custom_class", model="pass_ext.integrations.vllm.PaSS", num_speculative_tokens=5)

    def run(calls, rule):
        settings = {"pass_ext": dict(rule=rule, slots=str(file), pause=False)}
        return start(calls, speculative_config=method, additional_config=settings)

    return run


@pytest.fixture(scope="module")
def slots(with_slots):
    return with_slots(CALLS | SEEDED_CHUNKS | MANY, "coupled")


@pytest.fixture(scope="module")
def slots_by_rejection(with_slots):
    return with_slots(MANY, "rejection")


@pytest.fixture(scope="module")
def rejection(start):
    """The same with rule "rejection"."""
    settings = {"pass_ext": {"rule": "rejection"}}
    return start(MANY | {"greedy": CALLS["greedy"]}, speculative_config=NGRAMS, additional_config=settings)


def test_off_leaves_vllm_as_it_is(untouched):
    result, log = untouched
    assert result["modules"]["_sample"] == "vllm.v1.worker.gpu_model_runner"
    assert result["modules"]["init_device"].endswith("vllm/v1/worker/worker_base.py")
    assert "pass_ext replaces" not in log


def test_on_says_once_what_it_replaced(ngrams):
    result, log = ngrams
    assert result["modules"]["_sample"] == "pass_ext.integrations.vllm.sampling.runner_v1"
    assert log.count("pass_ext replaces GPUModelRunner._sample (runner V1); rule 'coupled'") == 1


def test_an_untested_version_is_refused_by_name(start):
    calls = {"greedy": dict(prompts=PROMPTS[:1], params=[dict(GREEDY, max_tokens=2)])}
    result, log = start(calls, version="9.9.1")
    assert result["modules"]["_sample"] == "vllm.v1.worker.gpu_model_runner"
    assert "and this is 9.9.1; nothing is replaced" in log


@pytest.mark.parametrize(
    ("option", "engine"),
    [
        (
            "rejection_sample_method='block'",
            dict(speculative_config=dict(NGRAMS, rejection_sample_method="block")),
        ),
        ("rule must be one of", dict(additional_config={"pass_ext": {"rule": "fastest"}})),
        ("use_fp64_gumbel", dict(use_fp64_gumbel=True)),
    ],
)
def test_options_that_cannot_be_honoured_stop_the_start(start, option, engine):
    _, log = start({}, fails=True, **engine)
    assert "ValueError: " in log and option in log


@pytest.mark.parametrize("call", ["greedy", "greedy alone", "penalties", "constrained", "logprobs"])
def test_greedy_texts_are_vllms_own(untouched, plain, ngrams, slots, call):
    for result, _ in (plain, ngrams, slots):
        assert tokens(result, call) == tokens(untouched[0], call)


def test_greedy_texts_of_another_rule_too(untouched, rejection):
    assert tokens(rejection[0], "greedy") == tokens(untouched[0], "greedy")


def test_guesses_are_accepted(slots, slots_by_rejection):
    """Random slots guess rarely; with rule coupled a guess is right at least as often as two draws agree."""
    for result, _ in (slots, slots_by_rejection):
        assert result["counters"]["vllm:spec_decode_num_accepted_tokens"] > 60


def test_drafts_are_accepted(ngrams, rejection):
    for result, _ in (ngrams, rejection):
        counters = result["counters"]
        assert counters["vllm:spec_decode_num_accepted_tokens"] > 0.1 * counters["vllm:spec_decode_num_draft_tokens"]


@pytest.mark.parametrize("call", ["mix", "mix alone"])
def test_a_seeds_text_depends_neither_on_drafts_nor_on_the_batch(plain, ngrams, slots, call):
    for result, _ in (plain, ngrams, slots):
        assert tokens(result, call) == tokens(plain[0], "mix")


def test_the_mix_respects_its_constraints(ngrams):
    texts = tokens(ngrams[0], "mix")
    assert len(texts[6]) >= 12 and not set(texts[6][:11]) & set(range(4))
    assert not set(texts[7]) & {2, *range(1, 16, 2)}
    assert (4, 6) not in set(itertools.pairwise(texts[7]))
    assert all(texts[i] != texts[0] for i in range(1, 8))


def test_logprobs_are_vllms_own(untouched, plain, ngrams, slots):
    for result, _ in (plain, ngrams, slots):
        for ours, theirs in zip(result["calls"]["logprobs"], untouched[0]["calls"]["logprobs"], strict=True):
            for place, expected in zip(ours["logprobs"], theirs["logprobs"], strict=True):
                assert place.keys() == expected.keys()
                assert all(math.isclose(place[id], expected[id], abs_tol=1e-4) for id in place)


def test_seeded_prompts_in_parts(plain, ngrams, slots):
    """vLLM's own sampler stops with an error there on a CPU, whose generators cannot be moved back."""
    assert tokens(ngrams[0], "chunks") == tokens(slots[0], "chunks") == tokens(plain[0], "chunks")


def law_of_texts(folder, length):
    """The model's exact distribution of texts after LAW_PROMPT, by transformers, in the order of ``itertools.product``."""
    from transformers import LlamaForCausalLM

    from pass_ext.reference.common.distribution import process

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    filters = dict(temperature=LAW["temperature"], top_k=LAW["top_k"], top_p=LAW["top_p"])
    laws, texts = torch.ones(1, dtype=torch.float64), [()]
    for _ in range(length):
        with torch.no_grad():
            logits = model(torch.tensor([[*LAW_PROMPT, *text] for text in texts])).logits[:, -1]
        laws = torch.cat([law * process(row, **filters).probs for law, row in zip(laws, logits, strict=True)])
        texts = [(*text, token) for text in texts for token in range(VOCABULARY)]
    return laws


@pytest.mark.parametrize("engine", ["ngrams", "rejection", "slots", "slots_by_rejection"])
def test_the_law_of_sampled_texts(request, engine, folder):
    """Without seeds. Three tokens: n-grams draft the second and third, slots the third."""
    length = 3
    result, _ = request.getfixturevalue(engine)
    texts = torch.tensor([text[:length] for text in tokens(result, "law")])
    cells = (texts * VOCABULARY ** torch.arange(length - 1, -1, -1)).sum(1)
    counts = torch.bincount(cells, minlength=VOCABULARY**length)
    assert chi_square_tail(counts, law_of_texts(folder, length)) > 1e-4
