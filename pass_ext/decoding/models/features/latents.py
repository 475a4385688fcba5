"""Multi-head latent attention in a model's shadow: caches hold one latent of each token for the keys and values of all heads.

A layer expands the latent c of a token: head h has the key ``W_k[h] c``, beside the rotated key r that all heads share, and the
value ``W_v[h] c``. Queries and results can be multiplied instead:

    q . (W_k c, r) = (W_k^T q, r's part of q) . (c, r)        sum of p W_v c = W_v (sum of p c)

So the few rows of a step attend with one head of keys (c, r), whose first numbers are its values. The many rows of a prompt
attend faster to the expanded heads, which are made for the call alone. On a GPU no kernel with matrix fragments has rows of 576
numbers, so layers there keep their expanded heads, but for those of models whose indexers choose keys: lists of keys have one
kernel for all widths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.equivalence import difference_of
from pass_ext.decoding.models.features.feature import Feature, Pair
from pass_ext.decoding.models.features.indexed import Choice
from pass_ext.decoding.models.layer_attention import Attending, LayerAttention
from pass_ext.decoding.models.module_ops import is_autocast_enabled, is_plain, is_untouched, most_few_rows
from pass_ext.decoding.models.modules import modules_of
from pass_ext.decoding.models.row_attention import attend_by
from pass_ext.decoding.models.shadow import takes_rows_of_our_call
from pass_ext.ops import linear  # noqa: F401, which registers the op
from pass_ext.ops.attention import MOST_KEY_DIM, MOST_VALUE_DIM

_linear = torch.ops.pass_ext.linear_rows.default

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_COMPARED = 3  # rows


class LatentAttention(Feature):
    def unadapted(self, model: Any) -> tuple[str, str] | None:
        why = "which expands latents for all rows alike, so those of slots cannot be expanded otherwise"
        return (".kv_b_proj", why) if latent_layers(model) else None

    def serve(self, shadow: Any, embedded: Callable[[Tensor], Tensor]) -> None:
        """Layers that expand latents give them to attention as they are."""
        for part in _latent_parts(shadow):
            latents = vars(part)["expand_kv"] = Latents(part)
            attend_by(part, latents.of)

    def other_format(self, model: Any) -> str:
        """Layers that keep expanded heads have other caches than transformers, which keeps latents."""
        by_latents = {part.layer_idx for part in modules_of(model) if vars(part).get("kv_lora_rank") is not None}
        is_expanded = bool(by_latents) and not by_latents <= latent_layers(model).keys()
        return "latent keys and values (kv_lora_rank)" if is_expanded else ""

    def from_theirs(self, model: Any, cache: Any, pairs: Mapping[int, Pair], columns: Tensor) -> Mapping[int, Pair]:
        """Theirs are latents and rotated keys."""
        joined = {layer: torch.cat(pairs[layer], -1) for layer in latent_layers(model).keys() & pairs}
        return {layer: (keys, keys[..., : pairs[layer][0].shape[-1]]) for layer, keys in joined.items()}

    def to_theirs(self, model: Any, pairs: Mapping[int, Pair]) -> Mapping[int, Pair]:
        sizes = latent_layers(model)
        split = {
            layer: pairs[layer][0][..., : sum(sizes[layer])].split(sizes[layer], -1) for layer in sizes.keys() & pairs
        }
        return {layer: (latents, rotated) for layer, (latents, rotated) in split.items()}


def latent_layers(model: nn.Module) -> dict[int, tuple[int, int]]:
    """The layers of a transformers model that attend by latents -> the numbers of a latent and of a rotated key."""
    return {part.layer_idx: (part.kv_lora_rank, part.qk_rope_head_dim) for part in _latent_parts(model)}


def _latent_parts(model: nn.Module) -> list[Any]:
    if is_autocast_enabled():
        return []
    parts = modules_of(model)
    expanding = [part for part in parts if hasattr(type(part), "expand_kv")]
    any_device = bool(expanding) and any(part._modules.get("indexer") is not None for part in parts)
    return [part for part in expanding if _expands_latents(part, any_device=any_device)]


def _expands_latents(part: Any, *, any_device: bool) -> bool:
    """True for attention that expands latents by the weights of one linear layer, on the CPU or on any device. Latents too wide
    for ``attention_tree`` are expanded for the cache, as layers of another form are."""
    method, layer = type(part).expand_kv, part._modules.get("kv_b_proj")
    if "expand_kv" in vars(part) or type(layer) is not nn.Linear or not is_untouched(layer):
        return False
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    if weight is None or not is_plain(weight) or not (weight.is_cpu or any_device) or bias is not None:
        return False
    if not all(isinstance(getattr(part, name, None), int) for name in _SIZES):
        return False
    if part.kv_lora_rank > MOST_VALUE_DIM or part.kv_lora_rank + part.qk_rope_head_dim > MOST_KEY_DIM:
        return False
    return difference_of(method, None, partial(_is_right, part)) is None


@torch.no_grad()
def _is_right(part: Any) -> bool:
    weight = part.kv_b_proj.weight
    generator = torch.Generator().manual_seed(0)
    latents, rotated = (
        torch.randn(1, 1, _COMPARED, width, generator=generator).to(weight)
        for width in (part.kv_lora_rank, part.qk_rope_head_dim)
    )
    keys, values = part.expand_kv(latents, rotated)
    of_keys, of_values = _matrices(part)
    heads = [torch.einsum("nr,hrd->hnd", latents[0, 0].float(), of_keys.float())]
    heads += [torch.einsum("nr,hdr->hnd", latents[0, 0].float(), of_values.float())]
    heads[0] = torch.cat([heads[0], rotated[0].float().expand(len(heads[0]), -1, -1)], 2)
    most = 1e-4 if weight.dtype == torch.float32 else 2e-2
    return all(
        x[0].shape == y.shape and torch.allclose(x[0].float(), y, rtol=most, atol=most * float(y.abs().max()))
        for x, y in zip((keys, values), heads, strict=True)
    )


def _matrices(part: Any) -> tuple[Tensor, Tensor]:
    """The weights by head: of keys, a transposed copy ``[heads, rank, D]``; of values, a view ``[heads, D of v, rank]``."""
    by_head = part.kv_b_proj.weight.detach().unflatten(0, (-1, part.qk_nope_head_dim + part.v_head_dim))
    of_keys, of_values = by_head.split([part.qk_nope_head_dim, part.v_head_dim], 1)
    return of_keys.transpose(1, 2).contiguous(), of_values


class ByLatents(Attending):
    """Few rows attend to latents, the many of one text to expanded heads. choice: an indexer's; None: there is none."""

    def __init__(self, latents: Latents, choice: Choice | None) -> None:
        self._latents, self._choice = latents, choice

    def attend(self, layer: LayerAttention) -> Tensor:
        latents = self._latents
        lists: Tensor | None = None
        after: Tensor | None = None
        if self._choice is not None:
            lists, after = self._choice.of(layer)
        layer.keep(after, v=layer.k[..., : latents.rank])
        absorbs = lists is not None or layer.batch_invariant or latents.takes(layer.q)
        requests: list[int] = (
            [] if absorbs else layer.trees.cu_nodes.diff().nonzero().flatten().tolist()
        )  # that have rows
        if len(requests) != 1:
            return latents.expanded(layer.attend(latents.absorbed(layer.q), lists))
        return layer.attend_to(*latents.heads(layer.keys_of(requests[0])))


