"""The frozen model that is trained beside, in one given dtype, from a GGUF file or anything ``from_pretrained`` takes.

Called by ``command``. transformers is imported here and nowhere earlier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load_frozen(path: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A causal model without gradients, and its tokenizer."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer, logging
    except ImportError as error:
        raise SystemExit(f"training needs transformers: pip install 'pass_ext[hf,train]' ({error})") from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    file = Path(path)
    where: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if file.suffix == ".gguf":
        if not file.is_file():
            raise SystemExit(f"--model names {path!r}, and there is no such file")
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype)
    except OSError as error:
        raise SystemExit(f"--model {path!r} cannot be loaded: {error}") from error
    return model.eval().requires_grad_(False), tokenizer
