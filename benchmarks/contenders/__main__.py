"""pass_ext's methods beside llama.cpp, vLLM's CPU build and transformers: one machine, one run, in turn.

    python -m venv .venv-contenders
    .venv-contenders/bin/pip install --no-binary llama-cpp-python -r benchmarks/contenders/requirements.txt
    python -m benchmarks.contenders

Takes about six minutes on a quiet machine, and refuses a busy one. Every finished round is kept in build/contenders/, and a run
that was cut off goes on from there. Writes results/<device>/contenders.json, .md and .svg; `--render` writes page and picture
alone, `--check` compares them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import CORES, ROOT
from benchmarks.contenders import page
from benchmarks.contenders.gguf_file import write_gguf
from benchmarks.contenders.process import Worker, WorkerFailed
from benchmarks.contenders.roster import Entry, Places, entries
from benchmarks.contenders.rounds import MOST_OTHERS, Race, others_now
from benchmarks.contenders.summary import judge
from benchmarks.contenders.workers import names
from benchmarks.decoding.prompts import DOMAINS, Prompt, read_prompts
from benchmarks.decoding.race import in_turn
from benchmarks.harness import machine
from benchmarks.harness.results import FORMAT, save
from benchmarks.serving.__main__ import demo_model

WORK = ROOT / "build" / "contenders"
STATE = WORK / "state.json"
MOST_PROMPTS = 16
"""Prompts of each domain, raced or not; the last one of a domain warms up."""
TOKENS_OF_PARTS = 96
"""Of the texts whose steps are taken apart; a quarter of it is the short text."""


def begun_state(key: dict[str, Any], fresh: bool) -> dict[str, Any]:
    """The state of the run that was cut off, if it had this key; else an empty one."""
    if STATE.exists() and not fresh:
        state: dict[str, Any] = json.loads(STATE.read_text())
        if state["key"] == key:
            return state
    return {"key": key, "sittings": 0, "rows": [], "skipped": [], "reasons": {}, "facts": {}, "parts": {}}


def most_others(beside: int, threads: int) -> float:
    """The share of the cores that other programs may take in a round that counts; more where processes run beside."""
    return MOST_OTHERS + min(1.0, beside / threads)


def started(listed: list[Entry], logs: Path, state: dict[str, Any], report: Any) -> dict[str, Worker]:
    """The workers that answer, started side by side."""
    workers = {
        entry.name: Worker(entry.python, entry.module, entry.options, entry.environment, logs / f"{number}.log")
        for number, entry in enumerate(listed)
    }
    with ThreadPoolExecutor(len(listed)) as pool:
        answers = {entry.name: pool.submit(workers[entry.name].answer, entry.most_seconds) for entry in listed}
    for name, answer in answers.items():
        try:
            state["facts"][name] = answer.result()
            state["reasons"].pop(name, None)
        except WorkerFailed as error:
            state["reasons"][name] = str(error)[:500]
            report(f"left out: {name}: {error}")
            workers.pop(name)
    return workers


def prompts_of(folder: Path) -> tuple[list[Prompt], Prompt, frozenset[int]]:
    """The prompts in turn, another one to warm up, and the model's end tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    by_domain = [read_prompts(domain, tokenizer, MOST_PROMPTS) for domain in DOMAINS]
    last = by_domain[-1].pop()
    ends = {tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])}
    return in_turn(by_domain), last, frozenset(ends)


