"""Arguments of every op, for opcheck and for tests of all ops: a generator of argument tuples, named like its op."""

from collections.abc import Callable, Iterator
from itertools import cycle, pairwise

import torch

SAMPLES: dict[str, Callable[[str], Iterator[tuple]]] = {}
"""Op -> function of a device. test_registration.py fails for an op that is not here."""


def sample(function):
    SAMPLES[function.__name__] = function
    return function


def numbers(device, dtype=torch.float32):
    """Makes random tensors, of this type or another."""
    return lambda *shape, dtype=dtype: torch.randn(shape, device=device).to(dtype)


@sample
def lookahead_embed(device):
    ids = torch.tensor([[3, -1, 0], [-2, 4, 4]], device=device)
    for dtype in (torch.float32, torch.bfloat16):
        table = torch.randn(5, 8, device=device, dtype=dtype)
        for learns in (False, True):
            slots = torch.randn(2, 8, device=device, requires_grad=learns)
            yield ids, table.clone().requires_grad_(learns), slots
    yield ids[:0], table, slots
    if device == "cpu":
        yield ids, packed_weight(device, 16, 64, 320), torch.randn(2, 64)


@sample
def lookahead_embed_backward(device):
    ids = torch.tensor([3, -1, 0, -2], device=device)
    grad = torch.randn(4, 8, device=device)
    yield grad, ids, 5, False, torch.float32
    yield grad.half(), ids.int(), 2, True, torch.float32
    yield grad.clone().requires_grad_(), ids, 5, False, torch.float32


