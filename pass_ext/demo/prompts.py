"""The prompts that the demo continues: the user's, or three prompts of the benchmark of whole texts, chosen by a rule.

    set     the n held-out chat prompts that the benchmark continued greedily, without those whose text loops
    order   tokens per call by PaSS + NGram, as the benchmark recorded them; by name if these are equal
    choice  the median and the quartiles: places (n + 1) / 2, (n + 1) / 4 and 3 (n + 1) / 4

A test compares the choice with the recorded results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class HeldOut:
    """One prompt of the set."""

    place: str
    """Its place in the order: the median or a quartile."""
    name: str
    """Its name in the benchmark's list of prompts."""
    text: str
    tokens_per_call: float
    """Tokens per call by PaSS + NGram, as recorded, with two decimals."""


RECORDED_MODEL = "SmolLM2-135M-Instruct"
"""The model of the recorded texts."""
RACED = 7
"""The number of prompts in the set."""
RECORDED_TOKENS = 128
"""The length of the recorded texts in tokens."""
CHOSEN = (
    HeldOut(
        "median",
        "python-group-words",
        "Write a Python function that groups the words of a sentence by their first letter, and explain how it works.",
        1.64,
    ),
    HeldOut(
        "lower quartile",
        "night-trains",
        "What are the advantages and disadvantages of travelling by night train instead of by plane?",
        1.56,
    ),
    HeldOut("upper quartile", "cats-purr", "Why do cats purr? Explain what is known and what is not.", 1.88),
)
RULE = (
    f"Prompts: of the benchmark's {RACED} held-out chat prompts whose texts do not loop, those with the median and the "
    f"quartiles of {RECORDED_MODEL}'s tokens per call by PaSS + NGram"
)


class Prompt(NamedTuple):
    """One text to continue."""

    name: str
    shown: str
    """The text without the chat template's tokens."""
    ids: Tensor
    """``[1, T]``."""


def rule(model_name: str) -> str:
    """A sentence on how the prompts were chosen, for the user of this model; the recorded numbers are of one model alone."""
    if not model_name.lower().startswith(RECORDED_MODEL.lower()):
        return f"{RULE}."
    recorded = ", ".join(f"{prompt.tokens_per_call:.2f}" for prompt in CHOSEN)
    return f"{RULE} (recorded over {RECORDED_TOKENS} tokens: {recorded})."


def prompts(tokenizer: Any, custom: str | None) -> list[Prompt]:
    """The user's text unchanged, or the chosen prompts in the model's chat template if it has one."""
    if custom is not None:
        return [Prompt("your prompt", custom, _ids(tokenizer, custom))]
    return [Prompt(prompt.place, prompt.text, _chat_ids(tokenizer, prompt.text)) for prompt in CHOSEN]


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
