"""The indexers of a model, in its shadow: what they make of the rows of a call, and how their choice gets to attention.

DeepSeek-V3.2's modules make q, keys, w and factor by their own forward, which gets ``_TextKeys`` in place of the keys of the
text. What Qwen4's and MiniMax-M3's make is computed here from their parts. ``indexed.py`` has the formulas and chooses. Before
that an indexer's own forward is compared: for a few rows it must choose the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pass_ext.decoding.models.cached_rows import is_front, split_after, with_after
from pass_ext.decoding.models.equivalence import difference_of
from pass_ext.decoding.models.features import indexed
from pass_ext.decoding.models.features.feature import Feature, Pair
from pass_ext.decoding.models.features.indexed import Blocks, Choice, HeadBlocks, IndexRows
from pass_ext.decoding.models.features.latents import latent_layers
from pass_ext.decoding.models.modules import modules_of
from pass_ext.decoding.models.parts import decoder_of
from pass_ext.decoding.models.row_attention import attend_by
from pass_ext.ops.attention import MOST_KEY_DIM, MOST_VALUE_DIM

_COMPARED = 7  # rows


# ---- single tokens: DeepSeek-V3.2 ----


class _Made(Exception):
    """Ends an indexer's forward."""

    def __init__(self, q: Tensor, weights: Tensor, factor: float) -> None:
        self.q, self.weights, self.factor = q, weights, factor


class _TextKeys:
    """Stands for the keys of the text in an indexer's forward, and is its cache: keeps the keys of the rows."""

    def __init__(self) -> None:
        self.new: Tensor | None = None

    def update_indexer(self, keys: Tensor, *_: Any) -> _TextKeys:
        self.new = keys
        return self

    def _itself(self, *_: Any) -> _TextKeys:
        return self

    transpose = float = unsqueeze = _itself

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.matmul and not options and isinstance(arguments[0], Tensor):
            return _Products(arguments[0])
        raise TypeError(f"an indexer's keys are in {function.__name__}")


class _Products:
    """Stands for the products of queries and keys."""

    def __init__(self, q: Tensor, factor: float = 1.0, *, is_cut: bool = False) -> None:
        self._q, self._factor, self._is_cut = q, factor, is_cut

    def __mul__(self, factor: float) -> _Products:
        if self._is_cut or not isinstance(factor, (int, float)):
            raise TypeError(f"an indexer's products are multiplied by {factor!r}")
        return _Products(self._q, self._factor * factor)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        products = arguments[-1]
        if isinstance(products, cls):
            if function in (torch.relu, functional.relu) and not products._is_cut:
                return _Products(products._q, products._factor, is_cut=True)
            if function is torch.matmul and products._is_cut:
                raise _Made(products._q, arguments[0], products._factor)
        raise TypeError(f"an indexer's products are in {function.__name__}")


def _rows_of(indexer: Any, forward: Callable[..., Any], *inputs: Any, **named: Any) -> IndexRows:
    """Calls an indexer's forward up to its scores."""
    text = _TextKeys()
    try:
        forward(*inputs, **{**named, "cache": text})
    except _Made as made:
        q, weights, keys = made.q[0], made.weights[0, :, 0], text.new
        if keys is not None and q.shape[0] == keys.shape[1] and weights.shape == q.shape[:2]:
            return IndexRows(q.float(), keys[0], weights.float(), made.factor, indexer.index_topk)
    raise TypeError(f"{type(indexer).__name__} has other scores")


def _serve_tokens(shadow: nn.Module, part: Any, indexer: Any) -> None:
    indexer.forward = partial(_chosen, partial(_rows_of, indexer, indexer.forward))


