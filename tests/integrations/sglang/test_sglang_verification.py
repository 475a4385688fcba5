"""One accept step on SGLang's tensors: decisions as the reference takes them, rows and counts as SGLang has them."""

import dataclasses
import itertools

import pytest
import torch
from integrations.sglang.batches import chain_parents, depth_of, greedy_steps, random_parents, verify_input

from pass_ext import reference
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.integrations.sglang.eagle import drafts_of
from pass_ext.integrations.sglang.verification import verify

pytestmark = pytest.mark.quick_on("best")
V = 41
NEAR = 1e-6  # decisions closer than this may differ between kernels and reference


def likely_tokens(generator, logits, trees):
    """Tokens ``[B, N]`` that are probable after their parents, so that some are accepted; 7 for a padded node."""
    batch, nodes = len(trees), len(trees[0])
    rows = logits.float().view(batch, nodes, -1)
    tokens = torch.full((batch, nodes), 7)
    for b, parents in enumerate(trees):
        used = {}
        for node, parent in enumerate(parents):
            if parent >= 0:
                ranked = rows[b, parent].topk(4).indices.tolist()
                free = [t for t in ranked if t not in used.setdefault(parent, set())] or [0]
                tokens[b, node] = free[int(torch.randint(len(free), (), generator=generator))]
                used[parent].add(int(tokens[b, node]))
    return tokens


def expected_of(result, trees, nodes, width):
    """(predict, accept_index, accepted) from the emitted tokens and paths of the reference, by a plain loop."""
    predict = torch.zeros(len(trees) * nodes, dtype=torch.int32)
    accept_index = torch.full((len(trees), width), -1, dtype=torch.int32)
    for b in range(len(trees)):
        for place in range(int(result.num_accepted[b]) + 1):
            row = b * nodes + int(result.path[b, place])
            accept_index[b, place], predict[row] = row, max(int(result.emitted[b, place]), 0)
    return predict, accept_index, result.num_accepted


def assert_decisions(actual, expected, clear, nodes):
    """Equal in every request that is ``clear``."""
    for tensor in actual:
        assert tensor.dtype == torch.int32
    predict, accept_index, accepted = (tensor.cpu() for tensor in actual)
    assert predict.shape == expected[0].shape and predict.is_contiguous()
    batch = len(clear)
    assert torch.equal(predict.view(batch, nodes)[clear], expected[0].view(batch, nodes)[clear])
    assert torch.equal(accept_index[clear], expected[1][clear])
    assert torch.equal(accepted[clear], expected[2][clear])


def mixed_sampling(batch, seeds):
    """Greedy and sampled requests in turn, with every filter in some of them."""

    def pick(numbers):
        return list(itertools.islice(itertools.cycle(numbers), batch))

    return SamplingParams(
        temperature=pick([1.0, 0.0, 0.7, 1.6, 0.0, 1.0]),
        top_k=pick([0, 0, 5, 0, 3]),
        top_p=pick([1.0, 0.9, 1.0, 0.6]),
        min_p=pick([0.0, 0.0, 0.05]),
        seeds=seeds,
    )


@pytest.mark.parametrize("rule", ["coupled", "rejection", "traversal", "typical"])
@pytest.mark.parametrize(
    "batch, nodes, dtype",
    [(1, 7, torch.float32), (5, 13, torch.bfloat16), (3, 2, torch.float16), (6, 30, torch.float32)],
)
def test_trees_are_judged_as_the_reference_judges_them(backend, rule, batch, nodes, dtype):
    generator = torch.Generator().manual_seed(nodes)
    trees = [random_parents(generator, nodes, strays=True) for _ in range(batch)]
    logits = (torch.randn(batch * nodes, V, generator=generator) * 3).to(dtype)
    tokens, seq_lens = likely_tokens(generator, logits, trees), torch.randint(1, 99, (batch,), generator=generator)
    depth = max(max(depth_of(tree) for tree in trees) - 1, 1)  # the deepest level is cut off: drafts there are ignored
    params = mixed_sampling(batch, seeds=torch.randint(2**62, (batch,), generator=generator).tolist())
    drafts = drafts_of(verify_input(trees, tokens.to(backend.device), depth + 1), batch, rejection=False)
    sampling = params.for_batch(batch, backend.device)
    actual = verify(logits.to(backend.device), drafts, seq_lens.to(backend.device), sampling, rule)
    strays = torch.tensor(trees) == -2
    expected = reference.accept_tree(
        logits,
        tokens.masked_fill(strays, -1).flatten(),
        torch.tensor(trees, dtype=torch.int32).masked_fill(strays, 0).flatten(),
        torch.arange(0, batch * nodes + 1, nodes, dtype=torch.int32),
        depth,
        rule=rule,
        positions=seq_lens + 1,
        **params.for_batch(batch, torch.device("cpu")).keywords(),
    )
    clear = expected.margin > NEAR
    assert bool(clear.any())
    assert_decisions(actual, expected_of(expected, trees, nodes, depth + 1), clear, nodes)
    print(f"accepted {expected.num_accepted.tolist()}")


