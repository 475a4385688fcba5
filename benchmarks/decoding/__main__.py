"""Whole texts by a real model: pass_ext's methods against Plain and against transformers' generate.

The prompts are held out from training, in three domains. Texts that loop are kept apart. Tokens are greedy, or sampled at
temperature 0.8 with top-k 10. On some of the prompts: draft models; look-ahead depth, one pass against two, row budgets. Also
step times, the parts of a step, equality in float32 and, with --vllm-python, vLLM. benchmarks/README.md says what is counted.
"""

import argparse
import copy
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.decoding import page
from benchmarks.decoding.contenders import (
    ASSISTED,
    GREEDY,
    HF,
    OURS,
    PLAIN,
    SAMPLED,
    Setting,
    assisted_contender,
    contenders,
    method_contender,
)
from benchmarks.decoding.drafts import (
    CHAIN,
    DECISION,
    DRAFT,
    MCSD,
    SPECULATIVE,
    Drafts,
    draft_contender,
    entrants,
    judge_drafts,
    load_drafts,
    measured_rates,
    plans_of,
    summarise_drafts,
)
from benchmarks.decoding.prompts import DOMAINS, Prompt, read_prompts
from benchmarks.decoding.race import Limits, in_turn, one_round, race
from benchmarks.decoding.steps import profile, step_times
from benchmarks.decoding.summary import judge, summarise, summarise_agreement, summarise_sweep
from benchmarks.decoding.texts import DEFINITION, first_difference, loops
from benchmarks.decoding.vllm_process import run_vllm
from benchmarks.harness.cases import Contender, Row
from benchmarks.harness.command import parse, provenance, result_path
from benchmarks.harness.plan import DTYPES
from benchmarks.harness.results import save

NAME = "decoding"
# Part of the run -> the share of --seconds after which it begins no further text.
UNTIL = {
    "greedy": 0.38,
    "sampled": 0.5,
    "drafts": 0.68,
    "sampled drafts": 0.79,
    "sweep": 0.91,
    "assisted": 0.95,
    "agreement": 1.0,
}
ROW_BUDGETS = (4, 8, 16, 24, 32, "auto")
MOST_SLOTS = 8
CALIBRATED = 6
"""Texts to measure hit rates on, for a draft model without any."""


class Run:
    """One run of the benchmark: its models, its prompts and its clock."""

    def __init__(
        self, options: argparse.Namespace, model: Any, tokenizer: Any, lookahead: Any, drafts: Drafts, report: Any
    ) -> None:
        self.options, self.model, self.lookahead, self.drafts, self.report = options, model, lookahead, drafts, report
        self.draft_model = drafts.of(model) if drafts.of else None
        self.started = time.monotonic()
        self.left_out: list[str] = []
        self.part_seconds: dict[str, float] = {}
        most = 4 if options.quick else 28 if options.device == "cpu" else 64
        self.prompts = in_turn([read_prompts(domain, tokenizer, most) for domain in DOMAINS])
        self.by_name = {(prompt.domain, prompt.name): prompt for prompt in self.prompts}

    def out_of_time(self, part: str) -> bool:
        """True if the part's time is up; then it is listed as left out."""
        if time.monotonic() - self.started <= UNTIL[part] * self.options.seconds:
            return False
        if part not in self.left_out:
            self.left_out.append(part)
        return True

    def limits(self, part: str, straight: int, looping: int) -> Limits:
        """The limits of one race."""
        return Limits(self.options.tokens, straight, looping, lambda: self.out_of_time(part))

    def some(self, seen: Sequence[Row], each: int) -> list[Prompt]:
        """Up to `each` raced prompts per domain whose texts do not loop; if there is none at all, any raced prompt."""
        raced = [entry for entry in seen if entry["raced"]]
        straight = [entry for entry in raced if not entry["looping"]] or raced
        chosen = []
        for domain in DOMAINS:
            names = [entry["prompt"] for entry in straight if entry["domain"] == domain]
            chosen.append([self.by_name[domain, name] for name in names[:each]])
        return in_turn(chosen)


def sweep_methods(lookahead: Any) -> dict[str, Any]:
    """Name -> method: every depth and every row budget, with one pass and with two."""
    import pass_ext

    slots = range(1, min(lookahead.num_lookahead, MOST_SLOTS) + 1)
    methods: dict[str, Any] = {PLAIN: pass_ext.Plain()}
    for passes, word in ((1, "one pass"), (2, "two passes")):
        for count in slots:
            methods[f"{word}, L = {count}"] = pass_ext.PaSS(lookahead, passes=passes, slots=count)
    for passes, word in ((1, "one pass"), (2, "two passes")):
        for rows in ROW_BUDGETS:
            methods[f"{word}, rows = {rows}"] = pass_ext.PaSS(lookahead, passes=passes, rows=rows)
    return methods


