"""Drafting and accepting emit tokens with the target model's own distribution, on the kernels' own noise.

A world has distributions of target and draft after every text, so that a wrong row shows. Very many requests with their own
seeds draft and accept, and the target completes short texts. A chi-square test compares the counts of texts with the exact
distribution. Seeds are fixed, so a failure is a fault and not bad luck. The last part plants faults, which must fail.
"""

import itertools
import math
from functools import cache

import pytest
import torch
from support.chi_square import chi_square_tail
from support.steps import depths_of

import pass_ext
from pass_ext.reference.common.distribution import process
from pass_ext.testing import cpu_backends

BEST_CPU = cpu_backends()[-1].name
EXACT = [rule for rule, kind in pass_ext.RULES.items() if kind == "exact"]
DRAWN = {  # the drawing mode that each rule needs
    "coupled": "coupled",
    "rejection": "without",
    "rejection_with_replacement": "with",
    "block": "without",
    "traversal": "without",
    "kseq": "with",
    "coupled_inverse": "top",
}
TREES = {
    "chain": [-1, 0, 1],
    "star": [-1, 0, 0, 0],
    "tree": [-1, 0, 0, 1, 2, 1, 2],
    "deep": [-1, 0, 1, 0, 1, 2, 2, 4],
}
SUSPICIOUS, CERTAIN = 1e-4, 1e-9
CHUNK = 1024  # requests per call

# test_accept.py compares single decisions of every backend with the reference's, and test_accept_core.py enumerates the
# distribution of every rule. Samples have to show only the noise as a whole, and one backend shows that as well as all.
pytestmark = [pytest.mark.quick_on("best"), pytest.mark.usefixtures("one_thread")]
SLOW = pytest.mark.quick_on()  # except on CUDA


def how_many(backend, full, others=None, emulated=0):
    """The number of requests: full on fast backends; the emulator takes milliseconds for each."""
    if backend.name in ("cuda", BEST_CPU):
        return full
    if backend.name == "emulated":
        return emulated or pytest.skip("too few for statistics; single decisions are compared elsewhere")
    return others or full // 25


# ---- chi-square ----


def test_the_chi_square_tail_is_right():
    """The tail against the closed form for two degrees of freedom, and against its own distribution: tails are uniform."""
    counts, distribution = torch.tensor([30, 50, 20]), torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    assert chi_square_tail(counts, distribution) == pytest.approx(math.exp(-(1.0 + 0.0 + 1.0) / 2))
    generator, distribution = torch.Generator().manual_seed(0), torch.rand(60).double().softmax(0)
    tails = []
    for _ in range(400):
        sample = torch.multinomial(distribution, 3000, replacement=True, generator=generator)
        tails.append(chi_square_tail(torch.bincount(sample, minlength=60), distribution))
    tenths = torch.bincount((torch.tensor(tails) * 10).long().clamp(max=9), minlength=10)
    assert ((tenths - 40) ** 2 / 40).sum() < 30


# ---- worlds ----


