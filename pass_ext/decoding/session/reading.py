"""``read_prompts``: calls the model on the prompts, at most 1,024 rows of each at a time.

Prompts are cut into pieces from their ends, so that all prompts end in the last calls. What several prompts have in common at
their beginnings, as samples of one prompt and requests with one system prompt do, is read once and copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pass_ext.decoding.models.module_ops import most_few_rows
from pass_ext.decoding.session.session import Session
from pass_ext.decoding.stats import profiled
from pass_ext.ops.common.uploaded import uploaded
from pass_ext.tree import MAX_TREE_NODES, Tree, pack_trees

SHARED_ROWS = {"cpu": 48, "cuda": 512}
"""So many rows must be saved before beginnings are read once: it takes a call of its own, which reads all weights, and a GPU
computes hundreds of rows in that time."""


class Read(NamedTuple):
    """What comes of reading prompts."""

    logits: Tensor
    """``[B * (1 + slots), V]``, of each text's last token and the look-ahead slots after it."""
    slots: int
    calls: int


class Beginning(NamedTuple):
    """The first ``length`` tokens that requests have in common."""

    requests: list[int]
    length: int


def read_prompts(session: Session, texts: Sequence[Sequence[int]], known: Sequence[int], slots: int) -> Read:
    """Calls the model on the texts, each with so many look-ahead slots after its last token, and commits their rows. Whole
    prompts that the model's own forward has read have no slots: every method draws their first tokens from the same logits.

    known: how many tokens of each text the session holds already.
    """
    logits, session.read_logits = session.read_logits, None
    if logits is not None:
        return Read(logits, 0, 0)
    least = SHARED_ROWS["cpu" if session.device.type == "cpu" else "cuda"]
    groups, held, calls = _with_equal_caches(session, known), list(known), 0
    while shared := [found for group in groups for found in shared_beginnings(texts, held, group, least)]:
        ends = {requests[0]: length for requests, length in shared}
        _, count = _read(session, [text[held[b] : ends.get(b, 0)] for b, text in enumerate(texts)], None)
        calls += count
        for requests, length in shared:
            session.copy_text(requests[0], requests[1:], known[requests[0]], length)
            for b in requests:
                held[b] = length
    logits, count = _read(session, [text[length:] for text, length in zip(texts, held, strict=True)], slots)
    return Read(logits, slots, calls + count)


def read_again(session: Session, texts: Sequence[Sequence[int]], prompts: Sequence[int]) -> None:
    """Reads all but the last token of the texts whose states are of more: a state cannot go back. prompts: their lengths."""
    requests = session.beyond()
    if requests:
        held = session.forget(requests)
        chosen = [text if b in requests else [] for b, text in enumerate(texts)]
        _read(session, [text[known:length] for text, known, length in zip(chosen, held, prompts, strict=True)], None)
        _read(session, [text[length:-1] for text, length in zip(chosen, prompts, strict=True)], None, are_prompts=False)


def _with_equal_caches(session: Session, known: Sequence[int]) -> list[list[int]]:
    """The requests by the keys, values and states of their first tokens, which may differ for equal tokens where they are
    ``past``."""
    caches, groups = [cache for pair in session.caches for cache in pair], dict[int, list[int]]()

    def are_equal(a: int, b: int) -> bool:
        n = known[a]
        return n == known[b] and (
            all(torch.equal(cache[a, :n], cache[b, :n]) for cache in caches)
            and all(torch.equal(state[a], state[b]) for state in session.states)
        )

    for b in range(session.requests):
        groups.setdefault(next((a for a in groups if are_equal(a, b)), b), []).append(b)
    return list(groups.values())


