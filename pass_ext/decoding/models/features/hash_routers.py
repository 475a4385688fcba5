"""Routers that look the experts of a row up by its token (DeepSeek-V4's first layers), in a model's shadow.

The model is called with embeddings, so in the shadow a router gets the tokens of the call. A look-ahead slot counts as the
token that ends texts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from pass_ext.decoding.models.features.feature import Feature
from pass_ext.decoding.models.modules import modules_of
from pass_ext.decoding.models.shadow import own_call


class HashRouters(Feature):
    def serve(self, shadow: Any, embedded: Callable[[Tensor], Tensor]) -> None:
        """Routers that look tokens up take those of a call."""
        for part in modules_of(shadow):
            if "tid2eid" in part._buffers:
                ends = getattr(shadow.config.get_text_config(decoder=True), "eos_token_id", None)
                end = ends[0] if isinstance(ends, (list, tuple)) else ends
                part.forward = partial(_routed, part.forward, end or 0)


def _routed(forward: Callable[..., Any], end: int, /, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    ids: Tensor = own_call("this router is").attend.ids
    return forward(hidden_states, ids.masked_fill(ids < 0, end)[None])
