"""Every outcome of a draft and its acceptance, with its probability: small worlds, replayed coins, total variation."""

import itertools
import math
from dataclasses import dataclass, field

import torch
from support.steps import depths_of

from pass_ext.reference.accept import RULES, Walk
from pass_ext.reference.common.distribution import process
from pass_ext.reference.common.noise import Purpose

EXACT = 1e-12
FAULTY = 1e-3


class Replay:
    """A Chance that makes the choices of a script. After its end it makes the first choice and appends it."""

    def __init__(self, script):
        self.script, self.taken, self.probability, self.law = script, 0, 1.0, None

    def choose(self, probabilities):
        """The index of the chosen option; impossible options do not count."""
        options = [(i, p) for i, p in enumerate(probabilities) if p > 0.0]
        if self.taken == len(self.script):
            self.script.append((0, len(options)))
        index, probability = options[self.script[self.taken][0]]
        self.taken += 1
        self.probability *= probability
        return index

    def coin(self, node, bound, size):
        bound = min(max(bound, 0.0), 1.0)
        return self.choose([bound, 1.0 - bound]) == 0

    def draw(self, weights, sizes, purpose, depth):
        distribution = (weights / weights.sum()).tolist()
        if purpose in (Purpose.coupled, Purpose.inverse):
            return self.choose(distribution)
        self.law = distribution  # the whole distribution of a walk's last token
        return 0

    def near(self, margin):
        pass


def outcomes(play, chance=Replay):
    """(probability, result of play(chance), chance) for everything that can happen."""
    script = []
    while True:
        replay = chance(script)
        result = play(replay)
        yield replay.probability, result, replay
        while script and script[-1][0] + 1 == script[-1][1]:
            script.pop()
        if not script:
            return
        script[-1] = (script[-1][0] + 1, script[-1][1])


class World:
    """Random distributions of target and draft after each text, with some zero probabilities and some drafts equal to the
    target.
    """

    def __init__(self, seed, vocabulary, zeros=0.25, spread=1.5, filters=None, draft_filters=None):
        self.generator = torch.Generator().manual_seed(seed)
        self.vocabulary, self.zeros, self.spread = vocabulary, zeros, spread
        self.filters, self.draft_filters = filters or {}, draft_filters or filters or {}
        self.laws = {}

    def at(self, text):
        """(p, q) after a text."""
        if text not in self.laws:
            logits = torch.randn(2, self.vocabulary, generator=self.generator, dtype=torch.float64) * self.spread
            logits[torch.rand(2, self.vocabulary, generator=self.generator) < self.zeros] = -math.inf
            for row in logits:
                if (row == -math.inf).all():
                    row[int(torch.randint(self.vocabulary, (), generator=self.generator))] = 0.0
            p, q = process(logits[0], **self.filters), process(logits[1], **self.draft_filters)
            self.laws[text] = (p, p if self.zeros and torch.rand((), generator=self.generator) < 0.1 else q)
        return self.laws[text]

    def joint(self, horizon):
        """The target's distribution of the next `horizon` tokens."""
        return self.completed({(): 1.0}, horizon)

    def completed(self, masses, horizon):
        """The distribution of `horizon` tokens, from the masses of shorter texts continued by the target."""
        done = dict.fromkeys(itertools.product(range(self.vocabulary), repeat=horizon), 0.0)
        for length in range(horizon + 1):
            for text, mass in [(t, m) for t, m in masses.items() if len(t) == length]:
                if length == horizon:
                    done[text] += mass
                    continue
                for token, p in enumerate(self.at(text)[0].probs.tolist()):
                    masses[(*text, token)] = masses.get((*text, token), 0.0) + mass * p
        return done


@dataclass
class Texts:
    """A world of named texts."""

    vocabulary: int
    distributions: dict

    def at(self, text):
        return self.distributions[text]


