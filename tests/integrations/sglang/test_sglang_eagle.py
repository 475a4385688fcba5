"""Our ``eagle_sample`` between SGLang's objects and the accept step: processors, parameters, ranks, rules, and what it leaves
to SGLang's own function.
"""

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from integrations.sglang.batches import (
    SIGNATURE,
    chain_parents,
    depth_of,
    greedy_steps,
    random_parents,
    sampling_info,
    schedule_batch,
    verify_input,
    without_types,
)

from pass_ext.decoding.sampling import BatchSampling
from pass_ext.integrations.sglang import eagle
from pass_ext.integrations.sglang.verification import verify

V = 17
LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def output(logits):
    return SimpleNamespace(next_token_logits=logits)


def made_up_step(info, batch, nodes=5, seed=0, topk=-1):
    """(verify_input, batch, logits, trees, tokens) of random trees, or of chains."""
    generator = torch.Generator().manual_seed(seed)
    trees = [chain_parents(nodes) if topk == 1 else random_parents(generator, nodes) for _ in range(batch)]
    logits = torch.randn(batch * nodes, V, generator=generator) * 3
    tokens = logits.view(batch, nodes, V).topk(3).indices[..., 1].roll(1, 1)
    for b, parents in enumerate(trees):
        for node, parent in enumerate(parents):
            if node and torch.rand((), generator=generator) < 0.6:
                tokens[b, node] = logits.view(batch, nodes, V)[b, parent].argmax()
    depth = max(depth_of(tree) for tree in trees) + 1
    seq_lens = torch.randint(1, 50, (batch,), generator=generator)
    return verify_input(trees, tokens, depth, topk), schedule_batch(info, seq_lens), logits, trees, tokens


def test_the_signature_is_sglangs(engine):
    assert without_types(inspect.signature(eagle.eagle_sample)) == SIGNATURE
    assert without_types(inspect.signature(engine.eagle_sample)) == SIGNATURE


@pytest.mark.parametrize("batch, topk", [(1, -1), (4, -1), (3, 1)])
def test_greedy_batches(engine, batch, topk):
    drafts, schedule, logits, trees, tokens = made_up_step(sampling_info(batch), batch, topk=topk)
    results = eagle.eagle_sample(drafts, schedule, output(logits))
    for actual, expected in zip(results, greedy_steps(logits, tokens, trees, drafts.max_tree_depth), strict=True):
        assert actual.dtype == torch.int32
        assert torch.equal(actual, expected)
    assert int(results[1].max()) > 1  # some drafts were accepted; the number counts the added token
    assert engine.calls == []


def test_greedy_requests_stay_greedy_among_sampled_ones(engine):
    """SGLang writes temperature 0 as top_k 1 at temperature 1; a request sampled at top_k 1 is the same."""
    info = sampling_info(4, temperature=[0.0, 1.0, 0.0, 2.0], top_k=[1 << 30, 1, 1 << 30, 1 << 30], seeds=[1, 2, 3, 4])
    drafts, schedule, logits, trees, tokens = made_up_step(info, 4)
    predict, counts, accept_index = eagle.eagle_sample(drafts, schedule, output(logits))
    expected = greedy_steps(logits, tokens, trees, drafts.max_tree_depth)
    assert torch.equal(predict.view(4, -1)[:3], expected[0].view(4, -1)[:3])
    assert torch.equal(counts[:3], expected[1][:3]) and torch.equal(accept_index[:3], expected[2][:3])


def test_each_request_has_its_own_parameters(engine):
    """The parameters are the accept step's own, and positions start after the root."""
    info = sampling_info(
        3,
        temperature=[0.0, 0.5, 2.0],
        top_k=[1 << 30, 4, 1 << 30],
        top_p=[1.0, 1.0, 0.5],
        min_p=[0, 0.1, 0],
        seeds=[1, 2, 3],
    )
    sampling = eagle.sampling_of(info)
    assert sampling.temperature.tolist() == [0.0, 0.5, 2.0] and sampling.top_k.tolist() == [1, 4, 1 << 30]
    assert sampling.top_p.tolist() == [1.0, 1.0, 0.5] and sampling.min_p[1] == pytest.approx(0.1)
    assert sampling.seeds.tolist() == [1, 2, 3]
    drafts, schedule, logits, _, _ = made_up_step(info, 3)
    predict, counts, accept_index = eagle.eagle_sample(drafts, schedule, output(logits.clone()))
    expected = verify(logits, eagle.drafts_of(drafts, 3, False), schedule.seq_lens, sampling, "coupled")
    assert torch.equal(predict, expected[0]) and torch.equal(accept_index, expected[1])
    assert torch.equal(counts, expected[2] + 1)


