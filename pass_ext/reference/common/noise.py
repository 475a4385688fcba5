"""The random numbers of drafting and accepting: Philox4x32-10 without state, and exponential noise for races.

    word[0..3] = philox4x32(counter, key),  key = the request's seed
    counter    = (block | draw << 20,  purpose << 1 | level | node << 8,  position low, position high)
    E(word)    = -log1p(-v),  v = (word + 1/2) 2^-32        exponentially distributed

A race, the argmax over v of w_v / E_v, draws token v with probability w_v / sum(w). Tokens form groups of 64. The block of
group g (level group, block g) gives first_g = E(word[0]) / 64 and the group's leader, its token number word[1] % 64:

    E_v = first_g                  for the leader
    E_v = first_g + E(word of v)   for the others: level token, block 16 g + v % 16, word (v % 64) // 16

These are 64 independent exponentials: the minimum is exponential / 64, equally likely at each token, and the distance of each
other token above it is exponential again. A coin is word[0] 2^-32, in [0, 1); a draw by the inverse of a distribution function
takes (word[0] 2^32 + word[1]) 2^-64.
"""

from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor

GROUP = 64
BLOCKS_PER_GROUP = 16
WORD = 0xFFFFFFFF


class Purpose(IntEnum):
    """The use of a draw; draws with different purposes are independent."""

    coupled = 0
    coin = 1
    residual = 2
    bonus = 3
    draft = 4
    inverse = 5


class Level(IntEnum):
    group = 0
    token = 1


Word = TypeVar("Word", int, Tensor)
"""A word of 32 bits, or int64 of many."""


def philox4x32(c0: Word, c1: Word, c2: Word, c3: Word, key: int) -> tuple[Word, Word, Word, Word]:
    """The four random words of a counter. Ten rounds of

    (c0, c1, c2, c3) <- (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)),  (k0, k1) += (W0, W1)
    """
    k0, k1 = key & WORD, key >> 32 & WORD
    for _ in range(10):
        # int64 products wrap, so they have all 64 bits of the unsigned products.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (product1 >> 32 & WORD) ^ c1 ^ k0, product1 & WORD
        c2, c3 = (product0 >> 32 & WORD) ^ c3 ^ k1, product0 & WORD
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return c0, c1, c2, c3


def words(
    seed: int, position: int, purpose: Purpose, level: Word, block: Word, node: int = 0, draw: int = 0
) -> tuple[Word, Word, Word, Word]:
    """The four words of a block, or of each. `level` and `block` have one entry per block."""
    none = block * 0
    return philox4x32(
        (block | draw << 20) & WORD,
        (level | purpose << 1 | node << 8) & WORD,
        none + (position & WORD),
        none + (position >> 32 & WORD),
        seed,
    )


def exponential(word: Tensor) -> Tensor:
    """E(word) = -log1p(-(word + 1/2) 2^-32)"""
    return -torch.log1p(-(word.double() + 0.5) * 2.0**-32)


def exponentials(seed: int, position: int, purpose: Purpose, vocabulary: int, node: int = 0, draw: int = 0) -> Tensor:
    """E_v of every token: fp64 [vocabulary]."""
    groups = -(-vocabulary // GROUP)
    block = torch.cat([torch.arange(groups), torch.arange(groups * BLOCKS_PER_GROUP)])
    level = torch.full_like(block, Level.token)
    level[:groups] = Level.group
    each = torch.stack(words(seed, position, purpose, level, block, node, draw), -1)
    group_words, token_words = each.tensor_split([groups])
    first, leader = exponential(group_words[:, 0]) / GROUP, group_words[:, 1] % GROUP
    # Word w of block b belongs to token 16 w + b of the group.
    above = exponential(token_words.view(-1, BLOCKS_PER_GROUP, 4).transpose(1, 2).reshape(-1, GROUP))
    above[torch.arange(GROUP) == leader[:, None]] = 0.0
    return (first[:, None] + above).flatten()[:vocabulary]


def coin(seed: int, position: int, node: int) -> float:
    """The coin of `node` in the step whose first token is at `position`: uniform in [0, 1)."""
    return words(seed, position, Purpose.coin, int(Level.group), 0, node)[0] * 2.0**-32
