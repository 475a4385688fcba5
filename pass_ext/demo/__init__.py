"""``python -m pass_ext demo MODEL``: PaSS on a real model, beside plain decoding and transformers."""

import argparse

from pass_ext.demo.extras import end_without

LOOKAHEAD_HELP = (
    "look-ahead embeddings: a file, or a shipped name; default: the shipped ones for this model, if there are"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("model", help="a GGUF file, or a transformers model folder or name")
    parser.add_argument("--lookahead", help=LOOKAHEAD_HELP)
    parser.add_argument("--prompt", help="continue this text instead of the three built-in prompts")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens of each text (default: %(default)s)")
    parser.add_argument("--out", default="demo.png", help="where the picture goes (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    """The whole demonstration; raises AssertionError if any text is not what it has to be."""
    if options.new_tokens < 2:
        raise SystemExit(f"--new-tokens must be 2 or more, got {options.new_tokens}")
    try:
        import rich  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        end_without(error)
    from pass_ext.demo.show import show

    show(options.model, options.lookahead, options.prompt, options.new_tokens, options.out)