def test_filters_that_no_request_uses_are_off(engine):
    sampling = eagle.sampling_of(sampling_info(2, temperature=[1.0, 1.0]))
    assert sampling.top_k is None and sampling.top_p is None and sampling.min_p is None and sampling.seeds is None
    assert eagle.sampling_of(sampling_info(2)) == BatchSampling(None, None, None, None, None)


# ---- processors ----


def penalised(rows, info):
    """The logits after penalties and biases, one request at a time."""
    rows = rows.clone()
    for b in range(len(rows)):
        rows[b] += info.acc_additive_penalties[b]
        scale = info.acc_scaling_penalties[b]
        rows[b] = torch.where(rows[b] < 0, rows[b] * scale, rows[b] / scale)
        rows[b] += info.logit_bias[b]
    return rows


def test_processors_change_the_logits_in_place_and_in_order(engine):
    """Penalties, biases and the mask, for all nodes of a request; log-probabilities are computed from the same tensor."""
    batch, nodes, generator = 3, 5, torch.Generator().manual_seed(5)
    info = sampling_info(batch)
    info.acc_additive_penalties = torch.randn(batch, V, generator=generator)
    info.acc_scaling_penalties = torch.rand(batch, V, generator=generator) + 0.5
    info.logit_bias = torch.randn(batch, V, generator=generator)
    forbidden = torch.rand(batch * nodes, V, generator=generator) < 0.4
    mask = SimpleNamespace(apply=lambda logits: logits.masked_fill_(forbidden, -torch.inf))
    drafts, schedule, logits, trees, tokens = made_up_step(info, batch, nodes)
    expected = penalised(logits.view(batch, nodes, V), info).flatten(0, 1).masked_fill(forbidden, -torch.inf)
    results = eagle.eagle_sample(drafts, schedule, output(logits), mask)
    torch.testing.assert_close(logits, expected)
    for actual, right in zip(results, greedy_steps(expected, tokens, trees, drafts.max_tree_depth), strict=True):
        assert torch.equal(actual, right)


def test_sampled_requests_keep_to_the_grammar(engine):
    """A mask that leaves two tokens per row: nothing else comes out, drafts included."""
    info = sampling_info(200, temperature=[1.5] * 200)
    drafts, schedule, logits, _, _ = made_up_step(info, 200)
    allowed = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)).topk(2).indices
    forbidden = torch.ones_like(logits, dtype=torch.bool).scatter_(1, allowed, False)
    mask = SimpleNamespace(apply=lambda logits: logits.masked_fill_(forbidden, -torch.inf))
    predict, counts, accept_index = eagle.eagle_sample(drafts, schedule, output(logits), mask)
    rows = accept_index[accept_index >= 0].long()
    assert bool((predict[rows, None] == allowed[rows]).any(1).all())
    assert int(counts.sum()) == len(rows) > 200
    assert 0.2 < (predict[rows] == allowed[rows, 0]).double().mean() < 0.8  # sampled on the CPU too, not the arg-max


def test_nan_is_sanitised_as_sglang_does(engine):
    """SGLang's own sanitiser runs first, so a NaN is a logit like any other improbable one."""
    drafts, schedule, logits, _, _ = made_up_step(sampling_info(1), 1, nodes=1)
    logits[0, :] = float("nan")
    logits[0, 5] = 1.0
    predict, _, _ = eagle.eagle_sample(drafts, schedule, output(logits))
    assert predict.tolist() == [5]


# ---- ranks ----


