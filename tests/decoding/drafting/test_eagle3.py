"""EAGLE-3 heads: their drafts are those of the formula, token by token, and texts are Plain's."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import BUSHY
from support.heads import MASKED, VARIANTS, PlainEagle3, eagle3_checkpoint, learn, plain_loop
from support.recorded import PauseAt, Recorded
from support.small_models import ragged_prompts, small_model

from pass_ext import NGram, Plain, Session, Tree, generate, load_drafter
from pass_ext.drafting import Eagle3

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = dict(max_new_tokens=24, eos_token_id=[])


@pytest.fixture(scope="module")
def target():
    return small_model("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(target, tmp_path_factory):
    """The method and the formula of a head that is often right: it has learnt this target's texts."""
    folder = tmp_path_factory.mktemp("eagle3") / "head"
    config, tensors = eagle3_checkpoint(folder, target, drafted=90, sharpness=1.0, norm_before_residual=True)
    plain = PlainEagle3(config, tensors, target)
    ids, mask = ragged_prompts(4, longest=12, seed=5)
    texts = generate(target, ids, attention_mask=mask, **LIMITS).sequences
    learn(plain, [text[own:].tolist() for text, own in zip(texts, 12 - mask.sum(1), strict=True)])
    method = load_drafter(folder, target)
    method.head.load_state_dict(plain.tensors)
    return replace(method, length=4), plain


# ---- the drafts ----


