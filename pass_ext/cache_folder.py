"""``cache_folder()``: where step times and converted models are kept. Called by ``step_times``, ``checkpoint``, ``demo``."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$PASS_EXT_CACHE``, else pass_ext in ``$XDG_CACHE_HOME`` or ``~/.cache``; it need not be there yet."""
    if own := os.environ.get("PASS_EXT_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "pass_ext"
    return Path("~/.cache/pass_ext").expanduser()
