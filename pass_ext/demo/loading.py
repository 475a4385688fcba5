"""The model, its tokenizer, its look-ahead embeddings, and the prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pass_ext
from pass_ext.checkpoint import load_checkpoint
from pass_ext.demo.extras import end_without

QUESTION = "Write a short story about a lighthouse keeper and a storm."
FUNCTION = '''def is_leap_year(year: int) -> bool:
    """Returns True for leap years of the Gregorian calendar."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in_month(year: int, month: int) -> int:
    """Returns the number of days of a month, 1 to 12."""
'''
PROSE = (
    "The old library stood at the end of the street, behind two large chestnut trees. In the mornings it was quiet, and"
)


class Prompt(NamedTuple):
    """One text to continue."""

    name: str
    shown: str
    """What of it is shown: without the template's tokens."""
    ids: Tensor
    """``[1, T]``."""


def load_model(path: str) -> tuple[Any, Any]:
    """The model in bfloat16 and its tokenizer."""
    try:
        return load_checkpoint(path, torch.bfloat16)
    except ImportError as error:
        end_without(error)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from error
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be loaded as a transformers model: {error}") from error


def load_lookahead(wanted: str | None, model_path: str, table: Tensor) -> pass_ext.LookaheadEmbedding | None:
    """Those asked for, else the shipped ones whose name the model's begins with, else None."""
    if wanted is None:
        name = Path(model_path).name.lower()
        wanted = next((known for known in pass_ext.LookaheadEmbedding.shipped() if name.startswith(known)), None)
        if wanted is None:
            return None
    try:
        return pass_ext.LookaheadEmbedding.from_pretrained(wanted, table=table)
    except ValueError as error:
        raise SystemExit(f"--lookahead {wanted}: {error}") from error


def prompts(tokenizer: Any, own: str | None) -> list[Prompt]:
    """The user's, or three: an instruction if the model has a chat template, a function to complete, a prose opening."""

    def of(name: str, shown: str, text: str, special: bool = True) -> Prompt:
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=special).input_ids
        if not ids.numel():
            raise SystemExit("--prompt must have at least one token")
        return Prompt(name, shown, ids)

    if own is not None:
        return [of("your prompt", own, own)]
    found = [of("Python", FUNCTION, FUNCTION), of("prose", PROSE, PROSE)]
    if tokenizer.chat_template:
        message = [{"role": "user", "content": QUESTION}]
        chat = str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))
        found.insert(0, of("chat", QUESTION, chat, special=False))  # the template brings its own
    return found
