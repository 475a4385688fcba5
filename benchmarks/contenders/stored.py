"""A GGUF file's own 4 and 8 bits beside llama.cpp on the same model: one machine, one run, in turn.

    pass_ext     the demo's file, in Q4_1 with embeddings in Q8_0: as it is, and converted to bfloat16
    llama.cpp    the file itself (Q4_1), and the model in Q4_0, Q8_0 and BF16, each by the wheel and, if it is there, built here

`python -m benchmarks.contenders.stored` takes about five minutes in the environment of `python -m benchmarks.contenders`, and
writes stored-contenders.json of the machine's folder of results. Texts of other formats are other texts: their numbers differ.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import CORES, ROOT
from benchmarks.contenders.__main__ import WORK, prompts_of, started
from benchmarks.contenders.gguf_file import write_gguf
from benchmarks.contenders.roster import Places, stored_entries
from benchmarks.contenders.rounds import MOST_OTHERS, Race
from benchmarks.contenders.summary import counted, lines
from benchmarks.harness import machine
from benchmarks.harness.results import FORMAT, save
from pass_ext.checkpoint import demo_model, safetensors_folder

NAME = "stored-contenders"
FORMATS = ("Q4_0", "Q8_0", "BF16")
"""That the demo's file is converted to."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The rounds of all contenders."""
    load, source = os.getloadavg()[0], demo_model()
    WORK.mkdir(parents=True, exist_ok=True)
    files = {"Q4_1": source} | {kind: WORK / f"{source.stem.partition('.')[0]}.{kind}.gguf" for kind in FORMATS}
    for kind in FORMATS:
        if not files[kind].exists():
            write_gguf(source, files[kind], kind)
    folder = safetensors_folder(source, torch.bfloat16)
    prompts, warm_up, ends = prompts_of(folder)
    threads = len(CORES) or os.cpu_count() or 1
    state: dict[str, Any] = {name: [] for name in ("rows", "skipped")} | {"reasons": {}, "facts": {}}
    with tempfile.TemporaryDirectory() as scratch:
        python, gguf = Path(sys.executable), files["BF16"]
        times = Path(scratch, "step_times")
        places = Places(python, options.llama_python, None, str(source), gguf, folder, times, threads)
        workers = started(stored_entries(places, files), Path(scratch), state, print)
        try:
            race = Race(workers, state, lambda: None, print, options.length, ends, options.most_others)
            race.warm_up(warm_up)
            race.run(prompts, options.rounds, time.monotonic() + options.seconds)
        finally:
            for worker in workers.values():
                worker.stop()
    return {
        "format": FORMAT,
        "benchmark": NAME,
        "date": machine.now(),
        "commit": machine.commit(),
        "machine": machine.describe_machine(),
        "load_average": {"before": load, "after": os.getloadavg()[0]},
        "settings": {"model": source.stem, "length": options.length, "threads": threads}
        | {"most_others": options.most_others},
        **state,
    }


def main() -> int:
    """Entry point of `python -m benchmarks.contenders.stored`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    python = ROOT / ".venv-contenders" / "bin" / "python"
    parser.add_argument("--llama-python", type=Path, default=python, help="default: .venv-contenders")
    parser.add_argument("--length", type=int, default=96, help="tokens of a text")
    parser.add_argument("--rounds", type=int, default=6, help="undisturbed rounds")
    parser.add_argument("--seconds", type=float, default=240, help="begin no round after so many seconds")
    words = "share of the cores that other programs may take in a round that counts"
    parser.add_argument("--most-others", type=float, default=MOST_OTHERS, help=words)
    options = parser.parse_args()
    options.llama_python = options.llama_python.absolute()  # not resolved: a link names its environment
    result = measure(options)
    save(result, ROOT / "benchmarks" / "results" / machine.device_slug("cpu") / f"{NAME}.json")
    for line in lines(counted(result)):
        print(f"{line['tokens_per_second'][0]:6.1f} tokens/s  {line['contender']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
