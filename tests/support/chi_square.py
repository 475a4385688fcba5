"""Counts of sampled texts, and Pearson's chi-square test of counts against a distribution.

statistic = sum over cells of (count - expected)^2 / expected        tail = P(a statistic as large)
"""

import torch


def counted(texts, vocabulary):
    """How often each text ``[N, length]`` occurs, in the order of ``itertools.product``."""
    places = vocabulary ** torch.arange(texts.shape[1] - 1, -1, -1)
    return torch.bincount((texts * places).sum(1), minlength=vocabulary ** texts.shape[1]).double()


def law_of_two(target, prompt, temperature, top_k):
    """The distribution of a transformers model's next two tokens, in the order of ``counted``."""

    def law(text):
        logits = target(torch.tensor([text])).logits[0, -1] / temperature
        best = logits.topk(top_k)
        return torch.zeros(len(logits)).double().index_copy(0, best.indices, best.values.double().softmax(-1))

    first = law(prompt)
    return torch.cat([p * law([*prompt, token]) if p else first * 0 for token, p in enumerate(first)])


def fit(counts, distribution):
    """The statistic and its degrees of freedom; rare texts are one cell."""
    total = counts.sum()
    often = distribution * total >= 5
    expected, seen = distribution[often] * total, counts[often]
    if not often.all():
        expected = torch.cat([expected, distribution[~often].sum()[None] * total])
        seen = torch.cat([seen, counts[~often].sum()[None]])
    return float(((seen - expected) ** 2 / expected).sum()), len(expected) - 1


def chi_square_tail(counts, distribution, least=5.0):
    """P(a statistic as large). Cells in which fewer than `least` are expected become one cell."""
    counts, distribution = counts.double().flatten().cpu(), distribution.double().flatten().cpu()
    assert abs(float(distribution.sum()) - 1.0) < 1e-9 and len(counts) == len(distribution)
    if (counts[distribution == 0.0] > 0).any():
        return 0.0
    expected, order = (distribution * counts.sum()).sort(descending=True)
    counts = counts[order]
    cells = max(int((expected >= least).sum()), 1)
    if cells < len(expected):
        rest = float(expected[cells:].sum())
        cells -= cells > 1 and rest < least  # then one more cell joins the last
        counts = torch.cat([counts[:cells], counts[cells:].sum(0, keepdim=True)])
        expected = torch.cat([expected[:cells], expected[cells:].sum(0, keepdim=True)])
    counts, expected = counts[expected > 0.0], expected[expected > 0.0]
    assert len(counts) > 1, "one cell says nothing"
    statistic = ((counts - expected) ** 2 / expected).sum()
    tail = float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0).double(), statistic / 2))
    print(f"chi-square {float(statistic):.1f}, {len(counts)} cells, {int(counts.sum())} samples: p = {tail:.3g}")
    return tail
