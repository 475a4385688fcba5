"""``end_without``: ends the demo if a package is missing, and says what to install."""

from typing import NoReturn


def end_without(error: ImportError) -> NoReturn:
    """Raises SystemExit with the pip command that installs the missing package."""
    raise SystemExit(
        f"the demo needs transformers, gguf, accelerate and rich: pip install 'pass_ext[hf]' ({error})"
    ) from error
