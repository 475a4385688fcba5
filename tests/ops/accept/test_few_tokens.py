"""The GPU's short ways to few tokens: filters on a list of the highest, races that score only what can win.

Each test compares with the CPU op, token for token, where a list is long enough, too short, too long, or full of ties.
"""

import pytest
import torch
from emulator.ops import EMULATED, on_gpu
from support.steps import to

import pass_ext
from pass_ext import testing
from pass_ext.ops.common.rules import ACCEPT_RULES
from pass_ext.reference.common.noise import coin
from pass_ext.testing import cpu_backends

CPU = cpu_backends()[-1]
OFF = (0, 1.0, 0.0)
FILTERS = (
    (1, 1.0, 0.0), (50, 1.0, 0.0), (50, 0.9, 0.0), (96, 0.99, 0.0), (97, 0.99, 0.0), (300, 0.5, 0.0), (0, 0.3, 0.0),
    (0, 0.9, 0.0), (0, 0.99999, 0.0), (0, 0.0, 0.0), (20, 1.0, 0.1), (0, 0.95, 0.02), (0, 1.0, 0.05), (7, 0.6, 0.5), OFF,
)  # fmt: skip
"""(top-k, top-p, min-p) of a row."""
MODES = (("coupled", 1), ("top", 12), ("without", 5), ("with", 3))
KINDS = ("peaked", "flat", "ties", "equal", "few", "masked")


LARGE, SMALL = "large GPU", "small GPU"
"""The emulator of a GPU that scans these rows beforehand, and of one whose blocks scan what they come to."""


@pytest.fixture
def gpu(request):
    """A GPU, or the emulator of a GPU of this size."""
    with on_gpu(multiprocessors=132 if request.param == LARGE else 1):
        yield (*testing.cuda_backends(), EMULATED)[0]


def cases(values, on_small):
    """(size of the GPU, value): all values on a large one, and those of ``on_small`` on a small one too."""
    return [(LARGE, value) for value in values] + [(SMALL, value) for value in on_small]


def on(backend, op, tensors, **options):
    with backend.active():
        return [tensor.cpu() for tensor in op(**to(tensors, backend.device), **options)]