def drawn_chain(generator, batch, drafts, vocabulary, spread=1.0):
    """Logits ``[B, K + 1, V]``, probabilities ``[B, K, V]`` of drafts and tokens ``[B, K + 1]`` drawn from them, any root."""
    logits = torch.randn(batch, drafts + 1, vocabulary, generator=generator) * 2
    q = (logits[:, :-1] + torch.randn(batch, drafts, vocabulary, generator=generator) * spread).softmax(-1)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(batch, drafts)
    return logits, q, torch.nn.functional.pad(tokens, (1, 0), value=3)


@pytest.mark.parametrize("rule", ["rejection", "block", "rejection_with_replacement", "kseq", "traversal", "coupled"])
@pytest.mark.parametrize("batch, drafts", [(1, 3), (7, 5), (4, 1)])
def test_drawn_chains_are_judged_as_the_reference_judges_them(backend, rule, batch, drafts):
    """The draft's probabilities stand for themselves: neither the target's temperature nor its filters touch them."""
    generator = torch.Generator().manual_seed(drafts)
    logits, q, tokens = drawn_chain(generator, batch, drafts, V)
    q[..., 5] = 0.0  # as a top-k of the drafter leaves it
    q /= q.sum(-1, keepdim=True)
    seq_lens = torch.randint(1, 99, (batch,), generator=generator)
    params = mixed_sampling(batch, seeds=torch.randint(2**62, (batch,), generator=generator).tolist())
    device = backend.device
    made_up = verify_input([chain_parents(drafts + 1)] * batch, tokens.to(device), drafts + 1, 1, q.to(device))
    actual = verify(
        logits.flatten(0, 1).to(device),
        drafts_of(made_up, batch, rejection=True),
        seq_lens.to(device),
        params.for_batch(batch, device),
        rule,
    )
    expected = reference.accept_chain(
        logits,
        tokens[:, 1:],
        rule=rule,
        draft_logits=q.log(),
        draft_temperature=torch.ones(batch),
        draft_top_k=torch.zeros(batch, dtype=torch.int32),
        draft_top_p=torch.ones(batch),
        draft_min_p=torch.zeros(batch),
        positions=seq_lens + 1,
        **params.for_batch(batch, torch.device("cpu")).keywords(),
    )
    clear = expected.margin > NEAR
    assert bool(clear.any())
    trees = [chain_parents(drafts + 1)] * batch
    assert_decisions(actual, expected_of(expected, trees, drafts + 1, drafts + 1), clear, drafts + 1)


@pytest.mark.parametrize("batch, nodes, topk", [(1, 1, 1), (4, 1, 4), (1, 6, 1), (5, 9, -1)])
def test_greedy_steps_are_the_plain_loops(backend, batch, nodes, topk):
    """A step without drafts too, which SGLang makes while drafting is switched off."""
    generator = torch.Generator().manual_seed(batch + nodes)
    trees = [random_parents(generator, nodes) if topk < 0 else chain_parents(nodes) for _ in range(batch)]
    logits = torch.randn(batch * nodes, V, generator=generator)
    tokens, depth = likely_tokens(generator, logits, trees), max(depth_of(tree) for tree in trees)
    drafts = drafts_of(verify_input(trees, tokens.to(backend.device), depth + 1, topk), batch, rejection=False)
    actual = verify(
        logits.to(backend.device), drafts, torch.ones(batch, dtype=torch.int64, device=backend.device),
        SamplingParams().for_batch(batch, backend.device), "coupled",
    )  # fmt: skip
    predict, counts, accept_index = greedy_steps(logits, tokens, trees, depth + 1)
    assert_decisions(actual, (predict, accept_index, counts - 1), torch.ones(batch, dtype=torch.bool), nodes)


