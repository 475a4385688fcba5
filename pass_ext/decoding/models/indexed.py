"""Attention to the keys that an indexer chooses for each row, in a model's shadow.

An indexer has a key of its own for each token, and queries q and weights w of its heads for each row. In one form
(DeepSeek-V3.2) a row attends to the ``index_topk`` tokens that it sees with the highest scores,

    score of a token = sum over heads of w * relu(factor * (q . key))

The module makes q, keys, w and factor by its own forward, which gets ``_TextKeys`` in place of the keys of the text. Scores are
computed here, each in one order of adding, and of equal ones the earlier token's counts more. So a row chooses the same tokens
whatever else a step has. The session's cache has an indexer's keys behind those of its layer.

Another form (Qwen4) chooses ``block_topk`` whole blocks of the tokens that a row sees, by a key of each block: the mean of its
tokens' keys, normed and rotated to the block's first position. The tokens after the last whole block are always seen. A block
of the text is that of every row; where it reaches into the rows of a step, it is that of the rows after its last one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pass_ext.decoding.models.equivalence import difference_of
from pass_ext.decoding.models.latents import latent_layers
from pass_ext.decoding.models.parts import decoder_of
from pass_ext.decoding.models.shadow import current_call
from pass_ext.ops import linear  # noqa: F401, which registers the op
from pass_ext.ops.attention import WIDTH_STEP
from pass_ext.tree import PackedTrees

_linear = torch.ops.pass_ext.linear_rows.default

_MOST_PRODUCTS = 1 << 24  # numbers of one tensor
_COMPARED = 7  # rows


class Blocks(NamedTuple):
    """How an indexer chooses whole blocks of tokens."""

    size: int
    keys: Callable[[Tensor, Tensor], Tensor]
    """The keys of blocks' tokens ``[n, size, D]`` and the position of each block's first one ``[n]`` -> the blocks' keys
    ``[n, D]``. A block has the same bits among any others."""


class IndexRows(NamedTuple):
    """What an indexer makes of the rows of a call."""

    q: Tensor
    """``[N, heads, D]`` float32."""
    keys: Tensor
    """``[N, D]``."""
    weights: Tensor
    """``[N, heads]`` float32."""
    factor: float
    most: int
    """So many keys, or blocks, are chosen for a row."""
    blocks: Blocks | None = None
    """None: single tokens are chosen."""


class ChosenKeys(NamedTuple):
    """What a layer gives to attention as its ``indices``."""

    lists: Tensor | None
    """As ``attention_tree`` takes key_lists; None: rows attend to all that they see."""


# ---- the indexer's own forward ----


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


# ---- an indexer of blocks ----


def _rows_of_blocks(indexer: Any, hidden: Tensor, cos: Tensor, sin: Tensor, rotation: _Rotation) -> IndexRows:
    """hidden ``[1, N, d]``; cos, sin: ``[1, N, D of the rotation]``, of the rows."""
    made = indexer.index_qk_proj(hidden)[0].unflatten(-1, (-1, indexer.index_head_dim))
    q, keys = made.tensor_split([indexer.index_n_heads], 1)
    q = _rotated(indexer.q_layernorm(q), cos[0, :, None], sin[0, :, None]).float()
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
    rotated: Tensor = _rotated(norm((total / keys.shape[1]).to(keys.dtype)), cos[0], sin[0])
    return rotated


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    front, rest = x.tensor_split([cos.shape[-1]], -1)
    first, second = front.chunk(2, -1)
    return torch.cat((front * cos + torch.cat((-second, first), -1) * sin, rest), -1)


class MaskOfChosen:
    """Stands for the mask of a layer that computes with its own mask and its indexer's: holds the one and what was chosen."""

    dtype = torch.bool

    def __init__(self, mask: Any, chosen: ChosenKeys) -> None:
        self.mask, self.chosen = mask, chosen

    def __and__(self, _: Any) -> MaskOfChosen:
        return self


# ---- in a shadow ----