@sample
def attention_tree(device):
    integers = dict(dtype=torch.int32, device=device)
    bounds, prefixes, depths = (torch.tensor(v, **integers) for v in ([0, 2, 5], [3, 0], [0, 1, 0, 1, 1]))
    visible = torch.tensor([[1], [3], [1], [3], [5]], device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, nodes = (torch.randn(5, heads, 64, device=device).to(dtype) for heads in (4, 2))
        cache = torch.randn(2, 8, 2, 64, device=device).to(dtype)
        shared = (prefixes, bounds, visible, 3)
        yield q, cache, cache, *shared, None, None, None, None, None, 0.0, -1, None, -1, None, False
        table = torch.tensor([[1], [0]], **integers)
        lists = torch.tensor([[0, 3], [2, -1], [-1, -1], [1, -1], [0, 2]], **integers)
        given = (0.1, 5.0, 2, torch.ones(4, device=device), 3, lists, False)
        yield q, cache, cache, *shared, None, None, None, None, None, 0.0, -1, None, -1, None, True
        yield q, cache, cache.clone(), *shared, nodes, nodes.clone(), table, depths, *given
    empty = q[:0], cache, cache, prefixes, bounds * 0, visible[:0], 3
    yield *empty, None, None, None, None, None, 0.0, -1, None, -1, None, False


@sample
def attention_merge(device):
    for dtype in (torch.float32, torch.bfloat16):
        out, lse = torch.randn(3, 2, 64, device=device).to(dtype), torch.randn(3, 2, device=device)
        yield out, lse, out.neg(), lse + 1, None
        yield out, lse, out.neg(), lse + 1, lse[0].clone()
    yield out[:0], lse[:0], out[:0], lse[:0], None


NO_SAMPLING = [None] * 4


def sampling(device):
    """temperature, top_k, top_p, min_p of two rows."""
    floats, integers = dict(dtype=torch.float32, device=device), dict(dtype=torch.int32, device=device)
    top_k = torch.tensor([3, 0], **integers)
    return [torch.tensor([0.7, 0.0], **floats), top_k, *(torch.tensor(v, **floats) for v in ([0.9, 1.0], [0.0, 0.01]))]


@sample
def draft_sample(device):
    logits = torch.randn(2, 70, device=device)
    seeds = torch.tensor([1, 2], device=device)
    for mode in range(4):
        yield logits, 3, mode, *NO_SAMPLING, None, seeds, seeds, None
    allowed = torch.tensor([[-1, 5, 1], [0, 0, 0]], dtype=torch.int32, device=device)
    yield logits.bfloat16(), 80, 1, *sampling(device), allowed, seeds, seeds, seeds.int()
    yield logits[:0], 3, 3, *NO_SAMPLING, None, None, None, None


@sample
def accept_tree(device):
    integers = dict(dtype=torch.int32, device=device)
    target, draft = torch.randn(5, 70, device=device), torch.randn(5, 70, device=device).half()
    tokens = torch.tensor([0, 3, 4, 0, 9], device=device)
    parents, cu_nodes = torch.tensor([-1, 0, 0, -1, 0], **integers), torch.tensor([0, 3, 5], **integers)
    seeds = torch.tensor([1, 2], device=device)
    for rule in range(7):
        if rule == 3:  # block: chains only
            continue
        tree = (target, tokens, parents, cu_nodes, 1, rule)
        for logprobs in (-1, 0, 3):
            yield (
                *tree,
                draft,
                None,
                *sampling(device),
                *sampling(device),
                None,
                None,
                seeds,
                seeds,
                0.09,
                0.3,
                logprobs,
                max(logprobs, 0) * 20,
            )
    chains = (target, tokens, None, *tree[3:5], 3)
    yield (
        *chains, draft, None, *sampling(device), *sampling(device), None, None, seeds, seeds, 0.09, 0.3, -1, 0,
    )  # fmt: skip
    yield *tree[:5], 0, None, None, *NO_SAMPLING, *NO_SAMPLING, None, None, None, None, 0.09, 0.3, -1, 5


@sample
def accept_chain(device):
    target, draft = torch.randn(2, 4, 70, device=device), torch.randn(2, 3, 70, device=device)
    tokens, seeds = torch.randint(0, 70, (2, 3), device=device), torch.tensor([1, 2], device=device)
    for rule in range(7):
        rest = (draft, *sampling(device), *sampling(device), None, None, seeds, seeds, 0.09, 0.3)
        yield target, tokens, rule, *rest, rule % 3 - 1, 70 * (rule % 2)


@sample
def tree_prepare(device):
    integers = dict(dtype=torch.int32, device=device)
    parents, cu_nodes = torch.tensor([-1, 0, 0, -1, 0, 7], **integers), torch.tensor([0, 3, 3, 5], **integers)
    yield parents, cu_nodes, 3
    yield parents, cu_nodes, 65
    yield parents[:0], cu_nodes[:1], 1


@sample
def tree_mask(device):
    integers = dict(dtype=torch.int32, device=device)
    visible, cu_nodes = torch.tensor([[1], [3], [5], [1], [-1]], device=device), torch.tensor([0, 3, 3, 5], **integers)
    prefix_lens = torch.tensor([4, 0, 9], **integers)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield visible, cu_nodes, 3, prefix_lens, 13, dtype
    yield visible[:0], cu_nodes[:1], 3, prefix_lens[:0], 0, dtype


@sample
def cache_commit_(device):
    integers = dict(dtype=torch.int32, device=device)
    step = [torch.tensor(v, **integers) for v in ([2, 1], [0, 4, 6], [[0, 2, 3], [0, -1, -1]], [2, 0])]
    caches = [torch.randn(2, 9, 2, 8, device=device), torch.randn(2, 2, 9, 8, device=device).transpose(1, 2).half()]
    yield caches, *step, [], None
    yield caches, *step, [torch.randn(6, 2, 8, device=device).to(cache.dtype) for cache in caches], None
    pages = [torch.randn(5, 3, 2, 8, device=device) for _ in range(2)]
    yield pages, *step, [], torch.tensor([[4, 0, 2], [1, 3, 3]], **integers)


@sample
def next_tree_(device):
    integers = dict(dtype=torch.int32, device=device)
    step = [torch.tensor(v, **integers) for v in ([[0, 2], [0, -1]], [1, 0], [0, 0])]
    emitted, limits = torch.tensor([[4, 6], [9, -1]], device=device), torch.tensor([40, 40], device=device)
    offered = torch.stack([torch.randperm(70, device=device)[:8] for _ in range(8)]).view(2, 4, 8)
    scores = torch.randn(2, 4, 8, device=device).log_softmax(-1).sort(descending=True).values
    seeds, rates = torch.tensor([1, 2], device=device), torch.tensor([0.7, 0.5], device=device)
    costs, tables = torch.linspace(0, 1, 6, device=device), torch.randn(2, 70, 5, device=device).unbind()

    def state():
        rows, parents = torch.full((3, 2, 6), -1, device=device), torch.tensor([[-1, 0, 1, 0, 3, 2]] * 2, **integers)
        rows[0] = torch.tensor([5, 8, 3, -1, -2, 0], device=device)
        lengths, prefix_lens = torch.tensor([7, 5], device=device), torch.tensor([6, 4], **integers)
        return rows, parents, lengths, prefix_lens, torch.zeros(2, 7, dtype=torch.int64, device=device)

    fixed = (limits, emitted, *step)
    text = torch.randint(0, 9, (2, 12), device=device)
    yield *state(), *fixed, None, None, None, None, 0, None, None, None, *NO_SAMPLING, None
    yield *state(), *fixed, None, None, offered, scores, 1, *tables, None, *sampling(device), seeds
    yield *state(), *fixed, rates, None, None, None, 0, None, None, None, *NO_SAMPLING, None
    yield *state(), *fixed, rates, costs, offered, scores, 2, None, None, text.clone(), *NO_SAMPLING, None
    yield *state(), *fixed, rates, costs, offered, scores, 1, *tables, None, *sampling(device), seeds


@sample
def quantize_rows(device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        # Not random: compared as numbers, a byte of a scale must not be a NaN.
        rows = torch.linspace(-1, 1, 192, device=device).view(3, 2, 32).to(dtype)
        for codes in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
            yield rows, codes
            yield rows[..., 1:8].transpose(0, 1), codes
    yield rows[:0], torch.int8


@sample
def recall_scores(device):
    text = torch.randint(0, 5, (3, 40), device=device)
    contexts = torch.tensor([[1, 2, 3], [-1, -1, 0], [4, 4, 4], [-1, 1, 2]], device=device)
    requests = torch.tensor([0, 2, 1, 0], dtype=torch.int32, device=device)
    lengths = torch.tensor([40, 7, 0], device=device)
    yield torch.randint(-1, 6, (4, 9), device=device), contexts, requests, text, lengths
    yield torch.randint(-1, 6, (0, 9), device=device), contexts[:0], requests[:0], text, lengths


@sample
def adapter_rows_(device):
    ids = torch.tensor([3, -2, 0, -1, -2, 7], device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        random = numbers(device, dtype)
        out, x, *both = random(6, 40), random(6, 24), random(2, 5, 24), random(2, 5, 40)
        yield out, x, ids, *both, 0.5
        yield out.view(2, 3, 40), x.view(2, 3, 24), ids, *(half[:1] for half in both), 1.0
    yield out[:0], x[:0], ids[:0], *both, 1.0


@sample
def linear_rows(device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        random = numbers(device, dtype)
        x, weight, bias = random(2, 3, 40), random(7, 40), random(7)
        yield x, weight, None
        yield x.transpose(0, 1), weight, bias
    yield x[:0], weight, bias


PACKED_SIZES = (296, 320, 328, 336, 384, 400, 552, 576, 584, 640)
K_SIZES = (296, 328, 552, 584)
"""Of blocks of a packed weight, and of those of which eight share a scale."""


def packed_weight(device, outputs, width, size):
    """A packed weight whose blocks have so many bytes: any codes, and scales that are finite."""
    blocks = torch.randint(0, 256, (-(-outputs // 16), width // 32, size), dtype=torch.uint8)
    is_k, scales = size in K_SIZES, torch.float32 if size in (384, 400, 640) else torch.float16
    runs = blocks.view(len(blocks), -1, size * (8 if is_k else 1))
    numbers = torch.randn(*runs.shape[:2], 32) / (8 * 128 if is_k else 8)  # factors are up to 128
    runs[..., : 32 * scales.itemsize].view(scales).copy_(numbers)
    return blocks.to(device)


@sample
def linear_packed(device):
    floats = cycle((torch.float32, torch.bfloat16, torch.float16))
    for size, dtype in zip(PACKED_SIZES, floats, strict=False):
        random, width = numbers(device, dtype), 512 if size in K_SIZES else 64
        x, weight, bias = random(2, 3, width), packed_weight(device, 23, width, size), random(23)
        yield x, weight, None, 23
        yield x.transpose(0, 1), weight, bias, 23
    yield x[:0], weight, bias, 23


@sample
def step_rms_norm(device):
    for form, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        random = numbers(device, dtype)
        x, residual, weight = random(3, 4, 40), random(3, 4, 40), random(40)
        yield x, weight, None, 1e-6, form
        yield x.transpose(0, 1), weight, residual.transpose(0, 1), 1e-5, form
    yield x[:0], weight, residual[:0], 0.0, form


@sample
def step_rotary(device):
    kinds = (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.half, torch.float32)
    for dtype, factor_dtype in kinds:
        joined = torch.randn(5, 6, 24, device=device).to(dtype)
        for rotated in (24, 10):
            yield joined[:, :3], joined[:, 3:5], *torch.randn(2, 5, rotated, device=device).to(factor_dtype)
    random = numbers(device)
    yield random(0, 3, 24), random(0, 2, 24), random(0, 24), random(0, 24)


@sample
def step_gate(device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        gate, up = torch.randn(2, 3, 4, 40, device=device).to(dtype)
        for activation in range(2):
            yield gate, up, activation
            yield gate.transpose(0, 1), None, activation
    yield gate[:0], None, 0


NO_ADAPTERS = (None, [], 0, 1.0)
"""The last arguments of both layer ops."""


@sample
def layer_before_attention(device):
    for form, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        random = numbers(device, dtype)
        x, q, k, v = (random(rows, 12) for rows in (5, 16, 8, 8))
        yield x, None, q, None, k, None, v, None, None, None, None, None, 8, 1e-6, form, *NO_ADAPTERS
        norms, biases = (random(12), random(8), random(8)), (random(16), random(8), random(8))
        cos, sin = (random(5, 6, dtype=torch.float32 if form == 1 else dtype) for _ in range(2))
        ids = torch.tensor([3, -2, 0, -1, -2], device=device)
        adapters = [random(2, 3, numbers) for numbers in (12, 16, 12, 8)]  # of q and v
        arguments = (x, norms[0], q, biases[0], k, biases[1], v, biases[2], *norms[1:], cos, sin, 8, 1e-5, form)
        yield *arguments, *NO_ADAPTERS
        yield *arguments, ids, adapters, 1 | 1 << 2, 0.5
    empty = (x[:0], norms[0], q, None, k, None, v, None, random(16), random(8), cos[:0], sin[:0], 8, 0.0, form)
    yield *empty, *NO_ADAPTERS
    yield *empty, ids[:0], adapters, 1 | 1 << 2, 0.5


@sample
def layer_after_attention(device):
    for form, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        random = numbers(device, dtype)
        attended, residual = random(5, 16), random(5, 12)
        o, gate, up, down = (random(*shape) / 4 for shape in ((12, 16), (20, 12), (20, 12), (12, 20)))
        plain = (attended, residual, o, None, None, None, gate, None, up, None, down, None, None, 1e-6, form, 0, 0.5)
        yield *plain, *NO_ADAPTERS
        ids = torch.tensor([-2, 3, 0, -1, -2], device=device)
        adapters = [random(2, 3, numbers) / 4 for numbers in (12, 20, 20, 12)]  # of up and down
        yield *plain, ids, adapters, 1 << 5 | 1 << 6, 0.5
        biases = [random(n) for n in (12, 20, 20, 12)]
        norms = [random(12) for _ in range(3)]
        yield (
            attended, residual, o, biases[0], *norms[:2], gate, biases[1], up, biases[2], down, biases[3], norms[2], 1e-5, form,
            1, 1.0, *NO_ADAPTERS,
        )  # fmt: skip
    empty = (attended[:0], residual[:0], *plain[2:])
    yield *empty, *NO_ADAPTERS
    yield *empty, ids[:0], adapters, 1 << 5 | 1 << 6, 0.5


@sample
def layer_pack(device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        shapes = ((12,), (16, 12), (8, 12), (8, 12), (12, 16), (20, 12), (20, 12), (12, 20))
        weights = [torch.randn(shape, device=device).to(dtype) for _ in range(2) for shape in shapes]
        yield weights, sum(1 << i for i in (0, 1, 3, 5, 9, 13, 15, 17)), 8


@sample
def layer_stack(device):
    integers = dict(dtype=torch.int32, device=device)
    bounds, prefixes, depths = (torch.tensor(v, **integers) for v in ([0, 2, 5], [3, 0], [0, 1, 0, 1, 1]))
    visible = torch.tensor([[1], [3], [1], [3], [5]], device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):

        def random(*shape, dtype=dtype):
            return (torch.randn(shape, device=device) * shape[-1] ** -0.5).to(dtype)  # float16 holds the results

        sizes = (128, 64, 64)
        weights, caches = [], []
        for _ in range(2):
            weights += [random(12), *(random(n, 12) for n in sizes), random(12, 128)]
            weights += [random(20, 12), random(20, 12), random(12, 20)]
            caches += [random(2, 8, 1, 64), random(2, 8, 1, 64)]
        parts = sum(1 << i for i in (0, 1, 3, 5, 9, 13, 15, 17))
        shared = (prefixes, bounds, visible, 3)
        ends = (64, 1e-6, 0, 0, 0.5, 0.1, 0.0)
        no_adapters = ([], 0, 1.0)
        yield (
            random(5, 12), None, weights, parts, caches, *shared, *[None] * 4, (1, 1), (-1, -1), None, None, *no_adapters,
            *[None] * 3, (), *ends,
        )  # fmt: skip
        rotation = [random(9, 64) for _ in range(2)]
        places, ids, wanted = (torch.tensor(v, device=device) for v in ([3, 4, 0, 1, 1], [7, -2, 5, 6, -1], [4, 0]))
        deep, head = random(2, 2, 12), random(30, 12)
        sides = ((128, 12), (20, 12))  # of o and down
        adapters = [random(2, 2, 3, numbers) for pair in sides for numbers in pair]
        given = [weights[0], *(random(n, 20) for n in sizes), *weights[4:]]
        yield (
            random(5, 12), random(5, 20), given, parts, [torch.stack(caches)], *shared, depths, *rotation, places, (1, 0),
            (2, -1), ids, deep, adapters, 1 << 3 | 1 << 6, 0.5, random(12), head, wanted, (2, 0), *ends[:3], 0, 1.0,
            *ends[5:-1], 5.0,
        )  # fmt: skip
    rotations = [random(2, 9, 64) for _ in range(2)]
    yield (
        random(5, 12), None, weights, parts, caches, *shared, depths, *rotations, places, (2, 1), (-1, -1), None, None,
        *no_adapters, *[None] * 3, (), *ends,
    )  # fmt: skip
    nothing = (prefixes, bounds * 0, visible[:0], 3)
    yield (
        random(0, 12), None, weights, parts, caches, *nothing, *[None] * 4, (1, 1), (-1, -1), None, None, *no_adapters,
        *[None] * 3, (), *ends,
    )  # fmt: skip


def forest(device):
    """parents and cu_nodes of a request of three nodes, one of none and one of two."""
    return [torch.tensor(v, dtype=torch.int32, device=device) for v in ([-1, 0, 0, -1, 0], [0, 3, 3, 5])]


@sample
def recurrent_tree(device):
    index = torch.tensor([3, 0, 1], dtype=torch.int32, device=device)
    random = numbers(device)
    for form, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        form, qkv = form % 2, [random(5, heads, width, dtype=dtype) for heads, width in ((2, 8), (2, 8), (4, 20))]
        beta, states = random(5, 4).sigmoid(), random(3, 4, 20, 8).transpose(2, 3)
        yield *qkv, -random(5, 4).abs(), None, beta, states, None, *forest(device), form, 0.5
        yield *qkv, -random(5, 4, 8).abs(), None, None, random(4, 4, 8, 20), index, *forest(device), form, 1.0
        rates = random(4, 8, 20).abs()
        yield *qkv, -random(5, 4, 20).abs(), rates, beta, states, None, *forest(device), form, 1.0
    nothing = [torch.zeros(size, dtype=torch.int32, device=device) for size in (0, 4)]
    yield *(x[:0] for x in qkv), random(0, 4), None, None, states, None, *nothing, 0, 1.0


@sample
def convolution_tree(device):
    index = torch.tensor([3, 0, 1], dtype=torch.int32, device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        random = numbers(device, dtype)
        x, weight, bias, states = random(5, 20), random(20, 4), random(20), random(4, 20, 3)
        yield x, weight, bias, states[:3], None, *forest(device), True
        yield x, weight, None, states, index, *forest(device), False
    nothing = [torch.zeros(size, dtype=torch.int32, device=device) for size in (0, 4)]
    yield x[:0], weight, bias, states[1:], None, *nothing, True


@sample
def state_commit_(device):
    integers = dict(dtype=torch.int32, device=device)
    cu_nodes = forest(device)[1]
    path, accepted = torch.tensor([[0, 2], [-1, -1], [0, -1]], **integers), torch.tensor([1, 0, 0], **integers)
    random = numbers(device)
    k, u, x = random(5, 2, 8), random(5, 4, 20), random(5, 6)
    head, channel, element = -random(5, 4).abs(), -random(5, 4, 8).abs(), -random(5, 4, 20).abs()
    rates = random(4, 8, 20).abs()
    updates = [k, u, head, x, k.bfloat16(), u, channel, k.half(), u, element, rates]

    def states(slots):
        return [random(slots, 4, 8, 20), random(slots, 6, 3), random(slots, 4, 20, 8).mT, random(slots, 4, 8, 20)]

    yield states(3), updates, (3, 1, 3, 4), cu_nodes, path, accepted, None
    yield states(5), updates, (3, 1, 3, 4), cu_nodes, path, accepted, torch.tensor([4, -1, 0], **integers)


def shard_case(device, rule=1):
    """Arguments of a step on two ranks' shards, and the ranks' logits; the first rank's are whole slices."""
    integers = dict(dtype=torch.int32, device=device)
    target, draft = (torch.randn(5, 8200, device=device) for _ in range(2))
    tokens = torch.tensor([0, 3, 4, 0, 9], device=device)
    parents, cu_nodes = torch.tensor([-1, 0, 0, -1, 0], **integers), torch.tensor([0, 3, 5], **integers)
    seeds = torch.tensor([1, 2], device=device)
    numbers = [torch.tensor(v, dtype=torch.float32, device=device) for v in ([0.7, 1.0], [0.0, 0.01])]
    law = [numbers[0], None, None, numbers[1]]
    return (tokens, parents, cu_nodes), target, draft, [*law, *law], seeds


def shard_rounds(device):
    """(local arguments of each rank, combine arguments) of each round of a step."""
    tree, target, draft, law, seeds = shard_case(device)
    state, order = None, [0, 4, 5, 6, 7]
    for this, following in pairwise(order):
        cuts = ((0, 8192), (8192, 8200))
        local = [(target[:, a:b], *tree, 1, draft[:, a:b], None, None, None, seeds, a, 1, this, state) for a, b in cuts]
        answers = torch.stack([torch.ops.pass_ext.shard_local(*arguments) for arguments in local])
        combine = (target, *tree, 1, 1, draft, None, *law, seeds, seeds, 8200, this, following, answers, state)
        yield local, combine
        state = torch.ops.pass_ext.shard_combine(*combine)[0]


@sample
def shard_local(device):
    for local, _ in shard_rounds(device):
        yield from local


@sample
def shard_combine(device):
    for _, combine in shard_rounds(device):
        yield combine


@sample
def shard_best(device):
    *_, (_, combine) = shard_rounds(device)
    logits, state, seeds = combine[0], combine[-1], torch.arange(5, device=device)
    for mode in range(4):
        yield logits, state, 3, mode, None, None, seeds, seeds, None, 0
