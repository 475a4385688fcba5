"""The last word of a mask has bits after the vocabulary: whatever they say, no op reads a token there. The memory after a row
of logits holds numbers that would win.
"""

import pytest
import torch
from support.steps import random_step, to

import pass_ext
from pass_ext.ops.draft import MODES
from pass_ext.testing import assert_same_bits

VOCABULARIES = (1, 31, 33, 63, 65, 100, 257)


def apart(rows):
    """The rows, with +inf after each."""
    return torch.nn.functional.pad(rows.float(), (0, 64), value=torch.inf)[:, : rows.shape[1]]


def masks(rows, vocabulary, random):
    """Random masks whose padding is 0, and the same with 1; token 0 is allowed."""
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocabulary // 32)), generator=random).int()
    words[:, 0] |= 1
    used = vocabulary % 32 or 32
    padding = torch.tensor(-(2**used) if used < 32 else 0).int()
    clear, full = words.clone(), words.clone()
    clear[:, -1] &= ~padding
    full[:, -1] |= padding
    assert used == 32 or not torch.equal(clear, full)
    return clear, full


def assert_same(one, other):
    for part, expected in zip(one, other, strict=True):
        assert_same_bits(part, expected)


@pytest.mark.parametrize("mode", MODES)
def test_drafts(backend, mode):
    random = torch.Generator().manual_seed(1)
    for vocabulary in VOCABULARIES:
        rows = to({"logits": apart(torch.randn(4, vocabulary, generator=random))}, backend.device)["logits"]
        for filters in ({}, dict(temperature=0.8), dict(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01)):
            results = [
                pass_ext.draft_sample(
                    rows, 5, mode=mode, allowed=mask.to(backend.device), seeds=3, positions=0, **filters
                )
                for mask in masks(4, vocabulary, torch.Generator().manual_seed(vocabulary))
            ]
            assert_same(*results)
            assert (results[1][0] < vocabulary).all()


# On the emulator one rule for each way to walk: a row is read by the same function for all.
RULES = [
    pytest.param(
        rule, marks=() if rule in ("coupled", "rejection", "traversal", "kseq") else pytest.mark.quick_on("cpu")
    )
    for rule in pass_ext.RULES
]


@pytest.mark.parametrize("rule", RULES)
def test_accepted_tokens_and_their_probabilities(backend, rule):
    random = torch.Generator().manual_seed(2)
    for vocabulary in VOCABULARIES:
        step = random_step(rule, [3, 5, 1, 4], vocabulary, random)
        step |= {name: apart(step[name]) for name in ("target_logits", "draft_logits")}
        rows, results, numbers = len(step["tokens"]), [], []
        for mask in masks(rows, vocabulary, torch.Generator().manual_seed(vocabulary)):
            masked = to(step | {"allowed": mask, "draft_allowed": mask}, backend.device)
            result = pass_ext.accept_tree(**masked, return_logprobs=True, top_logprobs=3)
            results.append([*result, result.logprobs.top_tokens])
            numbers.append(result.logprobs)
        assert_same(*results)
        assert (results[1][0] < vocabulary).all() and (results[1][-1] < vocabulary).all()
        for name in numbers[0]._fields:  # on a GPU to rounding
            torch.testing.assert_close(*(getattr(part, name) for part in numbers), equal_nan=True)
