"""Candidates from look-ahead slots: every kind of draft fills all children of a tree."""

from itertools import product

import pytest
import torch
from support.generation import Monotone, assert_as_alone, slots_for
from support.grammars import random_automaton
from support.small_models import VOCABULARY, ragged_prompts

from pass_ext import LookaheadEmbedding, PaSS, Tree, draft_sample, generate
from pass_ext.decoding.drafting.slot_tokens import TreeFiller, rows_of
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.reference.recall import recall

STAR = Tree([-1] + [0] * 70 + [1, 1])


def test_rows_are_copied_as_indexing_does():
    for dtype, columns in product((torch.float32, torch.bfloat16), (64, 63)):
        logits = torch.randn(9, columns).to(dtype)
        for x in (logits, torch.randn(9, 2 * columns).to(dtype)[:, ::2]):
            rows = [[4, 5], [8, 8], [0, 1]]
            assert torch.equal(rows_of(x, rows), x[torch.tensor(rows)])


@pytest.mark.parametrize("vocabulary", [50, 200])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_more_children_than_a_shortlist_or_a_vocabulary_has(vocabulary, rank, temperature):
    torch.manual_seed(0)
    table, slots = torch.randn(vocabulary, 16), torch.randn(2, 2, vocabulary)
    lookahead = LookaheadEmbedding.from_table(2, table, rank=rank)
    if rank:
        torch.nn.init.normal_(lookahead.transition_right, std=0.01)
    sampling = SamplingParams(temperature=temperature, seeds=3).for_batch(2, torch.device("cpu"))
    filler = TreeFiller(lookahead, STAR, table, sampling, "coupled")
    with torch.no_grad():
        drafted = filler.fill(slots, [0, 1], [3, 4], [5, 6]).candidates
    for part, logits in zip(drafted, slots, strict=True):
        own = part.tokens
        known = [token for token in own[:70] if token >= 0]
        assert len(set(known)) == len(known) == min(70, vocabulary), (
            "every child is another token, while there are some"
        )
        assert own[len(known) : 70] == [-1] * (70 - len(known))
        assert own[70] >= 0 and own[71] >= 0
        if not temperature and not rank:
            assert known == logits[0].topk(len(known)).indices.tolist()


@pytest.mark.parametrize("rank", [0, 4])
def test_candidates_use_the_noise_of_their_own_positions(rank):
    """If a slot's logits are the target's, the first candidate is the token that the target will draw there."""
    torch.manual_seed(1)
    vocabulary, depth, positions = 50, 3, [5, 40]
    table, slots = torch.randn(vocabulary, 16), torch.randn(2, depth, vocabulary)
    lookahead = LookaheadEmbedding.from_table(depth, table, rank=rank)  # rank 4: untrained, so it adds nothing
    sampling = SamplingParams(temperature=1.0, seeds=[3, 8]).for_batch(2, torch.device("cpu"))
    filler = TreeFiller(lookahead, Tree.from_branching((2, 2, 1)), table, sampling, "coupled")
    with torch.no_grad():
        drafted = filler.fill(slots, [0, 1], [3, 4], positions).candidates
    for part, logits, position, seed in zip(drafted, slots, positions, (3, 8), strict=True):
        tokens = part.tokens
        at = position + 1 + torch.arange(depth)
        drawn = draft_sample(logits, 1, mode="coupled", temperature=1.0, seeds=seed, positions=at)[0]
        assert [tokens[0], tokens[2], tokens[6]] == drawn[:, 0].tolist()


def test_slots_with_the_models_logits_are_always_right():
    """Coupled candidates are then exactly the tokens that the model draws."""
    method = PaSS(LookaheadEmbedding.from_table(3, Monotone.embedding), tree=Tree.chain(3), rows=16)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    got = generate(Monotone(), ids, method, max_new_tokens=13, temperature=1.0, seeds=[1, 2], rule="coupled")
    alone = generate(Monotone(), ids, max_new_tokens=13, temperature=1.0, seeds=[1, 2])
    assert torch.equal(got.sequences, alone.sequences)
    assert got.stats.model_calls == 4, (
        "the prompts' own token, and three steps of three candidates and the target's token"
    )


