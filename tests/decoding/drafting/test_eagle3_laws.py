"""Texts of a head with fewer tokens than the target have the target's distribution: by enumeration on a vocabulary of 5 of
which the head knows 3, as test_speculative_laws.py has it for draft models, and by chi-square of sampled texts.
"""

import itertools

import pytest
import torch

pytest.importorskip("transformers")

from support.chi_square import chi_square_tail, counted
from support.drafted import PROMPT, Judged, emitted, replayed, variation
from support.enumeration import EXACT, FAULTY, World, outcomes
from support.generation import distribution_of_texts
from support.heads import PlainEagle3, eagle3_checkpoint
from support.small_models import small_model

import pass_ext.decoding.drafting.from_draft_model as model_drafter
from pass_ext import Tree, generate, load_drafter
from pass_ext.decoding.drafting.candidates import Batch
from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.drafting.heads.head import Head
from pass_ext.decoding.drafting.heads.head_drafter import HeadDrafter
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.decoding.session.session import Session
from pass_ext.drafting import Eagle3

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, DRAFTED = 5, 3


@pytest.fixture(scope="module")
def target():
    return small_model("llama", vocab_size=VOCABULARY, num_hidden_layers=4, sharpness=1.5)


@pytest.fixture(scope="module")
def heads(target, tmp_path_factory):
    """The module of a head, and its formula."""
    folder = tmp_path_factory.mktemp("eagle3")
    config, tensors = eagle3_checkpoint(folder, target, drafted=DRAFTED, sharpness=1.0, norm_before_residual=True)
    return load_drafter(folder, target).head, PlainEagle3(config, tensors, target)


def drafted_once(target, heads, tree, rule, draw):
    """One step's candidates after PROMPT, by the real drafter with replayed draws, and the logits that they were drawn from."""
    sampling = SamplingParams(temperature=1.0, seeds=0).for_batch(1, torch.device("cpu"))
    module, plain = heads
    context = DraftContext(packed_model(target), [PROMPT], sampling, rule)
    drafter = HeadDrafter(Head(module, context.target), tree, context)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(model_drafter, "draw_children", draw)
        drafter.begin(Session(context.target, 1, 16))
        none = torch.empty(0, VOCABULARY)
        proposal = drafter.propose(Batch([PROMPT], [None], none, [0], [9], [9], [plain.hidden(PROMPT)]))
    return proposal.candidates[0], proposal.draft_logits


def distance_of(target, heads, tree, rule, world, spoil=lambda logits: logits):
    """Total variation of one step, continued by the target, from the target's distribution; mean accepted drafts."""
    masses, mean = {}, 0.0
    for mass, (drafted, logits), _ in outcomes(
        lambda replay: drafted_once(target, heads, tree, rule, replayed(replay, world.filters))
    ):
        mean += mass * emitted(Judged(drafted, spoil(logits), world), rule, masses, mass)
    horizon = tree.max_depth + 1
    return variation(world.completed(masses, horizon), world, horizon), mean


TREES = {"chain": Tree.chain(2), "narrow": Tree.from_branching((2, 1)), "wider": Tree.from_branching((4, 1))}


@pytest.mark.parametrize(
    "rule,shape",
    [
        *itertools.product(["rejection", "block", "traversal", "rejection_with_replacement", "kseq"], ["chain"]),
        *itertools.product(["rejection", "traversal"], ["narrow"]),
        ("rejection", "wider"),
        pytest.param("traversal", "wider", marks=pytest.mark.slow),
        pytest.param("kseq", "narrow", marks=pytest.mark.slow),  # the rule is in a chain, the shape with two others
    ],
)
def test_exact_with_a_mapped_vocabulary(rule, shape, target, heads):
    worlds = World(2, VOCABULARY, zeros=0.3), World(1, VOCABULARY, zeros=0.0)
    for world in worlds[: 1 if shape == "wider" else 2]:
        distance, mean = distance_of(target, heads, TREES[shape], rule, world)
        assert distance < EXACT
        assert 0.05 < mean < 2


def test_logits_that_are_not_mapped_are_found(target, heads):
    """The head's own order of its tokens, padded, in place of the target's: the rule divides by a wrong q."""
    tokens = heads[0].tokens

    def unmapped(logits):
        return torch.nn.functional.pad(logits[:, tokens], (0, VOCABULARY - DRAFTED), value=-torch.inf)

    assert tokens.tolist() != list(range(DRAFTED))
    assert (
        distance_of(target, heads, TREES["chain"], "rejection", World(1, VOCABULARY, zeros=0.0), unmapped)[0] > FAULTY
    )


@pytest.mark.parametrize("rule", ["rejection", "kseq", "coupled"])
def test_sampled_texts_have_the_targets_distribution(rule, target, heads):
    prompt, requests, new_tokens = [2, 0, 1, 4], 2000, 3
    got = generate(
        target, torch.tensor([prompt]).expand(requests, -1), Eagle3(heads[0], length=2), max_new_tokens=new_tokens,
        temperature=1.2, seeds=range(requests), rule=rule, eos_token_id=[], attention_mask=torch.ones(requests, 4),
    )  # fmt: skip
    truth = distribution_of_texts(target, prompt, VOCABULARY, new_tokens, 1.2)
    assert chi_square_tail(counted(got.sequences[:, -new_tokens:], VOCABULARY), truth) > 1e-4
    assert got.stats.num_accepted_tokens > 100
