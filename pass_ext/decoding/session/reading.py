"""``read_prompts``: calls the model on the prompts, at most 1,024 rows of each at a time.

Prompts are cut into pieces from their ends, so that all prompts end in the same call. What several prompts have in common at
their beginnings, as samples of one prompt and requests with one system prompt do, is read once and copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from pass_ext.decoding.profiling import profiled
from pass_ext.decoding.session.session import Session
from pass_ext.tree import MAX_TREE_NODES, Tree, pack_trees

SHARED_ROWS = {"cpu": 48, "cuda": 512}
"""So many rows must be saved before a beginning is read once: it takes a call of its own, which reads all weights, and a GPU
computes hundreds of rows in that time."""


class Beginning(NamedTuple):
    """The first ``length`` tokens that requests have in common."""

    requests: list[int]
    length: int


def read_prompts(session: Session, texts: Sequence[Sequence[int]], known: int, slots: int) -> tuple[Tensor, int]:
    """Calls the model on the texts, and commits their rows.

    Args:
        texts: the tokens of each request.
        known: how many tokens of each text the session holds already.
        slots: look-ahead slots behind each text's last token.

    Returns:
        Logits of the last tokens and the slots behind them, text by text; and the number of calls.
    """
    shared, calls = shared_beginnings(texts, known, SHARED_ROWS.get(session.device.type, 512)), 0
    have = [known] * len(texts)
    if shared:
        first = {beginning.requests[0]: beginning.length for beginning in shared}
        pieces = [text[known : first.get(b, known)] for b, text in enumerate(texts)]
        _, calls = _read(session, pieces, None)
        for requests, length in shared:
            session.copy_text(requests[0], requests[1:], length)
            for b in requests:
                have[b] = length
    logits, more = _read(session, [text[held:] for text, held in zip(texts, have, strict=True)], slots)
    return logits, calls + more


def shared_beginnings(texts: Sequence[Sequence[int]], known: int, least: int) -> list[Beginning]:
    """The beginnings behind ``known`` tokens that save ``least`` rows or more. Each text's last token stays out: its row has
    the logits."""
    left, found = list(range(len(texts))), []
    while left:
        leader, *others = left
        whole = texts[leader]
        lengths = {b: min(_common(whole, texts[b]), len(whole) - 1, len(texts[b]) - 1) - known for b in others}
        # The requests that save most together: those with the longest beginnings, cut to the shortest among them.
        order = sorted(others, key=lambda b: -lengths[b])
        saved = [(i + 1) * lengths[b] for i, b in enumerate(order)]
        best = max(range(len(saved)), key=saved.__getitem__, default=None)
        if best is None or saved[best] < least:
            left = others
            continue
        members = [leader, *sorted(order[: best + 1])]
        found.append(Beginning(members, known + lengths[order[best]]))
        left = [b for b in others if b not in members]
    return found


def _common(text: Sequence[int], other: Sequence[int]) -> int:
    """The number of equal tokens at both beginnings."""
    if text == other:
        return len(text)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))


def _read(session: Session, missing: Sequence[Sequence[int]], slots: int | None) -> tuple[Tensor, int]:
    """Calls the model on these tokens of each text, and commits them; slots: None if no logits are wanted, and some texts may
    have no tokens."""
    device, most = session.device, MAX_TREE_NODES - (slots or 0)
    calls = -(-max(map(len, missing)) // most)
    for left in reversed(range(calls)):
        pieces = [text[max(0, len(text) - (left + 1) * most) : max(0, len(text) - left * most)] for text in missing]
        trees: list[Tree | None] = [Tree.chain(len(piece) - 1) if piece else None for piece in pieces]
        ids: list[int] = []
        last_rows: list[int] = []
        for b, piece in enumerate(pieces):
            ids += piece
            if left == 0 and slots is not None:
                trees[b] = Tree.chain(len(piece) - 1).with_lookahead({len(piece) - 1: slots})
                ids += (-1 - slot for slot in range(slots))
                last_rows += range(len(ids) - slots - 1, len(ids))
        packed = pack_trees(trees, device)
        with profiled("verify"):
            rows = torch.tensor(last_rows or [0], device=device)
            logits = session.call(packed, torch.tensor(ids, device=device), rows)
        path = torch.arange(max(map(len, pieces)), dtype=torch.int32, device=device)
        counts = torch.tensor([max(len(piece) - 1, 0) for piece in pieces], dtype=torch.int32, device=device)
        with profiled("commit"):
            session.commit(packed, path.repeat(len(pieces), 1), counts)
    return logits, calls
