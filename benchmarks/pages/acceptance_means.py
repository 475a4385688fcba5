"""How many drafts each accept rule accepts per step, by the package's own kernels on the CPU.

    target logits ~ N(0, 2.5), draft logits = target + N(0, 0.8), 1,000 tokens, temperature 1, at every node of every request

A chain of 4 drafts, and a tree with branching (4, 2, 2). Drafts of modes "without" and "with" get noise of their own at every
node, as docs/ops/accept.md asks for; drafts of mode "coupled" get the target's noise at their text position. The numbers depend
on the seed alone: near ties aside, every machine gets the same.

The error of an approximate rule is exact: for one draft x ~ q, with a(x) its probability of acceptance and r the distribution
of the target's token after a refusal,

    law = q a + (1 - sum q a) r,   error = TV(law, p) = 1/2 sum |law - p|
"""

import math
from typing import Any

import torch
from torch import Tensor

import pass_ext
from pass_ext import Tree
from pass_ext.ops.common.rules import ACCEPT_RULES

SEED, REQUESTS, CHUNK, VOCABULARY = 0, 20_000, 250, 1000
TARGET_SPREAD, DRAFT_NOISE, TEMPERATURE = 2.5, 0.8, 1.0
SHAPES = {"chain": (1, 1, 1, 1), "tree": (4, 2, 2)}

# rule, mode of draft_sample, shapes, the rows of logits that it reads
CASES = [
    ("coupled", "coupled", ("chain", "tree"), "p on the path"),
    ("coupled", "without", ("chain", "tree"), "p on the path"),
    ("coupled", "top", ("chain", "tree"), "p on the path"),
    ("coupled_inverse", "top", ("chain", "tree"), "p on the path; again for the token's place"),
    ("rejection", "without", ("chain", "tree"), "p and q on the path; again after a rejection, if a sibling is left"),
    ("rejection_with_replacement", "with", ("chain", "tree"), "as rejection"),
    ("kseq", "with", ("chain", "tree"), "p and q on the path; again up to four times at a node with siblings"),
    ("block", "without", ("chain",), "p and q of the whole chain; again for each draft taken back"),
    (
        "traversal",
        "without",
        ("tree",),
        "p and q of one branch above its leaf, then on; again for each node taken back",
    ),
    ("typical", "without", ("chain", "tree"), "p of all accepted nodes, on every branch; again for the entropy"),
    ("adaptive_rejection", "without", ("chain", "tree"), "as rejection"),
    ("joint", "without", ("chain", "tree"), "p and q of all nodes"),
]


def draft(mode: str, logits: Tensor, tree: Tree, seeds: Tensor, positions: Tensor) -> Tensor:
    """Tokens [B, nodes] drawn from logits [B, nodes, V]; 0 for the root. All leaves of the tree have the same depth."""
    requests, nodes, vocabulary = logits.shape
    depths, parents = torch.tensor(tree.depths), list(tree.parents)
    inner = int((depths < tree.max_depth).sum())  # nodes are in order of depth: these come first, and have children
    position = positions[:, None] + (depths[:inner] if mode == "coupled" else torch.zeros(inner, dtype=torch.long))
    drawn, _ = pass_ext.draft_sample(
        logits[:, :inner].reshape(-1, vocabulary),
        max(len(tree.children(node)) for node in range(inner)),
        mode=mode,
        temperature=TEMPERATURE,
        seeds=seeds.repeat_interleave(inner),
        positions=position.flatten(),
        nodes=torch.arange(inner).repeat(requests),
    )
    rank = [parents[1:i].count(parents[i]) for i in range(1, nodes)]  # among the children of the same parent
    tokens = torch.zeros(requests, nodes, dtype=torch.long)
    tokens[:, 1:] = drawn.view(requests, inner, -1)[:, parents[1:], rank]
    return tokens


