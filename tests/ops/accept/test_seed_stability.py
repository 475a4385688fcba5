"""A seed fixes the text: under rule "coupled" any tree, any drafter and any batch emit the tokens that plain decoding emits one
by one with ``draft_sample(mode="coupled", k=1)``. And no rule's result depends on the batch around a request.

The model is a table: the state after a text is a hash of the former state and the token, and picks a row of logits. Rows that
no decision needs hold NaN, so a wrong row shows too. All requests generate at once.
"""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

import pass_ext
from pass_ext.testing import assert_same_bits, cpu_backends

BEST_CPU = cpu_backends()[-1].name
DRAWN = {"coupled": "coupled", "rejection_with_replacement": "with", "kseq": "with"}  # the others: without

pytestmark = pytest.mark.usefixtures("one_thread")


def how_many(backend, full, others, emulated):
    if backend.name in ("cuda", BEST_CPU):
        return full
    return emulated if backend.name == "emulated" else others


@dataclass
class Model:
    """Logits of a target, and of a drafter that resembles it, by state."""

    seed: int
    vocabulary: int
    dtype: torch.dtype
    device: torch.device
    states: int = 499
    target: torch.Tensor = field(init=False)
    draft: torch.Tensor = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.states, self.vocabulary)
        target = torch.randn(shape, generator=generator) * 2.0
        target = (target * 4.0).round() / 4.0 if self.seed % 2 else target  # equal logits: ties
        target[torch.rand(shape, generator=generator) < 0.1] = -math.inf
        target[:, 0] = target[:, 0].clamp(min=-1.0)
        draft = target.clamp(min=-9.0) + torch.randn(shape, generator=generator)
        self.target, self.draft = (x.to(self.dtype).to(self.device) for x in (target, draft))

    def after(self, state, token):
        return (state * 7919 + token.clamp(0, self.vocabulary - 1) * 104_729 + 17) % self.states


def parameters(requests, generator, device, none=()):
    """Different numbers for every request: a third greedy, filters on and off. Those named in `none` are None."""

    def some(values):
        return torch.tensor(values)[torch.randint(len(values), (requests,), generator=generator)].to(device)

    arguments = {
        "temperature": some([0.0, 0.3, 0.7, 1.0, 1.4, 3.0]),
        "top_k": some([0, 0, 1, 2, 5, 20, 1000]),
        "top_p": some([1.0, 1.0, 0.9, 0.5, 0.05]),
        "min_p": some([0.0, 0.0, 0.02, 0.2]),
    }
    return {name: None if name in none else value for name, value in arguments.items()}


def of(sampling, rows):
    return {name: None if value is None else value[rows] for name, value in sampling.items()}


@dataclass
class Case:
    """Requests, and the tokens that plain decoding gives them."""

    model: Model
    sampling: dict
    seeds: torch.Tensor
    positions: torch.Tensor
    start: torch.Tensor
    allowed: torch.Tensor | None
    plain: torch.Tensor
    states: torch.Tensor  # [requests, length + 1], the state before each token


