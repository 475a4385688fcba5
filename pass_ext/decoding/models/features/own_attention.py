"""Layers that compute attention by code of their own (GPT-Neo, Bloom, MPT, TrOCR), in a model's shadow.

    GPT-Neo       logit = q . k, in local layers of the last ``window`` keys, as many as the last row of their buffer shows
    Bloom, MPT    logit = scale * (q . k) + slope * position of k
    TrOCR         logit = (scale * q) . k, of a text's keys or of an encoder's

In the shadow they give queries, keys and values to the attention of a call. They are compared first, on a few rows as one text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pass_ext.decoding.models.equivalence import difference_of
from pass_ext.decoding.models.features.feature import Feature, Pair
from pass_ext.decoding.models.features.key_biases import KeyBias, key_biases, without_columns
from pass_ext.decoding.models.modules import modules_of
from pass_ext.decoding.models.shadow import own_call

Attention = Callable[..., Tensor]
"""Of a layer's number, q, k and v ``[N, heads, D]``, bias, scale, window -> ``[N, heads, D]``; of an encoder without k, v."""
_GPT_NEO, _BLOOM, _MPT, _TROCR = "GPTNeoSelfAttention", "BloomAttention", "MptAttention", "TrOCRAttention"
_COMPARED = 6  # rows


class OwnAttention(Feature):
    def unserved(self, model: Any) -> str | None:
        biases = key_biases(model)
        for part in _parts(model):
            if type(part).__name__ == _TROCR and part.kdim != part.embed_dim:
                continue  # reads an encoder's outputs; the layer's other one shows what it computes
            form = tuple(sorted((key, x) for key, x in vars(part).items() if isinstance(x, (int, float, str))))
            weight = next(part.parameters())
            replaced = type(part)._attn if type(part).__name__ == _GPT_NEO else type(part).forward
            difference = difference_of(
                replaced, (*form, weight.dtype, weight.shape), partial(_computes_alike, part, biases)
            )
            if difference is not None:
                return f"has {type(part).__name__}, which {difference}, so pass_ext cannot decode this model"
        return None

    def needs_no_positions(self, model: Any) -> bool:
        return bool(key_biases(model))

    def attends(self, model: Any) -> bool:
        return bool(_parts(model))

    def serve(self, shadow: Any, embedded: Callable[[Tensor], Tensor]) -> None:
        """These layers attend to the rows of a call."""
        biases = key_biases(shadow)
        for part in _parts(shadow):
            _serve(part, _of_call, biases)

    def from_theirs(self, model: Any, cache: Any, pairs: Mapping[int, Pair], columns: Tensor) -> Mapping[int, Pair]:
        """With the biases of the keys of each text's first tokens."""
        biases, positions = key_biases(model), torch.arange(columns.shape[1], device=columns.device)
        return {
            layer: (biases[layer].keys(pairs[layer][0], positions.to(pairs[layer][0].device)), pairs[layer][1])
            for layer in biases.keys() & pairs
        }

    def to_theirs(self, model: Any, pairs: Mapping[int, Pair]) -> Mapping[int, Pair]:
        biases = key_biases(model)
        return {
            layer: (without_columns(pairs[layer][0], biases[layer]), pairs[layer][1]) for layer in biases.keys() & pairs
        }


def _parts(model: nn.Module) -> list[Any]:
    return [part for part in modules_of(model) if type(part).__name__ in (_GPT_NEO, _BLOOM, _MPT, _TROCR)]


def _serve(part: Any, attend: Attention, biases: dict[int, KeyBias]) -> None:
    if type(part).__name__ == _GPT_NEO:
        window = int(part.bias[0, 0, -1].sum()) if part.attention_type == "local" else -1
        part._attn = torch.compiler.disable(partial(_gpt_neo, partial(attend, part.layer_id, scale=1.0, window=window)))
        return
    if type(part).__name__ == _TROCR:
        part.forward = torch.compiler.disable(partial(_trocr, attend, part))
        return
    attended = _bloom if type(part).__name__ == _BLOOM else _mpt
    part.forward = torch.compiler.disable(partial(attended, partial(attend, bias=biases[part.layer_idx]), part))


