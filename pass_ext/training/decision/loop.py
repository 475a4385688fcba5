"""The optimisation of a ``DecisionModel``, and the rows that it learns from: those of the draft on known text, and how likely
the target accepts their drafts.

    label = Σ_x min(p(x), q(x))       hidden kind, at some temperature
    label = [argmax p = argmax q]     entropy kind, and the hidden kind at temperature 0

The published label of the hidden kind is min(1, p(x)/q(x)) of one token x drawn from q; the sum is its mean over draws, so the
loss has the same minimum, and the labels have no noise of the draw. A text is one chain tree: one call of the target and one
of the draft give all its places.

Binary cross-entropy, Adam, shuffled epochs; everything drawn from the seed. Features are standardised while it learns, and the
first layer takes that in at the end, so the file holds a plain MLP. With ``balanced``, each class weighs as much as the other:
w = N / (2 · places of its class).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.models.packed import KeptHidden
from pass_ext.decoding.session.session import Session
from pass_ext.modules.decision import DecisionModel, DraftLevel
from pass_ext.ops.draft import draft_sample
from pass_ext.training.common.ranks import Ranks
from pass_ext.training.common.steps import Trainer
from pass_ext.tree import Tree, pack_trees

_CHUNK = 64  # rows whose distributions are alive at a time
_LEAST_DEVIATION = 1e-6  # a feature that varies less says nothing, and is not blown up


class Reader:
    """A model's logits at rows of a tree that has no text before it."""

    def __init__(self, session: Session, hidden: KeptHidden | None) -> None:
        self._session = session
        self._hidden = hidden

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self._session.device

    def __call__(self, tree: Tree, tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits ``[W, V]`` of these rows ``[W]`` and, where they are kept, their hidden rows ``[W, d]``."""
        device = self._session.device
        logits = self._session.call(pack_trees([tree], device), tokens.to(device), rows.to(device))
        return logits, None if self._hidden is None else self._hidden.rows


class Pair(NamedTuple):
    """Target and draft, ready to be called."""

    target: Reader
    draft: Reader


@contextmanager
def reading(model: Any, draft_model: Any, *, hidden: bool) -> Iterator[Pair]:
    """A context in which both models can be called; ``hidden``: keep the draft's hidden rows."""
    target, draft = packed_model(model), packed_model(draft_model)
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(target.attached())
        stack.enter_context(draft.attached())
        hidden_rows = stack.enter_context(draft.keeping_hidden()) if hidden else None
        # Nothing is ever committed, so the caches need hardly any room.
        yield Pair(Reader(Session(target, 1, 1), None), Reader(Session(draft, 1, 1), hidden_rows))


def drafted(
    logits: Tensor, hidden: Tensor | None, depth: int, temperature: float, *, nodes: Tensor | None = None, seed: int = 0
) -> DraftLevel:
    """The level of these rows with one child each: the most probable token at temperature 0, else one drawn from the draft."""
    nodes = torch.arange(len(logits), device=logits.device, dtype=torch.int32) if nodes is None else nodes
    how: dict[str, Any] = {"mode": "top"}
    if temperature > 0:
        how = {"mode": "with", "temperature": temperature, "seeds": seed, "positions": depth, "nodes": nodes}
    tokens, logprobs = draft_sample(logits, 1, **how)
    return DraftLevel(logits, hidden, tokens, logprobs, torch.zeros_like(nodes, dtype=torch.int64), depth)


def acceptance(target: Tensor, draft: Tensor, temperature: float) -> Tensor:
    """``[R]``: the chance that the target accepts a draft at rows with these logits ``[R, V]``.

    The smaller vocabulary counts: the other's further tokens are padding.
    """
    vocabulary = min(target.shape[1], draft.shape[1])
    parts = []
    for p, q in zip(target.split(_CHUNK), draft.to(target.device).split(_CHUNK), strict=True):
        p, q = p[:, :vocabulary].float(), q[:, :vocabulary].float()
        if temperature == 0:
            parts.append((p.argmax(-1) == q.argmax(-1)).float())
        else:
            parts.append(torch.minimum((p / temperature).softmax(-1), (q / temperature).softmax(-1)).sum(-1))
    return torch.cat(parts)


class Text(NamedTuple):
    """Tokens of one text, and places in it: rows whose next token is drafted."""

    ids: Tensor
    places: Tensor
    kind: str


class Places(NamedTuple):
    """The places of many texts; on the CPU."""

    features: Tensor
    """``[N, F]`` float32."""
    labels: Tensor
    """``[N]`` float32 in 0..1."""
    kinds: Sequence[str]
    """Of each place's text."""


def read_places(
    pair: Pair, texts: Iterable[Text], features: Callable[[DraftLevel], Tensor], temperature: float
) -> Places:
    """Features and labels at the texts' places. Logits are held for one text at a time."""
    parts: list[tuple[Tensor, Tensor]] = []
    kinds: list[str] = []
    for text in texts:
        chain = Tree.chain(len(text.ids) - 1)
        logits, hidden = pair.draft(chain, text.ids, text.places)
        rows = features(drafted(logits, hidden, 1, 0.0)).cpu()
        labels = acceptance(pair.target(chain, text.ids, text.places)[0], logits, temperature).cpu()
        parts.append((rows, labels))
        kinds += [text.kind] * len(labels)
    if not parts:
        return Places(torch.empty(0, 0), torch.empty(0), [])
    return Places(torch.cat([rows for rows, _ in parts]), torch.cat([labels for _, labels in parts]), kinds)


def hidden_width(draft: Reader) -> int:
    """d, of a draft whose hidden rows are kept."""
    hidden = draft(Tree.chain(0), torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))[1]
    if hidden is None:
        raise ValueError("this draft's hidden rows are not kept")
    return hidden.shape[1]


