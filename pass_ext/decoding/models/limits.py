"""What a transformers model allows: which are refused, how long texts may be, and tokens that a model replaces by others."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.features.table import FEATURES, attending_layers, first, unknown_kinds
from pass_ext.decoding.models.layer_kinds import kinds_of
from pass_ext.decoding.models.modules import modules_of
from pass_ext.decoding.models.parts import configs_of, decoder_of, has_encoder, unwrapped
from pass_ext.decoding.models.row_attention import AttentionCalls, reads_keys_of_cache
from pass_ext.decoding.models.shadow import OurCall, our_call
from pass_ext.ops.common.uploaded import uploaded


def check_model(model: Any, name: str, dtype: torch.dtype) -> None:
    """Refuses models that packed rows cannot be given to. dtype: of the table of embeddings."""
    text = model.config.get_text_config(decoder=True)
    reason = _unserved_encoder(unwrapped(model)) if has_encoder(model) else None
    if reason is not None:
        raise ValueError(f"{name} {reason}, so pass_ext cannot decode this model")
    if name.startswith("kosmos"):
        raise ValueError(
            f"{name} counts positions by ids, from its padding token's on, and rows of a tree are embeddings, so pass_ext "
            "cannot decode this model"
        )
    inner = unwrapped(model)
    if getattr(text, "alibi", False):
        raise ValueError(
            f"{name} adds a bias by the distance of tokens to its mask (alibi), which pass_ext does not implement, so it "
            "cannot decode this model"
        )
    # Of a class that names the kinds of its layers, this model may have none that keeps a state.
    if getattr(inner, "_is_stateful", False) and not kinds_of(text):
        raise ValueError(
            f"{name} keeps a state of each text in code of its own, so pass_ext cannot continue it along the branches of a tree"
        )
    needs = attending_layers(text) != {} and not any(feature.needs_no_positions(inner) for feature in FEATURES)
    if needs and position_taker(model) is None:
        raise ValueError(
            f"{name}: {type(model).__name__}.forward takes no position_ids, so rows of a tree cannot be given "
            "their places in the text"
        )
    lost = _lost_adapter(model)
    if lost is not None:
        raise ValueError(
            f"{name} {lost}: pass_ext gives the model packed rows of its own making, which would leave it out; use "
            "the model's own generate, or an adapter that changes layers only, as LoRA"
        )
    strange = unknown_kinds(text)
    if strange:
        raise ValueError(
            f"{name} has layers of the kind {', '.join(strange)}: what they keep of a text cannot be cut to the "
            "accepted tokens, so only models whose layers attend, or keep a state that pass_ext knows, are supported"
        )
    reason = first(lambda feature: feature.unserved(inner))
    if reason is not None:
        raise ValueError(f"{name} {reason}")
    if reads_keys_of_cache(inner):
        raise ValueError(
            f"{name} has layers that read the keys of other layers from transformers' cache, which pass_ext's calls do not have"
        )
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"the model's dtype must be float32, float16 or bfloat16, got {dtype}")


def position_taker(model: Any) -> Any:
    """The outermost module whose forward takes position_ids: the model, the decoder inside it, or the decoder's table of
    positions; None: none does."""
    inner = unwrapped(model)
    decoder = decoder_of(inner)
    parts = (inner, decoder, decoder._modules.get("embed_positions"))
    takers = (part for part in parts if part is not None and "position_ids" in signature(type(part).forward).parameters)
    return next(takers, None)


def _unserved_encoder(model: Any) -> str | None:
    """Why a model with an encoder cannot be decoded, to follow its name; None: it can."""
    import transformers

    takes = signature(type(model).forward).parameters
    missing = {"encoder_outputs", "decoder_inputs_embeds"} - set(takes)
    if missing:
        return f"has an encoder, and {type(model).__name__}.forward takes no {', '.join(sorted(missing))}"
    parts = modules_of(decoder_of(model))
    if any("merged_attention_mask" in signature(type(part).forward).parameters for part in parts):
        return "attends to its encoder's rows and its text in one softmax, which pass_ext does not implement"
    if "cache" not in takes:
        return f"has an encoder, which transformers from 5.24 on is needed for, got {transformers.__version__}"
    return None


def _lost_adapter(model: Any) -> str | None:
    """Describes the peft adapter that a packed call would leave out, to follow the model's name in a message; None: there is
    none.

    LoRA and similar adapters change layers and work unchanged. Prompt, prefix and p-tuning change the inputs of every call, and
    aLoRA reads token ids. A call on packed embeddings has neither, so the text would be another model's.
    """
    model = getattr(model, "_orig_mod", model)
    # While PeftModel.generate runs, custom_generate gets the inner model; this replaced method leads back to the PeftModel.
    owner = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    for wrapper in (model, owner):
        config: Any = getattr(wrapper, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False) and not getattr(wrapper, "_adapters_disabled", False):
            kind = getattr(config.peft_type, "value", config.peft_type)
            return f"has a peft adapter of the kind {kind}, which puts learned tokens, keys or values before each text"
    for part in modules_of(model) if hasattr(model, "modules") else ():
        variants = vars(part).get("lora_variant")
        if not variants:
            continue
        active = [] if getattr(part, "disable_adapters", False) else getattr(part, "active_adapters", [])
        if any(type(variants.get(name)).__name__.startswith("ALora") for name in active):
            return "has a peft adapter of the kind aLoRA, which is active after certain token ids only"
    return None


# ---- lengths ----


def kept_by_cache(text: Any) -> tuple[int, ...]:
    """How many keys of a text each layer of transformers' own cache keeps; -1: all."""
    from transformers import DynamicCache

    if getattr(text, "num_hidden_layers", None) is None:
        return ()
    return tuple(getattr(layer, "sliding_window", None) or -1 for layer in DynamicCache(config=text).layers)


