"""Options that the three training commands share, what they must satisfy, and the texts that they name."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from pass_ext.training.common.documents import Document, read_documents
from pass_ext.training.common.logs import NAMES, check_logs
from pass_ext.training.common.own_texts import BATCH, TEMPERATURES

PACKAGES = ("transformers", "safetensors", "rich", "matplotlib")
INSTRUCTIONS = Path(__file__).parent.parent / "instructions.txt"
# Where --help begins; each command has most of them.
FIRST = (
    *("--preset", "--model", "--out", "--data", "--draft", "--kind", "--layers"),
    *("--steps", "--epochs", "--batch", "--device", "--log", "--config", "--dry-run"),
)
_FURTHER = "further options"
_DIVIDING = {"tp_plan", "tp_size", "device_mesh", "distributed_config"}
_Settings = TypeVar("_Settings")


def adder(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """``parser.add_argument``, where the help of every option that may be left out ends with its default. ``least``: the
    smallest number that ``check_least`` takes. --help lists ``FIRST`` before the others."""

    def add(option: str, *, help: str = "", least: float | None = None, **how: Any) -> None:
        if least is not None:
            known = parser.get_default("least") or {}
            parser.set_defaults(least={**known, option.removeprefix("--").replace("-", "_"): least})
        default = how.get("default", False if how.get("action") == "store_true" else None)
        words = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
        shown = {"False": "off", "None": "none", "": "none", "{}": "none"}.get(words, words)
        if not how.get("required") and "default:" not in help:
            help = "; ".join(filter(None, (help, f"default: {shown}")))
        group = parser if option in FIRST else _further(parser)
        group.add_argument(option, help=help, **how)

    return add


def _further(parser: argparse.ArgumentParser) -> Any:
    groups = [group for group in parser._action_groups if group.title == _FURTHER]
    return groups[0] if groups else parser.add_argument_group(_FURTHER)


def _keywords(text: str) -> dict[str, Any]:
    """The value of --model-args."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON, got {text!r}: {error}") from error
    if not isinstance(found, dict) or "dtype" in found:
        raise argparse.ArgumentTypeError(f"must be an object of keywords but dtype, which is --dtype, got {text}")
    return found


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the folder, and the text."""
    add = adder(parser)
    add("--model", required=True, help="a GGUF file, or a transformers model folder or name; it stays as it is")
    add(
        "--model-args",
        type=_keywords,
        default={},
        metavar="JSON",
        help="further keywords of transformers' from_pretrained, as quantization_config or device_map",
    )
    add("--out", required=True, help="folder for checkpoints, samples and results; a run that stopped goes on from it")
    add(
        "--config",
        metavar="FILE",
        help="options and their values in a .yaml, .toml or .json file; the command line wins",
    )
    add(
        "--log",
        nargs="+",
        choices=NAMES,
        default=[],
        help="where losses go while the run trains: event files in --out, or a service with the account that is set up here",
    )
    add(
        "--data",
        nargs="+",
        default=[],
        metavar="PATH",
        help="files or folders of .py, .txt, .md, .rst, .jsonl, .parquet text; NAME or NAME:SPLIT of a data set; "
        "stdlib: Python's own",
    )
    add("--data-column", metavar="NAME", help="of rows: a text, or messages; default: text, else messages")
    add("--data-rows", type=int, least=1, default=10_000, help="read of a data set or a file of rows at most")
    add(
        "--self-distill",
        metavar="PROMPTS",
        help="a file of instructions, one a line, that the model answers; shipped: that of the package; data: "
        "users' first messages in --data",
    )
    add(
        "--texts-from",
        metavar="URL",
        help="an OpenAI-compatible server that runs the same model, as http://host:8000/v1, writes the texts; default: the "
        "model here",
    )
    add("--concurrency", type=int, least=1, default=32, help="requests at a time to that server")
    add("--request-timeout", type=float, least=0.001, default=300, help="seconds that the server may take for one")
    add(
        "--continuations",
        type=int,
        least=0,
        default=0,
        metavar="N",
        help="prefixes from --data that the model continues",
    )
    add("--own-chats", type=int, least=0, default=0, metavar="N", help="chats of which the model writes both sides")
    add("--sample-tokens", type=int, least=1, default=208, help="tokens sampled after a prompt at most")
    add(
        "--sample-batch",
        type=int,
        least=1,
        default=BATCH,
        help="texts that the model writes at a time; a GPU takes hundreds",
    )
    add(
        "--sample-temperatures",
        type=float,
        nargs="+",
        default=TEMPERATURES,
        metavar="T",
        help="of one batch of samples after the other; 0: greedy",
    )
    add(
        "--held-out",
        type=int,
        least=0,
        default=32,
        help="held-out prompts of a kind that the model continues for the evaluation, and held-out chats of its own, of each "
        "temperature, that it reads",
    )


def add_run_arguments(parser: argparse.ArgumentParser, *, name: str, models: str = "the frozen model") -> None:
    """The seed, the device, and the result's name, which is ``name`` where the user gives none."""
    add = adder(parser)
    add("--seed", type=int, default=0, help="of samples, windows, places and the start")
    add("--device", default="cpu", help="cpu, cuda or cuda:N; cuda is a GPU of its own for each rank of torchrun")
    add(
        "--rank-timeout",
        type=float,
        least=0.1,
        default=60,
        metavar="MINUTES",
        help="how long a rank of torchrun waits for the others, who may be sampling, before it ends",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help=f"of {models}; on most CPUs float32 is faster",
    )
    add(
        "--name",
        default=name,
        help="of the result: NAME.safetensors, .json, .md and .svg in --out",
    )