def measure(options: argparse.Namespace, report: Any) -> dict[str, Any] | None:
    """Runs as many rounds as are missing and fit into the time; the result, or None while rounds are missing."""
    import torch

    from pass_ext.checkpoint import safetensors_folder

    load = os.getloadavg()[0]
    WORK.mkdir(parents=True, exist_ok=True)
    folder = safetensors_folder(options.model, torch.bfloat16)
    gguf = WORK / f"{Path(options.model).stem}-bfloat16.gguf"
    if options.llama_python and not gguf.exists():
        report("writing the weights in bfloat16 for llama.cpp")
        write_gguf(Path(options.model), gguf)
    if (others := others_now()) > MOST_OTHERS and not options.busy:
        raise SystemExit(f"the machine is busy: other programs take {others:.0%} of the cores; --busy measures anyway")
    prompts, warm_up, ends = prompts_of(folder)
    threads = len(CORES) or os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as scratch:
        step_times = Path(scratch, "step_times")
        places = Places(
            Path(sys.executable),
            options.llama_python,
            options.vllm_python,
            options.model,
            gguf,
            folder,
            step_times,
            threads,
        )
        listed = [e for e in entries(places, compiled=options.compiled) if e.name in names.OURS or not options.ours]
        key = {"commit": machine.commit(), "length": options.length, "beside": options.beside}
        key["names"] = [entry.name for entry in listed]
        state = begun_state(key, options.fresh)
        state["sittings"] += 1
        began = time.monotonic()

        def keep() -> None:
            STATE.write_text(json.dumps(state))

        workers, busy = started(listed, Path(scratch), state, report), list[subprocess.Popen[bytes]]()
        try:
            race = Race(workers, state, keep, report, options.length, ends, most_others(options.beside, threads))
            race.warm_up(warm_up)
            busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.beside)]
            missing = [entry.name for entry in listed if entry.shows_parts and entry.name not in state["parts"]]
            if missing and not busy:
                race.parts(missing, prompts[0], TOKENS_OF_PARTS)
            race.run(prompts, options.rounds, began + options.seconds)
            keep()
        finally:
            for process in busy:
                process.kill()
            for worker in workers.values():
                worker.stop()
    report(f"{race.undisturbed} undisturbed rounds of {options.rounds}, in {time.monotonic() - began:.0f} s")
    if race.undisturbed < options.rounds:
        return None
    result = {
        "format": FORMAT,
        "benchmark": page.NAME,
        "date": machine.now(),
        "commit": machine.commit(),
        "machine": machine.describe_machine(),
        "load_average": {"before": load, "after": os.getloadavg()[0]},
        "settings": {"model": Path(options.model).stem, "length": options.length, "threads": threads}
        | ({"beside": options.beside, "most_others": race.most_others} if options.beside else {}),
        **{name: state[name] for name in ("sittings", "skipped", "reasons", "facts", "parts", "rows")},
    }
    return result | {"aims": [asdict(aim) for aim in judge(result)]}


def main() -> int:
    """Entry point of `python -m benchmarks.contenders`."""
    options = parsed()
    console = Console(width=None if sys.stdout.isatty() else 140)
    if options.render or options.check:
        wrong = page.write(ROOT, check=options.check)
        for sentence in wrong:
            print(f"{sentence}: run python -m benchmarks.contenders --render", file=sys.stderr)
        return 1 if wrong else 0
    options.model = options.model or str(demo_model())
    result = measure(options, lambda words: console.print(words, highlight=False))
    if result is None:
        console.print("rounds are missing: run the command again, it goes on from here")
        return 1
    if not options.beside:
        file = options.out / machine.device_slug("cpu") / f"{page.NAME}.json"
        save(result, file)
        page.write_beside(file)
    STATE.unlink()
    console.print(page.render(result), markup=False, highlight=False)
    return 0


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, folder in (("llama", ".venv-contenders"), ("vllm", ".venv-vllm")):
        python = ROOT / folder / "bin" / "python"
        parser.add_argument(
            f"--{name}-python", type=Path, default=python if python.exists() else None, help=f"default: {folder}"
        )
    parser.add_argument("--model", help="GGUF file; default: the demo's model")
    parser.add_argument("--length", type=int, default=96, help="tokens of a text")
    parser.add_argument("--rounds", type=int, default=6, help="undisturbed rounds")
    parser.add_argument("--seconds", type=float, default=360, help="begin no round after so many seconds")
    parser.add_argument("--compiled", action="store_true", help="vLLM with torch.compile, too: minutes to start")
    parser.add_argument("--ours", action="store_true", help="pass_ext's methods alone")
    parser.add_argument(
        "--beside",
        type=int,
        default=0,
        help="so many processes that compute all the time run beside the contenders: prints the page, keeps no result",
    )
    parser.add_argument("--busy", action="store_true", help="start on a busy machine, too")
    parser.add_argument("--fresh", action="store_true", help="forget a run that was cut off")
    results = Path(os.environ.get("PASS_EXT_OUT", ROOT / "benchmarks" / "results"))
    parser.add_argument("--out", type=Path, default=results)
    parser.add_argument("--render", action="store_true", help="write page and picture of committed results alone")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is out of date")
    options = parser.parse_args()
    for name in ("llama_python", "vllm_python"):
        python = getattr(options, name)
        setattr(options, name, python and python.absolute())  # not resolved: a link names its environment
    return options


if __name__ == "__main__":
    sys.exit(main())
