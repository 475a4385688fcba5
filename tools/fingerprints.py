"""Writes the fingerprint of a model's embedding table into the files of modules that were trained for it.

`python -m tools.fingerprints MODEL FILE ...`. Only the metadata change: the bytes of the tensors are copied as they are.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path

import torch

from pass_ext.checkpoint import load_checkpoint
from pass_ext.modules.fingerprint import fingerprint_of


def write_fingerprint(path: Path, fingerprint: str) -> None:
    """Sets it in the metadata of a safetensors file: a header's length, the header as JSON, the tensors' bytes."""
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    header["__metadata__"]["fingerprint"] = fingerprint
    described = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    described += b" " * (-len(described) % 8)  # the tensors begin at a multiple of eight
    path.write_bytes(struct.pack("<Q", len(described)) + described + whole[8 + length :])


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file, or a transformers model folder or name")
    parser.add_argument(
        "files", nargs="+", type=Path, help="safetensors files of look-ahead embeddings or exit adapters"
    )
    options = parser.parse_args(arguments)
    model, _ = load_checkpoint(options.model, torch.float32)
    fingerprint = fingerprint_of(model.get_input_embeddings().weight)
    for file in options.files:
        write_fingerprint(file, fingerprint)
        print(f"{file}: {fingerprint}")


if __name__ == "__main__":
    main()
