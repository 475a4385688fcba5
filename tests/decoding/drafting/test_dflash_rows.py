"""DFlash with rows="auto": a tree has as many rows as are worth their cost, by the formula, and texts are Plain's."""

import dataclasses
import functools
import itertools
import time

import pytest
import torch

pytest.importorskip("transformers")

from support.dflash_files import block_rows, drafted, place_scores, settings, states_of, tensors, written
from support.generation import unpadded
from support.recorded import PauseAt, Recorded
from support.small_models import ragged_prompts, small_model, whole_prompts

from pass_ext import Plain, Session, Tree, generate, load_drafter
from pass_ext.decoding.drafting import drafter
from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.drafting.heads.best_paths import best_paths
from pass_ext.decoding.planning.step_times import StepTimes

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 40  # more than a place offers
LIMITS = dict(max_new_tokens=24, eos_token_id=[])
KINDS = ("dflash", "dspark", "dflash2")
DEAR, CHEAP = [0.12 * rows for rows in range(1, 33)], [0.004 * rows for rows in range(1, 33)]


class Costed(PauseAt):
    """A pace that never pauses, with these costs of rows; only the first step asks for them."""

    def __init__(self, costs):
        super().__init__([])
        self.given = [costs]

    def costs(self, most, requests):
        return self.given.pop()[:most] if self.given else None


@pytest.fixture
def head(request, tmp_path):
    """The target, the head's method and its tensors."""
    target = small_model("llama", vocab_size=VOCABULARY, num_hidden_layers=3)
    config = settings(request.param, vocabulary=VOCABULARY, block=8)
    found = tensors(request.param, 64, VOCABULARY, seed=1, sharpness=1.4)
    method = load_drafter(written(tmp_path / "head", config, found), target)
    return request.param, target, dataclasses.replace(method, rows="auto"), found


def best_tree(kind, found, model, text, levels, costs, most=32):
    """The paths of tokens that are worth their cost, by their chances: without a heap, all open ones compared."""
    table, head = model.get_input_embeddings().weight, model.lm_head.weight
    given = found, kind, states_of(model, text[:-1]), text[-1], table
    options = dict(first=0 if kind == "dspark" else 1, block=8)
    chain, rows = drafted(*given, head, levels, **options), block_rows(*given, **options)

    @functools.cache
    def below(path):
        """The chances of the tokens that a place offers."""
        if len(path) == len(chain):
            return {}
        row, own = rows[len(path)], chain[len(path)]
        logits = head @ row
        offered = [own, *[token for token in logits.argsort(descending=True).tolist() if token != own][:15]]
        scores = place_scores(found, kind, row, [text[-1], *path][-1], logits, VOCABULARY)
        mass = 1.0 if kind == "dflash2" else logits[offered].exp().sum() / logits.exp().sum()
        return dict(zip(offered, (scores[offered].softmax(-1) * mass).tolist(), strict=True))

    reach = {(): 1.0}
    while len(reach) < most:
        options = {(*path, token): reach[path] * chance for path in reach for token, chance in below(path).items()}
        best = max((path for path in options if path not in reach), key=options.get, default=None)
        if best is None or options[best] == 0:
            break
        reach[best] = options[best]
    worth = [gained - step_cost for gained, step_cost in zip(itertools.accumulate(reach.values()), costs, strict=False)]
    return set([*reach][1 : max(range(2, len(reach) + 1), key=lambda rows: worth[rows - 1])])


def paths_of(candidates):
    nodes = range(1, candidates.tree.num_nodes)
    return {tuple(candidates.tokens[v - 1] for v in candidates.tree.path(node)[1:]) for node in nodes}


def calls_by_the_formula(kind, found, model, text, prompt, costs):
    """The model's calls for a greedy text whose trees cost so much."""
    length, calls = prompt + 1, 1
    while length < len(text):
        left = len(text) - length - 1
        tree = best_tree(kind, found, model, text[:length], left, costs) if left else ()
        right = 0
        while right < left and tuple(text[length : length + right + 1]) in tree:
            right += 1
        length, calls = length + right + 1, calls + 1
    return calls


@pytest.mark.parametrize("head", KINDS, indirect=True)
def test_trees_have_the_rows_that_are_worth_their_cost(head, monkeypatch):
    """Trees and calls are those of the formula at these costs, and not of it at others."""
    kind, target, method, found = head
    ids = whole_prompts(1, 20, vocabulary=VOCABULARY)
    plain = generate(target, ids, Plain(), **LIMITS).sequences
    sizes = {}
    for name, costs in (("dear", DEAR), ("cheap", CHEAP)):
        monkeypatch.setattr(DraftContext, "pace", lambda self, costs=costs, **_: Costed(costs))
        got = generate(target, ids, recorded := Recorded(method), **LIMITS)
        assert torch.equal(got.sequences, plain)
        for text, candidates in recorded.of():
            assert paths_of(candidates) == best_tree(kind, found, target, text, plain.shape[1] - len(text) - 1, costs)
        assert got.stats.model_calls == calls_by_the_formula(kind, found, target, plain[0].tolist(), 20, costs)
        sizes[name] = [candidates.tree.num_nodes for _, candidates in recorded.of()]
    assert max(sizes["dear"]) < min(sizes["cheap"][:-3]) and max(sizes["cheap"]) <= 32
    text, candidates = recorded.of()[0]
    assert paths_of(candidates) != best_tree(kind, found, target, text, 7, DEAR), "costs are heard"