def scores_of(decision: DecisionModel, features: Tensor) -> Tensor:
    """The scores of rows whose features are known."""
    with torch.no_grad():
        return decision.logit(features).sigmoid()


def fresh(kind: str, dim: int, *, seed: int, threshold: float, base_model: str, draft_model: str) -> DecisionModel:
    """An untrained model, by the seed; torch's own generator stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DecisionModel(kind, dim, threshold=threshold, base_model=base_model, draft_model=draft_model)


def class_weights(labels: Tensor) -> Tensor:
    """``[N]``, mean 1: the places of each class, labels 0 and 1, weigh half of all together."""
    positive = labels > 0.5
    count = positive.sum()
    if not 0 < count < len(labels):
        raise ValueError(
            f"all {len(labels)} places have the label {int(count > 0)}: the draft is always right or never, and there is "
            "nothing to decide"
        )
    return torch.where(positive, len(labels) / (2 * count), len(labels) / (2 * (len(labels) - count)))


class DecisionTrainer(Trainer):
    """Trains ``decision`` in place on features ``[N, F]`` and labels ``[N]``, in epochs of shuffled batches."""

    def __init__(
        self,
        decision: DecisionModel,
        features: Tensor,
        labels: Tensor,
        *,
        epochs: int,
        learning_rate: float,
        batch: int,
        seed: int,
        balanced: bool,
        ranks: Ranks | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        orders = [torch.randperm(len(features), generator=generator) for _ in range(epochs)]
        self._batches = [picked for order in orders for picked in order.split(batch)]
        optimizer = torch.optim.Adam(decision.parameters(), lr=learning_rate)
        super().__init__(decision, optimizer, steps=len(self._batches), ranks=ranks)
        self._decision, self._labels = decision, labels
        self._weights = class_weights(labels) if balanced else torch.ones_like(labels)
        deviation = features.std(0, correction=0)
        self._mean, self._deviation = features.mean(0), deviation.where(deviation > _LEAST_DEVIATION, 1.0)
        self._rows = (features - self._mean) / self._deviation

    def loss(self, step: int) -> Tensor:
        """This rank's part of the weighted cross-entropy of one batch."""
        batch = self._batches[step]
        picked = batch[self.ranks.rank :: self.ranks.count]
        self.ranks.did("places", len(picked))
        self.tokens += len(batch)
        logits = self._decision.logit(self._rows[picked])
        labels, weights = self._labels[picked], self._weights[picked]
        return F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum") / len(batch)

    def finish(self) -> None:
        """Lets the first layer take features as they come, and freezes the model."""
        self._decision.standardise(self._mean, self._deviation)
        self._decision.requires_grad_(False)
