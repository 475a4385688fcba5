"""Compressed entries (DeepSeek-V4), which a call's rows attend to beside a window of keys.

A compressor makes one entry, a key that is its own value, of each whole window of ``rate`` tokens. With kv and gate, products
of a token's hidden row, its sources,

    entry = rotated(norm(sum over the window of softmax(gate + bias) * kv))

number by number, rotated to the window's first position. With two series of sources the sum goes over the window's last series
and the first series of the window before. A row sees its own window of keys and the entries of all windows that its text has
closed, or of these the ``index_topk`` that an indexer chooses, whose keys another compressor makes of the same windows.

Each row keeps, after its key in the cache, its sources; a token that closes a window has the entry in place of its last kv,
which no other window needs. So a row of a tree that closes a window makes the entry of the last tokens of its own path, from
the cache and from the rows of the call, and entries are committed as rows are. Each is added up in one order.
What makes the sources: compressors.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pass_ext.decoding.models.features.indexed import IndexRows, joined_lists, lists_by_scores, of_rows
from pass_ext.decoding.models.layer_attention import Attending, LayerAttention
from pass_ext.decoding.models.row_attention import is_being_recorded
from pass_ext.ops.attention import attention_merge
from pass_ext.tree import PackedTrees


class Compression(NamedTuple):
    """How entries are made of sources ``[..., series * 2 * D]``: kv and gate of the last series, and of the first one before
    them in a text."""

    rate: int
    series: int
    bias: Tensor
    """``[rate, series * D]`` float32, of gates, the first series before the last."""
    finish: Callable[[Tensor, Tensor], Tensor]
    """Sums ``[n, D]`` and the position of each window's first token ``[n]`` -> the entries."""

    @property
    def dim(self) -> int:
        """D."""
        return self.bias.shape[1] // self.series


class CompressedRows(NamedTuple):
    """What a compressor makes of the rows of a call."""

    of_entries: Compression
    sources: Tensor
    """``[N, series * 2 * D]``."""
    of_keys: Compression | None = None
    """Of the indexer's keys; None: rows see all entries."""
    indexed: IndexRows | None = None
    """What the indexer makes; its keys are their sources."""


class ByEntries(Attending):
    """A layer's attention to its own keys and, beside them, to entries, which its cache keeps with what they are made of."""

    def __init__(self, rows: CompressedRows) -> None:
        self._rows = rows

    def attend(self, layer: LayerAttention) -> Tensor:
        rows, name, dtype = self._rows, layer.session.model.name, layer.dtype
        if is_being_recorded(rows.sources):
            raise RuntimeError(
                f"{name}: the windows that its compressors close depend on the lengths of the texts, which the host reads"
            )
        if layer.session.cache_dtype is not None:
            raise ValueError(
                f"{name}: Session(cache_dtype=None) alone decodes this model: its compressors make entries of what they keep "
                "of a text, which so cannot lie in the cache in 8 bits"
            )
        # Entries are made of what the cache will hold.
        rows = rows._replace(sources=rows.sources.to(dtype))
        if rows.indexed is not None:
            rows = rows._replace(indexed=rows.indexed._replace(keys=rows.indexed.keys.to(dtype)))
        entries = layer.of_call(CallEntries, lambda: CallEntries(layer.prefix_lens, layer.trees))
        held = layer.held()
        after, lists = entries.of_layer(rows, None if held is None else held[:, :, 0])
        layer.keep(after)
        out, lse = layer.attended(layer.q, sinks=None)
        q, width = layer.q.contiguous(), layer.q.shape[2]
        cached, new = layer.cached_after()[..., :width], after[:, None, :width]
        anywhere = {**layer.options, "window": -1, "chunk": -1, "sinks": None}
        beside = layer.attention(q, cached, cached, new, new, key_lists=lists, **anywhere)
        return attention_merge(layer.cut(out), lse, *beside, sinks=layer.options["sinks"])[0]


class Windows(NamedTuple):
    """The windows that rows of a call close."""

    rows: Tensor
    """``[n]``, of the call."""
    requests: Tensor
    """``[n]``, whose they are."""
    positions: Tensor
    """``[n]``, of each window's first token."""
    tokens: Tensor
    """``[n, reach]``, the last tokens of each row's path: positions in the text, then its length + the number of a node;
    negative ones are before the text."""


