"""The record of a training run: a JSON file with all that made it, a card to read, and the loss curve as a picture."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def versions() -> dict[str, str]:
    """Of everything that a result may hang on."""
    found = {"python": platform.python_version()}
    for name in ("pass_ext", "torch", "transformers", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine(device: str) -> str:
    """The GPU, where that is the device of the run; else the processor and the threads."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    names = []
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(names or [platform.machine()])[0]}, {torch.get_num_threads()} threads"


def smoothed(losses: Sequence[float], width: int = 25) -> list[float]:
    """Running means over the last ``width`` losses."""
    return [sum(losses[max(0, at - width + 1) : at + 1]) / min(at + 1, width) for at in range(len(losses))]


def save_curve(losses: Sequence[float], path: Path) -> None:
    """The loss of every step and its running mean; the suffix (.svg, .png) decides the format."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "pass_ext"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="0.8", linewidth=0.8, label="each step")
    axes.plot(range(1, len(losses) + 1), smoothed(losses), color="tab:blue", label="mean of 25")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def row(cells: Sequence[str]) -> str:
    """Of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
