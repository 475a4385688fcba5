"""That the rules of pass_ext.reference are exact, by enumeration: every draft that can be drawn and every way that coins can
fall, with its probability, for small vocabularies and trees. The law of what is emitted, continued by the target to the depth
of the tree plus one, must be the target's own to within rounding. No kernels here: they are compared with the reference.
"""

import itertools
import math
from dataclasses import dataclass, field

import pytest
import torch

import pass_ext.reference.accept as accept_module
from pass_ext.reference import accept_tree, draft_sample
from pass_ext.reference.accept import RULES, Judge, Walk
from pass_ext.reference.distribution import process
from pass_ext.reference.noise import Purpose

EXACT = 1e-12
FAULTY = 1e-3


# ---- everything that can happen ----


class Replay:
    """A Chance that makes the choices of a script, and behind its end always the first, which it appends."""

    def __init__(self, script):
        self.script, self.taken, self.probability, self.law = script, 0, 1.0, None

    def choose(self, probabilities):
        """The index of an option; what is impossible is none."""
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
        law = (weights / weights.sum()).tolist()
        if purpose == Purpose.coupled:
            return self.choose(law)
        self.law = law  # the last token of a walk: its whole law at once
        return 0

    def near(self, margin):
        pass


def outcomes(play, chance=Replay):
    """(probability, what play(chance) returned, chance) of everything that can happen."""
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
    """Random laws: the target's and the draft's after each text, some probabilities zero, some drafts the target itself."""

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
        """The target's law of the next `horizon` tokens."""
        return self.completed({(): 1.0}, horizon)

    def completed(self, masses, horizon):
        """The law of `horizon` tokens, from the masses of shorter texts continued by the target."""
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
    """A world of the texts that are named."""

    vocabulary: int
    laws: dict

    def at(self, text):
        return self.laws[text]


@dataclass
class Drafts:
    """A tree whose tokens are drawn when they are looked at.

    replaced: children are drawn with replacement. fixed: node -> token, whatever the draft's law; "outside": a token that
    the draft cannot give; "again": the token of the first sibling. no_row: nodes whose draft row is -1, so that all their
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


def emitted_law(drafts, rule, chance=Replay):
    """The law of the emitted text, continued to max_depth + 1 tokens; and the mean number of accepted drafts."""
    masses, mean = {}, 0.0

    def play(replay):
        tree = drafts.with_chance(replay)
        stop, token = Walk(tree, replay, rule).run()
        return tree.text(stop), token

    for probability, (text, token), replay in outcomes(play, chance):
        mean += probability * len(text)
        law = {token: 1.0} if replay.law is None else dict(enumerate(replay.law))
        for last, p in law.items():
            masses[(*text, last)] = masses.get((*text, last), 0.0) + probability * p
    return drafts.world.completed(masses, drafts.max_depth + 1), mean


def variation(drafts, rule, chance=Replay):
    """Total variation between the emitted law and the target's."""
    law, _ = emitted_law(drafts, rule, chance)
    truth = drafts.world.joint(drafts.max_depth + 1)
    assert abs(sum(law.values()) - 1.0) < EXACT or chance is not Replay
    return 0.5 * sum(abs(law[text] - truth[text]) for text in truth)


# ---- exactness ----

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
}
CASES = [(rule, name) for rule, shapes in SHAPES.items() for name in shapes]
FILTERS = [
    {"temperature": 0.7, "top_k": 2},
    {"temperature": 1.3, "top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 0.9, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
    {"top_k": 1},
]


# Children with the same token, by where the tokens come from: parents, how many worlds, what `make` is told. What is "again"
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
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    options.setdefault("max_depth", max(depths))
    return Drafts(world, parents, **{"replaced": rule in WANT_REPLACEMENT, **options})


def worlds(parents, count, **options):
    """Three and four tokens by turns; three for the largest trees."""
    return [World(seed, 3 if len(parents) > 7 else 3 + seed % 2, **options) for seed in range(count)]


def test_every_exact_rule_is_here():
    assert set(SHAPES) == {rule for rule, kind in RULES.items() if kind == "exact"}


COUNT = pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])  # worlds


