"""How long a step takes, by its rows.

``measure`` times a model's calls, and ``measured_times`` does so once per model and machine and keeps the times on disk:

    t(rows)        piecewise linear through the fastest rounds, never falling, the last slope continued: other programs only add
                   time, so the fastest round is nearest to the truth

``StepClock`` corrects them by the steps themselves:

    seconds(rows)  t(rows) · ratio, the lower median of seconds / t(rows) over the last plain steps or the last drafted ones,
                   where steps with just as many rows are known, theirs count with it

While one kind is unknown, the other stands for it: a machine that is busy, or a text that is long, slows both. Of a few drafted
steps the fastest tells what drafting adds. Plain steps are forgotten once drafted ones are faster than they were beside them:
the machine is less busy, and drafting would look cheap.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median_low
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from pass_ext._library import kernels_hash, status
from pass_ext.checkpoint import cache_folder
from pass_ext.decoding.methods import MAX_PLANNED_ROWS
from pass_ext.decoding.models.encoders import some_inputs
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.planning.constants import (
    FEWEST_DRAFTED,
    FEWEST_PLAIN,
    OLDEST,
    REMEMBERED,
    REMEMBERED_OF_ROWS,
    STILL_AS_SLOW,
)
from pass_ext.decoding.session.past import take_encoded
from pass_ext.decoding.session.session import Session
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.tree import Tree, pack_trees

_log = logging.getLogger("pass_ext")
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 15
_FORMAT = 3
_PREFIX = 256  # tokens of text before the measured rows

_times: dict[tuple[Any, ...], StepTimes] = {}
"""Times by model, device, threads, and kind of calls."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one call at two or more ascending numbers of rows. A number that took longer than a larger one gets the larger
    one's time, because disturbances only add time."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rows, seconds = tuple(map(int, self.rows)), list(map(float, self.seconds))
        if len(rows) < 2 or rows[0] < 1 or list(rows) != sorted(set(rows)) or len(rows) != len(seconds):
            raise ValueError(
                f"rows must be two or more ascending numbers, one for each of seconds, got {rows}, {seconds}"
            )
        if not all(0 < value < math.inf for value in seconds):
            raise ValueError(f"seconds must be above 0, got {seconds}")
        for index in reversed(range(len(rows) - 1)):
            seconds[index] = min(seconds[index : index + 2])
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "seconds", tuple(seconds))

    def at(self, rows: int) -> float:
        """Seconds of one call at this number of rows; below the smallest measured number, that number's seconds."""
        if rows <= self.rows[0]:
            return self.seconds[0]
        above = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        left, right = self.rows[above - 1 : above + 1]
        low, high = self.seconds[above - 1 : above + 1]
        return low + (high - low) * (rows - left) / (right - left)

    def __str__(self) -> str:
        return ", ".join(f"{r} rows {1e3 * s:.2f} ms" for r, s in zip(self.rows, self.seconds, strict=True))


@dataclass
class Trials:
    """How drafting has fared (pace.py)."""

    lost: int = 0
    """Trials in a row in which it has lost, those of the texts before too."""


class StepClock:
    """Seconds of steps, and how drafting has fared.

    Args:
        table: the measured seconds of calls by their rows.
        trials: shared with clocks of texts of other lengths.
    """

    def __init__(self, table: StepTimes, trials: Trials | None = None) -> None:
        self.table = table
        self.trials = Trials() if trials is None else trials
        # when, seconds / t(rows)
        self._plain: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self._drafted: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self._of_rows: dict[int, deque[tuple[float, float]]] = defaultdict(partial(deque, maxlen=REMEMBERED_OF_ROWS))
        self._beside: float | None = None  # seconds / t(rows) of drafted steps beside the last plain ones

    def add(self, rows: int, seconds: float, *, is_plain: bool) -> None:
        """Counts a step by the rows of all requests together."""
        sample = time.perf_counter(), seconds / self.table.at(rows)
        if is_plain:
            self._plain.append(sample)
            self._beside = None
            return
        self._drafted.append(sample)
        self._of_rows[rows].append(sample)
        drafted = _lately(self._drafted)
        if len(drafted) < FEWEST_DRAFTED:
            return
        if self._beside is None:
            self._beside = median_low(drafted)
        elif median_low(drafted) < STILL_AS_SLOW * self._beside:
            self._plain.clear()

    @property
    def knows_plain(self) -> bool:
        """True if enough plain steps were timed lately."""
        return len(_lately(self._plain)) >= FEWEST_PLAIN

    @property
    def knows_drafted(self) -> bool:
        """True if a drafted step was timed lately."""
        return bool(_lately(self._drafted))

    def seconds(self, rows: int, *, is_plain: bool = False) -> float:
        """Seconds of a step by the rows of all requests together."""
        plain, drafted = _lately(self._plain), _lately(self._drafted)
        if is_plain:
            known = plain or drafted
        elif plain and len(drafted) < FEWEST_DRAFTED:
            known = [max(median_low(plain), min(drafted, default=0.0))]
        else:
            known = drafted
            own = _lately(self._of_rows[rows]) if rows in self._of_rows else []
            known = [median_low(known), *own] if own else known
        return self.table.at(rows) * (median_low(known) if known else 1.0)