def _chooses_alike(indexer: Any) -> bool:
    own, n, generator = copy.copy(indexer), _COMPARED, torch.Generator().manual_seed(0)
    own.index_topk = 3
    like, angles = indexer.wk.weight, torch.rand(1, n, indexer.qk_rope_head_dim // 2, generator=generator) * 6
    hidden, queries = (
        torch.randn(1, n, width, generator=generator).to(like) for width in (indexer.hidden_size, indexer.q_lora_rank)
    )
    places = tuple(torch.cat((x, x), -1).to(like) for x in (angles.cos(), angles.sin()))
    causal = torch.ones(1, n, n, dtype=torch.bool, device=like.device).tril()
    theirs = own(hidden, queries, places, causal, None)[0].long()
    rows = _rows_of(own, own.forward, hidden, queries, places, None, None)
    scores = indexed.token_scores(rows, rows.keys.float()).masked_fill(~causal[0], -torch.inf)
    chosen, highest = scores.gather(1, theirs).sort(1, descending=True).values, scores.topk(own.index_topk).values
    # Not the tokens: they may choose others of equal scores.
    return torch.allclose(chosen, highest, rtol=0.0, atol=1e-4 * float(scores.tril().abs().max()))


# ---- blocks of tokens: Qwen4 ----


def _rows_of_blocks(indexer: Any, hidden: Tensor, cos: Tensor, sin: Tensor, rotation: _Rotation) -> IndexRows:
    """hidden ``[1, N, d]``; cos, sin: ``[1, N, D of the rotation]``, of the rows."""
    made = indexer.index_qk_proj(hidden)[0].unflatten(-1, (-1, indexer.index_head_dim))
    q, keys = made.tensor_split([indexer.index_n_heads], 1)
    q = _rotated_halves(indexer.q_layernorm(q), cos[0, :, None], sin[0, :, None]).float()
    blocks = Blocks(indexer.compress_ratio, partial(_block_keys, indexer.k_layernorm, rotation))
    factor = indexer.index_head_dim**-0.5
    return IndexRows(q, keys[:, 0], q.new_ones(q.shape[:2]), factor, indexer.block_topk, blocks)


_Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of positions ``[n]``: cos and sin ``[1, n, D of the rotation]`` in the dtype of another tensor, the first argument."""


def _block_keys(norm: Any, rotation: _Rotation, keys: Tensor, positions: Tensor) -> Tensor:
    total = keys[:, 0].float()
    for token in range(1, keys.shape[1]):  # in one order, whatever the number of blocks
        total = total + keys[:, token]
    cos, sin = rotation(keys, positions)
    rotated: Tensor = _rotated_halves(norm((total / keys.shape[1]).to(keys.dtype)), cos[0], sin[0])
    return rotated


class MaskOfChosen:
    """Stands for the mask of a layer that computes with its own mask and its indexer's: holds the one and what was chosen."""

    dtype = torch.bool

    def __init__(self, mask: Any, chosen: Choice) -> None:
        self.mask, self.chosen = mask, chosen

    def __and__(self, _: Any) -> MaskOfChosen:
        return self


def _serve_blocks(shadow: nn.Module, part: Any, indexer: Any) -> None:
    rotary: Any = decoder_of(shadow).rotary_emb
    part.forward = partial(
        _attended_by_blocks, indexer, part.forward, lambda like, positions: rotary(like, positions[None])
    )
    indexer.forward = _chosen_before
    attend_by(part, _by_mask)


def _by_mask(given: dict[str, Any]) -> Choice | None:
    mask = given["attention_mask"]
    if not isinstance(mask, MaskOfChosen):
        return None
    given["attention_mask"] = mask.mask
    return mask.chosen


def _attended_by_blocks(
    indexer: Any,
    forward: Callable[..., Any],
    rotation: _Rotation,
    /,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    """The forward of attention whose indexer chooses blocks."""
    chosen = Choice(_rows_of_blocks(indexer, hidden_states, *position_embeddings, rotation))
    return forward(hidden_states, position_embeddings, MaskOfChosen(attention_mask, chosen), *rest, **named)


def _chosen_before(*_: Any, **__: Any) -> None:
    """What an indexer of blocks computes where its layer has the choice already."""


def _chooses_blocks_alike(indexer: Any) -> bool:
    own, size, generator = copy.copy(indexer), indexer.compress_ratio, torch.Generator().manual_seed(0)
    own.token_budget, own.block_topk = size, 1
    n, like = 4 * size - 1, indexer.index_qk_proj.weight
    hidden = torch.randn(1, n, like.shape[1], generator=generator).to(like)
    angles = torch.rand(1, n, indexer.index_head_dim // 4, generator=generator) * 6
    cos, sin = (torch.cat((x, x), -1).to(like) for x in (angles.cos(), angles.sin()))
    causal, numbers = torch.ones(n, n, dtype=torch.bool, device=like.device).tril(), torch.arange(n, device=like.device)
    theirs = own(hidden, (cos, sin), causal[None, None], None)[0, 0]
    rows = _rows_of_blocks(own, hidden, cos, sin, lambda _, positions: (cos[:, positions], sin[:, positions]))
    assert isinstance(rows.blocks, Blocks)
    lists = indexed.lists_of_blocks(rows, rows.blocks, rows.keys, causal, 0, numbers - 1, numbers)
    ours = torch.zeros(n, n + 1, dtype=torch.bool, device=like.device)
    differ = (ours.scatter(1, lists.long() % (n + 1), True)[:, :n] != theirs).any(1)
    ends = numbers[: 3 * size].view(3, size)[:, -1]
    keys = rows.blocks.keys(rows.keys[: 3 * size].unflatten(0, (3, size)), ends - size + 1)
    scores = indexed.token_scores(rows, keys.float()).masked_fill(ends > numbers[:, None], -torch.inf)
    best, second = scores.topk(2).values.unbind(1)
    return not bool((differ & (best - second > 1e-4 * float(best.max()))).any())


def _rotated_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    front, rest = x.tensor_split([cos.shape[-1]], -1)
    first, second = front.chunk(2, -1)
    return torch.cat((front * cos + torch.cat((-second, first), -1) * sin, rest), -1)


# ---- blocks of tokens by each head: MiniMax-M3 ----


def _rows_of_heads(
    indexer: Any, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any
) -> IndexRows:
    """hidden ``[1, N, d]``; position_embeddings: cos and sin ``[1, N, D of the rotation]``, of the rows."""
    cos, sin = (x[0, :, None, : indexer.head_dim] for x in position_embeddings)
    q, keys = (
        _rotated_halves(norm(product(hidden)[0].unflatten(-1, (-1, indexer.head_dim))), cos, sin)
        for product, norm in ((indexer.q_proj, indexer.q_norm), (indexer.k_proj, indexer.k_norm))
    )
    blocks = HeadBlocks(indexer.block_size, indexer.local_blocks)
    return IndexRows(q.float(), keys[:, 0], None, 1.0, indexer.topk_blocks, blocks)


def _serve_heads(shadow: nn.Module, part: Any, indexer: Any) -> None:
    indexer.forward = partial(_chosen, partial(_rows_of_heads, indexer))
    attend_by(part, _by_blocks)


def _by_blocks(given: dict[str, Any]) -> Choice | None:
    chosen = given.get("block_indices")
    return given.pop("block_indices") if isinstance(chosen, Choice) else None


def _heads_choose_alike(indexer: Any) -> bool:
    """By the mask that the indexer makes of its choice, which says for which heads of attention each one's is."""
    own, size, generator = copy.copy(indexer), 3, torch.Generator().manual_seed(0)
    own.block_size, own.topk_blocks = size, own.local_blocks + 1
    n, like = size * (own.local_blocks + 4) - 1, indexer.q_proj.weight
    hidden = torch.randn(1, n, like.shape[1], generator=generator).to(like)
    angles = torch.rand(1, n, own.head_dim // 4, generator=generator) * 6
    cos, sin = (torch.cat((x, x), -1).to(like) for x in (angles.cos(), angles.sin()))
    numbers, causal = torch.arange(n, device=like.device), torch.ones(n, n, dtype=torch.bool, device=like.device).tril()
    chosen = own(hidden, (cos, sin), None, numbers[None])
    theirs = own.build_block_mask(chosen, None, n, torch.float32, like.device, numbers[None])[0] == 0
    rows = _rows_of_heads(own, hidden, (cos, sin))
    assert isinstance(rows.blocks, HeadBlocks)
    lists = indexed.lists_of_heads(rows, rows.blocks, rows.keys, causal, 0, numbers).long() % (n + 1)
    ours = torch.zeros(*lists.shape[:2], n + 1, dtype=torch.bool, device=like.device).scatter(2, lists, True)
    ours = ours[..., :n].transpose(0, 1).repeat_interleave(len(theirs) // lists.shape[1], 0)
    products = indexed.products_of(rows.q, rows.keys.float()).masked_fill(~causal[:, None], -torch.inf)
    scores = indexed.block_scores(products, numbers // size, 0, -(-n // size), size)
    ago = numbers[:, None] // size - torch.arange(scores.shape[-1], device=like.device)
    best, second = scores.masked_fill((ago < own.local_blocks)[:, None], -torch.inf).topk(2).values.unbind(-1)
    is_tie = best - second <= 1e-4 * float(products[causal[:, None].expand_as(products)].abs().max())
    is_tie = is_tie.T.repeat_interleave(len(theirs) // lists.shape[1], 0)
    return not bool(((ours != theirs).any(-1) & ~is_tie).any())


# ---- in a shadow ----


class _Form(NamedTuple):
    """Indexers of one kind."""

    family: str
    """That has them."""
    given: str
    """As what their choice gets to attention."""
    key_dim: str
    """The name of their keys' width."""
    serve: Callable[[nn.Module, Any, Any], None]
    """Has an indexer in a layer's attention, in a shadow, choose for the rows of a call."""
    alike: Callable[[Any], bool]
    """Compares what is chosen for a few random rows of one text with what the indexer's own forward returns."""


_TOKENS = _Form("DeepSeek-V3.2", "a list", "head_dim", _serve_tokens, _chooses_alike)
_BLOCKS = _Form("Qwen4", "a mask", "index_head_dim", _serve_blocks, _chooses_blocks_alike)
_HEADS = _Form("MiniMax-M3", "blocks", "head_dim", _serve_heads, _heads_choose_alike)


def _form_of(indexer: Any) -> _Form:
    if hasattr(indexer, "compress_ratio"):
        return _BLOCKS
    return _HEADS if hasattr(indexer, "topk_blocks") else _TOKENS


class Indexers(Feature):
    kinds = frozenset({"indexed_attention", "minimax_m3_sparse"})

    def unserved(self, model: Any) -> str | None:
        latents = latent_layers(model)
        for part, indexer in _indexers(model):
            form, kind, heads = _form_of(indexer), type(indexer), _key_heads(part, indexer)
            what = f"attends to the keys that {kind.__name__} chooses for each row"
            if form is _HEADS and heads % indexer.num_heads:
                return (
                    f"{what}, and pass_ext decodes that where the {heads} KV heads are a multiple of the {indexer.num_heads} "
                    "heads that choose for themselves"
                )
            if not _is_right(indexer):
                return (
                    f"{what}, by scores of another form than {form.family}'s, or without giving attention {form.given} of "
                    "them, so pass_ext cannot decode this model"
                )
            if form is _TOKENS and part.layer_idx not in latents:
                return (
                    f"{what}, and pass_ext decodes that for layers that attend by latents (kv_b_proj is a plain linear layer "
                    f"without bias, a latent has up to {MOST_VALUE_DIM} numbers, with the rotated key up to {MOST_KEY_DIM})"
                )
            if _key_dim(indexer) % heads:
                return (
                    f"{what}, and pass_ext decodes that where the {_key_dim(indexer)} numbers of the indexer's key are a "
                    f"multiple of the {heads} KV heads, after whose keys they are cached"
                )
        return None

    def untrained(self, model: Any, length: int) -> str | None:
        if all(_form_of(indexer) is _TOKENS for _, indexer in _indexers(model)):
            return None
        return (
            "its indexers choose blocks of columns, and in a call of many groups of slots the columns of a group do not follow "
            "its anchor"
        )

    def unplaced(self, model: Any) -> str | None:
        return (
            "its indexers rotate the keys of whole blocks by their index in the text"
            if _keeps_positions(model)
            else None
        )

    def serve(self, shadow: Any, embedded: Callable[[Tensor], Tensor]) -> None:
        """Indexers choose keys for the rows of a call."""
        for part, indexer in _indexers(shadow):
            _form_of(indexer).serve(shadow, part, indexer)

    def after(self, model: Any) -> Mapping[int, int]:
        """Their keys."""
        return {part.layer_idx: _key_dim(indexer) // _key_heads(part, indexer) for part, indexer in _indexers(model)}

    def from_theirs(self, model: Any, cache: Any, pairs: Mapping[int, Pair], columns: Tensor) -> Mapping[int, Pair]:
        found = dict[int, Pair]()
        for layer in self.after(model).keys() & pairs:
            theirs, (keys, values) = cache.layers[layer], pairs[layer]
            of_indexer = theirs.idx_keys[:, 0] if hasattr(theirs, "idx_keys") else theirs.indexer_keys
            of_indexer = of_indexer[torch.arange(len(columns), device=columns.device)[:, None], columns]
            joined = with_after(keys, of_indexer.unflatten(2, (keys.shape[2], -1)))
            found[layer] = joined, joined[..., : values.shape[-1]] if is_front(values, keys) else values
        return found

    def new_layers(self, model: Any) -> Mapping[int, type]:
        from transformers import cache_utils

        return dict.fromkeys(self.after(model), cache_utils.DynamicIndexedLayer)

    def write_after(self, model: Any, cache: Any, keys: Mapping[int, Tensor], rows: Tensor) -> None:
        widths = self.after(model)
        for layer, width in widths.items():
            _, of_indexer = split_after(keys[layer], width, keys[layer].dtype)
            of_indexer = of_indexer[torch.arange(len(rows), device=rows.device)[:, None], rows].flatten(2)
            theirs = cache.layers[layer]
            if hasattr(theirs, "idx_keys"):
                theirs.idx_keys = of_indexer[:, None]
            else:
                theirs.lazy_initialization_indexer(of_indexer)
                theirs.indexer_keys = of_indexer
            if layer == min(widths) and _keeps_positions(model):
                theirs.indexer_position_ids = rows.expand(3, -1, -1)


def _keeps_positions(model: nn.Module) -> bool:
    """True if transformers' cache keeps all positions for the model's indexers, which rotate the keys of whole blocks."""
    return any(_form_of(indexer) is _BLOCKS for _, indexer in _indexers(model))


def _chosen(rows: Callable[..., IndexRows], /, *inputs: Any, **named: Any) -> Choice:
    """An indexer's forward."""
    return Choice(rows(*inputs, **named))


def _key_dim(indexer: Any) -> int:
    numbers: int = getattr(indexer, _form_of(indexer).key_dim)
    return numbers


def _key_heads(part: Any, indexer: Any) -> int:
    """Of the keys that a layer's cache has; latents are one."""
    heads: int = 1 if _form_of(indexer) is _TOKENS else part.config.num_key_value_heads
    return heads


def _indexers(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Layers' attention, and the indexers of these."""
    for part in modules_of(model):
        indexer = part._modules.get("indexer")
        if indexer is not None and not hasattr(part, "compress_rate"):  # compressors.py has those of compressors
            yield part, indexer


@torch.no_grad()
def _is_right(indexer: Any) -> bool:
    kind = type(indexer)
    mask = getattr(kind, "build_block_mask", None)  # it makes a part of the choice
    return difference_of(kind.forward, mask, partial(_form_of(indexer).alike, indexer)) is None