class CallEntries:
    """The entries of one call, layer by layer. The host reads lengths, for which a GPU is waited for."""

    def __init__(self, prefix_lens: Tensor, trees: PackedTrees) -> None:
        self._prefix_lens, self._trees = prefix_lens, trees
        self._windows: dict[tuple[int, int], Windows] = {}
        self._seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._all: dict[int, Tensor] = {}

    def of_layer(self, rows: CompressedRows, held: Tensor | None) -> tuple[Tensor, Tensor]:
        """What lies after the keys of the rows ``[N, d]``, which begins with entries, and the entries that each row attends
        to, as ``attention_tree`` takes key_lists.

        held: ``[B, S, d]``, what lies after the keys in the cache; None: there are none yet.
        """
        widths = rows.sources.shape[1], 0 if rows.indexed is None else rows.indexed.keys.shape[1]
        of_entries, of_keys = (None, None) if held is None else held.split(widths, 2)
        after = self._with_entries(rows.of_entries, rows.sources, of_entries)
        if rows.of_keys is None or rows.indexed is None:
            return after, self._lists_of_all(rows.of_entries.rate)
        keys = self._with_entries(rows.of_keys, rows.indexed.keys, of_keys)
        return torch.cat((after, keys), 1), self._chosen(rows, keys, of_keys)

    def _with_entries(self, made: Compression, sources: Tensor, held: Tensor | None) -> Tensor:
        """The sources, with entries in the rows that close windows."""
        windows = self._windows_of(made.rate, made.series * made.rate)
        if not len(windows.rows):
            return sources
        prefixes = self._prefix_lens[windows.requests, None]
        is_new, firsts = windows.tokens >= prefixes, self._trees.cu_nodes[windows.requests, None]
        members = sources[(firsts + windows.tokens - prefixes).clamp(min=0)]
        if held is not None:
            of_text = held[windows.requests[:, None], windows.tokens.clamp(min=0).minimum((prefixes - 1).clamp(min=0))]
            members = torch.where(is_new[..., None], members, of_text)
        entries = made.finish(_sums(made, members, windows.tokens < 0), windows.positions)
        sources = sources.clone()
        sources[windows.rows, : made.dim] = entries.to(sources.dtype)
        return sources

    def _windows_of(self, rate: int, reach: int) -> Windows:
        if (rate, reach) not in self._windows:
            self._windows[rate, reach] = _windows(rate, reach, self._prefix_lens, self._trees)
        return self._windows[rate, reach]

    def _seen_of(self, rate: int) -> list[tuple[Tensor, Tensor]]:
        """Of each request that has rows, the keys of its entries ``[E]`` and those that each row sees ``[n, E]``."""
        if rate not in self._seen:
            trees, found = self._trees, []
            for mine, prefix in zip(self._trees.slices(), self._prefix_lens.tolist(), strict=True):
                of_text = torch.arange(rate - 1, max(prefix, rate - 1), rate, device=trees.cu_nodes.device)
                nodes = ((prefix + trees.depths[mine] + 1) % rate == 0).nonzero()[:, 0]
                sees = trees.seen(mine)[:, nodes]
                found.append(
                    (torch.cat((of_text, prefix + nodes)), functional.pad(sees, (len(of_text), 0), value=True))
                )
            self._seen[rate] = found
        return self._seen[rate]

    def _lists_of_all(self, rate: int) -> Tensor:
        """Of all entries that each row sees."""
        if rate not in self._all:
            beyond = torch.iinfo(torch.int32).max
            parts = [keys.masked_fill(~sees, beyond).sort(1).values for keys, sees in self._seen_of(rate)]
            self._all[rate] = self._joined([keys.masked_fill(keys == beyond, -1) for keys in parts])
        return self._all[rate]

    def _chosen(self, rows: CompressedRows, keys: Tensor, held: Tensor | None) -> Tensor:
        """Of the entries that an indexer chooses. keys: ``[N, d]``, with those of the rows that close windows in front."""
        assert rows.indexed is not None and rows.of_keys is not None
        made, index, seen = rows.of_keys, rows.indexed, self._seen_of(rows.of_entries.rate)
        if all(len(entries) <= index.most for entries, _ in seen):
            return self._lists_of_all(rows.of_entries.rate)
        parts, first = [], 0
        for b, ((entries, sees), prefix) in enumerate(zip(seen, self._prefix_lens.tolist(), strict=True)):
            mine = slice(first, first + len(sees))
            nodes = entries[prefix // made.rate :] - prefix
            numbers = keys[mine][nodes, : made.dim]
            if held is not None:
                numbers = torch.cat((held[b, entries[: prefix // made.rate], : made.dim], numbers))
            part = of_rows(index, mine)
            if len(entries) and len(sees):
                chosen = lists_by_scores(part, numbers, sees, 0).long()
                parts.append(entries[chosen].masked_fill(chosen < 0, -1))
            else:
                parts.append(entries.new_zeros(len(sees), 0))
            first += len(sees)
        return self._joined(parts)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """Lists of all rows of the call; one entry long or longer."""
        parts = [functional.pad(part, (0, not part.shape[1]), value=-1).int() for part in parts]
        return joined_lists(parts, len(self._trees.parents))


def _windows(rate: int, reach: int, prefix_lens: Tensor, trees: PackedTrees) -> Windows:
    lengths = prefix_lens[trees.owners] + trees.depths + 1
    rows = (lengths % rate == 0).nonzero()[:, 0]
    owners, lengths = trees.owners[rows], lengths[rows].long()
    prefixes, firsts = prefix_lens[owners].long(), trees.cu_nodes[owners].long()
    newest = prefixes + rows - firsts
    path = [newest]
    for _ in range(reach - 1):
        above = prefixes + trees.parents[firsts + (newest - prefixes).clamp(min=0)]  # a root's parent is -1
        newest = above.where(newest >= prefixes, newest - 1)
        path.insert(0, newest)
    return Windows(rows, owners, lengths - rate, torch.stack(path, 1))


def _sums(made: Compression, sources: Tensor, is_before: Tensor) -> Tensor:
    """The sums ``[n, D]`` over sources ``[n, reach, d]`` of windows; is_before ``[n, reach]``: not those of them."""
    rate, dim, gates, kvs = made.rate, made.dim, list[Tensor](), list[Tensor]()
    for token in range(sources.shape[1]):
        series = made.series - 1 - token // rate  # 0 is the last
        kv, gate = sources[:, token, 2 * series * dim : 2 * (series + 1) * dim].split(dim, 1)
        bias = made.bias[token % rate, (made.series - 1 - series) * dim :][:dim]
        gates.append((gate + bias).float().masked_fill(is_before[:, token, None], -torch.inf))
        kvs.append(kv.masked_fill(is_before[:, token, None], 0))
    most = torch.stack(gates).amax(0)
    weights = [(gate - most).exp() for gate in gates]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    sums = torch.zeros_like(total)
    for weight, kv in zip(weights, kvs, strict=True):
        sums = sums + (kv * (weight / total).to(kv.dtype)).float()
    return sums.to(sources.dtype)