def make_case(backend, seed, requests, length, *, vocabulary=37, dtype=torch.float32, none=(), masked=False):
    generator, device = torch.Generator().manual_seed(seed), backend.device
    model = Model(seed, vocabulary, dtype, device)
    sampling = parameters(requests, generator, device, none)
    seeds = torch.randint(-(2**63), 2**63 - 1, (requests,), generator=generator).to(device)
    positions = torch.randint(0, 2**34, (requests,), generator=generator).to(device)
    start = torch.randint(model.states, (requests,), generator=generator).to(device)
    allowed = None
    if masked:  # by state; token 0 is always allowed
        allowed = torch.randint(-(2**31), 2**31, (model.states, -(-vocabulary // 32)), generator=generator).int() | 1
        allowed = allowed.to(device)
    states, tokens = [start], []
    for i in range(length):
        token, _ = pass_ext.draft_sample(
            model.target[states[-1]],
            1,
            mode="coupled",
            seeds=seeds,
            positions=positions + i,
            allowed=None if allowed is None else allowed[states[-1]],
            **sampling,
        )
        tokens.append(token[:, 0])
        states.append(model.after(states[-1], tokens[-1]))
    plain = torch.stack(tokens, 1)
    assert (plain >= 0).all() and (plain < vocabulary).all()
    return Case(model, sampling, seeds, positions, start, allowed, plain, torch.stack(states, 1))


# ---- drafts ----


def random_trees(requests, most, generator):
    """Parents [requests, most] and sizes: chains, stars and anything between; some are a lone root."""
    parents = torch.full((requests, most), -1)
    kind = torch.rand(requests, generator=generator)
    for i in range(1, most):
        anywhere = (torch.rand(requests, generator=generator) * i).long()
        recent = i - 1 - (torch.rand(requests, generator=generator) * min(i, 2)).long()
        parents[:, i] = torch.where(kind < 0.2, i - 1, torch.where(kind < 0.6, recent, anywhere))
        parents[kind > 0.95, i] = 0
    return parents, torch.randint(1, most + 1, (requests,), generator=generator)


def depths_of(parents):
    depths = torch.zeros_like(parents)
    for i in range(1, parents.shape[1]):
        depths[:, i] = depths.gather(1, parents[:, i : i + 1])[:, 0] + 1
    return depths


def draft(case, who, parents, known, generator, drafter):
    """Tokens and states [requests, most]: plain decoding's next tokens, or tokens of the drafter's model, or anything: other
    tokens, equal siblings, -1 and other ids outside the vocabulary.
    """
    model, depths = case.model, depths_of(parents)
    requests, most = parents.shape
    tokens, states = torch.full((requests, most), -1), torch.zeros(requests, most, dtype=torch.int64)
    states[:, 0] = case.states[who, known].cpu()
    if drafter == "model":
        table = model.draft.float().topk(4).indices.cpu()
    for i in range(1, most):
        above = states.gather(1, parents[:, i : i + 1])[:, 0]
        depth = depths[:, i]
        text = (
            case.plain[who].cpu().gather(1, (known.cpu() + depth - 1).clamp(max=case.plain.shape[1] - 1)[:, None])[:, 0]
        )
        any_token = torch.randint(-1, model.vocabulary + 1, (requests,), generator=generator)
        chance = torch.rand(requests, generator=generator)
        if drafter == "model":
            text = table[above, torch.randint(4, (requests,), generator=generator)]
        token = torch.where(chance < 0.75, text, any_token)
        token[chance > 0.98] = 2**40
        tokens[:, i] = token
        states[:, i] = model.after(above, token)
    return tokens, states


def on_plain_path(case, who, tokens, parents, known):
    """True for nodes whose text is plain decoding's: only their rows may be read."""
    depths, plain = depths_of(parents), case.plain[who].cpu()
    good = torch.ones_like(parents, dtype=torch.bool)
    for i in range(1, parents.shape[1]):
        place = (known.cpu() + depths[:, i] - 1).clamp(max=plain.shape[1] - 1)
        same = plain.gather(1, place[:, None])[:, 0] == tokens[:, i]
        beyond = known.cpu() + depths[:, i] > plain.shape[1]  # beyond the plain text
        good[:, i] = good.gather(1, parents[:, i : i + 1])[:, 0] & (same | beyond)
    return good


def strided(rows, generator):
    """The same rows in a wider tensor, NaN around them."""
    left, right = torch.randint(0, 9, (2,), generator=generator).tolist()
    wide = rows.new_full((*rows.shape[:-1], left + rows.shape[-1] + right), math.nan)
    wide[..., left : left + rows.shape[-1]] = rows
    return wide[..., left : left + rows.shape[-1]]


def check_step(case, who, known, result):
    """Emitted tokens are the next tokens of plain decoding; returns how many there are."""
    emitted, count = result.emitted, result.num_accepted.long() + 1
    assert not result.status.any()
    width = emitted.shape[1]
    place = known[:, None] + torch.arange(width, device=emitted.device)
    valid = torch.arange(width, device=emitted.device) < count[:, None]
    inside = place < case.plain.shape[1]
    expected = case.plain[who].gather(1, place.clamp(max=case.plain.shape[1] - 1))
    wrong = ((emitted != expected) & valid & inside).any(1)
    if wrong.any():
        i = int(wrong.nonzero()[0, 0])
        request = int(who[i])
        sampling = {name: None if value is None else value[request].item() for name, value in case.sampling.items()}
        raise AssertionError(
            f"{int(wrong.sum())} of {len(wrong)} requests; request {request}, {int(known[i])} tokens known: emitted "
            f"{emitted[i].tolist()}, plain decoding {expected[i].tolist()}, {sampling}, seed {int(case.seeds[request])}, "
            f"position {int(case.positions[request] + known[i])}"
        )
    assert (emitted[~valid] == -1).all() and (result.path[~valid] == -1).all()
    return count


def generate_with_trees(case, seed, most, drafter="text", poison=True):
    """Generates for all requests, each step a random batch in random order with padded requests between. Returns the number of
    steps and of accepted drafts.
    """
    generator, device = torch.Generator().manual_seed(seed), case.plain.device
    requests, length = case.plain.shape
    known, accepted, steps = torch.zeros(requests, dtype=torch.int64, device=device), 0, 0
    while (known < length).any():
        unfinished = (known < length).nonzero().flatten().cpu()
        chosen = unfinished[torch.randperm(len(unfinished), generator=generator)]
        chosen = chosen[: max(1, int(len(chosen) * (0.5 + torch.rand((), generator=generator).item())))]
        steps += len(chosen)
        who = chosen.to(device)
        parents, sizes = random_trees(len(chosen), most, generator)
        max_depth = int(torch.randint(most, (), generator=generator)) if steps % 3 == 0 else most - 1
        tokens, states = draft(case, who, parents, known[who], generator, drafter)
        needed = on_plain_path(case, who, tokens, parents, known[who])

        inside = torch.arange(most) < sizes[:, None]
        rows = case.model.target[states[inside].to(device)]
        if poison:
            rows[~needed[inside].to(device)] = math.nan
        # Padded requests: some have no nodes.
        padded = torch.rand(len(chosen), generator=generator) < 0.2
        owned = torch.stack([torch.zeros_like(sizes), sizes], 1).flatten()
        owned = owned[torch.stack([padded, torch.ones_like(padded)], 1).flatten()]
        is_padded = owned == 0
        cu_nodes = torch.cat([torch.zeros(1, dtype=torch.int64), owned.cumsum(0)])
        where = (~is_padded).nonzero().flatten().to(device)
        batch = len(owned)

        def spread(values, where=where, batch=batch):
            whole = values.new_zeros(batch)
            whole[where] = values
            return whole

        allowed = None if case.allowed is None else case.allowed[states[inside].to(device)]
        law = {name: None if value is None else spread(value[who]) for name, value in case.sampling.items()}
        law |= dict(seeds=spread(case.seeds[who]), positions=spread(case.positions[who] + known[who]), allowed=allowed)
        tree = (tokens[inside].to(device), parents[inside].int().to(device), cu_nodes.int().to(device), max_depth)
        result = pass_ext.accept_tree(strided(rows, generator), *tree, rule="coupled", **law)
        empty = is_padded.to(device)
        assert (result.emitted[empty] == -1).all() and (result.path[empty] == -1).all()
        assert (result.num_accepted[empty] == 0).all() and (result.status[empty] == 0).all()
        mine = SimpleNamespace(**{name: getattr(result, name)[where] for name in result._fields})
        count = check_step(case, who, known[who], mine)
        accepted += int(count.sum()) - len(count)
        known[who] += count
    return steps, accepted


# ---- the text does not depend on how it is drafted ----

SHAPES = {
    "small": {"vocabulary": 37},
    "odd, bfloat16": {"vocabulary": 131, "dtype": torch.bfloat16},
    "float16, masked": {"vocabulary": 97, "dtype": torch.float16, "masked": True},
    "no filters": {"vocabulary": 64, "none": ("top_k", "top_p", "min_p")},
    "bfloat16, masked": {"vocabulary": 200, "dtype": torch.bfloat16, "masked": True, "none": ("top_p",)},
    "greedy": {"vocabulary": 33, "none": ("temperature",)},
}


def shapes(*on_emulator):
    """All shapes on the CPU; on the emulator those that take another branch of the kernels."""
    beside = pytest.mark.quick_on("cpu")
    return [pytest.param(shape, marks=() if shape in on_emulator else beside) for shape in SHAPES]


@pytest.mark.parametrize("shape", shapes("odd, bfloat16", "float16, masked", "no filters", "greedy"))
def test_any_tree_emits_what_plain_decoding_emits(backend, shape):
    requests = how_many(backend, 1000, 100, 10)
    length = 6 if backend.name == "emulated" else 10
    case = make_case(backend, len(shape), requests, length, **SHAPES[shape])
    for drafter in ("text", "model"):
        steps, accepted = generate_with_trees(case, 1, most=9, drafter=drafter)
        assert steps >= requests and accepted >= requests // 4  # so drafts did matter


@pytest.mark.parametrize(
    ("most", "vocabulary", "requests"),
    [(64, 70, (150, 40, 4)), (7, 1_025, (60, 20, 4)), pytest.param(7, 20_011, (60, 20, 4), marks=pytest.mark.quick_on("cpu"))],
)  # fmt: skip
def test_large_trees_and_vocabularies_emit_what_plain_decoding_emits(backend, most, vocabulary, requests):
    case = make_case(backend, 5, how_many(backend, *requests), 6, vocabulary=vocabulary, dtype=torch.bfloat16)
    _, accepted = generate_with_trees(case, 3, most=most)
    assert accepted > 0


def test_another_seed_or_position_is_another_text(backend):
    """The equality above means something."""
    case = make_case(backend, 10, how_many(backend, 500, 500, 40), 3, none=("top_k", "top_p", "min_p"))
    hot = torch.full_like(case.sampling["temperature"], 3.0)
    texts = []
    for shift in (0, 1):
        for seeds, positions in ((case.seeds + shift, case.positions), (case.seeds, case.positions + shift)):
            token, _ = pass_ext.draft_sample(
                case.model.target[case.start], 1, mode="coupled", seeds=seeds, positions=positions, temperature=hot
            )
            texts.append(token)
    assert_same_bits(texts[0], texts[1])
    for other in texts[2:]:
        assert (other != texts[0]).double().mean() > 0.5


# ---- no result depends on the batch ----


@dataclass
class Batch:
    """Trees of drafts with their sampling parameters; the nodes of request b are rows starts[b] : starts[b] + sizes[b]."""

    arrays: dict  # per node
    sampling: dict  # per request
    sizes: torch.Tensor
    max_depth: int
    rule: str

    def run(self, order, generator=None, padding=False):
        """The results of the requests in `order`, in a batch of just these; `padding` puts padded requests between them."""
        starts = self.sizes.cumsum(0) - self.sizes
        nodes = torch.cat([torch.arange(starts[b], starts[b] + self.sizes[b]) for b in order])
        counts, slots = [], []
        for b in order:
            if padding and torch.rand((), generator=generator) < 0.4:
                counts.append(0)
            slots.append(len(counts))
            counts.append(int(self.sizes[b]))
        device = self.arrays["tokens"].device
        where = torch.tensor(slots, device=device)
        arrays = {name: None if value is None else value[nodes.to(device)] for name, value in self.arrays.items()}
        if padding:
            arrays["target_logits"] = strided(arrays["target_logits"], generator)
            arrays["draft_logits"] = strided(arrays["draft_logits"], generator)
        sampling = {}
        for name, value in self.sampling.items():
            sampling[name] = value.new_zeros(len(counts))
            sampling[name][where] = value[torch.tensor(order, device=device)]
        cu_nodes = torch.tensor([0, *counts]).cumsum(0).int().to(device)
        result = pass_ext.accept_tree(**arrays, cu_nodes=cu_nodes, max_depth=self.max_depth, rule=self.rule, **sampling)
        return [value[where] for value in result]


def make_batch(backend, rule, requests, seed, most=8, vocabulary=75, dtype=torch.bfloat16, chains=False):
    generator, device = torch.Generator().manual_seed(seed), backend.device
    model = Model(seed, vocabulary, dtype, device)
    parents, sizes = random_trees(requests, most, generator)
    if chains or rule == "block":
        parents = torch.arange(-1, most - 1).repeat(requests, 1)
        sizes = torch.full_like(sizes, most) if chains else sizes
    sampling = parameters(requests, generator, device)
    sampling["temperature"] = sampling["temperature"].clamp(min=0.3) * (
        torch.rand(requests, generator=generator) > 0.1
    ).to(device)
    sampling["seeds"] = torch.randint(-(2**63), 2**63 - 1, (requests,), generator=generator).to(device)
    sampling["positions"] = torch.randint(0, 2**34, (requests,), generator=generator).to(device)
    tokens = torch.full((requests, most), -1, device=device)
    states = torch.randint(model.states, (requests, most), generator=generator).to(device)
    noise = {name: value.repeat_interleave(most) for name, value in sampling.items()}
    if rule == "coupled":
        noise["positions"] = noise["positions"] + depths_of(parents).flatten().to(device)
    drafted, _ = pass_ext.draft_sample(
        model.draft[states.flatten()],
        most,
        mode=DRAWN.get(rule, "without"),
        **noise,
        nodes=torch.arange(most, device=device).repeat(requests),
    )
    drafted = drafted.view(requests, most, most)
    for i in range(1, most):
        above = parents[:, i].to(device)
        rank = (parents[:, :i] == parents[:, i : i + 1]).sum(1).to(device)
        tokens[:, i] = drafted[torch.arange(requests, device=device), above, rank]
        tokens[torch.rand(requests, generator=generator).to(device) < 0.03, i] = -1
    inside = (torch.arange(most) < sizes[:, None]).to(device)
    arrays = {
        "target_logits": model.target[states[inside]],
        "draft_logits": model.draft[states[inside]],
        "tokens": tokens[inside],
        "parents": parents.to(device)[inside].int(),
        "allowed": torch.randint(-(2**31), 2**31, (int(sizes.sum()), -(-vocabulary // 32)), generator=generator)
        .int()
        .to(device)
        | 1,
    }
    return Batch(arrays, sampling, sizes, most - 1, rule)


def same(results, others):
    for left, right in zip(results, others, strict=True):
        assert_same_bits(left.contiguous(), right.contiguous())


# On the emulator only rules with another walk: block is traversal, and replacement leaves out a step of rejection.
WALKS = [
    pytest.param(rule, marks=pytest.mark.quick_on("cpu") if rule in ("block", "rejection_with_replacement") else ())
    for rule in pass_ext.RULES
]


@pytest.mark.parametrize("rule", WALKS)
def test_batches_and_their_order_change_nothing(backend, rule):
    requests = how_many(backend, 300, 60, 8)
    batch = make_batch(backend, rule, requests, seed=21)
    generator = torch.Generator().manual_seed(1)
    whole = batch.run(range(requests))
    assert 0 < int((whole[2] > 0).sum()) < requests and not whole[3].any()
    for _ in range(3):
        order = torch.randperm(requests, generator=generator).tolist()
        order = order[: int(torch.randint(1, requests + 1, (), generator=generator))]
        same(batch.run(order, generator, padding=True), [value[order] for value in whole])
    for b in range(0, requests, max(2, requests // 20)):  # alone
        same(batch.run([b]), [value[b : b + 1] for value in whole])
