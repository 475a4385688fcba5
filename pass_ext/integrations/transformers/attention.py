"""transformers' attention function by ``attention_tree``: softmax(scaling q k^T) v over the columns that the mask shows.

The keys include the cache; the queries belong to the last rows of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pass_ext.decoding.models.cached_rows import padded
from pass_ext.decoding.models.row_attention import Reach, unsupported, window_conflict
from pass_ext.integrations.transformers.masks import Call, CausalRows, TreeStep, causal, dense_calls
from pass_ext.ops.attention import attention_tree, padded_widths

NAME = "pass_ext"
_TREE = "pass_ext_tree"

_dense_plans: Any = WeakIdKeyDictionary()  # 4-D mask -> ((version, batch), calls): all layers share a plan


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of queries ``[B, Hq, Q, D]`` to keys, values ``[B, Hkv, S, D]``: ``[B, Q, Hq, D]``. s_aux: sinks ``[Hq]``."""
    step = options.pop(_TREE, None)
    _refuse(module, (query, key, value, s_aux), dropout, options)
    calls, window = _plan(module, query, key, attention_mask, sliding_window, step)
    dim = value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    query, key, value = _at_head_dim(query, key, value)
    batch, heads, queries, _ = query.shape
    covered = sum((call.requests.stop - call.requests.start) * (call.rows.stop - call.rows.start) for call in calls)
    rows_out = None
    for call in calls:
        q = query[call.requests, :, call.rows].transpose(1, 2).flatten(0, 1)
        out, _ = attention_tree(
            q,
            key[call.requests, :, call.start :].transpose(1, 2),
            value[call.requests, :, call.start :].transpose(1, 2),
            call.prefix_lens,
            call.cu_nodes,
            call.visible,
            call.max_nodes,
            depths=call.depths,
            scale=scale,
            softcap=softcap or 0.0,
            window=window,
            sinks=s_aux,
        )
        out = out.unflatten(0, (call.requests.stop - call.requests.start, -1))[..., :dim]
        if len(calls) == 1 and covered == batch * queries:
            return out.contiguous(), None
        if rows_out is None:
            rows_out = query.new_zeros(batch, queries, heads, dim)  # no call covers rows of padding: they stay 0
        rows_out[call.requests, call.rows] = out
    return query.new_zeros(batch, queries, heads, dim) if rows_out is None else rows_out, None


def _plan(
    module: torch.nn.Module, query: Tensor, key: Tensor, mask: Any, sliding_window: int | None, step: TreeStep | None
) -> tuple[tuple[Call, ...], int]:
    """The calls of ``attention_tree`` that compute this layer, and their window."""
    batch, queries = query.shape[0], query.shape[2]
    if isinstance(mask, Tensor):
        if step is not None:
            raise ValueError(f"pass_ext attention: give {_TREE} or a 4-D attention_mask, got both")
        return _dense_plan(mask, batch, queries), -1
    if mask is None:  # the model makes no mask if nothing is padding
        column, window = key.shape[2] - queries, -1 if sliding_window is None else sliding_window
        mask = causal(batch, queries, column, None, window, query.device)
    elif not isinstance(mask, CausalRows):
        raise TypeError(
            f"pass_ext attention: attention_mask must come from pass_ext's mask function or be a 4-D tensor, got "
            f"{type(mask).__name__}"
        )
    elif (conflict := window_conflict(module, sliding_window, Reach(mask.window))) is not None:
        raise ValueError(f"pass_ext attention: {conflict}; use attn_implementation='sdpa' for this model")
    if not isinstance(step, TreeStep | None):
        raise TypeError(f"{_TREE} must be a TreeStep, got {type(step).__name__}")
    return (mask.calls if step is None else step.calls(mask)), mask.window


def _dense_plan(mask: Tensor, batch: int, queries: int) -> tuple[Call, ...]:
    version = None if mask.is_inference() else mask._version
    entry = _dense_plans.get(mask)
    if entry is None or version is None or entry[0] != (version, batch):
        entry = (version, batch), dense_calls(mask, batch, queries)
        _dense_plans[mask] = entry
    calls: tuple[Call, ...] = entry[1]
    return calls


def _at_head_dim(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors padded with zeros to widths of the op. Zeros change no product; the caller cuts them off."""
    try:
        of_keys, of_values = padded_widths(key.shape[-1], value.shape[-1], key.device, in_codes=False)
    except NotImplementedError as error:
        raise ValueError(f"pass_ext attention: {error}; use attn_implementation='sdpa'") from error
    return padded(query, of_keys), padded(key, of_keys), padded(value, of_values)


def _refuse(
    module: torch.nn.Module,
    floats: tuple[Tensor, Tensor, Tensor, Tensor | None],
    dropout: float,
    options: dict[str, Any],
) -> None:
    """Raises for gradients and for arguments that pass_ext does not implement."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in floats):
        raise RuntimeError(
            "pass_ext attention has no gradients: run the model under torch.no_grad(), or train it with "
            "model.set_attn_implementation('sdpa')"
        )
    reason = unsupported(module, floats[0].shape[2], dropout, options)
    if module._modules.get("compressor") is not None:
        reason = f"{type(module).__name__} has compressed entries after its keys, which no mask of pass_ext's is of"
    if reason is not None:
        raise ValueError(
            f"pass_ext attention: {reason}; transformers' attn_implementation 'eager' or 'sdpa' may support it"
        )
