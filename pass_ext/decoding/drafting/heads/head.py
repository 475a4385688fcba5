"""``Head``: a head as the model that a session calls; ``HeadModule``: what each family of heads defines.

    row j of a text    (embedding of token j + 1, state of token j)   ->   logits of token j + 2, state of token j + 1

The states of a text's rows are the target's own; below its last token each row has the state that its parent's row gave.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.module_ops import computes_by_ops
from pass_ext.decoding.models.packed import Adapted, StepAttend
from pass_ext.decoding.models.parts import unwrapped
from pass_ext.decoding.models.shadow import OurCall, our_call, shadow_of, takes_rows_of_our_call
from pass_ext.decoding.models.slots import CallSlots
from pass_ext.decoding.models.taps import Tap
from pass_ext.decoding.models.vocabulary import MOST_PADDING
from pass_ext.modules.files import HitRates, check_model


class TargetFacts(NamedTuple):
    """What a head has to know of its target."""

    model: Any
    """As ``generate`` takes it."""
    name: str
    """Its class's, as ``architectures`` of a config has it."""
    layers: int | None
    """None: not known."""
    width: int
    """Numbers of a state."""
    embedding_width: int
    vocabulary: int
    dtype: torch.dtype
    device: torch.device


def target_facts(target: Adapted) -> TargetFacts:
    """Those of a model."""
    config: Any = getattr(target.model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None
    name, table = type(unwrapped(target.model)).__name__, target.table
    layers, width = getattr(text, "num_hidden_layers", None), getattr(text, "hidden_size", table.shape[1])
    return TargetFacts(target.model, name, layers, width, table.shape[1], len(table), table.dtype, table.device)


class Masks(NamedTuple):
    """What stands below the text in a call that drafts all levels."""

    token: int
    state: Tensor
    """``[1, state_width]``."""


class HeadModule(nn.Module):
    """The weights of a head, and its forward. A family's class computes it."""

    kind: ClassVar[str]
    """The origin of its candidates, for messages."""
    method: ClassVar[str]
    """The name of the class in methods.py that drafts with it."""
    taps: tuple[Tap, ...]
    """The states that it takes, as ``Drafter.taps`` names them."""
    target_width: int
    """Numbers of each of these states."""
    embedding_width: int
    """Numbers of the embeddings that it reads."""
    state_width: int
    """Numbers of the state of a row of its own."""
    num_layers: int
    """Those that attend."""
    target_vocabulary: int
    """Tokens that the target has."""
    target_name: str = ""
    """The class of the target that it is a layer of; "": it is none."""
    hit_rates: HitRates | None = None
    """How often its drafts are right, if that was counted."""

    def attached(self) -> AbstractContextManager[Any]:
        """The context in which it is called."""
        return nullcontext()

    @property
    def embedding(self) -> nn.Embedding | None:
        """Its own table of embeddings, of rows as wide as its layers; None: the target's."""
        return None

    @property
    def tokens(self) -> Tensor | None:
        """``[Vd]`` int64, the target's ids of the tokens that it has logits for; None: all tokens in their order."""
        return None

    @property
    def masks(self) -> Masks | None:
        """None: it has a call for each level, whose rows have the drafts of those above."""
        return None

    def check_fits(self, target: TargetFacts) -> None:
        """Refuses another target, and says what differs."""
        others = []
        if abs(self.target_vocabulary - target.vocabulary) > MOST_PADDING:
            others.append(f"vocabulary: it has {self.target_vocabulary}, this model has {target.vocabulary}")
        known = [tap for tap in self.taps if isinstance(tap, int)]
        if target.layers is not None and known and not 0 <= min(known) <= max(known) <= target.layers:
            others.append(f"layers: it reads the inputs of layers {known}, this model has {target.layers}")
        embedding_width = self.embedding_width if self.embedding is None else target.embedding_width
        facts = {
            "class": (self.target_name, target.name),
            "hidden size": (self.target_width, target.width),
            "width of the embedding table": (embedding_width, target.embedding_width),
        }
        check_model(f"{self.kind} head", facts, others=others)

    @abstractmethod
    def take(self, states: Tensor) -> Tensor:
        """The target's states ``[n, taps, target_width]`` as states of rows, ``[n, state_width]``."""

    @abstractmethod
    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attend: StepAttend) -> tuple[Tensor, Tensor]:
        """One call on packed rows.

        Args:
            embedded: ``[N, d]``, embeddings of their tokens.
            states: ``[N, state_width]``.
            positions: ``[N]``.
            attend: as a ``PackedModel`` takes it.

        Returns:
            The rows ``[N, d]`` that go into the output layer; and the states that the rows below these have.
        """

    @abstractmethod
    def logits(self, rows: Tensor) -> Tensor:
        """The output layer: ``[R, d]`` -> ``[R, Vd]``."""

    def fuse(self) -> None:
        """Has ``step`` compute few rows by one op, where a family has one that knows the head's parts."""
        return

    def step(
        self, embedded: Tensor, states: Tensor, positions: Tensor, attend: StepAttend, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Logits ``[N or len(wanted), Vd]``, and the states that the rows below these have."""
        out, given = self(embedded, states, positions, attend)
        return self.logits(out if wanted is None else out[wanted]), given


class Head(Adapted):
    """A head beside its target. Its rows of a call are embeddings and, after them, states ``[N, state_width]``: those that lie
    ``beside`` the call; nothing there: zeros, as where calls are timed. A call leaves the states that its rows give."""

    def __init__(self, module: HeadModule, target: Adapted) -> None:
        module.check_fits(target_facts(target))
        # Not as Adapted does it: the table is the target's, and may have no values here.
        self.model, self.module, self._target = module, module, target
        self._shadow: Any = shadow_of(module)
        self._shadow.fuse()
        computes_by_ops(self._shadow, takes_rows_of_our_call)
        self.table, self.has_table = target.table, target.has_table
        if module.embedding is not None:
            self.table, self.has_table = module.embedding.weight, True
        self.name, self.caches, self.hit_rates = module.kind, module.num_layers, module.hit_rates
        self._tokens = module.tokens
        self._logits: Tensor | None = None  # of all tokens: -inf but at the head's own

    def attached(self) -> AbstractContextManager[Any]:
        return self.module.attached()

    def embed(self, ids: Tensor, slots: Tensor) -> Tensor:
        """The rows of ids ``[N]``; a head has no look-ahead slots."""
        embedded = self.table[ids] if self.has_table else self._target.embed_tokens(ids)
        states = self.beside or (embedded.new_zeros(len(ids), self.module.state_width),)
        return torch.cat((embedded, *states), 1)

    def take(self, states: Tensor) -> Tensor:
        """As ``HeadModule.take``."""
        with our_call(OurCall(None, self.name)):
            taken: Tensor = self._shadow.take(states)
        return taken

    def __call__(
        self, rows: Tensor, positions: Tensor, attend: StepAttend, wanted: Tensor | None, slots: CallSlots | None = None
    ) -> Tensor:
        """Calls the head; its logits are as wide as the target's."""
        module = self.module
        embedded, states = rows.split((rows.shape[1] - module.state_width, module.state_width), 1)
        with our_call(OurCall(attend, self.name)):
            logits, given = self._shadow.step(embedded, states, positions, attend, wanted)
        self.left = (given,)
        if self._tokens is None:
            return logits
        everything = self._logits
        if everything is None or len(everything) != len(logits) or everything.dtype is not logits.dtype:
            everything = logits.new_full((len(logits), module.target_vocabulary), -torch.inf)
        if logits.is_cpu:  # filled once, by threads of torch that spin beside those of the head's products
            self._logits = everything
        return everything.index_copy_(1, self._tokens, logits)