@COUNT
@pytest.mark.parametrize("zeros", [0.0, 0.25])
@pytest.mark.parametrize(("rule", "shape"), CASES)
def test_exact(rule, shape, zeros, count):
    """With zeros there are more children than the support, and drafts that are the target's own law."""
    parents = SHAPES[rule][shape]
    count = count if len(parents) < 6 else count // 2 if len(parents) < 8 else 1
    for world in worlds(parents, count, zeros=zeros):
        assert variation(make(world, rule, parents), rule) < EXACT


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("rule", SHAPES)
def test_exact_with_filters(rule, filters):
    """The target is the filtered law; the draft's filters are the same, others, or none."""
    parents = SHAPES[rule].get("2,1", CHAINS["chain2"])
    for draft_filters in (filters, FILTERS[1], {"temperature": 1.0}):
        world = World(5, 4, zeros=0.0, filters=filters, draft_filters=draft_filters)
        assert variation(make(world, rule, parents), rule) < EXACT


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


@COUNT
@pytest.mark.parametrize("fixed", FIXED)
@pytest.mark.parametrize("rule", SHAPES)
def test_exact_with_fixed_proposals(rule, fixed, count):
    for parents in [CHAINS["chain3"]] if rule == "block" else [[-1, 0, 0, 1, 1], [-1, 0, 0, 0, 1]]:
        for world in worlds(parents, count, zeros=0.4):
            assert variation(make(world, rule, parents, **FIXED[fixed]), rule) < EXACT


def takes_duplicates(rule, origin):
    """Whether the rule promises anything for them: what is proposed again, q can still give where it stays whole."""
    return rule != "block" and not (rule in WANT_REPLACEMENT and DUPLICATES[origin][2].get("replaced") is False)


DUPLICATE_CASES = [(rule, origin) for rule in SHAPES for origin in DUPLICATES if takes_duplicates(rule, origin)]


@pytest.mark.parametrize(("rule", "origin"), DUPLICATE_CASES)
def test_exact_with_duplicates(rule, origin):
    parents, count, options = DUPLICATES[origin]
    for world in worlds(parents, count, zeros=0.4 if "outside" in origin else 0.1):
        assert variation(make(world, rule, parents, **options), rule) < EXACT


@pytest.mark.parametrize("rule", SHAPES)
def test_exact_when_the_tree_is_cut(rule):
    """Nodes deeper than max_depth are ignored."""
    parents = CHAINS["chain3"] if rule == "block" else TREES["1,2,1"]
    for max_depth in (0, 1, 2):
        for world in worlds(parents, 4):
            assert variation(make(world, rule, parents, max_depth=max_depth), rule) < EXACT


@pytest.mark.parametrize("extra", [0.1, 0.5])
def test_any_rho_is_exact_that_meets_the_condition(extra, monkeypatch):
    """So a near tie in the search of rho does no harm."""
    smallest = Walk.choose_rho
    monkeypatch.setattr(Walk, "choose_rho", lambda *args: smallest(*args) + extra)
    for world in worlds(STARS["star3"], 10):
        assert variation(make(world, "kseq", STARS["star3"]), "kseq") < EXACT


def test_typical_is_approximate():
    assert RULES["typical"] == "approximate"
    assert all(
        variation(make(world, "typical", STARS["star2"]), "typical") > FAULTY for world in worlds([], 4, zeros=0.0)
    )


# ---- the random numbers in their places ----


def chi_square_tail(counts, probabilities):
    """P(a chi-square as large), for independent draws with these probabilities."""
    expected = probabilities * counts.sum()
    assert expected.min() > 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0), statistic / 2))


