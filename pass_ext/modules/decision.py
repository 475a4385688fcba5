"""``DecisionModel``: after each level of drafting, how likely it is that what was drafted will be accepted.

    hidden    sigmoid(MLP d → 512 → 256 → 1) of the row that went into the draft's output layer
    entropy   sigmoid(MLP 11 → 44 → 1) of [entropy, ten largest probabilities] of the draft's distribution

A request drafts on while any of its rows scores above ``threshold``. Everything stays on the device: nothing is read back. The
file is safetensors, its metadata say which models it belongs to.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pass_ext.modules.files import check_model, pretrained_path, save_trained, shipped_files, trained_file

KINDS = ("hidden", "entropy")

_FORMAT = "pass_ext.decision.1"
_TOP = 10  # probabilities among the features of the entropy kind
_NO_CHANCE = -1e4  # stands for a logit of -inf, which times a probability of zero would be NaN


class DraftLevel(NamedTuple):
    """One level of drafting, of all requests: R rows of the draft model, and the k children drawn from each."""

    logits: Tensor
    """``[R, V]``, as the draft gave them: before temperature and filters."""
    hidden: Tensor | None
    """``[R, d]``, the input of the draft's output layer; None unless the model ``needs_hidden``."""
    tokens: Tensor
    """``[R, k]`` int64, the children; -1: none."""
    logprobs: Tensor
    """``[R, k]`` float32, of the children under the distribution that they were drawn from."""
    requests: Tensor
    """``[R]`` int64, the request of each row."""
    depth: int
    """The children's depth below the root."""


