"""The optimisation of an exit adapter: AdamW on the adapter alone, over rows of hidden states that were computed before.

The frozen model runs once over all text. For every token: the rows after some of the layers, and the last ones, which enter
the model's head (the teacher's). They fit in memory as bfloat16, and one file keeps them, so that a run that stopped need not
compute them again. Of several ranks, each has the rows of its share of the texts.

loss = KL(teacher || draft) over the adapter's vocabulary, both normalised within it, averaged over a step's rows. The rows of a
step depend on the seed and its number alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pass_ext.decoding.models.early_exit import exit_parts
from pass_ext.modules.exit_adapter import ExitAdapter
from pass_ext.modules.files import write_tensors
from pass_ext.training.common.documents import Document
from pass_ext.training.common.loss import distillation_loss
from pass_ext.training.common.ranks import Ranks
from pass_ext.training.common.run import document_window
from pass_ext.training.common.steps import Trainer, rate_at

ROWS = 1024  # tokens in one forward


class Hidden(NamedTuple):
    """Rows of texts, one after the other."""

    tokens: Tensor
    """``[N]`` int32."""
    after: dict[int, Tensor]
    """Layer count k -> ``[N, d]``, what layer k - 1 put out."""
    final: Tensor
    """``[N, d]``, after the model's last norm."""


def document_windows(
    tokenizer: Any, documents: Sequence[Document], tokens: int, length: int, seed: int
) -> list[list[int]]:
    """About ``tokens`` tokens of windows that begin at lines, documents being drawn by their length."""
    chooser, windows, count = random.Random(f"{seed} documents"), [], 0
    while documents and count < tokens:
        if ids := document_window(tokenizer, documents, length, chooser):
            windows.append(ids)
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
    tensors = {f"after {count}": rows for count, rows in hidden.after.items()}
    fresh = path.with_suffix(".new")
    write_tensors(fresh, {"tokens": hidden.tokens, "final": hidden.final, **tensors}, {"identity": identity})
    fresh.replace(path)


def load_hidden(path: Path, identity: str, layers: Sequence[int]) -> Hidden | None:
    """The rows that ``save_hidden`` wrote for the same run, if those after all of ``layers`` are among them; else None.

    Raises ValueError for a damaged file.
    """
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            if (file.metadata() or {}).get("identity") != identity:
                return None
            names = {count: f"after {count}" for count in layers}
            if not set(names.values()) <= set(file.keys()):
                return None
            after = {count: file.get_tensor(name) for count, name in names.items()}
            return Hidden(file.get_tensor("tokens"), after, file.get_tensor("final"))
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or was cut off ({error})") from error


@dataclass(frozen=True)
class DraftSettings:
    """What decides the result of a run, beside the data."""

    steps: int
    batch: int
    learning_rate: float
    weight_decay: float
    warm_up: int
    clip: float
    seed: int


def frequent_tokens(tokens: Tensor, count: int, total: int) -> Tensor:
    """The ``count`` ids that ``tokens`` has most often, ascending; ids that it lacks fill up, the lowest first."""
    counts = torch.bincount(tokens.long(), minlength=total)
    return counts.sort(descending=True, stable=True).indices[:count].sort().values


def rows_of_step(count: int, batch: int, step: int, seed: int) -> Tensor:
    """Which rows a step reads: every row once before any comes again."""
    batch = min(batch, count)
    epoch, place = divmod(step, count // batch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    return order[place * batch : (place + 1) * batch]


class DraftTrainer(Trainer):
    """Trains ``adapter`` in place on ``hidden``; the model lends its norm and its head."""

    def __init__(
        self,
        model: Any,
        adapter: ExitAdapter,
        hidden: Hidden,
        settings: DraftSettings,
        ranks: Ranks | None = None,
        lengths: Sequence[int] = (),
    ) -> None:
        """lengths: of all ranks' texts, of which ``hidden`` has this rank's share; empty: ``hidden`` has all."""
        optimizer = torch.optim.AdamW(
            adapter.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=settings.weight_decay
        )
        super().__init__(
            adapter,
            optimizer,
            steps=settings.steps,
            schedule=lambda step: rate_at(step, settings.steps, settings.warm_up),
            clip=settings.clip,
            ranks=ranks,
        )
        mine = self.ranks.share_of(torch.arange(sum(lengths)).split(list(lengths)))
        rows = torch.cat(list(mine)) if mine else torch.arange(len(hidden.final))
        self._place = torch.full((sum(lengths) or len(rows),), -1)  # of a row among those that this rank has
        self._place[rows] = torch.arange(len(rows))
        parts = exit_parts(model)
        head, chosen = parts.head, slice(None) if adapter.vocabulary is None else adapter.vocabulary.long()
        self.adapter, self._hidden, self._settings, self._norm = adapter, hidden, settings, parts.norm
        self._table = head.weight.detach()[chosen]
        self._bias = None if head.bias is None else head.bias.detach()[chosen]

    def loss(self, step: int) -> Tensor:
        """The loss of those of one step's rows that this rank has."""
        device, dtype = self._table.device, self._table.dtype
        chosen = rows_of_step(len(self._place), self._settings.batch, step, self._settings.seed)
        picked = self._place[chosen]
        picked = picked[picked >= 0]
        self.ranks.did("rows", len(picked))
        self.tokens += len(chosen)
        after = self._hidden.after[self.adapter.layers][picked].to(device, torch.float32)  # as the adapter's numbers
        final = self._hidden.final[picked].to(device, dtype)
        weights = torch.full((len(picked),), 1 / len(chosen), device=device)
        return distillation_loss(
            [self._norm(self.adapter(after).to(dtype))],
            [self._table],
            weights,
            teacher_rows=final,
            teacher=torch.arange(len(picked), device=device),
            bias=self._bias,
        )
