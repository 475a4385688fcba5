"""Opens the session of a generation: checks that the model and the caches have room, and takes over an earlier generation's
caches or the caller's keys and values.

    room    longest text + deepest candidate: the last step may accept tokens beyond the limit
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.session.session import Session

Past = tuple[Sequence[tuple[Tensor, Tensor]], int]
"""Keys and values of each layer, and their number of tokens."""


def check_positions(model: Adapted, longest_text: int, deepest_row: int) -> None:
    """Refuses texts longer than the model's positions. deepest_row: the depth of a step's deepest row below the text's end."""
    limit, longest = model.rope_limit, longest_text + deepest_row
    if limit is not None and longest > limit:
        raise ValueError(
            f"{model.name} changes its rotary frequencies behind {limit} tokens, and earlier keys would not "
            f"fit: prompt, max_new_tokens and the deepest draft must stay within them, got {longest}"
        )
    positions = model.known_positions
    if positions is not None and longest_text > positions + 1:  # + 1: the model never reads the last new token
        raise ValueError(
            f"{model.name} has a table of {positions} positions and none behind them: prompt and "
            f"max_new_tokens must stay within {positions + 1} tokens, got {longest_text}"
        )


def opened(session: Session | None, model: Adapted, requests: int, room: int, *, graphs: bool) -> Session:
    """Makes a new session, or empties the caller's one; refuses a session that does not fit."""
    if session is None:
        return Session(model, requests, room, graphs=graphs)
    if session.requests != requests or session.room < room or session.model.model is not model.model:
        raise ValueError(
            f"session must be of this model, {requests} requests and room for {room} tokens; it is of "
            f"{session.requests} requests and {session.room} tokens"
        )
    session.begin(model)
    return session


def fill(session: Session, past: Past | None, texts: Sequence[Sequence[int]]) -> int:
    """Fills the session with the caller's keys and values -> the number of tokens of each text that they hold."""
    if past is None:
        return 0
    caches, length = past
    checked: Any = length
    if isinstance(checked, bool) or not isinstance(checked, int) or length < 1:
        raise ValueError(f"past must be of 1 token or more, got {length!r}")
    if min(map(len, texts)) <= length:
        raise ValueError(f"past holds {length} tokens, so prompts must be longer, got {min(map(len, texts))}")
    session.fill(caches, length)
    return length
