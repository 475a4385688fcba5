"""generate(rule=SyntheticAcceptance(...)): drafts accepted at given rates by seeded coins, marked in the statistics."""

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import methods_for
from support.small_models import ragged_prompts, small_model

from pass_ext import NGram, Plain, Session, Speculative, Tree, draft_sample, generate, pack_trees
from pass_ext.decoding.accept import VerifiedRows
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.drafting import SyntheticAcceptance

CPU = torch.device("cpu")


def accept_many(rates, seeds, depth=3, temperature=0.0, position=50):
    """One step of requests that each have a chain: (result, the target's own tokens)."""
    random = torch.Generator().manual_seed(1)
    requests, width = len(seeds), depth + 1
    logits = torch.randn(requests * width, 40, generator=random)
    tokens = torch.randint(0, 40, (requests * width,), generator=random)
    sampling = SamplingParams(temperature=temperature, seeds=seeds).for_batch(requests, CPU)
    trees, positions = pack_trees([Tree.chain(depth)] * requests), torch.full((requests,), position)
    result = SyntheticAcceptance(rates).accept(VerifiedRows(logits, tokens, trees, depth, positions, sampling))
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
    trees = pack_trees([Tree([-1, 0, 0, 2]), Tree.chain(1), None])
    tokens = torch.tensor([9, 9, 4, -1, 9, 5])
    tokens[1] = -1
    rows = VerifiedRows(torch.eye(6, 12), tokens, trees, 2, torch.tensor([1, 1, 1]), SamplingParams().for_batch(3, CPU))
    accept = SyntheticAcceptance(1.0).accept
    result = accept(rows)
    assert result.emitted.tolist() == [[4, 2, -1], [5, 5, -1], [-1, -1, -1]]
    assert result.path.tolist() == [[0, 2, -1], [0, 1, -1], [-1, -1, -1]]
    assert result.num_accepted.tolist() == [1, 1, 0]
    tokens[2] = 12  # after the vocabulary, as look-ahead ids are
    assert accept(rows).num_accepted.tolist() == [0, 1, 0]


def test_the_path_leads_to_the_deepest_token():
    """The first of equals; look-ahead slots and nodes without a token are no end of it, and words of 64 nodes are no border."""
    logits = torch.eye(80, 90)
    for tree, missing, path in (
        (Tree([-1, 0, 0, 2, 1, 3]), (), [0, 2, 3, 5]),
        (Tree([-1, 0, 0, 2, 1, 3]), (5,), [0, 2, 3]),
        (Tree([-1, 0, 0, 2, 1, 3]), (3, 5), [0, 1, 4]),
        (Tree.from_branching((2, 2)), (), [0, 1, 3]),
        (Tree([-1, *[0] * 70, 70]), (), [0, 70, 71]),
    ):
        tokens = torch.full((len(tree),), 7)
        tokens[list(missing)] = -1
        depth, sampling = tree.max_depth, SamplingParams().for_batch(1, CPU)
        rows = VerifiedRows(logits[: len(tree)], tokens, pack_trees([tree]), depth, torch.tensor([1]), sampling)
        result = SyntheticAcceptance(1.0).accept(rows)
        assert result.path.tolist() == [[*path, *[-1] * (depth + 1 - len(path))]]


def test_rates():
    assert SyntheticAcceptance(0.6).chances(3) == [0.6] * 3
    assert SyntheticAcceptance([0.8, 0.4, 0.0, 0.0]).chances(3) == [0.8, 0.5, 0.0]
    assert SyntheticAcceptance([0.5]).chances(3) == [0.5, 0.0, 0.0]
    for wrong in (-0.1, 1.5, [], [0.2, 0.4], float("nan")):
        with pytest.raises(ValueError, match="SyntheticAcceptance: rates must"):
            SyntheticAcceptance(wrong)
    for wrong in (True, "0.5"):
        with pytest.raises(TypeError, match="SyntheticAcceptance: rates must be a rate, or one for each depth, got"):
            SyntheticAcceptance(wrong)


@pytest.mark.parametrize("name", ["plain", "ngram", "one pass", "two passes", "one pass with ngrams", "speculative"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_method_writes_texts_of_full_length(llama, name, temperature):
    ids, mask = ragged_prompts(3)
    draft = small_model("llama", seed=3)
    method = Speculative(draft, length=3) if name == "speculative" else methods_for(llama)[name]
    arguments = dict(max_new_tokens=30, attention_mask=mask, temperature=temperature, seeds=5, eos_token_id=[])
    got = generate(llama, ids, method, rule=SyntheticAcceptance(1.0), **arguments)
    assert got.lengths == (30,) * 3 and got.stats.synthetic and "SYNTHETIC" in str(got.stats)
    assert got.stats.as_dict()["synthetic"] is True and (got.stats + got.stats).synthetic
    if name not in ("plain", "ngram"):
        assert got.stats.mean_acceptance_length > 2
    assert torch.equal(
        got.sequences, generate(llama, ids, method, rule=SyntheticAcceptance(1.0), **arguments).sequences
    )
    none = generate(llama, ids, method, rule=SyntheticAcceptance(0.0), **arguments)
    assert none.stats.num_accepted_tokens == 0
    assert torch.equal(none.sequences, generate(llama, ids, Plain(), **arguments).sequences)
    assert not generate(llama, ids, method, **arguments).stats.synthetic


def test_both_loops_write_the_same_texts(llama):
    ids, mask = ragged_prompts(3)
    method = methods_for(llama)["one pass"]
    arguments = dict(max_new_tokens=30, attention_mask=mask, eos_token_id=[], rule=SyntheticAcceptance([0.9, 0.5]))
    sessions = [Session(llama, run_ahead=run_ahead) for run_ahead in (False, True)]
    waits, ahead = (generate(llama, ids, method, session=session, **arguments) for session in sessions)
    assert ahead.stats.ahead_calls > 0 and waits.stats.ahead_calls == 0
    assert torch.equal(waits.sequences, ahead.sequences)
    assert waits.stats.acceptance_histogram == ahead.stats.acceptance_histogram


def test_log_probabilities_are_of_the_tokens_that_were_written(llama):
    ids, mask = ragged_prompts(2)
    method = NGram(longest=2, shortest=1, tokens=3)
    got = generate(
        llama, ids, method, max_new_tokens=12, attention_mask=mask, temperature=1.0, seeds=1, eos_token_id=[],
        rule=SyntheticAcceptance(0.5), logprobs=0,
    )  # fmt: skip
    for b in range(2):
        text = torch.cat([ids[b][mask[b] > 0], got.sequences[b, ids.shape[1] :]])
        rows = llama(text[None]).logits[0, -13:-1].log_softmax(-1)
        raw = rows.gather(1, text[-12:, None])[:, 0]
        torch.testing.assert_close(got.logprobs[b].raw, raw, rtol=0, atol=1e-3)
        torch.testing.assert_close(got.logprobs[b].processed, raw, rtol=0, atol=1e-3)
