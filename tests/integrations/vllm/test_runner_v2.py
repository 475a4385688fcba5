"""Runner V2's two functions on made-up tensors in vLLM's layout, against the reference and the plain sampler."""

import logging
import sys
from types import ModuleType

import pytest
import torch

from pass_ext import draft_sample, reference
from pass_ext.integrations.vllm.sampling.runner_v2 import PackedAccept, SeededDraw, replace_sampling
from pass_ext.ops.common.rules import ACCEPT_RULES

VOCABULARY, PLACES, STEPS = 60, 7, 4
DRAFTS = [3, 0, 4, 1, 2]
AT = torch.tensor([6, 0, 3, 1, 5])  # the requests' places in tensors [PLACES, …]


def a_batch(seed, padding=0):
    """The arguments of ``rejection_sample``, with drafts that are often right; the draft has ``padding`` columns less."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(DRAFTS)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), (counts + 1).cumsum(0)])
    local = torch.cat([torch.arange(n + 1) for n in DRAFTS])
    rows = AT.repeat_interleave(counts + 1)
    temperature = torch.tensor([1.0, 0.7, 9.0, 1.3, 9.0, 0.0, 0.8])
    target = torch.randn(len(local), VOCABULARY, generator=generator) * 2
    target[:, ::9] = -torch.inf  # what vLLM's filters removed
    draft_logits = torch.full((PLACES, STEPS, VOCABULARY - padding), torch.nan)
    tokens = torch.zeros(len(local), dtype=torch.int32)
    for row in range(len(local) - 1):
        if local[row + 1] > 0:
            logits = target[row, : VOCABULARY - padding].nan_to_num(neginf=-5.0)
            logits = logits + torch.randn(VOCABULARY - padding, generator=generator)
            draft_logits[rows[row], local[row]] = logits
            warm = temperature[rows[row]]
            tokens[row + 1] = (
                logits.argmax()
                if warm == 0
                else torch.multinomial((logits / warm).softmax(-1), 1, generator=generator)[0]
            )
    positions = torch.randint(0, 99, (len(DRAFTS),), generator=generator).repeat_interleave(counts + 1) + local
    seeds = torch.randint(-(2**63), 2**63 - 1, (PLACES,), generator=generator)
    return dict(
        target_logits=target, draft_logits=draft_logits, draft_sampled=tokens, cu_num_logits=bounds.int(),
        pos=positions, idx_mapping=AT.int(), expanded_idx_mapping=rows.int(), expanded_local_pos=local.int(),
        temperature=temperature, seed=seeds, num_speculative_steps=STEPS,
    )  # fmt: skip


def expected_of(batch, rule):
    vocabulary, warm = VOCABULARY, batch["temperature"][AT]
    draft = {}
    if ACCEPT_RULES[rule].needs_draft_logits and batch["draft_logits"] is not None:
        vocabulary = batch["draft_logits"].shape[-1]
        follows = torch.cat([batch["expanded_local_pos"][1:] > 0, torch.tensor([False])])
        places = zip(batch["expanded_idx_mapping"], batch["expanded_local_pos"], strict=True)
        rows = [batch["draft_logits"][at, min(i, STEPS - 1)] for at, i in places]
        numbers = torch.arange(len(rows)).where(follows, -1)
        draft = dict(draft_logits=torch.stack(rows), draft_rows=numbers, draft_temperature=warm)
    return reference.accept_tree(
        batch["target_logits"][:, :vocabulary], batch["draft_sampled"], batch["expanded_local_pos"] - 1,
        batch["cu_num_logits"], STEPS, rule=rule, temperature=(warm > 0).float(), seeds=batch["seed"][AT],
        positions=batch["pos"][batch["cu_num_logits"][:-1].long()] + 1, **draft,
    )  # fmt: skip


@pytest.mark.parametrize("drafts", ["logits", "padded logits", "fixed"])
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "kseq"])
def test_the_decisions_are_the_references(rule, drafts):
    accepted = 0
    for seed in range(5):
        batch = a_batch(seed, padding=4 if drafts == "padded logits" else 0)
        if drafts == "fixed":
            batch["draft_logits"] = None
        sampled, num_sampled = PackedAccept(rule, None)(**batch)
        expected = expected_of(batch, rule)
        sure = expected.margin > 1e-5
        assert sampled.dtype == torch.int64 and num_sampled.dtype == torch.int32
        assert sampled.shape == (len(DRAFTS), STEPS + 1) and sure.sum() > 2
        assert torch.equal(sampled[sure], expected.emitted[sure])
        assert torch.equal(num_sampled[sure], expected.num_accepted[sure] + 1)
        accepted += int(expected.num_accepted.sum())
    assert accepted >= 5


def test_an_invalid_draft_and_an_unusable_root():
    batch = a_batch(0)
    batch["target_logits"][:, 11] = 50.0
    batch["draft_sampled"][:] = 11
    batch["draft_sampled"][2] = -1
    batch["target_logits"][4] = torch.nan  # the only row of request 1
    batch["target_logits"][7] = torch.nan  # the third of request 2: the text ends with the draft before it
    sampled, num_sampled = PackedAccept("coupled", None)(**batch)
    assert num_sampled.tolist() == [2, 1, 2, 2, 3]
    assert sampled[1].tolist() == [0, -1, -1, -1, -1] and sampled[2].tolist() == [11, 11, -1, -1, -1]


@pytest.mark.parametrize(
    "option",
    [
        dict(synthetic_conditional_rates=torch.ones(4)), dict(use_fp64=True), dict(use_block_verification=True),
        dict(contexts=torch.zeros(1, 1), watermarking=torch.ones(1), watermark_key=0), dict(fly_window_size=2),
    ],
    ids=lambda option: next(iter(option)),
)  # fmt: skip
def test_what_cannot_be_honoured_is_vllms_own(option, caplog):
    calls = []
    accept = PackedAccept("coupled", lambda *arguments, **options: calls.append((arguments, options)) or "vLLM's")
    with caplog.at_level(logging.WARNING):
        assert [accept(**a_batch(0), **option) for _ in range(2)] == ["vLLM's"] * 2
    assert caplog.text.count(f"pass_ext: {next(iter(option))} is set") == 1
    assert calls[0][1] == option and len(calls[0][0]) == 11


def test_options_that_are_off_change_nothing():
    batch = a_batch(1)
    off = (None, False, False, None, None, None, None)
    fly = dict(fly_window_size=0, fly_entropy_threshold=0.3, fly_entropy_top_k=3)
    sampled, _ = PackedAccept("coupled", None)(*batch.values(), *off, **fly)
    assert torch.equal(sampled, PackedAccept("coupled", None)(**batch)[0])


def test_steps_without_drafts_draw_the_tokens_of_steps_with_drafts_by_the_inverse_rule():
    batch = a_batch(3)
    roots = batch["cu_num_logits"][:-1].long()
    logits, positions = batch["target_logits"][roots], batch["pos"][roots]
    draw = SeededDraw("coupled_inverse", None)
    tokens = draw(logits, AT.int(), batch["temperature"], batch["seed"], positions, False, False)
    drafted = PackedAccept("coupled_inverse", None)(**batch)
    assert tokens.tolist() == drafted[0][:, 0].tolist()
    coupled = SeededDraw("coupled", None)(
        logits, AT.int(), batch["temperature"], batch["seed"], positions, False, False
    )
    assert tokens.tolist() != coupled.tolist()


def test_steps_without_drafts_draw_the_same_tokens():
    batch = a_batch(2)
    roots = batch["cu_num_logits"][:-1].long()
    logits, positions = batch["target_logits"][roots], batch["pos"][roots]
    draw = SeededDraw("rejection", None)
    tokens = draw(logits, AT.int(), batch["temperature"], batch["seed"], positions, False, False, use_fp64=False)
    one_draft = PackedAccept("coupled", None)(**batch | {"draft_sampled": batch["draft_sampled"] * 0 - 1})
    assert tokens.tolist() == one_draft[0][:, 0].tolist()
    greedy = (batch["temperature"][AT] == 0).nonzero().flatten()
    assert tokens[greedy].tolist() == logits[greedy].argmax(-1).tolist()
    plain, _ = draft_sample(
        logits, 1, mode="coupled", temperature=(batch["temperature"][AT] > 0).float(), seeds=batch["seed"][AT],
        positions=positions + 1,
    )  # fmt: skip
    assert tokens.tolist() == plain.flatten().tolist()


@pytest.mark.parametrize(
    "change", [dict(is_drafting=True), dict(apply_temperature=True), dict(logits_cache=torch.ones(2))]
)
def test_other_draws_stay_vllms_own(change):
    draw = SeededDraw("coupled", lambda *arguments, **options: "vLLM's")
    batch = a_batch(0)
    arguments = dict(apply_temperature=False, is_drafting=False) | change
    logits = batch["target_logits"]
    rows = batch["expanded_idx_mapping"]
    assert draw(logits, rows, batch["temperature"], batch["seed"], batch["pos"], **arguments) == "vLLM's"


def test_a_second_replacement_changes_the_rule_of_both_functions(monkeypatch):
    """vLLM's own functions stay known, however often a rule is chosen."""
    names = ["vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu"]
    names += [f"{names[-1]}.sample", f"{names[-1]}.spec_decode"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sampler, rejection_sampler = ModuleType("sampler"), ModuleType("rejection_sampler")
    sampler.gumbel_sample, rejection_sampler.rejection_sample = "draws", "accepts"
    sys.modules[names[-2]].sampler, sys.modules[names[-1]].rejection_sampler = sampler, rejection_sampler
    for rule in ("coupled", "coupled_inverse"):
        replace_sampling(rule)
        accept, draw = rejection_sampler.rejection_sample, sampler.gumbel_sample
        assert (accept.rule, accept.vllm, draw.rule, draw.vllm) == (rule, "accepts", rule, "draws")
