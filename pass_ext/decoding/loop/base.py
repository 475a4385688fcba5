"""``Loop``: the parts that every loop of a batch has: texts, drafting, and a session with room for both."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.drafting.drafting import Drafting
from pass_ext.decoding.loop.texts import Texts
from pass_ext.decoding.session.opening import Past, check_positions, fill, opened
from pass_ext.decoding.session.session import Session


class Loop(ABC):
    """One generation.

    Args:
        context: model, sampling and rule.
        drafting: proposes the candidates.
        texts: of the requests.
    """

    def __init__(self, context: DraftContext, drafting: Drafting, texts: Texts) -> None:
        self.texts = texts
        self.calls = 0
        """Calls of the model whose tokens were read."""
        self.ahead_calls = 0
        """How many of them had rows that the device made."""
        self.surplus_calls = 0
        """Calls behind the end of all texts; their tokens are thrown away."""
        self._context, self._drafting = context, drafting

    def open(self, session: Session | None, past: Past | None) -> None:
        """Opens a session with room for the texts, and fills it with the keys and values of ``past``."""
        context, longest = self._context, self.texts.longest
        check_positions(context.target, longest, self._drafting.deepest_row)
        room = longest + self._drafting.max_depth
        self.session = opened(session, context.target, len(self.texts), room, graphs=context.graphs)
        self._drafting.begin(self.session)
        self._known = fill(self.session, past, self.texts.tokens)

    @abstractmethod
    def run_steps(self) -> None:
        """Runs steps until every text has ended."""
