"""``StepAttention``: the attention of one call of a session, and the keys and values that the call's rows got."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pass_ext.decoding.models.cached_rows import is_front, padded
from pass_ext.decoding.models.layer_attention import Attending, LayerAttention
from pass_ext.decoding.models.packed import NewRows, StepAttend
from pass_ext.decoding.models.taps import Taps
from pass_ext.ops.attention import MOST_VALUE_DIM, WIDTH_STEP, attention_tree
from pass_ext.ops.quantize import CODE_HEADER
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
        if session.model.has_encoder and session.encoded is None:
            raise ValueError(
                f"{session.model.name} has an encoder, and this call has nothing for it to read: it decodes with "
                "generate(prompt=…), and drafts for models that have encoders too"
            )
        self.layers = self.heard = 0
        self.taps = taps
        self.options: list[dict[str, Any]] = []
        self.may_have_changed = may_have_changed
        self.is_first, self.batch_invariant = session.is_new, session.batch_invariant
        self.cache_dtype = session.cache_dtype
        self.states = session.step_states(trees, is_first=self.is_first)
        self.session, self.trees, self.ids, self.encoded = session, trees, ids, session.encoded
        self.memo: dict[Any, Any] = {}
        """What layers of the call share."""
        self.kept: list[tuple[Tensor, Tensor, tuple[int, int]]] = []
        """Keys and values of each layer, as its caches have them, and their numbers before padding."""
        self._new: list[Tensor] = []
        self._stacked: Tensor | None = None

    @property
    def text_rows(self) -> int:
        return int(self.tokens().max()) if self.trees.cu_nodes.is_cpu else len(self.trees.parents)

    def tokens(self) -> Tensor:
        """How many rows of each request are tokens."""
        bounds = self.trees.cu_nodes
        return F.pad((self.ids >= 0).cumsum(0), (1, 0))[bounds.long()].diff()  # those before each row

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        window: int = -1,
        sinks: Tensor | None = None,
        chunk: int = -1,
        visible: Tensor | None = None,
        by: Attending | None = None,
    ) -> Tensor:
        options: dict[str, Any] = dict(scale=scale, softcap=softcap, window=window, sinks=sinks, chunk=chunk)
        attention = LayerAttention(self, layer, q, k, v, options, visible)
        if by is not None:
            return by.attend(attention)
        attention.keep()
        return attention.attend(q)

    def of_encoder(self, layer: int, q: Tensor, *, scale: float | None) -> Tensor:
        (keys, values), dims, trees = self.encoded.layers[layer], self.encoded.dims, self.trees
        self.heard += 1
        k, v = (cache.new_zeros(len(q), *cache.shape[2:]) for cache in (keys, values))
        sees_no_row = torch.zeros_like(trees.visible)
        out, _ = attention_tree(
            padded(q, keys.shape[-1]), keys, values, self.encoded.lengths, trees.cu_nodes, sees_no_row, trees.max_nodes,
            k_new=k, v_new=v, scale=q.shape[-1] ** -0.5 if scale is None else scale, batch_invariant=self.batch_invariant,
        )  # fmt: skip
        return out[..., : dims[1]].contiguous()

    def keep(
        self, layer: int, k: Tensor, v: Tensor, dims: tuple[int, int], options: dict[str, Any], *, is_shared: bool
    ) -> None:
        """Takes the padded keys and values of a layer. is_shared: values are the first numbers of keys."""
        session = self.session
        if layer != self.layers:
            raise ValueError(f"layers must attend once each and in order: expected layer {self.layers}, got {layer}")
        if self.is_first:
            session.add_layer(k, None if is_shared else v, dims)
        else:
            self.check_is_cached()
        session.check_rows(layer, k, v)
        keys, values = session.caches[layer]
        self.kept.append((k, v, dims))
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

    def check_is_cached(self) -> None:
        """Of the layer that attends next."""
        if self.layers == len(self.session.caches):
            raise ValueError(f"the model has more layers than {self.layers}, which `past` is of")

    def of_all_layers(self, layers: int, rows: Tensor, heads: int, head_dim: int) -> tuple[Any, ...] | None:
        session, trees = self.session, self.trees
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
        parents, cu_nodes, most, visible, depths = self.trees
        trees = PackedTrees(parents[:rows], cu_nodes.clamp(max=rows), most, visible[:rows], depths[:rows])
        return StepAttention(self.session, trees, self.ids[:rows])

    def new_rows(self) -> NewRows:
        return self._new if self._stacked is None else self._stacked
