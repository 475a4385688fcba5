"""``generate``: runs for ``model.generate(custom_generate="path")``, the path being ``hub_folder()`` or its copy on the Hub.

    method = named_method(method, method_settings, slots, assistant_model)
    result = model.generate(custom_generate=CustomGenerate(method, rule, seeds), everything else)

transformers passes all arguments of the call to such a folder, also those that it drops for a callable: tokenizer,
assistant_model. ``named_method`` makes a decoding method from strings and numbers, as a configuration file can hold them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pass_ext.decoding.drafting.drafter import DraftingMethod
from pass_ext.decoding.drafting.heads.load import load_drafter
from pass_ext.decoding.methods import Method, MultiCandidate, NGram, PaSS, Plain, Speculative
from pass_ext.integrations.transformers.generate import CustomGenerate
from pass_ext.modules.files import pretrained_path
from pass_ext.modules.lookahead import LookaheadEmbedding

# Name -> the method's class, and the arguments it drafts with: the first is required.
_METHODS: dict[str, tuple[type, tuple[str, ...]]] = {
    "plain": (Plain, ()),
    "ngram": (NGram, ()),
    "pass": (PaSS, ("slots",)),
    "speculative": (Speculative, ("assistant_model",)),
    "multi_candidate": (MultiCandidate, ("assistant_model", "slots")),
}
_NOT_SETTINGS = (
    "lookahead",
    "draft_model",
    "tokenizers",
    "head",
)  # from slots, assistant_model, its tokenizer, drafter
_heads: WeakKeyDictionary[Any, dict[tuple[str, int], Any]] = WeakKeyDictionary()
"""Methods with heads, by model, and by path and time of its last change."""
# Settings of transformers' assisted decoding -> what says the same here.
_ASSISTED = {
    "prompt_lookup_num_tokens": 'method="ngram", method_settings={"tokens": …}',
    "max_matching_ngram_size": 'method="ngram", method_settings={"longest": …}',
    "assistant_early_exit": "assistant_model=pass_ext.EarlyExitDraft(model, layers=…)",
    "num_assistant_tokens": 'method="speculative", method_settings={"length": …}',
    "num_assistant_tokens_schedule": 'method="speculative", method_settings={"length": "auto"}',
    "assistant_confidence_threshold": 'method="multi_candidate", method_settings={"decision": …}',
}
# Those that select a mode: asked for also in a generation config, where the others lie unused.
_MODES = ("prompt_lookup_num_tokens", "assistant_early_exit")


def named_method(
    method: str | Method | DraftingMethod | None,
    settings: Mapping[str, Any] | None = None,
    *,
    slots: str | os.PathLike[str] | LookaheadEmbedding | None = None,
    assistant_model: Any = None,
    tokenizers: tuple[Any, Any] | None = None,
) -> Method | DraftingMethod:
    """The method with this name and these settings; a method that is no name is returned as it is."""
    if settings is not None and not isinstance(settings, Mapping):
        raise TypeError(f"custom_generate: method_settings must be a dictionary, got {type(settings).__name__}")
    sources = {"slots": slots, "assistant_model": assistant_model}
    present = [name for name, value in sources.items() if value is not None]
    if method is not None and not isinstance(method, str):
        for name in [*present, *["method_settings"] * bool(settings)]:
            raise ValueError(
                f"custom_generate: {name} must be part of the method where method is no name, got {type(method).__name__}"
            )
        return method
    if method is None:
        if len(present) == 2:
            raise ValueError(
                'custom_generate: method must be named with both slots and assistant_model ("multi_candidate" takes both), '
                "got None"
            )
        method = {"slots": "pass", "assistant_model": "speculative"}[present[0]] if present else "ngram"
    if method not in _METHODS:
        raise ValueError(f"custom_generate: method must be one of {', '.join(_METHODS)}, got {method!r}")
    kind, taken = _METHODS[method]
    for name in present:
        if name not in taken:
            raise ValueError(
                f'custom_generate: {name} must be left out with method "{method}", got {type(sources[name]).__name__}'
            )
    if taken and sources[taken[0]] is None:
        raise ValueError(f'custom_generate: method "{method}" needs {taken[0]}, got None')
    values = _checked(method, kind, settings or {})
    if isinstance(values.get("ngram"), Mapping):
        values["ngram"] = NGram(**_checked("ngram", NGram, values["ngram"]))
    if slots is not None:
        lookahead = slots if isinstance(slots, LookaheadEmbedding) else _slots_of(slots)
        values["lookahead"] = lookahead if kind is PaSS else PaSS(lookahead)
    if assistant_model is not None:
        values |= {"draft_model": assistant_model, "tokenizers": tokenizers}
    built: Method = kind(**values)
    return built


def _with_head(
    drafter: str | os.PathLike[str], model: Any, settings: Mapping[str, Any] | None, others: Mapping[str, Any]
) -> Method | DraftingMethod:
    """The method of a head's checkpoint with these settings."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"custom_generate: {name} must be left out with drafter, got {type(value).__name__}")
    place, known = Path(drafter), _heads.setdefault(model, {})
    key = os.fspath(drafter), place.stat().st_mtime_ns if place.exists() else 0
    if key not in known:
        known[key] = load_drafter(drafter, model)
    values = _checked("drafter", type(known[key]), settings or {})
    if isinstance(values.get("ngram"), Mapping):
        values["ngram"] = NGram(**_checked("ngram", NGram, values["ngram"]))
    return replace(known[key], **values)


