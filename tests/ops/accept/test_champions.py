"""The champions of a race: what the block that finishes a row still reads of it, counted; and winners that only just win.

On a GPU of 132 multiprocessors, emulated: the scan draws the noise of few rows, and scores 32 of each 1,024 tokens.
"""

import emulator
import pytest
import torch
from emulator.ops import EMULATED, on_gpu
from support.each import each

import pass_ext

CHUNKS = 40
VOCABULARY = 1024 * CHUNKS


def peaked(rows, seed):
    """A normal tail, and 64 tokens above it."""
    random = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(rows, VOCABULARY, generator=random)
    strong = torch.randint(VOCABULARY, (rows, 64), generator=random)
    return logits.scatter(1, strong, 15.0 - 1.2 * torch.arange(1, 65).log().expand(rows, 64))


def flat(rows, seed):
    return 3.0 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def numbers(rows):
    return dict(temperature=0.8, seeds=torch.arange(rows), positions=torch.arange(rows) + 3)


def groups_looked_at(op, rows, buffer, /, multiprocessors=132, **arguments):
    """How many groups of 64 logits blocks read after the scan, for each of these rows on average; and the op's result."""
    with on_gpu(multiprocessors=multiprocessors), EMULATED.active():
        result = op(**arguments)
    loaded, _ = emulator.load().count_bytes()[buffer]
    return (loaded / rows / 4 - VOCABULARY) / 64, result


@pytest.mark.parametrize(
    ("logits", "mode", "slots", "fewest", "most"),
    [
        (peaked, "coupled", 1, 0, 0.5), (peaked, "without", 4, 0, 2), (flat, "coupled", 1, 0, 4), (flat, "coupled", 4, 4, 40),
    ],
)  # fmt: skip
def test_few_groups_are_looked_at_after_the_scan(logits, mode, slots, fewest, most):
    """On one multiprocessor the scan has no time for champions, and the block that finishes a row looks at many groups."""
    rows = 8
    arguments = dict(logits=logits(rows, 1), k=slots, mode=mode, **numbers(rows))
    expected = pass_ext.draft_sample(**arguments)
    looked_at, result = groups_looked_at(pass_ext.draft_sample, rows, "logits", **arguments)
    assert torch.equal(result[0], expected[0])
    assert fewest <= looked_at < most
    without, result = groups_looked_at(pass_ext.draft_sample, rows, "logits", multiprocessors=1, **arguments)
    assert torch.equal(result[0], expected[0])
    assert without > 8 * max(looked_at, 2)


def test_an_accept_step_looks_at_no_group_after_the_scan():
    logits = peaked(5, 2)
    tokens = pass_ext.draft_sample(logits, 1, mode="coupled", **numbers(5) | dict(seeds=7))[0][:4, 0]
    arguments = dict(target_logits=logits[None], draft_tokens=tokens[None], temperature=0.8, seeds=7, positions=3)
    looked_at, result = groups_looked_at(pass_ext.accept_chain, 5, "target_logits", **arguments)
    assert looked_at < 0.5
    assert result.num_accepted.tolist() == [4]


@each("seed", range(4))
@pytest.mark.parametrize("accepted", [0, 2, 4])
def test_a_race_over_the_residual_looks_at_few_groups(accepted, seed):
    """Champions are those of p; of what rejected drafts leave of it, they are among the best still."""
    logits = peaked(5, seed)
    draft = logits[:4] + 0.7 * torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    draft[:accepted] = logits[:accepted]
    tokens = logits[:4].argmax(1)
    tokens[accepted:] = (tokens[accepted:] + 1) % VOCABULARY
    draft[torch.arange(accepted, 4), tokens[accepted:]] = 15.0
    arguments = dict(
        target_logits=logits[None], draft_tokens=tokens[None], draft_logits=draft[None], rule="rejection", temperature=0.8,
        seeds=seed, positions=3,
    )  # fmt: skip
    expected = pass_ext.accept_chain(**arguments)
    assert expected.num_accepted.tolist() == [accepted]
    looked_at, result = groups_looked_at(pass_ext.accept_chain, 5, "target_logits", **arguments)
    for ours_part, expected_part in zip(result, expected, strict=True):
        assert torch.equal(ours_part, expected_part)
    assert looked_at < 2


@each("far", [0.0, 1e3, 1e6])
@each("slots", [1, 2, 5, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_winners_that_only_just_win(far, slots, dtype):
    """Scores far below the row's largest logit round to the same numbers, and those against a chunk's own do not."""
    logits = 0.1 * torch.randn(3, 9_100, generator=torch.Generator().manual_seed(slots))
    logits[:, 5_000] = far
    logits[1, 64:] = -torch.inf
    logits[2, 1024:8192] = -torch.inf
    options = dict(mode="coupled", temperature=1.0, seeds=torch.arange(3), positions=slots)
    expected = pass_ext.draft_sample(logits.to(dtype), slots, **options)
    with on_gpu(multiprocessors=132), EMULATED.active():
        tokens, _ = pass_ext.draft_sample(logits.to(dtype), slots, **options)
    assert torch.equal(tokens, expected[0])


@each("min_p", [0.0, 1e-3, 0.3])
@each("slots", [1, 6])
def test_masks_and_floors_choose_among_champions(min_p, slots):
    """A champion that min_p removes does not race, and its chunk is looked at. The last row allows one token of a chunk."""
    random = torch.Generator().manual_seed(slots)
    logits = 3.0 * torch.randn(4, 20_000, generator=random)
    words = [torch.randint(-(2**31), 2**31, (4, 625), generator=random) for _ in range(4)]
    allowed = (words[0] & words[1] & words[2] & words[3]).int()
    allowed[3] = torch.where(torch.arange(625) % 32 == 5, 64, 0)
    options = dict(mode="without", allowed=allowed, min_p=min_p, **numbers(4))
    expected = pass_ext.draft_sample(logits, slots, **options)
    with on_gpu(multiprocessors=132), EMULATED.active():
        tokens, _ = pass_ext.draft_sample(logits, slots, **options)
    assert torch.equal(tokens, expected[0])
