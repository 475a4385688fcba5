"""``cache_folder()``: the folder of measured step times and converted models. A leading ~ is expanded."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$PASS_EXT_CACHE``, else pass_ext in ``$XDG_CACHE_HOME`` or ``~/.cache``; it may not exist yet."""
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