@pytest.mark.parametrize("form", ["speculators", "original"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_are_those_of_the_formula(variant, form, target, tmp_path):
    config, tensors = eagle3_checkpoint(tmp_path / "head", target, form=form, **VARIANTS[variant])
    plain, method = PlainEagle3(config, tensors, target), load_drafter(tmp_path / "head", target)
    assert method == Eagle3(method.head, length=3 if form == "speculators" else 4)
    prompt = torch.randint(3, 97, (1, 11), generator=torch.Generator().manual_seed(1))
    got = generate(target, prompt, recorded := Recorded(method), **LIMITS)
    text, calls, drafts = plain_loop(plain, target, prompt[0].tolist(), 24, method.length)
    assert got.sequences[0].tolist() == text
    assert got.stats.model_calls == calls
    assert recorded.tokens() == drafts


def test_a_head_that_is_often_right_takes_the_calls_of_a_plain_loop(target, head):
    method, plain = head
    recorded = Recorded(method)
    ids, mask = ragged_prompts(4, longest=12, seed=5)
    got = generate(target, ids, method, attention_mask=mask, **LIMITS)
    for b in range(4):
        prompt = ids[b][mask[b].bool()]
        alone = generate(target, prompt[None], recorded, **LIMITS)
        text, calls, drafts = plain_loop(plain, target, prompt.tolist(), 24, 4)
        assert alone.sequences[0].tolist() == text and got.sequences[b][-24:].tolist() == text[-24:]
        assert alone.stats.model_calls == calls
        assert recorded.tokens() == drafts
    assert got.stats.mean_acceptance_length > 1.8


def test_one_call_drafts_all_levels_of_a_head_with_masks(target, tmp_path):
    """P-EAGLE: drafts are those of the formula, in ragged batches of chains and trees, and a step has one call of the head."""
    config, tensors = eagle3_checkpoint(tmp_path, target, layers=2, norm_before_residual=True, **MASKED)
    plain, method, calls = PlainEagle3(config, tensors, target), load_drafter(tmp_path, target), []
    method.head.forward = lambda *rows, true=method.head.forward: calls.append(1) or true(*rows)
    ids, mask = ragged_prompts(3, longest=30, seed=2)
    want = generate(target, ids, Plain(), attention_mask=mask, **LIMITS).sequences
    got = generate(target, ids, chains := Recorded(replace(method, length=4)), attention_mask=mask, **LIMITS)
    assert torch.equal(got.sequences, want)
    assert len(calls) <= got.stats.model_calls, "one for each step, and one for the prompts"
    for texts, parts in chains.steps[::6]:
        for text, part in zip(texts, parts, strict=True):
            assert part is None or part.tokens == plain.chain(text, part.tree.max_depth)
    got = generate(target, ids, trees := Recorded(replace(method, branching=(2, 2))), attention_mask=mask, **LIMITS)
    assert torch.equal(got.sequences, want)
    for text, part in zip(*trees.steps[2], strict=True):
        first, second = plain.logits(text).topk(2).indices.tolist(), plain.logits(text, [0]).topk(2).indices.tolist()
        assert part.tokens == [*first, *second, *second]


@pytest.mark.parametrize("tree", [BUSHY, Tree.from_branching((3, 2, 1))], ids=["bushy", "branching"])
def test_trees_are_those_of_the_formula(tree, target, head):
    """Child k of a node is the token of rank k after the node's path."""
    method, plain = head
    trees = Recorded(replace(method, branching=tree.breadth_first()[0]))
    ids, mask = ragged_prompts(3, longest=9, seed=2)
    want = generate(target, ids, Plain(), attention_mask=mask, **LIMITS).sequences
    got = generate(target, ids, trees, attention_mask=mask, **LIMITS)
    assert torch.equal(got.sequences, want)
    compared = 0
    for texts, parts in trees.steps[1:8:3]:
        for text, part in zip(texts, parts, strict=True):
            for node in range(part.tree.num_nodes if part else 0):
                children = part.tree.children(node)
                path = [part.tokens[above - 1] for above in part.tree.path(node)[1:]]
                best = plain.logits(text, path).topk(max(1, len(children))).indices.tolist()
                assert [part.tokens[child - 1] for child in children] == best[: len(children)]
                compared += len(children)
    assert compared > 40


# ---- the text ----


def test_texts_are_plains(target, head):
    """Of long chains and trees, in a batch that ends at different places; test_heads.py has the rest."""
    ids, mask = ragged_prompts(8, longest=12, seed=8)
    warm = dict(temperature=[0.0, 0.3, 0.7, 1.0, 1.3, 0.9, 0.5, 0.1], top_k=20, top_p=0.95, seeds=list(range(8)))
    for sampling in ({}, warm):
        options = dict(attention_mask=mask, max_new_tokens=20, eos_token_id=[5, 9, 33], **sampling)
        want = generate(target, ids, Plain(), **options)
        for method in (replace(head[0], length=7), replace(head[0], branching=(3, 2, 1))):
            got = generate(target, ids, method, **options)
            assert torch.equal(got.sequences, want.sequences) and got.lengths == want.lengths
            assert got.stats.num_draft_tokens > 10


@pytest.mark.parametrize("ngram", [None, NGram(longest=2, shortest=1, tokens=5)], ids=["", "with n-grams"])
def test_drafts_depend_on_the_text_alone(ngram, target, head):
    """Those of a batch, whose requests accept different numbers of tokens and those of others, are the formula's."""
    recorded, plain = Recorded(replace(head[0], ngram=ngram)), head[1]
    ids, mask = ragged_prompts(4, longest=12, seed=5)
    got = generate(target, ids, recorded, attention_mask=mask, **LIMITS)
    assert len({int(count) for count in got.lengths}) == 1 and got.stats.num_accepted_tokens > 10
    compared = 0
    for texts, parts in recorded.steps[1::3]:
        for text, part in zip(texts, parts, strict=True):
            if part is not None:
                assert part.tokens == plain.chain(text, part.tree.max_depth)
                compared += len(part.tokens)
    assert compared > 20


def test_prompts_longer_than_what_is_read_at_once(target, head):
    recorded, plain = Recorded(head[0]), head[1]
    ids, mask = ragged_prompts(2, longest=700, seed=1)
    options = dict(attention_mask=mask, max_new_tokens=8, eos_token_id=[])
    want = generate(target, ids, Plain(), **options).sequences
    assert torch.equal(generate(target, ids, recorded, **options).sequences, want)
    texts, parts = recorded.steps[0]
    for text, part in zip(texts, parts, strict=True):
        assert part.tokens == plain.chain(text, 4)


def test_a_session_that_goes_on_drafts_from_the_states_of_the_new_tokens(target, head):
    """What `past` held has no states: the head's text begins after it."""
    method, plain = head
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(4))
    session = Session(target, capacity=80)
    first = generate(target, ids, method, session=session, max_new_tokens=10, eos_token_id=[]).sequences
    held = first.shape[1] - 1
    longer = torch.cat((first, torch.tensor([[7, 8, 9, 10]] * 2)), 1)
    past = [tuple(cache[:, :held].clone() for cache in pair) for pair in session.caches], held
    want = generate(target, longer, Plain(), **LIMITS).sequences
    got = generate(target, longer, recorded := Recorded(method), session=Session(target, past=past), **LIMITS)
    assert torch.equal(got.sequences, want)
    for texts, parts in recorded.steps[:4]:
        for text, part in zip(texts, parts, strict=True):
            for place, token in enumerate(part.tokens):
                assert token == int(plain.logits(text, part.tokens[:place], skipped=held).argmax())


@pytest.mark.parametrize("count", [1, 3])
def test_pauses_keep_the_states(count, target, head):
    """While drafting pauses the head takes the states of each step, and drafts on from all of them. Of one text it is not
    asked meanwhile: the device makes these steps."""
    method, plain = head
    recorded = Recorded(method, pace=PauseAt(range(3, 16)))
    ids, mask = ragged_prompts(count, longest=9, seed=2)
    options = dict(attention_mask=mask, max_new_tokens=40, eos_token_id=[])
    want = generate(target, ids, Plain(), **options).sequences
    assert torch.equal(generate(target, ids, recorded, **options).sequences, want)
    drafts = [any(part is not None for part in parts) for _, parts in recorded.steps]
    pauses = [step for step, drafted in enumerate(drafts) if not drafted and any(drafts[step:])]
    if count == 1:
        lengths = [len(text) for (text,), _ in recorded.steps]
        assert not pauses and lengths[3] - lengths[2] > 13
    else:
        assert len(pauses) == 13 and pauses == list(range(pauses[0], pauses[0] + 13))
    for text, part in zip(*recorded.steps[pauses[-1] + 1 if pauses else 3], strict=True):
        if part is not None:
            assert part.tokens == plain.chain(text, part.tree.max_depth)
