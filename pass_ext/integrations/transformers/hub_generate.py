"""``generate``: runs for ``model.generate(custom_generate="path")``, the path being ``hub_folder()`` or its copy on the Hub.

    method = named_method(method, method_settings, slots, assistant_model)
    result = model.generate(custom_generate=CustomGenerate(method, rule, seeds), everything else)

transformers passes all arguments of the call to such a folder, also those that it drops for a callable: tokenizer,
assistant_model.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.drafting.drafter import DraftingMethod
from pass_ext.decoding.methods import Method
from pass_ext.integrations.transformers.generate import CustomGenerate
from pass_ext.integrations.transformers.named_method import named_method
from pass_ext.modules.lookahead import LookaheadEmbedding

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
        rule, seeds: as in ``pass_ext.custom_generate``.
        assistant_model: the draft model; with ``tokenizer`` and ``assistant_tokenizer``, which are refused if they disagree.
    """
    _refuse_assisted(arguments, generation_config)
    tokenizers = _tokenizers(tokenizer, assistant_tokenizer, assistant_model)
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


def _tokenizers(tokenizer: Any, assistant_tokenizer: Any, assistant_model: Any) -> tuple[Any, Any] | None:
    """The target's and the draft's tokenizers, to be compared; None without the draft's."""
    if assistant_tokenizer is None:
        return None
    for name, value in (("tokenizer", tokenizer), ("assistant_model", assistant_model)):
        if value is None:
            raise ValueError(f"custom_generate: assistant_tokenizer needs {name}, got None")
    return tokenizer, assistant_tokenizer


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