@dataclass
class Drafts:
    """A tree whose tokens are drawn when they are read.

    replaced: children are drawn with replacement. fixed: node -> token, whatever the draft's distribution; "outside": a token
    that the draft cannot give; "again": the token of the first sibling. no_row: nodes whose draft row is -1, so that all their
    children are fixed proposals.
    """

    world: World
    parents: list
    max_depth: int
    replaced: bool = False
    fixed: dict = field(default_factory=dict)
    no_row: tuple = ()
    chance: Replay = None

    def __post_init__(self):
        self.vocabulary = self.world.vocabulary
        self.drawn = {}

    def with_chance(self, chance):
        return Drafts(self.world, self.parents, self.max_depth, self.replaced, self.fixed, self.no_row, chance)

    def text(self, node):
        return () if node == 0 else (*self.text(self.parents[node]), self.token(node))

    def token(self, node):
        if node not in self.drawn:
            self.drawn[node] = self.draw(node)
        return self.drawn[node]

    def draw(self, node):
        parent = self.parents[node]
        q = self.world.at(self.text(parent))[1].probs.tolist()
        if self.fixed.get(node) == "outside":
            return q.index(0.0) if 0.0 in q else -1
        if self.fixed.get(node) == "again":
            return self.token(self.parents.index(parent))
        if node in self.fixed:
            return self.fixed[node]
        if not self.replaced:
            for sibling in [i for i in range(1, node) if self.parents[i] == parent]:
                if 0 <= self.token(sibling) < self.vocabulary:
                    q[self.token(sibling)] = 0.0
        mass = sum(q)
        return self.chance.choose([x / mass for x in q]) if mass > 0.0 else -1

    def target(self, node):
        return self.world.at(self.text(node))[0]

    def draft(self, node):
        return None if node in self.no_row else self.world.at(self.text(node))[1]


def emitted_distribution(drafts, rule, chance=Replay):
    """The distribution of the emitted text, continued to max_depth + 1 tokens, and the mean number of accepted drafts."""
    masses, mean = {}, 0.0

    def play(replay):
        tree = drafts.with_chance(replay)
        stop, token = Walk(tree, replay, rule).run()
        return tree.text(stop), token

    for probability, (text, token), replay in outcomes(play, chance):
        mean += probability * len(text)
        distribution = {token: 1.0} if replay.law is None else dict(enumerate(replay.law))
        for last, p in distribution.items():
            masses[(*text, last)] = masses.get((*text, last), 0.0) + probability * p
    return drafts.world.completed(masses, drafts.max_depth + 1), mean


def distribution_of_walk(drafts, rule, endings_of):
    """The distribution of the emitted text and the mean number of accepted drafts, as ``emitted_distribution``, of a compiled
    walk. ``endings_of`` lists (probability, last node, distribution of the token after it) for every way that coins can fall.
    """
    masses, mean = {}, 0.0
    size, vocabulary = len(drafts.parents), drafts.vocabulary

    def drawn(replay):
        tree = drafts.with_chance(replay)
        return tree, [-1, *(tree.token(node) for node in range(1, size))]

    for probability, (tree, tokens), _ in outcomes(drawn):
        logits = torch.zeros(2, size, vocabulary)
        for node in range(size):
            text = tree.text(node)
            if all(0 <= token < vocabulary for token in text):
                logits[:, node] = torch.stack([distribution.probs for distribution in drafts.world.at(text)]).log()
        has_row = [int(node not in drafts.no_row) for node in range(size)]
        endings = endings_of(
            list(RULES).index(rule), drafts.parents, tokens, *logits.numpy(), has_row, drafts.max_depth
        )
        for coins, stop, last in endings:
            text = tree.text(stop)
            mean += probability * coins * len(text)
            for token, p in enumerate(last):
                masses[(*text, token)] = masses.get((*text, token), 0.0) + probability * coins * p
    return drafts.world.completed(masses, drafts.max_depth + 1), mean


def variation(drafts, rule, chance=Replay):
    """Total variation between the emitted distribution and the target's."""
    distribution, _ = emitted_distribution(drafts, rule, chance)
    truth = drafts.world.joint(drafts.max_depth + 1)
    assert abs(sum(distribution.values()) - 1.0) < EXACT or chance is not Replay
    return 0.5 * sum(abs(distribution[text] - truth[text]) for text in truth)