def words_of(allowed):
    """bool [R, V] -> int32 [R, ceil(V / 32)]"""
    rows, vocabulary = allowed.shape
    bits = torch.nn.functional.pad(allowed.long(), (0, -vocabulary % 32)).view(rows, -1, 32)
    words = (bits << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


class World:
    """Logits of target and draft after every text of up to `depth` tokens. Row 0 is the empty text. The last row is NaN and
    stands for texts that no token ends: no decision may need it.
    """

    def __init__(
        self, seed, vocabulary, depth, *, sampling=None, draft_sampling=None, masked=(), dtype=torch.float32, near=0.6,
        spread=1.2,
    ):  # fmt: skip
        self.vocabulary, self.depth = vocabulary, depth
        self.sampling = {"temperature": 1.0} | (sampling or {})
        self.draft_sampling = self.sampling if draft_sampling is None else {"temperature": 1.0} | draft_sampling
        generator = torch.Generator().manual_seed(seed)
        rows = self.rows()
        target = torch.randn(rows, vocabulary, generator=generator) * spread
        draft = near * target + (1.0 - near) * spread * torch.randn(rows, vocabulary, generator=generator)
        poison = torch.full((1, vocabulary), math.nan)
        self.target, self.draft = (torch.cat([x, poison]).to(dtype) for x in (target, draft))
        self.allowed, self.draft_allowed = (
            words_of(torch.rand(rows + 1, vocabulary, generator=generator).argsort(-1) >= vocabulary // 3)
            if name in masked
            else None
            for name in ("target", "draft")
        )
        self.p = self.probabilities(self.target, self.allowed, self.sampling)
        self.q = self.probabilities(self.draft, self.draft_allowed, self.draft_sampling)

    def rows(self):
        return sum(self.vocabulary**d for d in range(self.depth + 1))

    def after(self, state, token):
        after = state * self.vocabulary + 1 + token
        return torch.where((token < 0) | (token >= self.vocabulary) | (after >= self.rows()), self.rows(), after)

    def probabilities(self, logits, allowed, sampling):
        as_kernels_see_it = {name: float(torch.tensor(value).float()) for name, value in sampling.items()}
        if "top_k" in sampling:
            as_kernels_see_it["top_k"] = sampling["top_k"]
        rows = []
        for i in range(self.rows()):
            row = process(logits[i], None if allowed is None else allowed[i], **as_kernels_see_it)
            assert row.status == 0 and row.margin > 1e-6, "a filter decides by a hair"
            rows.append(row.probs)
        return torch.stack([*rows, torch.full_like(rows[0], math.nan)])

    def joint(self, horizon):
        """The target's distribution of the first `horizon` tokens, [vocabulary ** horizon]."""
        distribution, states = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
        for _ in range(horizon):
            distribution = (distribution[:, None] * self.p[states]).flatten()
            states = self.after(states[:, None], torch.arange(self.vocabulary)).flatten()
        return distribution

    def to(self, device):
        names = ("target", "draft", "allowed", "draft_allowed")
        moved = {name: None if getattr(self, name) is None else getattr(self, name).to(device) for name in names}
        clone = object.__new__(type(self))
        clone.__dict__ = self.__dict__ | moved
        return clone


class TwoLast(World):
    """The next token depends on the last two, so texts can have any length."""

    def rows(self):
        return self.vocabulary**2

    def after(self, state, token):
        after = state % self.vocabulary * self.vocabulary + token
        return torch.where((token < 0) | (token >= self.vocabulary), self.rows(), after)


def row_of(words, rows):
    return None if words is None else words[rows]


def step(world, parents, rule, seeds, positions, *, start=None, mode=None, same_node=False, change=None):
    """Draws the drafts level by level and judges them. For faults: same_node draws at every node with the same noise,
    change(arguments) changes the arguments of accept.
    """
    requests, size, device = len(seeds), len(parents), seeds.device
    depths = depths_of(parents)
    mode = mode or DRAWN[rule]
    tokens = torch.full((requests, size), -1, device=device)
    states = torch.zeros(requests, size, dtype=torch.int64, device=device)
    if start is not None:
        states[:, 0] = start
    for node in range(size):
        if children := [i for i in range(size) if parents[i] == node]:
            drawn, _ = pass_ext.draft_sample(
                world.draft[states[:, node]],
                len(children),
                mode=mode,
                allowed=row_of(world.draft_allowed, states[:, node]),
                seeds=seeds,
                positions=positions + (depths[node] if mode == "coupled" else 0),
                nodes=0 if same_node else node,
                **world.draft_sampling,
            )
            tokens[:, children] = drawn
            states[:, children] = world.after(states[:, node : node + 1], drawn)
    inner = [node for node in range(size) if node in parents]
    draft_rows = torch.full_like(states, 2**30)  # leaves: never read
    draft_rows[:, inner] = states[:, inner]
    arguments = world.sampling | {f"draft_{name}": value for name, value in world.draft_sampling.items()}
    arguments |= {
        "rule": rule,
        "seeds": seeds,
        "positions": positions,
        "target_logits": world.target[states.flatten()],
        "tokens": tokens.flatten(),
        "parents": torch.tensor(parents, dtype=torch.int32, device=device).repeat(requests),
        "cu_nodes": torch.arange(requests + 1, dtype=torch.int32, device=device) * size,
        "max_depth": max(depths),
        "draft_logits": world.draft,
        "draft_rows": draft_rows.flatten(),
        "allowed": row_of(world.allowed, states.flatten()),
        "draft_allowed": world.draft_allowed,
    }
    return pass_ext.accept_tree(**(change(arguments) if change else arguments))


def complete(world, emitted, seeds, positions):
    """The index of each text; the target draws missing tokens by itself."""
    number, state = torch.zeros_like(seeds), torch.zeros_like(seeds)
    for level in range(emitted.shape[1]):
        token, short = emitted[:, level], (emitted[:, level] < 0).nonzero().flatten()
        if len(short):
            drawn, _ = pass_ext.draft_sample(
                world.target[state[short]],
                1,
                mode="coupled",
                allowed=row_of(world.allowed, state[short]),
                seeds=seeds[short],
                positions=positions[short] + level,
                **world.sampling,
            )
            token = token.index_copy(0, short, drawn[:, 0])
        number, state = number * world.vocabulary + token, world.after(state, token)
    return number


def requests_of(backend_device, requests, seed):
    """Chunks of (seeds, positions): any 64-bit seed, any position."""
    generator = torch.Generator().manual_seed(seed)
    for first in range(0, requests, CHUNK):
        size = min(CHUNK, requests - first)
        seeds = torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator)
        positions = torch.randint(0, 2**40, (size,), generator=generator)
        yield seeds.to(backend_device), positions.to(backend_device)


def emitted_counts(backend, world, parents, rule, requests, seed=1, **options):
    """Counts of the emitted texts of depth + 1 tokens."""
    horizon, on_device = max(depths_of(parents)) + 1, world.to(backend.device)
    counts, accepted = torch.zeros(world.vocabulary**horizon, dtype=torch.int64), 0
    for seeds, positions in requests_of(backend.device, requests, seed):
        result = step(on_device, parents, rule, seeds, positions, **options)
        assert not result.status.any(), "a row that no decision needs was read"
        accepted += int(result.num_accepted.sum())
        texts = complete(on_device, result.emitted, seeds, positions)
        counts += torch.bincount(texts, minlength=len(counts)).cpu()
    assert counts.sum() == requests
    assert accepted > requests / 20, "drafts were accepted"
    return counts


def shape_for(rule, name):
    return TREES["chain"] if rule == "block" else TREES[name]


# ---- the distribution of emitted tokens ----


@pytest.mark.parametrize("rule", EXACT)
def test_deeper_trees(backend, rule):
    """Trees whose nodes are in no order except parents first."""
    parents, requests = shape_for(rule, "deep"), how_many(backend, 50_000, 2_000)
    world = World(10, 4, max(depths_of(parents)))
    counts = emitted_counts(backend, world, parents, rule, requests)
    assert chi_square_tail(counts, world.joint(world.depth + 1)) > SUSPICIOUS


FILTERS = {"temperature": 0.8, "top_k": 5, "top_p": 0.95, "min_p": 0.02}
VARIANTS = {
    "cold": {"sampling": {"temperature": 0.6}},
    "hot": {"sampling": {"temperature": 1.7}},
    "top_k": {"sampling": {"top_k": 3}},
    "top_p": {"sampling": {"top_p": 0.8}},
    "min_p": {"sampling": {"min_p": 0.12}},
    "all filters": {"sampling": FILTERS},
    "draft filtered otherwise": {"sampling": FILTERS, "draft_sampling": {"temperature": 1.2, "top_k": 6}},
    "both masked": {"masked": ("target", "draft")},
    "target masked": {"masked": ("target",)},
    "bfloat16": {"dtype": torch.bfloat16, "spread": 2.0},
    "float16": {"dtype": torch.float16},
    "draft is the target": {"near": 1.0},
    "draft knows nothing": {"near": 0.0},
    "everything": {"sampling": FILTERS, "masked": ("target", "draft"), "dtype": torch.bfloat16},
}


def rules_and_variants():
    """The code that makes a row a distribution is the same for all rules. So two rules that read both distributions are quick
    for each variant, and all rules for everything at once.
    """
    both_laws = [rule for rule in EXACT if rule != "coupled"]
    for i, variant in enumerate(VARIANTS):
        quick = {both_laws[i % 5], both_laws[(i + 2) % 5]} if variant != "everything" else EXACT
        for rule in EXACT:
            yield pytest.param(rule, variant, marks=() if rule in quick else SLOW)


@pytest.mark.parametrize(("rule", "variant"), list(rules_and_variants()))
def test_variants_of_the_distribution(backend, rule, variant):
    requests = how_many(backend, 10_000, 500, 10 if variant == "everything" else 0)
    parents = shape_for(rule, "tree")
    world = World(13, 7, 2, **VARIANTS[variant])
    counts = emitted_counts(backend, world, parents, rule, requests)
    assert chi_square_tail(counts, world.joint(3)) > SUSPICIOUS


@pytest.mark.parametrize("mode", ["coupled", "without", "with", "top"])
def test_coupled_with_any_drafter(backend, mode):
    world = World(16, 4, 2)
    requests = how_many(backend, 30_000, 1_000)
    counts = emitted_counts(backend, world, TREES["tree"], "coupled", requests, mode=mode)
    assert chi_square_tail(counts, world.joint(3)) > SUSPICIOUS


@pytest.mark.parametrize("vocabulary", [pytest.param(66, marks=SLOW), 130])
@pytest.mark.parametrize("rule", EXACT)
def test_several_groups_of_tokens(backend, rule, vocabulary):
    """Noise is made for 64 tokens at a time."""
    world = World(17, vocabulary, 1, spread=1.5)
    parents = TREES["chain"][:2] if rule == "block" else TREES["star"]
    counts = emitted_counts(backend, world, parents, rule, how_many(backend, 30_000, 1_000))
    counts = counts.view(vocabulary, vocabulary)
    assert chi_square_tail(counts, world.joint(2)) > SUSPICIOUS
    assert chi_square_tail(counts.sum(1), world.p[0]) > SUSPICIOUS
    assert chi_square_tail(counts.sum(0), world.joint(2).view(vocabulary, vocabulary).sum(0)) > SUSPICIOUS


def generate(backend, world, parents, rule, requests, length, **faults):
    """Step after step to `length` tokens; counts how often each text came."""
    on_device, counts = world.to(backend.device), torch.zeros(world.vocabulary**length, dtype=torch.int64)
    stands = faults.pop("stands", False)
    for seeds, positions in requests_of(backend.device, requests, 2):
        number, state, known = torch.zeros_like(seeds), torch.zeros_like(seeds), torch.zeros_like(seeds)
        for _ in range(length):
            now = positions if stands else positions + known
            emitted = step(on_device, parents, rule, seeds, now, start=state, **faults).emitted
            for token in emitted.unbind(1):
                number = torch.where((token >= 0) & (known < length), number * world.vocabulary + token, number)
                state = torch.where(token >= 0, on_device.after(state, token.clamp(min=0)), state)
                known = known + (token >= 0)
        counts += torch.bincount(number, minlength=len(counts)).cpu()
    return counts


@pytest.mark.parametrize("rule", EXACT)
def test_step_after_step(backend, rule):
    """Draws of different steps are independent too."""
    world = TwoLast(18, 3, 0)
    counts = generate(backend, world, shape_for(rule, "tree"), rule, how_many(backend, 10_000, 1_000), length=5)
    assert chi_square_tail(counts, world.joint(5)) > SUSPICIOUS


def test_kseq_with_its_largest_rho(backend):
    """p has 1/16 of the overlap that a smaller rho would need. Then the drafts' tokens take no part in what is left of p."""
    requests, count = how_many(backend, 20_000, others=20_000), 16
    p, q = torch.tensor([0.0022] * 2 + [0.9956 / 6] * 6), torch.tensor([0.5] * 2 + [0.0] * 6)
    noise = dict(seeds=torch.arange(requests), positions=torch.full((requests,), 5))
    first = torch.zeros(requests, dtype=torch.int32)
    drawn, _ = pass_ext.draft_sample(
        *(q.log().repeat(requests, 1).to(backend.device), count),
        mode="with",
        nodes=first.to(backend.device),
        **{name: value.to(backend.device) for name, value in noise.items()},
    )
    tokens, rows = torch.full((requests, 1 + count), -1), torch.full((requests, 1 + count), -1, dtype=torch.int32)
    tokens[:, 1:], rows[:, 0] = drawn.cpu(), 0
    parents = torch.tensor([-1] + [0] * count, dtype=torch.int32).repeat(requests)
    bounds = torch.arange(0, requests * (1 + count) + 1, 1 + count, dtype=torch.int32)
    step = (p.log().repeat(requests * (1 + count), 1), tokens.flatten(), parents, bounds)
    options = noise | dict(draft_logits=q.log()[None], draft_rows=rows.flatten(), temperature=torch.ones(requests))
    result = pass_ext.accept_tree(
        *(tensor.to(backend.device) for tensor in step), 1, rule="kseq",
        **{name: value.to(backend.device) for name, value in options.items()},
    )  # fmt: skip
    rejected = result.num_accepted == 0
    assert 40 < int((~rejected).sum()) < 160, "0.0044 of the requests accept one"
    assert int((result.emitted[rejected, 0] < 2).sum()) <= 4, "0.00001 of the others"


# ---- the draft's own distribution ----


def ordered_distribution(probs, count, replaced):
    """The distribution of `count` draws in order, [V, V, ...]. Without replacement: only draws within the support."""
    distribution = torch.zeros((len(probs),) * count, dtype=torch.float64)
    for ids in itertools.product(range(len(probs)), repeat=count):
        left, mass = 1.0, 1.0
        for place, token in enumerate(ids):
            if (not replaced and token in ids[:place]) or mass == 0.0:
                mass = 0.0
                break
            mass *= float(probs[token]) / left
            left -= 0.0 if replaced else float(probs[token])
        distribution[ids] = mass
    return distribution


DRAFT_VARIANTS = {
    "plain": {},
    "a million": {},
    "temperature": {"sampling": {"temperature": 0.7}},
    "top_k": {"sampling": {"temperature": 1.3, "top_k": 4}},
    "top_p": {"sampling": {"top_p": 0.9}, "seed": 51},
    "min_p": {"sampling": {"min_p": 0.05}},
    "masked": {"masked": ("draft",)},
    "bfloat16": {"dtype": torch.bfloat16, "spread": 2.0},
}


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=SLOW if "million" in name else ()) for name in DRAFT_VARIANTS]
)
@pytest.mark.parametrize("mode", ["coupled", "without", "with"])
def test_three_drafts_in_order(backend, mode, variant):
    options = dict(DRAFT_VARIANTS[variant])
    world = World(options.pop("seed", 50), 6, 0, near=0.0, **options)
    assert (world.q[0] > 0).sum() >= 3
    requests = how_many(
        backend, 1_000_000 if variant == "a million" else 40_000, 3_000, 100 if variant == "plain" else 0
    )
    counts = torch.zeros(6**3, dtype=torch.int64)
    on_device = world.to(backend.device)
    for seeds, positions in requests_of(backend.device, requests, 4):
        tokens, logprobs = pass_ext.draft_sample(
            on_device.draft[:1].expand(len(seeds), -1),
            3,
            mode=mode,
            allowed=None if world.draft_allowed is None else on_device.draft_allowed[:1].repeat(len(seeds), 1),
            seeds=seeds,
            positions=positions,
            nodes=5,
            **world.draft_sampling,
        )
        assert torch.allclose(logprobs.double().exp().cpu(), world.q[0][tokens.cpu()], rtol=1e-5, atol=0)
        counts += torch.bincount(tokens.cpu() @ torch.tensor([36, 6, 1]), minlength=len(counts))
    assert chi_square_tail(counts, ordered_distribution(world.q[0], 3, mode == "with")) > SUSPICIOUS


