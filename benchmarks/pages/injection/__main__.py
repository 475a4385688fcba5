"""Trains look-ahead slots alone and with something added to their rows, judges both on held-out texts, and writes a table of
docs/guide/training.md.

    hidden    hidden states of their anchors, at the input of some layers
    noise     the uniform numbers that draw the tokens before those that they predict

`python -m benchmarks.pages.injection --model MODEL [hidden | noise]` trains and keeps the result in
benchmarks/results/pretrained; stopped, it goes on with the trial that is missing in --out. `--render` only writes the table,
`--check` compares it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.decoding.prompts import DOMAINS
from benchmarks.harness import machine
from benchmarks.harness.markdown import has_part, replace_part
from benchmarks.pages.injection.experiment import Experiment
from benchmarks.pages.injection.noise import page as noise_page
from benchmarks.pages.injection.noise import trial as noise
from benchmarks.pages.injection.noise.guesses import guesses
from benchmarks.pages.injection.noise.windows import SampledWindows
from benchmarks.pages.injection.page import NAME, PAGE, render
from benchmarks.pages.injection.summary import summary
from benchmarks.pages.injection.trial import Trial, run_trial
from benchmarks.pages.lookahead.slots import SLOTS, Text, texts_of
from pass_ext.training.common.run import load_run
from pass_ext.training.common.windows import windows_of
from pass_ext.training.lookahead import command
from pass_ext.training.lookahead.loop import Settings

RESULTS = ROOT / "benchmarks/results/pretrained"
SMALL = "smollm2-135m-instruct"
TRIALS = (
    Trial(SMALL),
    Trial(SMALL, (10,), 32, 0.004),
    Trial(SMALL, (5, 10, 15), 32, 0.004),
)
NOISE_TRIALS = (
    noise.NoiseTrial(SMALL, transitions=True),
    noise.NoiseTrial(SMALL, transitions=True, rate=0.003),
    noise.NoiseTrial(SMALL, transitions=False),
    noise.NoiseTrial(SMALL, transitions=False, rate=0.003),
)
SETTINGS = Settings(
    steps=100,
    learning_rate=0.003,
    transition_learning_rate=0.001,
    deep_learning_rate=0.003,
    warm_up=10,
    decay=0.8,
    clip=1.0,
    loss="kl",
)
SAMPLES = (
    *("--data", "stdlib", "--self-distill", "shipped", "--continuations", "192", "--own-chats", "96"),
    *("--held-out", "16", "--dtype", "bfloat16", "--batch", "1"),
)
"""Arguments of the training command, as --anchors and --length."""
TEXTS, TOKENS = 12, 72
"""Judged texts of each domain and temperature at most, and their tokens."""


def measure(experiment: Experiment, model: str, out: Path) -> dict[str, Any]:
    """The result; each trial's part stays in ``out``."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    data = [*experiment.data, "--lookahead", str(SLOTS)]
    words = ["--model", model, *data, "--out", str(out)]
    commit = machine.commit()
    run = load_run(parser.parse_args(words), words)
    texts = run.texts()
    windows = experiment.windows(
        windows_of(run, texts, batch=run.options.batch, anchors=run.options.anchors, lookahead=SLOTS)
    )
    judged_texts = experiment.texts(texts_to_judge(run.model, run.tokenizer, out / f"texts-{TEXTS}-{TOKENS}.json"))
    parts: dict[Any, dict[str, Any]] = {}
    for trial in experiment.trials:
        file = out / f"{trial.name}.json"
        if not file.exists():
            seeded = dataclasses.replace(windows, seed=trial.seed)
            part = experiment.run(trial, run.model, seeded, experiment.settings, judged_texts)
            file.write_text(json.dumps({"date": machine.now(), "commit": commit, **part}) + "\n")
        parts[trial] = json.loads(file.read_text())
        print(trial.name, parts[trial]["loss"], row(parts, trial)["judged"], flush=True)
    return {
        "command": shlex.join(
            ["python", "-m", "benchmarks.pages.injection", "--model", Path(model).name, experiment.name]
        ),
        "training options": shlex.join(data),
        "settings": dataclasses.asdict(experiment.settings),
        "machine": machine.describe_cpu(),
        "versions": machine.describe_versions(),
        "model": Path(model).name,
        "data": texts.description,
        "tokens": TOKENS,
        "texts": {
            domain: {
                kind: sum((text.domain, text.kind) == (domain, kind) for text in judged_texts)
                for kind in kinds(judged_texts)
            }
            for domain in DOMAINS
        },
        "rows": [row(parts, trial) for trial in experiment.trials],
        **experiment.bounds(run.model, judged_texts),
    }


def texts_to_judge(model: Any, tokenizer: Any, file: Path) -> list[Text]:
    """Texts that do not loop, from the file or written now."""
    if not file.exists():
        each = [texts_of(model, tokenizer, domain, wanted=TEXTS, tokens=TOKENS) for domain in DOMAINS]
        file.write_text(json.dumps([text for texts in each for text in texts if "loops" not in text.kind]) + "\n")
    return [Text(*fields) for fields in json.loads(file.read_text())]


def kinds(texts: list[Text]) -> list[str]:
    """The kinds of the texts, each once."""
    return list(dict.fromkeys(text.kind for text in texts))


def row(parts: dict[Any, dict[str, Any]], trial: Any) -> dict[str, Any]:
    """A trial's row of the result."""
    part = parts[trial]
    others = {} if trial == trial.alone else parts[trial.alone]["judged"]
    judged = {scores: summary(texts, others.get(scores)) for scores, texts in part["judged"].items()}
    return {**dataclasses.asdict(trial), **part, "judged": judged}


HIDDEN = Experiment(
    "hidden",
    RESULTS / "injection.json",
    NAME,
    TRIALS,
    SETTINGS,
    (*SAMPLES, "--anchors", "64"),
    windows=lambda windows: windows,
    texts=list,
    run=run_trial,
    bounds=lambda model, texts: {},
    render=render,
)
NOISE = Experiment(
    "noise",
    RESULTS / "noise.json",
    noise_page.NAME,
    NOISE_TRIALS,
    dataclasses.replace(SETTINGS, steps=80),
    (*SAMPLES, "--anchors", "32", "--length", "160"),
    windows=lambda windows: SampledWindows.at_temperature(windows, noise.TEMPERATURE),
    texts=noise.drawn_texts,
    run=noise.run_trial,
    bounds=lambda model, texts: guesses(model, SMALL, texts, noise.TEMPERATURE),
    render=noise_page.render,
)
EXPERIMENTS = {experiment.name: experiment for experiment in (HIDDEN, NOISE)}


def main() -> int:
    """Entry point of `python -m benchmarks.pages.injection`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("added", nargs="?", choices=list(EXPERIMENTS), default=HIDDEN.name, help="what rows get")
    parser.add_argument("--model", help="a GGUF file, or a transformers model folder or name")
    parser.add_argument("--out", type=Path, default=ROOT / "build/injection", help="folder of samples and trials")
    parser.add_argument("--render", action="store_true", help="train nothing")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args()
    experiment = EXPERIMENTS[options.added]
    if not (options.render or options.check):
        if options.model is None:
            raise SystemExit("give --model")
        experiment.result.write_text(json.dumps(measure(experiment, options.model, options.out), indent=1) + "\n")
    text = experiment.render(json.loads(experiment.result.read_text()))
    if options.check:
        return 0 if has_part(PAGE.read_text(), experiment.part, text) else 1
    PAGE.write_text(replace_part(PAGE.read_text(), experiment.part, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
