"""The model's own samples as training text: continued prefixes, answered instructions, and chats written by it alone.

A JSON-lines file beside the checkpoints keeps the samples, a batch a line, after a header of all that decides them. A batch's
random numbers depend on the seed and its number, so a run that was stopped goes on to the same file, with any number of ranks:
they write as many batches at a time. Held-out prompts are continued greedily, for the evaluation.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pass_ext.training.common.documents import Document, is_held_out
from pass_ext.training.common.frozen_model import opened_ids, sample, weights_digest
from pass_ext.training.common.ranks import Ranks
from pass_ext.training.common.server import TextServer

BATCH = 48
TEMPERATURES = (0.8, 0.5, 1.0, 0.0)
_LETTERS_A_PREFIX = 20_000  # of a document; fewer where so many prefixes are not enough
_OWN_MESSAGE = 64  # tokens at most in an instruction that the model writes itself
_LOOP = 8  # an n-gram of this length seen a third time starts a loop


@dataclass(frozen=True)
class Sample:
    """Token ids of a prompt and of what the model wrote after it; ``kind`` is "python", "prose" or "chat"."""

    name: str
    kind: str
    temperature: float
    prompt_tokens: int
    ids: list[int]


@dataclass(frozen=True)
class Batch:
    """Prompts that are continued together."""

    kind: str
    temperature: float
    names: list[str]
    prompts: list[list[int]]  # without tokens: the model writes the instructions first


def plan_batches(
    tokenizer: Any,
    documents: Sequence[Document],
    instructions: Sequence[str],
    *,
    continuations: int,
    own_chats: int,
    held_out: int,
    prefix_tokens: int,
    seed: int,
    batch: int = BATCH,
    temperatures: Sequence[float] = TEMPERATURES,
) -> tuple[list[Batch], list[Batch]]:
    """The training batches of a run, each of ``batch`` prompts, kinds mixed and temperatures in turn, and those of held-out
    prompts, at most ``held_out`` of a kind. That number decides nothing about the training ones."""
    chooser = random.Random(seed)
    chats = [(line, _chat_ids(tokenizer, line)) for line in instructions]
    evaluated: list[Batch] = []
    trained: list[list[Batch]] = []
    documents = [document for document in documents if not document.messages]  # of chats, prompts are answered
    kinds = sorted({document.kind for document in documents})
    for kind in kinds:
        of_kind, wanted = [d for d in documents if d.kind == kind], continuations // len(kinds)
        prefixes = list(_prefixes(tokenizer, of_kind, prefix_tokens, chooser, _letters_a_prefix(of_kind, wanted)))
        evaluation = [(name, ids) for name, ids in prefixes if is_held_out(name)]
        evaluated += _batches(kind, _one_each(evaluation)[:held_out])
        training = [(name, ids) for name, ids in prefixes if not is_held_out(name)]
        trained.append(_batches(kind, training[:wanted], batch, temperatures))
    evaluated += _batches("chat", [(line, ids) for line, ids in chats if is_held_out(line)][:held_out])
    trained.append(_batches("chat", [(line, ids) for line, ids in chats if not is_held_out(line)], batch, temperatures))
    names = [f"own chat {number}" for number in range(own_chats)]
    trained.append(_batches("chat", [(name, []) for name in names], batch, temperatures))
    longest = max(map(len, trained), default=0)
    mixed = [batches[turn] for turn in range(longest) for batches in trained if turn < len(batches)]
    return mixed, evaluated


def _batches(
    kind: str, prompts: list[tuple[str, list[int]]], size: int = BATCH, temperatures: Sequence[float] = (0.0,)
) -> list[Batch]:
    batches = []
    for number, at in enumerate(range(0, len(prompts), size)):
        part, temperature = prompts[at : at + size], temperatures[number % len(temperatures)]
        batches.append(Batch(kind, temperature, [name for name, _ in part], [ids for _, ids in part]))
    return batches


def _letters_a_prefix(documents: Sequence[Document], wanted: int) -> int:
    """So many letters of a document give a prefix more, that there are as many as wanted, and some too short ones."""
    letters = sum(len(document.text) for document in documents if not is_held_out(document.name))
    return max(1, min(_LETTERS_A_PREFIX, letters // max(1, wanted)))


def _prefixes(
    tokenizer: Any, documents: Sequence[Document], count: int, chooser: random.Random, letters: int
) -> Iterator[tuple[str, list[int]]]:
    """Prefixes of ``count`` tokens, cut at line starts, documents in random order: one of each, and one more of so many
    ``letters``."""
    for document in chooser.sample(list(documents), len(documents)):
        starts = [0, *(at + 1 for at, letter in enumerate(document.text) if letter == "\n")]
        for start in chooser.sample(starts, min(len(starts), 1 + len(document.text) // letters)):
            ids = opened_ids(tokenizer, document.text[start : start + 12 * count], count)
            if len(ids) == count:
                yield document.name, ids


def _one_each(prompts: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    return list({name: (name, ids) for name, ids in reversed(prompts)}.values())[::-1]


def _chat_ids(tokenizer: Any, instruction: str) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(instruction).input_ids)
    messages = [{"role": "user", "content": instruction}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def collect(
    model: Any,
    tokenizer: Any,
    batches: Sequence[Batch],
    path: Path,
    *,
    name: str,
    new_tokens: int,
    seed: int,
    replaces: bool = False,
    ranks: Ranks | None = None,
    server: TextServer | None = None,
) -> Iterator[list[Sample]]:
    """Yields every batch's samples: read from ``path`` if it has them, else sampled and appended.

    ``name`` is the model's, for the header. Samples of other settings are refused, or with ``replaces`` written anew. Of
    several ranks the first has the file. With a ``server``, this writes them.
    """
    ranks = ranks or Ranks()
    stop = frozenset(_stop_ids(model))
    frame = _chat_frame(tokenizer) if any(not all(batch.prompts) for batch in batches) else ([], [])
    header = {
        "model": name,
        "weights": weights_digest(model),
        "dtype": str(model.get_input_embeddings().weight.dtype),
        "prompts": _digest([[asdict(batch) for batch in batches], frame, sorted(stop)]),
        "batches": len(batches),
        "new_tokens": new_tokens,
        "seed": seed,
        **({} if server is None else {"texts from": server.model}),
    }

    def continued(
        prompts: list[list[int]], most: int, temperature: float, generator: torch.Generator
    ) -> list[list[int]]:
        if server is not None:
            return server.sample(prompts, most, temperature, generator)
        return sample(model, prompts, most, temperature, generator, stop)

    def sampled(number: int) -> list[Sample]:
        batch, prompts = batches[number], batches[number].prompts
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        if not all(prompts):
            opening, closing = frame
            written = continued([opening] * len(batch.names), _OWN_MESSAGE, 1.0, generator)
            prompts = [opening + [token for token in text if token not in stop] + closing for text in written]
        texts = continued(prompts, new_tokens, batch.temperature, generator)
        ranks.did(f"texts of {path.name}", len(texts))
        return [
            Sample(name, batch.kind, batch.temperature, len(prompt), list(prompt) + without_loop(prompt, text))
            for name, prompt, text in zip(batch.names, prompts, texts, strict=True)
        ]

    lines = ranks.first(lambda: _written_lines(path, header, replaces))
    for number, line in enumerate(lines):
        yield _read_samples(path, number + 2, line, batches[number].names)
    for start in range(len(lines), len(batches), ranks.readers):
        numbers = range(len(batches))[start : start + ranks.readers]
        mine = sampled(numbers[ranks.reader]) if ranks.reader < len(numbers) else []
        for samples in [mine] if ranks.readers == 1 else ranks.gather(mine):
            if samples and ranks.is_first:
                _append(path, json.dumps([asdict(written_sample) for written_sample in samples]) + "\n")
            if samples:
                yield samples


def _append(path: Path, line: str) -> None:
    try:
        with path.open("a") as file:
            file.write(line)
    except OSError as error:  # a full disk; a part of the line is cut off when the file is read
        raise SystemExit(f"{path} cannot be written, the batches before it stay: {error}") from error


def _written_lines(path: Path, header: dict[str, Any], replaces: bool) -> list[bytes]:
    """The lines after the header of a file of samples, which is begun if it is missing; without a line that was cut off."""
    written = path.read_bytes() if path.exists() else b""
    whole = written[: written.rfind(b"\n") + 1]  # a run that was stopped while writing left a part of a line after it
    lines = whole.splitlines()
    if replaces and lines and lines[0] != json.dumps(header).encode():
        lines = []
    if lines:
        _check_header(path, lines[0], header)
        with path.open("r+b") as file:
            file.truncate(len(whole))
    else:
        path.write_text(json.dumps(header) + "\n")
    return lines[1:]


def _stop_ids(model: Any) -> list[int]:
    ids = model.generation_config.eos_token_id
    return list(ids) if isinstance(ids, list) else [] if ids is None else [ids]


def _check_header(path: Path, line: bytes, now: dict[str, Any]) -> None:
    """Refuses samples of another model, other prompts or another seed, and says what differs."""
    try:
        there = dict(json.loads(line))
    except (ValueError, TypeError, RecursionError) as error:
        raise SystemExit(f"{path} does not begin with the header of a file of samples: give another --out") from error
    differing = [key for key in {**now, **there} if there.get(key) != now.get(key)]
    if differing:
        parts = "".join(f"\n  {key}: there {there.get(key)!r}, now {now.get(key)!r}" for key in differing)
        raise SystemExit(f"{path} holds samples of other settings: give the same ones, or another --out{parts}")


def _read_samples(path: Path, number: int, line: bytes, names: list[str]) -> list[Sample]:
    try:
        samples = [Sample(**fields) for fields in json.loads(line)]
        if [sample.name for sample in samples] != names:
            raise ValueError(f"wanted samples of {', '.join(names)}")
        return samples
    except (ValueError, TypeError, RecursionError) as error:
        raise SystemExit(
            f"{path}, line {number} is damaged: delete it and the lines after it to sample them again, or give another --out\n"
            f"  {error}"
        ) from error


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _chat_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The template's tokens before a user's message, and those after it that open the answer."""
    if tokenizer.chat_template is None:
        raise SystemExit("this model's tokenizer has no chat template, so it cannot write chats: give --own-chats 0")
    marker = "\x02"
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], add_generation_prompt=True, tokenize=False
    )
    before, _, after = whole.partition(marker)
    opening, closing = (list(tokenizer(part, add_special_tokens=False).input_ids) for part in (before, after))
    return opening, closing


def without_loop(prompt: Sequence[int], written: Sequence[int]) -> list[int]:
    """``written`` up to where an n-gram of eight tokens comes for the third time or more, from the prompt's beginning on: a
    looping text teaches only loops."""
    ids, seen = [*prompt, *written], dict[tuple[int, ...], int]()
    for end in range(_LOOP, len(ids) + 1):
        gram = tuple(ids[end - _LOOP : end])
        seen[gram] = seen.get(gram, 0) + 1
        if seen[gram] >= 3 and end > len(prompt):
            return ids[len(prompt) : end]
    return list(written)
