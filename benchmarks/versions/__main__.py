"""This version of pass_ext beside another checkout of it: the same texts, and how fast.

    ratio = the median over rounds of  seconds of the other version / seconds of this one,  for the same prompts, one after the
            other; which of them is first changes from round to round

Every round starts the versions anew, and this version twice: where a process's memory lies changes its times by some percent as
long as it lives. The ratio of this version's two processes shows how much, so a smaller difference says nothing.

    python -m benchmarks.versions FOLDER        FOLDER: a checkout with its library built, as `git worktree add` makes one

Prints a table, and keeps nothing. Measure on a quiet machine: the first line says how many cores all programs together had.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import CORES, ROOT
from benchmarks.decoding.prompts import DOMAINS, read_prompts
from benchmarks.decoding.race import in_turn
from benchmarks.grammar.tasks import TASKS
from benchmarks.harness import machine
from benchmarks.harness.markdown import table
from benchmarks.harness.template import page
from pass_ext.checkpoint import demo_model, load_checkpoint, safetensors_folder

WANTED = 0.98
THIS, AGAIN, OTHER = "this", "again", "other"


class Version:
    """A process that runs a checkout."""

    def __init__(self, checkout: Path, model: Path) -> None:
        code = (Path(__file__).parent / "worker.py").read_text()
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            text=True,
            preexec_fn=_on_all_cores if CORES else None,
        )
        package = Path(self._read()["package"])
        if package.parents[1].resolve() != checkout.resolve():
            raise SystemExit(f"benchmarks.versions: {checkout} ran {package}")

    def write(self, case: dict[str, Any]) -> dict[str, Any]:
        """The texts of one case."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"case": case}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("benchmarks.versions: a version ended without an answer; run worker.py by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def cases(tokenizer: Any) -> list[dict[str, Any]]:
    """All cases: a name, a method and the prompts."""
    prompts = [list(p.ids) for p in in_turn([read_prompts(domain, tokenizer, 11) for domain in DOMAINS])]
    made: list[dict[str, Any]] = []

    def add(
        name: str, method: str, ids: list[list[int]], tokens: int, temperature: float = 0.0, schema: Any = None
    ) -> None:
        made.append(
            {
                "name": name,
                "method": method,
                "prompts": ids,
                "tokens": tokens,
                "temperature": temperature,
                "schema": schema,
            }
        )

    for place, prompt in enumerate(prompts[:3]):
        for method in ("Plain", "NGram", "PaSS", "PaSS, adapters"):
            add(f"one text, {DOMAINS[place]}", method, [prompt], 128)
    for method in ("Plain", "PaSS"):
        add("one text, T 0.8", method, [prompts[2]], 128, temperature=0.8)
        for size, tokens in ((2, 96), (8, 64), (32, 32)):
            add(f"batch of {size}", method, prompts[:size], tokens)
        for length in (1000, 4000):
            long = [token for prompt in prompts * 8 for token in prompt][:length]
            add(f"prompt of {length:,}", method, [long], 64)
    task = TASKS[0]
    messages = [{"role": "user", "content": task.prompts[0]}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    for method in ("Plain", "PaSS"):
        add("JSON grammar", method, [tokenizer(text, add_special_tokens=False).input_ids], 128, schema=task.schema)
    return made


def measure(other: Path, rounds: int, only: str) -> dict[str, Any]:
    """The result."""
    from rich.progress import track

    path = demo_model()
    folder = safetensors_folder(path, torch.bfloat16)
    tokenizer = load_checkpoint(path, torch.bfloat16)[1]
    checkouts = {THIS: ROOT, AGAIN: ROOT, OTHER: other}
    chosen = [case for case in cases(tokenizer) if only in f"{case['name']}, {case['method']}"]
    seconds: list[dict[str, list[float]]] = [{name: [] for name in checkouts} for _ in chosen]
    started, used = time.monotonic(), _busy_seconds()
    for turn in range(rounds):
        names = sorted(checkouts, reverse=turn % 2 == 1)
        versions = {name: Version(checkouts[name], folder) for name in names}
        rows = []
        for case, times in track(list(zip(chosen, seconds, strict=True)), f"round {turn + 1} of {rounds}"):
            for version in versions.values():
                version.write({**case, "tokens": 16})
            last = {name: version.write(case) for name, version in versions.items()}
            for name, answer in last.items():
                times[name].append(round(answer["seconds"], 4))
            rows.append(
                {
                    "name": case["name"],
                    "method": case["method"],
                    "tokens": sum(map(len, last[THIS]["texts"])),
                    "seconds": times,
                    "calls": {name: last[name]["calls"] for name in (THIS, OTHER)},
                    "same": last[THIS]["texts"] == last[OTHER]["texts"],
                }
            )
        for version in versions.values():
            version.stop()
    elapsed, busy = time.monotonic() - started, _busy_seconds() - used
    return {
        **machine.describe_run(),
        "other": _commit_of(other),
        "model": path.name,
        "rounds": rounds,
        "cores_in_use": round(busy / elapsed, 2),
        "rows": rows,
    }


def render(result: dict[str, Any]) -> str:
    """The table."""
    lines = []
    for row in result["rows"]:
        this, other = row["seconds"][THIS], row["seconds"][OTHER]
        ratios = [b / a for a, b in zip(this, other, strict=True)]
        control = [b / a for a, b in zip(this, row["seconds"][AGAIN], strict=True)]
        speeds = [f"{row['tokens'] / median(seconds):.1f}" for seconds in (other, this)]
        calls = [str(row["calls"][name]) for name in (OTHER, THIS)]
        verdict = "" if median(ratios) >= min(WANTED, median(control)) else "slower"
        lines.append([
            row["name"], row["method"], *speeds, _ratio(ratios), _ratio(control), verdict, *calls,
            "same" if row["same"] else "OTHER",
        ])  # fmt: skip
    heads = [
        "case", "method", f"{result['other']}, tokens/s", "this, tokens/s", "ratio", "this beside itself",
        f"below {WANTED} and below itself", "its calls", "calls", "texts",
    ]  # fmt: skip
    return page(__file__, result, cases=table(heads, lines, left=2))


def _ratio(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} × ({min(ratios):.2f}–{max(ratios):.2f})"


def _on_all_cores() -> None:
    os.sched_setaffinity(0, CORES)  # this process is pinned to one, which a child would inherit


def _commit_of(checkout: Path) -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


def _busy_seconds() -> float:
    """Seconds that all cores were busy since the machine started."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Entry point of `python -m benchmarks.versions`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of the version to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose name and method hold this text")
    options = parser.parse_args()
    print(render(measure(options.other.resolve(), options.rounds, options.only)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
