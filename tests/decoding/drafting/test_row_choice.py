"""Rows chosen at each place: the best by the formula, as trying every choice finds them; slots of nodes above; texts."""

import random

import pytest
import torch
from support.generation import slots_for
from support.small_models import VOCABULARY, small_model

from pass_ext import PaSS, Plain, Tree, generate
from pass_ext.decoding.drafting import from_lookahead
from pass_ext.decoding.drafting.from_lookahead import LookaheadDrafter, _slots_behind
from pass_ext.decoding.drafting.rows.choose import RowChoice
from pass_ext.decoding.planning.lookahead_tree import likeliest_nodes

RATES = [0.6, 0.45, 0.4]
PROMPTS = torch.randint(1, VOCABULARY, (3, 1, 9), generator=torch.Generator().manual_seed(5))


def worth(passed, slots):
    total = 0.0
    for i in range(passed, slots):
        chain = 1.0
        for j in range(passed, i + 1):
            chain *= RATES[j]
        total += 0.8 * 0.6 ** (i - passed) * chain
    return total


def tokens_of(tree, probabilities, kept, behind_root, behind_first):
    """The expected tokens, by where the accepted path ends: reach + sum of last(v) · W(the slots of v)."""
    reach = [1.0]
    for node, probability in enumerate(probabilities, 1):
        reach.append(reach[tree.parents[node]] * probability)
    total = 0.0
    for node in (0, *kept):
        last = reach[node] - sum(reach[child] for child in kept if tree.parents[child] == node)
        path = tree.path(node)
        passed, slots = (2, behind_first) if behind_first and 1 in path else (1, behind_root)
        total += reach[node] + last * worth(len(path) - passed, slots)
    return total


@pytest.mark.parametrize("levels", [1, 2, 3, 9])
@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_gives_more_tokens(seed, levels):
    rng = random.Random(seed)
    rows = rng.choice([2, 5, 8, 12])
    tree = likeliest_nodes([[0.5, 0.2, 0.1], [0.4, 0.2], [0.3, 0.1]], 12)
    probabilities = [0.0] * (tree.num_nodes - 1)
    for node in range(tree.num_nodes):
        left = 1.0
        for child in tree.children(node):
            probabilities[child - 1] = left * rng.uniform(0.1, 0.8)
            left -= probabilities[child - 1]
    tokens = [rng.randrange(100) if rng.random() < 0.9 else -1 for _ in probabilities]
    got = RowChoice(tree, RATES, rows).choose(levels, tokens, probabilities)

    reach = [1.0]
    for node, (token, probability) in enumerate(zip(tokens, probabilities, strict=True), 1):
        usable = token >= 0 and tree.depths[node] <= levels
        reach.append(reach[tree.parents[node]] * probability * usable)
    usable = sorted((node for node in range(1, tree.num_nodes) if reach[node]), key=lambda node: -reach[node])
    best = 1.0, (), 0, 0
    for behind_root in range(min(len(RATES), levels - 1) + 1):
        for behind_first in range(max(0, min(len(RATES), levels - 2)) + 1):
            for count in range(min(len(usable), rows - 1 - behind_root - behind_first) + 1):
                kept = usable[:count]
                if behind_first and 1 not in kept:
                    continue
                value = tokens_of(tree, probabilities, kept, behind_root, behind_first)
                best = max(best, (value, tuple(sorted(kept)), behind_root, behind_first))
    if got is None:
        assert best[0] == 1.0
        return
    groups = dict(got.groups)
    assert list(got.tokens) == [tokens[node - 1] for node in best[1]]
    assert groups == {node: count for node, count in enumerate(best[2:]) if count}
    assert got.tree.num_nodes + sum(groups.values()) <= rows
    assert all(got.tree.depths[node] + count < levels for node, count in groups.items())


def test_a_choice_without_candidates_has_slots_alone():
    tree = likeliest_nodes([[0.5, 0.2], [0.4]], 6)
    probe = RowChoice(tree, [0.5, 0.4], 8).choose(9, (), ())
    assert (len(probe.tree), probe.groups) == (1, ((0, 2),))
    assert RowChoice(tree, [0.5, 0.4], 8).choose(1, (), ()) is None  # slots would foresee what is never written