def shared_beginnings(
    texts: Sequence[Sequence[int]], held: Sequence[int], requests: Sequence[int], least: int
) -> list[Beginning]:
    """The beginnings of these requests' texts, after the first ``held`` tokens of each, that save ``least`` rows or more; of
    beginnings within each other the shortest. Each text's last token stays out: its row has the logits."""
    fronts = {b: list(texts[b][:-1]) for b in requests}
    order = sorted(requests, key=fronts.__getitem__)
    common = [_common(fronts[a], fronts[b]) for a, b in pairwise(order)]
    found, intervals = [], [(0, len(order))]
    while intervals:
        first, last = intervals.pop()
        if last - first < 2:
            continue
        length = min(common[first : last - 1])
        members = sorted(order[first:last])
        rows = [max(0, length - held[b]) for b in members]
        if sum(rows) - max(rows) >= least:
            found.append(Beginning(members, length))
        else:
            cuts = [place + 1 for place in range(first, last - 1) if common[place] == length]
            intervals += pairwise([first, *cuts, last])
    return sorted(found)


def _common(text: Sequence[int], other: Sequence[int]) -> int:
    """The number of equal tokens at both beginnings."""
    low, high = 0, min(len(text), len(other))
    while low < high:  # whole pieces are compared at once
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _read(
    session: Session, missing: Sequence[Sequence[int]], slots: int | None, *, are_prompts: bool = True
) -> tuple[Tensor, int]:
    """Calls the model on these tokens of each text, and commits them; slots: None if no logits are wanted, and some texts may
    have no tokens. Returns the logits of the last tokens and the slots after them, text by text, and the number of calls."""
    most = MAX_TREE_NODES - (slots or 0)
    session.reads_prompts = are_prompts
    calls, logits = 0, dict[int, Tensor]()
    for left in reversed(range(-(-max(map(len, missing)) // most))):
        pieces = [text[max(0, len(text) - (left + 1) * most) : max(0, len(text) - left * most)] for text in missing]
        for requests in _calls(pieces, session):
            called = [piece if b in requests else [] for b, piece in enumerate(pieces)]
            found = _call(session, called, slots if left == 0 else None)
            calls += 1
            if left == 0 and slots is not None:
                logits.update(zip(requests, found.clone().split(slots + 1), strict=True))
    session.reads_prompts = False
    return torch.cat([logits[b] for b in sorted(logits)]) if logits else found, calls


def _calls(pieces: Sequence[Sequence[int]], session: Session) -> list[list[int]]:
    """The requests of each call. On the CPU a piece of many rows has one of its own: PyTorch's product of the rows of several
    texts gives other bits than that of one."""
    few = most_few_rows(session.slots.weight.dtype, is_cpu=True) if session.device.type == "cpu" else MAX_TREE_NODES
    apart = [[b] for b, piece in enumerate(pieces) if len(piece) > few]
    together = [b for b, piece in enumerate(pieces) if 0 < len(piece) <= few]
    return [*apart, together] if together else apart


def _call(session: Session, pieces: Sequence[Sequence[int]], slots: int | None) -> Tensor:
    """Calls the model on the pieces, and commits them. The logits of the last token of each that is not empty, and of so many
    slots after it; slots: None if no logits are wanted."""
    device = session.device
    trees: list[Tree | None] = []
    ids: list[int] = []
    last_rows: list[int] = []
    for piece in pieces:
        tree = Tree.chain(len(piece) - 1) if piece else None
        ids += piece
        if tree is not None and slots is not None:
            tree = tree.with_lookahead({len(piece) - 1: slots})
            ids += (-1 - slot for slot in range(slots))
            last_rows += range(len(ids) - slots - 1, len(ids))
        trees.append(tree)
    packed = pack_trees(trees, device)
    with profiled("verify"):
        logits = session.call(packed, uploaded(ids, device), uploaded(last_rows or [0], device))
    path = torch.arange(max(map(len, pieces)), dtype=torch.int32, device=device)
    counts = uploaded([max(len(piece) - 1, 0) for piece in pieces], device, torch.int32)
    with profiled("commit"):
        session.commit(packed, path.repeat(len(pieces), 1), counts)
    return logits
