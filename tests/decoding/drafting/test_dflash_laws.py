"""Texts of DFlash heads have the target's distribution, by enumeration: every chain that a block can draw, and every outcome of
the coins. The drafter, its calls and its scores are real; draws are replayed, and the rules are those of pass_ext.reference."""

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")

from support.chi_square import chi_square_tail, counted
from support.dflash_files import settings, tensors, written
from support.drafted import PROMPT, Judged, emitted, replayed, variation
from support.enumeration import EXACT, FAULTY, World, outcomes
from support.generation import distribution_of_texts
from support.grammars import Automaton
from support.small_models import small_model

import pass_ext.decoding.drafting.heads.block_drafter as block_drafter
from pass_ext import generate, load_drafter
from pass_ext.decoding.drafting.candidates import Batch
from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.decoding.session.session import Session
from pass_ext.drafting import DFlash

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, LENGTH = 5, 2
RULES = ["rejection", "block", "traversal", "rejection_with_replacement", "kseq"]
WORLDS = [World(1, VOCABULARY, zeros=0.3), World(3, VOCABULARY, zeros=0.0, filters={"temperature": 0.7, "top_k": 3})]


@pytest.fixture(scope="module")
def model():
    return small_model("llama", vocab_size=VOCABULARY, num_hidden_layers=3)


def head_of(kind, model, folder, mapped):
    """A head that is not sure of anything; of three tokens if mapped, and a selector of two."""
    tokens = [0, 2, 3] if mapped else None
    config = settings(kind, not mapped, 64, VOCABULARY, tokens)
    (config if mapped else config["dflash_config"])["mask_token_id"] = 1
    if kind == "dflash2":
        config["dflash_config"]["selector_top_k"] = 2
    found = tensors(kind, 64, VOCABULARY, tokens, sharpness=1.0)
    if mapped:
        found["lm_head.weight"] *= 0.2
    if kind == "dspark":
        # The first draft is sure, the second one is so after some tokens.
        weight, left = found["confidence_head.proj.weight"], found["markov_head.markov_w1.weight"]
        weight[:, :64], weight[:, 64:] = 0.0, torch.tensor([0.0, 0.0, 9.0])
        left[:, 2] = torch.tensor([-1.0, 1.0, 1.0, -1.0, 1.0])
    return load_drafter(written(folder, config, found), model).head


def drafted_once(head, model, rule, draw, levels):
    """One step's candidates after PROMPT, by the real drafter with replayed draws."""
    sampling = SamplingParams(temperature=1.0, seeds=0).for_batch(1, torch.device("cpu"))
    target = packed_model(model)
    context = DraftContext(target, [PROMPT], sampling, rule)
    drafter = block_drafter.BlockDrafter(head, context, LENGTH, None)
    hidden = torch.randn(len(PROMPT) - 1, 2, 64, generator=torch.Generator().manual_seed(5))
    batch = Batch([PROMPT], [None], hidden.new_empty(0, VOCABULARY), [0], [9], [levels], [hidden])
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(block_drafter, "draw_children", draw)
        drafter.begin(Session(target, 1, 16))
        proposal = drafter.propose(batch)
    return proposal.candidates[0], proposal.draft_logits


def measured(head, model, rule, world, levels=9, spoil=lambda drafted, logits: (drafted, logits)):
    """Total variation of one step, continued by the target, from the target's distribution; mean accepted drafts; depths."""
    masses, mean, depths = {}, 0.0, set()
    draws = outcomes(lambda replay: drafted_once(head, model, rule, replayed(replay, world.filters), levels))
    for mass, (drafted, draft_logits), _ in draws:
        depths.add(drafted.tree.max_depth)
        mean += mass * emitted(Judged(*spoil(drafted, draft_logits), world), rule, masses, mass)
    return variation(world.completed(masses, LENGTH + 1), world, LENGTH + 1), mean, depths


@pytest.mark.parametrize("kind,mapped", [("dflash", True), ("dspark", True), ("dspark", False), ("dflash2", False)])
@pytest.mark.parametrize("rule", RULES)
def test_exact(rule, kind, mapped, model, tmp_path):
    head = head_of(kind, model, tmp_path, mapped)
    for world in WORLDS:
        distance, mean, depths = measured(head, model, rule, world)
        assert distance < EXACT
        assert mean > 0.1 and depths == ({1, 2} if kind == "dspark" else {2})


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_exact_near_the_end_of_a_text(rule, model, tmp_path):
    distance, mean, depths = measured(head_of("dspark", model, tmp_path, False), model, rule, WORLDS[0], levels=1)
    assert distance < EXACT and 0.1 < mean <= 1 and depths == {1}


@pytest.mark.parametrize(
    "kind,rule", [("dspark", "rejection"), ("dflash2", "traversal"), ("dflash", "kseq"), ("dflash", "coupled")]
)
def test_batches_by_chi_square(kind, rule, model, tmp_path):
    """Texts of two prompts in one batch: each is judged by the scores that its own drafts were drawn from."""
    head = head_of(kind, model, tmp_path, kind != "dflash2")
    prompts, samples = [[2, 0, 1], [3, 3, 4]], 1200
    found = generate(
        model, torch.tensor(prompts), DFlash(head), max_new_tokens=3, num_return_sequences=samples, temperature=1.5, seeds=7,
        rule=rule, eos_token_id=[], attention_mask=torch.ones(2, 3, dtype=torch.int64),
    )  # fmt: skip
    for prompt, texts in zip(prompts, found.sequences[:, 3:].split(samples), strict=True):
        expected = distribution_of_texts(model, prompt, VOCABULARY, 3, 1.5)
        assert chi_square_tail(counted(texts, VOCABULARY), expected) > 1e-3


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_batches_under_a_grammar_by_chi_square(kind, model, tmp_path):
    """Texts are judged under the masks that their own drafts were drawn under."""
    head, table = head_of(kind, model, tmp_path, False), {0: {0: 1, 2: 0, 3: 1}, 1: {1: 0, 4: 1, 3: 0}}
    prompts, samples = [[2, 0, 1], [3, 3, 4]], 1200
    found = generate(
        model, torch.tensor(prompts), DFlash(head), max_new_tokens=3, num_return_sequences=samples, temperature=1.5, seeds=7,
        rule="rejection", eos_token_id=[], attention_mask=torch.ones(2, 3, dtype=torch.int64), grammar=Automaton(table),
    )  # fmt: skip
    texts = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * 3)
    for prompt, drawn in zip(prompts, found.sequences[:, 3:].split(samples), strict=True):
        logits = (
            model(torch.cat([torch.tensor(prompt).expand(len(texts), -1), texts], 1)).logits[:, 2:-1].double() / 1.5
        )
        expected = torch.ones(len(texts), dtype=torch.float64)
        for i, text in enumerate(texts.tolist()):
            state = 0
            for token, row in zip(text, logits[i], strict=True):
                allowed = table.get(state, {})
                if token not in allowed:
                    expected[i] = 0.0
                    break
                expected[i] *= row[list(allowed)].softmax(0)[list(allowed).index(token)]
                state = allowed[token]
        assert chi_square_tail(counted(drawn, VOCABULARY), expected) > 1e-3


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_logits_of_other_rows_are_found(kind, model, tmp_path):
    def spoil(drafted, draft_logits):
        return dataclasses.replace(drafted, draft_rows=[1, 0, -1]), draft_logits

    head = head_of(kind, model, tmp_path, kind == "dflash")
    assert measured(head, model, "rejection", WORLDS[0], spoil=spoil)[0] > FAULTY