def sweep(run: Run, prompts: Sequence[Prompt]) -> list[Row]:
    """The rows of `sweep_methods` on some prompts, interleaved."""
    from pass_ext.decoding.models.any_model import packed_model
    from pass_ext.decoding.planning.plan import pass_plan

    methods = sweep_methods(run.lookahead)
    if run.options.quick:
        methods = {name: methods[name] for name in list(methods)[:: len(methods) // 3]}
    model = packed_model(run.model)
    plan = {name: pass_plan(method, model, 1, greedy=True)[0] for name, method in methods.items() if name != PLAIN}
    raced = [method_contender(name, run.model, method) for name, method in methods.items()]
    places = {name: place for place, name in enumerate(methods)}
    runs = rounds(run, "sweep", prompts, raced, run.options.tokens)
    for row in runs:
        row["order"] = places[row["contender"]]
    return summarise_sweep(runs, plan)


def rounds(
    run: Run,
    part: str,
    prompts: Sequence[Prompt],
    raced: Sequence[Contender],
    most: int,
    setting: Setting = GREEDY,
) -> list[Row]:
    """Rows of contenders, Plain first, on prompts with the seeds of the races, so that Plain writes the same texts."""
    order = random.Random(0)
    runs: list[Row] = []
    for prompt in prompts:
        if runs and run.out_of_time(part):
            break
        seed = run.prompts.index(prompt)
        text = raced[0](prompt.ids, setting, seed, most).tokens
        runs += one_round(prompt, raced, setting, seed, most, order, text, run.report)
    return runs


def drafting_contenders(run: Run, setting: Setting, rates: Any = None) -> tuple[list[Any], list[Contender]]:
    """The entrants of the part with a draft model, and their contenders."""
    some = entrants(setting, run.lookahead, run.draft_model, run.drafts.decision, rates)
    return some, [draft_contender(run.model, entrant) for entrant in some]


def drafts(run: Run, part: Any, greedy: Sequence[Prompt], sampled: Sequence[Prompt]) -> dict[str, Any]:
    """The part with a draft model, on some prompts of each race."""
    rates, words = part("hit rates", lambda: rates_of_drafts(run, greedy))
    rows: list[Row] = []
    texts: list[Row] = []
    for name, prompts, setting in (("drafts", greedy, GREEDY), ("sampled drafts", sampled, SAMPLED)):
        if prompts:
            more_rows, more_texts = part(name, partial(with_drafts, run, name, prompts, setting, rates))
            rows, texts = rows + more_rows, texts + more_texts
    draft = {"names": dict(run.drafts.names), "missing": dict(run.drafts.missing), "hit_rates": words}
    return {"draft": draft, "drafts": rows, "draft_runs": texts}


def with_drafts(
    run: Run, part: str, prompts: Sequence[Prompt], setting: Setting, rates: Any
) -> tuple[list[Row], list[Row]]:
    """The rows of one setting, and those of every single text."""
    some, raced = drafting_contenders(run, setting, rates)
    if run.model.device.type == "cuda":  # these contenders have their own sessions and graphs
        warm_up(run, [(setting, contender) for contender in raced])
    plans = plans_of(some, run.model)
    runs = rounds(run, part, prompts, raced, run.options.tokens, setting)
    few = run.options.tokens // 4
    profiles = [profile(contender, prompts[:1], setting, few, run.model.device) for contender in raced]
    return summarise_drafts(runs, some, profiles, plans), runs


def rates_of_drafts(run: Run, raced: Sequence[Prompt]) -> tuple[Any, str]:
    """Hit rates for a draft model without any, measured on prompts that are not raced; and where rates come from, in words."""
    if run.draft_model is None:
        return None, ""
    if getattr(run.draft_model, "hit_rates", None):
        return None, "its own"
    plain = method_contender(PLAIN, run.model, None)
    texts, lengths = [], []
    for prompt in run.prompts:
        if prompt in raced or len(texts) == CALIBRATED:
            continue
        written = plain(prompt.ids, GREEDY, 0, run.options.tokens).tokens
        if not loops(written):
            texts.append([*prompt.ids, *written])
            lengths.append(len(prompt.ids))
    if not texts:
        return None, "guessed"
    return measured_rates(run.model, run.draft_model, texts, lengths), f"of {len(texts)} texts of other prompts"


def agreement(run: Run, prompts: Sequence[Prompt], most: int) -> list[Row]:
    """Compares texts in float32 with transformers' greedy ones."""
    model = run.model if run.model.dtype == torch.float32 else copy.deepcopy(run.model).float()
    everyone = contenders(model, run.lookahead)
    reference = next(contender for contender in everyone if contender.name == HF)
    ours = [contender for contender in everyone if contender.name in OURS]
    if run.drafts.of is not None:
        some = entrants(GREEDY, run.lookahead, run.drafts.of(model), None)
        kinds = (f"{SPECULATIVE}, chain of {CHAIN}", MCSD)
        ours += [draft_contender(model, entrant) for entrant in some if entrant.kind in kinds]
    runs: list[Row] = []
    for prompt in prompts:
        if runs and run.out_of_time("agreement"):
            break
        run.report(f"float32: {prompt.domain} {prompt.name}")
        text = reference(prompt.ids, GREEDY, 0, most).tokens
        for contender in ours:
            tokens = contender(prompt.ids, GREEDY, 0, most).tokens
            differs_at = first_difference(text, tokens)
            runs.append({"contender": contender.name, "tokens": len(tokens), "differs_at": differs_at})
    return summarise_agreement(runs)


def beside(run: Run, runs: Sequence[Row], seen: Sequence[Row]) -> Row:
    """The row of vLLM, on prompts of the greedy race."""
    prompts = run.some(seen, 1 if run.options.quick else 3)
    plain = method_contender(PLAIN, run.model, None)
    texts = [plain(prompt.ids, GREEDY, 0, run.options.tokens).tokens for prompt in prompts]
    ids = [prompt.ids for prompt in prompts]
    row = run_vllm(run.options.vllm_python, run.model, run.options.dtype, ids, texts, run.options.tokens)
    chosen = {(prompt.domain, prompt.name) for prompt in prompts}
    theirs = [r for r in runs if r["contender"] == PLAIN and (r["domain"], r["prompt"]) in chosen]
    row["plain_ms_per_token"] = 1e3 * sum(r["seconds"] for r in theirs) / sum(r["tokens"] for r in theirs)
    return row


def measure(run: Run) -> dict[str, Any]:
    """Runs every part in order; the lists of a result."""
    options, model = run.options, run.model
    result: dict[str, Any] = {}

    def part(name: str, do: Callable[[], Any]) -> Any:
        started = time.monotonic()
        run.report(name)
        value = do()
        run.part_seconds[name] = round(time.monotonic() - started, 1)
        return value

    raced = contenders(model, run.lookahead)
    assisted = assisted_contender(model, options.assistant_layers)
    part(
        "warm-up",
        lambda: warm_up(
            run,
            [(GREEDY, c) for c in [*raced, assisted, *drafting_contenders(run, GREEDY)[1]]]
            + [(SAMPLED, c) for c in [*raced, *drafting_contenders(run, SAMPLED)[1]]],
        ),
    )
    result["steps"] = part("steps", lambda: step_times(model, 3 if options.quick else 15))
    straight, looping = options.prompts, -(-options.prompts // 4)
    limits = run.limits("greedy", straight, looping)
    seen, runs = part("greedy", lambda: race(run.prompts, raced, GREEDY, limits, run.report))
    if not runs:
        raise SystemExit("Plain ended every text too soon: no prompt can be raced")
    limits = run.limits("sampled", -(-straight // 2), 0 if options.quick else 1)
    sampled_seen, sampled_runs = part("sampled", lambda: race(run.prompts, raced, SAMPLED, limits, run.report))
    most = 1 if options.quick else 9 if options.device == "cpu" else 15
    result |= drafts(run, part, run.some(seen, most)[:most], run.some(sampled_seen, most)[:most])
    some = run.some(seen, 1 if options.quick else 2)
    result["sweep"] = part("sweep", lambda: sweep(run, some))
    shown, half = some[: len(DOMAINS)], options.tokens // 2
    few = [contender for contender in raced if contender.name in (PLAIN, HF)] + [assisted]
    assisted_runs = part("assisted", lambda: rounds(run, "assisted", shown, few, half, ASSISTED))
    ours = [contender for contender in raced if contender.name in OURS]
    result["profile"] = part("profile", lambda: [profile(c, shown, GREEDY, half, model.device) for c in ours])
    whole = model.dtype == torch.float32
    checked = run.some(seen, options.prompts) if whole else shown
    most = options.tokens if whole else half
    result["agreement"] = part("agreement", lambda: agreement(run, checked, most))
    if options.vllm_python:
        result["beside"] = [part("vLLM", lambda: beside(run, runs, seen))]
    runs = runs + sampled_runs + assisted_runs
    result |= {"prompts": seen + sampled_seen, "runs": runs, "rows": summarise(runs)}
    return result


def warm_up(run: Run, some: Sequence[tuple[Any, Contender]]) -> None:
    """Writes a few tokens by each contender: compiles, measures step times for `rows="auto"`, allocates."""
    for setting, contender in some:
        run.report(f"warm-up: {contender.name}")
        contender(run.prompts[0].ids, setting, 0, 8)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument("--model", help="a GGUF file, or a name or folder for from_pretrained; default: the demo model")
    parser.add_argument(
        "--lookahead", default="smollm2-135m-instruct-slots", help="trained embeddings: a name or a file"
    )
    parser.add_argument(
        "--prompts", type=int, help="prompts per domain whose texts do not loop; default 7, on a GPU 16"
    )
    parser.add_argument("--tokens", type=int, help="tokens of each text; default 128")
    parser.add_argument(
        "--assistant-layers", type=int, default=20, help="layers of the model in transformers' assistant"
    )
    parser.add_argument(
        "--draft", help=f"draft model: exit:NAME, exit:LAYERS, or as --model; default: {DRAFT}, where it exists"
    )
    parser.add_argument("--decision", help=f"decision model: a name or a file; default: {DECISION}, where it exists")
    parser.add_argument("--vllm-python", help="the python of an environment with vLLM")


def load(options: argparse.Namespace) -> tuple[Any, Any, Any, Drafts]:
    """Loads the model, its tokenizer, its look-ahead embeddings and its draft models."""
    import pass_ext
    from pass_ext.checkpoint import demo_model, load_checkpoint

    path = options.model
    if path is None:
        try:
            path = demo_model()
        except FileNotFoundError as error:
            raise SystemExit(str(error)) from error
    model, tokenizer = load_checkpoint(path, DTYPES[options.dtype], weights="dense")
    model = model.to(options.device)
    name = options.lookahead
    embedding = pass_ext.LookaheadEmbedding
    lookahead = embedding.load(name) if Path(name).is_file() else embedding.from_pretrained(name)
    return model, tokenizer, lookahead, load_drafts(options, model, tokenizer)


def describe_model(options: argparse.Namespace, model: Any, lookahead: Any) -> Row:
    """The `model` entry of a result; without paths."""
    return {
        "name": Path(options.model).name if options.model else "SmolLM2-135M-Instruct (Q4_1, dequantized)",
        "architecture": model.config.model_type,
        "parameters": sum(p.numel() for p in model.parameters()),
        "lookahead": Path(options.lookahead).name,
        "slots": lookahead.num_lookahead,
    }


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `python -m benchmarks.decoding`."""
    options = parse(__doc__, arguments, add_options)
    options.prompts = options.prompts or (1 if options.quick else 7 if options.device == "cpu" else 16)
    options.tokens = options.tokens or (24 if options.quick else 128)
    options.seconds = options.seconds or (30 if options.quick else 1400)
    begun, load_average = provenance(NAME, options.quick, options.device), os.getloadavg()[0]
    console = Console(width=None if sys.stdout.isatty() else 160)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    with progress, tempfile.TemporaryDirectory() as step_times_folder:
        task = progress.add_task("loading the model", total=options.seconds)
        model, tokenizer, lookahead, drafts = load(options)
        began = time.monotonic()
        # rows="auto" plans by step times. This folder is empty, so they are measured now.
        os.environ["PASS_EXT_CACHE"] = step_times_folder

        def report(words: str) -> None:
            progress.update(task, description=words, completed=min(time.monotonic() - began, options.seconds))

        run = Run(options, model, tokenizer, lookahead, drafts, report)
        measured = measure(run)
    import transformers

    result = {
        **begun,
        "versions": begun["versions"] | {"transformers": transformers.__version__},
        "load_average": {"before": load_average, "after": os.getloadavg()[0]},
        "model": describe_model(options, model, lookahead),
        "settings": {
            "dtype": options.dtype,
            "threads": torch.get_num_threads(),
            "omp_proc_bind": os.environ.get("OMP_PROC_BIND"),
            "tokens": options.tokens,
            "prompts": options.prompts,
            "seconds": options.seconds,
            "seed": 0,
            "looping": DEFINITION,
        },
        "part_seconds": run.part_seconds,
        "left_out": [f"further prompts of {part}" for part in run.left_out],
        **measured,
        "aims": [
            vars(aim)
            for aim in [
                *judge(measured["rows"], measured["agreement"], options.device),
                *judge_drafts(measured["drafts"]),
            ]
        ],
    }
    page.show(result, console)
    path = result_path(NAME, options)
    if path is not None:
        save(result, path)
        console.print(f"written: {path}")


if __name__ == "__main__":
    main()
