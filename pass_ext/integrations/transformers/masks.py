"""Translates masks of a transformers model to calls of ``attention_tree``.

A mask says which columns of the keys each query sees. Columns [start, column) before the queries become the prefix, and the
columns of the queries themselves become bits. ``causal_rows`` is the registered mask function; transformers calls it once per
forward pass and kind of layer. The attention function asks for the calls of 4-D masks and tree steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pass_ext.decoding.models.row_attention import window_of
from pass_ext.tree import MAX_TREE_NODES


class Call(NamedTuple):
    """One call of ``attention_tree``: rows ``rows`` of requests ``requests``; keys before column ``start`` are padding."""

    requests: slice
    rows: slice
    start: int
    prefix_lens: Tensor
    cu_nodes: Tensor
    visible: Tensor
    max_nodes: int
    depths: Tensor | None


class CausalRows(NamedTuple):
    """The result of the mask function: ordinary causal attention, with left padding or none."""

    batch: int
    queries: int
    column: int | Tensor
    """The column of the first query among the keys."""
    starts: tuple[int, ...] | None
    """The first column of each request after its padding; None: 0 for all."""
    window: int
    """The window of ``attention_tree``; -1 is off."""
    calls: tuple[Call, ...]
    model: str = "this model"

    def __getattr__(self, name: str) -> Any:
        # torch.compile asks while the fields are not there yet, and `self.model` would lead here again.
        raise AttributeError(self._no_tensor(f".{name}") if len(self) else name)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            raise TypeError(self._no_tensor("slices"))
        return tuple.__getitem__(self, index)

    def _no_tensor(self, operation: str) -> str:
        return (
            f"pass_ext attention: {self.model} computes with its attention mask ({operation}), which is not a tensor here; use "
            "attn_implementation='sdpa'"
        )

    @property
    def ndim(self) -> int:
        """0: transformers takes a mask with two dimensions for a padding mask."""
        return 0

    def contiguous(self) -> CausalRows:
        """Returns itself; ``generate`` calls this on masks that it makes before the forward pass."""
        return self


class TreeStep:
    """The trees of one step for a model with ``attn_implementation="pass_ext"``: ``model(…, pass_ext_tree=step)``.

    Give the model ``[B, Q]`` ids, in row b the nodes of request b and then any padding, ``position_ids`` of
    ``prefix_len + depth``, and a cache. Its attention then follows ``visible``, and the keys and values of the nodes are
    appended to the cache, in Q columns right after the prefix; ``cache_commit_`` moves the accepted ones.

    Args:
        visible: ``[N, ceil(max_nodes / 64)]`` int64, from ``pack_trees`` or ``tree_prepare``.
        cu_nodes: ``[B + 1]`` int32; request b owns rows ``cu_nodes[b]:cu_nodes[b + 1]`` of ``visible``.
        prefix_lens: ``[B]`` committed tokens of each request without padding: the columns right before its nodes.
        max_nodes: no request has more nodes than this; at most 1,024. It sets the width of ``visible``.
        depths: ``[N]`` int32, edges from the root; needed by models with sliding windows only.
    """

    def __init__(
        self, visible: Tensor, cu_nodes: Tensor, prefix_lens: Tensor, max_nodes: int, depths: Tensor | None = None
    ) -> None:
        self.visible, self.cu_nodes, self.prefix_lens = visible, cu_nodes, prefix_lens
        self.max_nodes, self.depths = max_nodes, depths
        self._plans: dict[int, tuple[CausalRows, tuple[Call, ...]]] = {}

    def calls(self, causal: CausalRows) -> tuple[Call, ...]:
        """The calls for a forward pass whose ordinary mask is ``causal``; all layers with that mask share them."""
        entry = self._plans.get(id(causal))
        if entry is None or entry[0] is not causal:
            if len(self._plans) >= 4:  # more masks than kinds of layers: entries of earlier forward passes
                self._plans.clear()
            entry = self._plans[id(causal)] = causal, _tree_calls(self, causal)
        return entry[1]


def causal_rows(**arguments: Any) -> Any:
    """The registered mask function: a ``CausalRows``, or transformers' 4-D mask if the pattern is not causal.

    transformers 5 passes ``q_length`` and ``q_offset``, 4.57 ``cache_position``; other arguments differ too.
    """
    attention_mask = arguments["attention_mask"]
    if isinstance(attention_mask, CausalRows):  # generate makes masks of static caches before the forward pass
        return attention_mask
    window = window_of(arguments["mask_function"])
    if window is None:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
    if "q_length" in arguments:
        queries, offset = arguments["q_length"], arguments["q_offset"]
    else:
        queries, offset = arguments["cache_position"].shape[0], arguments["cache_position"][0]
    device = arguments.get("device")
    if device is None:
        device = arguments["cache_position"].device
    column = offset - arguments["kv_offset"]
    starts = None
    if attention_mask is not None:
        starts = _starts(attention_mask, offset, queries, arguments["kv_offset"])
    name = getattr(arguments.get("config"), "model_type", "this model")
    return causal(arguments["batch_size"], queries, column, starts, window, device, name)


def causal(
    batch: int,
    queries: int,
    column: int | Tensor,
    starts: tuple[int, ...] | None,
    window: int,
    device: torch.device,
    model: str = "this model",
) -> CausalRows:
    """Ordinary causal attention in chains of at most 1,024 rows; the rows before a chain are its prefix."""
    calls = []
    for requests, start in _runs(starts, batch):
        first = 0 if start == 0 else max(0, start - int(column))  # the rows before are padding
        for begin in range(first, queries, MAX_TREE_NODES):
            rows = slice(begin, min(begin + MAX_TREE_NODES, queries))
            nodes, count = rows.stop - begin, requests.stop - requests.start
            visible, cu_nodes, depths = _chains(nodes, count, device)
            if starts is None and isinstance(column, Tensor):  # avoids a synchronisation
                prefix_lens = (column.to(device) + begin).to(torch.int32).reshape(1).repeat(count)
            else:
                prefix_lens = torch.full((count,), int(column) + begin - start, dtype=torch.int32, device=device)
            calls.append(
                Call(requests, rows, start, prefix_lens, cu_nodes, visible, nodes, depths if window >= 0 else None)
            )
    return CausalRows(batch, queries, column, starts, window, tuple(calls), model)


def dense_calls(mask: Tensor, batch: int, queries: int) -> tuple[Call, ...]:
    """The calls of a 4-D mask: the last Q columns that any row of a request sees become bits, the columns before its prefix.

    Synchronises with the device. Raises for masks without this form: biases, masks per head, prefixes that differ between rows.
    """
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[0] not in (1, batch) or mask.shape[2] != queries:
        raise ValueError(
            f"pass_ext attention: a 4-D attention_mask must be [{batch}, 1, {queries}, keys], got {list(mask.shape)}"
        )
    if queries > MAX_TREE_NODES:
        raise ValueError(
            f"pass_ext attention: a mask that is not causal may have at most {MAX_TREE_NODES} rows, got {queries}; "
            "run the model in parts, or with attn_implementation='sdpa'"
        )
    seen = _visible_columns(mask)[:, 0].expand(batch, -1, -1)
    if seen.shape[2] < queries:
        seen = torch.nn.functional.pad(seen, (0, queries - seen.shape[2]))
    columns = torch.arange(seen.shape[2], device=seen.device)
    any_row = seen.any(1)
    last = torch.where(any_row, columns + 1, 0).amax(1)
    first = torch.where(any_row, columns, seen.shape[2]).amin(1)
    column = (last - queries).clamp(min=0)
    start = torch.minimum(first, column)
    expected = (columns >= start[:, None]) & (columns < column[:, None])
    rows_differ = (seen != expected[:, None]) & (columns < column[:, None])[:, None] & seen.any(2, keepdim=True)
    if bool(rows_differ.any()):
        raise ValueError(
            "pass_ext attention: a 4-D attention_mask must let every row of a request see the same columns, without holes, "
            f"up to the last {queries} in use; this one does not. Use attn_implementation='sdpa' for it"
        )
    calls = []
    nodes = seen.gather(2, (column[:, None] + columns[:queries])[:, None].expand(-1, queries, -1))
    starts, bits = start.tolist(), pack_bits(nodes)
    for requests, begin in _runs(starts, batch):
        count = requests.stop - requests.start
        prefix_lens = (column[requests] - begin).to(torch.int32)
        cu_nodes = _bounds(queries, count, mask.device)
        visible = bits[requests].flatten(0, 1)
        calls.append(Call(requests, slice(0, queries), begin, prefix_lens, cu_nodes, visible, queries, None))
    return tuple(calls)


def pack_bits(seen: Tensor) -> Tensor:
    """Packs bools ``[..., n]`` into int64 ``[..., ceil(n / 64)]``: bit j of word w is element 64 w + j."""
    words = torch.nn.functional.pad(seen, (0, -seen.shape[-1] % 64)).unflatten(-1, (-1, 64))
    return (words.long() << torch.arange(64, device=seen.device)).sum(-1)


def _tree_calls(step: TreeStep, causal: CausalRows) -> tuple[Call, ...]:
    batch, queries, column = causal.batch, causal.queries, int(causal.column)
    if step.cu_nodes.shape[0] != batch + 1 or step.prefix_lens.shape != (batch,):
        raise ValueError(
            f"pass_ext_tree: the model runs {batch} requests; expected cu_nodes [{batch + 1}] and prefix_lens [{batch}], got "
            f"{list(step.cu_nodes.shape)} and {list(step.prefix_lens.shape)}"
        )
    if queries > step.max_nodes or step.max_nodes > MAX_TREE_NODES:
        raise ValueError(
            f"pass_ext_tree: the model runs {queries} rows per request; expected at most max_nodes = {step.max_nodes}, and "
            f"that at most {MAX_TREE_NODES}"
        )
    if causal.window >= 0 and step.depths is None:
        raise ValueError("pass_ext_tree: this model has sliding windows; expected depths, got None")
    prefixes = step.prefix_lens.tolist()
    starts = [column - prefix for prefix in prefixes]
    if min(starts) < 0 or (causal.starts is not None and list(causal.starts) != starts):
        raise ValueError(
            f"pass_ext_tree: the cache has {column} columns before this step's rows, and the attention mask hides "
            f"{list(causal.starts or [0] * batch)} of them as padding; expected prefix_lens "
            f"{[column - start for start in causal.starts or [0] * batch]}, got {prefixes}"
        )
    visible, depths = _padded_rows(step, batch, queries)
    calls = []
    for requests, start in _runs(starts, batch):
        rows = slice(requests.start * queries, requests.stop * queries)
        prefix_lens = step.prefix_lens[requests].to(torch.int32)
        cu_nodes = _bounds(queries, requests.stop - requests.start, visible.device)
        run_depths = depths[rows] if causal.window >= 0 and depths is not None else None
        calls.append(
            Call(requests, slice(0, queries), start, prefix_lens, cu_nodes, visible[rows], step.max_nodes, run_depths)
        )
    return tuple(calls)


def _padded_rows(step: TreeStep, batch: int, queries: int) -> tuple[Tensor, Tensor | None]:
    """Bits and depths of the trees, padded to Q rows per request; rows of padding see nothing."""
    total = step.visible.shape[0]
    if total == batch * queries:  # no request has more than Q, so each has Q
        return step.visible, step.depths
    rows = torch.arange(total, device=step.visible.device)
    bounds = step.cu_nodes.long()
    owner = torch.searchsorted(bounds[1:], rows, right=True).clamp(max=batch - 1)
    place = owner * queries + rows - bounds[owner]
    visible = step.visible.new_zeros(batch * queries, step.visible.shape[1]).index_copy(0, place, step.visible)
    depths = step.depths
    return visible, None if depths is None else depths.new_zeros(batch * queries).index_copy(0, place, depths)


def _starts(attention_mask: Tensor, offset: int | Tensor, queries: int, kv_offset: int) -> tuple[int, ...] | None:
    """The first visible column of each request in a 2-D padding mask; None if nothing is padding. Synchronises with the
    device."""
    if attention_mask.dim() != 2:
        raise ValueError(
            f"pass_ext attention: attention_mask must be [B, tokens] or [B, 1, rows, keys], got {list(attention_mask.shape)}"
        )
    end = int(offset) + queries
    seen = attention_mask[:, :end].bool()
    if seen.shape[1] == end and bool(seen.all()):
        return None
    columns = torch.arange(seen.shape[1], device=seen.device)
    count = seen.sum(1)
    first = torch.where(seen, columns, end).amin(1)
    last = torch.where(seen, columns + 1, 0).amax(1)
    broken = (count > 0) & ((last - first != count) | (last < int(offset)))
    if bool(broken.any()):
        raise ValueError(
            "pass_ext attention: padding must lie left of a request's tokens; attention_mask hides columns between them "
            f"(request {int(broken.nonzero()[0])}). Pad on the left: tokenizer.padding_side = 'left'"
        )
    starts = (first - kv_offset).clamp(min=0).tolist()
    return tuple(starts) if any(starts) else None


def _visible_columns(mask: Tensor) -> Tensor:
    """A 4-D mask as bools: True, or 0 in an additive mask, is visible."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ValueError(f"pass_ext attention: a 4-D attention_mask must be bool or float, got {mask.dtype}")
    seen = mask == 0
    if not bool((seen | (mask <= -1e4)).all()):
        raise ValueError(
            "pass_ext attention: an additive attention_mask must hold 0 where a key is seen and -10,000 or less where it is "
            "not; this one is a bias. Use attn_implementation='sdpa' for it"
        )
    return seen


def _runs(starts: Sequence[int] | None, batch: int) -> list[tuple[slice, int]]:
    """Slices of neighbouring requests with equal starts, each with its start."""
    if starts is None:
        return [(slice(0, batch), 0)]
    runs, begin = [], 0
    for start, group in groupby(starts):
        end = begin + len(list(group))
        runs.append((slice(begin, end), start))
        begin = end
    return runs


def _bounds(nodes: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(0, nodes * count + 1, nodes, dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def _chains(nodes: int, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """``visible``, ``cu_nodes`` and ``depths`` of ``count`` chains with ``nodes`` rows each."""
    with torch.inference_mode(False):  # the cached tensors may be used outside inference mode
        order = torch.arange(nodes, device=device)
        visible = pack_bits(order <= order[:, None]).repeat(count, 1)
        return visible, _bounds(nodes, count, device), order.to(torch.int32).repeat(count)
