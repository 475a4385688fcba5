"""Writes the fingerprint of a model's embedding table into the files of modules that were trained for it.

`python -m tools.fingerprints MODEL FILE ...`. Only the metadata change: the bytes of the tensors are copied as they are.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path

import torch
from torch import Tensor

from pass_ext.checkpoint import load_checkpoint
from pass_ext.modules.files import fingerprint_of, trained_file

FORMATS = "pass_ext.lookahead.1", "pass_ext.exit.1"


def write_fingerprint(path: Path, table: Tensor) -> str:
    """Sets that of a model's table ``[V, d]`` in the metadata of a file of slots or of an exit adapter, and returns it.

    A safetensors file is its header's length, the header as JSON, and the tensors' bytes.
    """
    with trained_file(path, "look-ahead embedding or exit adapter", *FORMATS) as file:
        sizes = [file.count("vocabulary"), file.count("hidden_size")]
    if sizes[0] not in (0, table.shape[0]) or sizes[1] != table.shape[1]:
        raise ValueError(f"{path} is for an embedding table of {sizes}, the model's is {list(table.shape)}")
    whole, fingerprint = path.read_bytes(), fingerprint_of(table)
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    header["__metadata__"]["fingerprint"] = fingerprint
    described = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    described += b" " * (-len(described) % 8)  # the tensors begin at a multiple of eight
    path.write_bytes(struct.pack("<Q", len(described)) + described + whole[8 + length :])
    return fingerprint


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file, or a transformers model folder or name")
    parser.add_argument(
        "files", nargs="+", type=Path, help="safetensors files of look-ahead embeddings or exit adapters"
    )
    options = parser.parse_args(arguments)
    model, _ = load_checkpoint(options.model, torch.float32)
    for file in options.files:
        try:
            print(f"{file}: {write_fingerprint(file, model.get_input_embeddings().weight)}")
        except (OSError, ValueError) as error:
            raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
