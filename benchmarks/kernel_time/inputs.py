"""The steps of one request that the emulator records and a GPU times: their inputs and planned results.

Logits: 128,256 in bfloat16, peaked (distributions.py), temperature 0.8. Each step has a planned number of accepted drafts.
Under `coupled` the drafts up to that number are the target's tokens, the others differ. Under `rejection` a draft is certain
to be accepted if both distributions are equal, and certain to be rejected if q is one at a token that the target does not draw.
Attention: 32 heads and 8 key heads of head_dim 128 in bfloat16, or keys and values in 8 bits; to latents, 128 heads of 576
numbers, of which 512 are values. A layer around its attention: SmolLM2-135M's shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import pass_ext
from benchmarks.ops.contenders.inputs.distributions import TEMPERATURE, make_logits, per_row

MEASURED = "kernel-time.json"
"""A GPU's measured times, in its folder of results."""
SEED, POSITION = 7, 41
VOCABULARY = 128_256
KEY_HEADS, GROUP, HEAD_DIM = 8, 4, 128
ATTENTION = {
    "1,024 keys, 4 rows": (1_024, 4, -1),
    "8,192 keys, 16 rows": (8_192, 16, -1),
    "32,768 keys, 16 rows": (32_768, 16, -1),
    "window 2,048 of 8,192 keys, 8 rows": (8_192, 8, 2_048),
}
LATENT_HEADS, LATENT_DIM, LATENT_VALUES = 128, 576, 512
FILTERED = "top-k 50, top-p 0.9"
LEVELS = (3, 4, 4)
"""Branching of the tree of 63 drafts."""


class Call(NamedTuple):
    """A named call of an op, and the check of its result."""

    kind: str
    name: str
    op: Callable[..., Any]
    arguments: dict[str, Any]
    is_right: Callable[[Any], bool]

    def run(self) -> Any:
        """The op's result."""
        return self.op(**self.arguments)

    def to(self, device: str) -> Call:
        """The call with its tensors on another device."""
        return self._replace(arguments=tree_map_only(Tensor, lambda tensor: tensor.to(device), self.arguments))


def _sampling(rows: int, filters: str) -> dict[str, Tensor]:
    return per_row(rows, torch.device("cpu"), TEMPERATURE, filters)


def _numbers(rows: int) -> dict[str, Tensor]:
    return {"seeds": torch.full((rows,), SEED), "positions": torch.arange(rows) + POSITION}


def draft_calls(vocabulary: int = VOCABULARY) -> Iterator[Call]:
    """draft_sample of one row."""
    logits = make_logits("peaked", 1, vocabulary, torch.Generator().manual_seed(SEED)).bfloat16()
    for name, mode, count, filters in (
        ("1 row, coupled", "coupled", 1, "off"),
        (f"1 row, coupled, {FILTERED}", "coupled", 1, FILTERED),
        ("1 row, 4 without replacement", "without", 4, "off"),
    ):
        arguments = {"logits": logits, "k": count, "mode": mode, **_sampling(1, filters), **_numbers(1)}
        expected, _ = pass_ext.draft_sample(**arguments)  # type: ignore[arg-type]
        yield Call("draft_sample", name, pass_ext.draft_sample, arguments, _emits(expected))


def _emits(expected: Tensor) -> Callable[[Any], bool]:
    return lambda result: torch.equal(result[0].cpu(), expected)


def _accepts(number: int) -> Callable[[Any], bool]:
    return lambda result: result.num_accepted.tolist() == [number]


def accept_calls(vocabulary: int = VOCABULARY) -> Iterator[Call]:
    """accept_chain of four drafts, 0 to 4 of them accepted; accept_tree of 63 drafts."""
    random = torch.Generator().manual_seed(SEED)
    target = make_logits("peaked", 5, vocabulary, random).bfloat16()
    for filters in ("off", FILTERED):
        draws, _ = pass_ext.draft_sample(target, 1, mode="coupled", **_sampling(5, filters), **_numbers(5))
        for rule in ("coupled", "rejection"):
            for accepted in range(5):
                tokens = draws[:4, 0].clone()
                tokens[accepted:] = (tokens[accepted:] + 1) % vocabulary
                draft = target[:4].clone()
                draft[torch.arange(accepted, 4), tokens[accepted:]] = 200.0
                arguments = {
                    "target_logits": target[None],
                    "draft_tokens": tokens[None],
                    "rule": rule,
                    "draft_logits": None if rule == "coupled" else draft[None],
                    **_sampling(1, filters),
                    **_numbers(1),
                }
                name = f"chain of 4, {rule}, {accepted} accepted" + ("" if filters == "off" else f", {filters}")
                yield Call("accept", name, pass_ext.accept_chain, arguments, _accepts(accepted))
    tree = pass_ext.Tree.from_branching(LEVELS)
    target = make_logits("peaked", len(tree.parents), vocabulary, random).bfloat16()
    for rule in ("coupled", "rejection"):
        yield _tree_call(rule, target, tree)


