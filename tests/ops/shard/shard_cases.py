"""Random steps on trees, cut into the columns of several ranks, and the comparison with the op on all columns."""

import random
from dataclasses import dataclass

import torch

import pass_ext
from pass_ext.distributed.accept import tree_steps
from pass_ext.distributed.draft import draft_steps
from pass_ext.distributed.exchange import run_together
from pass_ext.distributed.layout import Layout

RULES = ("coupled", "rejection", "rejection_with_replacement", "block", "traversal")
FILTERS = {
    "temperature": (0.5, 1.0, 1.5),
    "top_k": (0, 1, 2, 5, 50, 400),
    "top_p": (0.0, 0.3, 0.9, 0.99, 1.0),
    "min_p": (0.0, 0.01, 0.1, 0.5),
}
SIZES = (5, 64, 65, 300, 1000, 8192, 8200, 20000, 33000)


def equal_layout(vocabulary, ranks):
    """The layout of torch.chunk."""
    width = -(-vocabulary // ranks)
    borders = [min(i * width, vocabulary) for i in range(ranks + 1)]
    return Layout(tuple(borders[:-1]), tuple(borders[1:]))


def any_layout(vocabulary, ranks, chance):
    """Equal parts, or unequal ones, some of them empty."""
    if chance.random() < 0.3:
        return equal_layout(vocabulary, ranks)
    borders = [0, *sorted(chance.randint(0, vocabulary) for _ in range(ranks - 1)), vocabulary]
    return Layout(tuple(borders[:-1]), tuple(borders[1:]))


def apart(columns):
    """A rank's columns in memory of their own. What lies after a row is not its neighbour's first column, as in a slice of all
    columns, but a number that would decide everything."""
    return torch.nn.functional.pad(columns, (0, 1), value=torch.inf)[..., :-1]


def mask_columns(words, begin, end):
    """The mask words of some columns; the bits after them are set."""
    if words is None:
        return None
    places = torch.arange(32, device=words.device)
    bits = (words[:, :, None] >> places & 1).flatten(1)[:, begin:end]
    bits = torch.nn.functional.pad(bits, (0, -(end - begin) % 32), value=1).view(len(words), -1, 32).long()
    sums = (bits << places).sum(-1)
    return torch.where(sums >= 2**31, sums - 2**32, sums).int()


def depth_of(parents):
    depths = []
    for node, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if 0 <= parent < node else 0)
    return max(depths, default=0)


@dataclass
class Step:
    """Arguments of accept_tree."""

    target: torch.Tensor
    draft: torch.Tensor | None
    tree: tuple
    keywords: dict
    sampling: dict
    draft_sampling: dict
    chance: random.Random

    def whole(self, **more):
        drafts = {f"draft_{name}": value for name, value in self.draft_sampling.items()}
        return pass_ext.accept_tree(
            self.target, *self.tree, draft_logits=self.draft, **self.keywords, **self.sampling, **drafts, **more
        )

    def on(self, device):
        """The step with its tensors on a device."""

        def moved(value):
            return value.to(device) if isinstance(value, torch.Tensor) else value

        numbers = [{k: moved(v) for k, v in d.items()} for d in (self.keywords, self.sampling, self.draft_sampling)]
        return Step(moved(self.target), moved(self.draft), tuple(map(moved, self.tree)), *numbers, self.chance)

    def on_ranks(self, layout, shift=None, **gathering):
        """The results of all ranks and the exchanges. ``shift``: a rank whose columns lie one to the side."""
        ranks = []
        for rank, (begin, end) in enumerate(zip(layout.starts, layout.ends, strict=True)):
            step = 0 if rank != shift else 1 if end < layout.vocab_size else -1
            part = slice(begin + step, end + step)
            masks = {name: mask_columns(self.keywords.get(name), begin, end) for name in ("allowed", "draft_allowed")}
            ranks.append(
                tree_steps(
                    rank, layout, apart(self.target[:, part]), *self.tree,
                    draft_logits=None if self.draft is None else apart(self.draft[:, part]),
                    target=tuple(self.sampling.values()),
                    draft=tuple(self.draft_sampling.get(name) for name in FILTERS),
                    **(self.keywords | masks), **gathering,
                )
            )  # fmt: skip
        return run_together(ranks)


