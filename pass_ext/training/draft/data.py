"""Hidden states that an exit adapter learns from: the frozen model runs once over all text.

For every token: the rows behind some of the layers, and the last ones, which enter the model's head (the teacher's). They fit
in memory as bfloat16, and one file keeps them, so that a run that stopped need not compute them again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pass_ext.decoding.models.early_exit import exit_parts
from pass_ext.modules.files import write_tensors
from pass_ext.training.common.documents import Document

ROWS = 1024  # tokens in one forward


class Hidden(NamedTuple):
    """Rows of all texts, one behind the other."""

    tokens: Tensor
    """``[N]`` int32."""
    behind: dict[int, Tensor]
    """Layer count k -> ``[N, d]``, what layer k - 1 put out."""
    final: Tensor
    """``[N, d]``, behind the model's last norm."""


def document_windows(
    tokenizer: Any, documents: Sequence[Document], tokens: int, length: int, seed: int
) -> list[list[int]]:
    """About ``tokens`` tokens of windows that begin at lines, documents being drawn by their length."""
    chooser, windows, count = random.Random(f"{seed} documents"), [], 0
    weights = [len(document.text) for document in documents]
    while documents and count < tokens:
        text = chooser.choices(documents, weights)[0].text
        start = text.rfind("\n", 0, chooser.randrange(len(text))) + 1
        # Six letters a token are more than any tokenizer's mean, so the piece seldom falls short of the window.
        ids = tokenizer(text[start : start + 6 * length], add_special_tokens=False).input_ids[:length]
        if len(ids):
            windows.append(list(ids))
            count += len(ids)
    return windows


def collect_hidden(
    model: Any, texts: Sequence[Sequence[int]], layers: Sequence[int], done: Callable[[int], None] = lambda count: None
) -> Hidden:
    """The rows of the texts in their order; ``done(tokens)`` is called after each forward."""
    parts = exit_parts(model)
    device = model.get_input_embeddings().weight.device
    caught: dict[int, Tensor] = {}

    def keep(count: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            caught[count] = output[0] if isinstance(output, tuple) else output

        return hook

    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    rows: dict[int, dict[int, Tensor]] = {}  # text -> layer -> rows; layer 0 stands for the last ones
    hooks = [parts.layers[count - 1].register_forward_hook(keep(count)) for count in layers]
    try:
        while order:
            few = max(1, ROWS // max(len(texts[order[-1]]), 1))
            batch, order = order[-few:], order[:-few]
            longest = max(len(texts[index]) for index in batch)
            # Padding stands to the right, where no token of a causal model sees it.
            ids = torch.tensor([[*texts[index], *[0] * (longest - len(texts[index]))] for index in batch])
            with torch.no_grad():
                caught[0] = model.get_decoder()(input_ids=ids.to(device), use_cache=False).last_hidden_state
            for row, index in enumerate(batch):
                rows[index] = {
                    count: hidden[row, : len(texts[index])].to("cpu", torch.bfloat16)
                    for count, hidden in caught.items()
                }
            done(sum(len(texts[index]) for index in batch))
    finally:
        for hook in hooks:
            hook.remove()
    joined = {count: torch.cat([rows[index][count] for index in range(len(texts))]) for count in (0, *layers)}
    tokens = torch.cat([torch.tensor(text, dtype=torch.int32) for text in texts])
    return Hidden(tokens, {count: joined[count] for count in layers}, joined[0])


def save_hidden(hidden: Hidden, path: Path, identity: str) -> None:
    """Writes the rows; ``identity`` says which run they belong to."""
    tensors = {f"behind {count}": rows for count, rows in hidden.behind.items()}
    fresh = path.with_suffix(".new")
    write_tensors(fresh, {"tokens": hidden.tokens, "final": hidden.final, **tensors}, {"identity": identity})
    fresh.replace(path)


def load_hidden(path: Path, identity: str, layers: Sequence[int]) -> Hidden | None:
    """The rows that ``save_hidden`` wrote for the same run, if those behind all of ``layers`` are among them; else None.

    Raises ValueError for a damaged file.
    """
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            if (file.metadata() or {}).get("identity") != identity:
                return None
            names = {count: f"behind {count}" for count in layers}
            if not set(names.values()) <= set(file.keys()):
                return None
            behind = {count: file.get_tensor(name) for count, name in names.items()}
            return Hidden(file.get_tensor("tokens"), behind, file.get_tensor("final"))
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or was cut off ({error})") from error
