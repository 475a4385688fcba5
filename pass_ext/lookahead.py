"""``LookaheadEmbedding``: the L x d parameters that PaSS adds to a frozen model, with save and load.

The file is safetensors: one tensor ``lookahead`` [L, d] and metadata saying which model it belongs to. Called by decoders
and by training.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.ops.lookahead import lookahead_embed

_TENSOR = "lookahead"
_FORMAT = "pass_ext.lookahead.1"


class LookaheadEmbedding(nn.Module):
    """L trained input embeddings, one per look-ahead slot, beside a model's own table.

    Args:
        num_lookahead: L, the number of slots.
        dim: d, the model's hidden size.
        base_model: name of the model they are trained for; kept in the file.
        vocabulary: V, rows of that model's table; kept in the file. 0: not known yet.
    """

    def __init__(
        self,
        num_lookahead: int,
        dim: int,
        *,
        base_model: str = "",
        vocabulary: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_lookahead < 1 or dim < 1:
            raise ValueError(f"num_lookahead and dim must be at least 1, got {num_lookahead} and {dim}")
        self.base_model = base_model
        self.vocabulary = vocabulary
        self.weight = nn.Parameter(torch.empty(num_lookahead, dim, device=device, dtype=dtype))
        nn.init.normal_(self.weight, std=0.02)

    hit_rates: tuple[tuple[float, ...], ...] | None = None

    def transition_tables(self, table: Tensor) -> tuple[Tensor, Tensor] | None:
        """stub"""
        return getattr(self, "_tt", None)

    @property
    def num_lookahead(self) -> int:
        """L, the number of slots."""
        return self.weight.shape[0]

    @property
    def dim(self) -> int:
        """d, the hidden size."""
        return self.weight.shape[1]

    @classmethod
    def from_table(
        cls,
        num_lookahead: int,
        table: Tensor,
        *,
        base_model: str = "",
        ids: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> LookaheadEmbedding:
        """Starts each slot at the mean of a model's own embeddings (of the tokens ``ids``, or of all), plus a little noise.

        The noise, 1 % of the table's per-coordinate deviation, lets the slots part; it comes from torch's default generator.
        """
        _check_table(table)
        rows = (table if ids is None else table[ids]).detach().to(torch.float32)
        embedding = cls(
            num_lookahead,
            table.shape[1],
            base_model=base_model,
            vocabulary=table.shape[0],
            device=table.device,
            dtype=dtype or table.dtype,
        )
        noise = torch.randn(num_lookahead, table.shape[1]).to(table.device)
        deviation = rows.std(dim=0, correction=0)
        with torch.no_grad():
            embedding.weight.copy_(rows.mean(dim=0) + 0.01 * deviation * noise)
        return embedding

    def forward(self, ids: Tensor, table: Tensor) -> Tensor:
        """``lookahead_embed(ids, table, self.weight)``: ``[..., d]`` in the table's dtype."""
        return lookahead_embed(ids, table, self.weight)

    def check_fits(self, table: Tensor, base_model: str = "") -> None:
        """Raises ValueError, naming every difference, if these embeddings belong to another model."""
        _check_table(table)
        wanted = {"hidden size": table.shape[1], "vocabulary": table.shape[0], "base model": base_model}
        found = {"hidden size": self.dim, "vocabulary": self.vocabulary, "base model": self.base_model}
        differences = [
            f"{name}: they have {found[name]!r}, this model has {wanted[name]!r}"
            for name in wanted
            if wanted[name] and found[name] and wanted[name] != found[name]
        ]
        if differences:
            raise ValueError("these look-ahead embeddings belong to another model; " + "; ".join(differences))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the parameters and what they belong to as one safetensors file."""
        from safetensors.torch import save_file

        metadata = {
            "format": _FORMAT,
            "base_model": self.base_model,
            "vocabulary": str(self.vocabulary),
            "hidden_size": str(self.dim),
            "num_lookahead": str(self.num_lookahead),
        }
        save_file({_TENSOR: self.weight.detach().cpu().contiguous()}, os.fspath(path), metadata=metadata)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, table: Tensor | None = None, base_model: str = ""
    ) -> LookaheadEmbedding:
        """Reads a file that ``save`` wrote; with ``table`` (and ``base_model``), refuses one made for another model.

        The parameters keep the file's dtype; with ``table`` they go to its device.
        """
        from safetensors import safe_open

        with safe_open(os.fspath(path), framework="pt") as file:
            metadata: dict[str, Any] = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError(
                    f"{os.fspath(path)} is no look-ahead embedding file: its format is {metadata.get('format')!r}, "
                    f"expected {_FORMAT!r}"
                )
            weight = file.get_tensor(_TENSOR)
        stated = [int(metadata["num_lookahead"]), int(metadata["hidden_size"])]
        if list(weight.shape) != stated:
            raise ValueError(
                f"{os.fspath(path)} is damaged: its metadata says {stated}, the tensor is {list(weight.shape)}"
            )
        embedding = cls(
            *weight.shape,
            base_model=metadata["base_model"],
            vocabulary=int(metadata["vocabulary"]),
            dtype=weight.dtype,
        )
        with torch.no_grad():
            embedding.weight.copy_(weight)
        if table is not None:
            embedding.check_fits(table, base_model)
            embedding = embedding.to(table.device)
        return embedding

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        model = f", base_model={self.base_model!r}" if self.base_model else ""
        return f"num_lookahead={self.num_lookahead}, dim={self.dim}{model}"


def _check_table(table: Tensor) -> None:
    if table.dim() != 2:
        raise ValueError(f"table must be [V, d], a model's input embedding weight, got shape {list(table.shape)}")
