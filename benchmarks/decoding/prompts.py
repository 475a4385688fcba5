"""Prompts held out from training, in three domains: the beginning of a text, never its continuation.

    code    held-out files of the running Python's standard library: about a hundred tokens from the first definition after
            a third of the file, cut at the end of a line
    prose   prompts_prose.jsonl: openings of two to four sentences, written for this benchmark
    chat    prompts_chat.jsonl: instructions, written for this benchmark, in the model's chat template

The prompts depend on the files alone, so every run has the same.
"""

import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pass_ext.training.common.documents import is_held_out

HERE = Path(__file__).resolve().parent
DOMAINS = ("code", "prose", "chat")
FEWEST, MOST = 96, 160
"""Tokens of a code prompt."""
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "ensurepip", "__pycache__"}


@dataclass(frozen=True)
class Prompt:
    """One text to continue."""

    domain: str
    name: str
    ids: tuple[int, ...]


def read_prompts(domain: str, tokenizer: Any, most: int) -> list[Prompt]:
    """Up to `most` prompts of a domain, always in the same order."""
    readers = {"code": code_prompts, "prose": prose_prompts, "chat": chat_prompts}
    prompts = readers[domain](tokenizer)
    return [prompt for prompt, _ in zip(prompts, range(most), strict=False)]


def prose_prompts(tokenizer: Any) -> Iterator[Prompt]:
    """The openings, unchanged."""
    for entry in read_lines("prose"):
        yield Prompt("prose", entry["id"], tuple(tokenizer(entry["text"]).input_ids))


def chat_prompts(tokenizer: Any) -> Iterator[Prompt]:
    """The instructions, in the model's chat template."""
    for entry in read_lines("chat"):
        messages = [{"role": "user", "content": entry["text"]}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False).input_ids  # the template has them
        yield Prompt("chat", entry["id"], tuple(ids))


def code_prompts(tokenizer: Any, library: Path | None = None) -> Iterator[Prompt]:
    """A prompt from each held-out file that has one, in order of a hash: stable and not alphabetic."""
    library = library or Path(sysconfig.get_path("stdlib"))
    names = {
        path.relative_to(library).as_posix()
        for path in library.rglob("*.py")
        if not LEFT_OUT & set(path.relative_to(library).parts)
    }
    for name in sorted(filter(is_held_out, names), key=lambda name: hashlib.sha256(name.encode()).digest()):
        text = (library / name).read_text(encoding="utf-8", errors="replace")
        ids = cut(text, tokenizer)
        if ids:
            yield Prompt("code", name, ids)


def cut(text: str, tokenizer: Any) -> tuple[int, ...] | None:
    """As many whole lines as MOST tokens hold, from the first top-level definition after a third of the file.

    None for fewer than FEWEST tokens. The end of the last line is cut off, so that the model chooses the indent.
    """
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if i >= len(lines) // 3 and re.match(r"(async )?def |class ", line)]
    if not starts:
        return None
    best: tuple[int, ...] | None = None
    for end in range(starts[0] + 1, len(lines) + 1):
        ids = tuple(tokenizer("\n".join(lines[starts[0] : end]).rstrip()).input_ids)
        if len(ids) > MOST or end == len(lines):  # a prompt must end before the file does
            break
        if len(ids) >= FEWEST and lines[end - 1].strip():
            best = ids
    return best


def read_lines(name: str) -> list[dict[str, str]]:
    """The entries of prompts_<name>.jsonl."""
    return [json.loads(line) for line in (HERE / f"prompts_{name}.jsonl").read_text().splitlines()]
