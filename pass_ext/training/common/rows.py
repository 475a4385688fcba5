"""Rows of data sets as texts: .jsonl and .parquet files, and names that the library datasets knows, streamed.

A row has a text, or the messages of a chat. Equal rows are one. A row is named by its text's digest, or by the first message of
its user: so what is held out depends on what it says, and a prompt is held out together with the chats that begin with it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".parquet")
COLUMNS = ("text", "messages")
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.\[\]:%+-]+)?")  # of a data set, with its split


@dataclass(frozen=True)
class Row:
    """A text, or messages, each ``(role, content)``."""

    name: str
    text: str
    messages: tuple[tuple[str, str], ...] = ()


def is_dataset_name(path: str) -> bool:
    """True if this may be the name of a data set, and is no path here."""
    return not Path(path).exists() and _NAME.fullmatch(path) is not None


def read_rows(path: str, column: str | None, most: int) -> list[Row]:
    """At most ``most`` rows of a file or a data set; raises ValueError with what is wrong."""
    rows: dict[Row, None] = {}
    for number, fields in enumerate(islice(_fields(path), most), 1):
        if not isinstance(fields, Mapping):
            raise ValueError(f"row {number} must have columns, got {type(fields).__name__}")
        rows[_row(fields, column, number)] = None
    return list(rows)


def _row(fields: Mapping[str, Any], column: str | None, number: int) -> Row:
    names = COLUMNS if column is None else (column,)
    name = next((name for name in names if fields.get(name)), None)
    if name is None:
        if any(one in fields for one in names):
            return Row("", "")  # an empty text
        there = ", ".join(map(str, fields)) or "none"
        raise ValueError(f"row {number} has no column {' or '.join(names)}, but {there}: name one by --data-column")
    value = fields[name]
    if isinstance(value, str):
        return Row(hashlib.sha256(value.encode()).hexdigest(), value)
    try:
        messages = tuple((str(one["role"]), str(one["content"])) for one in value)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"row {number}: {name} must be a text or messages with role and content, got {str(value)[:80]}"
        ) from error
    first = next((content for role, content in messages if role == "user"), json.dumps(messages))
    return Row(first.strip(), "", messages)


def _fields(path: str) -> Iterator[Any]:
    file = Path(path)
    if file.suffix == ".jsonl":
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise ValueError(f"line {number} is no JSON: {error}") from error
    elif file.suffix == ".parquet":
        from pyarrow import parquet

        for batch in parquet.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()
    else:
        from datasets import load_dataset

        name, _, split = path.partition(":")
        yield from load_dataset(name, split=split or "train", streaming=True)
