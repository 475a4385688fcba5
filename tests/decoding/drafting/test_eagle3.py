"""EAGLE-3 heads: their drafts are those of the formula, token by token, and texts are Plain's."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import BUSHY
from support.heads import VARIANTS, PlainEagle3, eagle3_checkpoint, plain_loop
from support.small_models import ragged_prompts, small_model

from pass_ext import Eagle3, NGram, Plain, Session, Tree, generate, load_drafter
from pass_ext.decoding.drafting.heads.head_drafter import HeadDrafter

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = dict(max_new_tokens=24, eos_token_id=[])


@pytest.fixture(scope="module")
def target():
    return small_model("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(target, tmp_path_factory):
    """The method and the formula of a head that is often right: it was trained on this target's texts."""
    folder = tmp_path_factory.mktemp("eagle3") / "head"
    config, tensors = eagle3_checkpoint(folder, target, sharpness=1.0, norm_before_residual=True)
    ids, _ = ragged_prompts(8, longest=12, seed=5)
    texts = generate(target, ids.clamp(min=3), max_new_tokens=28, eos_token_id=[]).sequences
    tensors = trained(PlainEagle3(config, tensors, target), texts)
    method = load_drafter(folder, target)
    method.head.load_state_dict(tensors)
    return replace(method, length=4), PlainEagle3(config, tensors, target)


def trained(plain, texts):
    """The tensors after some steps on texts, as drafts of the first level."""
    names = [name for name, tensor in plain.tensors.items() if tensor.is_floating_point()]
    for name in names:
        plain.tensors[name].requires_grad_(True)
    optimizer = torch.optim.Adam([plain.tensors[name] for name in names], 0.01)
    for _ in range(40):
        loss = 0
        for text in texts.tolist():
            logits, _ = plain.rows(torch.tensor(text[1:]), plain.taken(plain.hidden(text)))
            mapped = torch.full((len(text) - 1, 97), -30.0).index_copy(1, plain.tokens, logits)
            loss = loss + torch.nn.functional.cross_entropy(mapped[:-1], torch.tensor(text[2:]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in plain.tensors.items()}


@pytest.fixture
def drafted(monkeypatch):
    """The candidates of every step, with the texts before it."""
    found, true = [], HeadDrafter.propose

    def propose(self, batch):
        proposal = true(self, batch)
        found.append(([list(text) for text in batch.texts], proposal.candidates))
        return proposal

    monkeypatch.setattr(HeadDrafter, "propose", propose)
    return found


# ---- the drafts ----


@pytest.mark.parametrize("form", ["speculators", "original"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_are_those_of_the_formula(variant, form, target, tmp_path, drafted):
    config, tensors = eagle3_checkpoint(tmp_path / "head", target, form=form, **VARIANTS[variant])
    plain, method = PlainEagle3(config, tensors, target), load_drafter(tmp_path / "head", target)
    assert method == Eagle3(method.head, length=3 if form == "speculators" else 4)
    prompt = torch.randint(3, 97, (1, 11), generator=torch.Generator().manual_seed(1))
    got = generate(target, prompt, method, **LIMITS)
    text, calls, drafts = plain_loop(plain, target, prompt[0].tolist(), 24, method.length)
    assert got.sequences[0].tolist() == text
    assert got.stats.model_calls == calls
    assert [part[0].tokens if part[0] else [] for _, part in drafted] == drafts


def test_a_head_that_is_often_right_takes_the_calls_of_a_plain_loop(target, head, drafted):
    method, plain = head
    ids, mask = ragged_prompts(8, longest=12, seed=5)
    got = generate(target, ids, method, attention_mask=mask, **LIMITS)
    for b in range(8):
        drafted.clear()
        prompt = ids[b][mask[b].bool()]
        alone = generate(target, prompt[None], method, **LIMITS)
        text, calls, drafts = plain_loop(plain, target, prompt.tolist(), 24, 4)
        assert alone.sequences[0].tolist() == text and got.sequences[b][-24:].tolist() == text[-24:]
        assert alone.stats.model_calls == calls
        assert [part[0].tokens if part[0] else [] for _, part in drafted] == drafts
    assert got.stats.mean_acceptance_length > 1.8


@pytest.mark.parametrize("tree", [BUSHY, Tree.from_branching((3, 2, 1))], ids=["bushy", "branching"])
def test_trees_are_those_of_the_formula(tree, target, head, drafted):
    """Child k of a node is the token of rank k after the node's path."""
    method, plain = head
    ids, mask = ragged_prompts(3, longest=9, seed=2)
    want = generate(target, ids, Plain(), attention_mask=mask, **LIMITS).sequences
    got = generate(target, ids, replace(method, branching=tree.breadth_first()[0]), attention_mask=mask, **LIMITS)
    assert torch.equal(got.sequences, want)
    compared = 0
    for texts, parts in drafted[1:8:3]:
        for text, part in zip(texts, parts, strict=True):
            for node in range(part.tree.num_nodes if part else 0):
                children = part.tree.children(node)
                path = [part.tokens[above - 1] for above in part.tree.path(node)[1:]]
                best = plain.logits(text, path).topk(max(1, len(children))).indices.tolist()
                assert [part.tokens[child - 1] for child in children] == best[: len(children)]
                compared += len(children)
    assert compared > 40
