"""Layers that attend several times in a call: twice with other values (DiffLlama), or in loops (Dory).

Each attention call has a cache of its own, by the order of the calls; transformers' caches hold them in other ways.
"""

from __future__ import annotations

from typing import Any

from pass_ext.decoding.models.features.feature import Feature

_TWICE = "lambda_std_dev"
"""A setting of models whose layers attend twice, and take one result from the other (DiffLlama)."""
_OTHER_FORMATS = {
    "diffllama": "the values of a layer once for both attentions of its heads",
    "dory": "keys and values of further loops after those of all layers",
}


class RepeatedAttention(Feature):
    def unserved(self, model: Any) -> str | None:
        text = model.config.get_text_config(decoder=True)
        if getattr(text, "recurrent_kv_cache_mode", None) == "last_loop" and text.n_recurrent_loops > 1:
            return (
                "keeps the keys of its last loop alone (recurrent_kv_cache_mode='last_loop'), so what a row sees of a token "
                "depends on whether they share a call, and rows of a tree would see other keys than those of plain decoding"
            )
        return None

    def uncut(self, model: Any) -> str | None:
        text = model.config.get_text_config(decoder=True)
        if getattr(text, _TWICE, None) is None:
            return None
        layers = text.num_hidden_layers
        return f"attends {2 * layers} times in its {layers} layers"

    def other_format(self, model: Any) -> str:
        return _OTHER_FORMATS.get(model.config.model_type, "")
