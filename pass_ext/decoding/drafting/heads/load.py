"""``load_drafter``: the method that drafts with the head of a checkpoint.

``FAMILIES`` is the table of heads by the type that their configs name. A new family is a file here with its ``HeadModule`` and
the function that reads it, a class in methods.py, and a line in this table.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from pass_ext.decoding.arguments import type_of
from pass_ext.decoding.drafting.heads.assistant import AssistantHead, read_assistant
from pass_ext.decoding.drafting.heads.checkpoint import HeadCheckpoint
from pass_ext.decoding.drafting.heads.dflash import DFlashHead, read_dflash
from pass_ext.decoding.drafting.heads.eagle3 import read_eagle3
from pass_ext.decoding.drafting.heads.head import HeadModule, TargetFacts, target_facts
from pass_ext.decoding.drafting.heads.mtp import has_mtp, read_mtp
from pass_ext.decoding.drafting.heads.peagle import PEagleHead
from pass_ext.decoding.methods import MAX_DRAFT_LEVELS, Assistant, DFlash, Eagle3, HeadMethod, Mtp
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.models.vocabulary import check_tokenizers

_log = logging.getLogger("pass_ext")


class Family(NamedTuple):
    """Heads of one kind."""

    read: Callable[[HeadCheckpoint, TargetFacts], HeadModule | DFlashHead | AssistantHead]
    method: type[HeadMethod | DFlash | Assistant]


_EAGLE3, _DFLASH = Family(read_eagle3, Eagle3), Family(read_dflash, DFlash)
_ASSISTANT = Family(read_assistant, Assistant)
_PEAGLE = Family(partial(read_eagle3, kind=PEagleHead), Eagle3)
FAMILIES: dict[str, Family] = {
    "eagle3": _EAGLE3,
    "Eagle3Speculator": _EAGLE3,
    "Eagle3DraftModel": _EAGLE3,
    "Eagle3LlamaForCausalLM": _EAGLE3,
    "LlamaForCausalLMEagle3": _EAGLE3,
    "peagle": _PEAGLE,
    "PEagleSpeculator": _PEAGLE,
    "PEagleDraftModel": _PEAGLE,
    "dflash": _DFLASH,
    "dflash2": _DFLASH,
    "dspark": _DFLASH,
    "DFlashDraftModel": _DFLASH,
    "DFlash2DraftModel": _DFLASH,
    "DSparkDraftModel": _DFLASH,
    "Qwen3DSparkModel": _DFLASH,
    "MuseGlimmerAssistantModel": _DFLASH,
    "muse_glimmer_assistant": _DFLASH,
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
}
"""By ``speculators_model_type``, or by one of ``architectures``. An MTP layer is found by its tensors."""
_COUNTS_OF_MTP = "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"
"""How configs of models call the number of their MTP layers."""


def load_drafter(
    path: str | os.PathLike[str], model: Any, tokenizer: Any = None, *, bits: int | None = None
) -> HeadMethod | DFlash | Assistant:
    """The method that drafts with a head which was trained for this model, as ``generate`` takes it.

    Args:
        path: a folder with config.json and weights, one of its files of weights, or a name on the Hub. The model's own, where
            its checkpoint has an MTP layer.
        model: as ``generate`` takes it. The head gets its dtype and device.
        tokenizer: the model's. Refused if the checkpoint has a tokenizer.json that disagrees. None: they are not compared.
        bits: of EAGLE-3 and P-EAGLE on the CPU. 4 or 8: the head's weights are rounded to so many, in groups of 32, and its
            calls read less; None: they are as the checkpoint has them.

    Returns:
        ``Eagle3``, ``Mtp``, ``DFlash`` or ``Assistant``. ``dataclasses.replace(method, length=6)`` changes its settings; the
        length is the one that the checkpoint proposes, if it does.

    Refuses with a ValueError a checkpoint of an unknown type, of another model or tokenizer, or cut off. The log names tensors
    and settings that the head has no use for.
    """
    if bits is not None and (type(bits) is not int or bits not in (4, 8)):
        raise ValueError(f"load_drafter: bits must be 4, 8 or None, got {bits!r}")
    checkpoint, target = HeadCheckpoint(path, bits), target_facts(packed_model(model))
    family = family_of(checkpoint)
    if bits is not None and family.method is not Eagle3:
        raise checkpoint.refusal(
            f"bits are of EAGLE-3 and P-EAGLE, and this head is for {family.method.__name__}: give none"
        )
    _check_verifier(checkpoint, target)
    _check_tokenizer(checkpoint, tokenizer)
    head = family.read(checkpoint, target)
    if unused := checkpoint.unused:
        _log.warning("load_drafter: %s: tensors that %s has no use for: %s", path, head.kind, ", ".join(unused))
    return family.method(head, **_proposed(checkpoint.config))


def about_drafter(path: str | os.PathLike[str], model: Any = None) -> dict[str, str]:
    """What a checkpoint is, in lines of a name and words. model: one that it must fit, as ``load_drafter`` takes it; None: the
    config alone is read."""
    checkpoint = HeadCheckpoint(path)
    method = family_of(checkpoint).method
    verifier = _verifier(checkpoint.config)
    if method is Mtp:
        verifier = {
            "name_or_path": "the model of this checkpoint",
            "architectures": checkpoint.config.get("architectures"),
        }
    classes = ", ".join(verifier.get("architectures") or ["its class is not named"])
    proposed = _proposed(checkpoint.config).get("length")
    lines = {
        "type": ", ".join(_types_of(checkpoint.config)),
        "method": method.__name__,
        "trained for": f"{verifier.get('name_or_path') or 'a model that is not named'} ({classes})",
        "drafts": "as the method says" if proposed is None else f"{proposed}, as the checkpoint proposes",
        "tensors": f"{len(checkpoint.names)}{checkpoint.absent}",
    }
    if model is not None:
        loaded = load_drafter(path, model)
        lines["fits"] = f"yes; it reads the model's states at {', '.join(map(str, loaded.head.taps))}"
    return lines


def family_of(checkpoint: HeadCheckpoint) -> Family:
    """The family of a checkpoint's head."""
    if has_mtp(checkpoint):
        return Family(read_mtp, Mtp)
    types = list(_types_of(checkpoint.config))
    found = next((FAMILIES[name] for name in types if name in FAMILIES), None)
    if found is None:
        raise checkpoint.refusal(_without_a_head(checkpoint, types))
    return found