# For kernels test_accept_distribution.py shows it, and they decide as the reference does: one rule is enough to be quick.
@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=() if rule == "rejection" else pytest.mark.slow) for rule in SHAPES]
)
def test_drafted_and_judged_with_philox_noise(rule):
    """draft_sample and accept_tree together, one request per seed: two tokens have the target's law. So the draws of one
    request (drafts, coins, last token) are independent of each other as the rules need it."""
    vocabulary, requests, position = 3, 500, 40
    parents = torch.tensor([-1, 0, 1] if rule == "block" else [-1, 0, 0, 1, 1, 2, 2])
    size, k = len(parents), 1 if rule == "block" else 2
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(
        2, 1 + vocabulary, vocabulary, generator=generator
    )  # target, draft: at the root, after each token
    seeds, spots = torch.arange(requests) * 7919 + 3, torch.full((requests,), position)
    mode = "with" if rule in ("kseq", "rejection_with_replacement") else "without"
    warm = torch.ones(requests)

    tokens = torch.zeros(requests, size, dtype=torch.int64)
    rows = torch.zeros(requests, size, dtype=torch.int64)  # of logits: which text a node has
    for node in range(size):
        children = [i for i in range(size) if parents[i] == node]
        if node > 0:
            rows[:, node] = 1 + tokens[:, node]
        if children:
            noise = {"seeds": seeds, "positions": spots + (node > 0), "nodes": torch.full((requests,), node)}
            tokens[:, children] = draft_sample(logits[1][rows[:, node]], k, mode=mode, **noise).tokens
    result = accept_tree(
        logits[0][rows].view(-1, vocabulary),
        tokens.flatten(),
        parents.repeat(requests),
        torch.arange(requests + 1) * size,
        max_depth=2,
        rule=rule,
        draft_logits=logits[1][rows].view(-1, vocabulary),
        temperature=warm,
        seeds=seeds,
        positions=spots,
    )
    assert not result.status.any()
    p = logits[0].double().softmax(-1)
    first, second = result.emitted[:, 0], result.emitted[:, 1]
    own = torch.multinomial(p[1 + first], 1, generator=generator).flatten()  # where the step stopped at one token
    second = torch.where(second < 0, own, second)
    counts = torch.bincount(first * vocabulary + second, minlength=vocabulary**2).double()
    assert chi_square_tail(counts, (p[0][:, None] * p[1:]).flatten()) > 1e-4
    assert 0.2 < result.num_accepted.double().mean() < 1.9  # both drafts and refusals were tried
    if rule == "coupled":  # the very tokens that the target draws for itself
        alone = draft_sample(
            logits[0][:1].expand(requests, -1), 1, mode="coupled", temperature=warm, seeds=seeds, positions=spots
        )
        assert torch.equal(first, alone.tokens[:, 0])


# ---- planted faults ----


def worst(rule, shape, chance=Replay, **options):
    parents = ALL[shape]
    return max(
        variation(make(world, rule, parents, **options), rule, chance) for world in worlds(parents, 6, zeros=0.0)
    )


class BiasedCoin(Replay):
    """u is in [0, 0.9)."""

    def coin(self, node, bound, size):
        return super().coin(node, bound / 0.9, size)


class ReusedCoin(Replay):
    """The residual draw inverts its cumulative law at the u of the last refused child, which is not below its bound."""

    bound = 0.0

    def coin(self, node, bound, size):
        self.bound = min(bound, 1.0)
        return super().coin(node, bound, size)

    def draw(self, weights, sizes, purpose, depth):
        if purpose == Purpose.residual:
            borders = torch.cat([torch.zeros(1), weights.cumsum(0) / weights.sum()]).clamp(min=self.bound)
            weights = borders.diff()
        return super().draw(weights, sizes, purpose, depth)


def not_normalised(p, q, weight=1.0):
    rest = (weight * p - q).clamp(min=0.0)
    return rest, float(rest.sum())


def removed_only(q, token):
    return q.index_fill(0, torch.tensor(token), 0.0)


@pytest.mark.parametrize("rule", ["rejection", "rejection_with_replacement", "traversal", "kseq", "block"])
def test_a_biased_coin_shows(rule):
    assert worst(rule, "chain2", BiasedCoin) > FAULTY


@pytest.mark.parametrize("rule", ["rejection", "rejection_with_replacement", "kseq"])
def test_a_coin_used_twice_shows(rule):
    assert worst(rule, "chain1", ReusedCoin) > FAULTY


@pytest.mark.parametrize("rule", ["rejection", "rejection_with_replacement", "traversal"])
def test_a_residual_that_is_not_normalised_shows(rule, monkeypatch):
    monkeypatch.setattr(accept_module, "residual", not_normalised)
    assert worst(rule, "star2") > FAULTY


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_a_draft_law_that_is_not_normalised_shows(rule, monkeypatch):
    monkeypatch.setattr(accept_module, "without", removed_only)
    assert worst(rule, "star2") > FAULTY


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_replacement_judged_as_none_shows_and_the_reverse(rule, monkeypatch):
    monkeypatch.setattr(accept_module, "without", lambda q, token: q)
    assert worst(rule, "star3") > FAULTY


@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_a_weight_that_is_not_updated_shows(rule, monkeypatch):
    reject = Judge.reject

    def keeps_weight(judge, token, replaced=False):
        weight = judge.weight
        reject(judge, token, replaced)
        judge.weight = weight

    monkeypatch.setattr(Judge, "reject", keeps_weight)
    assert worst(rule, "chain2") > FAULTY


