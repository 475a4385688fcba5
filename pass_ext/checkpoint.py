"""``load_checkpoint``: a transformers causal model and its tokenizer, from a GGUF file or anything ``from_pretrained`` takes.

A GGUF file takes transformers long to read, so what it became is kept in ``cache_folder()`` if it is small. Called by the
commands (demo, training) and the benchmarks. transformers is imported here and nowhere earlier.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pass_ext.cache_folder import cache_folder

MOST_KEPT = 2 << 30  # bytes of a converted model


def load_checkpoint(path: str | Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """A frozen model and its tokenizer.

    Raises ImportError for a missing package, OSError or ValueError for what cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    file = Path(path)
    if file.suffix != ".gguf":
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        return model.eval().requires_grad_(False), tokenizer
    if not file.is_file():
        raise FileNotFoundError(f"no such model file: {path}")
    if find_spec("gguf") is None:
        raise ImportError("No module named 'gguf'")
    kept = _kept_at(file, dtype)
    if kept.is_dir():
        return load_checkpoint(kept, dtype)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = plain_copy(AutoModelForCausalLM.from_pretrained(**where, dtype=dtype), dtype)
    _keep(model, tokenizer, kept)
    return model, tokenizer


def plain_copy(model: Any, dtype: torch.dtype) -> Any:
    """One from a GGUF file counts as quantized, so it can be neither converted nor saved; its weights are plain, and so is
    this model."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = copy.deepcopy(model.generation_config)
    return plain.to(model.device, dtype).eval().requires_grad_(False)


def _kept_at(file: Path, dtype: torch.dtype) -> Path:
    import transformers

    status = file.stat()
    which = (str(file.resolve()), status.st_size, status.st_mtime_ns, str(dtype), transformers.__version__)
    return cache_folder() / "models" / f"{file.stem}-{hashlib.sha256(repr(which).encode()).hexdigest()[:16]}"


def _keep(model: Any, tokenizer: Any, folder: Path) -> None:
    """All of it or nothing; a folder that cannot be written is no error."""
    if sum(weight.numel() * weight.element_size() for weight in model.parameters()) > MOST_KEPT:
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            unfinished.replace(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError:
        pass