def _without_a_head(checkpoint: HeadCheckpoint, types: list[str]) -> str:
    """Why nothing in a checkpoint drafts, and what to do."""
    parts = checkpoint.config, checkpoint.config.get("text_config") or {}
    if other := sorted(name for name in checkpoint.names if "mtp" in name):
        return (
            f"its MTP layer has a form that is not read, with a tensor {other[0]}: read are those with mtp.fc, with "
            f"mtp.0.hc_head_fn, or with eh_proj in a layer after the model's own{checkpoint.absent}"
        )
    if any(part.get(name) for part in parts for name in _COUNTS_OF_MTP):
        lost = (
            ": transformers leaves them out when it saves a model, and pass_ext.drafting.keep_mtp(path, folder) puts those of "
            "the checkpoint that it came from into its folder"
        )
        return f"its config tells of an MTP layer, and it has no tensors of one{checkpoint.absent or lost}"
    return (
        f"its config names the type {' or '.join(types) or 'of nothing'}, and heads can be of type {', '.join(FAMILIES)}, or "
        f"MTP layers in a model's own checkpoint, and this one has none{checkpoint.absent}. A whole model drafts as "
        "Speculative(model)"
    )


def _types_of(config: Mapping[str, Any]) -> Iterator[str]:
    for name in ("speculators_model_type", "architectures", "model_type"):
        value = config.get(name)
        yield from map(str, value if isinstance(value, list) else [] if value is None else [value])


def _verifier(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the config says about the model that the head was trained for."""
    return (config.get("speculators_config") or {}).get("verifier") or {}


def _check_verifier(checkpoint: HeadCheckpoint, target: TargetFacts) -> None:
    """Refuses a head that names a model of another class."""
    verifier = _verifier(checkpoint.config)
    known = verifier.get("architectures") or []
    if known and target.name not in known:
        raise checkpoint.refusal(
            f"it was trained for a {' or '.join(known)}, {verifier.get('name_or_path')}, and the model is a {target.name}: "
            "load that model, or a head of this one"
        )


def _check_tokenizer(checkpoint: HeadCheckpoint, tokenizer: Any) -> None:
    """Refuses a head whose own tokenizer has other tokens."""
    if tokenizer is None:
        return
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise TypeError(f"load_drafter: tokenizer must have get_vocab(), got {type_of(tokenizer)}")
    file = checkpoint.folder / "tokenizer.json"
    if file.exists():
        from transformers import PreTrainedTokenizerFast

        try:
            own = PreTrainedTokenizerFast(tokenizer_file=str(file))
        except Exception as error:  # tokenizers raises no narrower one
            raise checkpoint.damaged(file.name, error) from error
        try:
            check_tokenizers(tokenizer, own)
        except ValueError as error:
            raise checkpoint.refusal(str(error)) from None


def _proposed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a checkpoint proposes."""
    speculators = config.get("speculators_config") or {}
    chosen = speculators.get("default_proposal_method")
    for proposal in speculators.get("proposal_methods") or ():
        count = proposal.get("speculative_tokens")
        if proposal.get("proposal_type") == chosen and isinstance(count, int) and 1 <= count <= MAX_DRAFT_LEVELS:
            return {"length": count}
    return {}