@pytest.mark.parametrize("head", KINDS, indirect=True)
@pytest.mark.parametrize("count", [1, 3, 8])
def test_texts_are_plains(head, count, monkeypatch):
    """Greedy and by seed, ragged, each request with its own rows."""
    _, target, method, _ = head
    monkeypatch.setattr(DraftContext, "pace", lambda self, **_: Costed([0.05 * rows for rows in range(1, 33)]))
    ids, mask = ragged_prompts(count, vocabulary=VOCABULARY)
    warm = [0.9, 0.0, 1.3, 0.6, 1.0, 0.2, 0.0, 0.8][:count]
    for options in ({}, dict(temperature=warm, seeds=list(range(count)))):
        plain = generate(target, ids, Plain(), attention_mask=mask, **options, **LIMITS)
        recorded = Recorded(method)
        got = generate(target, ids, recorded, attention_mask=mask, **options, **LIMITS)
        assert torch.equal(got.sequences, plain.sequences)
        sizes = {part.tree.num_nodes for _, parts in recorded.steps for part in parts if part is not None}
        assert len(sizes) > 1 and got.stats.model_calls <= plain.stats.model_calls
    assert len(unpadded(got.sequences, mask)) == count


class Clock:
    """Made-up time, which only the target's calls move: a first row's seconds and those of each further one."""

    def __init__(self, monkeypatch, target, first, further):
        self.now, call = 1e4, Session._forward

        def seconds(rows):
            return first + further * (rows - 1)

        def timed(session, trees, ids, *given, **named):
            if session.model.model is target:
                self.now += seconds(len(ids))
            return call(session, trees, ids, *given, **named)

        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(Session, "_forward", timed)
        table = StepTimes((1, 64), (seconds(1), seconds(64)))
        monkeypatch.setattr(drafter, "measured_times", lambda *_, **__: table)


@pytest.mark.parametrize("head", ["dflash"], indirect=True)
def test_rows_follow_measured_times(head, monkeypatch):
    """The dearer a row, the fewer a step has; where rows take as long as calls and drafts are wrong, drafting pauses."""
    _, target, method, _ = head
    ids, mean = whole_prompts(1, 20, vocabulary=VOCABULARY), []
    plain = generate(target, ids, Plain(), max_new_tokens=60, eos_token_id=[])
    for further in (0.0005, 0.004, 0.2):
        with monkeypatch.context() as patch:
            Clock(patch, target, 0.1, further)
            got = generate(target, ids, recorded := Recorded(method), max_new_tokens=60, eos_token_id=[])
        assert torch.equal(got.sequences, plain.sequences)
        mean.append(sum(len(drafts) for drafts in recorded.tokens()) / len(recorded.tokens()))
    assert mean[0] > 1.3 * mean[1] > 1.3 and mean[2] == 1
    assert len(recorded.tokens()) < 20, "it pauses"


@pytest.mark.parametrize("head", ["dflash"], indirect=True)
def test_costs_come_with_the_first_drafts_after_a_pause_and_are_kept(head, monkeypatch):
    """The pace gives some at the fourth step alone; in the third one nothing is drafted."""

    class Fourth(PauseAt):
        def costs(self, most, requests):
            return [0.5 * rows for rows in range(1, most + 1)] if self.step == 3 else None

    monkeypatch.setattr(DraftContext, "pace", lambda self, **_: Fourth([2]))
    _, target, method, _ = head
    recorded = Recorded(method)
    generate(target, whole_prompts(1, 20, vocabulary=VOCABULARY), recorded, **LIMITS)
    sizes = [0 if parts[0] is None else parts[0].tree.num_nodes for _, parts in recorded.steps]
    assert sizes[:2] == [32, 32] and set(sizes[2:-1]) == {2}, "the third step asks no drafter"


@pytest.mark.parametrize("head", ["dflash"], indirect=True)
def test_rules_that_take_no_tree_refuse_it(head):
    _, target, method, _ = head
    with pytest.raises(ValueError, match=r"rows must be None, a chain, for rule 'rejection'.* got 'auto'"):
        generate(target, torch.tensor([[5, 6, 7]]), method, rule="rejection", temperature=1.0, **LIMITS)
    with pytest.raises(ValueError, match='DFlash: rows, if not None or "auto", must be'):
        dataclasses.replace(method, rows="all")


def test_one_draft_is_taken_whatever_rows_cost():
    """The head's call is made by then; a step without a draft would count as a plain one."""
    lattice = [[5, 3], [2, 9]], [[[0.6, 0.3]], [[0.5, 0.4], [0.9, 0.0]]]
    assert best_paths(*lattice, 9, [1.0, 9.0, 99.0] + [999.0] * 9) == ([-1, 0], [-1, 5])
    parents, tokens = best_paths(*lattice, 9, [0.1] * 10)
    assert (parents, tokens) == best_paths(*lattice, 9) and len(Tree(parents)) == 6
    assert best_paths([], [], 9, [1.0] * 9) == ([-1], [-1])
