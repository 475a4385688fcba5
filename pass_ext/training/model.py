"""The frozen model that is trained beside, in one given dtype, with the command's errors. Called by ``command``."""

from __future__ import annotations

from typing import Any

import torch

from pass_ext.checkpoint import load_checkpoint


def load_frozen(path: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A causal model without gradients, and its tokenizer."""
    try:
        return load_checkpoint(path, dtype)
    except ImportError as error:
        raise SystemExit(f"training needs transformers and gguf: pip install 'pass_ext[hf,train]' ({error})") from error
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model {path!r} cannot be loaded: {error}") from error
