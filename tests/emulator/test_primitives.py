"""Each emulated primitive against its definition, computed with numpy or torch. The kernels: primitive_kernels.cuh."""

import numpy as np
import pytest
import torch

import emulator

FULL = 0xFFFFFFFF
NONE = float("-inf")
generator = torch.Generator().manual_seed(7)


def run(name, given, outputs, a=0, b=0, c=0, seed=0, contents=("out", "out", "out")):
    """Runs one primitive kernel; returns its outputs, poisoned where the kernel wrote nothing."""
    tensors = [*outputs, *[torch.empty(0)] * (3 - len(outputs))]
    buffers = {"in": (given, "in")} | {f"out{i}": (t, contents[i]) for i, t in enumerate(tensors)}
    with emulator.session(buffers, seed=seed) as machine:
        signed = b - 2**32 if b >= 2**31 else b
        machine.run_primitive(name, given.data_ptr(), *(t.data_ptr() for t in tensors), a, signed, c)
    return outputs if len(outputs) > 1 else outputs[0]


def integers(*shape, low=-1000, high=1000, dtype=torch.int32):
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def test_indices():
    blocks, threads = (2, 3, 2), 60
    got = run("indices", torch.zeros(1), [torch.zeros(12 * 60, 10, dtype=torch.int32)]).tolist()
    row = 0
    for bz, by, bx in np.ndindex(blocks[::-1]):
        for rank in range(threads):
            assert got[row] == [rank, 0, 0, bx, by, bz, threads, 2, rank, rank % 32]
            row += 1


@pytest.mark.parametrize("mask", [FULL, 0x0000FFFF, 0xF0F0F0F0 | 0x0F, 1 << 31])
def test_shuffles(mask):
    values = torch.randn(32, generator=generator, dtype=torch.float64)
    lanes = np.arange(32)
    sources = {
        1: lanes ^ 5,
        2: np.where(lanes >= 3, lanes - 3, lanes),
        3: np.where(lanes + 3 < 32, lanes + 3, lanes),
    }
    sources[0] = (lanes * 7 + 3) % 32
    for kind, source in sources.items():
        takes_part = np.array([mask >> lane & 1 for lane in lanes], dtype=bool)
        defined = all(takes_part[source[lane]] for lane in lanes if takes_part[lane])
        for seed in range(3):
            out = torch.zeros(32, dtype=torch.float64)
            if not defined:
                with pytest.raises(RuntimeError, match="undefined: shuffle"):
                    run("shuffle", values, [out], kind, mask, -1, seed)
                continue
            run("shuffle", values, [out], kind, mask, -1, seed)
            for lane in lanes[takes_part]:
                assert out[lane] == values[source[lane]]


@pytest.mark.parametrize("threads", [32, 20])
@pytest.mark.parametrize("mask", [FULL, 0x00FF00FF, 1])
@pytest.mark.parametrize("votes", [0, FULL, 0x80000001, 0x00FF00FF, 0x12345678])
def test_votes(mask, votes, threads):
    """With 20 threads too: lanes that the block does not have take no part, whatever the mask says of them."""
    given = torch.tensor([votes >> lane & 1 for lane in range(32)], dtype=torch.int32)
    got = run("votes", given, [torch.zeros(32, 4, dtype=torch.int32)], threads, mask)
    present = mask & ((1 << threads) - 1)
    ballot = votes & present
    first = (ballot & -ballot).bit_length() - 1
    for lane in range(32):
        if present >> lane & 1:
            expected = [ballot, ballot != 0, ballot == present, first + 100 * mask.bit_count()]
            assert [got[lane, 0].item() & FULL, *got[lane, 1:].tolist()] == expected


@pytest.mark.parametrize("threads", [32, 20])
@pytest.mark.parametrize("mask", [FULL, 0x00FF00FF, 1])
@pytest.mark.parametrize("seed", range(3))
def test_reductions(mask, threads, seed):
    """Of unsigned numbers: those with the highest bit are the largest."""
    given = torch.randint(-(2**31), 2**31, (32,), generator=torch.Generator().manual_seed(seed)).int()
    got = run("reductions", given, [torch.zeros(32, 2, dtype=torch.int32)], threads, mask)
    lanes = [lane for lane in range(threads) if mask >> lane & 1]
    values = [given[lane].item() & FULL for lane in lanes]
    for lane in lanes:
        assert [number & FULL for number in got[lane].tolist()] == [max(values), min(values)]