class DecisionModel(nn.Module):
    """Scores the rows of a ``DraftLevel``: the chance that drafting on is worth it.

    Args:
        kind: "hidden" or "entropy".
        dim: d, the width of the draft's hidden rows; for the hidden kind only.
        threshold: a request's drafting goes on while one of its rows scores above this.
        base_model: name of the target that it is trained for; kept in the file.
        draft_model: name of the draft; kept in the file.

    Attributes:
        layers: the linear layers; ReLU stands between them.
        training_record: what made the parameters (command, data, versions, evaluation), as JSON can hold it; empty if unknown.
    """

    def __init__(
        self,
        kind: str,
        dim: int = 0,
        *,
        threshold: float = 0.4,
        base_model: str = "",
        draft_model: str = "",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if (kind == "hidden") != (dim > 0):
            raise ValueError(
                f"dim is the width of the draft's hidden rows, for kind 'hidden' only; got {dim} for {kind!r}"
            )
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold must lie between 0 and 1, got {threshold}")
        self.kind = kind
        self.dim = dim
        self.threshold = float(threshold)
        self.base_model = base_model
        self.draft_model = draft_model
        self.training_record: dict[str, Any] = {}
        self.layers = nn.ModuleList(nn.Linear(*sizes, device=device) for sizes in pairwise(_widths(kind, dim)))

    @property
    def needs_hidden(self) -> bool:
        """Whether levels must come with their hidden rows."""
        return self.kind == "hidden"

    def features(self, level: DraftLevel) -> Tensor:
        """``[R, d]`` or ``[R, 11]`` float32: the input of the first layer."""
        if self.kind == "entropy":
            return _entropy_features(level.logits)
        if level.hidden is None:
            raise ValueError(
                "this decision model reads the draft's hidden rows, and the level came without (hidden=None)"
            )
        if level.hidden.shape[1] != self.dim:
            raise ValueError(
                f"this decision model is for a draft whose hidden rows are {self.dim} wide ({self.draft_model or 'unnamed'}), "
                f"got {level.hidden.shape[1]}"
            )
        return level.hidden.to(torch.float32)

    def logit(self, features: Tensor) -> Tensor:
        """``[R]``: the score before the sigmoid."""
        rows = features.to(next(self.parameters()).dtype)
        for place, layer in enumerate(self.layers):
            rows = layer(rows.relu() if place else rows)
        return rows[:, 0].to(torch.float32)

    @torch.no_grad()
    def standardise(self, mean: Tensor, deviation: Tensor) -> None:
        """Changes the first layer so that features x score as (x - mean) / deviation did."""
        first = self.layers[0]
        assert isinstance(first, nn.Linear)
        first.weight.div_(deviation)
        first.bias.sub_(first.weight @ mean)

    def forward(self, level: DraftLevel) -> Tensor:
        """``[R]`` scores in 0..1. A row that is not finite, or has no children, scores 0."""
        features = self.features(level)
        fit = features.isfinite().all(1) & (level.tokens >= 0).any(1)
        return self.logit(features).sigmoid().where(fit, 0.0)

    # ---- files ----

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], *, dim: int = 0, base_model: str = "") -> DecisionModel:
        """A model that comes with the package, by name, or that of a file, by path."""
        path = pretrained_path(name, shipped_files("*-decision-*"))
        return cls.load(path, dim=dim, base_model=base_model)

    def check_fits(self, dim: int = 0, base_model: str = "") -> None:
        """Raises ValueError, naming every difference, if this belongs to another draft or target. dim: the draft's; 0 and "":
        not known."""
        check_model(
            "decision model",
            {"hidden size of the draft": (self.dim, dim), "base model": (self.base_model, base_model)},
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the parameters and what they belong to as one safetensors file."""
        save_trained(
            path,
            _FORMAT,
            {
                "kind": self.kind,
                "dim": self.dim,
                "threshold": self.threshold,
                "base_model": self.base_model,
                "draft_model": self.draft_model,
            },
            dict(self.named_parameters()),
            training_record=self.training_record,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, dim: int = 0, base_model: str = "") -> DecisionModel:
        """Reads a file that ``save`` wrote; with ``dim`` or ``base_model``, refuses one made for another model."""
        with trained_file(path, "decision model", _FORMAT) as file:
            kind, width = file.text("kind", KINDS), file.count("dim")
            if (kind == "hidden") != (width > 0):
                raise file.refuse(
                    "metadata 'dim'", f"{'1 or more' if kind == 'hidden' else '0'} for kind {kind!r}", width
                )
            threshold, record = file.share("threshold"), file.training_record()
            models = {key: file.text(key) for key in ("base_model", "draft_model")}
            shapes: dict[str, tuple[int, ...]] = {}
            for place, (into, out) in enumerate(pairwise(_widths(kind, width))):
                shapes |= {f"layers.{place}.weight": (out, into), f"layers.{place}.bias": (out,)}
            file.check_names(list(shapes))
            tensors = file.weights(shapes)
        decision = cls(kind, width, threshold=threshold, **models)
        decision.load_state_dict(tensors)
        decision.training_record = record
        decision.check_fits(dim, base_model)
        return decision.requires_grad_(False)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        width = f", dim={self.dim}" if self.dim else ""
        models = f", base_model={self.base_model!r}, draft_model={self.draft_model!r}" if self.base_model else ""
        return f"kind={self.kind!r}{width}, threshold={self.threshold:g}{models}"


def _widths(kind: str, dim: int) -> tuple[int, ...]:
    """Widths of the rows before, between and after the layers."""
    return (dim, 512, 256, 1) if kind == "hidden" else (1 + _TOP, 4 * (1 + _TOP), 1)


def _entropy_features(logits: Tensor) -> Tensor:
    """Entropy in nats and the ten largest probabilities, zeros where the vocabulary is smaller."""
    below = logits.to(torch.float32)
    below = below - below.amax(-1, keepdim=True)
    probabilities = below.softmax(-1)
    top = probabilities.topk(min(_TOP, probabilities.shape[1]), dim=-1).values
    # -Σ p log p with log p = below + log(largest p): a logarithm a row, where one a token would cost more than all the rest.
    entropy = -top[:, :1].log() - torch.linalg.vecdot(probabilities, below.clamp(min=_NO_CHANCE))[:, None]
    return torch.cat([entropy, nn.functional.pad(top, (0, _TOP - top.shape[1]))], dim=-1)
