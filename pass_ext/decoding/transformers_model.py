"""``TransformersModel``: a transformers decoder-only model, as it is, as a packed model.

Its forward runs on one "batch" of all rows, ``inputs_embeds [1, N, d]`` with explicit ``position_ids`` and no cache; a
registered attention function hands queries, keys and values to the session. Called by ``model.packed_model``.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.attachment import KEY, attached, attachment_of
from pass_ext.decoding.attention_arguments import unsupported
from pass_ext.decoding.layer_offsets import LayerOffsets
from pass_ext.decoding.model import Adapted, Attend
from pass_ext.ops.lookahead import lookahead_embed

_attending: ContextVar[Attend | None] = ContextVar("attending", default=None)

# What fails for want of memory or in the device says nothing of the model.
_MACHINE = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)

_FULL = {"full_attention", "sliding_attention", "attention"}


class TransformersModel(Adapted):
    """See the module. ``attached`` is what a generation does to the model meanwhile."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.name = model.config.model_type
        self.generation_config = getattr(model, "generation_config", None)
        module = model.get_input_embeddings()
        self._embedding = module
        self.table = module.weight
        self._check()
        text = model.config.get_text_config(decoder=True)
        self.layers = getattr(text, "num_hidden_layers", None)
        self.most_positions = getattr(text, "max_position_embeddings", None) or self.most_positions
        self.rope_limit = _rope_limit(text)
        self.known_positions = _known_positions(model, self.most_positions)
        self._ran = False

    def _check(self) -> None:
        config = self.model.config
        text = config.get_text_config(decoder=True)
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{self.name} is an encoder-decoder model; decoder-only models are supported")
        if "position_ids" not in inspect.signature(type(_unwrapped(self.model)).forward).parameters:
            raise ValueError(
                f"{self.name}: {type(self.model).__name__}.forward takes no position_ids, so rows of a tree cannot be given "
                "their places in the text"
            )
        strange = sorted(set(getattr(text, "layer_types", None) or ()) - _FULL)
        if strange:
            raise ValueError(
                f"{self.name} has layers of the kind {', '.join(strange)}: what they keep of a text cannot be cut to the "
                "accepted tokens, so only models whose layers all attend are supported"
            )
        if getattr(text, "hidden_size_per_layer_input", 0):
            raise ValueError(
                f"{self.name} looks tokens up again in every layer, so look-ahead rows cannot be given to it"
            )
        if getattr(text, "attn_temperature_tuning", False):
            raise ValueError(
                f"{self.name} scales attention by the number of the row (attn_temperature_tuning), not by position"
            )
        if self.table.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(f"the model's dtype must be float32, float16 or bfloat16, got {self.table.dtype}")

    def embed(self, ids: Tensor, slots: Tensor) -> Tensor:
        """Through the model's own embedding module where that does more than look up."""
        if type(self._embedding) is nn.Embedding and not self._embedding._forward_hooks:
            return lookahead_embed(ids, self.table, slots)
        rows = self._embedding(ids.clamp(min=0))
        if not len(slots):
            return rows
        return torch.where((ids < 0)[:, None], slots[(-1 - ids).clamp(min=0)].to(rows.dtype), rows)

    def attached(self) -> AbstractContextManager[None]:
        """Attention and few-row linear layers go through us meanwhile."""
        return attached(self.model, _attention)

    def __call__(
        self, rows: Tensor, positions: Tensor, attend: Attend, wanted: Tensor | None, offsets: Tensor | None = None
    ) -> Tensor:
        """As ``Adapted``."""
        shifted = None if offsets is None else self._fitting(offsets)
        if self.known_positions is not None:  # drafts behind the last one are never accepted
            positions = positions.clamp(max=self.known_positions - 1)
        token = _attending.set(attend)
        try:
            if shifted is not None:
                shifted.offsets = offsets
            output = self.model(
                inputs_embeds=rows[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=0 if wanted is None else wanted,
                return_dict=True,
            )
        except _MACHINE:
            raise
        except Exception as error:
            if self._ran:
                raise
            raise self._refusal(error) from error
        finally:
            _attending.reset(token)
            if shifted is not None:
                shifted.offsets = None
        self._ran = True
        logits = output.logits[0]
        if wanted is not None and len(logits) != len(wanted):  # some models of transformers 4 ignore logits_to_keep
            return logits[wanted]
        return logits

    def _refusal(self, error: Exception) -> Exception:
        """What the first call fails with, as a sentence that begins with the model's name."""
        if isinstance(error, NotImplementedError):
            return NotImplementedError(f"{self.name}: {error}")
        if isinstance(error, ValueError):
            return ValueError(f"{self.name}: {error}")
        return ValueError(
            f"{self.name}: {type(self.model).__name__}.forward fails on packed rows (inputs_embeds [1, N, d] and position_ids, "
            f"no ids, mask or cache), so pass_ext cannot decode it: {type(error).__name__}: {error}"
        )

    def _fitting(self, offsets: Tensor) -> LayerOffsets:
        """What adds them, if they are of this model's layers."""
        text = self.model.config.get_text_config(decoder=True)
        if len(offsets) != text.num_hidden_layers:
            raise ValueError(
                f"these look-ahead slots are for {len(offsets)} layers, {self.name} has {text.num_hidden_layers}"
            )
        if offsets.shape[2] != text.hidden_size:
            raise ValueError(
                f"the slots' vectors per layer must be {text.hidden_size} wide in {self.name}, got {offsets.shape[2]}"
            )
        return attachment_of(self.model).offsets


def _unwrapped(model: Any) -> Any:
    """The model inside of torch.compile's wrapper, or peft's."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _rope_limit(text: Any) -> int | None:
    """The longest text for which no rope of the model has other frequencies than for a shorter one; None: any."""
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    limits = []
    for rope in given.values() if all(isinstance(value, dict) for value in given.values()) else (given,):
        kind, limit = rope.get("rope_type", rope.get("type")), text.max_position_embeddings
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings")
            limits.append(original or getattr(text, "original_max_position_embeddings", None) or limit)
        elif kind == "dynamic":
            limits.append(limit)
    return min(limits, default=None)


def _known_positions(model: Any, most: int) -> int | None:
    """``most``, if the model looks positions up in a table that ends there, learned or a buffer; None: it computes them."""
    tokens = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module not in tokens]
    rows = {table.num_embeddings - getattr(table, "offset", 0) for table in tables}
    rows |= {
        len(buffer) for name, buffer in model.named_buffers() if buffer.dim() == 2 and "pos" in name.rsplit(".")[-1]
    }
    return most if most in rows else None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: q, k, v ``[1, heads, N, D]``."""
    attend = _attending.get()
    if attend is None:
        raise RuntimeError(f"attention implementation {KEY!r} works inside pass_ext.generate only")
    reason = (
        unsupported(module, query.shape[2], dropout, others)
        if attention_mask is None or _is_causal(attention_mask, query.shape[2])
        else f"{type(module).__name__} hands down an attention_mask of its own"
    )
    if reason is not None:
        raise ValueError(f"pass_ext attention: {reason}, so pass_ext cannot decode this model")
    out = attend(
        module.layer_idx,  # type: ignore[arg-type]
        *(x[0].transpose(0, 1) for x in (query, key, value)),
        scale=scaling,
        softcap=softcap or 0.0,
        window=sliding_window or -1,
    )
    return out[None], None


def _is_causal(mask: Any, rows: int) -> bool:
    """Whether it says no more than that rows see those before them, as what some models of transformers 4 make of no mask."""
    if not isinstance(mask, Tensor) or mask.shape[-2:] != (rows, rows) or not mask.is_floating_point():
        return False
    if (
        mask.is_cuda and torch.cuda.is_current_stream_capturing()
    ):  # the call before, outside of the graph, was looked at
        return True
    hidden = mask < torch.finfo(mask.dtype).min / 2
    above = torch.ones(rows, rows, dtype=torch.bool, device=mask.device).triu(1)
    return bool((hidden == above).all() & (mask.masked_fill(above, 0) == 0).all())
