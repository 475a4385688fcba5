"""Shows the demonstration: plan, live text, equal texts in fp32, all methods side by side, tables, picture."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.status import Status
from rich.text import Text
from torch import Tensor

import pass_ext
from pass_ext.checkpoint import cache_folder, load_checkpoint
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.planning.plan import pass_plan
from pass_ext.demo.contenders import JOINED, PLAIN, Contender, Run, contenders, continued, joined
from pass_ext.demo.live import LiveText
from pass_ext.demo.prompts import Prompt, prompts
from pass_ext.demo.report import TIE, Agreement, agreement, agreement_table, draw, speed_table
from pass_ext.weights.layers import table_of

WARM_UP_TOKENS = 6
EXACT_TOKENS = 8  # per text in fp32
EXACT_ROWS = 16  # rows of a PaSS step in fp32, because a plan by times may have no drafts to check


def load_model(path: str) -> tuple[Any, Any]:
    """The model and its tokenizer: weights of a GGUF file as they are, the rest in bfloat16."""
    try:
        return load_checkpoint(path, torch.bfloat16)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from error
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be loaded as a transformers model: {error}") from error


def load_lookahead(source: str | None, model_path: str, embedding: Any) -> pass_ext.LookaheadEmbedding | None:
    """The embeddings of the file or name ``source``. Without it, the shipped ones whose name begins the model's, or None."""
    if source is None:
        name = Path(model_path).name.lower()
        source = next((shipped for shipped in pass_ext.LookaheadEmbedding.shipped() if name.startswith(shipped)), None)
        if source is None:
            return None
    try:
        lookahead = pass_ext.LookaheadEmbedding.from_pretrained(source)
        lookahead.check_fits(table_of(embedding), embed=embedding)
    except ValueError as error:
        raise SystemExit(f"--lookahead {source}: {error}") from error
    return lookahead


def show(options: argparse.Namespace, model: Any, tokenizer: Any) -> None:
    """Runs all parts in order, with the options of ``python -m pass_ext demo``."""
    console, model_name, new_tokens = Console(highlight=False), Path(options.model).stem, options.new_tokens
    lookahead = load_lookahead(options.lookahead, options.model, model.get_input_embeddings())
    texts = prompts(tokenizer, options.prompt)
    threads = _counted(torch.get_num_threads(), "thread")
    machine = f"CPU kernels {pass_ext.status().cpu_isa}, {threads}, torch {torch.__version__}"
    console.print(f"[bold]{model_name}[/], weights as they are stored, the rest in bfloat16 · {machine}\n")
    if options.prompt is None:
        console.print("Prompts: three chats that no training of the shipped files has seen.\n")
    if lookahead is None:
        console.print(
            "There are no look-ahead embeddings for this model, so PaSS is left out (--lookahead takes a file of them).\n"
        )
    else:
        _show_plan(console, model, lookahead, texts[0], options.verbose)
        _show_live(console, model, tokenizer, lookahead, texts[0], new_tokens)

    exact = copy.deepcopy(model).float()
    with console.status("fp32") as status:
        _check_fp32(exact, contenders(lookahead, rows=EXACT_ROWS), texts, status)
    names = [contender.name for contender in contenders(lookahead)]
    console.print(
        f"[bold]fp32[/]: {_counted(len(texts), 'text')} of {EXACT_TOKENS} tokens by {len(names)} methods, "
        "the same token for token.\n"
    )

    with console.status("bfloat16") as status:
        runs = _timed(model, contenders(lookahead), texts, new_tokens, status)
        agreements = {name: _agreements(exact, texts, name, runs) for name in names if name != PLAIN}
    console.print(f"[bold]bfloat16[/], up to {new_tokens} tokens: the texts against Plain's")
    console.print(agreement_table(agreements, [text.name for text in texts]))
    if any(agreement.gap is not None for row in agreements.values() for agreement in row):
        console.print(
            f"A tie: two tokens whose logits, in fp32, differ by no more than {TIE} steps of bfloat16 at the size of the "
            "largest logit (the difference is in brackets). After it the texts differ: the number of rows of a call changes "
            "its rounding.\n"
        )
    console.print("[bold]Speed[/], all texts, the prompts' calls included")
    console.print(speed_table(runs))
    console.print(
        f"One run each, {_counted(len(texts), 'text')}: a demonstration, not a measurement; other programs on this machine "
        "change the numbers."
    )
    _show_picture(console, options.out, runs, texts, f"{model_name}, bfloat16, greedy · {machine}")


