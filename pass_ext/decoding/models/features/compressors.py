"""The compressors of DeepSeek-V4's layers, in a model's shadow: they give attention the sources of compressed entries.

There a compressor's forward is ours. It hands the sources of a call's rows on and gives no entries: compressed.py makes those.
Both are compared first with the compressor's own forward, on a text of some windows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.equivalence import difference_of
from pass_ext.decoding.models.features.compressed import ByEntries, CallEntries, CompressedRows, Compression
from pass_ext.decoding.models.features.feature import Feature
from pass_ext.decoding.models.features.indexed import IndexRows
from pass_ext.decoding.models.layer_attention import Attending
from pass_ext.decoding.models.modules import modules_of
from pass_ext.decoding.models.row_attention import attend_by
from pass_ext.decoding.models.shadow import own_call
from pass_ext.ops.attention import WIDTH_STEP
from pass_ext.tree import PackedTrees, Tree, pack_trees

_COMPARED = 3  # windows


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


class CompressedEntries(Feature):
    kinds = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})

    def unserved(self, model: Any) -> str | None:
        parts = _attending(model)
        kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
        known = {part.layer_idx for part in parts}
        silent = sorted({kind for layer, kind in enumerate(kinds) if kind in self.kinds and layer not in known})
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
                    f"attends to entries that {name} makes of windows of tokens, which {difference}; pass_ext knows the layer "
                    "of transformers 5.24, so it cannot decode this model"
                )
            if any(dim % WIDTH_STEP for _, dim in form):
                return (
                    f"attends to entries that {name} makes of windows of tokens, and pass_ext decodes that where heads have a "
                    f"multiple of {WIDTH_STEP} numbers, here {' and '.join(str(dim) for _, dim in form)}"
                )
        return None

    def untrained(self, model: Any, length: int) -> str | None:
        if not _attending(model):
            return None
        return (
            "its layers attend to entries of whole windows of tokens, and in a call of many groups of slots its compressors "
            "would take all slots for one text"
        )

    def serve(self, shadow: Any, embedded: Callable[[Tensor], Tensor]) -> None:
        """Compressors give their sources to attention."""
        for part in _attending(shadow):
            part.compressor.forward = partial(_compressed, part)
            attend_by(part, partial(_handed, part))

    def after(self, model: Any) -> Mapping[int, int]:
        """Sources, of entries and of an indexer's keys."""
        widths = {}
        for part in _attending(model):
            makers = part.compressor, part.compressor._modules.get("indexer")
            widths[part.layer_idx] = sum(2 * maker.position_bias.shape[1] for maker in makers if maker is not None)
        return widths

    def other_format(self, model: Any) -> str:
        return "windows, and entries that its compressors have made" if _attending(model) else ""


def _compressed(
    part: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, *_: Any
) -> tuple[Tensor, None]:
    """In place of the forward of a layer's compressor: no entries, which attention has."""
    compressor = part.compressor
    call = own_call(f"this {type(compressor).__name__} is")
    call.attended.handed[part] = ByEntries(compressed_rows(compressor, hidden_states, q_residual, position_ids))
    return hidden_states.new_zeros(1, 1, 0, compressor.head_dim), None


def _attending(model: nn.Module) -> list[Any]:
    """Layers' attention that has a compressor."""
    return [part for part in modules_of(model) if part._modules.get("compressor") is not None]


def _handed(part: Any, _: dict[str, Any]) -> Attending | None:
    handed: Attending | None = own_call("these entries are").attended.handed.pop(part, None)
    return handed


# ---- compared with the model's own ----


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
    after, lists = call.of_layer(rows, None)
    ends = slice(compressor.compress_rate - 1, None, compressor.compress_rate)
    most = 1e-4 if like.dtype == torch.float32 else 5e-2
    ours = after[ends, : rows.of_entries.dim]
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