@pytest.mark.parametrize("rank", [0, 4])
def test_rules_that_divide_by_the_drafts_distribution_get_its_logits(rank):
    """Each candidate's parent names the row that it was drawn from: its slot's logits plus the parent token's transitions."""
    torch.manual_seed(4)
    table, slots = torch.randn(50, 16), torch.randn(2, 2, 50)
    lookahead = LookaheadEmbedding.from_table(2, table, rank=rank)
    if rank:
        torch.nn.init.normal_(lookahead.transition_right)
    sampling = SamplingParams(temperature=1.0, seeds=3).for_batch(2, torch.device("cpu"))
    tree = Tree.from_branching((2, 1))
    with torch.no_grad():
        for rule in ("coupled", "typical", "coupled_inverse"):
            told = TreeFiller(lookahead, tree, table, sampling, rule).fill(slots, [0, 1], [3, 4], [5, 6])
            assert told.draft_logits is None and all(part.draft_rows is None for part in told.candidates), rule
        told = TreeFiller(lookahead, tree, table, sampling, "rejection").fill(slots, [0, 1], [3, 4], [5, 6])
        left, right = lookahead.transition_tables(table) if rank else (torch.zeros(50, 1), torch.zeros(50, 1))
    for part, root, logits in zip(told.candidates, (3, 4), slots, strict=True):
        tokens, rows = [root, *part.tokens], part.draft_rows
        for node, depth in ((0, 0), (1, 1), (2, 1)):
            expected = (logits[depth] + left[tokens[node]] @ right.t()).log_softmax(0)
            torch.testing.assert_close(told.draft_logits[rows[node]].log_softmax(0), expected)
        assert rows[3:] == [-1, -1], "leaves have no children"


@pytest.mark.parametrize("recalls", [False, True], ids=["", "recalls"])
def test_with_transitions_candidates_are_drawn_among_the_best_of_their_slot(recalls):
    """Tokens of a row have their scores with transitions and recall, all others none; memory of the fill before leaves nothing
    after."""
    torch.manual_seed(6)
    table, tree = torch.randn(200, 16), Tree.from_branching((2, 1, 2, 1))
    lookahead = LookaheadEmbedding.from_table(4, table, rank=4)
    torch.nn.init.normal_(lookahead.transition_right)
    sampling = SamplingParams(temperature=1.0, seeds=3).for_batch(2, torch.device("cpu"))
    filler = TreeFiller(lookahead, tree, table, sampling, "rejection", recalls=recalls)
    with torch.no_grad():
        left, right = lookahead.transition_tables(table)
        for fill in range(3):
            slots = torch.randn(2, 4, 200)
            slots[1, 1, 7:] = -torch.inf  # fewer tokens than the list has
            # Few tokens, so that much is recalled; texts may be shorter than the path that is looked up.
            texts = slots.topk(3).indices[:, :1].repeat(1, 3, 3).flatten(1)[:, :9].contiguous()
            lengths = [1 + 3 * fill, 7]
            roots = [text[n - 1] for text, n in zip(texts.tolist(), lengths, strict=True)]
            told = filler.fill(slots, [0, 1], roots, [n - 1 for n in lengths], texts)
            raised = 0
            for part, root, logits, text, length in zip(
                told.candidates, roots, slots, texts.tolist(), lengths, strict=True
            ):
                rows, tokens, known = part.draft_rows, [root, *part.tokens], text[:length]
                for node in range(tree.num_nodes):
                    if not tree.children(node):
                        assert rows[node] == -1
                        continue
                    row = logits[tree.depths[node]]
                    best = row.topk(64).indices
                    best = best[row[best] > -torch.inf]
                    expected = torch.full((200,), -torch.inf)
                    expected[best] = (row + left[tokens[node]] @ right.t())[best]
                    if recalls:
                        path = [tokens[above] for above in tree.path(node)[1:]]
                        more = recall(known, [*known, *path], best.tolist())
                        expected[best] += more
                        raised += int((more > 0).any())
                    torch.testing.assert_close(
                        told.draft_logits[rows[node]].log_softmax(0), expected.log_softmax(0), rtol=1e-5, atol=1e-5
                    )
            assert raised > 1 or not recalls or not fill


