"""Attention to compressed entries beside a window (DeepSeek-V4), in a model's shadow.

A compressor makes one entry, a key that is its own value, of each whole window of ``rate`` tokens. With kv and gate, products
of a token's hidden row, its sources,

    entry = rotated(norm(sum over the window of softmax(gate + bias) * kv))

number by number, rotated to the window's first position. With two series of sources the sum goes over the window's last series
and the first series of the window before. A row sees its own window of keys and the entries of all windows that its text has
closed, or of these the ``index_topk`` that an indexer chooses, whose keys another compressor makes of the same windows.

Each row keeps, behind its key in the cache, its sources; a token that closes a window has the entry in place of its last kv,
which no other window needs. So a row of a tree that closes a window makes the entry of the last tokens of its own path, from
the cache and from the rows of the call, and entries are committed as rows are. Each is added up in one order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pass_ext.decoding.models.equivalence import difference_of
from pass_ext.decoding.models.indexed import IndexRows, joined_lists, lists_by_scores, of_rows
from pass_ext.decoding.models.shadow import current_call
from pass_ext.ops.attention import WIDTH_STEP
from pass_ext.tree import PackedTrees, Tree, pack_trees

KINDS = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})
"""Layers that attend to entries, by the names of transformers' configs."""


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


# ---- the compressor's own parts ----


def _compression(part: Any, series: int) -> Compression:
    """Of a compressor or an indexer."""
    finish = partial(_finished, part.kv_norm, part.rotary_emb, part.rope_layer_type)
    return Compression(part.compress_rate, series, part.position_bias.detach(), finish)


def _finished(norm: Any, rotary: Any, kind: str, sums: Tensor, positions: Tensor) -> Tensor:
    entries = norm(sums)
    cos, sin = rotary(entries, position_ids=positions[None], layer_type=kind)
    return _rotated_pairs(entries, cos[0], sin[0])


def _rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last numbers of x rotated, pair by pair."""
    front, pairs = x.tensor_split([x.shape[-1] - 2 * cos.shape[-1]], -1)
    first, second = pairs.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((front, rotated.flatten(-2).to(x.dtype)), -1)


def _sources(part: Any, hidden: Tensor, series: int) -> Tensor:
    """Of a compressor or an indexer: hidden ``[1, N, d]`` -> ``[N, series * 2 * D]``."""
    both = [project(hidden)[0].unflatten(-1, (series, -1)).flip(1) for project in (part.kv_proj, part.gate_proj)]
    return torch.stack(both, 2).flatten(1)


def compressed_rows(compressor: Any, hidden: Tensor, queries: Tensor, positions: Tensor) -> CompressedRows:
    """hidden ``[1, N, d]``; queries ``[1, N, rank]``, which an indexer expands; positions ``[1, N]``."""
    series, indexer = _series(compressor), compressor._modules.get("indexer")
    rows = CompressedRows(_compression(compressor, series), _sources(compressor, hidden, series))
    if indexer is None:
        return rows
    q = indexer.q_b_proj(queries)[0].unflatten(-1, (-1, indexer.head_dim))
    cos, sin = indexer.rotary_emb(hidden, position_ids=positions, layer_type=indexer.rope_layer_type)
    q = _rotated_pairs(q, cos[0, :, None], sin[0, :, None]).float()
    scorer = indexer.scorer
    weights = scorer.weights_proj(hidden)[0].float() * scorer.weights_scaling
    sources = _sources(indexer, hidden, _series(indexer))
    index = IndexRows(q, sources, weights, scorer.softmax_scale, indexer.index_topk)
    return rows._replace(of_keys=_compression(indexer, _series(indexer)), indexed=index)


def _series(part: Any) -> int:
    series: int = part.position_bias.shape[1] // part.head_dim
    return series


# ---- in a shadow ----


def compress_by_rows(shadow: nn.Module) -> None:
    """Has the compressors of a model's shadow give their sources to attention."""
    for part in _attending(shadow):
        part.compressor.forward = partial(_compressed, part.compressor)


def _compressed(
    compressor: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, *_: Any
) -> tuple[Tensor, None]:
    """In place of a compressor's forward: no entries, which attention has."""
    call = current_call.get()
    if call is None:
        raise RuntimeError(f"this {type(compressor).__name__} is for pass_ext's own calls of a model")
    call.attend.compress(compressed_rows(compressor, hidden_states, q_residual, position_ids))
    return hidden_states.new_zeros(1, 1, 0, compressor.head_dim), None


def compressed_widths(model: nn.Module) -> dict[int, int]:
    """The layers that have a compressor -> the numbers behind their keys."""
    widths = {}
    for part in _attending(model):
        makers = part.compressor, part.compressor._modules.get("indexer")
        widths[part.layer_idx] = sum(2 * maker.position_bias.shape[1] for maker in makers if maker is not None)
    return widths


def _attending(model: nn.Module) -> list[Any]:
    """Layers' attention that has a compressor."""
    return [part for part in model.modules() if part._modules.get("compressor") is not None]


