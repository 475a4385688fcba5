"""``next_rows_`` in plain PyTorch: request by request, node by node. The race: draft.py."""

import math

import torch
from torch import Tensor

from pass_ext.reference.draft import draft_sample


def next_rows_(
    rows: Tensor,
    lengths: Tensor,
    prefix_lens: Tensor,
    report: Tensor,
    *,
    limits: Tensor,
    parents: Tensor,
    nodes: int,
    emitted: Tensor,
    path: Tensor,
    num_accepted: Tensor,
    status: Tensor,
    groups: Tensor | None = None,
    offered: Tensor | None = None,
    scores: Tensor | None = None,
    left: Tensor | None = None,
    right: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | None = None,
) -> None:
    """Each request moves behind its emitted tokens, and its children are the best that the accepted node's group offers."""
    ids, tokens, positions = rows
    ancestors = parents.tolist()
    depths = [0]
    for parent in ancestors[1:]:
        depths.append(depths[parent] + 1)
    for b in range(len(lengths)):
        accepted, limit = int(num_accepted[b]), int(limits[b])
        at_limit = int(lengths[b]) >= limit
        report[b] = -1
        report[b, :3] = torch.tensor([-1 if at_limit else accepted, int(status[b]), int((tokens[b, 1:] >= 0).sum())])
        report[b, 3 : 3 + emitted.shape[1]] = emitted[b]
        tokens[b, 1:nodes], ids[b, 1:nodes] = -1, 0
        group = -1
        if not at_limit and accepted >= 0 and emitted[b, accepted] >= 0:
            ids[b, 0] = emitted[b, accepted]
            lengths[b] += accepted + 1
            last = int(path[b, accepted])
            if groups is not None and last >= 0 and limit - int(lengths[b]) > 1:
                group = int(groups[last])
        tokens[b, 0] = ids[b, 0]
        root = int(lengths[b]) - 1
        prefix_lens[b] = root
        positions[b] = root + torch.tensor(depths)
        for parent in range(nodes):
            children = [child for child in range(parent + 1, nodes) if ancestors[child] == parent]
            slot, before = group + depths[parent], int(tokens[b, parent])
            if group < 0 or not children or before < 0 or offered is None or slot >= offered.shape[1]:
                continue
            if scores is None or left is None or right is None:
                chosen = offered[b, slot, : len(children)].clamp(min=-1).tolist()
            elif before < len(left):
                law = {
                    name: None if value is None else value[b : b + 1]
                    for name, value in dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p).items()
                }
                seed = torch.zeros(1, dtype=torch.int64) if seeds is None else seeds[b : b + 1]
                scored = _scored(offered[b, slot], scores[b, slot], left[before], right)
                drafts = draft_sample(
                    scored,
                    len(children),
                    mode="coupled",
                    seeds=seed,
                    positions=torch.tensor([root + depths[parent] + 1]),
                    **law,
                )
                chosen = drafts.tokens[0].tolist()
            else:
                continue
            for child, token in zip(children, chosen, strict=False):
                tokens[b, child], ids[b, child] = token, max(token, 0)


def _scored(offered: Tensor, scores: Tensor, before: Tensor, right: Tensor) -> Tensor:
    """``[1, V]``: the offered tokens' scores with transitions, -inf for all others."""
    row = torch.full((1, len(right)), -math.inf, dtype=torch.float64)
    there = (offered >= 0) & (offered < len(right))
    known = offered[there]
    row[0, known] = scores[there].double() + right[known].double() @ before.double()
    return row
