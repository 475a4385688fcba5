"""``LiveText``: a streamer for ``pass_ext.generate`` that prints the text as it grows, accepted drafts in colour.

Tokens are pieces of UTF-8: a character is printed when it is complete. New tokens are decoded together with the tokens before
them, because a tokenizer drops the space in front of the first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text
from torch import Tensor

ACCEPTED = "bold green"


class LiveText:
    """Prints text to a console as it grows. Without colour, accepted drafts stand between ‹ and ›.

    Args:
        console: a console of rich.
        tokenizer: a tokenizer with ``decode``.
    """

    def __init__(self, console: Console, tokenizer: Any) -> None:
        self._console, self._decoding = console, Incremental(tokenizer)
        self._marks = ("", "") if console.is_terminal and not console.no_color else ("‹", "›")

    @property
    def legend(self) -> str:
        """The legend of the colours or marks, in rich's markup."""
        left, right = self._marks
        return f"[{ACCEPTED}]{left}accepted drafts{right}[/], and one token per call from the model"

    def put(self, _prompt: Tensor) -> None:
        """Ignores the prompt."""

    def put_step(self, tokens: Sequence[int], accepted: int) -> None:
        """Prints the tokens of one call."""
        if drafted := self._decoding.text_of(tokens[:accepted]):
            self._print(drafted.join(self._marks), ACCEPTED)
        self._print(self._decoding.text_of(tokens[accepted:]), "")

    def end(self) -> None:
        """Prints the rest of the text and ends the line."""
        self._print(self._decoding.rest() + "\n", "")

    def _print(self, text: str, style: str) -> None:
        self._console.print(Text(text, style=style), end="", soft_wrap=True)


class Incremental:
    """Turns tokens into text, complete characters only."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # the last tokens whose text is printed
        self._pending: list[int] = []

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add. An incomplete character is held back until it is complete."""
        self._pending += tokens
        text = self._new()
        if not text or text.endswith("\ufffd"):
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def rest(self) -> str:
        """The text held back so far, complete or not."""
        return self._new() if self._pending else ""

    def _new(self) -> str:
        before = self._decode(self._shown)
        return self._decode(self._shown + self._pending)[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
