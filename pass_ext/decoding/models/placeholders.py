"""``replaced_ids``: tokens that a model replaces by others before it embeds them.

gemma4 does it with the tokens that stand for pictures, films and sound. A packed call has embeddings and no ids, so it must
replace them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.models.patching.row_attention import OurCall, our_call

_ORDINARY = ("bos", "eos", "pad", "sep", "cls", "mask", "unk", "decoder_start", "forced_bos", "forced_eos")


def placeholder_ids(config: Any, vocabulary: int) -> list[int]:
    """The tokens that a config and its parts name, as ``image_token_id``, but for those of texts."""
    found = {
        value
        for part in _configs(config)
        for name, value in vars(part).items()
        if name.endswith(("_token_id", "_token_index")) and not name.startswith(_ORDINARY) and type(value) is int
    }
    return sorted(value for value in found if 0 <= value < vocabulary)


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _configs(part)


def replaced_ids(model: Any, name: str, ids: list[int], stand_ins: list[int], embed: Any) -> dict[int, int]:
    """The tokens among ``ids`` that the model embeds as another one, and that one, which must be among ``stand_ins``.

    Compares the first layer's keys, called with ids and with their embeddings.

    Args:
        model: that attends by ``our_call``.
        name: for messages.
        embed: gives the rows ``[N, d]`` of ids ``[N]``, as the model's table has them.
    """
    device = model.get_input_embeddings().weight.device
    known = torch.tensor([*ids, *stand_ins], device=device)
    try:
        ours, theirs = _first_keys(model, inputs_embeds=embed(known)[None]), _first_keys(model, input_ids=known[None])
    except Exception:  # a generation's first call says what is wrong
        return {}
    replaced: dict[int, int] = {}
    for number, token in enumerate(ids):
        if torch.equal(theirs[number], ours[number]):
            continue
        same = (stand_in for row, stand_in in enumerate(stand_ins) if torch.equal(theirs[number], ours[len(ids) + row]))
        stand_in = next(same, None)
        if stand_in is None:
            raise ValueError(
                f"{name} embeds token {token}, which its config names as a placeholder, otherwise than by its table: pass_ext "
                "gives the model embeddings of its own making, so it cannot decode this model"
            )
        replaced[token] = stand_in
    return replaced


class _Keys(Exception):
    """Ends a call at its first layer's attention."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


def _first_keys(model: Any, **inputs: Tensor) -> Tensor:
    (rows,) = inputs.values()
    seen = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        raise _Keys(k)

    try:
        with our_call(OurCall(attend, "", (), seen)):  # all at one position, so that equal tokens have equal keys
            model(**inputs, attention_mask=seen, position_ids=torch.zeros_like(seen).long(), use_cache=False)
    except _Keys as found:
        return found.keys
    raise RuntimeError("no layer has attended")
