"""The prompts that the demo continues: the user's, or three of the chats that benchmarks and training hold out."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

HELD_OUT = {
    "words": "Write a Python function that groups the words of a sentence by their first letter, and explain how it works.",
    "night trains": "What are the advantages and disadvantages of travelling by night train instead of by plane?",
    "cats purr": "Why do cats purr? Explain what is known and what is not.",
}
"""Name -> text."""


class Prompt(NamedTuple):
    """One text to continue."""

    name: str
    shown: str
    """The text without the chat template's tokens."""
    ids: Tensor
    """``[1, T]``."""


def prompts(tokenizer: Any, custom: str | None) -> list[Prompt]:
    """The user's text unchanged, or the held-out ones in the model's chat template if it has one."""
    if custom is not None:
        return [Prompt("your prompt", custom, _ids(tokenizer, custom))]
    return [Prompt(name, text, _chat_ids(tokenizer, text)) for name, text in HELD_OUT.items()]


def _chat_ids(tokenizer: Any, text: str) -> Tensor:
    if not tokenizer.chat_template:
        return _ids(tokenizer, text)
    message = [{"role": "user", "content": text}]
    chat = str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))
    return _ids(tokenizer, chat, add_special_tokens=False)  # the template holds its special tokens already


def _ids(tokenizer: Any, text: str, add_special_tokens: bool = True) -> Tensor:
    ids: Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=add_special_tokens).input_ids
    if not ids.numel():
        raise SystemExit("--prompt must have at least one token")
    return ids
