"""``named_method``: a decoding method from strings and numbers, as a configuration file can hold them.

name = as asked; else "pass" with slots, "speculative" with assistant_model, "ngram" with neither
method = class of that name(slots or assistant_model, **settings)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from pass_ext.decoding.drafting.drafter import DraftingMethod
from pass_ext.decoding.methods import Method, MultiCandidate, NGram, PaSS, Plain, Speculative
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
_NOT_SETTINGS = ("lookahead", "draft_model", "tokenizers")  # these come from slots, assistant_model and its tokenizer


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