def rows_of(kind, rows):
    """Rows of logits, and the allowed tokens (one of 256) or None."""
    random = torch.Generator().manual_seed(KINDS.index(kind))
    vocabulary = 33 if kind == "few" else 35_000
    logits = torch.randn(rows, vocabulary, generator=random) * (3 if kind == "flat" else 1.5)
    if kind == "peaked":
        logits[:, torch.randperm(vocabulary, generator=random)[:64]] += 8
    if kind == "ties":
        logits = (logits * 0.49).round()  # more tokens reach the floor than a list holds
    if kind == "equal":
        logits = torch.ones_like(logits)
    if kind != "masked":
        return logits, None
    words = torch.randint(-(2**31), 2**31, (8, rows, -(-vocabulary // 32)), generator=random).int()
    return logits, words[0] & words[1] & words[2] & words[3] & words[4] & words[5] & words[6] & words[7]


def sampling_of(filters):
    values = zip(*filters, strict=True)
    dtypes = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    sampling = {
        name: torch.tensor(value, dtype=dtype) for (name, dtype), value in zip(dtypes.items(), values, strict=True)
    }
    return sampling | {"temperature": torch.full((len(filters),), 0.8)}


@pytest.mark.parametrize(("gpu", "kind"), cases(KINDS, ("peaked", "masked")), indirect=["gpu"])
def test_filters_leave_the_tokens_that_they_leave_on_the_cpu(gpu, kind):
    logits, allowed = rows_of(kind, len(FILTERS))
    tensors = {"logits": logits, **sampling_of(FILTERS), "seeds": torch.arange(len(FILTERS)) * 7}
    tensors["positions"] = torch.zeros_like(tensors["seeds"])
    if allowed is not None:
        tensors["allowed"] = allowed
    for mode, k in MODES[: 2 if kind == "equal" else None]:
        expected, actual = (on(backend, pass_ext.draft_sample, tensors, k=k, mode=mode) for backend in (CPU, gpu))
        assert torch.equal(actual[0], expected[0]), (mode, (actual[0] != expected[0]).any(1).nonzero().flatten())
        torch.testing.assert_close(actual[1], expected[1], atol=1e-5, rtol=1e-6)


def logits_at_the_floor(wanted, ties):
    """A row whose short list of ``wanted`` tokens has none to spare: each of its tokens is the only high one of its set (four
    groups of 64; a warp has 32 sets), and warp after warp has ``ceil(wanted / 4)`` of them, at random lanes. ``ties``: all
    are equal, and so are tokens after them that belong to no list of this length.
    """
    share = -(-wanted // 4)
    count = -(-wanted // share) * share
    random = torch.Generator().manual_seed(wanted)
    lanes = torch.cat([torch.randperm(32, generator=random)[:share] + 32 * warp for warp in range(count // share)])
    ids = lanes * 256 + torch.randint(256, (count,), generator=random)
    logits = torch.full((33_000,), -30.0)
    logits[ids] = 5.0 if ties else 5.0 - 0.01 * torch.arange(count)
    # In the sets of the first warp, which has no place left.
    logits[32_900:32_910] = 5.0 if ties else 4.99 - 0.01 * count
    return logits


@pytest.mark.parametrize(("gpu", "ties"), cases((False, True), (False, True)), indirect=["gpu"])
def test_a_short_list_loses_no_token_at_its_floor(gpu, ties):
    """Exactly as many tokens reach the floor as filters or a ranking want: a higher one would lose some."""
    wanted = (1, 2, 3, 4, 8, 9, 48, 50, 64, 96)
    rows = torch.stack([logits_at_the_floor(count, ties) for count in wanted])
    columns = sampling_of([(count, top_p, 0.0) for top_p in (1.0, 0.9999) for count in wanted])
    filtered = {"logits": rows.repeat(2, 1), **columns}
    expected, actual = (on(backend, pass_ext.draft_sample, filtered, k=100, mode="top") for backend in (CPU, gpu))
    assert (expected[0][: len(wanted)] >= 0).sum(1).tolist() == list(wanted)
    assert torch.equal(actual[0], expected[0]), (actual[0] != expected[0]).any(1).nonzero().flatten()
    torch.testing.assert_close(actual[1], expected[1], atol=1e-5, rtol=1e-6)
    for count in (2, 4, 8, 48, 96):  # a ranking wants one token more than it names
        ranked = {"logits": logits_at_the_floor(count, ties)[None]}
        expected, actual = (
            on(backend, pass_ext.draft_sample, ranked, k=count - 1, mode="top") for backend in (CPU, gpu)
        )
        assert torch.equal(actual[0], expected[0]), count


@pytest.mark.parametrize(
    ("gpu", "rule"),
    cases(("rejection", "traversal", "kseq", "typical", "coupled", "joint", "coupled_inverse"), ("rejection",)),
    indirect=["gpu"],
)
def test_later_draws_find_the_support_of_a_filtered_row(gpu, rule):
    """Supports of one token, of 64, of more than a list holds, and of all tokens."""
    filters = ((1, 1.0, 0.0), (64, 1.0, 0.0), (50, 0.9, 0.0), (0, 0.9, 0.0), OFF, *4 * [(96, 1.0, 0.0)])
    requests, drafts, vocabulary = len(filters), 1, 33_000
    random = torch.Generator().manual_seed(5)
    target = torch.randn(requests, drafts + 1, vocabulary, generator=random)
    draft = target[:, :drafts] + torch.randn(requests, drafts, vocabulary, generator=random) * 0.7
    sampling = sampling_of(filters)
    sampling |= (
        {f"draft_{name}": value for name, value in sampling.items()} if ACCEPT_RULES[rule].needs_draft_logits else {}
    )
    for seed in range(2):
        nowhere = torch.zeros(requests, dtype=torch.int64)
        step = {"target_logits": target, "seeds": torch.full((requests,), seed), "positions": nowhere, **sampling}
        drawn = [
            on(CPU, pass_ext.draft_sample, {"logits": draft[:, i], "temperature": torch.full((requests,), 0.8),
               "seeds": torch.full((requests,), seed + 100 * i), "positions": nowhere}, k=1, mode="without")[0]
            for i in range(drafts)
        ]  # fmt: skip
        step["draft_tokens"] = torch.cat(drawn, 1)
        if ACCEPT_RULES[rule].needs_draft_logits:
            step["draft_logits"] = draft
        expected, actual = (on(backend, pass_ext.accept_chain, step, rule=rule) for backend in (CPU, gpu))
        assert all(map(torch.equal, actual, expected)), seed


@pytest.mark.parametrize(("gpu", "vocabulary"), cases((6_000, 30_000), (30_000,)), indirect=["gpu"])
def test_a_residual_of_one_token_is_found_among_groups_that_promise_more(gpu, vocabulary):
    """p is q but for 2 % at one token: after a rejection only this token is left, and nearly all groups have higher bounds.

    The small row has more tokens than the list of those that can win; in the large one warps score group after group.
    """
    share, left = 0.02, vocabulary - 77
    random = torch.Generator().manual_seed(vocabulary)
    draft = torch.randn(vocabulary, generator=random).double() * 0.3
    draft[left] = -60.0
    q = draft.softmax(-1)
    p = q * (1 - share)
    p[left] += share
    seeds = [seed for seed in range(1000) if float(coin(seed, 0, 1)) > 0.985][:3]
    target = p.log().float().expand(len(seeds), 2, vocabulary).contiguous()
    step = {
        "target_logits": target, "draft_logits": q.log().float().expand(len(seeds), 1, vocabulary).contiguous(),
        "draft_tokens": torch.full((len(seeds), 1), 11), "temperature": torch.ones(len(seeds)),
        "draft_temperature": torch.ones(len(seeds)), "seeds": torch.tensor(seeds),
        "positions": torch.zeros(len(seeds), dtype=torch.int64),
    }  # fmt: skip
    expected, actual = (on(backend, pass_ext.accept_chain, step, rule="rejection") for backend in (CPU, gpu))
    assert expected[0][:, 0].tolist() == [left] * len(seeds), "the residual is one token"
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize(("gpu", "spread"), cases((0.3, 3.0, 0.0), (3.0,)), indirect=["gpu"])
def test_the_winners_of_a_flat_row_are_found_span_by_span(gpu, spread):
    """More groups and tokens may win than the lists hold, so a block takes a span of the groups at a time."""
    random = torch.Generator().manual_seed(8)
    logits = torch.randn(4, 40_000, generator=random) * spread
    logits[1, 20_000:] = -torch.inf  # fewer groups than a first span
    tensors = {"logits": logits, "temperature": torch.full((4,), 0.8), "seeds": torch.arange(4)}
    tensors["positions"] = torch.zeros(4, dtype=torch.int64)
    for mode, k in (("coupled", 1), ("coupled", 4), ("without", 40)):
        expected, actual = (on(backend, pass_ext.draft_sample, tensors, k=k, mode=mode) for backend in (CPU, gpu))
        assert torch.equal(actual[0], expected[0]), (mode, k)
        torch.testing.assert_close(actual[1], expected[1], atol=1e-5, rtol=1e-6)
