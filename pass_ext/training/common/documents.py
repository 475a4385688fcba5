"""Documents for training: files and data sets are read, split by name into training and held-out ones, and Python's prose is
cut out.

The split depends on a file's name alone, or on what a row of a data set says, so benchmarks can draw their prompts from the
held-out side. A file of the standard library is named by its place there, whatever path leads to it. Needs only the standard
library, but for rows that are not in .jsonl.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pass_ext.training.common import rows

SUFFIXES = (".py", ".txt", ".md", ".rst")
# Folders that hold no text worth learning, or somebody else's.
SKIPPED = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "encodings"})
_SHORTEST_PROSE = 200


@dataclass(frozen=True)
class Document:
    """A text: ``name`` is its file's, as ``read_documents`` makes it, or its row's; ``kind`` is "python", "prose" or "chat".
    A chat's text is what the tokenizer's template makes of its messages, each ``(role, content)``."""

    name: str
    kind: str
    text: str
    messages: tuple[tuple[str, str], ...] = ()


def is_held_out(name: str) -> bool:
    """True if a file of this name is for the evaluation: a tenth of all, by a hash that never changes."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 10 == 0


def read_documents(paths: Iterable[str | Path], *, column: str | None = None, most: int = 10_000) -> list[Document]:
    """The documents of files, folders and data sets, sorted by name; a Python file gives its source and, apart, its long
    strings, a .jsonl or .parquet file or a data set at most ``most`` rows, of which ``column`` is read.

    The word "stdlib" stands for the folder of Python's standard library. Files from there are named by their path in it, others
    by their path in the outermost of the folders, with as many folders above as it takes to tell equal names apart.
    """
    names: dict[Path, str] = {}
    sets: dict[str, None] = {}
    for path in paths:
        if path != "stdlib" and rows.is_dataset_name(str(path)):
            sets[str(path)] = None
            continue
        source = Path(sysconfig.get_path("stdlib") if path == "stdlib" else path)
        if not source.exists():
            raise FileNotFoundError(f"--data names {str(source)!r}, which does not exist")
        root = (source if source.is_dir() else source.parent).resolve()
        for file in sorted(root.rglob("*")) if source.is_dir() else [root / source.name]:
            relative = file.relative_to(root)
            is_text = relative.suffix in (*SUFFIXES, *rows.SUFFIXES) and SKIPPED.isdisjoint(relative.parts)
            if file.is_file() and (not source.is_dir() or is_text):
                names[file] = max(names.get(file, ""), relative.as_posix(), key=len)
    documents = []
    for file in [file for file in names if file.suffix in rows.SUFFIXES]:
        sets[str(file)] = None
        del names[file]
    for file, name in _distinct(names).items():
        text = file.read_text(encoding="utf-8", errors="ignore")
        parts = {"python": text, "prose": prose_of(text)} if file.suffix == ".py" else {"prose": text}
        documents += [Document(name, kind, part) for kind, part in parts.items() if len(part) >= _SHORTEST_PROSE]
    found = {row: None for path in sets for row in _rows(path, column, most)}
    documents += [Document(row.name, "chat" if row.messages else "prose", row.text, row.messages) for row in found]
    return sorted(documents, key=lambda document: (document.name, document.kind, document.text, document.messages))


def _rows(path: str, column: str | None, most: int) -> list[rows.Row]:
    try:
        return [row for row in rows.read_rows(path, column, most) if row.text or row.messages]
    except ImportError as error:
        raise ValueError(f"{path} needs the package {error.name}: pip install 'pass_ext[data]'") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except Exception as error:  # datasets and pyarrow have many
        known = Path(path).exists()
        what = "cannot be read" if known else "does not exist here, and is no data set that can be loaded"
        raise ValueError(f"{path} {what}: {type(error).__name__}: {error}") from error


def _distinct(relative: Mapping[Path, str]) -> dict[Path, str]:
    """Names of the files, no two equal."""
    library = Path(sysconfig.get_path("stdlib")).resolve()
    settled = {
        file: file.relative_to(library).as_posix()
        for file in relative
        if file.is_relative_to(library) and "site-packages" not in file.relative_to(library).parts
    }
    names = {**relative, **settled}
    while doubled := {name for name, count in Counter(names.values()).items() if count > 1}:
        for file, name in names.items():
            if name in doubled and file not in settled:
                names[file] = "/".join(file.parts[-len(Path(name).parts) - 1 :])
    return names


def prose_of(source: str) -> str:
    """The long strings of a Python source, docstrings mostly, a blank line between them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    texts = [text for text in constants if isinstance(text, str) and len(text) >= _SHORTEST_PROSE and " " in text]
    return "\n\n".join(dict.fromkeys(_unindented(text) for text in texts))


def _unindented(text: str) -> str:
    """A docstring with the indentation of its later lines taken away."""
    lines = text.expandtabs().splitlines()
    indents = [len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()]
    common = min(indents, default=0)
    return "\n".join([lines[0].strip(), *(line[common:].rstrip() for line in lines[1:])]).strip()


def fingerprint(documents: Iterable[Document]) -> str:
    """SHA-256 over names, kinds and texts: it tells the data of two training runs apart."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.name, document.kind, document.text):
            digest.update(part.encode() + b"\0")
    return digest.hexdigest()
