"""generate(logprobs=..., support=...): the numbers of the model alone, by every method and rule, batched and with ends."""

import math
from itertools import product

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import Prophet, disturbed, methods_for, unpadded
from support.small_models import VOCABULARY, ragged_prompts, small_model

import pass_ext
from pass_ext import MultiCandidate, Plain, Session, Speculative, generate
from pass_ext.decoding.loop.scores import logprobs_of
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.reference.common.distribution import log_process

TOP = 3
NEW = 16
ENDS = [5, 6, 7]
NEAR = 1e-4  # of a filter's bound: the model's own rounding decides there


@pytest.fixture(scope="module")
def exact(llama):
    """The model in fp64."""
    model = small_model("llama").double()
    return lambda text: model(torch.tensor([text])).logits[0]


def rows_of(exact, prompt, new):
    """fp64 rows that each new token is drawn from."""
    return exact([*prompt, *new])[len(prompt) - 1 : -1]


def plain_error(llama, exact, prompts):
    """Twice the error of the model in fp32 against fp64, and roundings."""
    error = 0.0
    for prompt in prompts:
        error = max(error, float((llama(torch.tensor([prompt])).logits[0].double() - exact(prompt)).abs().max()))
    return 2 * error + 2e-5


def assert_log_probabilities(logprobs, rows, new, bound, parameters=None, law=None):
    """Those of one text. law: fp64 rows after the logits processors."""
    law, clear = rows if law is None else law, 0
    assert logprobs.raw.shape == (len(new),) and logprobs.top_tokens.shape == (len(new), TOP)
    raw = rows.log_softmax(1)
    best = raw.sort(descending=True, stable=True)
    torch.testing.assert_close(logprobs.raw.double(), raw[range(len(new)), new], rtol=0, atol=bound)
    torch.testing.assert_close(logprobs.top_raw.double(), best.values[:, :TOP], rtol=0, atol=bound)
    torch.testing.assert_close(raw.gather(1, logprobs.top_tokens), best.values[:, :TOP], rtol=0, atol=bound)
    for j, token in enumerate(new):
        distribution = log_process(law[j], None, **(parameters or {"temperature": 0.0}))
        if distribution.margin < NEAR:
            continue
        clear += 1
        processed = distribution.log_weights - distribution.log_weights.logsumexp(0)
        scale = 1 / (parameters or {}).get("temperature", 1.0)
        if math.isfinite(processed[token]):  # else the rows disagree about a tie of logits
            torch.testing.assert_close(
                logprobs.processed[j].double(), processed[token], rtol=0, atol=bound * max(scale, 1)
            )
            torch.testing.assert_close(
                logprobs.top_processed[j].double(),
                processed[logprobs.top_tokens[j]],
                rtol=0,
                atol=bound * max(scale, 1),
            )
    assert clear > len(new) // 2


def drafted(llama, rule):
    other = disturbed(llama, 0.06)
    return {
        **methods_for(llama),
        "speculative": Speculative(other, length=3),
        "several candidates": MultiCandidate(other, (3, 2), replacement=rule in ("kseq", "rejection_with_replacement")),
    }


