"""``end_without``: ends the demo where a package that it needs is missing, and says what to install."""

from typing import NoReturn


def end_without(error: ImportError) -> NoReturn:
    """Ends the command with what to install."""
    raise SystemExit(
        f"the demo needs transformers, gguf, accelerate and rich: pip install 'pass_ext[hf]' ({error})"
    ) from error