def test_block_barriers_static_and_dynamic_shared_memory_at_size():
    """Also the speed that tests rely on: 200 blocks of 256 threads, twice through shared memory."""
    given = integers(200, 256, low=0)
    out, votes = run("reverse", given, [torch.zeros_like(given), torch.zeros(200, dtype=torch.int32)], 200)
    assert torch.equal(out, given.flip(1))
    assert torch.equal(votes.long(), (given % 2 != 0).sum(1))


def test_warp_barriers():
    given = integers(2, 32)
    for seed in range(10):
        got = run("warp_sum", given, [torch.zeros_like(given)], seed=seed)
        assert torch.equal(got, given.sum(1, keepdim=True).expand(2, 32).int())


def test_atomics():
    given = integers(96, low=1)
    for seed in range(5):
        ints = torch.zeros(5 + 96, dtype=torch.int32)
        ints[2] = 10**6
        ints, total, wide = run(
            "atomics",
            given,
            [ints, torch.zeros(1), torch.zeros(1, dtype=torch.int64)],
            seed=seed,
            contents=("inout",) * 3,
        )
        assert ints[:3].tolist() == [given.sum(), given.max(), given.min()]
        assert ints[3] == 2**31 - 1 and ints[4] in given
        assert sorted(ints[5:].tolist()) == sorted(given.tolist())
        assert total == 48.0 and wide == 96 << 33


@pytest.mark.parametrize("count", [1, 4, 10])
def test_a_counter_begins_anew_at_its_end(count):
    counter, found = run(
        "counter",
        integers(1),
        [torch.zeros(1, dtype=torch.int32), torch.full((10,), -1, dtype=torch.int32)],
        10,
        count,
        contents=("inout", "inout", "out"),
    )
    assert sorted(found.tolist()) == sorted(i % count for i in range(10)) and counter == 10 % count


