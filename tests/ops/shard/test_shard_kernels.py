"""The kernels of the shard ops on every backend, beside the CPU's at the best instruction set: the same answers to the bit,
slices' sums to rounding, and the same decisions on any number of ranks.
"""

from itertools import pairwise

import pytest
import torch
from shard_cases import FILTERS, RULES, any_layout, drafts_on_ranks, random_drafts, random_step, same
from torch.utils._python_dispatch import _disable_current_modes

import pass_ext
from pass_ext import reference
from pass_ext.distributed import steps
from pass_ext.distributed.layout import Layout
from pass_ext.testing import assert_same_bits

SUMS = ("top_p", "masses", "residuals")
SMALL = (5, 65, 300)


def moved(value, device):
    if isinstance(value, (list, tuple)):
        return type(value)(moved(part, device) for part in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def compare_answers(actual, expected, keywords):
    if keywords.get("round") in SUMS:
        actual, expected = actual.view(torch.float32), expected.view(torch.float32)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-30)
    elif keywords.get("round") == "peaks":  # -0 is 0
        numbers = [words.view(torch.float32)[:, ::2] + 0.0 for words in (actual, expected)]
        assert_same_bits(numbers[0], numbers[1])
        assert_same_bits(actual[:, 1], expected[:, 1])
    else:
        assert_same_bits(actual, expected)


def compare_states(actual, expected, keywords):
    assert_same_bits(actual[0], expected[0])
    if keywords["next"] == "finish":
        for part, expected_part in zip(actual[1], expected[1], strict=True):
            assert_same_bits(part, expected_part)


@pytest.fixture
def compared(backend, monkeypatch):
    """Every call of a shard op runs on the backend and on the CPU; steps go on with the CPU's answers. Counts the calls."""
    calls = {}

    def watch(name, compare):
        function = getattr(steps, name)

        def call(*arguments, **keywords):
            with _disable_current_modes():
                expected = function(*arguments, **keywords)
            there = {key: moved(value, backend.device) for key, value in keywords.items()}
            actual = function(*moved(list(arguments), backend.device), **there)
            actual = (
                actual.cpu() if isinstance(actual, torch.Tensor) else (actual[0].cpu(), [x.cpu() for x in actual[1]])
            )
            compare(actual, expected, keywords)
            calls[name] = calls.get(name, 0) + 1
            return expected

        monkeypatch.setattr(steps, name, call)

    watch("shard_local", compare_answers)
    watch("shard_combine", compare_states)
    watch("shard_best", compare_answers)
    return calls


def numbers_of(words, this):
    """An answer's words as the reference has them."""
    if this in ("counts", "nucleus"):
        return words.double()
    floats = words.view(torch.float32).double()
    if this in SUMS:
        return floats
    ids = torch.arange(words.shape[-1]) % (3 if this in ("peaks", "best") else 2) == 1
    return torch.where(ids, words.double(), floats)


def is_near(actual, expected, this):
    """Ids and counts exactly; floats, and masses in bins, to the rounding of floats."""
    if this in ("counts", "races", "peaks", "best"):
        step = 3 if this in ("peaks", "best") else 2
        exact = actual == expected if this == "counts" else (actual == expected)[..., 1::step]
        if not bool(exact.all()):
            return False
    return torch.allclose(
        actual, expected, rtol=2e-5, atol=2e-5 if this not in ("counts", "nucleus") else 1e5, equal_nan=True
    )


@pytest.fixture
def specified(backend, monkeypatch):
    """Answers of the backend are compared with the reference."""
    calls = {}

    def watch(name):
        function, reference_of = getattr(steps, name), getattr(reference, name)

        def call(*arguments, **keywords):
            there = {key: moved(value, backend.device) for key, value in keywords.items()}
            words = function(*moved(list(arguments), backend.device), **there).cpu()
            with _disable_current_modes():
                expected, this = reference_of(*arguments, **keywords), keywords.get("round", "best")
                assert is_near(numbers_of(words, this), expected, this), (this, numbers_of(words, this), expected)
            calls[this] = calls.get(this, 0) + 1
            return words

        monkeypatch.setattr(steps, name, call)

    watch("shard_local")
    watch("shard_best")
    return calls


def on_cpu(function, *arguments, **keywords):
    with _disable_current_modes():
        return function(*arguments, **keywords)


