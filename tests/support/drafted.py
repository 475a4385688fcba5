"""Draft models by enumeration: every candidate that the real ModelDrafter can draw, as the reference rules take it."""

import math

import torch
from support.enumeration import EXACT, outcomes

from pass_ext.reference.accept import Walk
from pass_ext.reference.common.distribution import process

PROMPT = [2, 0, 1]


class Recalling:
    """A draft whose logits depend on every token of the text and on their order: its attention is the mean of the text's
    tokens, weighted by position."""

    def __init__(self, seed, vocabulary):
        self.embedding = torch.eye(vocabulary, 64)
        generator = torch.Generator().manual_seed(seed)
        self.inner = torch.randn(64, 16, generator=generator)
        self.head = torch.randn(16, vocabulary, generator=generator)

    def __call__(self, rows, positions, attend, wanted):
        weighted = (rows * (1 + positions[:, None] ** 1.5))[:, None]
        mean = attend(0, torch.zeros_like(weighted), weighted, weighted)[:, 0]
        mean = mean if wanted is None else mean[wanted]
        return 0.8 * torch.sin(mean @ self.inner) @ self.head


def masked(row, words):
    """The row where the mask's only word allows its tokens; None allows all."""
    if words is None:
        return row.double()
    return row.double() + torch.tensor([0.0 if int(words) >> token & 1 else -math.inf for token in range(len(row))])


class Judged:
    """The drafter's candidates as the reference rules take them; the target's distributions are a World's."""

    def __init__(self, drafted, draft_logits, world, draft_allowed=None):
        self.parents, self.max_depth = list(drafted.tree.parents), drafted.tree.max_depth
        self.vocabulary, self.world = world.vocabulary, world
        self.tokens, self.rows = [PROMPT[-1], *drafted.tokens], drafted.draft_rows
        self.draft_logits, self.draft_allowed = draft_logits, draft_allowed

    def text(self, node):
        return () if node == 0 else (*self.text(self.parents[node]), self.tokens[node])

    def token(self, node):
        return self.tokens[node]

    def target(self, node):
        return self.world.at(self.text(node))[0]

    def draft(self, node):
        if self.rows is None or self.rows[node] < 0:
            return None
        row = self.rows[node]
        words = None if self.draft_allowed is None else self.draft_allowed[row]
        return process(masked(self.draft_logits[row], words), **self.world.filters)

    def branch(self, top):
        """The tree below one node, which becomes its root."""
        below = [top]
        for node in below:
            below += [child for child, parent in enumerate(self.parents) if parent == node]
        branch = object.__new__(Judged)
        branch.__dict__.update(self.__dict__, max_depth=self.max_depth - 1)
        branch.parents = [-1, *(below.index(self.parents[node]) for node in below[1:])]
        branch.tokens, branch.text = [self.tokens[node] for node in below], lambda node: self.text(below[node])
        branch.rows = [self.rows[node] for node in below]
        return branch


def replayed(replay, filters):
    """A ``draw_children`` that replays the choices of a script, under the masks that it is given."""

    def draw(logits, width, mode, sampling, places, depth, parents, allowed=None):
        tokens = []
        for row, words in zip(logits, [None] * len(logits) if allowed is None else allowed, strict=True):
            nothing = words is not None and not int(words)
            q = [0.0] * len(row) if nothing else process(masked(row, words), **filters).probs.tolist()
            children = []
            for _ in range(width):
                left = [0.0 if mode == "without" and token in children else x for token, x in enumerate(q)]
                children.append(replay.choose([x / sum(left) for x in left]) if sum(left) > 0 else -1)
            tokens.append(children)
        drawn = torch.tensor(tokens)
        return drawn, logits.log_softmax(-1).gather(1, drawn.clamp(min=0))

    return draw


def emitted(request, rule, masses, mass):
    """Adds the distribution of one step's emitted text to ``masses``; returns the mean number of accepted drafts."""
    mean = 0.0
    for probability, (stop, token), replay in outcomes(lambda replay: Walk(request, replay, rule).run()):
        text = request.text(stop)
        mean += probability * len(text)
        for last, p in ({token: 1.0} if replay.law is None else dict(enumerate(replay.law))).items():
            masses[(*text, last)] = masses.get((*text, last), 0.0) + mass * probability * p
    return mean


def variation(distribution, world, horizon):
    """Total variation of texts from the target's own."""
    truth = world.joint(horizon)
    assert abs(sum(distribution.values()) - 1.0) < EXACT
    return 0.5 * sum(abs(distribution[text] - truth[text]) for text in truth)
