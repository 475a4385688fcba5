"""``python -m pass_ext demo MODEL``: the injection kernel at work inside a real model.

Builds one step whose rows are a prompt and L look-ahead slots, runs the model on it, shows that the prompt's own rows are
not disturbed, trains the slots for a moment, and times the kernel against plain PyTorch. Called by ``__main__``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import pass_ext
from pass_ext import reference

SLOTS = 4
TRAINING_STEPS = 12


def run(model_path: str, prompt: str) -> None:
    """Runs the whole demonstration and prints it; raises if any of its claims does not hold."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]Loading[/] {Path(model_path).name} on the CPU in bfloat16 …")
    model, tokenizer = load_model(model_path)
    table = model.get_input_embeddings().weight
    console.print(f"{model.config.model_type}: {table.shape[0]:,} token embeddings of width {table.shape[1]}\n")

    torch.manual_seed(0)
    slots = pass_ext.LookaheadEmbedding.from_table(SLOTS, table, base_model=Path(model_path).stem, dtype=torch.float32)
    prompt_ids = tokenizer(prompt, return_tensors="pt").input_ids[0]
    ids = torch.cat([prompt_ids, -1 - torch.arange(SLOTS)])
    with torch.no_grad():
        rows = slots(ids, table)
        if not torch.equal(rows, reference.lookahead_embed(ids, table, slots.weight)):
            raise AssertionError("the kernel and the reference disagree")
        logits = model(inputs_embeds=rows[None]).logits[0]
        alone = model(input_ids=prompt_ids[None]).logits[0]

    console.print("[bold]One step[/]: a row per token of the prompt, then one per look-ahead slot (id -1 - i)")
    console.print(step_table(ids, logits, tokenizer, prompt_ids))
    drift = (logits[: len(prompt_ids)] - alone).abs().max().item()
    agree = int((logits[: len(prompt_ids)].argmax(-1) == alone.argmax(-1)).sum())
    console.print(
        f"Slots do not disturb the rows before them: {agree} of {len(prompt_ids)} arg-maxes are those of the prompt alone, the "
        f"largest logit difference is {drift:.3g} (other matrix sizes round otherwise in bfloat16).\n"
    )

    before, after = train_slots(model, slots, tokenizer(TEXT, return_tensors="pt").input_ids[0], table)
    console.print(
        f"[bold]{TRAINING_STEPS} gradient steps[/] through the kernel, {slots.weight.numel():,} parameters, the model frozen: "
        f"cross-entropy of the slots on a short text {before:.2f} → {after:.2f}\n"
    )

    console.print("[bold]Speed[/] of building a step's input rows, against the usual embedding + cat + gather")
    console.print(speed_table(table, slots.weight.detach().to(table.dtype)))
    console.print(
        f"CPU kernels: {pass_ext.status().cpu_isa}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )


TEXT = (
    "The quick brown fox jumps over the lazy dog. One, two, three, four, five, six, seven, eight, nine, ten. "
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday are the seven days of the week."
)


def load_model(path: str) -> tuple[Any, Any]:
    """A transformers causal model in bfloat16 and its tokenizer, from a GGUF file or anything ``from_pretrained`` takes."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer, logging
    except ImportError as error:
        raise SystemExit(
            f"the demo needs transformers, gguf and accelerate: pip install 'pass_ext[hf]' ({error})"
        ) from error
    logging.set_verbosity_error()
    file = Path(path)
    where: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if file.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False), tokenizer


def step_table(ids: Tensor, logits: Tensor, tokenizer: Any, prompt_ids: Tensor) -> Table:
    """The step's rows: where each came from, and what the model says should follow it."""
    table = Table("row", "id", "input", "comes from", "the model's next token")
    for row, (token, following) in enumerate(zip(ids.tolist(), logits.argmax(-1).tolist(), strict=True)):
        source = f"table\\[{token}]" if token >= 0 else f"lookahead\\[{-1 - token}]"
        shown = repr(tokenizer.decode([token])) if token >= 0 else f"slot {-1 - token}, untrained"
        style = "cyan" if token < 0 else ""
        table.add_row(str(row), str(token), shown, source, repr(tokenizer.decode([following])), style=style)
    return table


def train_slots(model: Any, slots: pass_ext.LookaheadEmbedding, text: Tensor, table: Tensor) -> tuple[float, float]:
    """Fits the slots to predict the tokens behind every fifth position of one text; the mean loss before and after."""
    anchors = torch.arange(8, len(text) - SLOTS - 1, 5)
    # A batch of left-padded prefixes, each followed by the slots; the slot i behind anchor a should say text[a + 2 + i].
    length = int(anchors[-1]) + 1 + SLOTS
    ids = torch.zeros(len(anchors), length, dtype=torch.long)
    mask = torch.zeros(len(anchors), length, dtype=torch.long)
    for row, anchor in enumerate(anchors.tolist()):
        ids[row, length - SLOTS - anchor - 1 : length - SLOTS] = text[: anchor + 1]
        mask[row, length - SLOTS - anchor - 1 :] = 1
    ids[:, length - SLOTS :] = -1 - torch.arange(SLOTS)
    targets = torch.stack([text[a + 2 : a + 2 + SLOTS] for a in anchors.tolist()])

    optimizer = torch.optim.Adam(slots.parameters(), lr=0.02)
    losses = []
    for _ in track(range(TRAINING_STEPS), description="training the slots", transient=True):
        logits = model(inputs_embeds=slots(ids, table), attention_mask=mask).logits[:, -SLOTS:]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def usual_embed(ids: Tensor, table: Tensor, lookahead: Tensor) -> Tensor:
    """What one writes without the kernel: embed, concatenate the slots, gather."""
    rows = torch.cat([F.embedding(ids.clamp(min=0), table), lookahead])
    return rows[torch.where(ids >= 0, torch.arange(ids.numel()), ids.numel() - 1 - ids)]


def speed_table(table: Tensor, lookahead: Tensor) -> Table:
    """Median microseconds of both ways, interleaved, for a few step sizes."""
    shown = Table("rows", "plain PyTorch", "pass_ext", "faster by")
    for count in (1, 8, 64, 512):
        ids = torch.randint(-SLOTS, table.shape[0], (count,))
        plain, ours = median_times([usual_embed, pass_ext.lookahead_embed], (ids, table, lookahead))
        shown.add_row(str(count), f"{plain * 1e6:.1f} µs", f"{ours * 1e6:.1f} µs", f"{plain / ours:.1f} ×")
    return shown


def median_times(functions: list[Callable[..., Tensor]], arguments: tuple[Tensor, ...]) -> list[float]:
    """Median seconds of each function over 300 interleaved calls, after 30 to warm up."""
    times: list[list[float]] = [[] for _ in functions]
    with torch.inference_mode():
        for call in range(330):
            for function, record in zip(functions, times, strict=True):
                started = time.perf_counter()
                function(*arguments)
                if call >= 30:
                    record.append(time.perf_counter() - started)
    return [sorted(record)[len(record) // 2] for record in times]
