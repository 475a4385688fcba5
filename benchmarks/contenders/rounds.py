"""``Race``: rounds of all contenders. A round is one held-out prompt: every contender continues it, in an order of its own.

A round in which other programs took more than `MOST_OTHERS` of the cores is kept apart, and another prompt replaces it.
Plain writes each text first, untimed: a text that loops, or that the model would end, is not raced.
"""

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import CORES
from benchmarks.contenders.cpu_watch import CpuWatch
from benchmarks.contenders.process import Worker, WorkerFailed
from benchmarks.contenders.workers import names
from benchmarks.decoding.prompts import Prompt
from benchmarks.decoding.texts import first_difference, loops

MOST_OTHERS = 0.1
"""Other programs' share of the cores in an undisturbed turn."""
ALL_CORES = frozenset(CORES or range(os.cpu_count() or 1))
"""Also those that OpenMP has taken from this process's main thread."""
ATTEMPTS = 3
MOST_SECONDS = 120.0
WARM_UP_TOKENS = 32


def others_now(seconds: float = 1.0) -> float:
    """The share of the cores that other programs take now, this process not counted; 0 where the system does not tell."""
    watch = CpuWatch(ALL_CORES)
    time.sleep(seconds)
    return watch.stop().others or 0.0


def watched(worker: Worker, request: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """The answer of a worker, and the share of the cores that programs other than it took meanwhile."""
    watch, before, began = CpuWatch(ALL_CORES), worker.cpu_seconds(), time.perf_counter()
    answer = worker.ask(request, MOST_SECONDS)
    use, spent = watch.stop(), worker.cpu_seconds() - before
    cores = (time.perf_counter() - began) * watch.cores
    return answer, max(0.0, (use.others or 0.0) - spent / cores)


def raced_text(tokens: Sequence[int], length: int, ends: frozenset[int]) -> str:
    """The reason why Plain's text of a prompt is not raced; empty: it is."""
    if len(tokens) < length:
        return f"Plain stopped after {len(tokens)} tokens"
    if ends.intersection(tokens):
        return "the model would end the text"
    return "the text loops" if loops(tokens) else ""


class Race:
    """All workers, and what they have measured so far.

    Args:
        workers: name -> worker, all of them ready.
        state: `rows`, `skipped`, `reasons`, of earlier sittings too.
        save: called after each round.
        report: takes a line of progress.
        length: tokens of a text.
        ends: the model's end tokens.
        most_others: other programs' share of the cores in a round that counts.
    """

    def __init__(
        self,
        workers: dict[str, Worker],
        state: dict[str, Any],
        save: Callable[[], None],
        report: Callable[[str], None],
        length: int,
        ends: frozenset[int],
        most_others: float = MOST_OTHERS,
    ) -> None:
        self.most_others = most_others
        self.workers, self.state = workers, state
        self._save, self._report, self._length, self._ends = save, report, length, ends

    @property
    def undisturbed(self) -> int:
        """The number of finished rounds that nothing disturbed."""
        rows = self.state["rows"]
        disturbed = {row["round"] for row in rows if row["others"] > self.most_others}
        return len({row["round"] for row in rows} - disturbed)

    def warm_up(self, prompt: Prompt) -> None:
        """A short text by each contender, one after the other: allocates, compiles, measures step times."""
        for name in list(self.workers):
            self._report(f"warm-up: {name}")
            self._ask(name, {"prompt": prompt.ids, "tokens": WARM_UP_TOKENS})

    def run(self, prompts: Sequence[Prompt], rounds: int, deadline: float) -> None:
        """Rounds until `rounds` are undisturbed, or the prompts or the time are used up."""
        seen = {row["prompt"] for row in self.state["rows"] + self.state["skipped"]}
        for number, prompt in enumerate(prompts):
            if self.undisturbed >= rounds or time.monotonic() > deadline or names.PLAIN not in self.workers:
                return
            if f"{prompt.domain} {prompt.name}" in seen:
                continue
            request = {"prompt": prompt.ids, "tokens": self._length}
            text = self._ask(names.PLAIN, request)
            if text is None:
                return
            if reason := raced_text(text["tokens"], self._length, self._ends):
                self.state["skipped"].append({"prompt": f"{prompt.domain} {prompt.name}", "reason": reason})
                continue
            self.state["rows"] += self._round(number, prompt, request, text["tokens"])
            self._save()

    def parts(self, contenders: Sequence[str], prompt: Prompt, tokens: int) -> None:
        """The machine's limits, and the parts of these contenders' steps, each measured again while others disturb."""
        wishes: list[tuple[str, str, dict[str, Any]]] = [(names.PLAIN, "limits", {"limits": True})]
        wishes += [(name, name, {"parts": prompt.ids, "tokens": tokens}) for name in contenders]
        for name, key, request in wishes:
            self._report(f"parts of a step: {key}")
            for _ in range(ATTEMPTS if name in self.workers else 0):
                try:
                    answer, others = watched(self.workers[name], request)
                except WorkerFailed as error:
                    self._leave(name, error)
                    break
                if key not in self.state["parts"] or others < self.state["parts"][key]["others"]:
                    self.state["parts"][key] = answer | {"others": others}
                if others <= MOST_OTHERS:
                    break
        self._save()

    def _round(self, number: int, prompt: Prompt, request: dict[str, Any], text: Sequence[int]) -> list[dict[str, Any]]:
        order = list(self.workers)
        random.Random(number).shuffle(order)
        rows, texts = [], {}
        for name in order:
            try:
                answer, others = watched(self.workers[name], request)
            except WorkerFailed as error:
                self._leave(name, error)
                continue
            texts[name] = answer.pop("tokens")
            rows.append(
                {
                    "round": number,
                    "domain": prompt.domain,
                    "prompt": f"{prompt.domain} {prompt.name}",
                    "contender": name,
                    "tokens": len(texts[name]),
                    **{key: round(value, 5) for key, value in answer.items()},
                    "others": round(others, 3),
                    "differs_at": first_difference(text, texts[name]),
                }
            )
            speed = len(texts[name]) / answer["seconds"]
            self._report(f"round {self.undisturbed + 1}, {prompt.domain:>5}: {speed:6.1f} tokens/s  {name}")
        exact = texts.get(names.PLAIN_FLOAT)
        for row in rows:
            row["differs_from_float32_at"] = (
                first_difference(exact, texts[row["contender"]]) if exact is not None else None
            )
        return rows

    def _ask(self, name: str, request: Mapping[str, Any]) -> dict[str, Any] | None:
        try:
            return self.workers[name].ask(request, MOST_SECONDS)
        except WorkerFailed as error:
            self._leave(name, error)
            return None

    def _leave(self, name: str, error: WorkerFailed) -> None:
        self.state["reasons"][name] = str(error)[:500]
        self._report(f"left out: {name}: {str(error)[:300]}")
        self.workers.pop(name).stop()
