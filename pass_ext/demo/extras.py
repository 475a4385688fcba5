"""``end_without``: ends the demo if a package is missing, with the command that installs it."""

from typing import NoReturn


def end_without(error: ImportError) -> NoReturn:
    """Raises SystemExit with the pip command that installs the missing package."""
    raise SystemExit(
        f"the demo needs transformers, gguf, accelerate and rich: pip install 'pass_ext[hf]' ({error})"
    ) from error
