"""Contenders that continue texts: pass_ext's methods, and transformers' generate on the same model.

    contender(prompt ids, setting, seed, number of tokens) -> Outcome

Seconds are wall clock and include the call on the prompt. On a GPU pass_ext keeps caches and CUDA graphs from text to text, and
transformers' plain decoding gets its static cache and CUDA graphs; transformers with candidates takes neither.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.harness.cases import Contender

PLAIN, HF = "Plain", "transformers"
NGRAM, TWO_PASS, ONE_PASS, JOINED = "NGram", "PaSS, two passes", "PaSS, one pass", "PaSS, one pass + NGram"
LOOKUP = "transformers, prompt lookup"
OURS = (PLAIN, NGRAM, TWO_PASS, ONE_PASS, JOINED)
CACHE_LENGTH = 512
"""Slots of transformers' static cache: the same for all prompts, so that it is compiled once."""
LOOKUP_TOKENS = 10
ASSISTANT_TOKENS = 4


@dataclass(frozen=True)
class Setting:
    """How tokens are chosen: greedily, or sampled."""

    name: str
    temperature: float = 0.0
    top_k: int | None = None

    def for_transformers(self) -> dict[str, Any]:
        """The keywords of transformers' `generate`."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": 1.0}


GREEDY = Setting("greedy")
ASSISTED = Setting("greedy, half as long")
SAMPLED = Setting("temperature 0.8, top-k 10", 0.8, 10)


@dataclass(frozen=True)
class Outcome:
    """One continuation and what it took."""

    tokens: list[int]
    calls: int
    seconds: float
    histogram: list[int] = field(default_factory=list)
    """Numbers of steps that accepted 0, 1, 2, … drafts; of pass_ext only."""
    drafted: int = 0
    draft_calls: int = 0
    """Calls of a draft model, one per level; its calls on the prompt are not counted."""


def method_contender(
    name: str, model: Any, method: Any, *, rule: str = "coupled", keep: bool | None = None
) -> Contender:
    """A method of pass_ext. `keep`: one session with CUDA graphs for all texts; by default on a GPU."""
    import pass_ext

    keep = model.device.type == "cuda" if keep is None else keep
    sessions: list[Any] = []

    def session() -> dict[str, Any]:
        """The keywords for the session; a text of full length fills it, so that every text has room."""
        if keep and not sessions:
            long = torch.arange(CACHE_LENGTH - 4, device=model.device)[None] % 50
            sessions.append(pass_ext.Session(model, cuda_graphs=True))
            pass_ext.generate(model, long, method, max_new_tokens=4, rule=rule, session=sessions[0])
        return {"session": sessions[0]} if keep else {}

    def write(ids: Sequence[int], setting: Setting, seed: int, most: int) -> Outcome:
        prompt = torch.tensor([ids], device=model.device)
        keywords: dict[str, Any] = (
            {} if setting.temperature == 0 else {"temperature": setting.temperature, "top_k": setting.top_k}
        )
        with _without_gradients(model):
            keywords |= session()
            started = now(model.device)
            result = pass_ext.generate(model, prompt, method, max_new_tokens=most, seeds=seed, rule=rule, **keywords)
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


def transformers_contender(name: str, model: Any, *, static: bool | None = None, **options: Any) -> Contender:
    """transformers' `generate`; `options` choose its candidates. `static`: with its static cache, the default on a GPU."""
    static = model.device.type == "cuda" and not options if static is None else static
    if static:
        options = {"cache_implementation": "static"}
        if hasattr(model.generation_config, "max_cache_len"):
            options["max_cache_len"] = CACHE_LENGTH

    def write(ids: Sequence[int], setting: Setting, seed: int, most: int) -> Outcome:
        prompt = torch.tensor([ids], device=model.device)
        torch.manual_seed(seed)
        with _without_gradients(model), counted_calls(model, not static) as calls:
            started = now(model.device)
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=most,
                **setting.for_transformers(),
                **options,
            )
            seconds = now(model.device) - started
        new = out[0, len(ids) :].tolist()
        return Outcome(new, len(new) if static else calls[0], seconds)

    return Contender(name, write)


@contextmanager
def counted_calls(model: Any, enabled: bool) -> Iterator[list[int]]:
    """Counts the model's calls by a hook, which a compiled model does not allow: there ``enabled`` is False."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    hook = model.register_forward_hook(count) if enabled else None
    try:
        yield calls
    finally:
        if hook is not None:
            hook.remove()


def assisted_contender(model: Any, layers: int) -> Contender:
    """transformers' assisted decoding, with the model's first layers as the assistant."""
    from pass_ext.decoding.models.early_exit import first_layers

    assistant = first_layers(model, layers)
    assistant.generation_config = copy.deepcopy(model.generation_config)
    assistant.generation_config.num_assistant_tokens = ASSISTANT_TOKENS
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    name = f"transformers, assisted by the first {layers} layers"
    return transformers_contender(name, model, assistant_model=assistant)


def contenders(model: Any, lookahead: Any) -> list[Contender]:
    """The contenders of the main table, Plain first."""
    import pass_ext

    return [
        method_contender(PLAIN, model, pass_ext.Plain()),
        transformers_contender(HF, model),
        transformers_contender(LOOKUP, model, prompt_lookup_num_tokens=LOOKUP_TOKENS),
        method_contender(NGRAM, model, pass_ext.NGram()),
        method_contender(TWO_PASS, model, pass_ext.PaSS(lookahead, passes=2)),
        method_contender(ONE_PASS, model, pass_ext.PaSS(lookahead)),
        method_contender(JOINED, model, pass_ext.PaSS(lookahead, ngram=pass_ext.NGram())),
    ]


def _without_gradients(model: Any) -> Any:
    """Inference mode; on a GPU no_grad, because its tensors may hinder graphs and compilers."""
    return torch.no_grad() if model.device.type == "cuda" else torch.inference_mode()


def now(device: torch.device) -> float:
    """The clock in seconds, after all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
