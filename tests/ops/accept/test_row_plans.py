"""The memory of accept and draft on a GPU of 132 multiprocessors, and the rows that this lets them scan beforehand."""

import emulator
import pytest
import torch
from emulator.ops import EMULATED, on_gpu

import pass_ext

VOCABULARY, GROUPS, CHUNKS = 128_256, 2004, 126
SUMMARY = 4 * GROUPS + 8 * CHUNKS  # bytes of a row: the largest logit of each group, largest and sum of each chunk
RACE = 4 * GROUPS + 16 * CHUNKS
"""Where the scan draws a race's noise: the logarithm of each group's smallest exponential, and each chunk's champion."""
LAW, WINNER, JUDGE = 28, 4, 160
ROUNDING = 16 * 9


def accept_bytes(requests, nodes=5, rule="rejection", has_draft=True):
    numbers = dict(
        requests=requests, nodes=nodes, vocabulary=VOCABULARY, rule=list(pass_ext.RULES).index(rule),
        has_draft=int(has_draft), multiprocessors=132,
    )  # fmt: skip
    with emulator.session({}) as machine:
        return machine.accept_workspace(numbers)


def draft_bytes(rows, mode="without"):
    index = pass_ext.ops.draft.MODES.index(mode)
    with emulator.session({}) as machine:
        return machine.draft_workspace(dict(rows=rows, vocabulary=VOCABULARY, mode=index, multiprocessors=132))


@pytest.mark.parametrize(("requests", "rows"), [(1, 10), (8, 80), (64, 640), (128, 1280), (409, 4090)])
def test_few_rows_are_scanned_beforehand(requests, rows):
    expected = rows * (SUMMARY + (RACE if rows <= 99 else 0) + LAW + WINNER) + 5 * requests * JUDGE
    assert expected <= accept_bytes(requests) <= expected + ROUNDING


@pytest.mark.parametrize("requests", [410, 5000])
def test_many_requests_take_no_more_than_what_runs_at_once(requests):
    blocks = min(requests, 264)
    expected = 2 * blocks * SUMMARY + 5 * requests * JUDGE
    assert expected <= accept_bytes(requests) <= expected + ROUNDING


def test_rules_that_read_no_draft_logits_have_half_the_rows():
    expected = 64 * 5 * (SUMMARY + LAW + WINNER + JUDGE)
    assert expected <= accept_bytes(64, rule="coupled") <= expected + ROUNDING


@pytest.mark.parametrize(("requests", "draws"), [(1, True), (19, True), (20, False)])
def test_the_scan_of_few_rows_draws_the_noise_of_their_races(requests, draws):
    """99 rows at most, 32 blocks each, are four waves of 6 blocks on each of 132 multiprocessors."""
    expected = requests * 5 * (SUMMARY + (RACE if draws else 0) + LAW + WINNER + JUDGE)
    assert expected <= accept_bytes(requests, rule="coupled") <= expected + ROUNDING
    assert expected <= accept_bytes(requests, rule="typical") <= expected + ROUNDING


def test_trees_are_walked_where_most_rows_are_never_read():
    expected = 2 * 32 * SUMMARY + 64 * 32 * JUDGE
    assert expected <= accept_bytes(32, nodes=64) <= expected + ROUNDING


@pytest.mark.parametrize(
    ("rows", "kept"),
    [(1, 1), (99, 99), (100, 100), (256, 256), (1056, 1056), (4096, 4096), (4097, 2 * 264), (100_000, 2 * 264)],
)
def test_drafts_are_all_read(rows, kept):
    each = SUMMARY + (LAW + WINNER if kept == rows else 0)
    assert kept * each <= draft_bytes(rows, "top") <= kept * each + ROUNDING
    each += RACE if rows <= 99 else 0
    for mode in ("coupled", "without", "with"):
        assert kept * each <= draft_bytes(rows, mode) <= kept * each + ROUNDING


