"""Attention to the keys that an indexer chooses for each row, in a model's shadow.

An indexer has a key of its own for each token, and queries q and weights w of its heads for each row. A row attends to the
``index_topk`` tokens that it sees with the highest scores,

    score of a token = sum over heads of w * relu(factor * (q . key))

The module makes q, keys, w and factor by its own forward, which gets ``_TextKeys`` in place of the keys of the text. Scores are
computed here, each in one order of adding, and of equal ones the earlier token's counts more. So a row chooses the same tokens
whatever else a step has. The session's cache has an indexer's keys behind those of its layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from pass_ext.decoding.models.latents import latent_layers
from pass_ext.decoding.models.shadow import current_call
from pass_ext.ops import linear  # noqa: F401, which registers the op
from pass_ext.ops.attention import WIDTH_STEP

_linear = torch.ops.pass_ext.linear_rows.default

_MOST_PRODUCTS = 1 << 24  # numbers of one tensor
_COMPARED = 7  # rows
_believed: WeakKeyDictionary[Callable[..., Any], bool] = WeakKeyDictionary()
"""The forwards that were compared, and whether they choose as the head of this file says."""


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
    """So many keys are chosen for a row."""


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


# ---- in a shadow ----


def choose_by_rows(shadow: nn.Module) -> None:
    """Has the indexers of a model's shadow choose keys for the rows of a call."""
    for _, indexer in _indexers(shadow):
        indexer.forward = partial(_chosen, indexer, indexer.forward)


def _chosen(indexer: Any, forward: Callable[..., Any], /, *inputs: Any, **named: Any) -> ChosenKeys:
    call = current_call.get()
    if call is None:
        raise RuntimeError(f"this {type(indexer).__name__} is for pass_ext's own calls of a model")
    chosen: ChosenKeys = call.attend.choose(_rows_of(indexer, forward, *inputs, **named))
    return chosen


def index_widths(model: nn.Module) -> dict[int, int]:
    """The layers that have an indexer -> the numbers of its keys."""
    return {part.layer_idx: indexer.head_dim for part, indexer in _indexers(model)}


def _indexers(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Layers' attention, and the indexers of these."""
    for part in model.modules():
        indexer = part._modules.get("indexer")
        if indexer is not None:
            yield part, indexer


def unserved(model: nn.Module) -> str | None:
    """Why keys cannot be chosen for this model, to follow its name; None: they can."""
    latents = latent_layers(model)
    for part, indexer in _indexers(model):
        name = type(indexer).__name__
        if hasattr(indexer, "compress_ratio"):
            return (
                f"attends to the keys that {name} chooses for each row, whole blocks of tokens by the means of their keys, and "
                "gives attention a mask of them; pass_ext chooses single tokens and gives it lists, so it cannot decode this "
                "model"
            )
        if not _is_right(indexer):
            return (
                f"attends to the keys that {name} chooses for each row, by scores of another form than DeepSeek-V3.2's, or "
                "without giving attention a list of them, so pass_ext cannot decode this model"
            )
        if part.layer_idx not in latents:
            return (
                f"attends to the keys that {name} chooses for each row, and pass_ext decodes that for layers that attend by "
                "latents (kv_b_proj is a plain linear layer without bias)"
            )
    return None


@torch.no_grad()
def _is_right(indexer: Any) -> bool:
    """Compares what is chosen for a few random rows of one text with what the indexer's own forward returns."""
    method = type(indexer).forward
    if method not in _believed:
        try:
            _believed[method] = _chooses_alike(indexer)
        except (TypeError, RuntimeError, ValueError, AttributeError, IndexError):
            _believed[method] = False
    return _believed[method]


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


# ---- an indexer's keys in a cache ----


def with_index_keys(rows: Tensor, of_indexer: Tensor) -> Tensor:
    """Rows of keys ``[..., D]``, padded to a multiple of 16 numbers, or of their codes; and behind them the keys of an indexer
    ``[..., d]`` as they are, whatever the dtype of the rows: rounded keys would choose other tokens."""
    rows, behind = functional.pad(rows, (0, _padding(rows.shape[-1]))), _padding(of_indexer.shape[-1])
    parts = rows, functional.pad(of_indexer, (behind, 0))
    return torch.cat([x.view(torch.uint8) for x in parts], -1).view(rows.dtype)


def split_index_keys(rows: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What ``with_index_keys`` has joined, as views: the rows without the keys of an indexer, and these, ``[..., count]``."""
    numbers, size = rows.view(torch.uint8), dtype.itemsize
    front = numbers[..., : -(count + _padding(count)) * size]
    return front.view(rows.dtype), numbers[..., -count * size :].view(dtype)


def _padding(count: int) -> int:
    return -count % WIDTH_STEP


# ---- choosing ----


def chosen_keys(
    rows: IndexRows, held: Tensor | None, prefix_lens: Tensor, cu_nodes: Tensor, visible: Tensor, tokens: Tensor
) -> ChosenKeys:
    """The keys of each row of a step, which is as ``attention_tree`` takes it.

    Reads lengths on the host, for which a GPU is waited for.

    Args:
        held: ``[B, S, D]``, the indexer's keys in the cache; None: there are none yet.
        tokens: ``[B]``, of each request's rows those that are tokens; look-ahead slots never make a step choose.
    """
    if bool((prefix_lens + tokens <= rows.most).all()):
        return ChosenKeys(None)
    bounds, parts = cu_nodes.tolist(), []
    for b, prefix in enumerate(prefix_lens.tolist()):
        mine = slice(bounds[b], bounds[b + 1])
        numbers = torch.arange(bounds[b + 1] - bounds[b], device=cu_nodes.device)
        if not len(numbers):
            continue
        keys = rows.keys[mine] if held is None or not prefix else torch.cat((held[b, :prefix], rows.keys[mine]))
        sees = visible[mine, numbers // 64] >> numbers % 64 & 1 == 1
        part = rows._replace(q=rows.q[mine], keys=rows.keys[mine], weights=rows.weights[mine])
        parts.append(_lists(part, keys, sees, prefix))
    lists = parts[0].new_full((len(rows.q), max(part.shape[1] for part in parts)), -1)
    first = bounds[0]
    for some in parts:
        lists[first : first + len(some), : some.shape[1]] = some
        first += len(some)
    return ChosenKeys(lists)


def _lists(rows: IndexRows, keys: Tensor, sees: Tensor, prefix: int) -> Tensor:
    """The keys of some rows of one request, ascending, then -1: ``[n, at most most]``. keys: ``[T, D]`` of its text and rows;
    sees: ``[n, n]``, the rows that each row sees."""
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


def _scores(q: Tensor, keys: Tensor, weights: Tensor, factor: float) -> Tensor:
    """``[n, T]``; a score has the bits that it has among any others."""
    products = _linear(q.flatten(0, 1), keys, None).view(*q.shape[:2], len(keys)).mul_(factor).relu_()
    scores = products[:, 0] * weights[:, :1]
    for head in range(1, q.shape[1]):
        scores += products[:, head] * weights[:, head, None]
    return scores
