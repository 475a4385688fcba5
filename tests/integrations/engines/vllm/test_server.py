"""examples/vllm_server.py: a server with PaSS starts, and streams the text that it also gives at once."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress

import pytest
from support.paths import ROOT
from vllm_job import ENVIRONMENT, MOST_SECONDS

QUESTION = {"model": "model", "temperature": 0, "max_tokens": 40}
OPTIONS = ["--enforce-eager", "--max-model-len", "512"]
QUESTION["messages"] = [{"role": "user", "content": "List the planets of the solar system."}]


COMMAND = [sys.executable, ROOT / "examples" / "vllm_server.py"]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*COMMAND, "--port", str(port), *OPTIONS],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + MOST_SECONDS
        while time.monotonic() < deadline and server.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                yield address
                return
            time.sleep(1)
        pytest.fail(log.read_text()[-4000:])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def ask(address, **changes):
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        data=json.dumps({**QUESTION, **changes}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=MOST_SECONDS) as answer:
        return answer.read().decode()


def test_a_streamed_text_is_the_text_and_its_guesses_are_counted(address):
    whole = json.loads(ask(address))["choices"][0]["message"]["content"]
    lines = [
        line.removeprefix("data: ") for line in ask(address, stream=True).splitlines() if line.startswith("data: {")
    ]
    parts = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    assert "".join(parts) == whole and "Jupiter" in whole
    assert 4 < len([part for part in parts if part]) < 40, "a call gives a token, or several"
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        metrics = answer.read().decode()
    accepted = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total{")]
    assert float(accepted[0].split()[-1]) > 5


def test_a_wrong_option_ends_the_server_before_it_loads_a_model():
    ended = subprocess.run(
        [*COMMAND, "--drafts", "9", *OPTIONS],
        env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=MOST_SECONDS,
    )  # fmt: skip
    log = ended.stdout + ended.stderr
    assert ended.returncode != 0 and "EngineCore" not in log and "Loading" not in log
    assert "ValueError: PaSS: num_speculative_tokens must be at most 8, " in log[-600:]
