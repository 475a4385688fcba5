"""``shard_local`` and ``shard_best`` in plain PyTorch: what a rank knows about its columns, as numbers instead of words.

    peaks            max z, the lowest id that has it, z of the node's token in the parent's row
    counts, nucleus  tokens, or floor(w 2^40) of them, in 512 bins of the order (z descending, id ascending)
    top_p, masses    sum of w over slices of 8,192 columns, w = exp((z - max z) / T) in the support
    residuals        sums over the slices of (p - beta q)+ and of q, without deleted tokens; a token that was deleted
                     at cut c counts (p - c q)+, and nothing at an infinite cut
    races            the best token of argmax(ln weight - ln E) and its score, E by global id: noise.py

A state says what is asked: maxima, cuts, ranges, betas. Its layout is that of ``ShardSlot`` and ``ShardNode`` in
csrc/core/shard.h.
``shard_combine`` (csrc/core/shard_combine.h) has no reference of its own: on all ranks together it is accept_tree.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pass_ext.reference.common.distribution import is_allowed
from pass_ext.reference.common.noise import Purpose, exponentials

SLICE, BINS, ID_BITS, UNIT = 8192, 512, 22, 2.0**40
_WORDS = 11  # int64 of a slot, and of a node


class Slot(NamedTuple):
    """What is known about a row."""

    maximum: float
    scale: float
    cut: float
    tie: int
    inverse_mass: float
    log_mass: float
    is_good: bool
    top_p: float
    kept: float
    low: int
    high: int
    is_selecting: bool

    def support(self, z: Tensor, ids: Tensor) -> Tensor:
        """True for tokens that the filters keep."""
        return (z > self.cut) | ((z == self.cut) & (ids <= self.tie))

    def weights(self, z: Tensor, ids: Tensor) -> Tensor:
        """exp((z - max z) / T) in the support, else 0."""
        return ((z - self.maximum) * self.scale).exp().where(self.support(z, ids), 0.0)


class Node(NamedTuple):
    """What is asked at a node."""

    cut: float
    asks: int
    beta: float
    draws: bool
    is_residual: bool
    first: float
    rejected: bool
    purpose: Purpose
    position: int


def slots_of(state: Tensor, nodes: int) -> list[Slot]:
    """The slots of a state: those of the target's rows, then of the rows that children were drawn from."""
    words = state[: 2 * nodes * _WORDS].view(2 * nodes, _WORDS)
    integers, floats = words.view(torch.int32).tolist(), words.view(torch.float32).tolist()
    doubles, longs = words.view(torch.float64).tolist(), words.tolist()
    return [
        Slot(f[0], f[1], f[2], i[3], f[4], f[5], i[21] != 0 and i[6] == 0, f[8], d[5], w[6], w[7], i[20] != 0)
        for i, f, d, w in zip(integers, floats, doubles, longs, strict=True)
    ]


def nodes_of(state: Tensor, nodes: int) -> list[Node]:
    """The nodes of a state."""
    words = state[2 * nodes * _WORDS :].view(nodes, _WORDS)
    integers, floats = words.view(torch.int32).tolist(), words.view(torch.float32).tolist()
    return [
        Node(f[2], i[8], f[9], i[10] != 0, i[11] != 0, f[12], i[14] != 0, Purpose(i[15]), w[8])
        for i, f, w in zip(integers, floats, words.tolist(), strict=True)
    ]


