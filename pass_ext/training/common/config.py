"""Options from a preset and from a file (.yaml, .toml, .json): words that stand before those of the command line, which win.

preset < file < command line
"""

from __future__ import annotations

import argparse
import difflib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The numbers of the shipped files where they were tried (docs/guide/training.md); all learn four slots by Python's own texts.
_SLOTS = (
    "--data stdlib --self-distill shipped --lookahead 4 --transition-rank 64 --deep --batch 1 --anchors 64 "
    "--evaluation-anchors 32 --sample-share 0.85"
)
_ADAPTERS = (
    f"{_SLOTS} --continuations 1200 --own-chats 1300 --adapter-rank 8 --learning-rate 0.01 "
    "--transition-learning-rate 0.003 --deep-learning-rate 0.01 --adapter-learning-rate 0.002"
)
PRESETS = {
    "slots": f"{_SLOTS} --continuations 384 --own-chats 192 --learning-rate 0.03 --transition-learning-rate 0.006 --steps 1000",
    "slots+adapters": f"{_ADAPTERS} --steps 3000",
    "long": f"{_ADAPTERS} --continuations 2300 --own-chats 2400 --steps 20000 --patience 8 --evaluate-every 500",
}


def with_config(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """The words of a training command, after those of its preset and of its file of options."""
    ours = argparse.ArgumentParser(prog=parser.prog, add_help=False, allow_abbrev=False)
    ours.add_argument("--config")
    ours.add_argument("--preset")
    given, _ = ours.parse_known_args(list(words))
    options = _read(given.config) if given.config else {}
    preset = given.preset or options.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise SystemExit(f"--preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    before = [] if preset is None else ["--preset", preset, *shlex.split(PRESETS[preset])]
    for name, value in options.items():
        before += _words(parser, given.config, str(name), value)
    return [*before, *words]


def _read(path: str) -> dict[str, Any]:
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix in (".yaml", ".yml"):
            import yaml

            found = yaml.safe_load(text)
        elif file.suffix == ".toml":
            import tomllib

            found = tomllib.loads(text)
        elif file.suffix == ".json":
            found = json.loads(text)
        else:
            raise SystemExit(f"--config must be a .yaml, .toml or .json file, got {path!r}")
    except ImportError as error:
        needed = "Python 3.11" if file.suffix == ".toml" else "pyyaml: pip install pyyaml"
        raise SystemExit(f"--config {path}: {file.suffix} needs {needed}") from error
    except Exception as error:  # yaml's own is neither an OSError nor a ValueError, and its package may be missing
        raise SystemExit(f"--config {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise SystemExit(f"--config {path} must hold options and their values, got {type(found).__name__}")
    return found


def _words(parser: argparse.ArgumentParser, path: str, name: str, value: Any) -> list[str]:
    """One option as words of a command line, which argparse then checks as such."""
    option, known = f"--{name.replace('_', '-')}", parser._option_string_actions
    if option not in known or option in ("--help", "--config"):
        near = difflib.get_close_matches(option, known, 1)
        hint = f": did you mean {near[0].removeprefix('--')}?" if near else ""
        raise SystemExit(f"--config {path}: there is no option {name!r}{hint}")
    if isinstance(value, dict) and option == "--model-args":
        return [option, json.dumps(value)]
    if isinstance(value, dict):
        raise SystemExit(f"--config {path}: {name} must be a value or a list, got {value}")
    if value is None:
        return []
    if isinstance(value, bool):
        return [option if value else f"--no-{option.removeprefix('--')}"]
    return [option, *map(str, value)] if isinstance(value, list) else [f"{option}={value}"]