def test_transition_scores_are_made_anew_when_their_parameters_change():
    torch.manual_seed(5)
    table, slots = torch.randn(50, 16), torch.randn(1, 2, 50)
    lookahead = LookaheadEmbedding.from_table(2, table, rank=4)
    sampling = SamplingParams(temperature=0.0).for_batch(1, torch.device("cpu"))

    def draft():
        filled = TreeFiller(lookahead, Tree.chain(2), table, sampling, "coupled").fill(slots, [0], [3], [5])
        return filled.candidates[0].tokens

    with torch.no_grad():
        first = draft()
        assert draft() == first
        lookahead.transition_left.normal_(std=10)
        lookahead.transition_right.normal_(std=10)
        changed = draft()
        assert changed != first and draft() == changed


def test_slots_by_name_or_path_are_those_that_are_loaded(tmp_path):
    model, ids, file = Monotone(), torch.tensor([[3, 4]]), tmp_path / "mine.safetensors"
    slots = LookaheadEmbedding.from_table(2, model.embedding)
    slots.save(file)
    options = dict(tree=Tree.chain(2), rows=9)
    expected = generate(model, ids, PaSS(slots, **options), max_new_tokens=8)
    for given in (file, str(file)):
        method = PaSS(given, **options)
        assert torch.equal(method.lookahead.weight, slots.weight)
        made = generate(model, ids, method, max_new_tokens=8)
        assert torch.equal(made.sequences, expected.sequences) and made.stats.num_draft_tokens > 0
    shipped = PaSS("smollm2-135m-instruct").lookahead
    assert torch.equal(shipped.weight, LookaheadEmbedding.from_pretrained("smollm2-135m-instruct").weight)
    with pytest.raises(ValueError, match="'gpt-9' is neither a file nor one of the shipped names"):
        PaSS("gpt-9")
    with pytest.raises(TypeError, match="lookahead must be a LookaheadEmbedding, or the name or path of one, got int"):
        PaSS(3)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'lookahead'"):
        PaSS()


@pytest.mark.parametrize(
    ("rule", "rank", "rows", "has_grammar"),
    [
        ("coupled", 0, "fixed", False),
        ("coupled", 3, "fixed", True),
        ("coupled", 0, "chosen", False),
        ("coupled", 3, "chosen", True),
        ("coupled", 3, "recalled", False),
        ("rejection", 0, "fixed", False),
        ("rejection", 3, "recalled", True),
        ("traversal", 3, "fixed", False),
        ("traversal", 0, "recalled", True),
    ],
)
def test_a_request_is_drafted_for_in_a_batch_as_alone(llama, rule, rank, rows, has_grammar):
    """Requests that differ in all they can, and some of which end early."""
    ids, mask = ragged_prompts(4, seed=2)
    coldest = 0.0 if rule == "coupled" else 0.2  # alone, a greedy request has candidates of that rule
    of_each = dict(temperature=[0.3, 1.3, coldest, 0.6], top_k=[0, 5, 3, 20], seeds=[3, 50, 7, 1])
    if has_grammar:
        of_each["grammar"] = [*(random_automaton(VOCABULARY, seed=seed) for seed in range(3)), None]
    tree = None if rows == "chosen" else Tree.from_branching((6, 3, 1))
    method = PaSS(slots_for(llama, 3, rank=rank), tree=tree, rows=64, recall=rows == "recalled")
    options = dict(rule=rule, max_new_tokens=30, eos_token_id=[] if has_grammar else list(range(5, 12)))
    got = assert_as_alone(llama, method, ids, mask, of_each, **options)
    assert got.stats.num_accepted_tokens > 4 and (has_grammar or min(got.lengths) < max(got.lengths))