def _tree_call(rule: str, target: Tensor, tree: pass_ext.Tree) -> Call:
    depths = torch.tensor(tree.depths)
    draws, _ = pass_ext.draft_sample(
        target, max(LEVELS), mode="coupled", **_sampling(len(depths), "off"),
        seeds=torch.full_like(depths, SEED), positions=depths + POSITION,
    )  # fmt: skip
    tokens, seen = torch.zeros(len(depths), dtype=torch.int64), [0] * len(depths)
    for node, parent in enumerate(tree.parents):
        if parent >= 0:  # the last child is the node's first draw, its siblings are the later draws
            tokens[node] = draws[parent, LEVELS[int(depths[parent])] - 1 - seen[parent]]
            seen[parent] += 1
    arguments = {
        "target_logits": target,
        "tokens": tokens,
        "parents": torch.tensor(tree.parents, dtype=torch.int32),
        "cu_nodes": torch.tensor([0, len(depths)], dtype=torch.int32),
        "max_depth": len(LEVELS),
        "rule": rule,
        "draft_logits": None if rule == "coupled" else target,
        **_sampling(1, "off"),
        **_numbers(1),
    }
    return Call("accept", f"tree of 63, {rule}", pass_ext.accept_tree, arguments, _accepts(len(LEVELS)))


def attention_calls(key_heads: int = KEY_HEADS) -> Iterator[Call]:
    """attention_tree of a chain of rows after a prefix."""
    for name, (keys, rows, window) in ATTENTION.items():
        yield attention_call(name, keys, rows, window, key_heads)


def attention_call(name: str, keys: int, rows: int, window: int, key_heads: int) -> Call:
    """attention_tree of a chain of `rows` rows after `keys` keys."""
    random = torch.Generator().manual_seed(SEED)
    q = torch.randn(rows, GROUP * key_heads, HEAD_DIM, generator=random).bfloat16()
    caches = [torch.randn(1, keys + rows, key_heads, HEAD_DIM, generator=random).bfloat16() for _ in range(2)]
    bounds, prefix = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([keys], dtype=torch.int32)
    parents = torch.arange(-1, rows - 1, dtype=torch.int32)
    visible, depths = pass_ext.tree_prepare(parents, bounds, rows)
    arguments = {
        "q": q,
        "k_cache": caches[0],
        "v_cache": caches[1],
        "prefix_lens": prefix,
        "cu_nodes": bounds,
        "visible": visible,
        "max_nodes": rows,
        "depths": depths if window >= 0 else None,
        "window": window,
    }
    plain = pass_ext.attention_tree(**arguments)[0]  # type: ignore[arg-type]
    return Call("attention", name, pass_ext.attention_tree, arguments, _is_near(plain))


def attend_to_latents(latents: Tensor, **arguments: Any) -> Any:
    """attention_tree whose values are the first numbers of its keys, in the same memory."""
    return pass_ext.attention_tree(k_cache=latents, v_cache=latents[..., :LATENT_VALUES], **arguments)


def latent_call(
    requests: int, rows: int, heads: int = LATENT_HEADS, keys: int = 8_192, slots: int | None = None
) -> Call:
    """A chain of `rows` rows in each request, after `keys` latents that all heads share, in a cache of no more than these or
    of `slots` slots."""
    random = torch.Generator().manual_seed(SEED)
    bounds = torch.arange(requests + 1, dtype=torch.int32) * rows
    parents = torch.arange(-1, rows - 1, dtype=torch.int32).repeat(requests)
    arguments = {
        "q": torch.randn(requests * rows, heads, LATENT_DIM, generator=random).bfloat16(),
        "latents": torch.randn(requests, slots or keys + rows, 1, LATENT_DIM, generator=random).bfloat16(),
        "prefix_lens": torch.full((requests,), keys, dtype=torch.int32),
        "cu_nodes": bounds,
        "visible": pass_ext.tree_prepare(parents, bounds, rows)[0],
        "max_nodes": rows,
    }
    place = f" in {slots:,} slots" if slots else ""
    name = f"{keys:,} latents{place}, {LATENT_HEADS} heads, {requests} x {rows} row{'s' * (rows > 1)}"
    expected = attend_to_latents(**arguments)[0]
    return Call("attention in one order", name, attend_to_latents, arguments, _is_near(expected))


