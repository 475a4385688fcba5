"""Who continues texts in bench_decoding.py: pass_ext's methods, and transformers' own ways on the same model.

A contender is called with a prompt, a setting, a seed and a number of tokens, and says what it wrote, in how many calls of
the model and how many seconds, wall clock, the prompt's own call included. On a GPU ours keep their caches and CUDA graphs
from text to text; transformers' plain decoding gets its static cache and CUDA graphs; its ways with candidates take neither.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

PLAIN, HF = "Plain", "transformers"
NGRAM, TWO_PASS, ONE_PASS, JOINED = "NGram", "PaSS, two passes", "PaSS, one pass", "PaSS, one pass + NGram"
LOOKUP = "transformers, prompt lookup"
OURS = (PLAIN, NGRAM, TWO_PASS, ONE_PASS, JOINED)
CACHE_LENGTH = 512
"""Of transformers' static cache: the same for all prompts, so that it is compiled once."""
LOOKUP_TOKENS = 10
ASSISTANT_TOKENS = 4


@dataclass(frozen=True)
class Setting:
    """How a token is chosen."""

    name: str
    temperature: float = 0.0
    top_k: int | None = None

    def for_transformers(self) -> dict[str, Any]:
        """Keywords of its `generate`."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": 1.0}


GREEDY = Setting("greedy")
ASSISTED = Setting("greedy, half as long")
SAMPLED = Setting("temperature 0.8, top-k 10", 0.8, 10)


@dataclass(frozen=True)
class Outcome:
    """One continuation."""

    tokens: list[int]
    calls: int
    seconds: float
    histogram: list[int] = field(default_factory=list)
    """Steps that accepted 0, 1, 2, … drafts; of ours only."""
    drafted: int = 0
    draft_calls: int = 0
    """Calls of a draft model, a level each; what they read of the prompt not counted."""


Writer = Callable[[Sequence[int], Setting, int, int], Outcome]


@dataclass(frozen=True)
class Contender:
    """A name, and who writes."""

    name: str
    write: Writer


def method_contender(
    name: str, model: Any, method: Any, *, rule: str = "coupled", keep: bool | None = None
) -> Contender:
    """One of pass_ext's methods. `keep`: one session for all texts, with CUDA graphs; as said above."""
    import pass_ext

    keep = model.device.type == "cuda" if keep is None else keep
    sessions: list[Any] = []

    def kept() -> dict[str, Any]:
        """Made by a text as long as the longest, so that there is room for all."""
        if keep and not sessions:
            long = torch.arange(CACHE_LENGTH - 4, device=model.device)[None] % 50
            made = pass_ext.generate(
                model, long, method, max_new_tokens=4, rule=rule, keep_cache=True, cuda_graphs=True
            )
            sessions.append(made.session)
        return {"session": sessions[0], "cuda_graphs": True} if keep else {}

    def write(ids: Sequence[int], setting: Setting, seed: int, most: int) -> Outcome:
        given = torch.tensor([ids], device=model.device)
        law: dict[str, Any] = (
            {} if setting.temperature == 0 else {"temperature": setting.temperature, "top_k": setting.top_k}
        )
        with _without_gradients(model):
            law |= kept()
            started = _now(model)
            result = pass_ext.generate(model, given, method, max_new_tokens=most, seeds=seed, rule=rule, **law)
            seconds = _now(model) - started
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
    """transformers' `generate`; `options` choose who proposes candidates, if anybody. `static`: its cache, as said above."""
    static = model.device.type == "cuda" and not options if static is None else static
    if static:
        options = {"cache_implementation": "static"}
        if hasattr(model.generation_config, "max_cache_len"):
            options["max_cache_len"] = CACHE_LENGTH

    def write(ids: Sequence[int], setting: Setting, seed: int, most: int) -> Outcome:
        given = torch.tensor([ids], device=model.device)
        torch.manual_seed(seed)
        with _without_gradients(model), counted_calls(model, not static) as calls:
            started = _now(model)
            out = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=most,
                **setting.for_transformers(),
                **options,
            )
            seconds = _now(model) - started
        new = out[0, len(ids) :].tolist()
        return Outcome(new, len(new) if static else calls[0], seconds)

    return Contender(name, write)


@contextmanager
def counted_calls(model: Any, wanted: bool) -> Iterator[list[int]]:
    """Counts the model's calls by a hook, which a compiled model would stumble over."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    hook = model.register_forward_hook(count) if wanted else None
    try:
        yield calls
    finally:
        if hook is not None:
            hook.remove()


def assisted_contender(model: Any, layers: int) -> Contender:
    """transformers' assisted decoding with the model's own first layers."""
    from pass_ext.decoding.models.early_exit import first_layers

    assistant = first_layers(model, layers)
    assistant.generation_config = copy.deepcopy(model.generation_config)
    assistant.generation_config.num_assistant_tokens = ASSISTANT_TOKENS
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    name = f"transformers, assisted by the first {layers} layers"
    return transformers_contender(name, model, assistant_model=assistant)


def contenders(model: Any, lookahead: Any) -> list[Contender]:
    """All of the main table, Plain first."""
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
    """Inference mode; not where graphs are recorded and compiled, which its tensors may hinder."""
    return torch.no_grad() if model.device.type == "cuda" else torch.inference_mode()


def _now(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