def choose_by_rows(shadow: nn.Module) -> None:
    """Has the indexers of a model's shadow choose keys for the rows of a call."""
    for part, indexer in _indexers(shadow):
        if _chooses_blocks(indexer):
            part.forward = partial(_attended, indexer, part.forward, _rotation_of(shadow))
            indexer.forward = _chosen_before
        else:
            indexer.forward = partial(_chosen, indexer, indexer.forward)


def _chosen(indexer: Any, forward: Callable[..., Any], /, *inputs: Any, **named: Any) -> ChosenKeys:
    return _choice(indexer, lambda: _rows_of(indexer, forward, *inputs, **named))


def _attended(
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
    chosen = _choice(indexer, lambda: _rows_of_blocks(indexer, hidden_states, *position_embeddings, rotation))
    return forward(hidden_states, position_embeddings, MaskOfChosen(attention_mask, chosen), *rest, **named)


def _chosen_before(*_: Any, **__: Any) -> None:
    """What an indexer of blocks computes where its layer has the choice already."""


def _choice(indexer: Any, rows: Callable[[], IndexRows]) -> ChosenKeys:
    call = current_call.get()
    if call is None:
        raise RuntimeError(f"this {type(indexer).__name__} is for pass_ext's own calls of a model")
    chosen: ChosenKeys = call.attend.choose(rows())
    return chosen


def _rotation_of(model: nn.Module) -> _Rotation:
    rotary: Any = decoder_of(model).rotary_emb
    return lambda like, positions: rotary(like, positions[None])


def _chooses_blocks(indexer: Any) -> bool:
    return hasattr(indexer, "compress_ratio")


def chooses_blocks(model: nn.Module) -> bool:
    """True if the model's indexers choose whole blocks of tokens, for which transformers' cache keeps all positions."""
    return any(_chooses_blocks(indexer) for _, indexer in _indexers(model))


def index_widths(model: nn.Module) -> dict[int, int]:
    """The layers that have an indexer -> the numbers of its keys behind each KV head's."""
    return {
        part.layer_idx: indexer.index_head_dim // _heads(part) if _chooses_blocks(indexer) else indexer.head_dim
        for part, indexer in _indexers(model)
    }


def _heads(part: Any) -> int:
    heads: int = part.config.num_key_value_heads
    return heads


def _indexers(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Layers' attention, and the indexers of these."""
    for part in model.modules():
        indexer = part._modules.get("indexer")
        if indexer is not None and not hasattr(part, "compress_rate"):  # compressed.py has those of compressors
            yield part, indexer


def unserved(model: nn.Module) -> str | None:
    """Why keys cannot be chosen for this model, to follow its name; None: they can."""
    latents = latent_layers(model)
    for part, indexer in _indexers(model):
        name = type(indexer).__name__
        if not _is_right(indexer):
            form = "Qwen4's" if _chooses_blocks(indexer) else "DeepSeek-V3.2's"
            given = "a mask" if _chooses_blocks(indexer) else "a list"
            return (
                f"attends to the keys that {name} chooses for each row, by scores of another form than {form}, or without "
                f"giving attention {given} of them, so pass_ext cannot decode this model"
            )
        if _chooses_blocks(indexer):
            if indexer.index_head_dim % _heads(part):
                return (
                    f"attends to the keys that {name} chooses for each row, and pass_ext decodes that where the "
                    f"{indexer.index_head_dim} numbers of the indexer's key are a multiple of the {_heads(part)} KV heads, "
                    "behind whose keys they are cached"
                )
        elif part.layer_idx not in latents:
            return (
                f"attends to the keys that {name} chooses for each row, and pass_ext decodes that for layers that attend by "
                "latents (kv_b_proj is a plain linear layer without bias)"
            )
    return None


@torch.no_grad()
def _is_right(indexer: Any) -> bool:
    """Compares what is chosen for a few random rows of one text with what the indexer's own forward returns."""
    alike = _chooses_blocks_alike if _chooses_blocks(indexer) else _chooses_alike
    return difference_of(type(indexer).forward, None, partial(alike, indexer)) is None


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
    scores = _scores(rows.q, rows.keys.float(), rows.weights, rows.factor).masked_fill(~causal[0], -torch.inf)
    chosen, highest = scores.gather(1, theirs).sort(1, descending=True).values, scores.topk(own.index_topk).values
    # Not the tokens: they may choose others of equal scores.
    return torch.allclose(chosen, highest, rtol=0.0, atol=1e-4 * float(scores.tril().abs().max()))


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
    assert rows.blocks is not None
    lists = _lists_of_blocks(rows, rows.blocks, rows.keys, causal, 0, numbers - 1, numbers)
    ours = torch.zeros(n, n + 1, dtype=torch.bool, device=like.device)
    differ = (ours.scatter(1, lists.long() % (n + 1), True)[:, :n] != theirs).any(1)
    ends = numbers[: 3 * size].view(3, size)[:, -1]
    keys = rows.blocks.keys(rows.keys[: 3 * size].unflatten(0, (3, size)), ends - size + 1)
    scores = _scores(rows.q, keys.float(), rows.weights, rows.factor).masked_fill(ends > numbers[:, None], -torch.inf)
    best, second = scores.topk(2).values.unbind(1)
    return not bool((differ & (best - second > 1e-4 * float(best.max()))).any())


# ---- behind the keys in a cache ----


def with_behind(rows: Tensor, behind: Tensor) -> Tensor:
    """Rows of keys ``[..., D]``, padded to a multiple of 16 numbers, or of their codes; and behind them what an indexer or a
    compressor keeps, ``[..., d]``, as it is, whatever the dtype of the rows: rounded keys would choose other tokens."""
    rows, front = functional.pad(rows, (0, _padding(rows.shape[-1]))), _padding(behind.shape[-1])
    parts = rows, functional.pad(behind, (front, 0))
    return torch.cat([x.view(torch.uint8) for x in parts], -1).view(rows.dtype)


def split_behind(rows: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What ``with_behind`` has joined, as views: the rows without the numbers behind, and these, ``[..., count]``."""
    numbers, size = rows.view(torch.uint8), dtype.itemsize
    front = numbers[..., : -(count + _padding(count)) * size]
    return front.view(rows.dtype), numbers[..., -count * size :].view(dtype)


def _padding(count: int) -> int:
    return -count % WIDTH_STEP


# ---- choosing ----


def chosen_keys(
    rows: IndexRows, held: Tensor | None, prefix_lens: Tensor, trees: PackedTrees, tokens: Tensor
) -> ChosenKeys:
    """The keys of each row of a step.

    Reads lengths on the host, for which a GPU is waited for.

    Args:
        held: ``[B, S, parts, D / parts]``, the indexer's keys in the cache; None: there are none yet.
        tokens: ``[B]``, of each request's rows those that are tokens; look-ahead slots never make a step choose.
    """
    size = 1 if rows.blocks is None else rows.blocks.size
    if bool(((prefix_lens + tokens) // size <= rows.most).all()):
        return ChosenKeys(None)
    bounds, parts = trees.cu_nodes.tolist(), []
    for b, prefix in enumerate(prefix_lens.tolist()):
        mine = slice(bounds[b], bounds[b + 1])
        numbers = torch.arange(bounds[b + 1] - bounds[b], device=trees.cu_nodes.device)
        if not len(numbers):
            continue
        keys = rows.keys[mine]
        if held is not None and prefix:
            keys = torch.cat((held[b, :prefix].flatten(1), keys))
        sees = trees.visible[mine, numbers // 64] >> numbers % 64 & 1 == 1
        part = rows._replace(q=rows.q[mine], keys=rows.keys[mine], weights=rows.weights[mine])
        if rows.blocks is None:
            parts.append(lists_by_scores(part, keys, sees, prefix))
        else:
            parents, depths = trees.parents[mine].long(), trees.depths[mine].long()
            parts.append(_lists_of_blocks(part, rows.blocks, keys, sees, prefix, parents, depths))
    return ChosenKeys(joined_lists(parts, bounds[0], len(rows.q)))


def joined_lists(parts: list[Tensor], first: int, rows: int) -> Tensor:
    """The lists of all rows of a call: of each request's, which begin with row ``first``."""
    lists = parts[0].new_full((rows, max(part.shape[1] for part in parts)), -1)
    for some in parts:
        lists[first : first + len(some), : some.shape[1]] = some
        first += len(some)
    return lists


def lists_by_scores(rows: IndexRows, keys: Tensor, sees: Tensor, prefix: int) -> Tensor:
    """The keys of some rows of one request, ascending, then -1: ``[n, at most most]``. keys: ``[T, D]`` of its text and rows;
    sees: ``[n, T - prefix]``, which of the keys after the prefix each row sees."""
    count, heads, numbers = len(rows.q), rows.q.shape[1], keys.float()
    step = max(1, _MOST_PRODUCTS // (heads * len(keys)))
    most = min(rows.most, len(keys))
    lists = torch.full((count, most), -1, dtype=torch.int32, device=keys.device)
    for first in range(0, count, step):
        some = slice(first, first + step)
        scores = _scores(rows.q[some], numbers, rows.weights[some], rows.factor)
        scores[:, prefix:].masked_fill_(~sees[some], -torch.inf)
        lowest = scores.topk(most, dim=1).values[:, -1:]
        above = scores > lowest
        equal = (scores == lowest) & (scores > -torch.inf)
        chosen = above | (equal & (equal.cumsum(1) <= most - above.sum(1, keepdim=True)))
        row, key = chosen.nonzero(as_tuple=True)
        lists[first + row, (chosen.cumsum(1) - 1)[row, key]] = key.int()
    return lists


def _lists_of_blocks(
    rows: IndexRows, blocks: Blocks, keys: Tensor, sees: Tensor, prefix: int, parents: Tensor, depths: Tensor
) -> Tensor:
    """As ``lists_by_scores``, of the tokens of the chosen blocks and those after the last block of each row's text. parents,
    depths: ``[n]``, of the rows."""
    size, beyond = blocks.size, len(keys)
    newest = prefix + torch.arange(len(parents), device=keys.device)
    path = [newest]  # the last keys of each row's text
    for _ in range(size - 1):
        above = prefix + parents[(newest - prefix).clamp(min=0)]  # the root's parent is the last token before it
        newest = above.where(newest >= prefix, newest - 1)
        path.insert(0, newest)
    paths, lengths = torch.stack(path, 1), prefix + depths + 1
    of_text = torch.arange(prefix // size * size, device=keys.device).view(-1, size)
    ends = lengths % size == 0
    tokens, firsts = torch.cat((of_text, paths[ends])), torch.cat((of_text[:, 0], lengths[ends] - size))
    is_after = torch.arange(size, device=keys.device) >= size - lengths[:, None] % size
    found = [paths.masked_fill(~is_after, beyond)]
    if len(tokens):
        chosen = lists_by_scores(rows, blocks.keys(keys[tokens], firsts), sees[:, ends], len(of_text))
        found.append(tokens[chosen.long()].masked_fill((chosen < 0)[..., None], beyond).flatten(1))
    lists = torch.cat(found, 1).sort(1).values
    return lists.masked_fill(lists == beyond, -1).int()


def _scores(q: Tensor, keys: Tensor, weights: Tensor, factor: float) -> Tensor:
    """``[n, T]``; a score has the bits that it has among any others."""
    products = _linear(q.flatten(0, 1), keys, None).view(*q.shape[:2], len(keys)).mul_(factor).relu_()
    scores = products[:, 0] * weights[:, :1]
    for head in range(1, q.shape[1]):
        scores += products[:, head] * weights[:, head, None]
    return scores