def unserved(model: nn.Module) -> str | None:
    """Why entries cannot be made for this model, to follow its name; None: they can, or it has none."""
    parts = _attending(model)
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()  # type: ignore[union-attr, operator]
    known = {part.layer_idx for part in parts}
    silent = sorted({kind for layer, kind in enumerate(kinds) if kind in KINDS and layer not in known})
    if silent:
        return f"has layers of the kind {', '.join(silent)} without a compressor, which pass_ext does not know"
    for part in parts:
        name, indexer = type(part.compressor).__name__, part.compressor._modules.get("indexer")
        form = tuple(
            (getattr(maker, "compress_rate", 0), getattr(maker, "head_dim", 0))
            for maker in (part.compressor, indexer)
            if maker is not None
        )
        difference = difference_of(type(part.compressor).forward, form, partial(_is_right, part.compressor))
        if difference is not None:
            return (
                f"attends to entries that {name} makes of windows of tokens, which {difference}; pass_ext knows the layer of "
                "transformers 5.24, so it cannot decode this model"
            )
        if any(dim % WIDTH_STEP for _, dim in form):
            return (
                f"attends to entries that {name} makes of windows of tokens, and pass_ext decodes that where heads have a "
                f"multiple of {WIDTH_STEP} numbers, here {' and '.join(str(dim) for _, dim in form)}"
            )
    return None


# ---- the entries of a call ----


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
        """What lies behind the keys of the rows ``[N, d]``, which begins with entries, and the entries that each row attends
        to, as ``attention_tree`` takes key_lists.

        held: ``[B, S, d]``, what lies behind the keys in the cache; None: there are none yet.
        """
        widths = rows.sources.shape[1], 0 if rows.indexed is None else rows.indexed.keys.shape[1]
        of_entries, of_keys = (None, None) if held is None else held.split(widths, 2)
        behind = self._with_entries(rows.of_entries, rows.sources, of_entries)
        if rows.of_keys is None or rows.indexed is None:
            return behind, self._lists_of_all(rows.of_entries.rate)
        keys = self._with_entries(rows.of_keys, rows.indexed.keys, of_keys)
        return torch.cat((behind, keys), 1), self._chosen(rows, keys, of_keys)

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
            bounds, trees, found = self._trees.cu_nodes.tolist(), self._trees, []
            for b, prefix in enumerate(self._prefix_lens.tolist()):
                mine = slice(bounds[b], bounds[b + 1])
                of_text = torch.arange(rate - 1, max(prefix, rate - 1), rate, device=trees.cu_nodes.device)
                nodes = ((prefix + trees.depths[mine] + 1) % rate == 0).nonzero()[:, 0]
                sees = trees.visible[mine][:, nodes // 64] >> nodes % 64 & 1 == 1
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
    numbers = torch.arange(len(trees.parents), device=trees.parents.device, dtype=torch.int32)
    owners = torch.bucketize(numbers, trees.cu_nodes[1:], right=True).clamp(max=len(prefix_lens) - 1)
    lengths = prefix_lens[owners] + trees.depths + 1
    rows = (lengths % rate == 0).nonzero()[:, 0]
    owners, lengths = owners[rows], lengths[rows].long()
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


# ---- compared with the model's own ----

_COMPARED = 3  # windows


@torch.no_grad()
def _is_right(compressor: Any) -> bool:
    """Compares the entries, and those that a row sees, of a text of some windows with those of the compressor's own forward."""
    own, indexer = copy.copy(compressor), compressor._modules.get("indexer")
    if indexer is not None:
        own._modules = {**compressor._modules, "indexer": copy.copy(indexer)}
        own.indexer.index_topk = 1
    generator, like, count = (
        torch.Generator().manual_seed(0),
        compressor.kv_proj.weight,
        _COMPARED * compressor.compress_rate,
    )
    ranks = like.shape[1], 1 if indexer is None else indexer.q_b_proj.in_features
    hidden, queries = (torch.randn(1, count, width, generator=generator).to(like) for width in ranks)
    positions = torch.arange(count, device=like.device)[None]
    theirs, bias = type(compressor).forward(own, hidden, queries, positions, None, 0)
    rows = compressed_rows(own, hidden, queries, positions)
    call = CallEntries(torch.zeros(1, dtype=torch.int32, device=like.device), _chain(count, like.device))
    behind, lists = call.of_layer(rows, None)
    ends = slice(compressor.compress_rate - 1, None, compressor.compress_rate)
    most = 1e-4 if like.dtype == torch.float32 else 5e-2
    ours = behind[ends, : rows.of_entries.dim]
    if theirs.shape[2:] != ours.shape or not torch.allclose(
        ours.float(), theirs[0, 0].float(), rtol=0.0, atol=most * float(theirs.abs().max())
    ):
        return False
    listed = lists.new_zeros(count, count + 1, dtype=torch.bool).scatter(1, lists.long() % (count + 1), True)
    differ = listed[:, :count][:, ends] != (bias[0, 0] == 0)
    if rows.of_keys is None or rows.indexed is None:
        return not bool(differ.any())
    keys = call._with_entries(rows.of_keys, rows.indexed.keys, None)[ends, : rows.of_keys.dim]
    scores = own.indexer.scorer(rows.indexed.q[None], keys[None], hidden)[0]
    ready = positions[0, :, None] >= positions[0, ends]
    best, second = scores.masked_fill(~ready, -torch.inf).topk(2).values.unbind(1)
    is_tie = best - second <= most * float(scores.abs().max())
    return not bool((differ.any(1) & ~is_tie).any())


def _chain(count: int, device: torch.device) -> PackedTrees:
    """A text of so many rows."""
    return pack_trees([Tree.chain(count - 1)], device)
