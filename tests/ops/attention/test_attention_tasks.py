"""The tasks of attention in one order, csrc/cuda/attention_tasks.cuh: they cover each place of each row once, none is empty,
and neither the slots of a cache nor other texts of the batch decide how long a text takes.
"""

import heapq
from itertools import pairwise

import pytest
import torch
from attention_cases import attention_case
from attention_checks import BFLOAT16, FLOAT32, assert_same_runs, run_on_gpu
from emulator import session

MULTIPROCESSORS = 132
LATENTS = dict(heads=128, kv_heads=1, head_dim=576, value_dim=512, type=BFLOAT16)
PLAIN = dict(heads=8, kv_heads=8, head_dim=64, value_dim=64, type=FLOAT32)
CAPACITIES = 2048, 8192, 131_072, 262_144


def tasks_of(shape, slots, texts):
    """The tasks [row, tile, first place, after the last, part] of texts of (places, rows), and their grid."""
    bounds = torch.tensor([0, *(rows for _, rows in texts)]).cumsum(0).int()
    prefixes = torch.tensor([places - rows for places, rows in texts], dtype=torch.int32)
    rows, nodes = int(bounds[-1]), max(rows for _, rows in texts)
    numbers = shape | dict(
        rows=rows, requests=len(texts), slots=slots, page_size=slots, pages=len(texts),
        max_nodes=nodes, visible_stride=-(-nodes // 64), multiprocessors=MULTIPROCESSORS,
    )  # fmt: skip
    tensors = dict(
        cu_nodes=bounds, prefix_lens=prefixes, counters=torch.zeros(2, dtype=torch.int32),
        memory=torch.zeros(100_000 + 8 * rows),
        visible=torch.full((rows, -(-nodes // 64)), -1), grid=torch.zeros(3, dtype=torch.int64),
        listed=torch.zeros(40_000, 5, dtype=torch.int64),
    )  # fmt: skip
    numbers |= {name: tensor.data_ptr() for name, tensor in tensors.items()}
    with session({name: (tensor, "inout") for name, tensor in tensors.items()}) as machine:
        count = machine.attention_tasks(numbers)
    return tensors["listed"][:count].tolist(), *tensors["grid"].tolist()


def ends_of(texts):
    return [places for places, rows in texts for _ in range(rows)]


def places_of(tasks, ends):
    return [min(last, ends[row]) - first for row, _, first, last, _ in tasks]


def time_of(shape, slots, texts):
    """The places that the last block to end adds up: blocks take tasks in their order."""
    tasks, _, resident, _ = tasks_of(shape, slots, texts)
    blocks = [0] * resident
    for places in places_of(tasks, ends_of(texts)):
        heapq.heapreplace(blocks, blocks[0] + places)
    return max(blocks)


TEXTS = (
    [(1, 1)],
    [(2000, 16)],
    [(2000, 6), (32_000, 1)],
    [(131_000, 1), (9, 64), (700, 3)],
    [(131_000, 32)],
)


@pytest.mark.parametrize("shape", [LATENTS, PLAIN], ids=["latents", "plain"])
@pytest.mark.parametrize("texts", TEXTS, ids=str)
def test_tasks_cover_every_place_once_and_none_is_empty(shape, texts):
    tasks, _, _, most_parts = tasks_of(shape, 131_072, texts)
    ends, found = ends_of(texts), {}
    parts = [(part, tile) for _, tile, _, _, part in tasks if part >= 0]
    assert len(set(parts)) == len(parts) and all(0 <= part < most_parts for part, _ in parts)
    for (row, tile, first, last, _), places in zip(tasks, places_of(tasks, ends), strict=True):
        assert places > 0
        found.setdefault((row, tile), []).append((first, last))
    tiles = {tile for _, tile in found}
    assert len(found) == len(ends) * len(tiles)
    for (row, _), ranges in found.items():
        ranges.sort()
        assert ranges[0][0] == 0 and ranges[-1][1] >= ends[row] > ranges[-1][0]
        assert all(before[1] == after[0] for before, after in pairwise(ranges))


@pytest.mark.parametrize("shape", [LATENTS, PLAIN], ids=["latents", "plain"])
@pytest.mark.parametrize("rows", [1, 6, 16])
def test_slots_of_a_cache_do_not_change_the_tasks(shape, rows):
    """With 131,072 slots, a sixth row of 128 heads once left its text to 24 blocks; and 1,780 of 1,940 blocks had no place."""
    for places in 64, 2000, 131_000:
        lists = [tasks_of(shape, slots, [(places, rows)])[0] for slots in CAPACITIES if slots >= places]
        assert all(tasks == lists[0] for tasks in lists)


@pytest.mark.parametrize("shape", [LATENTS, PLAIN], ids=["latents", "plain"])
@pytest.mark.parametrize("rows", [1, 5, 6, 16, 32])
def test_blocks_end_together(shape, rows):
    """Longer than the mean by no more than a tenth and the longest share of the text."""
    for places in 2000, 8000, 32_000, 131_000:
        tasks, _, resident, _ = tasks_of(shape, 131_072, [(places, rows)])
        mean = sum(places_of(tasks, [places] * rows)) / resident
        assert time_of(shape, 131_072, [(places, rows)]) <= 1.1 * mean + max(256, places / 16)


@pytest.mark.parametrize("shape", [LATENTS, PLAIN], ids=["latents", "plain"])
def test_a_neighbour_costs_what_it_reads(shape):
    """A text with short ones beside it takes no longer than alone by more than a tenth and their own places."""
    for text in (131_000, 2), (2000, 4):
        alone = time_of(shape, 131_072, [text])
        for count in 1, 300:
            others = [(40, 1)] * count
            items = len({(row, tile) for row, tile, *_ in tasks_of(shape, 131_072, others)[0]})
            share = 40 * -(-items // (2 * MULTIPROCESSORS))
            for texts in [text, *others], [*others, text]:
                assert time_of(shape, 131_072, texts) <= 1.1 * alone + share + 256


@pytest.mark.parametrize("options", [dict(dim=576, value_dim=512), dict(dim=32)], ids=["latents", "plain"])
def test_the_same_bits_however_many_slots_and_blocks(options):
    """Rows after 700 places with first shares of every length: from none to all."""
    case = attention_case([700, 90], [2, 1], heads=(1, 8), layout="paged 16", **options)
    unused = torch.full((2, 4096), -1, dtype=torch.int32)
    many = case | {"block_table": torch.cat([case["block_table"], unused], dim=1)}
    expected = run_on_gpu(case, multiprocessors=1000)
    for multiprocessors in (1, 2, 3, 5):
        assert_same_runs(run_on_gpu(many, multiprocessors=multiprocessors), expected)