def test_a_rho_that_is_too_small_shows(monkeypatch):
    monkeypatch.setattr(Walk, "choose_rho", lambda *_: 1.0)
    assert worst("kseq", "star3") > FAULTY


@pytest.mark.parametrize("rule", ["rejection", "rejection_with_replacement", "traversal"])
def test_a_fixed_proposal_that_the_draft_could_give_is_no_fixed_proposal(rule):
    """It must have the draft row -1, or lie outside the support: else it is judged as drawn, and was not."""
    assert worst(rule, "star2", fixed={1: 0}) > FAULTY


class Flat(World):
    """The draft's law knows only how long the text is."""

    def at(self, text):
        return super().at(text)[0], super().at((0,) * len(text))[1]


def test_branches_drawn_with_the_same_noise_show():
    """Traversal looks at the drafts of several branches, so they must be independent; going down looks at one."""

    class Copied(Drafts):
        def with_chance(self, chance):
            return Copied(self.world, self.parents, self.max_depth, chance=chance)

        def draw(self, node):
            return self.token(3) if node == 4 else super().draw(node)

    cases = [Copied(Flat(seed, 3, zeros=0.0), [-1, 0, 0, 1, 2], 2) for seed in range(6)]
    assert max(variation(case, "traversal") for case in cases) > FAULTY
    assert max(variation(case, "rejection") for case in cases) < EXACT


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
def test_noise_of_a_draft_used_again_in_the_next_step_shows(rule, reused):
    """A step that drafts two tokens and emits one; the next step drafts the second of them again. Block and traversal have
    looked at it, so it must be drawn afresh: by the text position alone it would not be."""

    def variation_of(world):
        masses = {}

        def play(chance):
            tree = Drafts(world, CHAINS["chain2"], 2).with_chance(chance)
            stop, _ = Walk(tree, chance, rule).run()
            text = (*tree.text(stop), chance.choose(chance.law))
            if stop == 0:
                again = tree.token(2) if reused else chance.choose(world.at(text)[1].probs.tolist())
                after = {(): world.at(text), (again,): world.at((*text, again))}
                following = Drafts(Texts(world.vocabulary, after), CHAINS["chain1"], 1, fixed={1: again})
                stop, _ = Walk(following.with_chance(chance), chance, rule).run()
                text = (*text, *following.fixed.values()) if stop else text
                text = (*text, chance.choose(chance.law))
            return text

        for probability, text, _ in outcomes(play):
            masses[text] = masses.get(text, 0.0) + probability
        law, truth = world.completed(masses, 3), world.joint(3)
        return 0.5 * sum(abs(law[text] - truth[text]) for text in truth)

    worst = max(variation_of(Flat(seed, 3, zeros=0.0)) for seed in range(4))
    assert worst > FAULTY if reused and rule != "rejection" else worst < EXACT


# ---- how much the rules accept ----


def accepted(rule, parents, world):
    return emitted_law(make(world, rule, parents), rule)[1]


@COUNT
@pytest.mark.parametrize("shape", ["chain2", "chain3"])
def test_block_accepts_no_less_than_rejection(shape, count):
    """In every single case, and clearly more on the average."""
    gains = [
        accepted("block", CHAINS[shape], world) - accepted("rejection", CHAINS[shape], world)
        for world in worlds(CHAINS[shape], 5 * count, zeros=0.1)
    ]
    assert min(gains) > -EXACT
    assert sum(gains) / len(gains) > 0.01


@COUNT
@pytest.mark.parametrize("shape", ["chain2", "2,1", "1,2", "2,2", "3,1"])
def test_traversal_accepts_no_less_than_rejection(shape, count):
    gains = [
        accepted("traversal", ALL[shape], world) - accepted("rejection", ALL[shape], world)
        for world in worlds(ALL[shape], 2 * count, zeros=0.1)
    ]
    assert min(gains) > -EXACT
    assert sum(gains) / len(gains) > 0.01


def test_what_two_candidates_are_worth():
    """One candidate < two with replacement < K-SEQ < two without replacement, on the average over random laws."""

    def mean(rule, parents):
        return sum(accepted(rule, parents, World(seed, 3, zeros=0.0)) for seed in range(60)) / 60

    chain, star = CHAINS["chain1"], STARS["star2"]
    order = [
        mean("rejection", chain),
        mean("rejection_with_replacement", star),
        mean("kseq", star),
        mean("rejection", star),
    ]
    assert order == sorted(order)
    assert all(b - a > 0.005 for a, b in itertools.pairwise(order))