def test_the_last_block_sees_what_the_others_published():
    given = torch.randn(9, 32, generator=generator)
    tickets = torch.zeros(1, dtype=torch.int32)
    for seed in range(20):
        got = run(
            "last_arriver",
            given,
            [torch.zeros(1), torch.zeros(9), tickets.clone()],
            9,
            seed=seed,
            contents=("out", "out", "inout"),
        )[0]
        torch.testing.assert_close(got[0], given.sum(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("blocks", [1, 9])
def test_a_counter_of_arrivals_hands_over_and_begins_anew(blocks):
    given = integers(blocks)
    for seed in range(4):
        results = [
            torch.zeros(1 + blocks, dtype=torch.int32),
            torch.zeros(blocks, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
        ]
        total, _, counter = run("arrivals", given, results, blocks, seed=seed, contents=("out", "out", "inout"))
        assert total[0] == given.sum() and sorted(total[1:].tolist()) == list(range(blocks))
        assert counter.tolist() == [0]


def test_sixteen_bytes_at_once():
    given = integers(128)
    assert torch.equal(run("copy16", given, [torch.zeros_like(given)]), 2 * given)


def test_asynchronous_copies_of_four_bytes_and_zero_fill():
    given = integers(32)
    expected = torch.where(torch.arange(32) % 5 != 0, given, 0)
    assert torch.equal(run("copy4", given, [torch.zeros_like(given)]), expected)


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_an_asynchronous_pipeline(stages):
    given = integers(stages, 32, 4)
    copied = (torch.arange(stages)[:, None] + torch.arange(32)) % 3 != 0
    for seed in range(5):
        got = run("pipeline", given, [torch.zeros_like(given)], stages, seed=seed)
        assert torch.equal(got, torch.where(copied[..., None], given, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matrix_product_on_random_tiles(dtype):
    for _ in range(5):
        a, b = (torch.randn(rows, 16, generator=generator).to(dtype) for rows in (16, 8))
        c = torch.randn(16, 8, generator=generator)
        d, _ = run(
            "multiply",
            torch.cat([a, b]),
            [torch.zeros(16, 8), c],
            dtype == torch.bfloat16,
            contents=("out", "inout", "out"),
        )
        exact = a.double() @ b.double().T + c.double()
        assert (d - exact).abs().max() <= 2e-6 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matrix_product_puts_every_element_where_it_belongs(dtype):
    """One-hot A and B: A[i, k] = 1 and B[k, :] distinct values, so a value in the wrong place shows."""
    b = (torch.arange(128.0).reshape(16, 8) + 1).to(dtype)
    for i in range(16):
        for k in range(16):
            a = torch.zeros(16, 16, dtype=dtype)
            a[i, k] = 1
            given = torch.cat([a, b.T.contiguous()])
            d, _ = run(
                "multiply",
                given,
                [torch.zeros(16, 8), torch.zeros(16, 8)],
                dtype == torch.bfloat16,
                contents=("out", "inout", "out"),
            )
            assert torch.equal(d, a.float() @ b.float())


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_loading_matrices(count, transposed):
    tiles = torch.arange(4 * 64, dtype=torch.int16).reshape(4, 8, 8)
    got = run("matrices", tiles, [torch.zeros(32, count, dtype=torch.int32)], count, int(transposed))
    got = got.view(torch.int16).reshape(32, count, 2)
    for lane in range(32):
        for m in range(count):
            matrix = tiles[m].T if transposed else tiles[m]
            assert got[lane, m].tolist() == matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2].tolist()


def test_every_16_bit_float_widens_as_in_torch():
    bits = torch.arange(65536).to(torch.int16)
    bfloats, halves = run("widen", bits, [torch.zeros(65536), torch.zeros(65536)], 256)
    for got, dtype in ((bfloats, torch.bfloat16), (halves, torch.float16)):
        expected = bits.view(dtype).float()
        nan = expected.isnan()
        assert torch.equal(got.isnan(), nan)
        assert torch.equal(got[~nan].view(torch.int32), expected[~nan].view(torch.int32))


def test_floats_narrow_as_in_torch():
    """Every 16-bit value, its neighbours in fp32, and the points halfway to the next 16-bit value, among random bits."""
    parts = []
    for dtype in (torch.bfloat16, torch.float16):
        exact = torch.arange(65536).to(torch.int16).view(dtype).float()
        bits = exact.view(torch.int32)
        parts += [
            exact,
            (bits + 1).view(torch.float32),
            (bits - 1).view(torch.float32),
            (bits ^ 0x8000).view(torch.float32),
        ]
        parts += [
            (bits + 0x1000).view(torch.float32),
            (bits + 0x1001).view(torch.float32),
            (bits + 0x0FFF).view(torch.float32),
        ]
    parts.append(torch.randint(-(2**31), 2**31, (65536,), generator=generator).int().view(torch.float32))
    values = torch.cat(parts)
    outputs = [torch.zeros(len(values), dtype=torch.int16) for _ in range(2)] + [
        torch.zeros(len(values), dtype=torch.int32)
    ]
    bfloats, halves, pairs = run("narrow", values, outputs, len(values) // 256)
    for got, dtype in ((bfloats, torch.bfloat16), (halves, torch.float16)):
        expected, nan = values.to(dtype), values.isnan()
        assert got.view(dtype)[nan].isnan().all()
        assert torch.equal(got[~nan], expected[~nan].view(torch.int16))
    pairs = pairs.view(torch.int16).reshape(-1, 2).view(torch.bfloat16)
    finite = ~values.isnan()
    assert torch.equal(pairs[finite], torch.stack([values, -values], 1).to(torch.bfloat16)[finite])


def test_powers_of_two():
    given = torch.cat(
        [torch.linspace(-140, 10, 1000), torch.tensor([0.0, 1.0, -1.0, 127.0, -126.0, -NONE, NONE, torch.nan])]
    )
    given = torch.cat([given, torch.zeros(-given.numel() % 32)])
    got = run("exp2", given, [torch.zeros_like(given)], given.numel() // 32)
    exact = torch.exp2(given.double())
    exact[exact < 2.0**-126] = 0.0
    torch.testing.assert_close(got.double(), exact, rtol=2.0**-22, atol=0.0, equal_nan=True)


def test_the_larger_of_a_number_and_nan_is_the_number():
    pairs = torch.randn(32, 2, generator=generator)
    pairs[:6] = torch.tensor([[NONE, 1], [1, NONE], [torch.nan, 2], [2, torch.nan], [NONE, NONE], [-NONE, 3]])
    got = run("larger", pairs, [torch.zeros(32)])
    assert torch.equal(got, torch.fmax(pairs[:, 0], pairs[:, 1]))


def test_the_larger_of_pairs_is_nan_where_one_is():
    pairs = torch.randn(32, 2, 2, generator=generator).bfloat16()
    pairs[:4, :, 0] = torch.tensor([[NONE, 1], [torch.nan, 2], [2, torch.nan], [-NONE, 3]])
    got = run("larger_pairs", pairs.view(torch.int32), [torch.zeros(32, dtype=torch.int32)])
    assert torch.equal(got.view(torch.bfloat16).nan_to_num(9), pairs.amax(1).flatten().nan_to_num(9))


def test_pairs_are_multiplied_and_added():
    """By powers of two and numbers with few bits, of which the results have all; subnormal ones are not lost."""
    given, expected = [], []
    for dtype, small in ((torch.bfloat16, 2.0**-130), (torch.float16, 2.0**-20)):
        numbers = torch.randint(-16, 16, (32, 3, 2), generator=generator).float()
        numbers[:4, 0] *= small
        numbers[:4, 1] = 2.0**12
        numbers[:4, 2] = -0.0
        numbers[4] = torch.tensor([[-0.0, 0.0], [2.0, 2.0], [-0.0, -0.0]])
        numbers[5] = torch.tensor([[NONE, torch.nan], [2.0, 1.0], [1.0, 1.0]])
        given.append(numbers.to(dtype).view(torch.int32).flatten())
        expected.append((numbers[:, 0] * numbers[:, 1] + numbers[:, 2]).to(dtype))
    outputs = run("fused_pairs", torch.cat(given), [torch.zeros(32, dtype=torch.int32) for _ in range(2)])
    for got, want in zip(outputs, expected, strict=True):
        got = got.view(want.dtype).view(32, 2)
        assert got.isnan()[5].tolist() == [False, True]
        keep = torch.arange(32) != 5
        assert torch.equal(got[keep].view(torch.int16), want[keep].view(torch.int16)) and got[5, 0] == NONE


def test_bytes_are_picked_and_signs_repeated():
    words = np.random.default_rng(1).integers(0, 2**32, (32, 3), dtype=np.uint64)
    got = run(
        "pick_bytes", torch.from_numpy(words.astype(np.uint32).view(np.int32)), [torch.zeros(32, dtype=torch.int32)]
    )
    for (a, b, selector), picked in zip(words.tolist(), got.tolist(), strict=True):
        eight = (a | b << 32).to_bytes(8, "little")
        four = [(which, eight[which & 7]) for which in (selector >> 4 * i & 15 for i in range(4))]
        expected = bytes(byte if which < 8 else 0xFF * (byte >> 7) for which, byte in four)
        assert (picked % 2**32).to_bytes(4, "little") == expected


def test_positions_of_bits():
    numbers = [0, 1, 2, 3, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, *(2**k + 1 for k in range(1, 64, 3))]
    numbers += [0] * (-len(numbers) % 32)
    given = torch.from_numpy(np.array(numbers, dtype=np.uint64).view(np.int64))
    got = run("bits", given, [torch.zeros(2 * len(numbers), dtype=torch.int32)], len(numbers)).view(-1, 2).tolist()
    assert got == [[64 - number.bit_length(), (number % 2**32).bit_length() - 1] for number in numbers]


# Random123's published known-answer vectors for philox4x32-10: counter, key, result.
PHILOX = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([FULL] * 4, [FULL] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def test_philox_known_answers_inside_a_kernel():
    counters = torch.zeros(32, 4, dtype=torch.int64)
    keys = np.zeros((32, 2), dtype=np.uint32)
    for row, (counter, key, _) in enumerate(PHILOX):
        counters[row], keys[row] = torch.tensor(counter), key
    given = torch.from_numpy(counters.numpy().astype(np.uint32).view(np.int32))
    key_tensor = torch.from_numpy(keys.view(np.int64))
    words, _ = run(
        "philox", given, [torch.zeros(32, 4, dtype=torch.int32), key_tensor], 1, contents=("out", "inout", "out")
    )
    for row, (_, _, expected) in enumerate(PHILOX):
        assert words[row].numpy().view(np.uint32).tolist() == expected