@pytest.mark.parametrize("filter", ["temperature", "top_k", "top_p", "all"])
@pytest.mark.parametrize("rule", RULES)
def test_answers_and_states_are_those_of_the_cpu(compared, rule, filter):
    filters = list(FILTERS) if filter == "all" else ["temperature", filter]
    for seed in range(3):
        step = on_cpu(random_step, seed, rule=rule, filters=filters, vocabulary=SMALL[seed])
        step.on_ranks(any_layout(SMALL[seed], 1 + seed % 2, step.chance))
    assert compared["shard_local"] > 0 < compared["shard_combine"]


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_children_that_a_later_rank_has_lost(compared, rule):
    """Few likely tokens, all on the second rank, so that most nodes lose a child before they draw."""
    for seed in range(40, 46):
        step = on_cpu(random_step, seed, rule=rule, filters=["temperature"], vocabulary=6)
        tokens, *tree = step.tree
        step.tree = (torch.where(tokens >= 0, tokens + 8192, tokens), *tree)
        step.target, step.draft = (
            logits if logits is None else torch.nn.functional.pad(logits, (8192, 0), value=-torch.inf)
            for logits in (step.target, step.draft)
        )
        step.keywords |= dict.fromkeys(("allowed", "draft_allowed"))
        step.on_ranks(Layout((0, 8192), (8192, 8198)))
    assert compared["shard_local"] > 0 < compared["shard_combine"]


def test_answers_about_several_slices(compared):
    for seed, rule in enumerate(("coupled", "rejection", "traversal")):
        step = on_cpu(random_step, 20 + seed, rule=rule, vocabulary=16500)
        step.on_ranks(Layout((0, 8192), (8192, 16500)))


def test_best_tokens_are_those_of_the_cpu(compared):
    for seed in range(12):
        chance, logits, k, mode, sampling, rest = on_cpu(random_drafts, seed)
        logits = logits[:, :300]
        rest["allowed"] = None
        drafts_on_ranks(logits, min(k, 4), mode, sampling, rest, any_layout(logits.shape[1], 2, chance))
    assert compared["shard_best"] > 0


def test_best_tokens_of_a_later_rank(compared):
    """Its noise is that of the tokens' own ids."""
    for seed in range(6):
        _, logits, k, mode, sampling, rest = on_cpu(random_drafts, seed)
        logits = torch.nn.functional.pad(logits[:, :300], (8192, 0), value=-torch.inf)
        rest["allowed"] = None
        drafts_on_ranks(logits, min(k, 4), mode, sampling, rest, Layout((0, 8192), (8192, logits.shape[1])))
    assert compared["shard_best"] > 0


@pytest.mark.quick_on("cpu")  # the other backends have the CPU's bits
@pytest.mark.parametrize("rule", RULES)
def test_answers_are_those_of_the_reference(specified, rule):
    for seed in range(6):
        step = on_cpu(random_step, 40 + seed, rule=rule, filters=list(FILTERS) if seed % 2 else None, vocabulary=300)
        step.on_ranks(any_layout(300, 1 + seed % 3, step.chance))
    assert {"peaks", "counts", "nucleus", "races"} <= set(specified) and (rule == "coupled" or "masses" in specified)
    assert rule not in ("traversal", "block") or "residuals" in specified


@pytest.mark.quick_on("cpu")
def test_best_tokens_are_those_of_the_reference(specified):
    for seed in range(40):
        chance, logits, k, mode, sampling, rest = on_cpu(random_drafts, seed)
        rest["allowed"] = None
        drafts_on_ranks(logits[:, :300], k, mode, sampling, rest, any_layout(logits[:, :300].shape[1], 2, chance))
    assert specified["best"] > 0


@pytest.mark.parametrize("rule", RULES)
def test_decisions_do_not_depend_on_the_split(backend, rule):
    """To the bit among the splits; those of the unsharded ops, here without near ties."""
    for seed in range(3):
        step = on_cpu(random_step, 100 + seed, rule=rule, vocabulary=9000 if seed == 0 else 300)
        there = step.on(backend.device)
        if seed:  # a slice is the least that a rank holds
            layouts = [Layout((0,), (300,)), Layout((0, 300), (300, 300))]
        else:
            layouts = [
                Layout((0,), (9000,)),
                Layout((0, 8192), (8192, 9000)),
                Layout((0, 8192, 9000), (8192, 9000, 9000)),
            ]
        results = [there.on_ranks(layout)[0] for layout in layouts]
        for result in results:
            assert same(result, results[0][0]), (seed, result, results[0])
        assert same(results[0], there.whole()), seed
        assert same([[part.cpu() for part in results[0][0]]], on_cpu(step.whole)), seed