def random_step(seed, rule=None, filters=None, vocabulary=None):
    """A step of one to three requests: trees or chains, some padded, malformed or greedy, rows with NaN, masks, fixed
    proposals.
    ``filters``: those that are on; None: random ones."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vocabulary = vocabulary or chance.choice(SIZES)
    rule = rule or chance.choice(RULES)
    is_chain = rule == "block" or chance.random() < 0.3
    trees = []
    for _ in range(chance.choice((1, 2, 3))):
        nodes = chance.choice((1, 2, 4, 6, 9))
        tree = [-1] + [i - 1 if is_chain else chance.randrange(max(0, i - 4), i) for i in range(1, nodes)]
        trees.append(tree if chance.random() > 0.1 else [])
    if not is_chain and chance.random() < 0.1:
        trees[0] = [-1, 0, 5, 0]
    if not any(trees):
        trees[0] = [-1, 0]
    requests, nodes = len(trees), sum(map(len, trees))
    bounds = torch.tensor([0, *map(len, trees)]).cumsum(0).int()
    dtype = chance.choice((torch.float32, torch.bfloat16, torch.float16))
    target = torch.randn(nodes, vocabulary, generator=generator) * chance.choice((0.3, 2.0, 5.0))
    draft = target + torch.randn(nodes, vocabulary, generator=generator) * chance.choice((0.1, 0.5, 2.0))
    if chance.random() < 0.3:  # many ties
        target, draft = (target * 2).round() / 2, (draft * 2).round() / 2
    target, draft = target.to(dtype), draft.to(dtype)

    def numbers(name, on):
        if not on:
            return None
        values = [chance.choice(FILTERS[name]) for _ in range(requests)]
        if name == "temperature" and chance.random() < 0.1:
            values[0] = 0.0
        return torch.tensor(values, dtype=torch.int32 if name == "top_k" else torch.float32)

    def law(filters):
        on = filters or [name for name in FILTERS if chance.random() < 0.35]
        return {name: numbers(name, name == "temperature" or name in on) for name in FILTERS}

    sampling, draft_sampling = law(filters), law(filters) if chance.random() < 0.3 else {}
    has_draft = rule != "coupled" and (rule == "rejection_with_replacement" or chance.random() < 0.9)
    mode = "with" if rule == "rejection_with_replacement" else "without"
    drawn, _ = pass_ext.draft_sample(
        draft, min(8, vocabulary), mode=mode, temperature=1.0, seeds=chance.randrange(2**40), positions=0
    )
    tokens = torch.zeros(nodes, dtype=torch.int64)
    for first, tree in zip(bounds.tolist(), trees, strict=False):
        for node, parent in enumerate(tree):
            if node and 0 <= parent < node:
                place = tree[:node].count(parent) % drawn.shape[1]
                is_drawn = chance.random() > 0.1
                tokens[first + node] = (
                    drawn[first + parent, place] if is_drawn else chance.randrange(-1, vocabulary + 1)
                )
    rows = None
    if has_draft and chance.random() < 0.3:
        rows = torch.arange(nodes, dtype=torch.int32)
        rows[chance.randrange(nodes)] = -1

    def mask():
        if chance.random() > 0.2:
            return None
        words = (nodes, -(-vocabulary // 32))
        return torch.randint(-(2**31), 2**31 - 1, words, generator=generator, dtype=torch.int64).int()

    if chance.random() < 0.1:
        target[chance.randrange(nodes), chance.randrange(vocabulary)] = chance.choice(
            (torch.nan, torch.inf, -torch.inf)
        )
    if chance.random() < 0.05:
        target[chance.randrange(nodes)] = -torch.inf
    if chance.random() < 0.05:
        draft[chance.randrange(nodes), chance.randrange(vocabulary)] = torch.nan
    parents = torch.tensor([parent for tree in trees for parent in tree], dtype=torch.int32)
    seeds, positions = (torch.randint(0, 2**40, (requests,), generator=generator) for _ in range(2))
    keywords = {"rule": rule, "draft_rows": rows, "allowed": mask(), "seeds": seeds, "positions": positions}
    keywords["draft_allowed"] = mask() if has_draft else None
    tree = (tokens, parents, bounds, max(map(depth_of, trees)))
    return Step(target, draft if has_draft else None, tree, keywords, sampling, draft_sampling, chance)


def same(results, expected):
    """True if every rank has the expected result, to the bit."""
    return all(torch.equal(a, b) for result in results for a, b in zip(result, expected, strict=True))


def random_drafts(seed):
    """Arguments of draft_sample: logits, k, mode, sampling and the rest."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vocabulary, rows = chance.choice((5, 64, 65, 300, 8192, 8200, 20000)), chance.choice((1, 3))
    logits = torch.randn(rows, vocabulary, generator=generator) * chance.choice((0.5, 3.0))
    if chance.random() < 0.4:
        logits = (logits * 2).round() / 2
    logits = logits.to(chance.choice((torch.float32, torch.bfloat16)))
    if chance.random() < 0.1:
        logits[0, chance.randrange(vocabulary)] = torch.nan
    if chance.random() < 0.1:
        logits[0] = -torch.inf
    sampling = {}
    for name, values in FILTERS.items():
        numbers = [chance.choice((0.0, *values) if name == "temperature" else values) for _ in range(rows)]
        dtype = torch.int32 if name == "top_k" else torch.float32
        sampling[name] = torch.tensor(numbers, dtype=dtype) if chance.random() < 0.5 else None
    words = torch.randint(-(2**31), 2**31 - 1, (rows, -(-vocabulary // 32)), generator=generator, dtype=torch.int64)
    rest = {
        "allowed": words.int() if chance.random() < 0.2 else None,
        "seeds": torch.randint(0, 2**40, (rows,), generator=generator),
        "positions": torch.randint(0, 99, (rows,), generator=generator),
        "nodes": torch.randint(0, 99, (rows,), generator=generator).int(),
    }
    modes = pass_ext.ops.draft.MODES
    return chance, logits, chance.choice((1, 3, 8, 20)), chance.choice(modes), sampling, rest


def drafts_on_ranks(logits, k, mode, sampling, rest, layout):
    ranks = []
    for rank, (begin, end) in enumerate(zip(layout.starts, layout.ends, strict=True)):
        masked = rest | {"allowed": mask_columns(rest["allowed"], begin, end)}
        ranks.append(
            draft_steps(
                rank, layout, apart(logits[:, begin:end]), k, mode=mode, target=tuple(sampling.values()), **masked
            )
        )
    return run_together(ranks)
