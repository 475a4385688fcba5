"""Calls every op with random arguments, legal and not, and demands of each call our refusal or a result within the contract.

A program, so that a crash ends it alone: ``python tests/sanitize/fuzz_ops.py --seed 7 --calls 2000 --seconds 60``. Call
number n of a seed is always the same: ``--first n --calls 1 --verbose`` repeats it. In a build with sanitizers it also reports
reads and writes that happen to do no harm.
"""

import argparse
import contextlib
import math
import random
import sys
import time
import traceback
from collections.abc import Callable, Generator
from itertools import pairwise

import torch
from torch import Tensor

import pass_ext
from pass_ext import _library, reference
from pass_ext.layers import dequantize_rows, pack_weight
from pass_ext.ops.quantize import CODE_HEADER, MOST_OF_CODES

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.float64, torch.int32, torch.int64, torch.int16, torch.uint8, torch.bool, torch.complex64)
SIZES = (0, 1, 1, 2, 3, 3, 5, 7, 8, 13, 17, 33)
WIDTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70, 100, 127, 129, 300)
NUMBERS = (math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-42, -0.0, 65504.0)
INTEGERS = (-1, -2, -(2**31), 2**31 - 1, -(2**63), 2**63 - 1, 1 << 20)
SCALARS = (0, -1, 1, 1024, 1025, 2**31 - 1, 2**31, -(2**31), 2**62)


class WrongResultError(Exception):
    """A call returned what the op's contract rules out."""


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise WrongResultError(what)


