"""``TrainedFile``: the safetensors file of a trained module, its metadata checked against its tensors before any is read.

    format → metadata → names, types and shapes of the tensors → their values

A file of a few kilobytes may claim sizes of gigabytes, so nothing is allocated by its metadata. What is missing or wrong is
refused with one ValueError that begins with the path; a file that does not exist stays a FileNotFoundError. The three formats,
their names and shapes: lookahead.py, exit_adapter.py, decision.py.

The fingerprint of a model's embedding table: the signs of 256 of its numbers, as 64 hexadecimal digits.

    number k: row k V / 256, column k C mod d        C: d · 0.618…; both rounded down

It tells which model a trained module belongs to, however the model was loaded: other dtypes, quantised weights and positive
scales keep nearly all signs. Of another model's table about half of the signs are the same. A fine-tuned model has nearly its
base model's, and slots or adapters of the one draft well for the other.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SIGNS = 256
_EQUAL_SIGNS = 192  # equal signs of one model: 4-bit weights change some 15, and two models have about 128 in common
_GOLDEN = 0.6180339887498949
HitRates = tuple[tuple[float, ...], ...]
"""``rates[i][r]``: P(the candidate of rank r at depth i + 1 is right | the path to its parent is right)."""
PRETRAINED = Path(__file__).parent / "pretrained"
"""The folder of the files that come with the package."""
_WEIGHTS = ("F16", "BF16", "F32", "F64")  # as safetensors names types
_IDS = ("I32", "I64")
_ROUNDING = 1e-4  # rates are kept with five digits, so a row that sums to 1 may exceed it by as much


def fingerprint_of(table: Tensor, embed: Callable[[Tensor], Tensor] | None = None) -> str:
    """The fingerprint of a table ``[V, d]``.

    embed: gives the rows ``[n, d]`` of ids ``[n]`` where the table's numbers cannot be read (quantised, offloaded, sharded).
    """
    rows, columns = _places(*table.shape)
    rows, columns = rows.to(table.device), columns.to(table.device)
    with torch.no_grad():
        numbers = table[rows, columns] if embed is None else embed(rows).gather(1, columns[:, None])[:, 0]
    signs = "".join("01"[negative] for negative in (numbers < 0).tolist())
    return f"{int(signs, 2):0{_SIGNS // 4}x}"


def table_difference(
    fingerprint: str, base_model: str, table: Tensor, embed: Callable[[Tensor], Tensor] | None = None
) -> Sequence[str]:
    """The sentence that tells a table ``[V, d]`` from that of ``fingerprint``; none where they agree, or where that is ""."""
    if not fingerprint:
        return []
    same = _SIGNS - (int(fingerprint, 16) ^ int(fingerprint_of(table, embed), 16)).bit_count()
    if same >= _EQUAL_SIGNS:
        return []
    named = repr(base_model) if base_model else "an unnamed model"
    return [
        f"embedding table: it was trained with that of {named}, and of {_SIGNS} numbers of this model's table {same} have the "
        f"same sign, {_EQUAL_SIGNS} or more are wanted. Give the model that it was trained for, or set its attribute "
        'fingerprint to "" to use it all the same'
    ]


def _places(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    number = torch.arange(_SIGNS)
    stride = max(int(columns * _GOLDEN), 1)
    return number * rows // _SIGNS, number * stride % columns


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """``save_file`` with the permissions that other new files get: safetensors lets nobody else read its own."""
    from safetensors.torch import save_file

    Path(path).touch()
    mode = Path(path).stat().st_mode
    save_file(dict(tensors), os.fspath(path), metadata=metadata)
    Path(path).chmod(mode)


def save_trained(
    path: str | os.PathLike[str],
    form: str,
    metadata: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    *,
    hit_rates: HitRates | None = None,
    greedy_hit_rates: HitRates | None = None,
    training_record: Mapping[str, Any] | None = None,
    fingerprint: str = "",
) -> None:
    """Writes tensors, and what they belong to, as one safetensors file of the format ``form``."""
    described = {"format": form, **{key: str(value) for key, value in metadata.items()}}
    for key, rates in (("hit_rates", hit_rates), ("greedy_hit_rates", greedy_hit_rates)):
        if rates is not None:
            described[key] = json.dumps(rates)
    if fingerprint:
        described["fingerprint"] = fingerprint
    if training_record:
        described["training"] = json.dumps(training_record)
    write_tensors(path, {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, described)


def shipped_files(pattern: str) -> dict[str, Path]:
    """Name -> file of the shipped modules whose names have this pattern."""
    return {file.stem: file for file in sorted(PRETRAINED.glob(f"{pattern}.safetensors"))}


def pretrained_path(name: str | os.PathLike[str], shipped: Mapping[str, Path]) -> Path:
    """The file of a shipped name, or the path itself; ValueError where it is neither."""
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"a file must be given by its path or by a shipped name, got {name!r}")
    path = shipped.get(os.fspath(name), Path(name))
    if not path.is_file():
        names = ", ".join(shipped) or "none"
        raise ValueError(f"{os.fspath(name)!r} is neither a file nor one of the shipped names: {names}")
    return path


def check_model(
    kind: str,
    facts: Mapping[str, tuple[object, object]],
    table_difference: Callable[[], Sequence[str]] = lambda: (),
    others: Sequence[str] = (),
) -> None:
    """Raises ValueError, naming every difference, where a ``kind`` of module was trained for another model.

    ``facts``: name -> (the file's, the model's); 0 or "" is not known, and fits. ``others``: further differences.
    ``table_difference``: the sentence about the embedding table's numbers, asked for where nothing else differs.
    """
    differences = [
        f"{name}: it has {trained_for!r}, this model has {model!r}"
        for name, (trained_for, model) in facts.items()
        if trained_for and model and trained_for != model
    ]
    found = [*differences, *others] or table_difference()
    if found:
        raise ValueError(f"this {kind} belongs to another model; " + "; ".join(found))


@contextmanager
def trained_file(path: str | os.PathLike[str], kind: str, *formats: str) -> Iterator[TrainedFile]:
    """Opens the file of a ``kind`` of module, of one of these formats."""
    from safetensors import SafetensorError, safe_open

    where, wanted = os.fspath(path), " or ".join(map(repr, formats))
    if Path(where).exists() and not Path(where).is_file():
        raise ValueError(f"{where} is no {kind} file: wanted a safetensors file, got a folder or a device")
    try:
        opened = safe_open(where, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{where} is no {kind} file, or it was cut off: wanted a safetensors file of {wanted}, got "
            f"{Path(where).stat().st_size} bytes that safetensors cannot read ({error})"
        ) from error
    with opened as file:
        metadata = file.metadata() or {}
        if metadata.get("format") not in formats:
            raise ValueError(f"{where} is no {kind} file: its format is {metadata.get('format')!r}, expected {wanted}")
        yield TrainedFile(where, file, metadata)


class TrainedFile:
    """Metadata and tensors of an open file, each checked as it is read."""

    def __init__(self, path: str, file: Any, metadata: dict[str, str]) -> None:
        self._path = path
        self._file = file
        self._metadata = metadata
        self._names = frozenset(file.keys())

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._names

    def refuse(self, what: str, wanted: str, got: object) -> ValueError:
        """The error for a damaged part; ``got`` None: the part is missing."""
        shown = repr(got) if isinstance(got, str) else str(got)
        shown = shown if len(shown) < 200 else f"{shown[:200]}…"
        found = "but it is missing" if got is None else f"got {shown}"
        return ValueError(f"{self._path} is damaged: {what} must be {wanted}, {found}")

    # ---- metadata ----

    def text(self, key: str, choices: Sequence[str] = ()) -> str:
        """Any text, or one of ``choices``."""
        value = self._metadata.get(key)
        if value is None or (choices and value not in choices):
            raise self.refuse(f"metadata {key!r}", f"one of {', '.join(choices)}" if choices else "a text", value)
        return value

    def fingerprint(self) -> str:
        """That of the base model's embedding table; "" where the file has none."""
        value = self._metadata.get("fingerprint", "")
        if value and not re.fullmatch(f"[0-9a-f]{{{_SIGNS // 4}}}", value):
            raise self.refuse("metadata 'fingerprint'", f"{_SIGNS // 4} hexadecimal digits", value)
        return value

    def count(self, key: str, least: int = 0) -> int:
        """A whole number, ``least`` or more."""
        value = self._metadata.get(key)
        if value is None or not re.fullmatch("[0-9]{1,18}", value) or int(value) < least:
            raise self.refuse(f"metadata {key!r}", f"a whole number, {least} or more", value)
        return int(value)

    def number(self, key: str) -> float:
        """Any finite number."""
        return self._number(key, "a finite number", math.isfinite)

    def share(self, key: str) -> float:
        """A number from 0 to 1."""
        return self._number(key, "a number from 0 to 1", lambda number: 0 <= number <= 1)

    def _number(self, key: str, wanted: str, fits: Callable[[float], bool]) -> float:
        value = self._metadata.get(key)
        try:
            number = float("nan" if value is None else value)
        except ValueError:
            number = float("nan")
        if not fits(number):
            raise self.refuse(f"metadata {key!r}", wanted, value)
        return number

    def hit_rates(self, rows: int | None = None, key: str = "hit_rates") -> HitRates | None:
        """Probabilities of exclusive events in each row; so many rows, where that is known. None: the file has none."""
        if key not in self._metadata:
            return None
        found = self._json(key, "rows of probabilities")
        if found is None:
            return None
        if not isinstance(found, list) or not found or not all(isinstance(row, list) and row for row in found):
            raise self.refuse(f"metadata {key!r}", "rows of probabilities", self._metadata[key])
        if rows not in (None, len(found)):
            raise self.refuse(f"metadata {key!r}", f"a row for each of {rows} slots", len(found))
        for number, row in enumerate(found):
            if not all(type(rate) in (int, float) and 0 <= rate <= 1 for rate in row) or sum(row) > 1 + _ROUNDING:
                wanted = "numbers from 0 to 1 that sum to at most 1"
                raise self.refuse(f"row {number} of metadata {key!r}", wanted, row)
        return tuple(tuple(map(float, row)) for row in found)

    def training_record(self) -> dict[str, Any]:
        """The training run as it described itself; empty where the file has none."""
        if "training" not in self._metadata:
            return {}
        found = self._json("training", "a JSON object")
        if not isinstance(found, dict):
            raise self.refuse("metadata 'training'", "a JSON object", self._metadata["training"])
        return found

    def _json(self, key: str, wanted: str) -> Any:
        try:
            return json.loads(self._metadata[key])
        except (ValueError, RecursionError) as error:
            raise self.refuse(f"metadata {key!r}", f"{wanted} as JSON", self._metadata[key]) from error

    # ---- tensors ----

    def size(self, tensor: str, axis: int) -> int:
        """One size of a tensor that has to be there, 1 or more."""
        shape = self._shape(tensor)
        if shape is None or len(shape) <= axis or shape[axis] < 1:
            raise self.refuse(f"tensor {tensor!r}", f"a tensor with a size {axis} of at least 1", shape)
        return shape[axis]

    def weights(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """The tensors of these names and shapes: floating point, every value finite."""
        for name, shape in shapes.items():
            if self._shape(name) != list(shape):
                raise self.refuse(f"tensor {name!r}", f"of shape {list(shape)}", self._shape(name))
            self._check_type(name, _WEIGHTS)
        tensors = {name: self._file.get_tensor(name) for name in shapes}
        for name, tensor in tensors.items():
            if not (fit := tensor.isfinite()).all():
                raise self.refuse(f"tensor {name!r}", "finite", f"{int((~fit).sum())} values that are NaN or infinite")
        return tensors

    def ids(self, tensor: str, below: int) -> Tensor | None:
        """Different token ids from 0 to ``below`` - 1, ``[S]`` int32; below 0: any. None: the file has no such tensor."""
        shape = self._shape(tensor)
        if shape is None:
            return None
        if len(shape) != 1 or shape[0] < 1:
            raise self.refuse(f"tensor {tensor!r}", "of shape [S] with S of at least 1", shape)
        self._check_type(tensor, _IDS)
        found: Tensor = self._file.get_tensor(tensor)
        lowest, highest = int(found.min()), int(found.max())
        limit = below or 1 << 31
        if lowest < 0 or highest >= limit:
            raise self.refuse(f"tensor {tensor!r}", f"token ids from 0 to {limit - 1}", f"{lowest} to {highest}")
        if (doubled := len(found) - len(found.unique())) > 0:
            raise self.refuse(f"tensor {tensor!r}", "different token ids", f"{doubled} that came before")
        return found.to(torch.int32)

    def names(self, prefix: str) -> list[str]:
        """The names of tensors that begin so, sorted."""
        return sorted(name for name in self._names if name.startswith(prefix))

    def check_names(self, known: Sequence[str]) -> None:
        """Refuses tensors of other names: they would be left out without a word."""
        if other := sorted(self._names.difference(known)):
            raise self.refuse("every tensor", f"one of {', '.join(known)}", f"tensor {', '.join(map(repr, other))}")

    def _shape(self, tensor: str) -> list[int] | None:
        return list(self._file.get_slice(tensor).get_shape()) if tensor in self._names else None

    def _check_type(self, tensor: str, wanted: Sequence[str]) -> None:
        found = self._file.get_slice(tensor).get_dtype()
        if found not in wanted:
            raise self.refuse(f"tensor {tensor!r}", f"of type {', '.join(wanted)}", f"type {found}")
