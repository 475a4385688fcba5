"""Where one rank's columns end and the next one's begin: tokens there, equal logits and equal scores on both sides, filters
that cut there. On every backend the ranks decide like the op on all columns.
"""

import pytest
import torch
from shard_cases import FILTERS, RULES, Step, drafts_on_ranks, same
from torch.utils._python_dispatch import _disable_current_modes

import pass_ext
from pass_ext.distributed.layout import Layout

BORDER, VOCABULARY = 8192, 8262
LAYOUT = Layout((0, BORDER), (BORDER, VOCABULARY))
SIDES = (BORDER - 1, BORDER, BORDER + 1)


def law(temperature=1.0, **filters):
    """Sampling parameters of one request."""
    numbers = dict.fromkeys(FILTERS) | {"temperature": temperature} | filters
    dtypes = {"top_k": torch.int32}
    return {name: None if n is None else torch.tensor([n], dtype=dtypes.get(name)) for name, n in numbers.items()}


def a_step(target, tokens, rule, seed=0, draft=None, **sampling):
    """One request: a root with these children, or under "block" a chain of them."""
    count = 1 + len(tokens)
    parents = list(range(-1, count - 1)) if rule == "block" else [-1] + [0] * len(tokens)
    tree = (
        torch.tensor([0, *tokens]), torch.tensor(parents, dtype=torch.int32), torch.tensor([0, count]).int(),
        len(tokens) if rule == "block" else 1,
    )  # fmt: skip
    rows = [None if row is None else row.expand(count, -1).contiguous() for row in (target, draft)]
    return Step(
        *rows,
        tree,
        {"rule": rule, "seeds": torch.tensor([seed]), "positions": torch.tensor([0])},
        law(**sampling),
        {},
        None,
    )


def decided(step, backend):
    """The result on all columns, which the ranks must have too."""
    with _disable_current_modes():
        expected = step.whole()
    there = step.on(backend.device)
    results, _ = there.on_ranks(LAYOUT)
    assert same([[part.cpu() for part in result] for result in results], expected), (expected, results[0])
    return expected


def flat_row(likely, logit):
    row = torch.zeros(1, VOCABULARY)
    row[0, likely] = logit
    return row


@pytest.mark.parametrize("token", SIDES)
@pytest.mark.parametrize("rule", RULES)
def test_a_token_beside_the_border_is_judged_by_its_own_logits(backend, rule, token):
    """A sure token is accepted, an impossible one is rejected, whatever lies in the memory beside it."""
    for logit, accepted in ((40.0, 1), (-40.0, 0)):
        result = decided(a_step(flat_row([token], logit), [token], rule, draft=flat_row([], 0.0)), backend)
        assert result.num_accepted.item() == accepted and result.status.item() == 0
        assert accepted or result.emitted[0, 0] != token


@pytest.mark.quick_on("cpu")
@pytest.mark.parametrize("drafted", [False, True], ids=["fixed", "drafted"])
@pytest.mark.parametrize("rule", ["rejection", "traversal", "block"])
def test_tokens_beside_the_border_that_were_rejected(backend, rule, drafted):
    """Three likely tokens, proposed and partly rejected: what is left of each decides about the next, and the draw."""
    emitted = set()
    for seed in range(24):
        target = flat_row(SIDES, 9.5) + 0.1 * torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed))
        draft = flat_row(SIDES, torch.tensor([12.0, 11.0, 9.0])) if drafted else None
        result = decided(a_step(target, SIDES[:2], rule, seed, draft), backend)
        emitted |= {(result.num_accepted.item(), int(result.emitted[0, 0]))}
    assert {0, 1} <= {count for count, _ in emitted} and len(emitted) > 3, emitted


TIES = [(BORDER - 1, BORDER), (5, BORDER), (BORDER, BORDER + 1), (BORDER - 2, BORDER - 1, BORDER + 60)]


@pytest.mark.parametrize("tie", TIES, ids=str)
def test_the_lowest_of_equal_logits_is_the_largest(backend, tie):
    """At temperature 0, with top-k 1, and where drafts are the best few."""
    for sampling in (dict(temperature=0.0), dict(top_k=1)):
        for rule in ("coupled", "rejection"):
            result = decided(a_step(flat_row(list(tie), 3.0), [tie[1], tie[0]], rule, **sampling), backend)
            assert (result.num_accepted.item(), result.emitted[0, 0].item()) == (1, tie[0])
    logits = flat_row(list(tie), 3.0).to(backend.device)
    for filters in ({}, {"top_k": 2}, {"min_p": 1.0}):
        sampling = {n: v if v is None else v.to(backend.device) for n, v in law(**filters).items()}
        expected = pass_ext.draft_sample(logits, 3, mode="top", **sampling)
        results, _ = drafts_on_ranks(logits, 3, "top", sampling, {"allowed": None}, LAYOUT)
        assert same([result[:1] for result in results], expected[:1])
        assert expected[0][0, :2].tolist() == list(tie[:2])


@pytest.mark.quick_on("cpu")
@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_a_cut_through_equal_logits_beside_the_border(backend, kept):
    """Of four equal tokens, two on each side, top-k keeps the lower ones, and top-p as many."""
    tokens = [BORDER - 2, BORDER - 1, BORDER, BORDER + 1]
    for filters in (dict(top_k=kept), dict(top_p=kept / 4), dict(top_k=kept, top_p=0.99)):
        drawn = set()
        for seed in range(12):
            row = flat_row(tokens, 60.0)
            drawn |= {decided(a_step(row, [], "rejection", seed, **filters), backend).emitted[0, 0].item()}
            for token in (tokens[kept - 1], tokens[kept % 4]):
                result = decided(a_step(row, [token], "rejection", seed, **filters), backend)
                assert result.num_accepted.item() == 0 or token in tokens[:kept]
        assert drawn <= set(tokens[:kept]) and len(drawn) >= min(kept, 2), (filters, drawn)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_row_of_the_lowest_floats_has_a_nucleus(backend, rule):
    """Nothing lies below the range in which its cut is looked for. Of equal tokens those with lower ids stay."""
    row = torch.full((1, VOCABULARY), torch.finfo(torch.float32).min)
    for seed in range(4):
        drawn = decided(a_step(row, [], rule, seed, top_p=0.25), backend).emitted[0, 0].item()
        assert 0 <= drawn <= VOCABULARY // 4 + 1


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_equal_scores_of_a_race_on_both_sides(backend, rule):
    """The logit of the second rank's best token, raised float by float until it wins: among equal scores the lower id does."""
    for seed in range(1 if backend.name == "emulated" else 4):
        row = torch.full((1, VOCABULARY), -60.0)
        row[0, BORDER - 1] = 0.0

        def winner(logit, row=row, seed=seed):
            row[0, BORDER] = logit
            with _disable_current_modes():
                return a_step(row.clone(), [], rule, seed).whole().emitted[0, 0].item()

        low, high = -30.0, 30.0
        assert winner(low) == BORDER - 1 and winner(high) == BORDER
        while torch.tensor(low).nextafter(torch.tensor(high)).item() < high:
            middle = torch.tensor((low + high) / 2).item()
            low, high = (middle, high) if winner(middle) < BORDER else (low, middle)
        logit, winners = torch.tensor(high), set()
        for _ in range(6):
            logit = logit.nextafter(torch.tensor(-torch.inf))
        for _ in range(9):
            row[0, BORDER] = logit
            winners |= {decided(a_step(row.clone(), [], rule, seed), backend).emitted[0, 0].item()}
            logit = logit.nextafter(torch.tensor(torch.inf))
        assert winners == {BORDER - 1, BORDER}