@pytest.mark.parametrize("mode", ["without", "with"])
def test_drafts_of_two_nodes_are_independent(backend, mode):
    world = World(52, 4, 0).to(backend.device)
    counts = torch.zeros(4**4, dtype=torch.int64)
    for seeds, positions in requests_of(backend.device, how_many(backend, 100_000, 4_000), 5):
        chunks = [
            pass_ext.draft_sample(
                world.draft[:1].expand(len(seeds), -1), 2, mode=mode, seeds=seeds, positions=positions, nodes=node
            )[0]
            for node in (0, 1)
        ]
        cells = torch.cat(chunks, 1).cpu() @ torch.tensor([64, 16, 4, 1])
        counts += torch.bincount(cells, minlength=len(counts))
    distribution = ordered_distribution(world.q[0], 2, mode == "with").flatten()
    assert chi_square_tail(counts, distribution[:, None] * distribution) > SUSPICIOUS


@pytest.mark.parametrize(
    "sampling", [{}, {"top_k": 300, "temperature": 0.8}, {"top_p": 0.9}], ids=["all", "top_k", "top_p"]
)
@pytest.mark.parametrize(("vocabulary", "full"), [(1000, 12_000), (70_000, 600)])
def test_large_vocabularies(backend, vocabulary, full, sampling):
    """The first and the second draw: by token if it is likely, by place in its group, by group."""
    requests = how_many(backend, full, full // 20)
    generator = torch.Generator().manual_seed(vocabulary)
    row = torch.randn(vocabulary, generator=generator) * 2.0
    sampling = {"temperature": 1.0} | sampling
    p = process(row, **{name: float(torch.tensor(value).float()) for name, value in sampling.items()} | sampling).probs
    second = p * ((p / (1.0 - p)).sum() - p / (1.0 - p))
    for mode in ("coupled", "without", "with"):
        tokens = torch.cat(
            [
                pass_ext.draft_sample(
                    row.to(backend.device).expand(len(seeds), -1),
                    2,
                    mode=mode,
                    seeds=seeds,
                    positions=positions,
                    **sampling,
                )[0].cpu()
                for seeds, positions in requests_of(backend.device, requests, 6)
            ]
        )
        for draw, exact in ((tokens[:, 0], p), (tokens[:, 1], p if mode == "with" else second)):
            counts = torch.bincount(draw, minlength=vocabulary)
            assert chi_square_tail(counts, exact) > SUSPICIOUS
            for bins in (torch.arange(vocabulary) % 64, torch.arange(vocabulary) * 50 // vocabulary):
                put = [
                    torch.zeros(int(bins.max()) + 1).double().index_add(0, bins, x.double()) for x in (counts, exact)
                ]
                assert chi_square_tail(*put) > SUSPICIOUS


# ---- draws for different purposes are independent ----


def streams(device, seeds, positions):
    """{name of a draw: (a value for each request, its distribution)}, all with the same seeds and positions."""
    row = torch.tensor([0.3, -0.5, 1.0, 0.0, -math.inf], device=device)
    half = torch.tensor([math.log(4.0), 0.0, 0.0, 0.0, 0.0], device=device)
    sure = torch.tensor([0.0, -math.inf, -math.inf, -math.inf, -math.inf], device=device)
    distribution, requests = row.double().softmax(0).cpu(), len(seeds)

    def drafted(mode, k=1, seeds=seeds, positions=positions, **options):
        options |= {"seeds": seeds, "positions": positions, "temperature": 1.0}
        return pass_ext.draft_sample(row.expand(requests, -1), k, mode=mode, **options)[0]

    def accepted(rule, rows, proposals):
        parents = torch.tensor([-1, *([0] * (len(rows) - 1))], dtype=torch.int32, device=device)
        return pass_ext.accept_tree(
            torch.stack(rows).repeat(requests, 1),
            torch.tensor([-1, *proposals], device=device).repeat(requests),
            parents.repeat(requests),
            torch.arange(requests + 1, dtype=torch.int32, device=device) * len(rows),
            1,
            rule=rule,
            temperature=1.0,
            seeds=seeds,
            positions=positions,
        )

    coin_distribution = torch.tensor([0.5, 0.5], dtype=torch.float64)
    pair = drafted("with", 2)
    return {
        "coupled": (drafted("coupled")[:, 0], distribution),
        "coupled, next position": (drafted("coupled", positions=positions + 1)[:, 0], distribution),
        "coupled, position + 2^32": (drafted("coupled", positions=positions + 2**32)[:, 0], distribution),
        "coupled, next seed": (drafted("coupled", seeds=seeds + 1)[:, 0], distribution),
        "coupled, seed + 2^32": (drafted("coupled", seeds=seeds + 2**32)[:, 0], distribution),
        "draft": (pair[:, 0], distribution),
        "draft, second": (pair[:, 1], distribution),
        "draft at node 1": (drafted("without", nodes=1)[:, 0], distribution),
        "draft at node 1023": (drafted("without", nodes=1023)[:, 0], distribution),
        "draft, next position": (drafted("without", positions=positions + 1)[:, 0], distribution),
        "bonus": (accepted("rejection", [row], []).emitted[:, 0], distribution),
        "residual": (accepted("rejection", [row, row], [4]).emitted[:, 0], distribution),
        "bonus, next position": (accepted("rejection", [sure, row], [0]).emitted[:, 1], distribution),
        "coin of node 1": (accepted("rejection", [half, row], [0]).num_accepted.long(), coin_distribution),
        "coin of node 2": (accepted("rejection", [half, row, row], [5, 0]).num_accepted.long(), coin_distribution),
    }


def test_draws_for_different_purposes_are_independent(backend):
    requests = how_many(backend, 40_000, 4_000, 30)
    parts = [streams(backend.device, *chunk) for chunk in requests_of(backend.device, requests, 7)]
    values = {name: torch.cat([part[name][0].cpu() for part in parts]) for name in parts[0]}
    distributions = {name: distribution for name, (_, distribution) in parts[0].items()}
    tails = {}
    for first, second in itertools.combinations(values, 2):
        size = len(distributions[second])
        counts = torch.bincount(values[first] * size + values[second], minlength=len(distributions[first]) * size)
        tails[first, second] = chi_square_tail(counts, distributions[first][:, None] * distributions[second])
    assert min(tails.values()) > SUSPICIOUS / len(tails), min(tails, key=tails.get)


# ---- planted faults ----


def on_best_cpu(world, rule, **options):
    counts = emitted_counts(cpu_backends()[-1], world, TREES["tree"], rule, 20_000, **options)
    return chi_square_tail(counts, world.joint(3))


@cache
def used_rightly(rule, masked):
    return on_best_cpu(World(61, 4, 2, near=0.2, masked=masked), rule)


def judged_as(rule):
    return lambda arguments: arguments | {"rule": rule}


def rolled(name):
    def tell(arguments):
        values = arguments[name].view(-1, len(TREES["tree"]), *arguments[name].shape[1:])
        return arguments | {name: values[:, [0, 2, 1, 3, 4, 5, 6]].flatten(0, 1)}

    return tell


MISTAKES = {
    "proposals judged as drawn": ("rejection", {"mode": "top"}),
    "proposals judged as drawn, kseq": ("kseq", {"mode": "top"}),
    "drawn without, judged as drawn with": ("rejection", {"change": judged_as("rejection_with_replacement")}),
    "drawn without, judged by kseq": ("rejection", {"change": judged_as("kseq")}),
    "an approximate rule": ("rejection", {"change": judged_as("typical")}),
    "the same noise at every node": ("rejection", {"same_node": True}),
    "the same noise at every node, traversal": ("traversal", {"same_node": True}),
    "another draft temperature": ("rejection", {"change": lambda a: a | {"draft_temperature": 1.3}}),
    "another draft temperature, kseq": ("kseq", {"change": lambda a: a | {"draft_temperature": 1.3}}),
    "another target temperature": ("coupled", {"change": lambda a: a | {"temperature": 1.2}}),
    "a mask that accept does not get": ("traversal", {"change": lambda a: a | {"draft_allowed": None}}),
    "draft rows of the other child": ("rejection", {"change": rolled("draft_rows")}),
    "target rows of the other child": ("coupled", {"change": rolled("target_logits")}),
    "target rows of the other child, traversal": ("traversal", {"change": rolled("target_logits")}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_using_the_kernels_shows(mistake):
    rule, options = MISTAKES[mistake]
    masked = ("draft",) if "mask" in mistake else ()
    assert used_rightly(rule, masked) > SUSPICIOUS
    assert on_best_cpu(World(61, 4, 2, near=0.2, masked=masked), rule, **options) < CERTAIN


@pytest.mark.parametrize("rule", [rule for rule in EXACT if rule != "coupled"])
def test_positions_that_stand_still_show(rule):
    """In the world of test_step_after_step, with as many texts."""
    world, backend = TwoLast(18, 3, 0), cpu_backends()[-1]
    texts = generate(backend, world, shape_for(rule, "tree"), rule, 10_000, 5, stands=True)
    assert chi_square_tail(texts, world.joint(5)) < CERTAIN
