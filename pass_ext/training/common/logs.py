"""Where the numbers of a run go while it trains: TensorBoard's files, wandb, trackio (``--log``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAMES = ("tensorboard", "wandb", "trackio")
_EXTRA = {"tensorboard": "'pass_ext[log]'"}


class Log(ABC):
    """Takes numbers by step."""

    @abstractmethod
    def add(self, step: int, values: Mapping[str, float]) -> None:
        """The values after so many steps."""

    @abstractmethod
    def close(self) -> None:
        """Nothing comes any more."""


class TensorBoard(Log):
    """Event files in a folder; ``step`` and later ones that an earlier, stopped part of the run wrote are hidden."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """A scalar of each."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


class Tracker(Log):
    """wandb or trackio, whose calls are the same."""

    def __init__(self, package: str, name: str, options: Mapping[str, Any]) -> None:
        self._package: Any = import_module(package)
        self._package.init(project="pass_ext", name=name, config=dict(options))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """The values, in one call."""
        self._package.log(dict(values), step=step)

    def close(self) -> None:
        """Ends the run there."""
        self._package.finish()


def check_logs(names: Sequence[str]) -> None:
    """Names a package that is missing, before anything is loaded."""
    for name in names:
        if find_spec(name) is None:
            raise SystemExit(f"--log {name} needs the package {name}: pip install {_EXTRA.get(name, name)}")


def open_logs(names: Sequence[str], out: Path, name: str, options: Mapping[str, Any], step: int) -> list[Log]:
    """The logs that ``--log`` names, of a run that has done ``step`` steps."""
    return [
        TensorBoard(out / "tensorboard" / name, step) if log == "tensorboard" else Tracker(log, name, options)
        for log in names
    ]