def test_rank_0_decides_for_sampled_batches(engine):
    engine.parallel.tp_group.world_size = engine.parallel.attn_tp_group.world_size = 2
    drafts, schedule, logits, _, _ = made_up_step(sampling_info(2, temperature=[0.0, 1.0]), 2)
    predict, counts, accept_index = eagle.eagle_sample(drafts, schedule, output(logits))
    (sent, sources) = zip(*engine.parallel.tp_group.sent, strict=True)
    assert sources == (0, 0, 0) and engine.parallel.attn_tp_group.sent == []
    assert sent[0] is predict and sent[1] is accept_index and torch.equal(sent[2] + 1, counts)
    assert all(tensor.is_contiguous() for tensor in sent)
    engine.dp_attention = True
    eagle.eagle_sample(drafts, schedule, output(logits))
    assert len(engine.parallel.tp_group.sent) == len(engine.parallel.attn_tp_group.sent) == 3


def test_greedy_batches_and_single_ranks_send_nothing(engine):
    drafts, schedule, logits, _, _ = made_up_step(sampling_info(2, temperature=[1.0, 1.0]), 2)
    eagle.eagle_sample(drafts, schedule, output(logits))
    engine.parallel.tp_group.world_size = 2
    schedule.sampling_info = sampling_info(2)
    eagle.eagle_sample(drafts, schedule, output(logits))
    assert engine.parallel.tp_group.sent == []


# ---- rules ----


def drawn_step(nodes=4, batch=3):
    info = sampling_info(batch, temperature=[1.0] * batch, seeds=list(range(batch)))
    drafts, schedule, logits, _, _ = made_up_step(info, batch, nodes, topk=1)
    drafts.draft_probs = torch.randn(batch, nodes - 1, V, generator=torch.Generator().manual_seed(9)).softmax(-1)
    return drafts, schedule, logits


@pytest.mark.parametrize(
    "rejection, block, setting, rule",
    [
        (False, False, "", "coupled"),
        (False, True, "", "coupled"),
        (True, False, "", "rejection"),
        (True, True, "", "block"),
        (False, False, "rejection", "rejection"),
        (False, False, "typical", "typical"),
        (True, True, "kseq", "kseq"),
        (True, False, "coupled", "coupled"),
    ],
)
def test_the_server_or_the_user_chooses_the_rule(engine, monkeypatch, caplog, rejection, block, setting, rule):
    monkeypatch.setenv("PASS_EXT_SGLANG_RULE", setting)
    engine.spec.speculative_use_rejection_sampling = rejection
    engine.spec.speculative_use_block_verification = block
    drafts, schedule, logits = drawn_step()
    results = [eagle.eagle_sample(drafts, schedule, output(logits.clone())) for _ in range(2)]
    sampling = eagle.sampling_of(schedule.sampling_info)
    expected = verify(logits, eagle.drafts_of(drafts, 3, rejection), schedule.seq_lens, sampling, rule)
    assert torch.equal(results[0][0], expected[0]) and torch.equal(results[1][0], expected[0])
    assert torch.equal(results[0][2], expected[1])
    (line,) = [record.getMessage() for record in caplog.records]  # once
    exactness = "approximate" if rule == "typical" else "exact"
    assert f"rule {rule} ({exactness})" in line and "sglang.srt.speculative.eagle_utils.eagle_sample" in line


def test_a_step_without_drafts_needs_no_distribution(engine):
    """SGLang makes such steps while drafting is off, also when it samples by rejection."""
    engine.spec.speculative_use_rejection_sampling = True
    info = sampling_info(2, temperature=[1.0, 0.0], seeds=[1, 2])
    drafts, schedule, logits, _, _ = made_up_step(info, 2, nodes=1, topk=1)
    predict, counts, accept_index = eagle.eagle_sample(drafts, schedule, output(logits))
    assert counts.tolist() == [1, 1] and accept_index.tolist() == [[0], [1]] and engine.calls == []
    assert int(predict[1]) == int(logits[1].argmax())


# ---- what SGLang's own function does ----


def simulate(engine, monkeypatch, drafts, schedule):
    monkeypatch.setattr(sys.modules["sglang.srt.speculative.spec_utils"], "SIMULATE_ACC_LEN", 2.5)


