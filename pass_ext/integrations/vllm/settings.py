"""``Settings``: what a user writes for pass_ext into vLLM's ``additional_config``.

vllm serve MODEL --additional-config '{"pass_ext": {"rule": "coupled", "slots": "smollm2-135m-instruct"}}'
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from pass_ext.ops.common.rules import RULES

KEY = "pass_ext"


@dataclass(frozen=True)
class Settings:
    """The settings of one engine.

    Args:
        rule: of the accept step, one of ``pass_ext.RULES``.
        slots: PaSS's look-ahead embeddings, the name of shipped ones or a file.
        pause: True: PaSS stops proposing while proposals do not pay.
    """

    rule: str = "coupled"
    slots: str = ""
    pause: bool = True

    @classmethod
    def of(cls, config: Any) -> Settings:
        """The settings in a ``VllmConfig`` or ``EngineArgs``; ValueError for a name or value that is not known."""
        additional = config.additional_config
        values = additional.get(KEY, {}) if isinstance(additional, dict) else {}
        if not isinstance(values, dict):
            raise ValueError(f"additional_config[{KEY!r}] must be an object, got {values!r}")
        types = {field.name: type(field.default) for field in fields(cls)}
        for name, value in values.items():
            if name not in types:
                raise ValueError(f"additional_config[{KEY!r}]: {name!r} is not one of {', '.join(types)}")
            if not isinstance(value, types[name]):
                raise ValueError(f"additional_config[{KEY!r}]: {name} must be a {types[name].__name__}, got {value!r}")
        settings = cls(**values)
        if settings.rule not in RULES:
            raise ValueError(
                f"additional_config[{KEY!r}]: rule must be one of {', '.join(RULES)}, got {settings.rule!r}"
            )
        return settings