@lru_cache(maxsize=64)
def step_clock(table: StepTimes, tokens: int, drafts: int) -> StepClock:
    """The clock of texts of about so many tokens, a power of two: attention takes longer after a long text. drafts: a number
    for what drafts. The last 64 clocks are kept, so a generation begins with the steps of the one before."""
    return StepClock(table, _trials(table, drafts))


@lru_cache(maxsize=64)
def _trials(table: StepTimes, drafts: int) -> Trials:
    """Of texts of any length."""
    return Trials()


def _lately(samples: deque[tuple[float, float]]) -> list[float]:
    oldest = time.perf_counter() - OLDEST
    return [ratio for when, ratio in samples if when >= oldest]


def measured_times(model: Adapted, *, graphs: bool = False, lookahead: LookaheadEmbedding | None = None) -> StepTimes:
    """Seconds of a call by its rows, after a short prefix; measured once per model and machine, then read from disk. A callable
    without a config cannot be recognised in another process, so it is measured once per object.

    lookahead: with adapters, half the rows of a call are slots, so that the times hold the work of these.
    """
    if model.logit_shards is not None:
        raise ValueError(
            f"{model.name}: rows must be a number under tensor parallelism, such as PaSS(slots, rows=24), got 'auto': "
            "ranks that measure their own step times would choose different trees"
        )
    fingerprint, work = _fingerprint(model), " in graphs" if graphs else ""
    if lookahead is None or lookahead.adapters is None:
        lookahead = None
    else:  # the sizes of adapters decide their time
        sizes = sorted(lookahead.adapters.sizes.items()), lookahead.adapters.count, lookahead.num_lookahead
        work += f" with adapters {hashlib.sha256(str(sizes).encode()).hexdigest()}"
    key = fingerprint or id(model.model), str(model.table.device), torch.get_num_threads(), work
    if key in _times:
        return _times[key]
    with torch.no_grad(), model.attached():
        run = _Calls(model, graphs, lookahead).run
        times = measure(run, fingerprint=fingerprint and fingerprint + work, device=model.table.device)
    if fingerprint is None:
        try:
            finalize(model.model, _times.pop, key, None)
        except TypeError:  # without a finalizer its id may later be another object's
            return times
    _times[key] = times
    return times


class _Calls:
    """Calls with any number of rows after one prefix. The first call reads the prefix.

    lookahead: embeddings whose slots are the second half of the rows; None: no row is a slot's.
    """

    def __init__(self, model: Adapted, graphs: bool, lookahead: LookaheadEmbedding | None) -> None:
        self._session = Session(model, 1, _PREFIX + MAX_PLANNED_ROWS, cuda_graphs=graphs)
        if model.has_encoder:
            take_encoded(self._session, some_inputs(model), 1)
        self._slots = 0
        if lookahead is not None:
            self._slots = lookahead.num_lookahead
            self._session.set_slots(lookahead, self._slots)

    def run(self, rows: int) -> None:
        session = self._session
        if session.is_new:
            path = torch.arange(_PREFIX, dtype=torch.int32, device=session.device)[None]
            trees = pack_trees([Tree.chain(_PREFIX - 1)], session.device)
            session.call(trees, self._ids(_PREFIX), torch.zeros(1, dtype=torch.int64, device=session.device))
            session.commit(trees, path, torch.full_like(path[:, 0], _PREFIX - 1))
        ids = self._ids(rows)
        if self._slots:
            slots = rows // 2
            ids[rows - slots :] = -1 - torch.arange(slots, device=session.device) % self._slots
        session.call(pack_trees([Tree.chain(rows - 1)], session.device), ids)

    def _ids(self, count: int) -> Tensor:
        return torch.arange(count, device=self._session.device) % self._session.model.table.shape[0]