def test_a_chain_is_cut_at_the_depth_that_sglang_has_room_for(backend):
    """accept_index has max_tree_depth columns, whatever the number of nodes."""
    tokens = torch.ones(2, 6, dtype=torch.int64)
    logits = torch.eye(V)[torch.ones(12, dtype=torch.int64)]
    trees = [chain_parents(6)] * 2
    drafts = drafts_of(verify_input(trees, tokens.to(backend.device), 3, 1), 2, rejection=False)
    actual = verify(
        logits.to(backend.device), drafts, torch.ones(2, dtype=torch.int64, device=backend.device),
        SamplingParams().for_batch(2, backend.device), "coupled",
    )  # fmt: skip
    predict, counts, accept_index = greedy_steps(logits, tokens, trees, 3)
    assert counts.tolist() == [3, 3]
    assert_decisions(actual, (predict, accept_index, counts - 1), torch.ones(2, dtype=torch.bool), 6)


def test_rows_follow_retrieve_index(backend):
    """Results name rows by retrieve_index, whatever it says."""
    logits = torch.eye(3).repeat(2, 1) * 9  # after node i comes token i
    made_up = verify_input([[-1, 0, 1]] * 2, torch.tensor([[0, 0, 1]] * 2), 3)
    made_up.retrieve_index = torch.tensor([[5, 4, 3], [2, 1, 0]])
    made_up.draft_token, made_up.retrieve_index, made_up.retrieve_next_token, made_up.retrieve_next_sibling = (
        tensor.to(backend.device)
        for tensor in (made_up.draft_token, made_up.retrieve_index, made_up.retrieve_next_token, made_up.retrieve_next_sibling)
    )  # fmt: skip
    predict, accept_index, accepted = verify(
        logits.to(backend.device), drafts_of(made_up, 2, rejection=False),
        torch.zeros(2, dtype=torch.int64, device=backend.device), SamplingParams().for_batch(2, backend.device), "coupled",
    )  # fmt: skip
    assert accept_index.tolist() == [[5, 4, 3], [2, 1, 0]] and accepted.tolist() == [2, 2]
    assert predict.tolist() == [2, 1, 0, 2, 1, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_without_a_distribution_gets_token_0_and_disturbs_no_other(backend, bad, temperature):
    logits = torch.randn(3, 2, V, generator=torch.Generator().manual_seed(0))
    logits[1, 0] = bad
    made_up = verify_input([[-1, 0]] * 3, torch.tensor([[1, 2]] * 3, device=backend.device), 2, 1)
    sampling = SamplingParams(temperature=temperature, seeds=4).for_batch(3, backend.device)
    lengths = torch.ones(3, dtype=torch.int64, device=backend.device)

    def run(rows):
        rows = rows.flatten(0, 1).to(backend.device)
        return verify(rows, drafts_of(made_up, 3, rejection=False), lengths, sampling, "coupled")

    predict, accept_index, accepted = run(logits)
    assert accept_index[1].tolist() == [2, -1] and int(accepted[1]) == 0 and int(predict[2]) == 0
    others = run(logits.nan_to_num(0.0, neginf=0.0))
    for mine, clean in zip(
        (predict.view(3, 2), accept_index, accepted), (others[0].view(3, 2), *others[1:]), strict=True
    ):
        assert torch.equal(mine[[0, 2]], clean[[0, 2]])


def test_a_seed_gives_the_same_text_in_any_batch_and_fresh_seeds_differ(backend):
    """Rule coupled: a request's tokens follow from its logits, seed and position alone."""
    rows = torch.randn(2, V, generator=torch.Generator().manual_seed(3)).to(backend.device)

    def tokens_of(rows, seeds):
        batch = len(rows)
        roots = torch.zeros(batch, 1, dtype=torch.int64, device=backend.device)
        drafts = drafts_of(verify_input([[-1]] * batch, roots, 1, 1), batch, rejection=False)
        sampling = dataclasses.replace(
            SamplingParams(temperature=5.0, seeds=0).for_batch(batch, backend.device),
            seeds=seeds and torch.tensor(seeds, device=backend.device),
        )
        return verify(rows, drafts, torch.full((batch,), 5, device=backend.device), sampling, "coupled")[0].tolist()

    assert tokens_of(rows[1:], [9]) == tokens_of(rows, [8, 9])[1:]
    assert len({tokens_of(rows[1:], None)[0] for _ in range(40)}) > 5