class Draw:
    """What one call is made of; a function of the seed and the call's number."""

    def __init__(self, seed: int, number: int) -> None:
        self.random = random.Random(f"{seed}/{number}")
        self.torch = torch.Generator().manual_seed(self.random.getrandbits(62))
        self.is_hostile = self.chance(0.6)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, options):
        return self.random.choice(options)

    def size(self) -> int:
        return self.pick(SIZES)

    def width(self) -> int:
        return self.random.randint(2000, 70000) if self.chance(0.03) else self.pick(WIDTHS)

    def floats(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Random numbers; in hostile calls some rows of them, or all, are what no model should give."""
        values = torch.randn(shape, generator=self.torch) * self.pick((0.1, 1.0, 4.0))
        if self.is_hostile and values.numel() and self.chance(0.3):
            flat = values.view(-1)
            for _ in range(self.pick((1, 1, 3, 20))):
                flat[self.random.randrange(flat.numel())] = self.pick(NUMBERS)
            if self.chance(0.1):
                values.fill_(self.pick(NUMBERS))
        return self.laid_out(values.to(dtype))

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Numbers in [low, high); in hostile calls some lie outside, just so or far."""
        values = torch.randint(low, max(high, low + 1), shape, generator=self.torch).to(dtype)
        if self.is_hostile and values.numel() and self.chance(0.15):
            limits = torch.iinfo(dtype)
            extreme = self.pick((*INTEGERS, high, high + 1, low - 1))
            values.view(-1)[self.random.randrange(values.numel())] = min(max(extreme, limits.min), limits.max)
        return values

    def spoilt(self, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        """These numbers; in hostile calls one of them may be another."""
        tensor = torch.tensor(values, dtype=dtype)
        if self.is_hostile and values and self.chance(0.15):
            limits = torch.iinfo(dtype)
            tensor[self.random.randrange(len(values))] = min(max(self.pick(INTEGERS), limits.min), limits.max)
        return tensor

    def laid_out(self, values: Tensor) -> Tensor:
        """The same numbers at an odd address, with gaps between the rows, or with the first two dimensions exchanged."""
        if values.dim() < 2 or self.chance(0.5):
            return values
        if self.chance(0.3):
            return values.transpose(0, 1).contiguous().transpose(0, 1) if values.dim() > 2 else values
        gap, offset = self.pick((1, 3, 8)), self.pick((0, 1, 5))
        wide = torch.full((*values.shape[:-1], values.shape[-1] + gap + offset), math.nan).to(values.dtype)
        wide[..., offset : offset + values.shape[-1]] = values
        return wide[..., offset : offset + values.shape[-1]]

    def sizes(self) -> list[int]:
        """How many nodes each request has; none: a padded request."""
        return [self.pick((0, 1, 2, 3, 5, 9, 17, 33, 65)) for _ in range(self.pick((0, 1, 1, 2, 3, 5, 9)))]

    def bounds(self, sizes: list[int]) -> Tensor:
        bounds = torch.tensor([0, *sizes]).cumsum(0).int()
        if self.is_hostile and self.chance(0.15):
            bounds[self.random.randrange(len(bounds))] = self.pick((-1, 0, 1, int(bounds[-1]) + 1, 2**31 - 1, -(2**31)))
        return bounds

    def parents(self, sizes: list[int]) -> Tensor:
        parents = [-1 if i == 0 else self.random.randrange(i) for size in sizes for i in range(size)]
        tensor = torch.tensor(parents, dtype=torch.int32)
        if self.is_hostile and parents and self.chance(0.2):
            tensor[self.random.randrange(len(parents))] = self.pick((-1, -2, len(parents), 2**31 - 1, -(2**31), 0, 5))
        return tensor

    def damaged(self, arguments: dict) -> dict:
        """In hostile calls, often one argument of another dtype, shape, size or layout than is wanted."""
        if not self.is_hostile or self.chance(0.5):
            return arguments
        name = self.pick([name for name, value in arguments.items() if isinstance(value, (Tensor, int, float, list))])
        value = arguments[name]
        if isinstance(value, list):
            damaged = [self.damaged_tensor(v) if self.chance(0.5) else v for v in value]
            damaged = damaged[:-1] if self.chance(0.2) else damaged + damaged[:1] if self.chance(0.2) else damaged
        elif isinstance(value, Tensor):
            damaged = self.damaged_tensor(value)
        elif isinstance(value, (bool, str)):
            damaged = value
        else:
            damaged = self.pick(SCALARS) if isinstance(value, int) else self.pick(NUMBERS)
        return {**arguments, name: damaged}

    def damaged_tensor(self, value: Tensor) -> Tensor:
        kind = self.random.randrange(7)
        if kind == 0:
            return value.to(self.pick(DTYPES)) if not value.is_complex() else value
        if kind == 1:
            return value.unsqueeze(self.random.randint(0, value.dim()))
        if kind == 2 and value.dim():
            return value.select(0, 0) if value.shape[0] and value.dim() > 1 else value[:0]
        if kind == 3 and value.dim():
            dim = self.random.randrange(value.dim())
            return value.narrow(dim, 0, self.random.randint(0, value.shape[dim]))
        if kind == 4 and value.dim():
            return torch.cat([value, value], dim=self.random.randrange(value.dim()))
        if kind == 5 and value.dim():
            return torch.stack([value, value], dim=-1)[..., 0]  # the same numbers, each with a gap after it
        return value.transpose(-1, -2) if value.dim() > 1 else value


# ---- one call of each op: a generator, named like the op, that yields arguments, is sent the result and judges it ----

CASES: dict[str, Callable[[Draw], Generator]] = {}
"""Op -> its calls. test_fuzz.py fails for an op that is not here."""


def case(function):
    CASES[function.__name__] = function
    return function


@case
def lookahead_embed(draw: Draw):
    vocabulary, slots, dim = draw.pick((1, 5, 70)), draw.pick((0, 1, 3)), draw.width()
    dtype = draw.pick((*FLOATS, torch.float64))
    table = draw.floats(vocabulary, dim, dtype=dtype)
    if draw.chance(0.3):
        table, _, _ = packed_weight(draw, vocabulary)
        vocabulary, dim, dtype = 16 * len(table), 32 * table.shape[1], draw.pick(FLOATS)
    arguments = draw.damaged(dict(
        ids=draw.integers(-slots, vocabulary, *(draw.size() for _ in range(draw.pick((1, 1, 2, 3)))),
                          dtype=draw.pick((torch.int32, torch.int64))),
        table=table, lookahead=draw.floats(slots, dim, dtype=draw.pick((dtype, torch.float32))),
    ))  # fmt: skip
    out = yield arguments
    check_same([out], [reference.lookahead_embed(**arguments)])


@case
def lookahead_embed_backward(draw: Draw):
    rows, dim, slots, dtype = draw.pick((0, 1, 5, 70)), draw.width(), draw.chance(0.5), draw.pick(FLOATS)
    ids = draw.integers(-3, 8, draw.size(), dtype=draw.pick((torch.int32, torch.int64)))
    arguments = draw.damaged(dict(
        grad=draw.floats(len(ids), dim, dtype=dtype), ids=ids, rows=rows, slots=slots,
    ))  # fmt: skip
    if isinstance(arguments["rows"], int) and arguments["rows"] > 10_000:
        arguments["rows"] = 10_000  # a larger gradient is legal, and only memory
    out = yield {**arguments, "dtype": draw.pick((arguments["grad"].dtype, torch.float32))}
    grad, ids = arguments["grad"].double(), arguments["ids"].long()
    picked = -1 - ids if slots else ids
    inside = (picked >= 0) & (picked < arguments["rows"])
    exact = torch.zeros(arguments["rows"], grad.shape[-1], dtype=torch.float64)
    check_close([out], [exact.index_add(0, picked[inside], grad[inside])])


@case
def tree_prepare(draw: Draw):
    sizes = draw.sizes()
    arguments = draw.damaged(dict(
        parents=draw.parents(sizes), cu_nodes=draw.bounds(sizes), max_nodes=max([1, *sizes]) + draw.pick((0, 0, 60)),
    ))  # fmt: skip
    result = yield arguments
    check_same(result, reference.tree_prepare(**arguments))


@case
def tree_mask(draw: Draw):
    sizes = draw.sizes()
    max_nodes, prefixes = max([1, *sizes]) + draw.pick((0, 0, 60)), [draw.size() for _ in sizes]
    arguments = draw.damaged(dict(
        visible=draw.integers(-(2**63), 2**63 - 1, sum(sizes), -(-max_nodes // 64), dtype=torch.int64),
        cu_nodes=draw.bounds(sizes), max_nodes=max_nodes, prefix_lens=draw.spoilt(prefixes),
        kv_len=max([0, *map(sum, zip(prefixes, sizes, strict=True))]) + draw.pick((0, 0, 9)),
    ))  # fmt: skip
    if arguments["kv_len"] > 100_000:
        arguments["kv_len"] = 100_000  # a larger mask is legal, and only memory
    result = yield {**arguments, "dtype": draw.pick(FLOATS)}
    check_same([result], [reference.tree_mask(**arguments, dtype=result.dtype)])


def key_lists(draw: Draw, prefixes, sizes):
    """Lists of keys that the rows of these requests have, or, sometimes, not."""
    most = draw.pick((1, 3, 70))
    rows = []
    for prefix, nodes in zip(prefixes, sizes, strict=True):
        for _ in range(nodes):
            listed = sorted({draw.pick(range(prefix + nodes)) for _ in range(draw.pick((0, 1, most)))})
            rows.append(listed[:most] + [-1] * (most - len(listed)))
    return draw.spoilt([key for row in rows for key in row]).view(len(rows), most)


@case
def attention_tree(draw: Draw):
    sizes, dtype = draw.sizes(), draw.pick(FLOATS)
    dim = draw.pick((64, 64, 80, 96, 128, 256, 16, 192))
    value_dim = draw.pick((dim, dim, dim, 16, 128, 512))
    prefixes = [draw.pick((0, 1, 5, 63, 64, 65, 130)) for _ in sizes]
    nodes, kv_heads, max_nodes = sum(sizes), draw.pick((1, 2, 3)), max([1, *sizes]) + draw.pick((0, 0, 60))
    has_new, page = draw.chance(0.5), draw.pick((0, 0, 1, 3, 16))
    slots = max([0, *map(sum, zip(prefixes, [0] * len(sizes) if has_new else sizes, strict=True))]) + draw.pick((0, 2))
    pages = -(-slots // page) if page else 0
    heads = kv_heads * draw.pick((1, 2, 5))
    shape = (len(sizes) * pages + 1, page, kv_heads) if page else (len(sizes), slots, kv_heads)
    codes = draw.pick((None, None, None, *MOST_OF_CODES))

    def rows(*shape):
        numbers = draw.floats(*shape, dtype=dtype)
        return numbers if codes is None else pass_ext.layers.quantize_rows(numbers, codes)

    fresh = [rows(nodes, kv_heads, width) if has_new else None for width in (dim, value_dim)]
    arguments = draw.damaged(dict(
        q=draw.floats(nodes, heads, dim, dtype=dtype),
        k_cache=rows(*shape, dim), v_cache=rows(*shape, value_dim),
        prefix_lens=draw.spoilt(prefixes), cu_nodes=draw.bounds(sizes),
        visible=draw.integers(-(2**63), 2**63 - 1, nodes, -(-max_nodes // 64), dtype=torch.int64), max_nodes=max_nodes,
        k_new=fresh[0], v_new=fresh[1],
        block_table=draw.integers(0, shape[0], len(sizes), pages + draw.pick((0, 1))) if page else None,
        depths=draw.integers(0, 1, nodes) if draw.chance(0.5) else None,
        scale=draw.pick((None, 0.1)), softcap=draw.pick((0.0, 0.0, 30.0)), window=draw.pick((-1, -1, 1, 7, 100)),
        sinks=draw.floats(heads, dtype=torch.float32) if draw.chance(0.3) else None,
        chunk=draw.pick((-1, -1, 1, 7, 100)),
        key_lists=key_lists(draw, prefixes, sizes) if draw.chance(0.3) else None,
    ))  # fmt: skip
    out, lse = yield arguments
    q = arguments["q"]
    expected = *q.shape[:2], arguments["v_cache"].shape[3] - (0 if codes is None else CODE_HEADER)
    demand(out.shape == expected and out.dtype == q.dtype, f"out is {out.dtype}{list(out.shape)}")
    demand(lse.shape == q.shape[:2] and lse.dtype == torch.float32, f"lse is {lse.dtype}{list(lse.shape)}")
    floats = [arguments[name] for name in ("q", "k_cache", "v_cache", "k_new", "v_new", "sinks")]
    floats = [dequantize_rows(x) if x is not None and x.dtype in MOST_OF_CODES else x for x in floats]
    if all(is_tame(given) for given in floats if given is not None) and abs(arguments["scale"] or 0.1) < 10:
        demand(bool(out.isfinite().all()), "out holds NaN or infinity, though no input does")
        exact = reference.attention_tree(**arguments)
        check_close((out, lse.clamp(min=-1e6)), (exact[0], exact[1].clamp(min=-1e6)), 0.03)


@case
def attention_merge(draw: Draw):
    shape, dtype = [draw.size() for _ in range(draw.pick((0, 1, 2, 3)))], draw.pick(FLOATS)
    dim = draw.width()
    arguments = draw.damaged(dict(
        out_a=draw.floats(*shape, dim, dtype=dtype), lse_a=draw.floats(*shape, dtype=torch.float32),
        out_b=draw.floats(*shape, dim, dtype=dtype), lse_b=draw.floats(*shape, dtype=torch.float32),
        sinks=draw.floats(shape[-1], dtype=torch.float32) if shape and draw.chance(0.5) else None,
    ))  # fmt: skip
    result = yield arguments
    exact = reference.attention_merge(**arguments)
    if all(is_tame(given) for given in arguments.values() if given is not None):
        check_close(result, exact, 0.02)


@case
def cache_commit_(draw: Draw):
    sizes, dtype = draw.sizes(), draw.pick((*DTYPES, torch.float8_e4m3fn))
    nodes, page = sum(sizes), draw.pick((0, 0, 1, 3, 16))
    prefixes, accepted = [draw.size() for _ in sizes], [draw.random.randrange(max(1, size)) for size in sizes]
    slots = max([0, *map(sum, zip(prefixes, sizes, strict=True))]) + draw.pick((0, 2))
    pages = -(-slots // page) if page else 0
    heads, dim, count = draw.pick((1, 2, 5)), draw.pick((0, 1, 3, 8, 64)), draw.pick((0, 1, 2, 4))
    shape = (len(sizes) * pages + 1, page, heads, dim) if page else (len(sizes), slots, heads, dim)
    path = torch.full((len(sizes), max([0, *accepted]) + 1), -1, dtype=torch.int32)
    for b, size in enumerate(sizes):
        own = draw.integers(0, size, accepted[b] + 1) if draw.chance(0.5) else torch.arange(accepted[b] + 1)
        path[b, : accepted[b] + 1] = own.int() if size else -1
    table = torch.randperm(shape[0], generator=draw.torch)[: len(sizes) * pages].int().view(len(sizes), pages)
    if page and table.numel() and draw.is_hostile and draw.chance(0.15):
        table.view(-1)[draw.random.randrange(table.numel())] = draw.pick((-1, shape[0], 2**31 - 1, -(2**31)))
    bits = lambda *shape: torch.randint(0, 100, shape, generator=draw.torch).to(dtype)  # noqa: E731
    arguments = draw.damaged(dict(
        caches=[draw.laid_out(bits(*shape)) for _ in range(count)], prefix_lens=draw.spoilt(prefixes),
        cu_nodes=draw.bounds(sizes), path=path, num_accepted=draw.spoilt(accepted),
        new=[draw.laid_out(bits(nodes, heads, dim)) for _ in range(count)] if draw.chance(0.5) else None,
        block_table=table if page else None,
    ))  # fmt: skip
    before = [cache.clone() for cache in arguments["caches"]]
    yield arguments
    table = arguments["block_table"]
    has_own_pages = table is None or table.unique().numel() == table.numel()  # no two requests write to one
    if arguments["caches"] and has_own_pages:
        reference.cache_commit_(before, **{name: value for name, value in arguments.items() if name != "caches"})
        check_same(arguments["caches"], before)


def law(draw: Draw, rows: int, prefix: str = "") -> dict:
    """Sampling parameters, each there or not, each in or out of its range."""
    values = dict(
        temperature=draw.floats(rows, dtype=torch.float32).abs() if draw.chance(0.8) else None,
        top_k=draw.integers(0, 20, rows) if draw.chance(0.4) else None,
        top_p=draw.floats(rows, dtype=torch.float32).abs() if draw.chance(0.4) else None,
        min_p=draw.floats(rows, dtype=torch.float32).abs() / 8 if draw.chance(0.4) else None,
    )
    return {prefix + name: value for name, value in values.items()}


def noise(draw: Draw, rows: int) -> dict:
    seeds, positions = (draw.integers(-(2**63), 2**63 - 1, rows, dtype=torch.int64) for _ in range(2))
    return {"seeds": seeds if draw.chance(0.8) else None, "positions": positions}


def masks(draw: Draw, vocabulary: int, *rows: int) -> Tensor | None:
    return draw.integers(-(2**31), 2**31 - 1, *rows, -(-vocabulary // 32)) if draw.chance(0.3) else None


@case
def draft_sample(draw: Draw):
    rows, vocabulary = draw.size(), draw.width()
    arguments = draw.damaged(dict(
        logits=draw.floats(rows, vocabulary, dtype=draw.pick(FLOATS)), k=draw.pick((1, 1, 2, 5, 33, 1024)),
        mode=draw.pick(pass_ext.ops.draft.MODES), **law(draw, rows), allowed=masks(draw, vocabulary, rows),
        **noise(draw, rows), nodes=draw.integers(0, 1024, rows) if draw.chance(0.5) else None,
    ))  # fmt: skip
    tokens, logprobs = yield arguments
    logits, k = arguments["logits"], arguments["k"]
    for out, dtype in ((tokens, torch.int64), (logprobs, torch.float32)):
        demand(out.dtype == dtype and out.shape == (len(logits), k), f"a result is {out.dtype}{list(out.shape)}")
    is_empty = tokens == -1
    demand(bool(((tokens >= -1) & (tokens < logits.shape[1])).all()), "a token outside [-1, V)")
    demand(bool((logprobs[is_empty] == -math.inf).all()), "token -1 has another log probability than -inf")
    demand(bool((logprobs[~is_empty] < 1e-3).all()), "a log probability above 0, or NaN")
    demand(bool((is_empty.int().diff(dim=1) >= 0).all()), "a token after -1")
    for own in tokens.tolist():
        drawn = [token for token in own if token >= 0]
        demand(arguments["mode"] == "with" or len(set(drawn)) == len(drawn), "the same candidate twice")
    if arguments["allowed"] is not None:
        words = (
            arguments["allowed"].reshape(len(logits), -(-logits.shape[1] // 32)).gather(1, tokens.clamp(min=0) // 32)
        )
        demand(bool(((words >> tokens.clamp(min=0) % 32 & 1).bool() | is_empty).all()), "a token that is not allowed")


def check_accepted(result, tokens: list[list[int]], vocabulary: int, max_depth: int) -> None:
    """tokens: those of each request's nodes."""
    shapes = [(len(tokens), max_depth + 1)] * 2 + [(len(tokens),)] * 2
    demand([tuple(part.shape) for part in result] == shapes, f"shapes {[tuple(part.shape) for part in result]}")
    for own, emitted, path, accepted, status in zip(tokens, *(part.tolist() for part in result), strict=True):
        demand(0 <= status <= 7, f"status {status}")
        demand(0 <= accepted <= max_depth, f"num_accepted {accepted}")
        if path[0] == -1:
            demand({*emitted, *path} == {-1} and accepted == 0, "a request without nodes emits something")
            continue
        taken, rest = path[: accepted + 1], path[accepted + 1 :]
        demand(taken[0] == 0 and taken == sorted({*taken}) and taken[-1] < len(own), f"path {path}")
        demand({*rest, *emitted[accepted + 1 :]} <= {-1}, f"path {path}, emitted {emitted} after {accepted} accepted")
        demand(emitted[:accepted] == [own[node] for node in taken[1:]], f"emitted {emitted} is not what {path} says")
        demand(-1 <= emitted[accepted] < vocabulary, f"emitted {emitted[accepted]}")
        demand(emitted[accepted] >= 0 or status != 0, "emitted -1 though the status is 0")


def scores(draw: Draw, vocabulary: int) -> dict:
    """Whether log probabilities are asked for, how many alternatives, and the room for supports."""
    wanted = draw.chance(0.5)
    return dict(return_logprobs=wanted, top_logprobs=draw.pick((0, 1, 5, 64)) if wanted else 0,
                support=min(draw.pick((0, 0, 1, 7, 100, vocabulary)), vocabulary))  # fmt: skip


def check_logprobs(result, arguments: dict, vocabulary: int) -> None:
    if not arguments["return_logprobs"]:
        return demand(result.logprobs is None, "log probabilities that nobody asked for")
    has_token, ours = result.emitted >= 0, result.logprobs
    for name in ("raw", "processed"):
        values = getattr(ours, name)
        demand(bool((values[~has_token] == -math.inf).all()), f"{name} is not -inf where no token was emitted")
        demand(bool(((values < 1e-3) | values.isnan()).all()), f"{name} above 0")
    demand(bool((ours.processed[has_token] > -math.inf).all()), "an emitted token has no probability")
    tokens = ours.top_tokens
    demand(tokens.shape == (*result.emitted.shape, arguments["top_logprobs"]), f"top_tokens {list(tokens.shape)}")
    demand(bool(((tokens >= -1) & (tokens < vocabulary)).all()), "an alternative outside [-1, V)")
    demand(bool((tokens[~has_token] == -1).all()), "alternatives where no token was emitted")
    demand(bool(((ours.top_raw == -math.inf) == (tokens == -1)).all()), "an alternative of probability 0")
    demand(bool((ours.top_raw[..., 1:] <= ours.top_raw[..., :-1]).all()), "alternatives out of order")
    return None


def check_support(result, room: int, vocabulary: int) -> None:
    if room == 0:
        return demand(result.support is None, "supports that nobody asked for")
    has_token, (counts, ids) = result.emitted >= 0, result.support
    demand(ids.shape == (*result.emitted.shape, room), f"ids {list(ids.shape)}")
    demand(bool(((counts > 0) == has_token).all() and (counts <= vocabulary).all()), f"counts {counts.tolist()}")
    listed = counts.where(counts <= room, 0)
    demand(
        bool(((ids >= 0).sum(-1) == listed).all() and ((ids >= -1) & (ids < vocabulary)).all()),
        "other ids than counted",
    )
    rises = (ids[..., 1:] > ids[..., :-1]) | (ids[..., 1:] == -1)
    demand(bool(rises.all()), "ids out of order")
    holds = (ids == result.emitted[..., None]).any(-1) | (listed == 0)
    demand(bool(holds.all()), "an emitted token outside its support")
    return None


@case
def accept_tree(draw: Draw):
    sizes, vocabulary = draw.sizes(), draw.width()
    nodes, rows = sum(sizes), draw.pick((1, 3, 40))
    shares = draw.chance(0.5)
    arguments = draw.damaged(dict(
        target_logits=draw.floats(nodes, vocabulary, dtype=draw.pick(FLOATS)),
        tokens=draw.integers(-1, vocabulary, nodes, dtype=torch.int64),
        parents=None if draw.chance(0.2) else draw.parents(sizes),  # None: chains
        cu_nodes=draw.bounds(sizes), max_depth=draw.pick((0, 1, 3, 8, 40)),
        rule=draw.pick(tuple(pass_ext.RULES)),
        draft_logits=draw.floats(rows if shares else nodes, vocabulary, dtype=draw.pick(FLOATS)),
        draft_rows=draw.integers(-1, rows, nodes) if shares else None,
        **law(draw, len(sizes)), **(law(draw, len(sizes), "draft_") if draw.chance(0.4) else {}),
        allowed=masks(draw, vocabulary, nodes), draft_allowed=masks(draw, vocabulary, rows if shares else nodes),
        **noise(draw, len(sizes)), **scores(draw, vocabulary),
    ))  # fmt: skip
    result = yield arguments
    bounds, tokens = arguments["cu_nodes"].tolist(), arguments["tokens"].tolist()
    own = [tokens[max(a, 0) : max(b, 0)] for a, b in pairwise(bounds)]
    check_accepted(result, own, arguments["target_logits"].shape[1], arguments["max_depth"])
    check_logprobs(result, arguments, arguments["target_logits"].shape[1])
    check_support(result, arguments["support"], arguments["target_logits"].shape[1])


@case
def accept_chain(draw: Draw):
    requests, drafts, vocabulary = draw.size(), draw.pick((0, 1, 2, 5, 20)), draw.width()
    arguments = draw.damaged(dict(
        target_logits=draw.floats(requests, drafts + 1, vocabulary, dtype=draw.pick(FLOATS)),
        draft_tokens=draw.integers(-1, vocabulary, requests, drafts, dtype=torch.int64),
        rule=draw.pick(tuple(pass_ext.RULES)),
        draft_logits=draw.floats(requests, drafts, vocabulary, dtype=draw.pick(FLOATS)),
        **law(draw, requests), **(law(draw, requests, "draft_") if draw.chance(0.4) else {}),
        allowed=masks(draw, vocabulary, requests, drafts + 1),
        draft_allowed=masks(draw, vocabulary, requests, drafts), **noise(draw, requests), **scores(draw, vocabulary),
    ))  # fmt: skip
    result = yield arguments
    tokens = [[0, *own] for own in arguments["draft_tokens"].tolist()]
    check_accepted(result, tokens, arguments["target_logits"].shape[2], arguments["target_logits"].shape[1] - 1)
    check_logprobs(result, arguments, arguments["target_logits"].shape[2])
    check_support(result, arguments["support"], arguments["target_logits"].shape[2])


def shard_step(draw: Draw, rounds: tuple[str, ...]) -> tuple[dict, dict, Tensor | None]:
    """A step on one shard after the rounds before the last of these: arguments of both shard ops, and the state."""
    sizes, width, start = draw.sizes(), draw.width(), draw.pick((0, 0, 8192))
    nodes, dtype = sum(sizes), draw.pick(FLOATS)
    tree = dict(
        target_logits=draw.floats(nodes, width, dtype=dtype),
        tokens=draw.integers(-1, start + width, nodes, dtype=torch.int64),
        parents=draw.parents(sizes), cu_nodes=draw.bounds(sizes),
        rule=draw.pick(("coupled", "rejection", "rejection_with_replacement", "traversal")),
        draft_logits=draw.floats(nodes, width, dtype=dtype),
    )  # fmt: skip
    local = dict(allowed=masks(draw, width, nodes), draft_allowed=masks(draw, width, nodes), vocab_start=start,
                 slices=9, seeds=noise(draw, len(sizes))["seeds"])  # fmt: skip
    combine = dict(max_depth=draw.pick((0, 1, 3, 8)), vocab_size=start + width, **law(draw, len(sizes)),
                   seeds=local["seeds"], positions=torch.arange(len(sizes)))  # fmt: skip
    state = None
    for this, following in pairwise(rounds):
        answers = pass_ext.distributed.shard_local(**tree, **local, round=this, state=state)[None]
        state, _ = pass_ext.distributed.shard_combine(
            **tree, **combine, answers=answers, round=this, next=following, state=state
        )
    return {**tree, **local}, {**tree, **combine}, state


SHARD_ROUNDS = ("peaks", *["counts"] * 6, "top_p", *["nucleus"] * 6, "masses", "residuals", "races")


@case
def shard_local(draw: Draw):
    count = draw.pick(range(1, len(SHARD_ROUNDS) + 1))
    local, _, state = shard_step(draw, SHARD_ROUNDS[:count])
    arguments = draw.damaged(dict(**local, round=SHARD_ROUNDS[count - 1], state=state))
    answers = yield arguments
    shape, dtype = pass_ext.ops.shard.answer_shape(
        SHARD_ROUNDS[count - 1], nodes=len(arguments["target_logits"]), requests=len(arguments["cu_nodes"]) - 1,
        slices=arguments["slices"], rule=arguments["rule"], has_draft=arguments["draft_logits"] is not None,
    )  # fmt: skip
    demand(answers.dtype == dtype and answers.shape == shape, f"answers are {list(answers.shape)}")


@case
def shard_combine(draw: Draw):
    count = draw.pick(range(1, len(SHARD_ROUNDS) + 1))
    local, combine, state = shard_step(draw, SHARD_ROUNDS[:count])
    this = SHARD_ROUNDS[count - 1]
    answers = pass_ext.distributed.shard_local(**local, round=this, state=state)[None]
    following = (*SHARD_ROUNDS, "finish")[count]
    arguments = draw.damaged(dict(**combine, answers=answers, round=this, next=following, state=state))
    _, result = yield arguments
    if following == "finish":
        bounds, tokens = arguments["cu_nodes"].tolist(), arguments["tokens"].tolist()
        own = [tokens[max(a, 0) : max(b, 0)] for a, b in pairwise(bounds)]
        check_accepted(result, own, arguments["vocab_size"], arguments["max_depth"])


@case
def shard_best(draw: Draw):
    rows, width = draw.size(), draw.width()
    logits = draw.floats(rows, width, dtype=draw.pick(FLOATS))
    numbers = [torch.full((rows,), n, dtype=torch.int32) for n in (-1, 0)]
    tree = dict(tokens=numbers[1].long(), parents=numbers[0], cu_nodes=torch.arange(rows + 1, dtype=torch.int32),
                rule="rejection")  # fmt: skip
    state = None
    for this, following in (("peaks", "masses"), ("masses", "races")):
        answers = pass_ext.distributed.shard_local(logits, **tree, vocab_start=0, slices=9, round=this, state=state)[
            None
        ]
        state, _ = pass_ext.distributed.shard_combine(
            logits, **tree, max_depth=0, answers=answers, vocab_size=width, round=this, next=following, state=state
        )
    arguments = draw.damaged(dict(
        logits=logits, state=state, k=draw.pick((1, 2, 5, 33)), mode=draw.pick(pass_ext.ops.draft.MODES), vocab_start=0,
        allowed=masks(draw, width, rows), **noise(draw, rows),
    ))  # fmt: skip
    words = yield arguments
    ids = words[..., 1]
    demand(bool(((ids >= -1) & (ids < 1 << 22)).all()), "an id is outside the vocabulary")


@case
def adapter_rows_(draw: Draw):
    wide, outs, dtype = draw.width(), draw.pick((0, 1, 3, 16, 33)), draw.pick(FLOATS)
    rows, adapters, rank = draw.size(), draw.pick((0, 1, 1, 2, 5)), draw.pick((0, 1, 3, 8, 17, 128))
    ids = [draw.random.randint(-adapters, 9) for _ in range(rows)]
    arguments = dict(
        out=draw.floats(rows, outs, dtype=dtype), x=draw.floats(rows, wide, dtype=dtype),
        ids=torch.tensor(ids, dtype=draw.pick((torch.int32, torch.int64))),
        down=draw.floats(adapters, rank, wide, dtype=dtype), up=draw.floats(adapters, rank, outs, dtype=dtype),
        scale=draw.pick((1.0, 0.25, -2.0)),
    )  # fmt: skip
    arguments = draw.damaged(arguments)
    before = arguments["out"].clone() if isinstance(arguments["out"], Tensor) else None
    out = yield arguments
    tokens = arguments["ids"] >= 0
    demand(torch.equal(out[tokens].nan_to_num(), before[tokens].nan_to_num()), "a token's row changed")


@case
def linear_rows(draw: Draw):
    wide, outs, dtype = draw.width(), draw.pick((0, 1, 3, 16, 33)), draw.pick(FLOATS)
    shape = [draw.size() for _ in range(draw.pick((0, 1, 1, 2)))]
    arguments = draw.damaged(dict(
        x=draw.floats(*shape, wide, dtype=dtype), weight=draw.floats(outs, wide, dtype=dtype),
        bias=draw.floats(outs, dtype=dtype) if draw.chance(0.5) else None,
    ))  # fmt: skip
    out = yield arguments
    exact = reference.linear_rows(**arguments)
    demand(out.shape == exact.shape and out.dtype == exact.dtype, f"out is {out.dtype}{list(out.shape)}")
    if all(is_tame(given) for given in arguments.values() if given is not None):
        check_close([out], [exact], 0.05)


@case
def linear_packed(draw: Draw):
    outs, dtype = draw.pick((1, 16, 33)), draw.pick(FLOATS)
    shape = [draw.size() for _ in range(draw.pick((0, 1, 1, 2)))]
    weight, scale, offset = packed_weight(draw, outs)
    arguments = draw.damaged(dict(
        x=draw.floats(*shape, 32 * weight.shape[1], dtype=dtype), weight=weight,
        bias=draw.floats(outs, dtype=dtype) if draw.chance(0.5) else None, outputs=outs,
    ))  # fmt: skip
    out = yield arguments
    exact = reference.linear_packed(**arguments)
    demand(out.shape == exact.shape and out.dtype == exact.dtype, f"out is {out.dtype}{list(out.shape)}")
    if all(is_tame(given) for given in (scale, offset, arguments["x"], arguments["bias"]) if given is not None):
        check_close([out], [exact], 0.05)


def packed_weight(draw: Draw, outs: int) -> tuple[Tensor, Tensor, Tensor]:
    """A packed weight, its scales and its offsets."""
    blocks, bits, (scales, each) = (
        draw.pick((1, 1, 3)),
        draw.pick((4, 8)),
        draw.pick(((torch.float16, 0), (torch.float32, 0), (torch.float16, 1), (torch.float16, 2))),
    )
    blocks, runs = (8 * blocks, blocks) if each else (blocks, blocks)
    factors = torch.randint(-128, 128, (2, outs, each * blocks), generator=draw.torch).to(torch.int8) if each else None
    has_table = bits == 4 and not each and draw.chance(0.5)
    table = torch.randint(0, 256, (16,), generator=draw.torch).to(torch.uint8) if has_table else None
    scale, offset = (draw.floats(outs, runs, dtype=scales) for _ in range(2))
    codes = torch.randint(0, 1 << bits, (outs, 32 * blocks), generator=draw.torch).to(torch.uint8)
    return pack_weight(codes, scale, offset, bits=bits, table=table, factors=factors), scale, offset


@case
def step_rms_norm(draw: Draw):
    shape, wide, dtype = [draw.size() for _ in range(draw.pick((0, 1, 2, 3)))], draw.width(), draw.pick(FLOATS)
    arguments = draw.damaged(dict(
        x=draw.floats(*shape, wide, dtype=dtype), weight=draw.floats(wide, dtype=dtype), eps=draw.pick((1e-6, 1e-5, 0.1)),
        residual=draw.floats(*shape, wide, dtype=dtype) if draw.chance(0.5) else None,
        form=draw.pick(pass_ext.ops.step.NORM_FORMS),
    ))  # fmt: skip
    result = yield arguments
    if all(map(is_tame, filter(torch.is_tensor, arguments.values()))) and arguments["eps"] > 0:
        check_close(result, reference.step_rms_norm(**arguments), 0.01)


@case
def step_rotary(draw: Draw):
    rows, dim, dtype = draw.size(), 2 * draw.pick((1, 3, 8, 12, 32, 40)), draw.pick(FLOATS)
    rotated, factor_dtype = draw.pick((dim, dim, 2, 0)), draw.pick((dtype, torch.float32))
    arguments = draw.damaged(dict(
        q=draw.floats(rows, draw.size(), dim, dtype=dtype), k=draw.floats(rows, draw.size(), dim, dtype=dtype),
        cos=draw.floats(rows, rotated, dtype=factor_dtype), sin=draw.floats(rows, rotated, dtype=factor_dtype),
    ))  # fmt: skip
    result = yield arguments
    check_same(result, reference.step_rotary(**arguments))


@case
def next_tree_(draw: Draw):
    requests, row_count, width = draw.size(), draw.pick((1, 2, 5, 12, 40, 64)), draw.pick((1, 2, 4))
    slots, count, rank, vocabulary = draw.pick((1, 2, 8)), draw.pick((1, 3, 33, 64, 100)), draw.size(), draw.width()
    parents = torch.tensor([-1, *(draw.random.randrange(i) for i in range(1, row_count))], dtype=torch.int32)
    offering, first = draw.random.randint(1, row_count), 0
    first = draw.random.randint(0, row_count - offering)
    has_offers, has_tables, chooses = draw.chance(0.8), draw.chance(0.6), draw.chance(0.6)
    integers = lambda low, high, *shape: draw.integers(low, high, *shape, dtype=torch.int64)  # noqa: E731
    rows = integers(-3, vocabulary, 3, requests, row_count)
    arguments = draw.damaged(dict(
        rows=rows, parents=parents.repeat(requests, 1).contiguous(), lengths=integers(1, 20, requests),
        prefix_lens=draw.integers(0, 19, requests), report=integers(0, 9, requests, 5 + width + draw.pick((0, 2))),
        limits=integers(0, 30, requests), emitted=integers(0, vocabulary, requests, width),
        path=draw.integers(0, row_count, requests, width), num_accepted=draw.integers(0, width, requests),
        status=draw.integers(0, 2, requests),
        rates=draw.floats(slots, dtype=torch.float32).contiguous() if chooses else None,
        costs=draw.floats(row_count, dtype=torch.float32).contiguous() if chooses and draw.chance(0.5) else None,
        offered=integers(-1, vocabulary, requests, offering, count) if has_offers else None,
        scores=draw.floats(requests, offering, count, dtype=torch.float32).contiguous() if has_offers else None,
        first=first,
        left=draw.floats(vocabulary, rank, dtype=torch.float32) if has_offers and has_tables else None,
        right=draw.floats(vocabulary, rank, dtype=torch.float32) if has_offers and has_tables else None,
        text=integers(-1, vocabulary, requests, draw.pick((0, 21, 30))) if draw.chance(0.5) else None,
        **law(draw, requests), seeds=integers(0, 99, requests),
    ))  # fmt: skip
    before = {name: arguments[name].clone() for name in WRITTEN["next_tree_"] if arguments[name] is not None}
    yield arguments
    if arguments["offered"] is None and arguments["lengths"].numel():  # choices depend on rounding: tests/ops/next
        reference.next_tree_(**arguments | before)
        check_same([arguments[name] for name in before], list(before.values()))


@case
def quantize_rows(draw: Draw):
    shape = [draw.size() for _ in range(draw.pick((0, 1, 2, 3)))]
    dtypes = (*MOST_OF_CODES, torch.uint8, torch.float32) if draw.is_hostile else tuple(MOST_OF_CODES)
    arguments = draw.damaged(dict(
        rows=draw.floats(*shape, draw.width(), dtype=draw.pick(FLOATS)), dtype=draw.pick(dtypes)
    ))  # fmt: skip
    stored = yield arguments
    check_same([stored.view(torch.uint8)], [reference.quantize_rows(**arguments).view(torch.uint8)])


@case
def recall_scores(draw: Draw):
    rows, count, requests, room = (
        draw.size(),
        draw.pick((0, 1, 3, 64, 100)),
        draw.random.randint(1, 4),
        draw.pick((0, 1, 9, 300)),
    )
    integers = lambda low, high, *shape: draw.integers(low, high, *shape, dtype=torch.int64)  # noqa: E731
    arguments = draw.damaged(dict(
        tokens=integers(-1, 4, rows, count), contexts=integers(-1, 4, rows, 3), requests=draw.integers(0, requests, rows),
        text=integers(-1, 4, requests, room), lengths=integers(0, room + 1, requests),
    ))  # fmt: skip
    scores = yield arguments
    check_same([scores], [reference.recall_scores(**arguments)])


@case
def step_gate(draw: Draw):
    shape, wide, dtype = [draw.size() for _ in range(draw.pick((0, 1, 2, 3)))], draw.width(), draw.pick(FLOATS)
    is_joined = draw.chance(0.5)
    arguments = draw.damaged(dict(
        gate=draw.floats(*shape, wide * (2 if is_joined else 1), dtype=dtype),
        up=None if is_joined else draw.floats(*shape, wide, dtype=dtype),
        activation=draw.pick(pass_ext.ops.step.ACTIVATIONS),
    ))  # fmt: skip
    out = yield arguments
    if all(map(is_tame, filter(torch.is_tensor, arguments.values()))):
        check_close([out], [reference.step_gate(**arguments)], 0.01)


def optional(draw: Draw, *shape: int, dtype: torch.dtype) -> Tensor | None:
    """Numbers of that shape, or None."""
    return draw.floats(*shape, dtype=dtype) if draw.chance(0.5) else None


def adapters_of_half(draw: Draw, rows: int, shapes: dict, dtype: torch.dtype) -> dict:
    """ids and adapters of some linear layers (name -> (out, in)), or of none."""
    count, ids = draw.pick((1, 2, 3)), [draw.pick((-3, -2, -1, -1, 0, 7)) for _ in range(rows)]
    ids = [max(id, -count) for id in ids]  # those below are refused
    if draw.chance(0.1):
        ids = [-1 - count for _ in ids]
    adapters = {
        name: tuple(draw.floats(count, rank, shape[side], dtype=dtype).contiguous() for side in (1, 0))
        for name, shape in shapes.items()
        if draw.chance(0.4)
        for rank in (draw.pick((0, 1, 5, 17)),)
    }
    if not adapters:
        return {}
    id_dtype = draw.pick((torch.int32, torch.int64))
    return dict(ids=torch.tensor(ids, dtype=id_dtype), adapters=adapters, adapter_scale=draw.pick((1.0, 0.5)))


@case
def layer_before_attention(draw: Draw):
    rows, width, dtype = draw.size(), draw.width(), draw.pick(FLOATS)
    head_dim, heads, key_heads = 2 * draw.width(), draw.pick((1, 2, 3)), draw.pick((1, 2))
    sizes = heads * head_dim, key_heads * head_dim, key_heads * head_dim
    cos, sin = (draw.floats(rows, head_dim, dtype=dtype) for _ in range(2)) if draw.chance(0.7) else (None, None)
    weights = {f"{name}_weight": draw.floats(size, width, dtype=dtype) for name, size in zip("qkv", sizes, strict=True)}
    biases = {f"{name}_bias": optional(draw, size, dtype=dtype) for name, size in zip("qkv", sizes, strict=True)}
    norms = {
        f"{name}_norm": optional(draw, draw.pick((head_dim, size)), dtype=dtype)
        for name, size in zip("qk", sizes, strict=False)
    }
    arguments = draw.damaged(dict(
        x=draw.floats(rows, width, dtype=dtype), **weights, **biases, **norms, head_dim=head_dim,
        input_norm=optional(draw, width, dtype=dtype), cos=cos, sin=sin, eps=draw.pick((1e-6, 0.5)),
        form=draw.pick(pass_ext.ops.step.NORM_FORMS),
        **adapters_of_half(draw, rows, {name: (size, width) for name, size in zip("qkv", sizes, strict=True)}, dtype),
    ))  # fmt: skip
    out = yield arguments
    if dtype == torch.float32 and all(map(is_tame, tensors_of(arguments))):
        check_close(out, reference.layer_before_attention(**arguments), 0.01)


@case
def layer_after_attention(draw: Draw):
    rows, width, heads, inner, dtype = draw.size(), draw.width(), draw.width(), draw.width(), draw.pick(FLOATS)
    shapes = dict(o=(width, heads), gate=(inner, width), up=(inner, width), down=(width, inner))
    norms = {name: optional(draw, width, dtype=dtype) for name in ("attention_norm", "mlp_norm", "output_norm")}
    is_scaled = norms["attention_norm"] is None and norms["output_norm"] is None
    arguments = draw.damaged(dict(
        attended=draw.floats(rows, heads, dtype=dtype), residual=draw.floats(rows, width, dtype=dtype),
        **{f"{name}_weight": draw.floats(*shape, dtype=dtype) for name, shape in shapes.items()},
        **{f"{name}_bias": optional(draw, shape[0], dtype=dtype) for name, shape in shapes.items()}, **norms,
        eps=draw.pick((1e-6, 0.5)), form=draw.pick(pass_ext.ops.step.NORM_FORMS),
        activation=draw.pick(pass_ext.ops.step.ACTIVATIONS), scale=draw.pick((1.0, 0.25)) if is_scaled else 1.0,
        **adapters_of_half(draw, rows, shapes, dtype),
    ))  # fmt: skip
    out = yield arguments
    if dtype == torch.float32 and all(map(is_tame, tensors_of(arguments))):
        check_close([out], [reference.layer_after_attention(**arguments)], 0.01)


def layers_of(draw: Draw, layers: int, width: int, heads: int, dtype: torch.dtype) -> tuple[dict, tuple]:
    """The shapes of linear layers by name, and the weights of decoder layers."""
    inner = draw.width()
    shapes = dict(
        q=(64 * heads, width),
        k=(64, width),
        v=(64, width),
        o=(width, 64 * heads),
        gate=(inner, width),
        up=(inner, width),
        down=(width, inner),
    )
    biased = [name for name in shapes if draw.chance(0.3)]
    normed = [name for name in ("input_norm", "mlp_norm", "attention_norm", "output_norm") if draw.chance(0.5)]
    weights = tuple(
        pass_ext.layers.LayerWeights(
            **{f"{name}_weight": draw.floats(*shape, dtype=dtype) for name, shape in shapes.items()},
            **{f"{name}_bias": draw.floats(shapes[name][0], dtype=dtype) for name in biased},
            **{name: draw.floats(width, dtype=dtype) for name in normed},
        )
        for _ in range(layers)
    )
    return shapes, weights


@case
def layer_pack(draw: Draw):
    layers = draw.pick((1, 2, 3))
    _, weights = layers_of(draw, layers, draw.width(), draw.pick((1, 2)), draw.pick(FLOATS))
    if draw.is_hostile and draw.chance(0.5):
        first, name = (
            weights[0],
            draw.pick([name for name, tensor in weights[0]._asdict().items() if tensor is not None]),
        )
        weights = (first._replace(**{name: draw.damaged_tensor(getattr(first, name))}), *weights[1:])
    packed = yield draw.damaged(dict(layers=weights, head_dim=draw.pick((64, 64, 64, 32, 7, 0))))
    demand(len(packed) == layers, f"{len(packed)} layers are packed")


@case
def layer_stack(draw: Draw):
    sizes, width, dtype = draw.sizes(), draw.width(), draw.pick(FLOATS)
    heads, kv_heads, layers, rows = draw.pick((1, 2)), 1, draw.pick((1, 2, 3)), sum(sizes)
    prefixes = [draw.pick((0, 1, 5, 65)) for _ in sizes]
    max_nodes, room = max([1, *sizes]), max([1, *prefixes])
    shapes, weights = layers_of(draw, layers, width, heads, dtype)
    if draw.chance(0.5):
        weights = pass_ext.layers.layer_pack(weights, head_dim=64)
    adapted = [name for name in shapes if draw.chance(0.2)]
    count, rank = draw.pick((1, 2)), draw.pick((1, 5))
    adapters = {
        name: tuple(draw.floats(layers, count, rank, shapes[name][side], dtype=dtype) for side in (1, 0))
        for name in adapted
    }
    has_positions, has_deep = draw.chance(0.5), draw.chance(0.3)
    table = 70 if has_positions else rows
    rotations = draw.pick((None, None, 0, 1, 3))  # None: one, without a dimension for it
    cos, sin = (draw.floats(*([] if rotations is None else [rotations]), table, 64, dtype=dtype) for _ in range(2))
    numbers = tuple(draw.pick((0, 1, 2)) for _ in range(layers)) if draw.chance(0.3) else None
    caches = draw.floats(2 * layers, len(sizes), room, kv_heads, 64, dtype=dtype)
    codes = draw.pick((None, None, *MOST_OF_CODES))
    caches = caches if codes is None else pass_ext.layers.quantize_rows(caches, codes)
    arguments = draw.damaged(dict(
        x=draw.floats(rows, width, dtype=dtype), layers=weights, rotates=numbers, caches=caches,
        prefix_lens=draw.spoilt(prefixes),
        cu_nodes=draw.bounds(sizes),
        visible=draw.integers(-(2**63), 2**63 - 1, rows, -(-max_nodes // 64), dtype=torch.int64), max_nodes=max_nodes,
        head_dim=64, depths=draw.integers(0, 1, rows), cos=cos, sin=sin,
        positions=draw.integers(0, 69, rows, dtype=torch.int64) if has_positions else None,
        windows=tuple(draw.pick((-1, 1, 7)) for _ in range(layers)),
        ids=draw.integers(-2, 5, rows, dtype=torch.int64) if has_deep or adapted else None,
        deep=draw.floats(layers, 2, width, dtype=dtype) if has_deep else None,
        adapters=adapters if adapted else None,
        final_norm=optional(draw, width, dtype=dtype), head=optional(draw, 7, width, dtype=dtype),
        wanted=draw.integers(0, rows - 1, 3, dtype=torch.int64) if rows and draw.chance(0.3) else None,
        taps=tuple(draw.pick((0, layers)) for _ in range(draw.pick((0, 1, 3)))),
    ))  # fmt: skip
    out, new, states = yield arguments
    demand(
        states.shape[1:] == (rows, width) and states.dtype == dtype, f"states are {states.dtype}{list(states.shape)}"
    )
    expected = 2 * layers, rows, kv_heads, 64 if codes is None else CODE_HEADER + 64
    demand(new.shape == expected and new.dtype == (codes or dtype), f"new is {new.dtype}{list(new.shape)}")
    demand(out.dtype == dtype, f"out is {out.dtype}")


def recurrence(draw: Draw, rows: int) -> dict:
    """Inputs of a recurrent layer, but for states and trees."""
    key_heads, dk, dv = draw.pick((1, 2, 3)), draw.pick((1, 3, 8, 16, 17, 64)), draw.pick((1, 7, 16, 33, 64))
    heads, dtype, kind = key_heads * draw.pick((1, 2, 4)), draw.pick(FLOATS), draw.pick(("head", "channel", "element"))
    shape = {"head": (), "channel": (dk,), "element": (dv,)}[kind]
    keys = torch.nn.functional.normalize(
        draw.floats(rows, key_heads, dk, dtype=torch.float32), dim=-1
    )  # no state explodes
    return dict(
        k=draw.laid_out(keys.to(dtype)), v=draw.floats(rows, heads, dv, dtype=dtype),
        log_decay=-draw.floats(rows, heads, *shape, dtype=torch.float32).abs(),
        decay_rates=draw.floats(heads, dk, dv, dtype=torch.float32).abs() if kind == "element" else None,
    )  # fmt: skip


def slots_of(draw: Draw, requests: int) -> tuple[int, Tensor | None]:
    """How many states there are, and the index of each request's."""
    if draw.chance(0.5):
        return requests, None
    slots = requests + draw.pick((0, 1, 4))
    return slots, draw.spoilt(torch.randperm(slots, generator=draw.torch)[:requests].tolist())


@case
def recurrent_tree(draw: Draw):
    sizes = draw.sizes()
    own, (slots, index) = recurrence(draw, sum(sizes)), slots_of(draw, len(sizes))
    (_, _, dk), (_, heads, dv) = own["k"].shape, own["v"].shape
    states = draw.floats(slots, heads, dk, dv, dtype=torch.float32)
    arguments = draw.damaged(dict(
        q=draw.floats(*own["k"].shape, dtype=own["k"].dtype), **own,
        beta=draw.floats(sum(sizes), heads, dtype=torch.float32).sigmoid() if draw.chance(0.8) else None,
        states=states.mT.contiguous().mT if draw.chance(0.3) else states, parents=draw.parents(sizes),
        cu_nodes=draw.bounds(sizes), form=draw.pick(("delta", "additive")), scale=draw.pick((1.0, 0.125)),
        state_index=index,
    ))  # fmt: skip
    out, update = yield arguments
    demand(out.dtype == arguments["v"].dtype and out.shape == arguments["v"].shape, f"out is {list(out.shape)}")
    demand(update.u.dtype == torch.float32 and update.u.shape == out.shape, f"u is {list(update.u.shape)}")
    floats = [value for value in arguments.values() if isinstance(value, Tensor) and value.is_floating_point()]
    if all(map(is_tame, floats)) and abs(arguments["scale"]) < 10:
        check_close((out, update.u), reference.recurrent_tree(**arguments))


@case
def convolution_tree(draw: Draw):
    sizes, channels, taps, dtype = draw.sizes(), draw.width() % 400, draw.pick((2, 3, 4, 8)), draw.pick(FLOATS)
    slots, index = slots_of(draw, len(sizes))
    arguments = draw.damaged(dict(
        x=draw.floats(sum(sizes), channels, dtype=dtype), weight=draw.floats(channels, taps, dtype=dtype),
        bias=optional(draw, channels, dtype=dtype), states=draw.floats(slots, channels, taps - 1, dtype=dtype),
        parents=draw.parents(sizes), cu_nodes=draw.bounds(sizes), activation=draw.pick((None, "silu")),
        state_index=index,
    ))  # fmt: skip
    out = yield arguments
    if all(is_tame(value) for value in arguments.values() if isinstance(value, Tensor) and value.is_floating_point()):
        check_close([out], [reference.convolution_tree(**arguments)])


@case
def state_commit_(draw: Draw):
    sizes = draw.sizes()
    rows, (slots, index) = sum(sizes), slots_of(draw, len(sizes))
    accepted = [draw.random.randrange(max(1, size)) for size in sizes]
    path = torch.full((len(sizes), max([0, *accepted]) + 1), -1, dtype=torch.int32)
    for b, size in enumerate(sizes):
        path[b, : accepted[b] + 1] = torch.arange(accepted[b] + 1) if size else -1
    states, updates = [], []
    for _ in range(draw.pick((0, 1, 2, 3))):
        if draw.chance(0.5):
            own = draw.damaged({name: x for name, x in recurrence(draw, rows).items() if x is not None})
            own["u"] = own.pop("v").float()
            if min(own["k"].dim(), own["u"].dim()) == 3:
                shape = (own["u"].shape[1], own["k"].shape[2], own["u"].shape[2])
                states.append(draw.floats(slots, *shape, dtype=torch.float32))
                updates.append(pass_ext.layers.RecurrentUpdate(**own))
        else:
            channels, dtype = draw.pick((0, 1, 8, 40)), draw.pick(FLOATS)
            states.append(draw.floats(slots, channels, draw.pick((1, 3)), dtype=dtype))
            updates.append(draw.floats(rows, channels, dtype=dtype))
    arguments = draw.damaged(dict(
        states=states, cu_nodes=draw.bounds(sizes), path=path, num_accepted=draw.spoilt(accepted), state_index=index,
    )) | {"updates": updates}  # fmt: skip
    before = [state.clone() for state in arguments["states"]]
    yield arguments
    given = [
        part for update in updates for part in (update if isinstance(update, tuple) else [update]) if part is not None
    ]
    if before and all(map(is_tame, (*given, *before))):
        reference.state_commit_(before, **{name: value for name, value in arguments.items() if name != "states"})
        check_close(arguments["states"], before)


# ---- results against the specification ----


def tensors_of(arguments: dict) -> list[Tensor]:
    """The tensors among arguments, also those in dictionaries of tuples."""
    inner = [
        part for value in arguments.values() if isinstance(value, dict) for pair in value.values() for part in pair
    ]
    return [value for value in (*arguments.values(), *inner) if torch.is_tensor(value)]


def is_tame(values: Tensor) -> bool:
    return bool((values.float().abs() < 100).all())


def check_same(actual, expected) -> None:
    for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        demand(
            ours.dtype == theirs.dtype and ours.shape == theirs.shape, f"result {i} is {ours.dtype}{list(ours.shape)}"
        )
        ours, theirs = (part.to(torch.complex64 if part.is_complex() else torch.float64) for part in (ours, theirs))
        demand(bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all()), f"result {i} is not the reference's")


def check_close(actual, expected, tolerance: float = 0.02) -> None:
    """The reference's values but for rounding: a coarse test, for what is computed at all; the ops' own tests are fine."""
    for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        demand(ours.shape == theirs.shape, f"result {i} is {list(ours.shape)}")
        ours, theirs = ours.double(), theirs.double()
        allowed = tolerance * (1 + theirs.abs().amax() if theirs.numel() else 1)
        wrong = ((ours - theirs).abs() > allowed) | (ours.isfinite() != theirs.isfinite())
        demand(not bool((wrong & theirs.isfinite()).any()), f"result {i} is far from the reference's")


# ---- the calls ----


WRITTEN = {
    "adapter_rows_": ("out",),
    "cache_commit_": ("caches",),
    "state_commit_": ("states",),
    "next_tree_": ("rows", "parents", "lengths", "prefix_lens", "report", "text"),
}


def storages_of(op: str, arguments: dict) -> list[Tensor]:
    """All bytes below the arguments that an op must not write to, those between the rows too."""
    values = [value for name, value in arguments.items() if name not in WRITTEN.get(op, ())]
    tensors = [t for value in values for t in (value if isinstance(value, list) else [value]) if isinstance(t, Tensor)]
    return [torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()) for t in tensors]


def make_call(seed: int, number: int, op: str, verbose: bool) -> str:
    """Makes call `number`; returns "result" or "refusal"."""
    draw = Draw(seed, number)
    case = CASES[op](draw)
    arguments = next(case)
    isa = _library.limit_cpu_isa(draw.pick(ISAS))
    if verbose:
        print(f"call {number}, {op} on {isa}: {described(arguments)}", flush=True)
    before = [storage.clone() for storage in storages_of(op, arguments)]
    faces = (pass_ext, pass_ext.layers, pass_ext.drafting, pass_ext.distributed, torch.ops.pass_ext)
    function = next(getattr(face, op) for face in faces if hasattr(face, op))
    outcome = "result"
    try:
        result = function(**arguments)
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
        demand(str(error).startswith(f"pass_ext::{op}"), f"{type(error).__name__} without our words: {error}")
        outcome = "refusal"
    # Before the result is looked at: what is expected of it is computed from the inputs.
    demand(all(map(torch.equal, before, storages_of(op, arguments))), "an input was written to")
    if outcome == "result":
        with contextlib.suppress(StopIteration):
            case.send(result)
    return outcome


def described(arguments: dict) -> str:
    def text(value) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(text, value))}]"
        if not isinstance(value, Tensor):
            return repr(value)
        shown = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return f"{shown} = {value.tolist()}" if value.numel() <= 8 else f"{shown} by {value.stride()}"

    return ", ".join(f"{name}={text(value)}" for name, value in arguments.items())


ISAS = (*_library.CPU_ISAS, "amx_emulated")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no call after so many")
    parser.add_argument("--op", choices=CASES, action="append", help="only this op's calls; repeatable")
    parser.add_argument("--verbose", action="store_true", help="say every call before it is made")
    chosen = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # what a kernel leaves unwritten is NaN, or out of range
    started, wrong = time.monotonic(), 0
    counts = {op: {"result": 0, "refusal": 0} for op in CASES}
    for number in range(chosen.first, chosen.first + chosen.calls):
        op = list(CASES)[number % len(CASES)]
        if chosen.op and op not in chosen.op:
            continue
        if time.monotonic() - started > chosen.seconds:
            print(f"stopped before call {number}: {chosen.seconds:g} s are over")
            break
        if number % 200 == 0:
            print(f"seed {chosen.seed}, call {number}, {time.monotonic() - started:.0f} s", flush=True)
        try:
            counts[op][make_call(chosen.seed, number, op, chosen.verbose)] += 1
        except Exception:  # whatever it is, it is said, and the next call is made
            wrong += 1
            print(f"WRONG: seed {chosen.seed}, call {number}, {op}\n{traceback.format_exc()}", flush=True)
    for op, count in counts.items():
        print(f"{op}: {count['result']} results, {count['refusal']} refusals")
    print(f"{sum(sum(count.values()) for count in counts.values())} calls as they should be, {wrong} not")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
