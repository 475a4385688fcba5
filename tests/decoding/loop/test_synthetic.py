"""generate(synthetic=...): drafts accepted at given rates by seeded coins, marked in the statistics."""

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import methods_for
from support.small_models import ragged_prompts, small_model

from pass_ext import NGram, Plain, Speculative, Tree, draft_sample, generate
from pass_ext.decoding.loop.synthetic import Synthetic, conditional_rates, spine_of
from pass_ext.decoding.sampling import SamplingParams

CPU = torch.device("cpu")


def accept_many(rates, seeds, depth=3, temperature=0.0, position=50):
    """One step of requests that each have a chain: (result, the target's own tokens)."""
    random = torch.Generator().manual_seed(1)
    requests, width = len(seeds), depth + 1
    logits = torch.randn(requests * width, 40, generator=random)
    tokens = torch.randint(0, 40, (requests * width,), generator=random)
    sampling = SamplingParams(temperature=temperature, seeds=seeds).for_batch(requests, CPU)
    synthetic = Synthetic(rates, CPU, depth)
    result = synthetic.accept(
        logits,
        tokens,
        torch.arange(width).repeat(requests, 1),
        torch.arange(requests) * width,
        torch.full((requests,), position),
        sampling,
    )
    return result, logits.view(requests, width, -1), tokens.view(requests, width)


@pytest.mark.parametrize(("rates", "shares"), [(0.7, [0.7, 0.49, 0.343]), ([0.8, 0.4, 0.1], [0.8, 0.4, 0.1])])
def test_drafts_are_accepted_at_the_rates(rates, shares):
    requests = 20_000
    result, *_ = accept_many(rates, torch.arange(requests), temperature=1.0)
    for depth, share in enumerate(shares, 1):
        seen = float((result.num_accepted >= depth).double().mean())
        assert abs(seen - share) < 4 * (share * (1 - share) / requests) ** 0.5, depth
    assert result.status.tolist() == [0] * requests


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_result_is_a_path_of_drafts_and_the_targets_token(temperature):
    result, logits, tokens = accept_many(0.5, torch.arange(64), temperature=temperature)
    assert set(result.num_accepted.tolist()) == {0, 1, 2, 3}
    for b, count in enumerate(result.num_accepted.tolist()):
        own, _ = draft_sample(
            logits[b, count][None], 1, mode="coupled", temperature=[temperature], seeds=[b], positions=[50 + count]
        )
        assert result.emitted[b].tolist() == [*tokens[b, 1 : count + 1].tolist(), int(own), *[-1] * (3 - count)]
        assert result.path[b].tolist() == [*range(count + 1), *[-1] * (3 - count)]
    again, *_ = accept_many(0.5, torch.arange(64))
    assert torch.equal(again.num_accepted, result.num_accepted)
    elsewhere, *_ = accept_many(0.5, torch.arange(64), position=51)
    assert not torch.equal(elsewhere.num_accepted, result.num_accepted), "coins depend on the position"
    assert accept_many(0.0, torch.arange(64))[0].num_accepted.tolist() == [0] * 64
    assert accept_many(1.0, torch.arange(64))[0].num_accepted.tolist() == [3] * 64


def test_rows_without_a_token_and_padded_requests():
    synthetic = Synthetic(1.0, CPU, 2)
    spines = torch.tensor([[0, 2, 3], [0, 1, -1], [-1, -1, -1]])
    tokens = torch.tensor([9, 9, 4, -1, 9, 5])
    logits = torch.eye(6, 12)
    sampling = SamplingParams().for_batch(3, CPU)
    result = synthetic.accept(logits, tokens, spines, torch.tensor([0, 4, 6]), torch.tensor([1, 1, 1]), sampling)
    assert result.emitted.tolist() == [[4, 2, -1], [5, 5, -1], [-1, -1, -1]]
    assert result.path.tolist() == [[0, 2, -1], [0, 1, -1], [-1, -1, -1]]
    assert result.num_accepted.tolist() == [1, 1, 0]
    tokens[2] = 12  # behind the vocabulary, as look-ahead ids are
    result = synthetic.accept(logits, tokens, spines, torch.tensor([0, 4, 6]), torch.tensor([1, 1, 1]), sampling)
    assert result.num_accepted.tolist() == [0, 1, 0]