def add_sample_share(parser: argparse.ArgumentParser, parts: str) -> None:
    """--sample-share, for commands whose ``parts`` (windows, texts) come from samples and from documents."""
    adder(parser)("--sample-share", type=float, default=0.75, help=f"part of the training {parts} that is sampled")


def check_least(options: argparse.Namespace) -> None:
    """Refuses numbers below the least of their options."""
    for name, smallest in options.least.items():
        if not getattr(options, name) >= smallest:  # so that nan is refused too
            raise SystemExit(f"--{name.replace('_', '-')} must be at least {smallest}, got {getattr(options, name)}")


def check_sample_share(options: argparse.Namespace) -> None:
    """Refuses a share outside 0 to 1."""
    if not 0 <= options.sample_share <= 1:
        raise SystemExit(f"--sample-share must lie between 0 and 1, got {options.sample_share}")


def check_packages() -> None:
    """Names packages that are missing, before minutes of work end without them."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise SystemExit(f"training needs {', '.join(missing)}: pip install 'pass_ext[hf,train]'")


def check_text_arguments(options: argparse.Namespace) -> None:
    """Refuses a run without text, prefixes without documents, a file of instructions that does not exist, and a seed, device,
    name or folder that there cannot be."""
    if not 0 <= options.seed < 1 << 32:
        raise SystemExit(f"--seed must be from 0 to {(1 << 32) - 1}, got {options.seed}")
    _check_device(options.device)
    if divided := sorted(_DIVIDING & options.model_args.keys()):
        raise SystemExit(
            f"--model-args: {divided[0]} divides the model among the ranks, but here each rank reads texts of its own: leave "
            "it out, and quantise or offload a model that does not fit"
        )
    if "device_map" in options.model_args and find_spec("accelerate") is None:
        raise SystemExit("--model-args: device_map needs accelerate: pip install accelerate")
    check_logs(options.log)
    if not all(0 <= temperature < float("inf") for temperature in options.sample_temperatures):
        raise SystemExit(f"--sample-temperatures must be at least 0, got {list(options.sample_temperatures)}")
    if options.name is not None and (not options.name or Path(options.name).name != options.name):
        raise SystemExit(f"--name must be a file's name without its ending, got {options.name!r}")
    try:
        Path(options.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--out must be a folder that can be written, got {options.out!r}: {error}") from error
    if not options.data and not options.self_distill and not options.own_chats:
        raise SystemExit("nothing to train on: give --data FILES, --self-distill PROMPTS or --own-chats N")
    if options.continuations and not options.data:
        raise SystemExit("--continuations takes its prefixes from --data, which is not given")
    if options.self_distill == "data" and not options.data:
        raise SystemExit("--self-distill data takes its prompts from --data, which is not given")
    if options.self_distill not in (None, "", "data") and not _instructions_file(options.self_distill).is_file():
        raise SystemExit(f"--self-distill names {options.self_distill!r}, and there is no such file")


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the second from a torch without CUDA
        reason = str(error).partition("\n")[0]
        raise SystemExit(
            f"--device must be one that torch can use here, as cpu or cuda, got {name!r}: {reason}"
        ) from error


def _instructions_file(name: str) -> Path:
    return INSTRUCTIONS if name == "shipped" else Path(name)


def read_texts(options: argparse.Namespace) -> tuple[list[Document], list[str]]:
    """The documents of --data and the instructions of --self-distill."""
    try:
        documents = read_documents(options.data, column=options.data_column, most=options.data_rows)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from error
    except ValueError as error:
        raise SystemExit(f"--data {error}") from error
    except OSError as error:
        raise SystemExit(f"--data has a file that cannot be read: {error}") from error
    if options.data and not documents:
        raise SystemExit(f"--data holds no .py, .txt, .md, .rst, .jsonl or .parquet text: {' '.join(options.data)}")
    if options.self_distill == "data":
        asked = list(dict.fromkeys(document.name for document in documents if document.messages))
        if not asked:
            raise SystemExit("--self-distill data needs rows with messages in --data, and there are none")
        return documents, asked
    try:
        prompts = _instructions_file(options.self_distill).read_text(encoding="utf-8") if options.self_distill else ""
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(
            f"--self-distill must be a text file in UTF-8, got {options.self_distill!r}: {error}"
        ) from error
    return documents, list(dict.fromkeys(line.strip() for line in prompts.splitlines() if line.strip()))


def settings_from(options: argparse.Namespace, kind: type[_Settings]) -> _Settings:
    """A dataclass whose fields are options of the same names."""
    return kind(**{field.name: getattr(options, field.name) for field in dataclasses.fields(kind)})  # type: ignore[arg-type]
