"""Runs vllm_job.py on raced prompts, in the Python of an environment with vLLM: another process, not interleaved."""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import CORES
from benchmarks.decoding.texts import first_difference

SCRIPT = Path(__file__).resolve().with_name("vllm_job.py")
MOST_SECONDS = 600


def run_vllm(
    python: str, model: Any, dtype: str, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], most: int
) -> dict[str, Any]:
    """vLLM's row for the prompts; `texts` are Plain's. Where vLLM fails, the row has a `reason` and no numbers."""
    ends = model.generation_config.eos_token_id
    row: dict[str, Any] = {"contender": "vLLM", "prompts": len(prompts), "process": "its own, not interleaved"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")
        job = {
            "model": str(folder / "model"),
            "device": model.device.type,
            "dtype": dtype,
            "max_new_tokens": most,
            "eos": [ends] if isinstance(ends, int) else list(ends or ()),
            "prompts": [list(ids) for ids in prompts],
        }
        (folder / "job.json").write_text(json.dumps(job))
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "PYTHONPATH"))}
        try:
            done = subprocess.run(
                [python, SCRIPT, folder / "job.json", folder / "result.json"],
                capture_output=True,
                text=True,
                timeout=MOST_SECONDS,
                env={**environment, "HF_HUB_OFFLINE": "1"},
                cwd=folder,
                preexec_fn=_on_all_cores if CORES else None,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return row | {"reason": f"{type(error).__name__}: no result"}
        if not (folder / "result.json").exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return row | {"reason": f"exit status {done.returncode}: {last[-200:]}"}
        result = json.loads((folder / "result.json").read_text())
    runs = result["runs"]
    tokens, seconds = sum(len(run["tokens"]) for run in runs), sum(run["seconds"] for run in runs)
    equal = sum(first_difference(t, r["tokens"]) is None for t, r in zip(texts, runs, strict=True))
    return row | {
        "versions": result["versions"],
        "cores": result["cores"],
        "tokens": tokens,
        "ms_per_token": 1e3 * seconds / tokens,
        "tokens_per_second": tokens / seconds,
        "equal_texts": equal,
    }


def _on_all_cores() -> None:
    os.sched_setaffinity(0, CORES)
