"""support of accept_tree and accept_chain on every backend: the reference's ids, unchanged decisions, a trainer's replay."""

import math
from functools import cache

import pytest
import torch
from support.steps import random_step, to

import pass_ext
from pass_ext import reference

NEAR = 2e-5  # a filter so near a tie may keep another token
PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "allowed")
RULES = tuple(pass_ext.RULES)


def with_support(backend, step, room, **more):
    result = pass_ext.accept_tree(**to(step, backend.device), support=room, **more)
    return [part.cpu() for part in result], result.support.counts.cpu(), result.support.ids.cpu()


def words_of(bits):
    """bool ``[rows, V]`` as mask words."""
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 32)).view(len(bits), -1, 32).long()
    words = (bits << torch.arange(32)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).int()


@cache
def steps_of(rule):
    """Steps with every kind of sampling, masked ones too; and the requests whose filters are near no tie."""
    random, steps = torch.Generator().manual_seed(RULES.index(rule)), []
    for vocabulary, dtype in ((5, torch.float32), (70, torch.bfloat16), (193, torch.float16)):
        sizes = [int(n) for n in torch.randint(1, 7, (8,), generator=random)]
        sizes[3], sizes[6] = 0, 1
        step = random_step(rule, sizes, vocabulary, random, dtype=dtype)
        step["target_logits"][:, vocabulary // 2] = -math.inf  # in no support
        if vocabulary != 70:
            step["allowed"] = words_of(torch.rand(sum(sizes), vocabulary, generator=random) < 0.8)
            step["draft_allowed"] = None
        steps.append((step, reference.accept_tree(**step).margin > NEAR))
    return steps


# On the emulator one rule for each way to walk.
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, marks=() if rule in ("coupled", "rejection", "traversal") else pytest.mark.quick_on("cpu"))
        for rule in RULES
    ],
)
def test_ids_are_the_references_and_decisions_stay(backend, rule):
    listed = left_out = 0
    for step, clear in steps_of(rule):
        plain = pass_ext.accept_tree(**to(step, backend.device))
        assert plain.support is None and len(plain) == 4
        given = {name: step[name] for name in PARAMETERS if name in step}
        vocabulary = step["target_logits"].shape[1]
        for room, more in ((vocabulary, {}), (max(vocabulary // 8, 1), dict(return_logprobs=True))):
            result, counts, ids = with_support(backend, step, room, **more)
            for left, right in zip(result, plain, strict=True):
                assert torch.equal(left, right.cpu())
            right_counts, right_ids = reference.accept_support(
                step["target_logits"], step["cu_nodes"], result[0], result[1], room, **given
            )
            assert counts.dtype == ids.dtype == torch.int32 and clear.sum() >= 6
            assert torch.equal(counts[clear], right_counts[clear]) and torch.equal(ids[clear], right_ids[clear])
            listed += int(((counts > 0) & (counts <= room)).sum())
            left_out += int((counts > room).sum())
    assert listed > 20 and left_out > 2


def test_a_chain_has_the_support_of_its_tree(backend):
    random = torch.Generator().manual_seed(3)
    requests, drafts, vocabulary = 3, 3, 90
    target = torch.randn(requests, drafts + 1, vocabulary + 5, generator=random)[..., :vocabulary]
    tokens = torch.randint(0, vocabulary, (requests, drafts), generator=random)
    tokens[0, 0] = target[0, 0].argmax()
    words = words_of(torch.rand(requests * (drafts + 1), vocabulary, generator=random) < 0.9)
    shared = dict(
        rule="rejection", support=20, temperature=[0.7, 0.0, 1.0], top_k=[9, 0, 20], seeds=[1, 2, 3], positions=4
    )
    put = lambda tensor: tensor.to(backend.device)  # noqa: E731
    chain = pass_ext.accept_chain(put(target), put(tokens), allowed=put(words.view(requests, drafts + 1, -1)), **shared)
    tree = pass_ext.accept_tree(
        put(target.flatten(0, 1)),
        put(torch.cat([torch.zeros(requests, 1).long(), tokens], 1).flatten()),
        put(torch.arange(-1, drafts).repeat(requests)),
        put(torch.arange(requests + 1) * (drafts + 1)),
        drafts,
        allowed=put(words),
        **shared,
    )
    assert chain.support.counts.max() == 20
    assert all(
        torch.equal(left, right) for left, right in zip((*chain, *chain.support), (*tree, *tree.support), strict=True)
    )


@pytest.mark.parametrize("rule", ["coupled", "coupled_inverse"])
def test_a_trainer_replays_the_law_from_ids_logits_seed_and_position(backend, rule):
    """The ids and the logits are enough for the processed log probability, to 1e-6. And among the ids alone, without mask and
    filters, the seed and the position draw the same tokens again."""
    random = torch.Generator().manual_seed(11)
    requests, drafts, vocabulary, room = 4, 3, 300, 80
    target = 1.5 * torch.randn(requests, drafts + 1, vocabulary, generator=random)
    put = lambda tensor: tensor.to(backend.device)  # noqa: E731
    warm, seeds, start = torch.tensor([0.6, 0.8, 1.0, 1.3]), torch.tensor([5, 6, 7, 8]), torch.tensor([10, 20, 30, 40])
    allowed = words_of(torch.rand(requests * (drafts + 1), vocabulary, generator=random) < 0.7)
    law = dict(temperature=put(warm), top_k=[30, 0, 0, 60], top_p=[1.0, 0.7, 1.0, 0.95], min_p=[0.0, 0.0, 0.04, 0.0])
    shared = dict(rule=rule, seeds=put(seeds), allowed=put(allowed.view(requests, drafts + 1, -1)))
    tokens = torch.full((requests, drafts), -1)
    for j in range(drafts):  # drafts that are right
        seen = pass_ext.accept_chain(put(target), put(tokens), positions=put(start), **shared, **law)
        tokens[:, j] = seen.emitted[:, j].cpu()
    tokens[2, 2] = (tokens[2, 2] + 1) % vocabulary  # but one
    result = pass_ext.accept_chain(
        put(target), put(tokens), positions=put(start), return_logprobs=True, support=room,
        **shared, **law,
    )  # fmt: skip
    emitted, processed = result.emitted.cpu(), result.logprobs.processed.cpu()
    counts, ids = (part.cpu() for part in result.support)
    assert result.num_accepted.tolist() == [3, 3, 2, 3] and 1 < counts[emitted >= 0].min() <= counts.max() <= room

    z = target.double() / warm.double()[:, None, None]
    mass = z.gather(2, ids.clamp(min=0).long()).masked_fill(ids < 0, -math.inf).logsumexp(2)
    again = z.gather(2, emitted.clamp(min=0)[..., None])[..., 0] - mass
    there = emitted >= 0
    assert (again - processed)[there].abs().max() <= 1e-6

    among = torch.zeros(requests, drafts + 1, vocabulary + 1, dtype=torch.bool)
    among.scatter_(2, ids.where(ids >= 0, vocabulary).long(), True)
    replayed = pass_ext.accept_chain(
        put(target.view(-1, 1, vocabulary)),
        put(torch.zeros(requests * (drafts + 1), 0).long()),
        rule=rule,
        temperature=put(warm.repeat_interleave(drafts + 1)),
        seeds=put(seeds.repeat_interleave(drafts + 1)),
        positions=put((start[:, None] + torch.arange(drafts + 1)).flatten()),
        allowed=put(words_of(among[..., :vocabulary].flatten(0, 1))),
    )
    assert torch.equal(replayed.emitted.cpu().view(requests, -1)[there], emitted[there])


def lone(logits, **more):
    """One request of one node."""
    return dict(
        target_logits=logits[None],
        tokens=torch.zeros(1).long(),
        parents=torch.full((1,), -1),
        cu_nodes=torch.tensor([0, 1]),
        max_depth=0,
        **more,
    )


def test_equal_logits_at_the_cut_and_room_for_one_id_less(backend):
    logits = torch.full((21,), -math.inf)
    logits[[17, 2, 9, 4, 11]] = torch.tensor([3.0, 3.0, 5.0, 3.0, 1.0])
    law = dict(
        temperature=torch.tensor([1.0]), top_k=torch.tensor([3]), seeds=torch.tensor([1]), positions=torch.tensor([0])
    )
    for room, ids in ((4, [2, 4, 9, -1]), (3, [2, 4, 9]), (2, [-1, -1])):
        _, counts, ours = with_support(backend, lone(logits, **law), room)
        assert counts.tolist() == [[3]] and ours.tolist() == [[ids]]
    _, counts, ours = with_support(backend, lone(logits, **{**law, "top_k": torch.tensor([0])}), 21)
    assert counts.tolist() == [[5]] and ours[0, 0, :6].tolist() == [2, 4, 9, 11, 17, -1]
    _, counts, ours = with_support(backend, lone(logits), 2)  # greedy
    assert counts.tolist() == [[1]] and ours.tolist() == [[[9, -1]]]


@pytest.mark.parametrize("third", [1, 300])
def test_top_p_that_equal_logits_reach_exactly(backend, third):
    """A third of the tokens has half of the mass: it is enough, in rows that are sorted at once or first put in bins."""
    logits = torch.cat([torch.zeros(third), torch.full((2 * third,), math.log(0.5))])  # weights 1 and, in fp32, 0.5
    law = dict(temperature=torch.tensor([1.0]), seeds=torch.tensor([1]), positions=torch.tensor([0]))
    for top_p, count in ((0.5, third), (0.5001, third + 1), (0.499, third)):
        _, counts, _ = with_support(backend, lone(logits, top_p=torch.tensor([top_p]), **law), 2 * third)
        assert counts.item() == count


@pytest.mark.parametrize("vocabulary", [3, 511, 4096 * 3 + 7, 4096 * 33 + 7])
def test_small_and_large_rows(backend, vocabulary):
    """Parts of a row without ids, others full of them, and the ends of both."""
    random = torch.Generator().manual_seed(4)
    logits = torch.randn(vocabulary, generator=random).bfloat16()
    logits[vocabulary // 4 : vocabulary // 2] = 9.0
    logits[[0, vocabulary - 1]] = 9.0
    law = dict(temperature=torch.tensor([1.0]), seeds=torch.tensor([1]), positions=torch.tensor([0]))
    step = lone(logits, min_p=torch.tensor([0.5]), **law)
    right = (logits == 9.0).nonzero().flatten().int()
    for room in (len(right), min(len(right) + 600, vocabulary)):
        _, counts, ids = with_support(backend, step, room)
        assert counts.item() == len(right)
        assert torch.equal(ids[0, 0, : len(right)], right) and (ids[0, 0, len(right) :] == -1).all()


def test_bad_rows_and_padding(backend):
    """Request 0 ends before a NaN row, 1 is padding, 2 has NaN at the root, 3 is no tree, 4 hides NaN after its mask."""
    random = torch.Generator().manual_seed(5)
    logits = torch.randn(7, 40, generator=random)
    best = logits.argmax(1)
    logits[1, 3] = logits[2, 3] = math.nan
    logits[6, 39] = math.nan
    allowed = torch.ones(7, 40, dtype=torch.bool)
    allowed[6, 39] = False
    step = dict(
        target_logits=logits,
        tokens=torch.tensor([0, int(best[0]), 0, 0, 0, 0, 0]),
        parents=torch.tensor([-1, 0, -1, -1, 5, 0, -1]),
        cu_nodes=torch.tensor([0, 2, 2, 3, 6, 7]),
        max_depth=1,
        allowed=words_of(allowed),
        temperature=torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]),
        seeds=torch.arange(5),
        positions=torch.zeros(5, dtype=torch.int64),
    )
    result, counts, ids = with_support(backend, step, 40)
    assert result[3].tolist() == [1, 0, 1, 4, 0]
    assert counts.tolist() == [[1, 0], [0, 0], [0, 0], [1, 0], [39, 0]]
    assert ids[0, 0, 0] == best[0] and ids[3, 0, 0] == best[3] and ids[4, 0].tolist() == [*range(39), -1]
    assert (ids[counts == 0] == -1).all()


def test_ids_are_the_same_with_any_thread_count(with_threads):
    random = torch.Generator().manual_seed(15)
    step = random_step("coupled", [6], 40_000, random)
    results = with_threads(lambda: pass_ext.accept_tree(**step, support=40_000).support)
    for result in results[1:]:
        assert all(torch.equal(left, right) for left, right in zip(result, results[0], strict=True))


@pytest.mark.parametrize("room", [-1, 5, True])
def test_refusals(room):
    with pytest.raises(
        ValueError, match=rf"pass_ext::accept_tree: support must be .*, 0 .* the vocabulary, 4, got {room}"
    ):
        pass_ext.accept_tree(**lone(torch.zeros(4)), support=room)
    if room is True:
        return
    with pytest.raises(
        RuntimeError, match=rf"accept_chain: support must be 0 \(none\) or .*the vocabulary, 4, got {room}"
    ):
        torch.ops.pass_ext.accept_chain(
            torch.zeros(1, 1, 4), torch.zeros(1, 0).long(), 0, None, *[None] * 12, 0.1, 0.1, -1, room
        )