def _show_plan(
    console: Console, model: Any, lookahead: pass_ext.LookaheadEmbedding, prompt: Prompt, verbose: bool
) -> None:
    """Prints the length of the prompt and the planner's choice; with ``verbose`` also the measured times and the tree."""
    with console.status("measuring the model's calls: a few seconds, longer while other programs keep the CPU busy"):
        plan, times = pass_plan(joined(lookahead), packed_model(model), 1, greedy=True)
    choice = (
        "plain decoding: no drafts are expected to pay"
        if plan.is_plain
        else (f"{_counted(plan.rows, 'row')} per call, {plan.tokens_per_call:.2f} tokens per call expected")
    )
    hint = "" if verbose else " (--verbose: why)"
    console.print(f"{_counted(prompt.ids.shape[1], 'prompt token')}; PaSS on this machine: {choice}{hint}")
    if lookahead.hit_rates is None:
        console.print("These embeddings have no calibrated hit rates: the plan assumes some.")
    if verbose:
        console.print(f"\n[bold]Calls[/] of this model on this machine:\n{times}")
        console.print(f"Kept in {cache_folder()} for 30 days, unless other programs kept the CPU busy.\n")
        console.print("[bold]Plan[/] of a one-pass step, by those times, without n-gram candidates:")
        console.print(str(plan), markup=False, soft_wrap=True)
    console.print()


def _show_live(
    console: Console,
    model: Any,
    tokenizer: Any,
    lookahead: pass_ext.LookaheadEmbedding,
    prompt: Prompt,
    new_tokens: int,
) -> None:
    live = LiveText(console, tokenizer)
    console.print(f"[bold]{prompt.name}[/], by {JOINED}: {live.legend}")
    console.print(Text(prompt.shown, style="dim"), soft_wrap=True)
    stats = pass_ext.generate(model, prompt.ids, joined(lookahead), max_new_tokens=new_tokens, streamer=live).stats
    console.print(f"{stats.tokens} tokens by {stats.model_calls} model calls: {stats.tokens_per_call:.2f} per call\n")


def _check_fp32(model: Any, competing: Sequence[Contender], texts: Sequence[Prompt], status: Status) -> None:
    for text in texts:
        first: Run | None = None
        for contender in competing:
            status.update(f"fp32, {text.name}: {contender.name}")
            run = continued(model, contender, text.ids, EXACT_TOKENS)
            first = first or run
            if run.tokens != first.tokens:
                raise AssertionError(
                    f"fp32, {text.name}: {contender.name} made {run.tokens}, {competing[0].name} made {first.tokens}"
                )


def _timed(
    model: Any, competing: Sequence[Contender], texts: Sequence[Prompt], new_tokens: int, status: Status
) -> dict[str, list[Run]]:
    """Runs every method on every text after a warm-up, each text with another method first."""
    for contender in competing:
        status.update(f"warming up: {contender.name}")
        continued(model, contender, texts[0].ids, WARM_UP_TOKENS)
    runs: dict[str, list[Run]] = {contender.name: [] for contender in competing}
    for index, text in enumerate(texts):
        for contender in [*competing[index:], *competing[:index]]:
            status.update(f"{text.name}: {contender.name}")
            runs[contender.name].append(continued(model, contender, text.ids, new_tokens))
    return runs


def _agreements(exact: Any, texts: Sequence[Prompt], name: str, runs: dict[str, list[Run]]) -> list[Agreement]:
    agreements = []
    for index, text in enumerate(texts):

        def logits_after(tokens: Sequence[int], ids: Tensor = text.ids) -> Tensor:
            with torch.no_grad():
                return exact(torch.cat([ids, torch.tensor([tokens], dtype=ids.dtype)], dim=1)).logits[0, -1]

        plain, other = runs[PLAIN][index].tokens, runs[name][index].tokens
        agreements.append(agreement(plain, other, f"{text.name}: {name}", logits_after))
    return agreements


def _show_picture(console: Console, out: str, runs: dict[str, list[Run]], texts: Sequence[Prompt], title: str) -> None:
    try:
        draw(out, runs, [text.name for text in texts], title)
    except ImportError as error:
        console.print(f"No picture: it needs matplotlib, pip install 'pass_ext[train]' ({error})", markup=False)
    else:
        console.print(f"Picture: {out}")


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