def _gpt_neo(attend: Attention, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """In place of ``_attn``: ``[1, heads, N, D]`` each."""
    return attend(*(x[0].transpose(0, 1) for x in (query, key, value))).transpose(0, 1)[None], None


def _bloom(
    attend: Attention, part: Any, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    rows = (x[0].transpose(0, 1) for x in part._reshape(part.query_key_value(hidden_states)))
    out = attend(part.layer_idx, *rows, scale=part.inv_norm_factor)
    return residual + part.dense(out.flatten(1)[None]), None


def _mpt(attend: Attention, part: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    mixed = part.Wqkv(hidden_states)
    if part.clip_qkv:
        mixed = mixed.clamp(-part.clip_qkv, part.clip_qkv)
    rows = (x[0].unflatten(-1, (part.n_heads, -1)) for x in mixed.chunk(3, -1))
    out = attend(part.layer_idx, *rows, scale=part.softmax_scale)
    return part.out_proj(out.flatten(1)[None]), None


def _trocr(
    attend: Attention, part: Any, hidden_states: Tensor, key_value_states: Tensor | None = None, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    rows = [part.q_proj(hidden_states) * part.scaling]
    if key_value_states is None:
        rows += part.k_proj(hidden_states), part.v_proj(hidden_states)
    out = attend(part.layer_idx, *(x[0].unflatten(-1, (part.num_heads, -1)) for x in rows), scale=1.0)
    return part.out_proj(out.flatten(1)[None]), None


def _of_call(
    layer: int,
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    scale: float,
    window: int = -1,
    bias: KeyBias | None = None,
) -> Tensor:
    call = own_call("this attention is")
    if k is None or v is None:
        out: Tensor = call.attend.of_encoder(layer, q, scale=scale)
        return out
    if bias is not None:
        if call.attend.cache_dtype is not None:
            raise ValueError(
                f"{call.model}: Session(cache_dtype=None) alone decodes this model: the biases of its keys lie after their "
                "numbers, and 8 bits for both are too few"
            )
        q, k = bias.queries(q), bias.keys(k, call.positions)
    number = call.attended.note(layer, k, v, call.attend.layers)
    out = call.attend(number, q, k, v, scale=scale, window=window)
    return out


@torch.no_grad()
def _computes_alike(part: Any, biases: dict[int, KeyBias]) -> bool:
    """Compares a few rows as one text."""
    like, kind = next(part.parameters()), type(part).__name__
    hidden = torch.randn(1, _COMPARED, like.shape[1], generator=torch.Generator().manual_seed(0)).to(like)
    causal = torch.ones(_COMPARED, _COMPARED, dtype=torch.bool, device=like.device).tril()
    hides = torch.zeros_like(causal, dtype=like.dtype).masked_fill(~causal, torch.finfo(like.dtype).min)
    positions, ours = torch.arange(_COMPARED, device=like.device), _copy(part)
    inputs: dict[str, Any] = {"attention_mask": hides[None, None]}
    if kind in (_BLOOM, _MPT):
        bias = biases[part.layer_idx]
        by_key = bias.slopes[:, None, None] * positions
        inputs |= {"residual": hidden, "alibi": by_key.to(like.dtype)} if kind == _BLOOM else {"position_bias": by_key}
    if kind == _MPT:
        inputs["attention_mask"] = ~causal[None, None]
    _serve(ours, partial(_plain, positions), biases)
    mine, its = (each(hidden, **inputs)[0].float() for each in (ours, part))
    most = 1e-4 if like.dtype == torch.float32 else 5e-2
    return torch.allclose(mine, its, rtol=0.0, atol=most * float(its.abs().max()))


def _copy(part: nn.Module) -> Any:
    """The module once more, on the same weights."""
    other = object.__new__(type(part))
    vars(other).update(vars(part))
    return other


def _plain(
    positions: Tensor,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int = -1,
    bias: KeyBias | None = None,
) -> Tensor:
    """The same for the rows of one text, by PyTorch."""
    if bias is not None:
        q, k = bias.queries(q), bias.keys(k, positions)
    distances = positions[:, None] - positions
    seen = (distances >= 0) & ((distances < window) | (window < 0))
    heads = (x.transpose(0, 1).float() for x in (q, k, v))
    out: Tensor = functional.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale)  # type: ignore[misc, arg-type]
    return out.transpose(0, 1).to(q.dtype)
