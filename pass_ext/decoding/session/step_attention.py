"""``StepAttention``: the attention of one call of a session, and the keys and values that the call's rows got."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pass_ext.decoding.models.compressed import CallEntries, CompressedRows
from pass_ext.decoding.models.indexed import ChosenKeys, IndexRows, chosen_keys, split_behind, with_behind
from pass_ext.decoding.models.latents import Latents
from pass_ext.decoding.models.packed import NewRows, StepAttend
from pass_ext.decoding.models.row_attention import is_being_recorded
from pass_ext.decoding.models.taps import Taps
from pass_ext.decoding.session.distance_bias import DistanceBias
from pass_ext.ops.attention import MOST_VALUE_DIM, WIDTH_STEP, attention_merge, attention_tree, padded_widths
from pass_ext.ops.quantize import CODE_HEADER, dequantize_rows, quantize_rows
from pass_ext.tree import PackedTrees


class StepAttention(StepAttend):
    """``attend`` of one call of a session. layers: how many have attended."""

    def __init__(
        self,
        session: Any,
        trees: PackedTrees,
        ids: Tensor,
        *,
        may_have_changed: bool = True,
        taps: Taps | None = None,
    ) -> None:
        self.layers = 0
        self.taps = taps
        self.options: list[dict[str, Any]] = []
        self.may_have_changed = may_have_changed
        self.is_first, self.batch_invariant = session.is_new, session.batch_invariant
        self.states = session.step_states(trees, is_first=self.is_first)
        self._session, self._trees = session, trees
        self._new: list[Tensor] = []
        self._kept: list[tuple[Tensor, Tensor, tuple[int, int]]] = []
        """Keys and values of each layer, as its caches have them, and their numbers before padding."""
        self._stacked: Tensor | None = None
        self.ids = ids
        # Of the layer that attends next, which takes both away: what lies behind its keys, and the lists of entries in it.
        self._behind: Tensor | None = None
        self._entries: tuple[Tensor, Tensor] | None = None
        self._call_entries = CallEntries(session.prefix_lens, trees)
        self._by_distance: dict[tuple[int, int], DistanceBias] = {}
        self._header = 0 if session.cache_dtype is None else CODE_HEADER

    @property
    def text_rows(self) -> int:
        return int(self._tokens().max()) if self._trees.cu_nodes.is_cpu else len(self._trees.parents)

    def _tokens(self) -> Tensor:
        """How many rows of each request are tokens."""
        bounds = self._trees.cu_nodes
        return F.pad((self.ids >= 0).cumsum(0), (1, 0))[bounds.long()].diff()  # those before each row

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        window: int = -1,
        sinks: Tensor | None = None,
        chunk: int = -1,
        lists: Tensor | None = None,
        bias: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        options: dict[str, Any] = dict(scale=scale, softcap=softcap, window=window, sinks=sinks, chunk=chunk)
        return self._of_layer(layer, q, k, v, lists, options, bias, visible)

    def _of_layer(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lists: Tensor | None,
        options: dict[str, Any],
        bias: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        if options["scale"] is None:
            options["scale"] = q.shape[-1] ** -0.5
        entries, self._entries = self._entries, None
        dims = k.shape[-1], v.shape[-1]
        widths = padded_widths(*dims, q.device, in_codes=self._header > 0)
        is_shared = is_front(v, k)
        k = padded(k, widths[0])
        v = k[..., : widths[1]] if is_shared else padded(v, widths[1])
        k, v = self._stored(layer, k, v, is_shared=is_shared)
        self._keep(layer, k, v, dims, options, is_shared=is_shared)
        return self._of_kept(layer, q, lists, options, bias, entries, visible)

    def of_earlier(
        self, layer: int, q: Tensor, lists: Tensor | None = None, bias: Tensor | None = None, **options: Any
    ) -> Tensor:
        self._check_nothing_is_left()
        if options["scale"] is None:
            options["scale"] = q.shape[-1] ** -0.5
        return self._of_kept(layer, q, lists, options, bias, None)

    def _of_kept(
        self,
        layer: int,
        q: Tensor,
        lists: Tensor | None,
        options: dict[str, Any],
        bias: Tensor | None,
        entries: tuple[Tensor, Tensor] | None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Attention to the keys and values that a layer has kept."""
        (keys, values), (k, v, dims) = self._session.caches[layer], self._kept[layer]
        width = padded_widths(*dims, q.device, in_codes=self._header > 0)[0]
        q, width = padded(q, width), self._header + width
        rows = q, keys[..., :width], values, k[..., :width], v
        if bias is not None:
            distances = self._distances(bias.shape[-1], options["window"], keys.shape[1])
            attention = partial(self._attention, **options)
            out = distances.attend(attention, q, bias, (keys, values), (k, v), options["scale"])
        elif entries is None:
            out, _ = self._attended(*rows, key_lists=lists, visible=visible, **options)
        else:
            own = self._attended(*rows, key_lists=lists, **{**options, "sinks": None})
            out = self._joined_with_entries(own, q[..., : dims[1]], keys, *entries, **options)
        return out[..., : dims[1]].contiguous()  # models call view() on it

    def _joined_with_entries(
        self,
        own: tuple[Tensor, Tensor],
        q: Tensor,
        keys: Tensor,
        behind: Tensor,
        lists: Tensor,
        *,
        sinks: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Attention to the layer's own keys, without sinks, and that of queries ``[N, heads, D]`` to the listed entries, which
        begin what lies behind the keys of one head, as one."""
        _, held = split_behind(keys, behind.shape[1], behind.dtype)
        cached, new = (x[..., : q.shape[2]] for x in (held, behind[:, None]))
        anywhere = {**options, "window": -1, "chunk": -1}
        beside = self._attention(q.contiguous(), cached, cached, new, new, key_lists=lists, **anywhere)
        out, lse = own
        return attention_merge(out[..., : q.shape[2]].contiguous(), lse, *beside, sinks=sinks)[0]

    def choose(self, rows: IndexRows) -> ChosenKeys:
        session, trees, held = self._session, self._trees, None
        if is_being_recorded(rows.q):
            raise RuntimeError(
                f"{session.model.name}: its indexers' choice of keys depends on the lengths of the texts, which the host reads"
            )
        keys = rows.keys.to(session.model.table.dtype)
        self._check_nothing_is_left()
        if not self.is_first:
            self._check_is_cached()
            cached = session.caches[self.layers][0]
            _, held = split_behind(cached, keys.shape[-1] // cached.shape[2], keys.dtype)
        self._behind = keys
        rows = rows._replace(keys=keys)
        return chosen_keys(rows, held, session.prefix_lens, trees, self._tokens())

    def compress(self, rows: CompressedRows) -> None:
        session, held, dtype = self._session, None, self._session.model.table.dtype
        if is_being_recorded(rows.sources):
            raise RuntimeError(
                f"{session.model.name}: the windows that its compressors close depend on the lengths of the texts, which the "
                "host reads"
            )
        if session.cache_dtype is not None:
            raise ValueError(
                f"{session.model.name}: Session(cache_dtype=None) alone decodes this model: its compressors make entries of "
                "what they keep of a text, which so cannot lie in the cache in 8 bits"
            )
        # Entries are made of what the cache will hold.
        rows = rows._replace(sources=rows.sources.to(dtype))
        if rows.indexed is not None:
            rows = rows._replace(indexed=rows.indexed._replace(keys=rows.indexed.keys.to(dtype)))
        self._check_nothing_is_left()
        if not self.is_first:
            self._check_is_cached()
            width = session.model.widths_behind[self.layers]
            held = split_behind(session.caches[self.layers][0], width, dtype)[1][:, :, 0]
        self._entries = self._behind, _ = self._call_entries.of_layer(rows, held)

    def of_latents(
        self, layer: int, q: Tensor, k: Tensor, latents: Latents, chosen: ChosenKeys | None = None, **options: Any
    ) -> Tensor:
        if options["scale"] is None:
            options["scale"] = q.shape[-1] ** -0.5  # before latents are absorbed
        lists = None if chosen is None else chosen.lists
        absorbs = lists is not None or self.batch_invariant or latents.takes(q)
        requests = () if absorbs else self._requests()
        if len(requests) != 1:
            queries, values = latents.absorbed(q), k[..., : latents.rank]
            return latents.expanded(self._of_layer(layer, queries, k, values, lists, options))
        dims = k.shape[-1], latents.rank
        widths = padded_widths(*dims, q.device, in_codes=self._header > 0)
        kept = padded(k, widths[0])
        kept, front = self._stored(layer, kept, kept[..., : widths[1]], is_shared=True)
        self._keep(layer, kept, front, dims, options, is_shared=True)
        session, (request,) = self._session, requests
        rows = torch.cat((session.caches[layer][0][request, : session.prefix_lens[request]], kept))
        rows = rows[..., : self._header + dims[0]]
        if session.cache_dtype is not None:
            rows = dequantize_rows(rows, k.dtype)
        keys, values = latents.heads(rows)
        dims = keys.shape[-1], values.shape[-1]
        widths = padded_widths(*dims, q.device, in_codes=False)
        q, keys, values = padded(q, widths[0]), padded(keys, widths[0]), padded(values, widths[1])
        all_keys, all_values = (
            x.expand(session.requests, -1, -1, -1) for x in (keys, values)
        )  # one request reads them
        return self._attention(q, all_keys, all_values, None, None, **options)[0][..., : dims[1]].contiguous()

    def _requests(self) -> list[int]:
        """Those that have rows."""
        return self._trees.cu_nodes.diff().nonzero().flatten().tolist()

    def _stored(self, layer: int, k: Tensor, v: Tensor, *, is_shared: bool) -> tuple[Tensor, Tensor]:
        """Padded keys and values as the caches have them, what an indexer or a compressor keeps behind the keys. is_shared:
        values are the first numbers of keys."""
        dtype, width = self._session.cache_dtype, self._header + v.shape[-1]
        if dtype is None:
            pass
        elif is_shared:
            k = quantize_rows(k, dtype)
        elif k.shape == v.shape:
            k, v = quantize_rows(torch.stack((k, v)), dtype)
        else:
            k, v = quantize_rows(k, dtype), quantize_rows(v, dtype)
        if self._behind is not None:
            behind, self._behind = self._behind.unflatten(1, (k.shape[1], -1)), None
            assert behind.shape[-1] == self._session.model.widths_behind.get(layer), "another layer's"
            k = with_behind(k, behind)
        return k, k[..., :width] if is_shared else v

    def _keep(
        self, layer: int, k: Tensor, v: Tensor, dims: tuple[int, int], options: dict[str, Any], *, is_shared: bool
    ) -> None:
        """Takes the padded keys and values of a layer. is_shared: values are the first numbers of keys."""
        session = self._session
        if layer != self.layers:
            raise ValueError(f"layers must attend once each and in order: expected layer {self.layers}, got {layer}")
        if self.is_first:
            session.add_layer(k, None if is_shared else v, dims)
        else:
            self._check_is_cached()
        session.check_rows(layer, k, v)
        keys, values = session.caches[layer]
        self._kept.append((k, v, dims))
        if not is_front(values, keys):
            self._new += k, v
        elif is_shared:
            self._new.append(k)
        else:
            raise ValueError(
                f"layer {layer}: the values in the cache, from `past` or a first call, are the first numbers of the keys, "
                "those given now are not"
            )
        self.layers += 1
        self.options.append(options)

    def _check_is_cached(self) -> None:
        """Of the layer that attends next."""
        if self.layers == len(self._session.caches):
            raise ValueError(f"the model has more layers than {self.layers}, which `past` is of")

    def _check_nothing_is_left(self) -> None:
        """Of what was chosen or compressed: its layer must attend before another, by keys of its own."""
        assert self._behind is None and self._entries is None, f"layer {self.layers} has not attended"

    def _attended(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_lists: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """By a list of each row, or by one of each row and share of the heads."""
        if key_lists is not None and key_lists.dim() == 3:
            of_lists = zip(
                key_lists.unbind(1), *(x.chunk(key_lists.shape[1], -2) for x in (q, keys, values, k, v)), strict=True
            )
            parts = [self._attention(*heads, key_lists=own, **options) for own, *heads in of_lists]
            outs, lses = zip(*parts, strict=True)
            return torch.cat(outs, 1), torch.cat(lses, 1)
        return self._attention(q, keys, values, k, v, key_lists=key_lists, **options)

    def _attention(
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
        trees, lens = self._trees, self._session.prefix_lens if prefix_lens is None else prefix_lens
        depths = trees.depths if max(options["window"], options["chunk"]) >= 0 else None
        return attention_tree(
            q, keys, values, lens, trees.cu_nodes, trees.visible if visible is None else visible, trees.max_nodes, k_new=k,
            v_new=v, depths=depths, batch_invariant=self.batch_invariant, **options,
        )  # fmt: skip

    def _distances(self, count: int, window: int, room: int) -> DistanceBias:
        """The lists for biases of so many distances, which layers with the same window share. room: positions of the caches."""
        if (count, window) not in self._by_distance:
            self._by_distance[count, window] = DistanceBias(self._trees, self._session.prefix_lens, room, count, window)
        return self._by_distance[count, window]

    def of_all_layers(self, layers: int, rows: Tensor, heads: int, head_dim: int) -> tuple[Any, ...] | None:
        session, trees = self._session, self._trees
        if self.layers or head_dim % WIDTH_STEP or head_dim > MOST_VALUE_DIM:
            return None
        dtype = session.cache_dtype
        shape = heads, head_dim + (0 if dtype is None else CODE_HEADER)
        dtype = rows.dtype if dtype is None else dtype
        if self.is_first:
            keys = rows.new_empty(0, *shape, dtype=dtype)
            for _ in range(layers):
                session.add_layer(keys, keys, (head_dim, head_dim))
        elif len(session.head_dims) != layers or any(dims != (head_dim, head_dim) for dims in session.head_dims):
            return None
        elif session.caches[0][0].shape[2:] != shape or session.caches[0][0].dtype is not dtype:
            return None  # the layers, one by one, say what does not fit
        caches = session.all_caches()
        listed = [caches] if isinstance(caches, Tensor) else caches
        if not isinstance(caches, Tensor) and len(caches) != 2 * layers:
            return None
        return listed, session.prefix_lens, trees.cu_nodes, trees.visible, trees.max_nodes, trees.depths

    def take(self, new: Tensor) -> None:
        self._stacked, self.layers = new, len(new) // 2

    def again(self, rows: int) -> StepAttention:
        parents, cu_nodes, most, visible, depths = self._trees
        trees = PackedTrees(parents[:rows], cu_nodes.clamp(max=rows), most, visible[:rows], depths[:rows])
        return StepAttention(self._session, trees, self.ids[:rows])

    def new_rows(self) -> NewRows:
        self._check_nothing_is_left()
        return self._new if self._stacked is None else self._stacked


def is_front(values: Tensor, keys: Tensor) -> bool:
    """True if values ``[..., Dv]`` are a view of the first numbers of keys ``[..., D]``."""
    return (
        values.data_ptr() == keys.data_ptr()
        and values.stride() == keys.stride()
        and values.shape[:-1] == keys.shape[:-1]
        and values.shape[-1] <= keys.shape[-1]
    )


def padded(x: Tensor, width: int) -> Tensor:
    """Pads rows with zeros, which add nothing to a product."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