def one_order_calls(keys: int = 1_024) -> Iterator[Call]:
    """attention_tree that adds in one order (``batch_invariant``), to all keys and to lists of half of them."""
    for rows in (1, 4):
        plain = attention_call(f"{keys:,} keys, {_rows(rows)}", keys, rows, -1, KEY_HEADS)
        yield _changed(plain, "attention in one order", batch_invariant=True)
    plain = attention_call(f"lists of {keys // 2:,} of {keys:,} keys, 4 rows", keys, 4, -1, KEY_HEADS)
    random = torch.Generator().manual_seed(SEED)
    lists = torch.stack([torch.randperm(keys, generator=random)[: keys // 2].sort().values for _ in range(4)]).int()
    yield _changed(plain, "attention in one order", batch_invariant=True, key_lists=lists)


def codes_calls(keys: int = 1_024) -> Iterator[Call]:
    """attention_tree to keys and values in 8 bits."""
    for dtype, name in ((torch.int8, "int8"), (torch.float8_e4m3fn, "e4m3")):
        for rows in (4, 16):
            plain = attention_call(f"{keys:,} keys in {name}, {_rows(rows)}", keys, rows, -1, KEY_HEADS)
            codes = {
                part: pass_ext.layers.quantize_rows(plain.arguments[part], dtype) for part in ("k_cache", "v_cache")
            }
            yield _changed(plain, "attention to codes", **codes)


def _changed(call: Call, kind: str, **arguments: Any) -> Call:
    """The call with other arguments, and their result as the planned one."""
    given = call.arguments | arguments
    return call._replace(kind=kind, arguments=given, is_right=_is_near(call.op(**given)[0]))


def _rows(count: int) -> str:
    return f"{count} row{'s' * (count > 1)}"


def layer_calls(width: int = 576, heads: int = 9, key_heads: int = 3, inner: int = 1536) -> Iterator[Call]:
    """layer_before_attention and layer_after_attention of 8 and 16 rows, heads of 64; the latter also with adapters of rank 8,
    which half of the rows share."""
    dim = 64
    shapes = {"q": (heads * dim, width), "k": (key_heads * dim, width), "v": (key_heads * dim, width)}
    shapes |= {"o": (width, heads * dim), "gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    for rows in (8, 16):
        random = torch.Generator().manual_seed(SEED)

        def numbers(*shape: int, generator: torch.Generator = random) -> Tensor:
            return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

        x, norm = numbers(rows, width) * 24, numbers(width) * 24
        weights = {f"{name}_weight": numbers(*shape) for name, shape in shapes.items()}
        angles = torch.arange(rows)[:, None] * 1e4 ** -(torch.arange(0, dim, 2).repeat(2) / dim)
        arguments: dict[str, Any] = {f"{name}_weight": weights[f"{name}_weight"] for name in "qkv"}
        arguments |= {"x": x, "head_dim": dim, "input_norm": norm}
        arguments |= {"cos": angles.cos().bfloat16(), "sin": angles.sin().bfloat16()}
        after: dict[str, Any] = {name: weight for name, weight in weights.items() if name not in arguments}
        after |= {"attended": numbers(rows, heads * dim) * 24, "residual": x, "mlp_norm": norm}
        halves = (
            (pass_ext.layers.layer_before_attention, "before", arguments),
            (pass_ext.layers.layer_after_attention, "after", after),
        )
        for op, half, given in halves:
            yield _layer_call(f"{half} attention, {rows} rows", op, given)
        if rows != 16:
            continue
        ids = torch.arange(rows) - rows // 2
        for op, half, given in halves:
            adapters = {
                name: (numbers(1, 8, inputs), numbers(1, 8, outputs))
                for name, (outputs, inputs) in shapes.items()
                if f"{name}_weight" in given
            }
            yield _layer_call(
                f"{half} attention, {rows} rows, half with adapters", op, given | {"ids": ids, "adapters": adapters}
            )


def _layer_call(name: str, op: Callable[..., Any], arguments: dict[str, Any]) -> Call:
    result = op(**arguments)
    return Call("layer", name, op, arguments, _are_near(result if isinstance(result, tuple) else (result,)))


def _are_near(plain: tuple[Tensor, ...]) -> Callable[[Any], bool]:
    def compare(result: Any) -> bool:
        parts = result if isinstance(result, tuple) else (result,)
        near = [
            (ours.float().cpu() - theirs.float()).abs().max() < 0.1 for ours, theirs in zip(parts, plain, strict=True)
        ]
        return all(near)

    return compare


def _is_near(plain: Tensor) -> Callable[[Any], bool]:
    return lambda result: bool((result[0].float().cpu() - plain.float()).abs().max() < 0.05)
