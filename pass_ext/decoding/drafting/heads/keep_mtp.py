"""``keep_mtp``: puts the MTP layers of a model's checkpoint beside the same model, tuned and saved by transformers.

transformers drops these tensors when it loads the model, so what it saves has none. They go into a file of their own, as the
checkpoint has them; an index of several files names them too.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from pass_ext.decoding.drafting.heads.checkpoint import HeadCheckpoint
from pass_ext.modules.files import write_tensors

_FILE, _INDEX = "mtp.safetensors", "model.safetensors.index.json"
_ENDS = "eh_proj.weight", "e_proj.weight"
"""A tensor that a layer has if it is an MTP layer among the model's own."""


def keep_mtp(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> list[str]:
    """Copies the tensors of the MTP layers of a checkpoint into the folder of a model that was saved without them.

    Args:
        path: the checkpoint that the model came from: a folder, or a name on the Hub.
        folder: of the saved model, with its config.json. ``load_drafter(folder, model)`` then reads them there.

    Returns:
        Their names.
    """
    checkpoint, place = HeadCheckpoint(path, call="keep_mtp"), Path(folder)
    layers = {name.removesuffix(end) for name in checkpoint.names for end in _ENDS if name.endswith("." + end)}
    names = sorted(
        name for name in checkpoint.names if re.search(r"(^|\.)mtp\.", name) or name.startswith(tuple(layers))
    )
    if not names:
        raise checkpoint.refusal("it has no MTP layers: give the checkpoint that the model came from")
    if not (place / "config.json").is_file():
        raise ValueError(f"keep_mtp: folder must be that of a saved model, and {place} has no config.json")
    tensors = {name: checkpoint.any_tensor(name).contiguous() for name in names}
    write_tensors(place / _FILE, tensors, {"format": "pt"})
    index = place / _INDEX
    if index.is_file():
        described = json.loads(index.read_text())
        described["weight_map"] |= dict.fromkeys(names, _FILE)
        index.write_text(json.dumps(described, indent=2))
    return names