def _fingerprint(model: Adapted) -> str | None:
    """A hash of everything that a call's time depends on; None for callables without a config."""
    module: Any = model.model
    config: Any = getattr(module, "config", None)
    if not isinstance(module, torch.nn.Module) or not hasattr(config, "to_dict"):
        return None
    described = json.dumps(config.to_dict(), sort_keys=True, default=str)
    shapes = [(name, list(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return hashlib.sha256(f"{kind} {described} {shapes}".encode()).hexdigest()


def measure(
    run: Callable[[int], object],
    rows: Sequence[int] = (1, 2, 4, 8, 16, 24, 32, 48, 64),
    *,
    fingerprint: str | None = None,
    device: torch.device | str = "cpu",
    budget: float = 2.5,
) -> StepTimes:
    """Times ``run(rows)`` at each number of rows: rounds that visit all of them, every other one backwards.

    Args:
        run: makes one call with so many rows, on ``device``.
        rows: ascending, two or more.
        fingerprint: identifies the calls: model, sizes, dtype, attention, graphs. With it the result is kept on disk and read
            again, for this device, number of threads, versions of torch and pass_ext, and built kernels. None: never kept.
        device: synchronised before and after each call if it is CUDA.
        budget: seconds to spend, warm-up included, but at least 3 rounds.
    """
    device, rows = torch.device(device), tuple(rows)
    key = None if fingerprint is None else _key_on_disk(fingerprint, rows, device)
    if key is not None and (known := _kept(key)) is not None:
        return known
    times = StepTimes(rows, tuple(_fastest(run, rows, device, budget)))
    if key is not None:
        _keep(key, times)
    return times


def _kept(key: dict[str, object]) -> StepTimes | None:
    """The times on disk; None if there are none or, with a line in the log, if the file is damaged."""
    path = _path(key)
    try:
        entry = json.loads(path.read_text())
        if entry["key"] != key:
            raise ValueError("it belongs to something else")
        return StepTimes(tuple(entry["key"]["rows"]), tuple(map(float, entry["seconds"])))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        _log.warning("step times in %s cannot be used, measuring again: %s: %s", path, type(error).__name__, error)
        return None


def _keep(key: dict[str, object], times: StepTimes) -> None:
    """Writes the times to disk; if the folder cannot be written, only logs that."""
    path, temporary = _path(key), ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump({"key": key, "seconds": times.seconds}, file)
        Path(temporary).replace(path)
    except OSError as error:
        _log.info("step times are not kept: %s", error)
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def _path(key: dict[str, object]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "step_times" / f"{digest[:24]}.json"


def _fastest(run: Callable[[int], object], rows: tuple[int, ...], device: torch.device, budget: float) -> list[float]:
    """Seconds of the fastest round, for each number of rows."""
    begin = time.perf_counter()
    for count in rows:  # first calls allocate, compile and warm caches
        _timed(run, count, device)
    best = dict.fromkeys(rows, math.inf)
    for done in range(_MOST_ROUNDS):
        spent = time.perf_counter() - begin
        if done >= _FEWEST_ROUNDS and spent * (done + 2) / (done + 1) > budget:
            break
        for count in rows if done % 2 == 0 else reversed(rows):
            best[count] = min(best[count], _timed(run, count, device))
    return list(best.values())


def _timed(run: Callable[[int], object], rows: int, device: torch.device) -> float:
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    run(rows)
    wait()
    return time.perf_counter() - begin


def _key_on_disk(fingerprint: str, rows: Sequence[int], device: torch.device) -> dict[str, object]:
    try:
        package = version("pass_ext")
    except PackageNotFoundError:
        package = "0+unknown"
    return {
        "format": _FORMAT,
        "fingerprint": fingerprint,
        "rows": list(rows),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "pass_ext": package,
        "kernels": kernels_hash(device.type),
        "instructions": f"{status().cpu_isa}, {status().cpu_products}",
    }


def device_name(device: torch.device) -> str:
    """The model of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, "") or platform.processor() or platform.machine()