CASES = [
    *product(["plain", "ngram", "one pass", "two passes", "one pass with ngrams"], ["coupled"], [0.0, 0.8]),
    ("speculative", "rejection", 0.8), ("speculative", "block", 1.0), ("speculative", "typical", 0.8),
    ("several candidates", "traversal", 0.8), ("several candidates", "kseq", 1.0), ("speculative", "coupled", 1.0),
    ("several candidates", "rejection_with_replacement", 0.8), ("several candidates", "longest_branch", 0.8),
    ("several candidates", "longest_branch", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rule", "temperature"), CASES)
def test_numbers_are_those_of_the_model_alone(llama, exact, monkeypatch, name, rule, temperature):
    ids, mask = ragged_prompts(6)
    parameters = dict(temperature=temperature, top_k=20, top_p=0.95) if temperature else {}
    arguments = dict(max_new_tokens=NEW, attention_mask=mask, rule=rule, eos_token_id=ENDS, seeds=7, **parameters)
    method = drafted(llama, rule)[name]
    want = generate(llama, ids, method, **arguments)
    if name in ("one pass", "two passes"):
        Prophet(monkeypatch, unpadded(want.sequences, mask))
        method = drafted(llama, rule)[name]
    got = generate(llama, ids, method, logprobs=TOP, **arguments)
    assert torch.equal(got.sequences, want.sequences) and want.logprobs is None
    assert name in ("plain", "ngram") or got.stats.num_accepted_tokens > 0
    prompts = [row[seen].tolist() for row, seen in zip(ids, mask.bool(), strict=True)]
    bound = plain_error(llama, exact, prompts)
    assert bound < 1e-3
    for prompt, row, length, logprobs in zip(prompts, got.sequences, got.lengths, got.logprobs, strict=True):
        new = row[ids.shape[1] :][:length].tolist()
        assert_log_probabilities(logprobs, rows_of(exact, prompt, new), new, bound, parameters or None)


def test_zero_gives_the_tokens_alone_and_waits_for_the_host(llama):
    ids, mask = ragged_prompts(2)
    got = generate(llama, ids, max_new_tokens=5, attention_mask=mask, logprobs=0, eos_token_id=[])
    assert [part.shape for part in got.logprobs[1]] == [(5,), (5,), (5, 0), (5, 0), (5, 0)]
    assert got.stats.ahead_calls == 0 and got.logprobs[0].processed.tolist() == [0.0] * 5
    with pytest.raises(
        ValueError, match="run_ahead must be False or None, because log probabilities or supports are kept"
    ):
        session = Session(llama, run_ahead=True)
        generate(llama, ids, max_new_tokens=5, attention_mask=mask, logprobs=0, session=session)
    for count in (-1, 65, True):
        with pytest.raises(
            ValueError, match=rf"generate: logprobs, if not None, must be a whole number, 0 to 64, got {count}"
        ):
            generate(llama, ids, max_new_tokens=5, attention_mask=mask, logprobs=count)


def test_processors_change_the_law_and_not_the_raw_numbers(llama, exact):
    """A processor that forbids even tokens after odd ones: raw is the model's, processed the law that was drawn from."""

    def forbid(ids, scores):
        odd = ids[:, -1:] % 2 == 1
        return scores.masked_fill(odd & (torch.arange(VOCABULARY) % 2 == 0), -math.inf)

    ids, mask = ragged_prompts(3)
    parameters = dict(temperature=0.7, top_k=12, top_p=1.0)
    for method in (Plain(), methods_for(llama)["ngram"], methods_for(llama)["one pass"]):
        got = generate(
            llama, ids, method, max_new_tokens=NEW, attention_mask=mask, logits_processor=forbid, seeds=3, logprobs=TOP,
            eos_token_id=[], **parameters,
        )  # fmt: skip
        for b in range(3):
            prompt, new = ids[b][mask[b] > 0].tolist(), got.sequences[b, ids.shape[1] :].tolist()
            rows = rows_of(exact, prompt, new)
            before = torch.tensor([[token] for token in [prompt[-1], *new[:-1]]])
            law = forbid(before, rows)
            bound = plain_error(llama, exact, [prompt, new])
            assert_log_probabilities(got.logprobs[b], rows, new, bound, parameters, law)


def test_logprobs_of_rows_are_those_of_the_accept_step():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 60, generator=random)
    logits[3, 20:] = -math.inf
    sampling = SamplingParams(
        temperature=[0.0, 0.5, 1.0, 1.3, 2.0],
        top_k=[0, 0, 4, 0, 0],
        top_p=[1.0, 0.8, 1.0, 1.0, 0.9],
        seeds=[1, 2, 3, 4, 5],
    ).for_batch(5, torch.device("cpu"))
    result = pass_ext.accept_chain(
        logits[:, None],
        torch.zeros(5, 0).long(),
        return_logprobs=True,
        top_logprobs=30,
        positions=9,
        **sampling.keywords(),
    )
    ours = logprobs_of(logits, logits, result.emitted[:, 0], 30, sampling)
    for left, right in zip(ours, result.logprobs, strict=True):
        torch.testing.assert_close(left, right[:, 0], rtol=0, atol=2e-6)


def assert_support(support, logprobs, law, new, bound, parameters):
    """The ids of one text are those that the model alone leaves, and with its rows they give the processed numbers."""
    assert support.counts.shape == (len(new),) and support.ids.shape == (int(support.counts.sum()),)
    clear = 0
    for j, (token, ids) in enumerate(zip(new, support.ids.split(support.counts.tolist()), strict=True)):
        assert token in ids and (ids[1:] > ids[:-1]).all()
        distribution = log_process(law[j], None, **(parameters or {"temperature": 0.0}))
        if distribution.margin < NEAR:
            continue
        clear += 1
        assert ids.tolist() == (distribution.log_weights > -math.inf).nonzero().flatten().tolist()
        z = law[j] / (parameters or {}).get("temperature", 1.0)
        again = z[token] - z[ids.long()].logsumexp(0)
        torch.testing.assert_close(logprobs.processed[j].double(), again, rtol=0, atol=2 * bound)
    assert clear > len(new) // 2


@pytest.mark.parametrize(
    ("name", "rule", "parameters"),
    [
        ("plain", "coupled", dict(temperature=0.8, top_k=20, top_p=0.95)),
        ("one pass", "coupled", dict(temperature=0.8, top_p=0.9)),
        ("ngram", "coupled", {}),
        ("several candidates", "traversal", dict(temperature=0.8, top_k=12, min_p=0.02)),
        ("speculative", "block", dict(temperature=1.0, top_k=12)),
        ("several candidates", "longest_branch", dict(temperature=0.8, top_p=0.9)),
    ],
)
@pytest.mark.parametrize("has_processor", [False, True])
def test_ids_are_those_of_the_model_alone(llama, exact, name, rule, parameters, has_processor):
    if has_processor and rule == "longest_branch":
        pytest.skip("takes no processors")
    ids, mask = ragged_prompts(4)

    def forbid(ids, scores):
        odd = ids[:, -1:] % 2 == 1
        return scores.masked_fill(odd & (torch.arange(VOCABULARY) % 3 == 0), -math.inf)

    arguments = dict(max_new_tokens=NEW, attention_mask=mask, rule=rule, eos_token_id=ENDS, seeds=7, **parameters)
    if has_processor:
        arguments["logits_processor"] = forbid
    method = drafted(llama, rule)[name]
    want = generate(llama, ids, method, **arguments)
    got = generate(llama, ids, method, support=True, logprobs=0, **arguments)
    alone = generate(llama, ids, method, support=True, **arguments)
    assert torch.equal(got.sequences, want.sequences) and want.support is None and alone.logprobs is None
    prompts = [row[seen].tolist() for row, seen in zip(ids, mask.bool(), strict=True)]
    bound = plain_error(llama, exact, prompts) / parameters.get("temperature", 1.0)
    for b, prompt in enumerate(prompts):
        assert all(torch.equal(*parts) for parts in zip(got.support[b], alone.support[b], strict=True))
        new = got.sequences[b, ids.shape[1] :][: got.lengths[b]].tolist()
        law = rows_of(exact, prompt, new)
        if has_processor:
            law = forbid(torch.tensor([[token] for token in [prompt[-1], *new[:-1]]]), law)
        assert_support(got.support[b], got.logprobs[b], law, new, bound, parameters)


@pytest.mark.parametrize("top_k", [[0, 3], [3, 20], [20, 3]])
@pytest.mark.parametrize("has_processor", [False, True])
def test_supports_are_those_of_each_requests_own_filters(llama, top_k, has_processor):
    """Room for the ids is the widest request's; with a processor no accept step has them."""
    ids, mask = ragged_prompts(2)
    options = dict(max_new_tokens=6, eos_token_id=[], support=True, logprobs=2)
    if has_processor:
        options["logits_processor"] = lambda ids, scores: scores.roll(1, 1)
    temperature, seeds = [0.5, 2.0], [4, 9]
    got = generate(llama, ids, attention_mask=mask, temperature=temperature, top_k=top_k, seeds=seeds, **options)
    for b in range(2):
        own = dict(temperature=temperature[b], top_k=top_k[b], seeds=seeds[b])
        alone = generate(llama, ids[b : b + 1], attention_mask=mask[b : b + 1], **own, **options)
        assert torch.equal(got.sequences[b], alone.sequences[0])
        assert got.support[b].counts.tolist() == [top_k[b] or VOCABULARY] * 6
        assert all(torch.equal(*parts) for parts in zip(got.support[b], alone.support[0], strict=True))
        for one, other in zip(got.logprobs[b], alone.logprobs[0], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_the_support_is_a_switch(llama):
    ids, mask = ragged_prompts(2)
    with pytest.raises(TypeError, match="generate: support must be True or False, got int"):
        generate(llama, ids, max_new_tokens=3, attention_mask=mask, support=5)
    with pytest.raises(
        ValueError, match="run_ahead must be False or None, because log probabilities or supports are kept"
    ):
        generate(
            llama, ids, max_new_tokens=3, attention_mask=mask, support=True, session=Session(llama, run_ahead=True)
        )
