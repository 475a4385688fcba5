"""Per-layer embeddings (Gemma 3n and 4), in a model's shadow: each layer adds a vector of the row's token from a second table.

A call on packed rows has no ids; without them such a model leaves the vectors out, or searches its first table for every row.
In the shadow they are looked up by the ids of the call's rows. A look-ahead slot counts as the token that pads texts, as
pictures and sound do in these models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pass_ext.decoding.models.features.feature import Feature
from pass_ext.decoding.models.parts import decoder_of
from pass_ext.decoding.models.shadow import own_call

_METHODS = ("get_per_layer_inputs", "project_per_layer_inputs")
_TABLE = "embed_tokens_per_layer"


_SETTING = "hidden_size_per_layer_input"


class PerLayerInputs(Feature):
    def unserved(self, model: Any) -> str | None:
        if not _width(model):
            return None
        decoder = decoder_of(model)
        if _TABLE in decoder._modules and all(hasattr(decoder, name) for name in _METHODS):
            return None
        return (
            f"looks tokens up again in every layer, and {type(decoder).__name__} has no {', '.join((_TABLE, *_METHODS))}, by "
            "which pass_ext looks them up for the rows of a tree, so it cannot decode this model"
        )

    def untrained(self, model: Any, length: int) -> str | None:
        return f"its layers look tokens up once more ({_SETTING}), and slots are no tokens" if _width(model) else None

    def uncut(self, model: Any) -> str | None:
        return f"has one table of embeddings for all its layers ({_SETTING})" if _width(model) else None

    def serve(self, shadow: Any, embedded: Callable[[Tensor], Tensor]) -> None:
        """Embeddings are looked up by the ids of a call's rows."""
        if not _width(shadow):
            return
        decoder = decoder_of(shadow)
        pad = getattr(shadow.config.get_text_config(decoder=True), "pad_token_id", None) or 0
        look_up, project = (getattr(decoder, name) for name in _METHODS)

        def projected(rows: Tensor, _: Any = None) -> Tensor:
            ids = embedded(own_call("these embeddings are").attend.ids)
            result: Tensor = project(rows, look_up(ids.masked_fill(ids < 0, pad)[None]))
            return result

        decoder.get_per_layer_inputs = _nothing
        decoder.project_per_layer_inputs = projected


def _width(model: Any) -> int:
    return getattr(model.config.get_text_config(decoder=True), _SETTING, 0) or 0


def _nothing(*_: Any) -> None:
    """Nothing is looked up before ``project_per_layer_inputs``, which does it."""