def test_nothing_to_accept_and_nothing_to_draft(backend):
    device = backend.device
    tree = (
        torch.zeros(0, dtype=torch.int64, device=device),
        torch.zeros(0, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    logits = torch.zeros(0, 70, device=device)
    answers = pass_ext.distributed.shard_local(logits, *tree, rule="rejection", vocab_start=0, slices=1, round="peaks")
    assert answers.shape == (0, 3)
    state, result = pass_ext.distributed.shard_combine(
        logits, *tree, 2, answers[None], rule="rejection", vocab_size=70, round="peaks", next="masses"
    )
    assert state.shape == (0,) and result.emitted.shape == (0, 3)
    assert pass_ext.distributed.shard_best(logits, state, 2, mode="top", vocab_start=0).shape == (0, 2, 3)


@pytest.mark.parametrize(
    "rule, asked, walked, emitted",
    [
        ("rejection", 2, 0, [-1, -1, -1]),
        ("traversal", 2, 0, [-1, -1, -1]),
        ("block", 2, 1, [3, -1, -1]),
        ("coupled", 1, 2, [3, 4, -1]),
        ("coupled", 0, 2, [3, -1, -1]),
    ],
)
def test_a_walk_that_ends_where_no_race_was_run_has_a_status(backend, rule, asked, walked, emitted):
    """max_depth changes between the last two rounds. The second request has its root alone, and no need of depth."""
    logits = torch.full((4, 70), -30.0)
    for node, token in enumerate((3, 4, 5, 6)):
        logits[node, token] = 30.0
    bounds = torch.tensor([0, 3, 4], dtype=torch.int32)
    parents = torch.tensor([-1, 0, 1, -1], dtype=torch.int32)
    tree = moved((torch.tensor([0, 3, 4, 0]), parents, bounds), backend.device)
    logits, temperature = moved((logits, torch.ones(2)), backend.device)
    rounds = ["peaks", *(["races"] if rule == "coupled" else ["masses", "races"]), "finish"]

    def steps_of(last_depth, is_silent=False):
        state, result = None, None
        for this, following in pairwise(rounds):
            answers = pass_ext.distributed.shard_local(
                logits, *tree, rule=rule, vocab_start=0, slices=1, round=this, state=state
            )
            depth = last_depth if following == "finish" else asked
            if is_silent and this == "races":
                answers = torch.full_like(answers, -1)  # NaN and no token
            state, result = pass_ext.distributed.shard_combine(
                logits, *tree, depth, answers[None], rule=rule, vocab_size=70, round=this, next=following, state=state,
                temperature=temperature,
            )  # fmt: skip
        return [part.cpu().tolist() for part in result]

    tokens, path, accepted, status = steps_of(walked)
    assert tokens[0] == emitted[: walked + 1] and status == [2, 0]
    assert accepted == [sum(token >= 0 for token in emitted), 0] and path[0][accepted[0]] == accepted[0]
    assert tokens[1][0] == 6
    whole = pass_ext.accept_tree(logits, *tree, asked, rule=rule, temperature=temperature, seeds=0, positions=0)
    assert steps_of(asked) == [part.cpu().tolist() for part in whole] and whole.status.tolist() == [0, 0]
    tokens, _, accepted, status = steps_of(asked, is_silent=True)
    assert status == [2, 2] and [row[n] for row, n in zip(tokens, accepted, strict=True)] == [-1, -1]


def test_a_path_over_a_token_that_no_race_gave_keeps_the_status(backend):
    """Under "coupled" -1, which no race gives, is also the token of a node."""
    logits = torch.full((3, 70), -30.0)
    logits[:, 3] = 30.0
    tree = (torch.tensor([0, -1, 3]), torch.tensor([-1, 0, 1], dtype=torch.int32), torch.tensor([0, 3]).int())
    logits, *tree, temperature = moved([logits, *tree, torch.ones(1)], backend.device)
    step = dict(rule="coupled", vocab_size=70, temperature=temperature)
    answers = pass_ext.distributed.shard_local(logits, *tree, rule="coupled", vocab_start=0, slices=1, round="peaks")
    state, _ = pass_ext.distributed.shard_combine(logits, *tree, 2, answers[None], round="peaks", next="races", **step)
    races = pass_ext.distributed.shard_local(
        logits, *tree, rule="coupled", vocab_start=0, slices=1, round="races", state=state
    )
    races[0] = -1  # the root's
    _, result = pass_ext.distributed.shard_combine(
        logits, *tree, 2, races[None], round="races", next="finish", state=state, **step
    )  # fmt: skip
    assert result.emitted.cpu().tolist() == [[-1, 3, 3]] and result.status.cpu().tolist() == [2]


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_a_race_over_p_answers_where_nothing_was_left_to_draw_from(backend, rule):
    """The first race has no token, the second has: its token counts, and there is no status."""
    logits = torch.full((2, 70), -30.0)
    logits[:, 3] = 30.0
    tree = (torch.tensor([0, 4]), torch.tensor([-1, 0], dtype=torch.int32), torch.tensor([0, 2]).int())
    logits, *tree, temperature = moved([logits, *tree, torch.ones(1)], backend.device)
    step, state, result = dict(rule=rule, vocab_size=70, temperature=temperature), None, None
    for this, following in pairwise(["peaks", "masses", "races", "finish"]):
        answers = pass_ext.distributed.shard_local(
            logits, *tree, rule=rule, vocab_start=0, slices=1, round=this, state=state
        )
        if this == "races":
            answers[0, 2:] = answers[0, :2]
            answers[0, :2] = -1  # NaN and no token
        state, result = pass_ext.distributed.shard_combine(
            logits, *tree, 1, answers[None], round=this, next=following, state=state, **step
        )
    assert result.emitted.cpu().tolist() == [[3, -1]] and result.status.cpu().tolist() == [0]


MALFORMED = [  # cu_nodes, parents, draft_rows
    ([0, 5], [-1, 0, 1], None),
    ([1, 3], [-1, 0, 1], None),
    ([0, 3], [-1, 2, 0], None),
    ([0, 3], [-1, -3, 0], None),
    ([0, 3], [0, 0, 1], None),
    ([0, 3], [-1, 0, 1], [0, 7, -1]),
    ([0, 3], [-1, 0, 1], [-1, -1, -1]),
]


@pytest.mark.parametrize("rule", ["coupled", "rejection", "traversal"])
def test_malformed_trees_get_what_they_get_of_all_columns(backend, rule):
    logits = torch.full((3, 70), -30.0)
    logits[:, 3] = 30.0
    logits, temperature, tokens = moved([logits, torch.ones(1), torch.tensor([0, 3, 3])], backend.device)
    for bounds, parents, draft_rows in MALFORMED:
        tree = moved([torch.tensor(parents).int(), torch.tensor(bounds).int()], backend.device)
        step = dict(rule=rule, temperature=temperature)
        if rule != "coupled":
            rows = None if draft_rows is None else torch.tensor(draft_rows).int().to(backend.device)
            step |= dict(draft_logits=logits, draft_rows=rows)
        whole = pass_ext.accept_tree(logits, tokens, *tree, 2, **step, seeds=0, positions=0)
        state, result = None, None
        for this, following in pairwise(
            ["peaks", *(["races"] if rule == "coupled" else ["masses", "races"]), "finish"]
        ):
            local = {name: value for name, value in step.items() if name != "temperature"}
            answers = pass_ext.distributed.shard_local(
                logits, tokens, *tree, **local, vocab_start=0, slices=1, round=this, state=state
            )
            state, result = pass_ext.distributed.shard_combine(
                logits,
                tokens,
                *tree,
                2,
                answers[None],
                **step,
                vocab_size=70,
                round=this,
                next=following,
                state=state,
            )
        assert [part.tolist() for part in result] == [part.tolist() for part in whole], (bounds, parents, draft_rows)
        assert (whole.status.item() == 4) == (draft_rows != [-1, -1, -1] and (rule != "coupled" or draft_rows is None))