def shard_local(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    cu_nodes: Tensor,
    *,
    rule: str,
    vocab_start: int,
    slices: int,
    round: str,
    state: Tensor | None = None,
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    allowed: Tensor | None = None,
    draft_allowed: Tensor | None = None,
    seeds: Tensor | None = None,
) -> Tensor:
    """The arguments are those of ``pass_ext.distributed.shard_local``, for trees that are well formed. Returns fp64
    ``[slots, width]``."""
    count, columns = target_logits.shape
    ids = torch.arange(vocab_start, vocab_start + columns)
    slots = [] if state is None else slots_of(state, count)
    asked = [] if state is None else nodes_of(state, count)
    bounds = cu_nodes.tolist()
    owners = {row: b for b in range(len(bounds) - 1) for row in range(bounds[b], bounds[b + 1])}

    def row_of(node: int, side: int) -> Tensor | None:
        index = node if side == 0 or draft_rows is None else int(draft_rows[node])
        logits, masks = (target_logits, allowed) if side == 0 else (draft_logits, draft_allowed)
        if logits is None or not 0 <= index < len(logits):
            return None
        z = logits[index].double()
        return z if masks is None else z.where(is_allowed(masks[index], columns), -math.inf)

    def parent_of(node: int) -> int:
        local = int(parents[node])
        return -1 if local < 0 else bounds[owners[node]] + local

    def probabilities(node: int, side: int) -> Tensor | None:
        z, slot = row_of(node, side), slots[side * count + node]
        return None if z is None or not slot.is_good else slot.weights(z, ids) * slot.inverse_mass

    def cuts_below(node: int) -> Iterator[tuple[int, float]]:
        for child in range(node + 1, bounds[owners[node] + 1]):
            place = int(tokens[child]) - vocab_start
            if parent_of(child) == node and asked[child].cut != -1.0 and 0 <= place < columns:
                yield place, asked[child].cut

    def weights_left(node: int, beta: float) -> Tensor:
        p, q = probabilities(node, 0), probabilities(node, 1)
        assert p is not None and q is not None
        left = (p - beta * q).clamp(min=0.0)
        for place, cut in cuts_below(node):
            left[place] = 0.0 if cut == math.inf else (p[place] - cut * q[place]).clamp(min=0.0)
        return left

    sides = 1 if draft_logits is None else 2
    if round == "peaks":
        peaks = torch.tensor([[-math.inf, -1.0, -math.inf]]).double().repeat(sides * count, 1)
        for node in owners:
            for side in range(sides):
                above = row_of(parent_of(node), side) if parent_of(node) >= 0 else None
                place = int(tokens[node]) - vocab_start
                if above is not None and 0 <= place < columns:
                    peaks[side * count + node, 2] = above[place]
                peaks[side * count + node, :2] = _peak(row_of(node, side), vocab_start)
        return peaks
    if round == "races":
        number = count if rule == "coupled" else len(bounds) - 1
        races = torch.tensor([[-math.inf, -1.0] * (1 if rule == "coupled" else 2)]).double().repeat(number, 1)
        for node, owner in owners.items():
            if not asked[node].draws or not slots[node].is_good:
                continue
            z = row_of(node, 0)
            assert z is not None
            noise = exponentials(
                0 if seeds is None else int(seeds[owner]),
                asked[node].position,
                asked[node].purpose,
                vocab_start + columns,
            )[vocab_start:].log()
            p = slots[node].weights(z, ids)
            first = weights_left(node, asked[node].first) if asked[node].is_residual else p.clone()
            if not asked[node].is_residual and asked[node].rejected:
                for place, _ in cuts_below(node):
                    first[place] = 0.0
            kinds = [first]
            if rule != "coupled" and (asked[node].is_residual or asked[node].rejected):
                kinds.append(p)
            for i, weights in enumerate(kinds):
                races[node if rule == "coupled" else owner, 2 * i : 2 * i + 2] = _peak(
                    weights.log() - noise, vocab_start
                )
        return races
    if round == "residuals":
        sums = torch.zeros(count, 2 * slices, dtype=torch.float64)
        for node in owners:
            q = probabilities(node, 1) if sides == 2 else None
            if asked[node].asks < 0 or q is None:
                continue
            for place, _ in cuts_below(node):
                q[place] = 0.0
            sums[node, ::2] = _by_slice(weights_left(node, asked[node].beta), slices)
            sums[node, 1::2] = _by_slice(q, slices)
        return sums
    answers = torch.zeros(sides * count, BINS if round in ("counts", "nucleus") else slices, dtype=torch.float64)
    for node in owners:
        for side in range(sides):
            z, slot = row_of(node, side), slots[side * count + node]
            if z is None or not slot.is_good:
                continue
            if round in ("counts", "nucleus") and slot.is_selecting:
                answers[side * count + node] = _in_bins(z, ids, slot, by_mass=round == "nucleus")
            if (round == "top_p" and slot.top_p < 1.0) or (round == "masses" and not slot.kept > 0.0):
                answers[side * count + node] = _by_slice(slot.weights(z, ids), slices)
    return answers


