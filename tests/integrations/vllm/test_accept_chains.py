"""Packed chains of vLLM's requests: the layout, and one accept step over it against the reference."""

import pytest
import torch

from pass_ext import RULES, reference
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.integrations.vllm.sampling import chains as module
from pass_ext.integrations.vllm.sampling.chains import PackedChains, accept_chains
from pass_ext.ops.common.rules import ACCEPT_RULES

CPU = torch.device("cpu")
VOCABULARY = 50
GREEDY = BatchSampling(None, None, None, None, None)


def test_layout_of_ragged_drafts():
    chains = PackedChains.of([2, 0, 1], CPU)
    assert chains.cu_nodes.tolist() == [0, 3, 4, 6] and chains.cu_nodes.dtype == torch.int32
    assert chains.parents.tolist() == [-1, 0, 1, -1, -1, 0] and chains.parents.dtype == torch.int32
    assert chains.draft_rows.tolist() == [0, 1, -1, -1, 2, -1] and chains.draft_rows.dtype == torch.int32
    assert chains.tokens(torch.tensor([7, 8, 9], dtype=torch.int32)).tolist() == [-1, 7, 8, -1, -1, 9]
    assert chains.width == 3 and chains.draft_counts.tolist() == [2, 0, 1]


@pytest.mark.parametrize("drafts", [[], [0], [0, 0, 0]])
def test_layout_without_drafts(drafts):
    chains = PackedChains.of(drafts, CPU)
    assert chains.cu_nodes.tolist() == list(range(len(drafts) + 1))
    assert chains.parents.tolist() == [-1] * len(drafts) and chains.width == 1
    assert chains.tokens(None).tolist() == [-1] * len(drafts)
    assert chains.tokens(torch.zeros(0, dtype=torch.int32)).tolist() == [-1] * len(drafts)


def a_step(seed, drafts, dtype, with_probs):
    """(chains, logits, tokens, positions, sampling, draft_probs) with drafts that are often right."""
    generator = torch.Generator().manual_seed(seed)
    chains = PackedChains.of(drafts, CPU)
    requests, nodes = len(drafts), len(chains.parents)
    logits = (torch.randn(nodes, VOCABULARY, generator=generator) * 2.5).to(dtype)
    before = chains.draft_nodes - 1
    probs = (logits[before].float() + torch.randn(len(before), VOCABULARY, generator=generator)).softmax(-1)
    probs[:, ::7] = 0.0
    probs /= probs.sum(-1, keepdim=True)
    ids = torch.multinomial(probs, 1, generator=generator).flatten() if len(before) else before
    warm = torch.tensor([0.0, 0.7, 1.0, 1.4, 0.3])[torch.arange(requests) % 5]
    sampling = BatchSampling(
        warm,
        torch.tensor([VOCABULARY, 20, VOCABULARY, 9, VOCABULARY], dtype=torch.int32)[torch.arange(requests) % 5],
        torch.tensor([1.0, 1.0, 0.8, 0.9, 1.0])[torch.arange(requests) % 5],
        None,
        torch.randint(-(2**63), 2**63 - 1, (requests,), generator=generator),
    )
    positions = torch.randint(0, 1000, (requests,), generator=generator)
    return chains, logits, chains.tokens(ids.int()), positions, sampling, probs if with_probs else None


@pytest.mark.parametrize("with_probs", [True, False])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_accept_step_is_the_references(rule, dtype, with_probs):
    drafts = [3, 0, 1, 4, 2, 4, 4, 3, 0, 4]
    accepted = 0
    for seed in range(6):
        chains, logits, tokens, positions, sampling, probs = a_step(seed, drafts, dtype, with_probs)
        emitted = accept_chains(chains, logits, tokens, rule, sampling, positions, probs)
        draft = {}
        if ACCEPT_RULES[rule].needs_draft_logits and probs is not None:
            draft = dict(draft_logits=probs.log(), draft_temperature=torch.ones(len(drafts)))
            draft |= dict(draft_top_k=torch.zeros(len(drafts)), draft_top_p=torch.ones(len(drafts)))
        expected = reference.accept_tree(
            logits, tokens, chains.parents, chains.cu_nodes, 4, rule=rule, draft_rows=chains.draft_rows,
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seeds=sampling.seeds,
            positions=positions, **draft,
        )  # fmt: skip
        sure = expected.margin > 1e-5
        assert emitted.dtype == torch.int64 and emitted.shape == (len(drafts), 5)
        assert torch.equal(emitted[sure], expected.emitted[sure])
        assert sure.sum() > len(drafts) // 2
        accepted += int(expected.num_accepted.sum())
    assert accepted > 10


def test_ids_after_the_vocabulary_are_rejected_and_what_follows_them_too():
    chains = PackedChains.of([3, 2], CPU)
    logits = torch.zeros(len(chains.parents), VOCABULARY)
    logits[:, 5] = 9.0
    tokens = chains.tokens(torch.tensor([5, VOCABULARY, 5, VOCABULARY + 1, VOCABULARY + 2], dtype=torch.int32))
    emitted = accept_chains(chains, logits, tokens, "coupled", GREEDY, torch.tensor([4, 4]))
    assert emitted.tolist() == [[5, 5, -1, -1], [5, -1, -1, -1]]


def test_a_root_without_a_usable_row_gets_token_0_and_nothing_else_changes():
    chains = PackedChains.of([1, 1, 1], CPU)
    logits = torch.zeros(6, VOCABULARY)
    logits[:, 3] = 5.0
    logits[0] = torch.nan
    logits[2] = -torch.inf
    tokens = chains.tokens(torch.tensor([3, 3, 3]))
    emitted = accept_chains(chains, logits, tokens, "coupled", GREEDY, torch.tensor([1, 1, 1]))
    assert emitted.tolist() == [[0, -1], [0, -1], [3, 3]]


def test_greedy_steps_need_no_seeds_and_no_drafts_distribution(monkeypatch):
    calls = []

    def record(*arguments, **keywords):
        calls.append(keywords)
        return accept_tree(*arguments, **keywords)

    accept_tree = module.accept_tree
    monkeypatch.setattr(module, "accept_tree", record)
    chains, logits, tokens, positions, _, probs = a_step(0, [2, 1], torch.float32, True)
    emitted = accept_chains(chains, logits, tokens, "rejection", GREEDY, positions, probs)
    assert emitted[:, 0].tolist() == logits[chains.cu_nodes[:-1].long()].argmax(-1).tolist()
    assert calls[0]["seeds"] is None and "draft_logits" not in calls[0]
