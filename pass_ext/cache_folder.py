"""``cache_folder()``: where step times and converted models are kept. A leading ~ is replaced."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$PASS_EXT_CACHE``, else pass_ext in ``$XDG_CACHE_HOME`` or ``~/.cache``; it need not be there yet."""
    if own := os.environ.get("PASS_EXT_CACHE"):
        return _expanded("PASS_EXT_CACHE", own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return _expanded("XDG_CACHE_HOME", shared) / "pass_ext"
    return _expanded("HOME", "~/.cache/pass_ext")


def _expanded(variable: str, given: str) -> Path:
    """With ~ and ~user replaced: a shell does that only where a word begins with them, and a service or IDE never."""
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"the cache folder {given!r} (from ${variable}) has a home folder that cannot be found"
        ) from error
