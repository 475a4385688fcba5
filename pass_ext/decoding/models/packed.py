"""``PackedModel``: all that decoding asks of a model, and ``packed_model``, which finds it in what the caller has.

A step's rows of all requests come back to back, without padding; the model does what it does row by row, and calls ``attend``
once per layer where rows meet each other.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from pass_ext.decoding.models.plain_tensors import is_plain
from pass_ext.ops.lookahead import lookahead_embed


class Attend(Protocol):
    """Attention of a step's rows to their request's text and to the rows that their tree lets them see."""

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
        """q ``[N, heads, D]``, k, v ``[N, KV heads, D]``, positions applied -> ``[N, heads, D of v]``."""


class PackedModel(Protocol):
    """A decoder-only model as ``generate`` takes it, if it is no transformers model. ``examples/plain_decoder.py`` has one."""

    embedding: Tensor | nn.Embedding
    """``[V, d]``, the table of input embeddings."""

    def __call__(self, rows: Tensor, positions: Tensor, attend: Attend, wanted: Tensor | None) -> Tensor:
        """rows ``[N, d]``: input embeddings; positions ``[N]`` int64: places in the text; wanted: which rows' logits are
        needed, int64, None for all -> logits ``[N or len(wanted), V]``."""


class Adapted:
    """A PackedModel with what decoding needs besides; ``transformers_model`` has another of its kind."""

    name = ""
    generation_config: Any = None
    has_table: bool = True
    """False: ``table`` tells shape, dtype and device only, as the model's own is quantised, or elsewhere between calls."""
    shared_model: Any = None
    """The model whose first ``shares_layers`` layers these are, so that keys and values of a text are the same."""
    shares_layers: int = 0
    layers: int | None = None
    """That attend; None: unknown."""
    most_positions: int = sys.maxsize
    """Of a text, that the model knows."""
    rope_limit: int | None = None
    """The longest text that rotary frequencies stay the same for; None: any."""
    known_positions: int | None = None
    """Rows of its table of positions, behind which it knows none; None: it has no such table."""

    def __init__(self, model: PackedModel) -> None:
        self.model: Any = model
        embedding = model.embedding
        self.table: Tensor = embedding.weight if isinstance(embedding, nn.Module) else embedding
        if self.table.dim() != 2:
            raise ValueError(
                f"model.embedding must be [V, d], the table of input embeddings, got {list(self.table.shape)}"
            )
        if not is_plain(self.table):
            raise ValueError(
                "model.embedding must be a plain tensor with its numbers in memory, got "
                f"{type(self.table).__name__} on {self.table.device}"
            )

    def embed(self, ids: Tensor, slots: Tensor) -> Tensor:
        """The rows of ids ``[N]``, -1 - i for look-ahead slot i."""
        return lookahead_embed(ids, self.table, slots)

    def attached(self) -> AbstractContextManager[Any]:
        """What must hold while the model is called."""
        return nullcontext()

    def __call__(
        self, rows: Tensor, positions: Tensor, attend: Attend, wanted: Tensor | None, offsets: Tensor | None = None
    ) -> Tensor:
        """As ``PackedModel``. offsets ``[layers, N, d]``: what look-ahead rows add to the input of every layer."""
        if offsets is not None:
            raise TypeError(
                "these look-ahead embeddings shift the input of every layer, which decoding can do in transformers models "
                "only: train some without (--deep)"
            )
        return self.model(rows, positions, attend, wanted)