def rope_limit(text: Any) -> int | None:
    """The longest text for which the model's rotary frequencies are those of a short text; None: any length."""
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    limits = []
    for rope in parameters.values() if all(isinstance(v, dict) for v in parameters.values()) else (parameters,):
        kind, limit = rope.get("rope_type", rope.get("type")), text.max_position_embeddings
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings")
            limits.append(original or getattr(text, "original_max_position_embeddings", None) or limit)
        elif kind == "dynamic":
            limits.append(limit)
    return min(limits, default=None)


def known_positions(model: Any, most: int) -> int | None:
    """``most`` if the model looks positions up in a table of that many rows, learned or a buffer; None if it computes them."""
    inner = unwrapped(model)
    owner = decoder_of(inner) if has_encoder(inner) else model
    tokens = (owner.get_input_embeddings(), model.get_output_embeddings())
    parts = modules_of(model)
    tables = [part for part in parts if isinstance(part, nn.Embedding) and part not in tokens]
    rows = {table.num_embeddings - getattr(table, "offset", 0) for table in tables}
    buffers = (buffer for part in parts for name, buffer in part._buffers.items() if "pos" in name)
    rows |= {len(buffer) for buffer in buffers if buffer is not None and buffer.dim() == 2}
    return most if most in rows else None


# ---- tokens that a model replaces ----

_ORDINARY = ("bos", "eos", "pad", "sep", "cls", "mask", "unk", "decoder_start", "forced_bos", "forced_eos")


def placeholder_ids(config: Any, vocabulary: int) -> list[int]:
    """The tokens that a config and its parts name, as ``image_token_id``, but for those of texts."""
    found = {
        value
        for part in configs_of(config)
        for name, value in vars(part).items()
        if name.endswith(("_token_id", "_token_index")) and not name.startswith(_ORDINARY) and type(value) is int
    }
    return sorted(value for value in found if 0 <= value < vocabulary)


def replaced_ids(model: Any, name: str, ids: list[int], stand_ins: list[int], embed: Any) -> dict[int, int] | None:
    """The tokens among ``ids`` that the model embeds as another one, and that one, which must be among ``stand_ins``; None: its
    calls failed.

    Compares the first layer's keys, called with ids and with their embeddings.

    Args:
        model: that attends by ``our_call``.
        name: for messages.
        embed: gives the rows ``[N, d]`` of ids ``[N]``, as the model's table has them.
    """
    device = model.get_input_embeddings().weight.device
    known = uploaded([*ids, *stand_ins], device)
    try:
        ours, theirs = (
            _first_keys(model, known, **x) for x in ({"inputs_embeds": embed(known)[None]}, {"input_ids": known[None]})
        )
    except Exception:  # a generation's first call says what is wrong
        return None
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


class _FirstLayer:
    """Ends a call where its first layer mixes rows."""

    layers = 0
    encoded = None

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    @property
    def states(self) -> _FirstLayer:
        return self

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        raise _Keys(k)

    def convolution(self, place: Any, x: Tensor, *options: Any) -> Tensor:
        raise _Keys(x)

    def earlier(self, place: Any, x: Tensor, step: int, count: int) -> list[Tensor]:
        return [torch.zeros_like(x)] * count

    def recurrent(self, place: Any, q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Tensor:
        raise _Keys(k)


def _first_keys(model: Any, ids: Tensor, **inputs: Tensor) -> Tensor:
    (rows,) = inputs.values()
    seen = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)

    places = torch.zeros_like(seen[0], dtype=torch.long)  # all at one, so that equal tokens have equal keys
    call = OurCall(_FirstLayer(ids), seen=seen, attended=AttentionCalls(), positions=places)
    named = {"position_ids": places[None]} if position_taker(model) is model else {}
    try:
        with our_call(call):
            model(**inputs, attention_mask=seen, **named, use_cache=False)
    except _Keys as found:
        return found.keys
    raise RuntimeError("no layer has attended")
