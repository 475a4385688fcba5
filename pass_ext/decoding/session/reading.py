"""``read_prompts``: calls the model on the prompts, at most 1,024 rows of each at a time.

Prompts are cut into pieces from their ends, so that all prompts end in the same call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pass_ext.decoding.profiling import profiled
from pass_ext.decoding.session.session import Session
from pass_ext.tree import MAX_TREE_NODES, Tree, pack_trees


def read_prompts(session: Session, texts: Sequence[Sequence[int]], known: int, slots: int) -> tuple[Tensor, int]:
    """Calls the model on the texts, and commits their rows.

    Args:
        texts: the tokens of each request.
        known: how many tokens of each text the session holds already.
        slots: look-ahead slots behind each text's last token.

    Returns:
        Logits of the last tokens and the slots behind them, text by text; and the number of calls.
    """
    device, most = session.device, MAX_TREE_NODES - slots
    missing = [text[known:] for text in texts]
    calls = -(-max(map(len, missing)) // most)
    for left in reversed(range(calls)):
        pieces = [text[max(0, len(text) - (left + 1) * most) : max(0, len(text) - left * most)] for text in missing]
        trees: list[Tree | None] = [Tree.chain(len(piece) - 1) if piece else None for piece in pieces]
        ids: list[int] = []
        last_rows: list[int] = []
        for b, piece in enumerate(pieces):
            ids += piece
            if left == 0:
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
