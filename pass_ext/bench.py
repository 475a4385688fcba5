"""``python -m pass_ext bench``: each op beside the lines of PyTorch that do its job, on this machine, in two minutes.

    ratio = median seconds of PyTorch / median seconds of the op

Both run in turn, on inputs that lie in memory and not in a cache: each call takes the next of many sets. The full benchmarks,
with other libraries, aims and whole texts, are in the repository.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import pass_ext

_COLD_BYTES = 256 << 20
"""So many bytes of inputs at least lie between two calls on the same ones."""
_ROUNDS = 7, 400
"""The fewest and the most."""


class Case(NamedTuple):
    """One row of the table."""

    op: str
    sizes: str
    make: Callable[[], Any]
    """A set of inputs."""
    ours: Callable[..., Any]
    torch: Callable[..., Any]
    is_same: bool = True
    """False: both draw at random, from different generators."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where both run (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the inputs (default: %(default)s)",
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="for each op (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    """Measures and prints, op by op."""
    device = torch.device(options.device)
    if device.type == "cuda" and not pass_ext.status().cuda_loaded:
        raise SystemExit(f"pass_ext bench: no CUDA kernels here: {pass_ext.status().cuda_reason}")
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU kernels {pass_ext.status().cpu_isa}"
    print(f"{where}, {torch.get_num_threads()} threads, torch {torch.__version__}, {options.dtype}; inputs in memory")
    if device.type == "cpu" and os.getloadavg()[0] > 0.5:
        print(f"The load is {os.getloadavg()[0]:.1f}: other processes make both slower, and not equally.")
    print(f"{'op':<18} {'sizes':<46} {'pass_ext':>10} {'PyTorch':>10} {'ratio':>7}")
    with torch.inference_mode():
        for case in cases(device, getattr(torch, options.dtype)):
            ours, theirs = _timed(case, device, options.seconds)
            speeds = f"{_shown(ours)} {_shown(theirs)} {theirs / ours:>5.2f} ×"
            print(f"{case.op:<18} {case.sizes:<46} {speeds}", flush=True)


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:>7.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:>7.1f} µs"


def _timed(case: Case, device: torch.device, seconds: float) -> tuple[float, float]:
    """Median seconds of both."""
    first = case.make()
    sets = [first, *(case.make() for _ in range(min(64, _COLD_BYTES // max(1, _bytes_of(first)))))]
    ours, theirs = case.ours(*first), case.torch(*first)
    if case.is_same and not torch.allclose(ours.float(), theirs.float(), rtol=0.05, atol=0.05):
        raise AssertionError(f"{case.op}: the op and PyTorch differ by {(ours.float() - theirs.float()).abs().max():g}")
    samples: tuple[list[float], list[float]] = [], []
    end, (fewest, most) = time.perf_counter() + seconds, _ROUNDS
    while len(samples[0]) < fewest or (len(samples[0]) < most and time.perf_counter() < end):
        for number, call in enumerate((case.ours, case.torch)):
            chosen = sets[(2 * len(samples[1]) + number) % len(sets)]
            _wait(device)
            begin = time.perf_counter()
            call(*chosen)
            _wait(device)
            samples[number].append(time.perf_counter() - begin)
    return median(samples[0]), median(samples[1])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes_of, value)) if isinstance(value, (list, tuple)) else 0


# ---- the ops ----


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """The rows of the table, in the order of a step."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def whole(values: Sequence[int], kind: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, device=device, dtype=kind)

    # The table is too large for a cache, and other rows are read in each call.
    table, slots = random(128_256, 1024), random(16, 1024)

    def ids() -> tuple[Tensor, Tensor, Tensor]:
        return torch.randint(-16, 128_256, (256,), device=device), table, slots

    def looked_up(ids: Tensor, table: Tensor, slots: Tensor) -> Tensor:
        rows = functional.embedding(ids.clamp(min=0), table)
        return torch.where((ids < 0)[:, None], functional.embedding((-1 - ids).clamp(min=0), slots), rows)

    yield Case("lookahead_embed", "256 rows of [128256, 1024], 16 slots", ids, pass_ext.lookahead_embed, looked_up)

    def product() -> tuple[Tensor, Tensor]:
        return random(8, 4096) / 64, random(4096, 4096)

    yield Case("linear_rows", "8 rows times [4096, 4096]", product, pass_ext.layers.linear_rows, functional.linear)

    keys, nodes, heads, kv_heads, width = 4096, 16, 32, 8, 128
    trees = pass_ext.pack_trees([pass_ext.Tree.from_branching((3, 2, 1))], device)
    mask = torch.zeros(nodes, keys + nodes, dtype=torch.bool, device=device)
    mask[:, :keys] = True
    mask[:, keys:] = trees.seen()
    prefix = whole([keys], torch.int32)

    def attended() -> tuple[Tensor, ...]:
        return (
            random(nodes, heads, width),
            random(1, keys + nodes, kv_heads, width),
            random(1, keys + nodes, kv_heads, width),
        )

    def tree_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        step = prefix, trees.cu_nodes, trees.visible, nodes
        return pass_ext.attention_tree(q, k, v, *step, k_new=k[0, keys:], v_new=v[0, keys:])[0]

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q[None].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    sizes = f"{nodes} nodes, {keys} keys, heads {heads}/{kv_heads} × {width}"
    yield Case("attention_tree", sizes, attended, tree_attention, masked)

    vocabulary, drafts = 128_256, 3

    def drafting() -> tuple[Tensor]:
        return (random(1, vocabulary) * 3,)

    def draft(logits: Tensor) -> Tensor:
        return pass_ext.draft_sample(logits, 1, temperature=0.8, top_k=50, top_p=0.9, seeds=1, positions=7, nodes=0)[0]

    def drawn(logits: Tensor) -> Tensor:
        values, tokens = (logits.float() / 0.8).topk(50)
        shares = values.softmax(-1)
        shares = shares.masked_fill(shares.cumsum(-1) - shares >= 0.9, 0.0)
        return tokens.gather(-1, (shares / torch.rand_like(shares).log_().neg_()).argmax(-1, keepdim=True))

    sizes = f"1 row of {vocabulary}, top-k 50, top-p 0.9"
    yield Case("draft_sample", sizes, drafting, draft, drawn, is_same=False)

    def verifying() -> tuple[Tensor, Tensor, Tensor]:
        return (
            random(1 + drafts, vocabulary) * 3,
            random(drafts, vocabulary) * 3,
            torch.randint(vocabulary, (1, drafts), device=device),
        )

    seeds, first = whole([1]), whole([7])

    def accept(target: Tensor, draft: Tensor, tokens: Tensor) -> Tensor:
        options: dict[str, Any] = dict(
            rule="rejection", draft_logits=draft[None], temperature=0.8, seeds=seeds, positions=first
        )
        return pass_ext.accept_chain(target[None], tokens, **options).emitted

    def probabilities(logits: Tensor) -> Tensor:
        return (logits.float() / 0.8).softmax(-1)

    def speculative(target: Tensor, draft: Tensor, tokens: Tensor) -> Tensor:
        for row, token in enumerate(tokens[0].tolist()):
            p, q = probabilities(target[row]), probabilities(draft[row])
            if not torch.rand(()) * q[token] < p[token]:
                rest = (p - q).clamp_(min=0)
                break
        else:
            rest = probabilities(target[-1])
        return (rest / torch.rand_like(rest).log_().neg_()).argmax()  # far faster than multinomial

    sizes = f"1 + {drafts} rows of {vocabulary}, rejection"
    yield Case("accept_chain", sizes, verifying, accept, speculative, is_same=False)

    layers, path, accepted = 32, whole([0, 1, 4, -1], torch.int32)[None], whole([2], torch.int32)
    kept, bounds, start = whole([0, 1, 4]), whole([0, nodes], torch.int32), whole([1000], torch.int32)
    places = start + torch.arange(3, device=device)

    def caches() -> tuple[list[Tensor], list[Tensor]]:
        return (
            [random(1, 2048, kv_heads, width) for _ in range(2 * layers)],
            [random(nodes, kv_heads, width) for _ in range(2 * layers)],
        )

    def commit(caches: list[Tensor], new: list[Tensor]) -> Tensor:
        pass_ext.cache_commit_(caches, start, bounds, path, accepted, new=new)
        return caches[-1][0, 1000:1003]

    def copied(caches: list[Tensor], new: list[Tensor]) -> Tensor:
        for cache, rows in zip(caches, new, strict=True):
            cache[0].index_copy_(0, places, rows.index_select(0, kept))
        return caches[-1][0, 1000:1003]

    yield Case("cache_commit_", f"{layers} layers, 3 of {nodes} nodes", caches, commit, copied)