def thresholds(name):
    return lambda engine, monkeypatch, drafts, schedule: setattr(engine.spec, name, 0.9)


def watermark(engine, monkeypatch, drafts, schedule):
    schedule.sampling_info.has_watermark_candidates = True


def hybrid_model(engine, monkeypatch, drafts, schedule):
    schedule.req_to_token_pool = SimpleNamespace(mamba_pool=object())


def user_rule(rule):
    return lambda engine, monkeypatch, drafts, schedule: monkeypatch.setenv("PASS_EXT_SGLANG_RULE", rule)


def missing_probs(engine, monkeypatch, drafts, schedule):
    engine.spec.speculative_use_rejection_sampling = True
    drafts.tree_topk, drafts.max_tree_depth = 1, 5


def other_vocabulary(engine, monkeypatch, drafts, schedule):
    missing_probs(engine, monkeypatch, drafts, schedule)
    drafts.draft_probs = torch.ones(2, 4, V - 1) / (V - 1)


def drawn_trees(engine, monkeypatch, drafts, schedule):
    engine.spec.speculative_use_rejection_sampling = True
    drafts.draft_probs = torch.ones(2, 4, V) / V


@pytest.mark.parametrize(
    "change, reason",
    [
        (simulate, "SGLANG_SIMULATE_ACC_LEN"),
        (thresholds("speculative_accept_threshold_single"), "--speculative-accept-threshold-single"),
        (thresholds("speculative_accept_threshold_acc"), "--speculative-accept-threshold-acc"),
        (watermark, "watermark"),
        (hybrid_model, "layers that keep a state"),
        (user_rule("kseq"), "rule kseq needs --speculative-use-rejection-sampling"),
        (user_rule("rejection_with_replacement"), "--speculative-use-rejection-sampling"),
        (user_rule("block"), "rule block verifies chains only"),
        (missing_probs, "distributions are missing"),
        (other_vocabulary, "target's vocabulary"),
        (drawn_trees, "not a chain"),
    ],
)
def test_sglangs_own_function_takes_what_ours_cannot_honour(engine, monkeypatch, caplog, change, reason):
    """Its arguments come through untouched, its result goes back, and the reason is in the log once."""
    info = sampling_info(2, temperature=[1.0, 1.0])
    drafts, schedule, logits, _, _ = made_up_step(info, 2)
    change(engine, monkeypatch, drafts, schedule)
    before, out, mask = logits.clone(), output(logits), object()
    for _ in range(2):
        result = eagle.eagle_sample(drafts, schedule, out, mask, 7, watermark_state="state", watermark_full_mask=False)
        assert result == "SGLang's own"
    assert engine.calls == [(drafts, schedule, out, mask, 7, "state", False)] * 2
    assert torch.equal(logits, before)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and reason in record.getMessage()


def test_a_watermark_server_without_watermarked_requests_is_ours(engine):
    drafts, schedule, logits, _, _ = made_up_step(sampling_info(2), 2)
    eagle.eagle_sample(drafts, schedule, output(logits), watermark_state="state")
    assert engine.calls == []


def test_more_nodes_than_the_accept_step_takes(engine, caplog):
    drafts, schedule, logits, _, _ = made_up_step(sampling_info(1), 1, nodes=1)
    drafts.draft_token_num, drafts.draft_token = 1025, torch.zeros(1025, dtype=torch.int64)
    assert eagle.eagle_sample(drafts, schedule, output(logits)) == "SGLang's own"
    assert "1024" in caplog.records[0].getMessage()


def test_other_devices_are_sglangs(engine, caplog):
    drafts, schedule, logits, _, _ = made_up_step(sampling_info(1), 1)
    assert eagle.eagle_sample(drafts, schedule, output(logits.to("meta"))) == "SGLang's own"
    assert "meta" in caplog.records[0].getMessage()


def test_idle_ranks_are_sglangs_without_a_word(engine, caplog):
    schedule = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: True))
    assert eagle.eagle_sample(None, schedule, None) == "SGLang's own"
    assert caplog.records == []
