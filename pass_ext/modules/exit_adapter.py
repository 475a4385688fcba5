"""``ExitAdapter``: the parameters that help a model's first layers to draft for it.

    a(h) = h + up(silu(down(h / rms(h)))) · rms(h)

h is the output of layer k - 1; the draft's logits are head(norm(a(h))) with the model's own norm and head. The head may be
computed for some tokens only. The file is safetensors, its metadata say which model it belongs to.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pass_ext.modules.files import (
    HitRates,
    check_model,
    pretrained_path,
    save_trained,
    shipped_files,
    table_difference,
    trained_file,
)

_FORMAT = "pass_ext.exit.1"
_SUFFIX = "-exit"


class ExitAdapter(nn.Module):
    """The adapter of a draft that leaves a frozen model after layer k.

    Args:
        layers: k, how many of the model's layers the draft runs.
        dim: d, the model's hidden size.
        rank: r, the width of the adapter; its parameters are 2·d·r.
        vocabulary: ``[S]``, ids of the tokens that the draft's head is computed for; None: all of them. Reading the head
            is most of what a shallow draft costs.
        base_model: name of the model it is trained for; kept in the file.
        base_vocabulary: V, rows of that model's table; kept in the file. 0: not known yet.

    Attributes:
        down, up: linear layers, ``[r, d]`` and ``[d, r]``; ``up`` starts at zero, which leaves the hidden states as they are.
        fingerprint: of the model's embedding table, by which other models are refused; kept in the file. "": any model of the
            same sizes is taken.
        hit_rates: calibration, or None. Entry [i][r] is the chance that the model's next token is the draft's of rank r,
            where the i tokens before were within the ranks.
        training_record: what made the parameters (command, data, versions, evaluation), as JSON can hold it; empty if unknown.
    """

    vocabulary: Tensor | None

    def __init__(
        self,
        layers: int,
        dim: int,
        rank: int,
        *,
        vocabulary: Tensor | None = None,
        base_model: str = "",
        base_vocabulary: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if layers < 1 or dim < 1 or rank < 1:
            raise ValueError(f"layers, dim and rank must be at least 1, got {layers}, {dim} and {rank}")
        if vocabulary is not None and (
            vocabulary.dim() != 1 or not len(vocabulary) or len(vocabulary.unique()) < len(vocabulary)
        ):
            raise ValueError(f"vocabulary must be [S] different token ids, got shape {list(vocabulary.shape)}")
        if vocabulary is not None and (vocabulary.is_floating_point() or vocabulary.dtype == torch.bool):
            raise ValueError(f"vocabulary must be integers, got {vocabulary.dtype}")
        most = base_vocabulary or 1 << 31  # kept as int32, into which larger ids would wrap
        if vocabulary is not None and (vocabulary.min() < 0 or vocabulary.max() >= most):
            raise ValueError(
                f"vocabulary must hold ids from 0 to {most - 1}, got {vocabulary.min()} to {vocabulary.max()}"
            )
        self.layers = layers
        self.base_model = base_model
        self.base_vocabulary = base_vocabulary
        self.fingerprint = ""
        self.hit_rates: HitRates | None = None
        self.training_record: dict[str, Any] = {}
        self.down = nn.Linear(dim, rank, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(rank, dim, bias=False, device=device, dtype=dtype)
        nn.init.zeros_(self.up.weight)
        self.register_buffer("vocabulary", None if vocabulary is None else vocabulary.to(device, torch.int32))

    @property
    def dim(self) -> int:
        """d, the hidden size."""
        return self.down.in_features

    @property
    def rank(self) -> int:
        """r, the width."""
        return self.down.out_features

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., d]`` -> ``[..., d]``, the input of the model's last norm."""
        size = hidden.float().square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6).to(hidden.dtype)
        return hidden + self.up(F.silu(self.down(hidden / size))) * size

    def check_fits(
        self, table: Tensor, layers: int, base_model: str = "", *, embed: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Raises ValueError, naming every difference, if it belongs to another model: ``table`` [V, d] and so many layers.

        embed: gives the rows ``[n, d]`` of ids ``[n]`` where the table's numbers cannot be read.
        """
        too_deep = f"layers: it stands after {self.layers}, this model has {layers}"
        check_model(
            "exit adapter",
            {
                "hidden size": (self.dim, table.shape[1]),
                "vocabulary": (self.base_vocabulary, table.shape[0]),
                "base model": (self.base_model, base_model),
            },
            lambda: table_difference(self.fingerprint, self.base_model, table, embed),
            [too_deep] if self.layers > layers else [],
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the parameters and what they belong to as one safetensors file."""
        save_trained(
            path,
            _FORMAT,
            {
                "base_model": self.base_model,
                "vocabulary": self.base_vocabulary,
                "hidden_size": self.dim,
                "layers": self.layers,
                "rank": self.rank,
            },
            self.state_dict(),
            hit_rates=self.hit_rates,
            training_record=self.training_record,
            fingerprint=self.fingerprint,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ExitAdapter:
        """Reads a file that ``save`` wrote; the parameters keep its dtype."""
        with trained_file(path, "exit adapter", _FORMAT) as file:
            layers, dim, rank = (file.count(key, 1) for key in ("layers", "hidden_size", "rank"))
            base_model, base_vocabulary = file.text("base_model"), file.count("vocabulary")
            shapes = {"down.weight": (rank, dim), "up.weight": (dim, rank)}
            file.check_names([*shapes, "vocabulary"])
            tensors, vocabulary = file.weights(shapes), file.ids("vocabulary", base_vocabulary)
            rates, record, fingerprint = file.hit_rates(), file.training_record(), file.fingerprint()
        adapter = cls(
            layers,
            dim,
            rank,
            vocabulary=vocabulary,
            base_model=base_model,
            base_vocabulary=base_vocabulary,
            dtype=tensors["down.weight"].dtype,
        )
        adapter.load_state_dict(tensors if vocabulary is None else {**tensors, "vocabulary": vocabulary})
        adapter.hit_rates, adapter.training_record, adapter.fingerprint = rates, record, fingerprint
        return adapter

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str]) -> ExitAdapter:
        """The adapter that comes with the package for a model, by name ("smollm2-135m-instruct"), or a file's, by path."""
        shipped = {stem.removesuffix(_SUFFIX): file for stem, file in shipped_files(f"*{_SUFFIX}").items()}
        stem = str(name).removesuffix(_SUFFIX)
        return cls.load(pretrained_path(shipped.get(stem, name), shipped))

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        tokens = "" if self.vocabulary is None else f", vocabulary={len(self.vocabulary)}"
        model = f", base_model={self.base_model!r}" if self.base_model else ""
        return f"layers={self.layers}, dim={self.dim}, rank={self.rank}{tokens}{model}"
