"""How well u tells a slot the token before it: of the law that u draws from, a slot knows the guess of the slot before.

    same draw   sum over x of |[Fp(x - 1), Fp(x)) with [Fq(x - 1), Fq(x))|, the share of u at which p and q draw the same token
    overlap     sum over x of min(p(x), q(x)), the most that any way of drawing from both can reach

p: the model's law at a + 2 + i, q: slot i's guess of it, both at the temperature of the texts. Slot i + 1 is told the u that
draws from p.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from benchmarks.pages.injection.noise.injection import NoiseInjection
from benchmarks.pages.injection.noise.uniforms import distribution_function
from benchmarks.pages.injection.summary import rounded
from benchmarks.pages.lookahead.slots import Text
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.training.common.frozen_model import text_rows
from pass_ext.training.common.loss import CHUNK
from pass_ext.training.lookahead.forward import slot_rows, transition_hidden

BINS = 16


def law(sums: Tensor) -> Tensor:
    """p ``[N, V]`` of F [N, V]."""
    return sums.diff(dim=1, prepend=sums.new_zeros(len(sums), 1))


def same_draw(p_sums: Tensor, q_sums: Tensor) -> Tensor:
    """``[N]`` of two distribution functions [N, V]."""
    end, start = torch.minimum(p_sums, q_sums), torch.maximum(p_sums, q_sums)[:, :-1]
    shared = end.clone()
    shared[:, 1:] -= start
    return shared.clamp_min_(0).sum(1)


def chi_square(u: Tensor) -> float:
    """The chi-square of the counts of u in ``BINS`` equal parts of [0, 1)."""
    expected = len(u) / BINS
    return float(((torch.histc(u, BINS, 0, 1) - expected).square() / expected).sum())


@torch.no_grad()
def guesses(model: Any, start: str, texts: Sequence[Text], temperature: float) -> dict[str, Any]:
    """Means by slot over all places, for each way of scoring; how uniform the numbers of the texts are."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    embedding = LookaheadEmbedding.from_pretrained(start, table=table).to(table.dtype)
    noise = NoiseInjection(embedding.num_lookahead, embedding.dim, temperature, seed=0)
    numbers: list[Tensor] = []
    slots, total = embedding.num_lookahead, 0
    sums = {scores: torch.zeros(2, slots, dtype=torch.float64) for scores in ("with transitions", "raw")}
    for text in texts:
        ids = torch.tensor(text.ids)
        rows, past = text_rows(model, ids[None])
        numbers.append(noise.uniforms(head, rows[0], ids)[text.prompt :])
        for anchors in torch.arange(text.prompt - 2, len(ids) - 1 - slots).split(CHUNK // slots):
            total += len(anchors)
            place = (anchors[:, None] + 1 + torch.arange(slots)).flatten()
            p = distribution_function(head(rows[0, place]), temperature)
            guess = head(slot_rows(model, embedding, anchors[None], deepcopy(past))[0].flatten(0, 1)).float()
            score = (transition_hidden(embedding, table, ids[place]) @ table.T).float()
            for scores, logits in (("with transitions", guess + score), ("raw", guess)):
                q = distribution_function(logits, temperature)
                both = torch.stack([same_draw(p, q), torch.minimum(law(p), law(q)).sum(1)])
                sums[scores] += both.unflatten(1, (-1, slots)).sum(1)
    u = torch.cat(numbers)
    return {
        "u": {
            "numbers": len(u),
            "mean": round(u.mean().item(), 4),
            "chi-square": round(chi_square(u), 2),
            "bins": BINS,
        },
        "guesses": {
            scores: dict(zip(("same draw", "overlap"), map(rounded, part / total), strict=True))
            for scores, part in sums.items()
        },
    }