class Latents:
    """What a layer calls in place of its ``expand_kv``, and what attention expands by."""

    def __init__(self, part: Any) -> None:
        self._part, self._expand = part, part.expand_kv
        self.rank: int = part.kv_lora_rank
        self._known: tuple[Any, Tensor, Tensor] | None = None

    def __call__(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """``[1, 1, N, rank]`` and ``[1, 1, N, D of r]`` -> keys ``[1, 1, N, rank + D of r]``, and values, their first
        numbers."""
        keys = torch.cat((latents, rotated), -1)
        return keys, keys[..., : self.rank]

    def of(self, given: dict[str, Any]) -> ByLatents:
        """How the layer attends, by the arguments that it gives to attention."""
        choice = given.get("indices")
        return ByLatents(self, given.pop("indices") if isinstance(choice, Choice) else None)

    def takes(self, rows: Tensor) -> bool:
        """True for few rows, which attend to the latents."""
        return takes_rows_of_our_call(len(rows), most_few_rows(rows.dtype, rows.is_cpu))

    def heads(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys ``[T, heads, D]`` and values of tokens with keys ``[T, 1, rank + D of r]``."""
        latents, rotated = keys.transpose(0, 1)[None].tensor_split([self.rank], 3)
        expanded_keys, values = self._expand(latents, rotated)
        return expanded_keys[0].transpose(0, 1), values[0].transpose(0, 1)

    def absorbed(self, q: Tensor) -> Tensor:
        """Queries ``[N, heads, D]`` of expanded keys -> those of latents ``[N, heads, rank + D of r]``."""
        of_keys, _ = self._weights()
        plain, rotated = q.tensor_split([of_keys.shape[2]], 2)
        return torch.cat((self._by_head(plain, of_keys), rotated), 2)

    def expanded(self, out: Tensor) -> Tensor:
        """Sums of latents ``[N, heads, rank]`` -> of values ``[N, heads, D of v]``."""
        return self._by_head(out, self._weights()[1])

    def _weights(self) -> tuple[Tensor, Tensor]:
        weight = self._part.kv_b_proj.weight
        # Numbers may change inside a weight, which only some tensors count.
        state = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        if self._known is None or self._known[0][0] is not weight or self._known[0][1] != state:
            self._known = (weight, state), *_matrices(self._part)
        return self._known[1:]

    def _by_head(self, x: Tensor, weights: Tensor) -> Tensor:
        """``[N, heads, in]`` by ``[heads, out, in]`` -> ``[N, heads, out]``."""
        if not self.takes(x):  # of several texts
            return torch.bmm(x.transpose(0, 1), weights.transpose(1, 2)).transpose(0, 1)
        return torch.stack([_linear(x[:, head], weights[head], None) for head in range(len(weights))], 1)
