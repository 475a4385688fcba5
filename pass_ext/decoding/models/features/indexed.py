"""The keys that indexers choose for the rows of a step.

An indexer has a key of its own for each token, and queries q of its heads for each row. In one form (DeepSeek-V3.2) heads have
weights w, and a row attends to the ``most`` tokens that it sees with the highest scores,

    score of a token = sum over heads of w * relu(factor * (q . key))

Another form (Qwen4) chooses ``most`` whole blocks of the tokens that a row sees, by a key of each block, as ``Blocks`` has it.
The tokens after the last whole block are always seen. A block of the text is that of every row; where it reaches into the rows
of a step, it is that of the rows after its last one.

In a third (MiniMax-M3) each head chooses for itself, and for its share of the attention's heads. A block's score is the highest
of its tokens',

    score of a block = max over its tokens that the row sees of q . key

and the row's own block, of which it sees a part, and the ``local - 1`` before it are among the ``most`` in any case.

Scores are computed in one order of adding, and of equal ones the earlier token's or block's counts more. So a row chooses the
same tokens whatever else a step has. The session's cache has an indexer's keys after those of its layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pass_ext.decoding.models.layer_attention import Attending, LayerAttention
from pass_ext.decoding.models.row_attention import is_being_recorded
from pass_ext.ops import linear  # noqa: F401, which registers the op
from pass_ext.tree import PackedTrees

_linear = torch.ops.pass_ext.linear_rows.default

_MOST_PRODUCTS = 1 << 24  # numbers of one tensor


class Blocks(NamedTuple):
    """How an indexer chooses whole blocks of tokens."""

    size: int
    keys: Callable[[Tensor, Tensor], Tensor]
    """The keys of blocks' tokens ``[n, size, D]`` and the position of each block's first one ``[n]`` -> the blocks' keys
    ``[n, D]``. A block has the same bits among any others."""


class HeadBlocks(NamedTuple):
    """How each head of an indexer chooses blocks of tokens."""

    size: int
    local: int
    """So many blocks are chosen in any case, the last of them the row's own."""


class IndexRows(NamedTuple):
    """What an indexer makes of the rows of a call."""

    q: Tensor
    """``[N, heads, D]`` float32."""
    keys: Tensor
    """``[N, D]``."""
    weights: Tensor | None
    """``[N, heads]`` float32; None: each head chooses for itself."""
    factor: float
    most: int
    """So many keys, or blocks, are chosen for a row."""
    blocks: Blocks | HeadBlocks | None = None
    """None: single tokens are chosen."""


class Choice(Attending):
    """What a layer gives to attention as its choice: made where the layer attends whose indexer it is, and that of the layers
    that share it."""

    def __init__(self, rows: IndexRows) -> None:
        self._rows: IndexRows | None = rows
        self._lists: Tensor | None = None

    def of(self, layer: LayerAttention) -> tuple[Tensor | None, Tensor | None]:
        """The lists that ``chosen_keys`` makes, and what the indexer's own layer keeps after its keys, ``[N, D]``."""
        rows, self._rows = self._rows, None
        if rows is None:
            return self._lists, None
        if is_being_recorded(rows.q):
            raise RuntimeError(
                f"{layer.session.model.name}: its indexers' choice of keys depends on the lengths of the texts, which the host "
                "reads"
            )
        rows = rows._replace(keys=rows.keys.to(layer.dtype))
        self._lists = chosen_keys(rows, layer.held(), layer.prefix_lens, layer.trees, layer.tokens)
        return self._lists, rows.keys

    def attend(self, layer: LayerAttention) -> Tensor:
        lists, after = self.of(layer)
        layer.keep(after)
        return layer.attend(layer.q, lists)


# ---- choosing ----