def _checked(name: str, kind: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a method's class; ValueError for a name that it does not have."""
    names = [field.name for field in fields(kind) if field.name not in _NOT_SETTINGS]
    for setting in settings:
        if setting not in names:
            raise ValueError(
                f'custom_generate: method_settings of "{name}" must be among {", ".join(names) or "none"}, got {setting!r}'
            )
    return dict(settings)


def _slots_of(name: str | os.PathLike[str]) -> LookaheadEmbedding:
    path = pretrained_path(name, LookaheadEmbedding.shipped())
    return _slots(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _slots(path: Path, modified: int) -> LookaheadEmbedding:
    """The slots of a file, read again only after it changed: tables made of them live as long as they do."""
    return LookaheadEmbedding.load(path)


def hub_folder() -> str:
    """A path for ``model.generate(custom_generate=path, trust_remote_code=True)``, ready to be pushed to the Hub."""
    return str(Path(__file__).parent / "hub")


def generate(
    inputs: Tensor | None = None,
    generation_config: Any = None,
    *,
    model: Any,
    method: str | Method | DraftingMethod | None = None,
    method_settings: Mapping[str, Any] | None = None,
    slots: str | os.PathLike[str] | LookaheadEmbedding | None = None,
    drafter: str | os.PathLike[str] | None = None,
    rule: str = "coupled",
    seeds: int | Sequence[int] | Tensor | torch.Generator | None = None,
    assistant_model: Any = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    stop_strings: str | list[str] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    **arguments: Any,
) -> Any:
    """Takes the arguments of ``model.generate`` and gives its result; refuses by name what pass_ext cannot do.

    Args:
        method: "plain", "ngram", "pass", "speculative" or "multi_candidate", or a method as in ``pass_ext.generate``.
        method_settings: the arguments of the method's class, as ``{"rows": 16}`` for "pass"; ``ngram`` may be a dictionary.
        slots: look-ahead embeddings: a shipped name, a file, or a ``LookaheadEmbedding``.
        drafter: instead of a method, a head that was trained for the model, as ``pass_ext.load_drafter`` takes its checkpoint;
            ``method_settings`` are those of its method.
        rule, seeds: as in ``pass_ext.custom_generate``.
        assistant_model: the draft model; with ``tokenizer`` and ``assistant_tokenizer``, which are refused if they disagree.
    """
    _refuse_assisted(arguments, generation_config)
    if assistant_tokenizer is not None:
        for name, value in (("tokenizer", tokenizer), ("assistant_model", assistant_model)):
            if value is None:
                raise ValueError(f"custom_generate: assistant_tokenizer needs {name}, got None")
    tokenizers = None if assistant_tokenizer is None else (tokenizer, assistant_tokenizer)  # to be compared
    if drafter is not None:
        others = {"method": method, "slots": slots, "assistant_model": assistant_model}
        drafting = _with_head(drafter, model, method_settings, others)
    else:
        drafting = named_method(
            method, method_settings, slots=slots, assistant_model=assistant_model, tokenizers=tokenizers
        )
    loop = CustomGenerate(drafting, rule=rule, seeds=seeds)
    generation_config, stopping_criteria = _without_stop_strings(
        stop_strings, generation_config, stopping_criteria, tokenizer
    )
    # Not model.generate: where the folder lies in the model's own repository, that is this function.
    return type(model).generate(
        model,
        inputs,
        generation_config=generation_config,
        stopping_criteria=stopping_criteria,
        custom_generate=loop,
        **arguments,
    )


def _without_stop_strings(
    stop_strings: str | list[str] | None, config: Any, criteria: Sequence[Any] | None, tokenizer: Any
) -> tuple[Any, Sequence[Any] | None]:
    """The generation config without stop strings, and the criteria with one for them.

    transformers makes that criterion itself, but does not find the tokenizer if ``custom_generate`` is a callable.
    """
    if stop_strings is None:
        stop_strings = getattr(config, "stop_strings", None)
    if stop_strings is None:
        return config, criteria
    if tokenizer is None:
        raise ValueError("custom_generate: stop_strings need tokenizer, got None")
    from transformers import StoppingCriteriaList, StopStringCriteria

    if config is not None:
        config = copy.deepcopy(config)
        config.stop_strings = None
    return config, StoppingCriteriaList([*(criteria or ()), StopStringCriteria(tokenizer, stop_strings)])


def _refuse_assisted(arguments: dict[str, Any], config: Any) -> None:
    """Raises for settings of transformers' assisted decoding, which would otherwise be ignored."""
    for name, instead in _ASSISTED.items():
        value = arguments.get(name)
        if value is None and name in _MODES:
            value = getattr(config, name, None)
        if value is not None:
            raise ValueError(f"custom_generate: {name} is not implemented, got {value!r}; give {instead}")