def test_a_sure_slot_gets_a_chain_and_an_unsure_one_gets_branches():
    tree = likeliest_nodes([[0.5, 0.3, 0.2], [0.4, 0.2], [0.4, 0.2]], 12)
    choice, children = RowChoice(tree, RATES, 8), [tree.children(node) for node in range(tree.num_nodes)]
    for first, depth, branches in ((0.97, 3, 1), (0.3, 1, 3)):
        probabilities = [0.0] * (tree.num_nodes - 1)
        for below in children:
            for rank, child in enumerate(below):
                probabilities[child - 1] = first if rank == 0 else min((1 - first) / 2, first * 0.9) * 0.9**rank
        got = choice.choose(20, list(range(len(probabilities))), probabilities)
        assert (got.tree.max_depth >= depth) and (len(got.tree.children(0)) >= branches)
        assert (len(got.tree.children(0)) == 1) == (first > 0.9)


def test_a_node_without_slots_has_those_of_the_nodes_above_that_are_ahead_of_it():
    tree = Tree([-1, 0, 1, 2, 0]).with_lookahead({0: 3, 4: 2})
    root, other = tree.group_rows(0), tree.group_rows(4)
    behind = [list(_slots_behind(tree, node)) for node in range(5)]
    assert behind == [list(root), list(root[1:]), list(root[2:]), [], list(other)]


@pytest.fixture
def chosen(monkeypatch):
    """The steps' trees of the generations of a test."""
    steps, choose = [], RowChoice.choose

    def spy(self, *arguments):
        steps.append(choose(self, *arguments))
        return steps[-1]

    monkeypatch.setattr(RowChoice, "choose", spy)
    return steps


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("rows", [8, 13])
def test_texts_are_those_of_plain_decoding(chosen, temperature, rank, rows):
    model = small_model("llama")
    method = PaSS(slots_for(model, rank=rank), rows=rows)
    for prompt in PROMPTS:
        for length in (1, 2, 3, 20):
            options = dict(max_new_tokens=length, temperature=temperature, seeds=[3], eos_token_id=[])
            plain, ours = generate(model, prompt, Plain(), **options), generate(model, prompt, method, **options)
            assert torch.equal(plain.sequences, ours.sequences)
            assert torch.equal(generate(model, prompt, method, run_ahead=True, **options).sequences, ours.sequences)
    trees = {(step.tree.parents, step.groups) for step in chosen if step is not None}
    assert len(trees) > 2 and all(len(tree) + sum(n for _, n in groups) <= rows for tree, groups in trees)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (7, {}),
        (65, {}),
        (8, dict(tree=Tree.chain(1))),
        (8, dict(passes=2)),
        (8, dict(rule="rejection", temperature=1.0)),
    ],
    ids=str,
)
def test_other_generations_follow_their_plan(chosen, rows, options):
    model = small_model("llama")
    of_law = {name: options[name] for name in ("rule", "temperature") if name in options}
    method = PaSS(slots_for(model), rows=rows, **{name: options[name] for name in options.keys() - of_law.keys()})
    generate(model, PROMPTS[0], method, max_new_tokens=8, **of_law)
    assert not chosen


def test_batches_follow_their_plan(chosen):
    model = small_model("llama")
    generate(model, PROMPTS[:2].flatten(0, 1), PaSS(slots_for(model), rows=8), max_new_tokens=8)
    assert not chosen


def test_a_step_behind_a_candidate_takes_the_slots_of_the_root(monkeypatch):
    """Without them it would have no candidates."""
    seen, groups = [], LookaheadDrafter._groups

    def spy(self, batch):
        found = groups(self, batch)
        step = batch.steps[0]
        if step is not None and batch.last_nodes[0] and batch.levels[0]:
            seen.append((len(step.tree.group_rows(batch.last_nodes[0])), [len(rows) for rows in found[1]]))
        return found

    monkeypatch.setattr(from_lookahead.LookaheadDrafter, "_groups", spy)
    model = small_model("llama")
    for prompt in PROMPTS:
        generate(model, prompt, PaSS(slots_for(model), rows=8), max_new_tokens=40, eos_token_id=[])
    assert any(own == 0 and found and found[0] > 0 for own, found in seen), seen