def chosen_keys(
    rows: IndexRows, held: Tensor | None, prefix_lens: Tensor, trees: PackedTrees, tokens: Tensor
) -> Tensor | None:
    """The keys of each row of a step, ``[N, L]``, as ``attention_tree`` takes key_lists; ``[N, heads of the indexer, L]``, of
    which each one's is that of an equal share of the attention's heads; None: rows attend to all that they see.

    Reads lengths on the host, for which a GPU is waited for.

    Args:
        held: ``[B, S, parts, D / parts]``, the indexer's keys in the cache; None: there are none yet.
        tokens: ``[B]``, of each request's rows those that are tokens; look-ahead slots never make a step choose.
    """
    size = 1 if rows.blocks is None else rows.blocks.size
    begun = size - 1 if isinstance(rows.blocks, HeadBlocks) else 0  # there a part of a block is one of the chosen
    if bool(((prefix_lens + tokens + begun) // size <= rows.most).all()):
        return None
    parts = []
    for b, (mine, prefix) in enumerate(zip(trees.slices(), prefix_lens.tolist(), strict=True)):
        keys = rows.keys[mine]
        nodes = len(keys)
        if not nodes:
            continue
        if held is not None and prefix:
            keys = torch.cat((held[b, :prefix].flatten(1), keys))
        sees = trees.seen(mine)[:, :nodes]
        part = of_rows(rows, mine)
        parents, depths = trees.parents[mine].long(), trees.depths[mine].long()
        if rows.blocks is None:
            parts.append(lists_by_scores(part, keys, sees, prefix))
        elif isinstance(rows.blocks, HeadBlocks):
            parts.append(lists_of_heads(part, rows.blocks, keys, sees, prefix, depths))
        else:
            parts.append(lists_of_blocks(part, rows.blocks, keys, sees, prefix, parents, depths))
    return joined_lists(parts, len(rows.q))


def joined_lists(parts: list[Tensor], rows: int) -> Tensor:
    """The lists of all rows of a call: of each request's ``[n, ..., L]``, one after another from row 0."""
    lists, first = parts[0].new_full((rows, *parts[0].shape[1:-1], max(part.shape[-1] for part in parts)), -1), 0
    for some in parts:
        lists[first : first + len(some), ..., : some.shape[-1]] = some
        first += len(some)
    return lists


def lists_by_scores(rows: IndexRows, keys: Tensor, sees: Tensor, prefix: int) -> Tensor:
    """The keys of some rows of one request, ascending, then -1: ``[n, at most most]``. keys: ``[T, D]`` of its text and rows;
    sees: ``[n, T - prefix]``, which of the keys after the prefix each row sees."""
    step, numbers, lists = _step(rows, keys), keys.float(), []
    most = min(rows.most, len(keys))
    for first in range(0, len(rows.q), step):
        some = slice(first, first + step)
        scores = token_scores(of_rows(rows, some), numbers)
        scores[:, prefix:].masked_fill_(~sees[some], -torch.inf)
        lists.append(_listed(_best(scores, most), most))
    return torch.cat(lists)


def lists_of_heads(
    rows: IndexRows, blocks: HeadBlocks, keys: Tensor, sees: Tensor, prefix: int, depths: Tensor
) -> Tensor:
    """As ``lists_by_scores``, of the tokens of the blocks that each head chooses: ``[n, heads, L]``."""
    size, device = blocks.size, keys.device
    own = (prefix + depths) // size
    owners = torch.cat((torch.arange(prefix, device=device) // size, own))  # the block of each key
    count, whole = int(own.max()) + 1, prefix // size
    most, step, numbers, lists = min(rows.most, count), _step(rows, keys), keys.float(), []
    for first in range(0, len(rows.q), step):
        some = slice(first, first + step)
        products = products_of(rows.q[some], numbers)
        products[..., prefix:].masked_fill_(~sees[some, None], -torch.inf)
        scores = block_scores(products, owners, whole, count, size)
        ago = own[some, None] - torch.arange(count, device=device)
        scores.masked_fill_(((ago >= 0) & (ago < blocks.local))[:, None], torch.inf)
        chosen = _best(scores, most)[..., owners] & (products > -torch.inf)
        lists.append(_listed(chosen, min(most * size, len(keys))))
    return torch.cat(lists)


def block_scores(products: Tensor, owners: Tensor, whole: int, count: int, size: int) -> Tensor:
    """The highest of the products ``[..., T]`` of each of ``count`` blocks. owners: ``[T]``, the block of each product; the
    first ``whole`` ones have their tokens side by side."""
    front, rest = products.tensor_split([whole * size], -1)
    scores = [front.unflatten(-1, (whole, size)).amax(-1)]
    for number in range(whole, count):
        of_others = owners[whole * size :] != number
        scores.append(rest.masked_fill(of_others, -torch.inf).amax(-1, keepdim=True))
    return torch.cat(scores, -1)


def of_rows(rows: IndexRows, some: slice) -> IndexRows:
    """What an indexer makes of some of the rows."""
    weights = None if rows.weights is None else rows.weights[some]
    return rows._replace(q=rows.q[some], keys=rows.keys[some], weights=weights)


def _step(rows: IndexRows, keys: Tensor) -> int:
    """Of so many rows products are computed at once."""
    return max(1, _MOST_PRODUCTS // (rows.q.shape[1] * len(keys)))


def _best(scores: Tensor, most: int) -> Tensor:
    """Which are the ``most`` highest of each row; of equal ones the earlier. -inf never is."""
    lowest = scores.topk(most, dim=-1).values[..., -1:]
    above = scores > lowest
    equal = (scores == lowest) & (scores > -torch.inf)
    return above | (equal & (equal.cumsum(-1) <= most - above.sum(-1, keepdim=True)))


def _listed(chosen: Tensor, width: int) -> Tensor:
    """The places that are True in each row, then -1: ``[..., width]``."""
    lists = torch.full((*chosen.shape[:-1], width), -1, dtype=torch.int32, device=chosen.device)
    *row, key = chosen.nonzero(as_tuple=True)
    lists[(*row, (chosen.cumsum(-1) - 1)[(*row, key)])] = key.int()
    return lists


def lists_of_blocks(
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


def token_scores(rows: IndexRows, keys: Tensor) -> Tensor:
    """``[n, T]``; a score has the bits that it has among any others. keys: in float32."""
    assert rows.weights is not None
    products = products_of(rows.q, keys).mul_(rows.factor).relu_()
    scores = products[:, 0] * rows.weights[:, :1]
    for head in range(1, products.shape[1]):
        scores += products[:, head] * rows.weights[:, head, None]
    return scores


def products_of(q: Tensor, keys: Tensor) -> Tensor:
    """``[n, heads, T]``."""
    return _linear(q.flatten(0, 1), keys, None).view(*q.shape[:2], len(keys))