CHAINS = {"chain1": [-1, 0], "chain2": [-1, 0, 1], "chain3": [-1, 0, 1, 2]}
STARS = {"star2": [-1, 0, 0], "star3": [-1, 0, 0, 0]}
TREES = {
    "2,1": [-1, 0, 0, 1],
    "1,2": [-1, 0, 1, 1],
    "2,2": [-1, 0, 0, 1, 1, 2, 2],
    "2,2 interleaved": [-1, 0, 1, 0, 3, 1, 3],
    "3,1": [-1, 0, 0, 0, 1, 2, 3],
    "1,2,1": [-1, 0, 1, 1, 2, 3],
    "1,1,2": [-1, 0, 1, 2, 2],
    "3,2": [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3],
    "2,2,1": [-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6],
}
ALL = CHAINS | STARS | TREES
SHAPES = {
    "coupled": ALL,
    "rejection": ALL,
    "rejection_with_replacement": ALL,
    "kseq": ALL,
    "block": CHAINS,
    "traversal": ALL,
    "coupled_inverse": ALL,
}


# Children with the same token, by the origin of their tokens: parents, number of worlds, arguments of `make`. An "again" token
# was drawn once and is proposed once more, when the draft cannot give it any more.
TWINS = [-1, 0, 0, 0, 1, 2]
DUPLICATES = {
    "proposed": ([-1, 0, 0, 0, 0], 4, {"no_row": range(9), "fixed": {1: 0, 2: 0, 3: 1, 4: 0}}),
    "proposed, with others between": ([-1, 0, 0, 0, 0], 4, {"no_row": range(9), "fixed": {1: 0, 2: 1, 3: 0, 4: 1}}),
    "proposed, with children": (TWINS, 4, {"no_row": range(9), "fixed": {1: 1, 2: 1, 3: 0, 4: 2, 5: 2}}),
    "proposed at the root, drawn below": (TWINS, 2, {"no_row": (0,), "fixed": {1: 1, 2: 1, 3: 1}}),
    "proposed again": ([-1, 0, 0, 0], 4, {"fixed": {3: "again"}, "replaced": False}),
    "proposed again at once": ([-1, 0, 0, 0], 4, {"fixed": {2: "again"}, "replaced": False}),
    "proposed again, with children": (TWINS, 2, {"fixed": {3: "again"}, "replaced": False}),
    "proposed again at once, with children": (TWINS, 2, {"fixed": {2: "again"}, "replaced": False}),
    "drawn with replacement": ([-1, 0, 0, 0], 4, {"replaced": True}),
    "drawn with replacement, with children": ([-1, 0, 0, 1, 2], 2, {"replaced": True}),
    "drawn with replacement below a proposal": (
        [-1, 0, 1, 1, 1],
        2,
        {"no_row": (0,), "fixed": {1: 0}, "replaced": True},
    ),
    "outside the draft's support": ([-1, 0, 0, 0], 6, {"fixed": {1: "outside", 3: "outside"}, "replaced": False}),
}
WANT_REPLACEMENT = ("rejection_with_replacement", "kseq")  # these judge every draft as drawn from the whole q


def make(world, rule, parents, **options):
    options.setdefault("max_depth", max(depths_of(parents)))
    return Drafts(world, parents, **{"replaced": rule in WANT_REPLACEMENT, **options})


def worlds(parents, count, **options):
    """Worlds of three and four tokens in turn; of three for the largest trees."""
    return [World(seed, 3 if len(parents) > 7 else 3 + seed % 2, **options) for seed in range(count)]


FIXED = {
    "no draft at all": {"no_row": range(9)},
    "no row at the root": {"no_row": (0,)},
    "no row below the root": {"no_row": (1, 2)},
    "anything proposed": {"no_row": range(9), "fixed": {1: 2, 2: 0, 3: 1, 4: 1}},
    "twice the same": {"no_row": range(9), "fixed": {1: 2, 2: 2, 3: 1, 4: 1}},
    "outside the vocabulary": {"no_row": (0,), "fixed": {1: -1, 2: 4, 3: 1000000}},
    "drafts outside the vocabulary": {"fixed": {1: -1, 3: 7}},
    "first outside the draft's support": {"fixed": {1: "outside", 3: "outside"}},
    "second outside the draft's support": {"fixed": {2: "outside", 4: "outside"}},
}
CASES = [(rule, name) for rule, shapes in SHAPES.items() for name in shapes]


def takes_duplicates(rule, origin):
    """True if the rule is exact for such duplicates: a token that is proposed again needs a q that cannot give it any more."""
    return rule != "block" and not (rule in WANT_REPLACEMENT and DUPLICATES[origin][2].get("replaced") is False)


DUPLICATE_CASES = [(rule, origin) for rule in SHAPES for origin in DUPLICATES if takes_duplicates(rule, origin)]
