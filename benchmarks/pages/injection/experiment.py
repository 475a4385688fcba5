"""``Experiment``: trials of one question, with their data, windows, judged texts and table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pages.lookahead.slots import Text
from pass_ext.training.common.windows import Windows
from pass_ext.training.lookahead.loop import Settings


class Experiment(NamedTuple):
    """What differs between experiments. A trial is a dataclass with a seed, a name, and ``alone``, the trial of slots alone."""

    name: str
    result: Path
    part: str
    """The part of the page."""
    trials: Sequence[Any]
    """Slots alone stand before the trials that are compared with them."""
    settings: Settings
    data: Sequence[str]
    """Arguments of the training command."""
    windows: Callable[[Windows], Windows]
    texts: Callable[[list[Text]], list[Text]]
    """Those to judge, of texts that do not loop."""
    run: Callable[..., dict[str, Any]]
    """(trial, model, windows, settings, texts): a trial's part of the result."""
    bounds: Callable[[Any, Sequence[Text]], dict[str, Any]]
    """(model, texts): further entries of the result, measured without training."""
    render: Callable[[dict[str, Any]], str]