def shard_best(
    logits: Tensor,
    state: Tensor,
    k: int,
    *,
    mode: str,
    vocab_start: int,
    temperature: Tensor | None = None,
    allowed: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    nodes: Tensor | None = None,
) -> Tensor:
    """The arguments are those of ``pass_ext.distributed.shard_best``. Returns fp64 ``[R, k, 3]``: score, id and log
    probability."""
    rows, columns = logits.shape
    ids, numbers = torch.arange(vocab_start, vocab_start + columns), (seeds, positions, nodes)
    best = torch.tensor([-math.inf, -1.0, -math.inf]).double().repeat(rows, k, 1)
    for row, slot in enumerate(slots_of(state, rows)[:rows]):
        z = logits[row].double()
        if allowed is not None:
            z = z.where(is_allowed(allowed[row], columns), -math.inf)
        if not slot.is_good:
            continue
        heat = (0.0 if mode == "coupled" else 1.0) if temperature is None else float(temperature[row])
        seed, position, node = (0 if x is None else int(x[row]) for x in numbers)
        log_weights = ((z - slot.maximum) * slot.scale).where(slot.support(z, ids), -math.inf)
        for draw in range(k if mode == "with" else 1):
            scores = log_weights
            if mode != "top" and heat > 0.0:
                purpose = Purpose.coupled if mode == "coupled" else Purpose.draft
                drawn = exponentials(
                    seed, position, purpose, vocab_start + columns, 0 if mode == "coupled" else node, draw
                )
                scores = log_weights - drawn[vocab_start:].log()
            ranked = scores.sort(descending=True, stable=True)
            kept = int((ranked.values > -math.inf).sum())
            kept = min(kept, 1 if mode == "with" else k)
            at = ranked.indices[:kept]
            best[row, draw : draw + kept] = torch.stack([scores[at], ids[at], log_weights[at] - slot.log_mass], 1)
    return best


def _peak(z: Tensor | None, start: int) -> Tensor:
    """The largest number and its id, the lowest of equals; NaN and -1 if one is NaN or +inf, -inf and -1 if all are -inf."""
    if z is None or not len(z) or (z == -math.inf).all():
        return torch.tensor([-math.inf, -1.0]).double()
    if (z.isnan() | (z == math.inf)).any():
        return torch.tensor([math.nan, -1.0]).double()
    place = int((z == z.max()).nonzero()[0])
    return torch.tensor([float(z.max()), float(start + place)]).double()


def _by_slice(terms: Tensor, slices: int) -> Tensor:
    padded = torch.nn.functional.pad(terms, (0, slices * SLICE - len(terms)))
    return padded.view(slices, SLICE).sum(1)


def _in_bins(z: Tensor, ids: Tensor, slot: Slot, *, by_mass: bool) -> Tensor:
    """Counts or masses of the tokens whose key lies in the slot's range; a bin is a distance from the range's high end."""
    bits = (z.float() + 0.0).view(torch.int32).long() & 0xFFFFFFFF
    ordered = torch.where(bits >> 31 == 1, ~bits & 0xFFFFFFFF, bits | 1 << 31)
    keys = ordered << ID_BITS | (1 << ID_BITS) - 1 - ids
    shift = max(0, (slot.high - slot.low).bit_length() - 9)
    chosen = (keys >= slot.low) & (keys <= slot.high) & ~z.isnan()
    measures = (((z - slot.maximum) * slot.scale).exp() * UNIT).floor() if by_mass else torch.ones_like(z)
    bins = torch.zeros(BINS, dtype=torch.float64)
    return bins.index_add_(0, (slot.high - keys[chosen]) >> shift, measures[chosen])
