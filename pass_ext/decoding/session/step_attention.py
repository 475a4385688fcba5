"""``StepAttention``: the attention of one call of a session, layer by layer or for all layers at once, and the keys and values
that the call's rows got.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from pass_ext.ops.attention import HEAD_DIMS, attention_tree
from pass_ext.tree import PackedTrees

if TYPE_CHECKING:
    from pass_ext.decoding.session.session import Session


class StepAttention:
    """``attend`` of one call, as a ``PackedModel`` takes it.

    Attributes:
        new: keys and values of the rows, ``[N, KV heads, D]`` each, by layer.
        is_first: the session has no caches yet; this call makes them.
    """

    def __init__(self, session: Session, trees: PackedTrees) -> None:
        self.new: list[tuple[Tensor, Tensor]] = []
        self.is_first = not session.caches
        self._session, self._trees = session, trees

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
    ) -> Tensor:
        """As ``Attend``."""
        session, trees = self._session, self._trees
        if layer != len(self.new):
            raise ValueError(
                f"layers must attend once each and in order: expected layer {len(self.new)}, got {layer}"
            )
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        dims = k.shape[-1], v.shape[-1]
        width = head_dim_for(max(dims))
        q, k, v = (padded(x, width) for x in (q, k, v))
        if self.is_first:
            session.add_layer(k, v, dims)
        elif layer == len(session.caches):
            raise ValueError(f"the model has more layers than {layer}, which `past` is of")
        session.check_rows(layer, k, v)
        self.new.append((k, v))
        out, _ = attention_tree(
            q, *session.caches[layer], session.prefix_lens, trees.cu_nodes, trees.visible, trees.max_nodes,
            k_new=k, v_new=v, depths=trees.depths if window >= 0 else None, scale=scale, softcap=softcap,
            window=window,
        )  # fmt: skip
        return out[..., : dims[1]].contiguous()  # models call view() on it

    def of_all_layers(self, layers: int, head_dim: int) -> tuple[Any, ...] | None:
        """The arguments of ``layer_stack`` from ``caches`` to ``depths``; None if the caches are not of so many layers with
        heads of this size."""
        session, trees = self._session, self._trees
        is_alike = len(session.head_dims) == layers and all(dims == (head_dim, head_dim) for dims in session.head_dims)
        if self.new or self.is_first or not is_alike or head_dim not in HEAD_DIMS:
            return None
        return (
            session.flat_caches(), session.prefix_lens, trees.cu_nodes, trees.visible, trees.max_nodes, trees.depths,
        )  # fmt: skip

    def take(self, keys: Tensor, values: Tensor) -> None:
        """Takes the keys and values ``[layers, N, KV heads, D]`` that ``layer_stack`` made."""
        self.new += zip(keys.unbind(), values.unbind(), strict=True)


def head_dim_for(needed: int) -> int:
    """The smallest head size of the attention kernel that is large enough."""
    for width in HEAD_DIMS:
        if width >= needed:
            return width
    raise NotImplementedError(f"attention_tree has head sizes up to {HEAD_DIMS[-1]}, this model's is {needed}")


def padded(x: Tensor, width: int) -> Tensor:
    """Pads rows with zeros, which add nothing to a product."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
