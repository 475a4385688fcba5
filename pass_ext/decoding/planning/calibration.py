"""Measures the hit rates of a draft model, which plans need: how often it is right on texts that the target wrote.

    rates[i][r] = P(the target's greedy token is the draft's rank r | the i tokens before were within the ranks)

Every position of a text is the root of a step once. Both models read the text itself, because a greedy step accepts the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.arguments import instance, whole_number
from pass_ext.decoding.methods import Assistant, DFlash, HeadMethod
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.session.session import Session
from pass_ext.modules.files import HitRates
from pass_ext.ops.common.uploaded import uploaded
from pass_ext.ops.draft import draft_sample
from pass_ext.tree import Tree, pack_trees

_ROWS = 256  # per call: with a large vocabulary the logits of one row take about 200 KB


def calibrate(
    model: Any,
    draft_model: Any,
    texts: Sequence[Sequence[int]],
    *,
    ranks: int = 8,
    levels: int = 6,
    prompt_lengths: Sequence[int] | None = None,
) -> HitRates:
    """Measures the hit rates of a draft model, ``[levels][ranks]``; zeros for levels that no path of the texts reaches.

    Args:
        model: the target, as ``generate`` takes it.
        draft_model: as ``model``. The vocabularies may differ by padding: tokens that the target lacks are no candidates.
        texts: tokens that the target wrote itself (greedy), with their prompts. A path ends after a token that the target
            would not have written.
        ranks: how many of the draft's candidates count, the most probable first.
        levels: how many tokens ahead.
        prompt_lengths: how many tokens of each text are its prompt: steps begin at the prompt's last token. None: 1 for every
            text.
    """
    whole_number("ranks", ranks)
    whole_number("levels", levels)
    if isinstance(draft_model, HeadMethod | DFlash | Assistant):
        raise TypeError(
            f"calibrate: draft_model must be a model, got {type(draft_model).__name__}: a head drafts from the model's states. "
            "Its hit rates follow from stats.acceptance_rate_per_position of texts with a chain: each by the one in front of it"
        )
    target, draft = packed_model(model), packed_model(draft_model)
    prompts = _checked(texts, prompt_lengths, min(target.table.shape[0], draft.table.shape[0]))
    right = _map_rows(target, texts, lambda logits, text, rows: logits.argmax(-1).cpu())
    width = target.table.shape[0]
    hits = _map_rows(draft, texts, lambda logits, text, rows: _ranks(logits[:, :width], right[text][rows], ranks))
    counts = torch.zeros(levels, ranks + 1, dtype=torch.int64)
    for tokens, prompt, greedy, hit_ranks in zip(texts, prompts, right, hits, strict=True):
        counts += _counts(hit_ranks, greedy[:-1] == torch.tensor(tokens[1:]), prompt, levels, ranks)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    return tuple(tuple(round(rate, 5) for rate in row[:ranks]) for row in shares.tolist())


def _map_rows(
    model: Adapted, texts: Sequence[Sequence[int]], function: Callable[[Tensor, int, slice], Tensor]
) -> list[Tensor]:
    """Applies ``function(logits of some rows, number of the text, the rows)`` to all rows -> one tensor per text."""
    results = []
    with torch.no_grad(), model.attached():
        for text, tokens in enumerate(texts):
            session = Session(model, 1, len(tokens))
            parts = []
            for first in range(0, len(tokens), _ROWS):
                ids = uploaded(tokens[first : first + _ROWS], session.device)
                trees = pack_trees([Tree.chain(len(ids) - 1)], session.device)
                parts.append(function(session.call(trees, ids), text, slice(first, first + len(ids))))
                path = torch.arange(len(ids), dtype=torch.int32, device=session.device)[None]
                session.commit(trees, path, torch.full_like(path[:, 0], len(ids) - 1))
            results.append(torch.cat(parts))
    return results


def _ranks(logits: Tensor, right: Tensor, ranks: int) -> Tensor:
    """``[R]`` on the CPU: the rank of the right token among the draft's candidates; ``ranks`` where it is none of them."""
    hits = draft_sample(logits, ranks, mode="top")[0].cpu() == right[:, None]
    return torch.where(hits.any(1), hits.int().argmax(1), ranks)


def _counts(hit_ranks: Tensor, is_greedy: Tensor, prompt: int, levels: int, ranks: int) -> Tensor:
    """``[levels, ranks + 1]``: how often the right token had each rank, per level. is_greedy ``[n - 1]``: True where the text's
    next token is the target's greedy one."""
    counts = torch.zeros(levels, ranks + 1, dtype=torch.int64)
    goes_on = (hit_ranks[:-1] < ranks) & is_greedy
    alive = torch.arange(prompt - 1, len(hit_ranks))  # the rows at this level, one for each root whose path reaches it
    for level in range(levels):
        counts[level] = torch.bincount(hit_ranks[alive], minlength=ranks + 1)
        alive = alive[alive < len(hit_ranks) - 1]
        alive = alive[goes_on[alive]] + 1
    return counts


def _checked(texts: Sequence[Sequence[int]], prompt_lengths: Sequence[int] | None, vocabulary: int) -> Sequence[int]:
    instance("calibrate: texts", texts, (list, tuple), "a list of lists of token ids")
    if not texts:
        raise ValueError("texts must hold at least one text, got none")
    if not all(isinstance(tokens, (list, tuple)) and all(type(t) is int for t in tokens) for tokens in texts):
        raise TypeError(f"calibrate: texts must be lists of token ids, got {texts!r}"[:200])
    if not isinstance(prompt_lengths, (list, tuple, NoneType)) or not all(type(n) is int for n in prompt_lengths or ()):
        raise TypeError(f"calibrate: prompt_lengths must be a list of whole numbers or None, got {prompt_lengths!r}")
    for index, tokens in enumerate(texts):
        strange = [token for token in tokens if not 0 <= token < vocabulary]
        if not tokens or strange:
            got = f"the id {strange[0]}" if strange else "no tokens"
            raise ValueError(
                f"texts must hold ids from 0 to {vocabulary - 1}, which both models have; text {index} holds {got}"
            )
    prompts = [1] * len(texts) if prompt_lengths is None else prompt_lengths
    if len(prompts) != len(texts) or any(
        not 1 <= prompt <= len(text) for prompt, text in zip(prompts, texts, strict=False)
    ):
        raise ValueError(
            f"prompt_lengths must be a number from 1 to its length for each of the {len(texts)} texts, got {list(prompts)}"
        )
    return prompts
