"""``LayerAttention``: the attention of one layer in a session's call. ``Attending``: what a layer has beside queries, keys and
values.

A layer keeps its rows' keys and values, which the cache takes later, and attends to them and to the cache: all that a row sees,
or as an ``Attending`` has it, by the same two methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from pass_ext.decoding.models.cached_rows import is_front, padded, split_after, with_after
from pass_ext.ops.attention import attention_tree, padded_widths
from pass_ext.ops.quantize import CODE_HEADER, dequantize_rows, quantize_rows
from pass_ext.tree import PackedTrees

T = TypeVar("T")


class Attending:
    """What restricts a layer's attention, or adds to it."""

    def attend(self, layer: LayerAttention) -> Tensor:
        """``[N, heads, D of v]``, after it has kept keys and values."""
        raise NotImplementedError


class LayerAttention:
    """
    Args:
        step: the ``StepAttention`` of the call.
        number: of the layer among those that attend.
        q, k, v: as ``Attend`` takes them; k and v are None where the layer attends to those of an earlier one.
        options: scale, softcap, window, sinks and chunk.
        visible: as ``attention_tree`` takes it; None: the trees'.
    """

    def __init__(
        self,
        step: Any,
        number: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        options: dict[str, Any],
        visible: Tensor | None,
    ) -> None:
        if options["scale"] is None:
            options["scale"] = q.shape[-1] ** -0.5
        self.q, self.options = q, options
        self.session, self.trees, self.batch_invariant = step.session, step.trees, step.batch_invariant
        self._step: Any = step
        self._number, self._k, self._v, self._visible = number, k, v, visible
        self._header = 0 if self.session.cache_dtype is None else CODE_HEADER

    @property
    def k(self) -> Tensor:
        """The rows' own keys."""
        assert self._k is not None, "the layer attends to an earlier one's keys"
        return self._k

    @property
    def v(self) -> Tensor:
        """The rows' own values."""
        assert self._v is not None, "the layer attends to an earlier one's values"
        return self._v

    @property
    def dtype(self) -> torch.dtype:
        """The model's, of what lies after keys."""
        dtype: torch.dtype = self.session.model.table.dtype
        return dtype

    @property
    def prefix_lens(self) -> Tensor:
        """``[B]``."""
        lens: Tensor = self.session.prefix_lens
        return lens

    @property
    def tokens(self) -> Tensor:
        """``[B]``, how many rows of each request are tokens."""
        tokens: Tensor = self._step.tokens()
        return tokens

    def of_call(self, key: Any, make: Callable[[], T]) -> T:
        """What all layers of the call share under this key; the first one makes it."""
        memo: dict[Any, T] = self._step.memo
        if key not in memo:
            memo[key] = make()
        return memo[key]

    # ---- the cache ----

    def held(self) -> Tensor | None:
        """What lies after the keys in the layer's cache, ``[B, S, KV heads, d]``; None: there is nothing yet."""
        if self._step.is_first:
            return None
        self._step.check_is_cached()
        return self._after(self.session.caches[self._number][0])

    def cached_after(self) -> Tensor:
        """As ``held``, in the cache that is there once the layer has kept its rows."""
        return self._after(self.session.caches[self._number][0])

    def _after(self, keys: Tensor) -> Tensor:
        return split_after(keys, self.session.model.widths_after[self._number], self.dtype)[1]

    def keep(self, after: Tensor | None = None, *, k: Tensor | None = None, v: Tensor | None = None) -> None:
        """Keeps keys and values of the rows, by default the layer's own, and after the keys ``[N, d]`` of all their heads; an
        earlier layer's are kept."""
        if self._k is None:
            return
        k, v = self.k if k is None else k, self.v if v is None else v
        dims, is_shared = (k.shape[-1], v.shape[-1]), is_front(v, k)
        widths = padded_widths(*dims, self.q.device, in_codes=self._header > 0)
        k = padded(k, widths[0])
        v = k[..., : widths[1]] if is_shared else padded(v, widths[1])
        k, v = self._coded(k, v, is_shared=is_shared)
        if after is not None:
            after = after.unflatten(1, (k.shape[1], -1))
            assert after.shape[-1] == self.session.model.widths_after.get(self._number), "another layer's"
            k = with_after(k, after)
        if is_shared:
            v = k[..., : self._header + widths[1]]
        self._step.keep(self._number, k, v, dims, self.options, is_shared=is_shared)

    def _coded(self, k: Tensor, v: Tensor, *, is_shared: bool) -> tuple[Tensor, Tensor]:
        """Padded keys and values as the caches have them."""
        dtype = self.session.cache_dtype
        if dtype is None:
            return k, v
        if is_shared:
            return quantize_rows(k, dtype), v
        if k.shape == v.shape:
            k, v = quantize_rows(torch.stack((k, v)), dtype)
            return k, v
        return quantize_rows(k, dtype), quantize_rows(v, dtype)

    # ---- attention ----

    def attend(self, q: Tensor, key_lists: Tensor | None = None) -> Tensor:
        """Attention of queries ``[N, heads, D]`` to the keys and values that are kept -> ``[N, heads, D of v]``.

        key_lists: as ``attention_tree`` takes them; or ``[N, shares, L]``, one for each share of the heads.
        """
        return self.cut(self.attended(q, key_lists)[0])

    def attended(self, q: Tensor, key_lists: Tensor | None = None, **changes: Any) -> tuple[Tensor, Tensor]:
        """The same, padded, and the logs of the sums; changes: of the options."""
        rows, options = self.rows(q), {"visible": self._visible, **self.options, **changes}
        if key_lists is None or key_lists.dim() == 2:
            return self.attention(*rows, key_lists=key_lists, **options)
        shares = [x.chunk(key_lists.shape[1], -2) for x in rows]
        parts = [
            self.attention(q, keys, values, k, v, key_lists=own, **options)
            for own, q, keys, values, k, v in zip(key_lists.unbind(1), *shares, strict=True)
        ]
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, 1), torch.cat(lses, 1)

    def rows(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Padded queries, keys and values of the cache, and those of the rows."""
        (keys, values), (k, v, dims) = self.session.caches[self._number], self._step.kept[self._number]
        width = padded_widths(dims[0], dims[1], q.device, in_codes=self._header > 0)[0]
        q, width = padded(q, width), self._header + width
        return q, keys[..., :width], values, k[..., :width], v

    def cut(self, out: Tensor) -> Tensor:
        """Results without the padding of values."""
        return out[..., : self._step.kept[self._number][2][1]].contiguous()  # models call view() on it

    def keys_of(self, request: int) -> Tensor:
        """The keys ``[T, KV heads, D]`` of a request's text and of all rows of the call, once they are kept."""
        k, _, dims = self._step.kept[self._number]
        rows = torch.cat((self.session.caches[self._number][0][request, : self.prefix_lens[request]], k))
        rows = rows[..., : self._header + dims[0]]
        return rows if self.session.cache_dtype is None else dequantize_rows(rows, self.k.dtype)

    def attend_to(self, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of the layer's queries to keys and values ``[T, heads, D]`` of the one request that has rows."""
        count = values.shape[-1]
        widths = padded_widths(keys.shape[-1], count, self.q.device, in_codes=False)
        q, requests = padded(self.q, widths[0]), self.session.requests
        keys, values = (
            x.expand(requests, -1, -1, -1) for x in (padded(keys, widths[0]), padded(values, widths[1]))
        )  # one request reads them
        return self.attention(q, keys, values, None, None, **self.options)[0][..., :count].contiguous()

    def attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        prefix_lens: Tensor | None = None,
        visible: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """``attention_tree`` of the call."""
        trees: PackedTrees = self.trees
        lens = self.prefix_lens if prefix_lens is None else prefix_lens
        depths = trees.depths if max(options["window"], options["chunk"]) >= 0 else None
        return attention_tree(
            q, keys, values, lens, trees.cu_nodes, trees.visible if visible is None else visible, trees.max_nodes, k_new=k,
            v_new=v, depths=depths, batch_invariant=self.batch_invariant, **options,
        )  # fmt: skip
