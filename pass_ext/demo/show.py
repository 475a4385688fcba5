"""The demonstration, in order: plan, live text, exactness in fp32, all contenders side by side, tables, picture."""

from __future__ import annotations

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
from pass_ext.cache_folder import cache_folder
from pass_ext.decoding.models.adapt import packed_model
from pass_ext.decoding.planning.for_lookahead import pass_plan
from pass_ext.demo.agreement import TIE, Agreement, agreement
from pass_ext.demo.contenders import PLAIN, Contender, Run, contenders, continued
from pass_ext.demo.live import LiveText
from pass_ext.demo.loading import Prompt, load_lookahead, load_model, prompts
from pass_ext.demo.picture import draw
from pass_ext.demo.report import agreement_table, speed_table

WARM_UP_TOKENS = 6
EXACT_TOKENS = 8  # of each text in fp32
EXACT_ROWS = 16  # of a PaSS step there, whatever is fastest


def show(model_path: str, lookahead_name: str | None, own_prompt: str | None, new_tokens: int, out: str) -> None:
    """All of it."""
    console = Console(highlight=False)
    with console.status(f"loading {Path(model_path).name}"):
        model, tokenizer = load_model(model_path)
    lookahead = load_lookahead(lookahead_name, model_path, model.get_input_embeddings().weight)
    texts = prompts(tokenizer, own_prompt)
    threads = _counted(torch.get_num_threads(), "thread")
    machine = f"CPU kernels {pass_ext.status().cpu_isa}, {threads}, torch {torch.__version__}"
    console.print(f"[bold]{Path(model_path).stem}[/] in bfloat16 · {machine}\n")
    if lookahead is None:
        console.print(
            "There are no look-ahead embeddings for this model, so PaSS is left out (--lookahead takes a file of them).\n"
        )
    else:
        _show_plan(console, model, lookahead)
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
    console.print(
        f"A tie: two tokens whose logits, in fp32, differ by no more than {TIE} steps of bfloat16 at the size of the largest "
        "logit (the difference is in brackets). Calls with other numbers of rows round otherwise.\n"
    )
    console.print("[bold]Speed[/], all texts, the prompts' calls included")
    console.print(speed_table(runs))
    console.print(
        f"One run each, {_counted(len(texts), 'text')}: a demonstration, not a measurement; the machine's other work is in it."
    )
    _show_picture(console, out, runs, texts, f"{Path(model_path).stem}, bfloat16, greedy · {machine}")


def _show_plan(console: Console, model: Any, lookahead: pass_ext.LookaheadEmbedding) -> None:
    with console.status("measuring the model's calls"):
        plan, times = pass_plan(pass_ext.PaSS(lookahead), packed_model(model), 1)
    console.print(f"[bold]Calls[/] of this model on this machine:\n{times}")
    console.print(f"Measured once, then kept in {cache_folder()} for 30 days, unless other programs were computing.\n")
    if lookahead.hit_rates is None:
        console.print("These embeddings have no calibrated hit rates: the plan assumes some.")
    console.print("[bold]Plan[/] of a one-pass step, by those times:")
    console.print(str(plan), markup=False, soft_wrap=True)
    if plan.is_plain:
        console.print("So PaSS decodes as Plain does here; two passes are planned apart.")
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
    console.print(f"[bold]{prompt.name}[/], by PaSS in one pass: {live.legend}")
    console.print(Text(prompt.shown, style="dim"), soft_wrap=True)
    made = pass_ext.generate(model, prompt.ids, pass_ext.PaSS(lookahead), max_new_tokens=new_tokens, streamer=live)
    console.print(f"{made.stats.tokens} tokens by {made.stats.model_calls} model calls\n")


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
    """Every contender on every text, warm, text by text, each text beginning with another contender."""
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
    found = []
    for index, text in enumerate(texts):

        def logits_behind(tokens: Sequence[int], ids: Tensor = text.ids) -> Tensor:
            with torch.no_grad():
                return exact(torch.cat([ids, torch.tensor([tokens], dtype=ids.dtype)], dim=1)).logits[0, -1]

        plain, other = runs[PLAIN][index].tokens, runs[name][index].tokens
        found.append(agreement(plain, other, f"{text.name}: {name}", logits_behind))
    return found


def _show_picture(console: Console, out: str, runs: dict[str, list[Run]], texts: Sequence[Prompt], title: str) -> None:
    try:
        draw(out, runs, [text.name for text in texts], title)
    except ImportError as error:
        console.print(f"No picture: it needs matplotlib, pip install 'pass_ext[train]' ({error})", markup=False)
    else:
        console.print(f"Picture: {out}")


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
