"""The rotation of positions that a GGUF file states, of which transformers' tables have the base alone.

    ARCHITECTURE.rope.scaling.type, .factor, …    linear, or YaRN
    rope_freqs.weight [d / 2]                     what Llama 3's frequencies are divided by

Where other layers have a window, as in Gemma 3, it is the rotation of those without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FACTORS = "rope_freqs.weight"

_YARN = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_NEEDED = {"linear": {"factor"}, "yarn": {"factor", "original_context_length"}}
_CHANGES_NOTHING = {"type", "finetuned"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all of Llama 3.1 to 3.3; the factor is in the file."""


def scaling_of(reader: Any, architecture: str, file: Path) -> dict[str, Any] | None:
    """What transformers calls ``rope_scaling``; None: there is none. ValueError for a rotation that is not known here."""
    start = f"{architecture}.rope.scaling."
    said = {
        name.removeprefix(start): field.contents() for name, field in reader.fields.items() if name.startswith(start)
    }
    factors = next((tensor for tensor in reader.tensors if tensor.name == FACTORS), None)
    if factors is not None and architecture == "llama":
        return _of_llama3(np.array(factors.data, np.float64), reader, file)
    kind = said.get("type", "linear" if "factor" in said else "none")
    if kind == "none":
        return None
    own: Mapping[str, str] = _YARN if kind == "yarn" else {"factor": "factor"}
    if kind not in _NEEDED or said.keys() - _YARN.keys() - _CHANGES_NOTHING or not said.keys() >= _NEEDED[kind]:
        found = ", ".join(f"{name} {value}" for name, value in sorted(said.items()))
        raise ValueError(
            f"{file.name} has a rotation that is not read: linear ones with a factor are, and YaRN with {', '.join(_YARN)}; "
            f"the file has {found}"
        )
    return {"rope_type": kind, **{ours: said[name] for name, ours in own.items() if name in said}}


def _of_llama3(factors: Any, reader: Any, file: Path) -> dict[str, Any]:
    """The factor is the largest, that of the slowest frequencies; it tells all others."""
    stated, factor = reader.fields.get("llama.rope.freq_base"), float(factors.max())
    base = 10_000.0 if stated is None else float(stated.contents())
    turns = _LLAMA3["original_max_position_embeddings"] / (
        2 * math.pi * base ** (np.arange(len(factors)) / len(factors))
    )
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / (share + (1 - share) / factor), rtol=1e-4):
        raise ValueError(f"{file.name} has a rotation that is not read: its {FACTORS} is not as Llama 3.1 has it")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def state(config: Any, scaling: Mapping[str, Any]) -> None:
    """Writes it into a model's config."""
    own = getattr(config, "rope_parameters", None)
    if own is None:  # transformers 4
        config.rope_scaling = dict(scaling)
    else:
        own.get("full_attention", own).update(scaling)


def has_scaling(config: Any) -> bool:
    """True for a config with a rotation that its base alone does not tell."""
    own = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return own.get("full_attention", own).get("rope_type", "default") != "default"
