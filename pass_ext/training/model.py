"""The frozen model that is trained beside, in one given dtype, with the command's errors, and a digest that tells it apart.

Called by ``command``, ``pipeline`` and ``self_distill``.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from pass_ext.checkpoint import load_checkpoint

_LOOKED_AT = 64  # elements of a parameter, evenly spread


def load_frozen(path: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A causal model without gradients, and its tokenizer."""
    try:
        return load_checkpoint(path, dtype)
    except ImportError as error:
        raise SystemExit(f"training needs transformers and gguf: pip install 'pass_ext[hf,train]' ({error})") from error
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model {path!r} cannot be loaded: {error}") from error


def weights_digest(model: Any) -> str:
    """SHA-256 over the parameters' names and shapes and a few elements of each: cheap, and another model's differs."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // _LOOKED_AT)][:_LOOKED_AT].float().tolist()
        digest.update(f"{name} {tuple(parameter.shape)} {some}\0".encode())
    return digest.hexdigest()