def test_spines_and_rates():
    assert spine_of(Tree([-1, 0, 0, 2, 1, 3])) == [0, 2, 3, 5]
    assert spine_of(Tree.from_branching((2, 2))) == [0, 1, 3]
    assert conditional_rates(0.6, 3) == [0.6] * 3
    assert conditional_rates([0.8, 0.4, 0.0, 0.0], 3) == [0.8, 0.5, 0.0]
    assert conditional_rates([0.5], 3) == [0.5, 0.0, 0.0]
    for wrong in (-0.1, 1.5, [], [0.2, 0.4], float("nan")):
        with pytest.raises(ValueError, match="generate: synthetic must be rates"):
            conditional_rates(wrong, 3)
    for wrong in (True, "0.5"):
        with pytest.raises(TypeError, match="generate: synthetic must be a rate, or one for each depth, got"):
            conditional_rates(wrong, 3)


@pytest.mark.parametrize("name", ["plain", "ngram", "one pass", "two passes", "one pass with ngrams", "speculative"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_method_writes_texts_of_full_length(llama, name, temperature):
    ids, mask = ragged_prompts(3)
    draft = small_model("llama", seed=3)
    method = Speculative(draft, length=3) if name == "speculative" else methods_for(llama)[name]
    arguments = dict(max_new_tokens=30, attention_mask=mask, temperature=temperature, seeds=5, eos_token_id=[])
    got = generate(llama, ids, method, synthetic=1.0, **arguments)
    assert got.lengths == (30,) * 3 and got.stats.synthetic and "SYNTHETIC" in str(got.stats)
    assert got.stats.as_dict()["synthetic"] is True and (got.stats + got.stats).synthetic
    if name not in ("plain", "ngram"):
        assert got.stats.mean_acceptance_length > 2
    assert torch.equal(got.sequences, generate(llama, ids, method, synthetic=1.0, **arguments).sequences)
    none = generate(llama, ids, method, synthetic=0.0, **arguments)
    assert none.stats.num_accepted_tokens == 0
    assert torch.equal(none.sequences, generate(llama, ids, Plain(), **arguments).sequences)
    assert not generate(llama, ids, method, **arguments).stats.synthetic


def test_both_loops_write_the_same_texts(llama):
    ids, mask = ragged_prompts(3)
    method = methods_for(llama)["one pass"]
    arguments = dict(max_new_tokens=30, attention_mask=mask, eos_token_id=[], synthetic=[0.9, 0.5])
    waits, ahead = (generate(llama, ids, method, run_ahead=run_ahead, **arguments) for run_ahead in (False, True))
    assert ahead.stats.ahead_calls > 0 and waits.stats.ahead_calls == 0
    assert torch.equal(waits.sequences, ahead.sequences)
    assert waits.stats.acceptance_histogram == ahead.stats.acceptance_histogram


def test_log_probabilities_are_of_the_tokens_that_were_written(llama):
    ids, mask = ragged_prompts(2)
    method = NGram(longest=2, shortest=1, tokens=3)
    got = generate(
        llama, ids, method, max_new_tokens=12, attention_mask=mask, temperature=1.0, seeds=1, eos_token_id=[],
        synthetic=0.5, logprobs=0,
    )  # fmt: skip
    for b in range(2):
        text = torch.cat([ids[b][mask[b] > 0], got.sequences[b, ids.shape[1] :]])
        rows = llama(text[None]).logits[0, -13:-1].log_softmax(-1)
        raw = rows.gather(1, text[-12:, None])[:, 0]
        torch.testing.assert_close(got.logprobs[b].raw, raw, rtol=0, atol=1e-3)
        torch.testing.assert_close(got.logprobs[b].processed, raw, rtol=0, atol=1e-3)


def test_a_rule_without_the_targets_token_is_refused(llama):
    with pytest.raises(ValueError, match="synthetic must be None with rule 'longest_branch', which draws before"):
        generate(llama, ragged_prompts(1)[0], max_new_tokens=3, rule="longest_branch", synthetic=0.5)