def law_of_one_draft(rule: str, p: Tensor, q: Tensor) -> Tensor:
    """The distribution ``[..., V]`` of the first token that an approximate rule emits, from one draft drawn from q."""
    bounds, after = ACCEPT_RULES[rule], p
    if rule == "typical":
        entropy = -torch.special.xlogy(p, p).sum(-1, keepdim=True)
        accepted = (
            p > torch.minimum(torch.full_like(entropy, bounds.threshold), bounds.alpha * (-entropy).exp())
        ).double()
    elif rule == "joint":
        accepted = (p > bounds.threshold * q).double()
    else:
        ratio = p / q
        accepted = (ratio + bounds.alpha * (1.0 - p.max(-1, keepdim=True).values) * (p > 0.0)).clamp(max=1.0)
        after = (p - q).clamp(min=0.0)
        after = after / after.sum(-1, keepdim=True)
    taken = q * accepted.where(q > 0.0, 0.0)
    return taken + (1.0 - taken.sum(-1, keepdim=True)) * after


def errors(requests: int) -> dict[str, float]:
    """Each approximate rule's mean total variation, over as many random pairs of distributions as ``measure`` begins with."""
    generator = torch.Generator().manual_seed(SEED)
    names = [rule for rule, asks in ACCEPT_RULES.items() if not asks.exact]
    sums = dict.fromkeys(names, 0.0)
    for first in range(0, requests, CHUNK):
        size = min(CHUNK, requests - first)
        target = torch.randn(size, VOCABULARY, generator=generator, dtype=torch.float64) * TARGET_SPREAD
        draft = target + torch.randn(size, VOCABULARY, generator=generator, dtype=torch.float64) * DRAFT_NOISE
        p, q = (target / TEMPERATURE).softmax(-1), (draft / TEMPERATURE).softmax(-1)
        for rule in names:
            sums[rule] += float((law_of_one_draft(rule, p, q) - p).abs().sum()) / 2
    return {rule: round(total / requests, 5) for rule, total in sums.items()}


def measure(requests: int) -> list[dict[str, Any]]:
    """A row per case: the mean of accepted drafts, and its standard error."""
    generator = torch.Generator().manual_seed(SEED)
    cases = [(shape, rule, mode) for rule, mode, shapes, _ in CASES for shape in shapes]
    counts: dict[tuple[str, str, str], list[Tensor]] = {case: [] for case in cases}
    for first in range(0, requests, CHUNK):
        size = min(CHUNK, requests - first)
        seeds, positions = torch.arange(first, first + size), torch.full((size,), 100)
        for shape, branching in SHAPES.items():
            tree = Tree.from_branching(branching)
            target = torch.randn(size, len(tree), VOCABULARY, generator=generator).mul_(TARGET_SPREAD)
            noise = torch.randn(size, len(tree), VOCABULARY, generator=generator)
            logits = noise.mul_(DRAFT_NOISE).add_(target)
            drawn = {
                mode: draft(mode, logits, tree, seeds, positions)
                for mode in {mode for case_shape, _, mode in cases if case_shape == shape}
            }
            for rule, mode in [(rule, mode) for case_shape, rule, mode in cases if case_shape == shape]:
                result = pass_ext.accept_tree(
                    target.flatten(0, 1),
                    drawn[mode].flatten(),
                    torch.tensor(tree.parents).repeat(size),
                    torch.arange(size + 1) * len(tree),
                    tree.max_depth,
                    rule=rule,
                    draft_logits=logits.flatten(0, 1) if ACCEPT_RULES[rule].needs_draft_logits else None,
                    temperature=TEMPERATURE,
                    seeds=seeds,
                    positions=positions,
                )
                assert (result.status == 0).all()
                counts[shape, rule, mode].append(result.num_accepted)
    rows = []
    for (shape, rule, mode), parts in counts.items():
        accepted = torch.cat(parts).double()
        error = float(accepted.std()) / math.sqrt(len(accepted))
        labels = {"shape": shape, "rule": rule, "drafts": mode}
        rows.append({**labels, "mean_accepted": round(float(accepted.mean()), 5), "standard_error": round(error, 5)})
    return rows
