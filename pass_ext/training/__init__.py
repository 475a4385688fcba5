"""Training beside a frozen model: look-ahead embeddings, exit adapters, EAGLE-3 heads, decision models.

Each command has a folder: ``command`` (its options), ``pipeline`` (a whole run, and its card), ``loop`` (the loss of a step)
and ``evaluation`` (on held-out text). ``common`` is their skeleton:

options → run (model, texts) → [a command's own data] → trainer, steps → [its evaluation] → record (file, card, picture)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

FOLDERS = {"train": "lookahead", "train-draft": "draft", "train-head": "head", "train-decision": "decision"}
"""Command -> its folder."""


def with_config(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """The words after a command's name, after those of its --preset and --config; ``parser`` is the command's."""
    from pass_ext.training.common import config

    return config.with_config(parser, words)


def run(command: str, options: argparse.Namespace, line: Sequence[str]) -> Path | None:
    """Trains and evaluates; the path of the safetensors file, None for a dry run. ``line``: the words of the command line, for
    the record.

    A launcher may start the same call in several processes (``training.common.ranks``).
    """
    folder = f"pass_ext.training.{FOLDERS[command]}"
    import_module(f"{folder}.command").check_arguments(options)
    from pass_ext.training.common.ranks import launched
    from pass_ext.training.common.run import load_run
    from pass_ext.training.common.steps import ended_by_signals

    with ended_by_signals(options.out), launched(options.rank_timeout) as ranks:
        return cast("Path | None", import_module(f"{folder}.pipeline").train(load_run(options, line, ranks)))