def test_steps_of_one_to_64_requests_are_scanned_beforehand():
    """A warp scans up to four chunks, as many as leave 24 blocks to a multiprocessor."""
    for requests, drafts in ((1, 4), (8, 4), (64, 4), (1, 63)):
        planned = accept_bytes(requests, nodes=drafts + 1)
        assert planned >= 2 * requests * (drafts + 1) * (SUMMARY + LAW + WINNER), (requests, drafts)
    for rows in (1, 9, 72, 127, 400, 576, 1000):
        chunks = min(max(rows * -(-CHUNKS // 4) // (4 * 6 * 132), 1), 4)
        assert scan_blocks(rows) == -(-32 // chunks), rows


def scan_blocks(rows, vocabulary=VOCABULARY, multiprocessors=132):
    with emulator.session({}) as machine:
        numbers = dict(rows=rows, vocabulary=vocabulary, multiprocessors=multiprocessors)
        return machine.draft_scan_blocks(numbers)


def test_a_warp_scans_several_chunks_where_there_are_more_blocks_than_a_gpu_holds_at_once():
    assert [scan_blocks(rows) for rows in (1, 9, 100, 400, 4096)] == [32, 32, 32, 8, 8], (
        "32 without turns, of 126 chunks"
    )
    assert scan_blocks(1056, vocabulary=1000) == 1
    assert scan_blocks(4097) == 0, "a block scans what it comes to"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_few_blocks_scan_in_turns(dtype):
    """On one multiprocessor a warp takes up to four chunks, some of them missing: the result equals the CPU's."""
    vocabulary, rows = 24_700, 8
    assert scan_blocks(rows, vocabulary, 1) == 4, "of seven without turns"
    random = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocabulary, generator=random) * 3).to(dtype)
    arguments = dict(
        temperature=torch.full((rows,), 0.7), top_k=torch.tensor([0, 5] * 4), seeds=torch.arange(rows), positions=0
    )
    expected = pass_ext.draft_sample(logits, 3, mode="coupled", **arguments)
    with on_gpu(multiprocessors=1), EMULATED.active():
        ours = pass_ext.draft_sample(logits, 3, mode="coupled", **arguments)
    assert torch.equal(expected[0], ours[0])
    torch.testing.assert_close(expected[1], ours[1])


@pytest.mark.parametrize(("vocabulary", "draws"), [(2_000, True), (24_700, False)])
def test_a_block_draws_the_noise_that_the_scan_has_not_drawn(vocabulary, draws):
    """Rule coupled, all rows scanned beforehand on one multiprocessor: the tokens are the CPU's, whoever draws the noise."""
    requests, nodes = 2, 4
    numbers = dict(requests=requests, nodes=nodes, vocabulary=vocabulary, multiprocessors=1)
    groups, chunks = -(-vocabulary // 64), -(-vocabulary // 1024)
    row = 4 * groups + 8 * chunks + (4 * groups + 16 * chunks if draws else 0) + LAW + WINNER + JUDGE
    with emulator.session({}) as machine:
        assert requests * nodes * row <= machine.accept_workspace(numbers) <= requests * nodes * row + ROUNDING
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(requests, nodes, vocabulary, generator=random) * 3
    temperature, seeds = torch.tensor([0.7, 1.3]), torch.tensor([5, 6])
    positions = torch.tensor([40, 900])
    own = [
        pass_ext.draft_sample(
            logits[b], 1, mode="coupled", temperature=temperature[b].expand(nodes), seeds=seeds[b].expand(nodes),
            positions=positions[b] + torch.arange(nodes),
        )[0].flatten() for b in range(requests)
    ]  # fmt: skip
    tokens = torch.stack(own)[:, :-1].clone()
    tokens[1, 1] = (tokens[1, 1] + 1) % vocabulary
    numbers = dict(temperature=temperature, seeds=seeds, positions=positions)
    expected = pass_ext.accept_chain(logits, tokens, **numbers)
    assert expected.num_accepted.tolist() == [3, 1]
    with on_gpu(multiprocessors=1), EMULATED.active():
        ours = pass_ext.accept_chain(logits, tokens, **numbers)
    for ours_part, expected_part in zip(ours, expected, strict=True):
        assert torch.equal(ours_part, expected_part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_that_begin_between_two_wide_loads_take_one_more_for_each_piece(dtype):
    """Not eight loads of one logit: that took 10 to 20 times as long."""
    vocabulary = 24_700
    memory = torch.empty(vocabulary + 16, dtype=dtype)
    wide = 16 // memory.element_size()
    aligned = -memory.data_ptr() // memory.element_size() % wide
    counts = []
    for shift in (0, 1, wide - 1):
        row = memory[aligned + shift :][:vocabulary].copy_(torch.linspace(-9, 9, vocabulary))
        with on_gpu(multiprocessors=132), EMULATED.active():
            pass_ext.draft_sample(row[None], 1, mode="top")
        counts.append(emulator.load().count_accesses())
    pieces = vocabulary / 8
    assert pieces < min(counts[1:]) - counts[0] and max(counts[1:]) - counts[0] < 1.2 * pieces, counts


@pytest.mark.parametrize(
    ("rule", "requests", "nodes", "launches"),
    [
        ("coupled", 1, 5, 1), ("coupled", 2, 4, 1), ("coupled", 2, 5, 2), ("rejection", 1, 4, 1), ("rejection", 1, 5, 2),
        ("kseq", 1, 4, 2),
    ],
)  # fmt: skip
def test_a_step_of_few_rows_is_one_launch(rule, requests, nodes, launches):
    """A row a node, or two by a rule that reads drafts, 32 blocks a row; two of these blocks fit on each of 132
    multiprocessors."""
    numbers = dict(requests=requests, nodes=nodes, vocabulary=VOCABULARY)
    numbers |= dict(rule=list(pass_ext.RULES).index(rule), has_draft=1, multiprocessors=132)
    with emulator.session({}) as machine:
        assert machine.accept_launches(numbers) == launches
