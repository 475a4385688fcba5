"""Contenders that continue texts: pass_ext's methods, and transformers' generate on the same model.

    contender(prompt ids, number of tokens) -> Outcome

Texts are greedy. Seconds are wall clock and include the call on the prompt. On a GPU pass_ext keeps caches and CUDA graphs from
text to text.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.harness.cases import Contender

PLAIN, HF = "Plain", "transformers"
TWO_PASS, ONE_PASS = "PaSS, two passes", "PaSS, one pass"
CACHE_LENGTH = 512
"""Slots of the session that a GPU keeps: the same for all prompts, so that its graphs are recorded once."""


@dataclass(frozen=True)
class Outcome:
    """One continuation and what it took."""

    tokens: list[int]
    calls: int
    seconds: float
    histogram: list[int] = field(default_factory=list)
    """Numbers of steps that accepted 0, 1, 2, … drafts; of pass_ext only."""
    drafted: int = 0


def method_contender(name: str, model: Any, method: Any) -> Contender:
    """A method of pass_ext; on a GPU one session with CUDA graphs for all texts."""
    import pass_ext

    keep = model.device.type == "cuda"
    sessions: list[Any] = []

    def session() -> dict[str, Any]:
        """The keywords for the session; a text of full length fills it, so that every text has room."""
        if keep and not sessions:
            long = torch.arange(CACHE_LENGTH - 4, device=model.device)[None] % 50
            sessions.append(pass_ext.Session(model, cuda_graphs=True))
            pass_ext.generate(model, long, method, max_new_tokens=4, session=sessions[0])
        return {"session": sessions[0]} if keep else {}

    def write(ids: Sequence[int], most: int) -> Outcome:
        prompt = torch.tensor([ids], device=model.device)
        with _without_gradients(model):
            keywords = session()
            started = now(model.device)
            result = pass_ext.generate(model, prompt, method, max_new_tokens=most, **keywords)
            seconds = now(model.device) - started
        new = result.sequences[0, len(ids) :].tolist()
        return Outcome(
            new,
            result.stats.model_calls,
            seconds,
            [int(count) for count in result.stats.acceptance_histogram],
            int(result.stats.num_draft_tokens),
        )

    return Contender(name, write)


def transformers_contender(name: str, model: Any) -> Contender:
    """transformers' `generate`, with its dynamic cache."""

    def write(ids: Sequence[int], most: int) -> Outcome:
        prompt = torch.tensor([ids], device=model.device)
        with _without_gradients(model), counted_calls(model) as calls:
            started = now(model.device)
            mask = torch.ones_like(prompt)
            out = model.generate(prompt, attention_mask=mask, max_new_tokens=most, do_sample=False)
            seconds = now(model.device) - started
        return Outcome(out[0, len(ids) :].tolist(), calls[0], seconds)

    return Contender(name, write)


@contextmanager
def counted_calls(model: Any) -> Iterator[list[int]]:
    """Counts the model's calls by a hook."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    hook = model.register_forward_hook(count)
    try:
        yield calls
    finally:
        hook.remove()


def _without_gradients(model: Any) -> Any:
    """Inference mode; on a GPU no_grad, because its tensors may hinder graphs and compilers."""
    return torch.no_grad() if model.device.type == "cuda" else torch.inference_mode()


def now(device: torch.device) -> float:
    """The clock in seconds, after all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
