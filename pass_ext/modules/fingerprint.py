"""The fingerprint of a model's embedding table: the signs of 256 of its numbers, as 64 hexadecimal digits.

    number k: row k V / 256, column k C mod d        C: d · 0.618…; both rounded down

It tells which model a trained module belongs to, however the model was loaded: other dtypes, quantised weights and positive
scales keep nearly all signs. Of another model's table about half of the signs are the same. A fine-tuned model has nearly its
base model's, and slots or adapters of the one draft well for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

COUNT = 256
LEAST = 192  # equal signs of one model: 4-bit weights change some 15, and two models have about 128 in common
_GOLDEN = 0.6180339887498949


def fingerprint_of(table: Tensor, embed: Callable[[Tensor], Tensor] | None = None) -> str:
    """The fingerprint of a table ``[V, d]``.

    embed: gives the rows ``[n, d]`` of ids ``[n]`` where the table's numbers cannot be read (quantised, offloaded, sharded).
    """
    rows, columns = _places(*table.shape)
    rows, columns = rows.to(table.device), columns.to(table.device)
    with torch.no_grad():
        numbers = table[rows, columns] if embed is None else embed(rows).gather(1, columns[:, None])[:, 0]
    signs = "".join("01"[negative] for negative in (numbers < 0).tolist())
    return f"{int(signs, 2):0{COUNT // 4}x}"


def equal_signs(one: str, other: str) -> int:
    """How many of the 256 signs two fingerprints have in common."""
    return COUNT - (int(one, 16) ^ int(other, 16)).bit_count()


def table_difference(
    fingerprint: str, base_model: str, table: Tensor, embed: Callable[[Tensor], Tensor] | None = None
) -> Sequence[str]:
    """The sentence that tells a table ``[V, d]`` from that of ``fingerprint``; none where they agree, or where that is ""."""
    if not fingerprint:
        return []
    same = equal_signs(fingerprint, fingerprint_of(table, embed))
    if same >= LEAST:
        return []
    named = repr(base_model) if base_model else "an unnamed model"
    return [
        f"embedding table: it was trained with that of {named}, and of {COUNT} numbers of this "
        f"model's table {same} have the same sign, {LEAST} or more are wanted. Give the model that it was trained for, or set "
        'its attribute fingerprint to "" to use it all the same'
    ]


def _places(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    number = torch.arange(COUNT)
    stride = max(int(columns * _GOLDEN), 1)
    return number * rows // COUNT, number * stride % columns
