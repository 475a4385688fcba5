"""Training look-ahead slots: the slot forward against sequential rows, the chunked loss against the dense one, and steps."""

import dataclasses
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.small_models import small_model
from support.training_models import (
    SETTINGS,
    WEIGHTS,
    counting,
    dense_loss,
    sequential_logits,
    slots_for,
    tiny_llama,
    windows_of,
)

from pass_ext.training.common.frozen_model import check_head, text_rows
from pass_ext.training.common.loss import distillation_loss
from pass_ext.training.common.steps import rate_at
from pass_ext.training.lookahead.evaluation import evaluate, hits_of
from pass_ext.training.lookahead.group_attention import group_attention
from pass_ext.training.lookahead.loop import LookaheadTrainer, group_mask, slot_rows, step_loss
from pass_ext.training.lookahead.states import with_states

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", ["kl", "total-variation", "cross-entropy"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("adapters", [0, 1, 3])
def test_loss_and_gradients_are_those_of_one_ordinary_forward_a_group(tied, kind, adapters):
    model = tiny_llama(tied=tied)
    embedding = slots_for(model, adapters=adapters)
    window = windows_of(counting(9, 24)).at(3)
    ours = step_loss(model, embedding, window, WEIGHTS, kind)
    gradients = torch.autograd.grad(ours, list(embedding.parameters()))
    dense = dense_loss(model, embedding, window, 0.8, kind)
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(gradients, torch.autograd.grad(dense, list(embedding.parameters())), strict=True):
        assert theirs.abs().max() > 1e-4
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("architecture", ["mistral", "gemma3_text", "qwen2_moe", "gpt_oss", "llama4_text"])
def test_layers_that_see_the_last_tokens_only_do_so_in_training(architecture):
    """Windows of 7 and chunks of 8 in texts of 24: of all layers, of some, known to the mask alone, or beside sinks."""
    # Llama 4 scales queries by their place in the call, beyond 8,192 tokens of a real model.
    model = small_model(architecture, **(dict(floor_scale=8192) if architecture == "llama4_text" else {}))
    model.set_attn_implementation("eager" if architecture == "gpt_oss" else "sdpa")
    embedding, window = slots_for(model), windows_of(counting(9, 24)).at(3)
    ours = step_loss(model, embedding, window, WEIGHTS)
    dense = dense_loss(model, embedding, window, 0.8, "kl")
    torch.testing.assert_close(ours, dense, atol=1e-4, rtol=1e-4)
    gradients = [torch.autograd.grad(loss, list(embedding.parameters())) for loss in (ours, dense)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=1e-3)


def test_slots_are_not_trained_where_queries_are_scaled_by_row():
    model = small_model("llama4_text", floor_scale=64)
    assert with_states(model, 63) is model
    with pytest.raises(
        SystemExit, match="slots cannot be trained for llama4_text: its attention takes positions from the"
    ):
        with_states(model, 64)
    untuned = small_model("llama4_text", floor_scale=64, attn_temperature_tuning=False)
    assert with_states(untuned, 64) is untuned


def test_a_slot_row_is_what_the_model_says_after_the_text_and_the_slots_before_it():
    model = tiny_llama()
    embedding = slots_for(model, rank=0)
    texts = torch.tensor([one.ids for one in counting(2, 20)])
    anchors = torch.tensor([[0, 5, 5, 14], [3, 7, 11, 12]])
    with torch.no_grad():
        _, past = text_rows(model, texts)
        logits = model.lm_head(slot_rows(model, embedding, anchors, past))
        for b, a in itertools.product(range(2), range(4)):
            alone = sequential_logits(model, embedding, texts[b], int(anchors[b, a]))
            torch.testing.assert_close(logits[b, a], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("groups", "slots", "shared"), [(5, 3, 1), (40, 2, 2), (17, 4, 3), (1, 1, 3)])
def test_attention_of_groups_is_that_of_a_mask_over_all_pairs(groups, slots, shared, dtype):
    torch.manual_seed(0)
    length, rows, heads = 19, groups * slots, 3 * shared
    anchors = torch.randint(length, (2, groups)).sort(1).values
    text = torch.randn(2, 2, shared, length, 8, dtype=dtype)
    own = torch.randn(2, 2, shared, rows, 8, dtype=dtype, requires_grad=True)
    q = torch.randn(2, heads, rows, 8, dtype=dtype, requires_grad=True)
    upstream = torch.randn(2, heads, rows, 8, dtype=dtype)
    mask = group_mask(anchors, length, slots, torch.float64)

    def of(attend, kind):
        keys, values = torch.cat([text, own], 3).to(kind)
        out = attend(q.to(kind), keys, values)
        return out, *torch.autograd.grad(out, (q, own), upstream.to(kind))

    found = of(lambda *parts: group_attention(*parts, anchors, slots, 0.3), dtype)
    wanted = of(
        lambda *parts: F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=0.3, enable_gqa=True),
        torch.float64,
    )
    assert all(mine.dtype == dtype for mine in found)
    for mine, theirs in zip(found, wanted, strict=True):
        error = 1e-5 if dtype is torch.float32 else 0.02
        torch.testing.assert_close(mine.double(), theirs.double(), atol=error, rtol=error)


@pytest.mark.parametrize("options", [dict(sliding_window=4), dict(position_bias=None, s_aux=torch.ones(4))], ids=str)
def test_layers_that_attend_otherwise_keep_their_attention(options, monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen = []
    model, window = tiny_llama(), windows_of(counting(9, 24)).at(0)
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._local_mapping,
        "sdpa",
        lambda *inputs, **named: (
            seen.append({k: v for k, v in named.items() if k in options}) or plain(*inputs, **named)
        ),
    )
    step_loss(model, slots_for(model), window, WEIGHTS)
    assert seen == [{}] * 2, "the teacher's two layers alone"
    for layer in model.model.layers:
        layer.self_attn.forward = partial(layer.self_attn.forward, **options)
    seen.clear()
    step_loss(model, slots_for(model), window, WEIGHTS)
    assert [list(named) for named in seen] == [list(options)] * 4
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("temperature", [1.0, 0.4, 3.0])
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("kind", ["kl", "total-variation", "cross-entropy"])
def test_the_chunked_loss_is_the_dense_one(kind, chunk, temperature):
    torch.manual_seed(0)
    rows = [torch.randn(23, 8, requires_grad=True), torch.randn(23, 6, requires_grad=True)]
    tables, bias = [torch.randn(50, 8), torch.randn(50, 6)], torch.randn(50)
    weights, teacher_rows = torch.rand(23), torch.randn(9, 8)
    teacher, labels = torch.randint(9, (23,)), torch.randint(50, (23,))
    own = ((rows[0] @ tables[0].T + rows[1] @ tables[1].T + bias) / temperature).log_softmax(-1)
    if kind != "cross-entropy":
        chosen = dict(teacher_rows=teacher_rows, teacher=teacher, divergence=kind)
        goal = ((teacher_rows @ tables[0].T + bias) / temperature).log_softmax(-1)[teacher]
        distances = (goal.exp() * (goal - own) if kind == "kl" else (goal.exp() - own.exp()).abs() / 2).sum(-1)
        dense = (weights * distances).sum()
    else:
        chosen, dense = dict(labels=labels), (weights * F.nll_loss(own, labels, reduction="none")).sum()
    ours = distillation_loss(rows, tables, weights, bias=bias, chunk=chunk, temperature=temperature, **chosen)
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(torch.autograd.grad(3 * ours, rows), torch.autograd.grad(3 * dense, rows), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_a_divergence_that_there_is_not():
    rows, tables = [torch.zeros(1, 2)], [torch.zeros(3, 2)]
    with pytest.raises(ValueError, match="divergence must be one of kl, total-variation, got 'reverse'"):
        distillation_loss(rows, tables, torch.ones(1), divergence="reverse")


def test_total_variation_is_one_minus_the_chance_to_be_accepted():
    """Distributions without a common token differ by 1, equal ones by 0, and the loss has no slope there."""
    table = 60 * torch.eye(4)
    rows = torch.eye(4)[[0, 1]].requires_grad_()
    loss = distillation_loss(
        [rows], [table], torch.tensor([0.25, 0.75]), teacher_rows=torch.eye(4)[[0, 3]], teacher=torch.tensor([0, 1]),
        divergence="total-variation",
    )  # fmt: skip
    assert loss.item() == pytest.approx(0.75)
    assert torch.autograd.grad(loss, rows)[0].abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["kl", "total-variation", "cross-entropy"])
def test_a_trainers_loss_has_the_temperature_of_its_settings(kind):
    """At a temperature of 0.5 it is the loss of a model, and of transition scores, with twice the logits."""
    model, double, windows = tiny_llama(tied=False), tiny_llama(tied=False), windows_of(counting(9, 24))
    embedding, twice = slots_for(model), slots_for(model)
    double.lm_head.weight.mul_(2)
    twice.transition_left.data.mul_(2)
    sharp = LookaheadTrainer(
        model, embedding, windows, dataclasses.replace(SETTINGS, loss=kind, loss_temperature=0.5)
    ).loss(3)
    plain = LookaheadTrainer(double, twice, windows, dataclasses.replace(SETTINGS, loss=kind)).loss(3)
    torch.testing.assert_close(sharp, plain, atol=1e-5, rtol=1e-5)
    blunt = LookaheadTrainer(model, embedding, windows, dataclasses.replace(SETTINGS, loss=kind)).loss(3)
    assert abs(blunt - sharp) > 0.01


def test_a_step_leaves_no_adapters_at_the_model():
    """That the texts' own rows, which teach, have none shows in the dense loss."""
    model = tiny_llama()
    step_loss(model, slots_for(model, adapters=1), windows_of(counting(9, 24)).at(0), WEIGHTS)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("kind", ["kl", "total-variation", "cross-entropy"])
def test_a_step_stays_on_the_models_device_and_reads_nothing_of_it(kind, monkeypatch):
    """On the meta device, where tensors of another device are an error and numbers cannot be read: so no host waits for its
    GPU, but for the different teachers of a chunk."""
    model = tiny_llama()
    embedding, window = slots_for(model, adapters=1), windows_of(counting(9, 24)).at(0)
    counts = []

    def unique(teacher, return_inverse):
        counts.append(len(teacher))
        return teacher, torch.arange(len(teacher), device=teacher.device)

    monkeypatch.setattr(torch.Tensor, "unique", unique)
    loss = step_loss(model.to("meta"), embedding.to("meta"), window, WEIGHTS, kind, 0.6)
    loss.backward()
    assert loss.is_meta and all(parameter.grad.is_meta for parameter in embedding.parameters())
    assert counts == ([] if kind == "cross-entropy" else [36]), "one chunk"


def test_a_curriculum_begins_with_the_first_slots():
    settings = dataclasses.replace(SETTINGS, curriculum=9)
    assert [settings.slots_at(step, 3) for step in range(11)] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3]
    assert [SETTINGS.slots_at(step, 3) for step in (0, 1)] == [3, 3]
    assert settings.weights_of(2) == [1.0, 0.8]
    assert dataclasses.replace(settings, slot_weights=(3.0, 2.0, 1.0)).weights_of(2) == [3.0, 2.0]
    model, windows = tiny_llama(), windows_of(counting(9, 24))
    embedding = slots_for(model, adapters=3)
    trainer = LookaheadTrainer(model, embedding, windows, settings)
    before = [
        tensor.clone() for tensor in (embedding.weight, embedding.deep, *embedding.adapters.pair("0.mlp.up_proj"))
    ]
    trainer.run(2)
    after = (embedding.weight, embedding.deep, *embedding.adapters.pair("0.mlp.up_proj"))
    for slots_first, old, new in zip((0, 1, 0, 0), before, after, strict=True):
        old, new = old.movedim(slots_first, 0), new.movedim(slots_first, 0)
        assert not torch.equal(new[0], old[0]) and torch.equal(new[1:], old[1:])


def test_it_learns_a_pattern_that_the_model_knows():
    """The slots of a model that can count learn to count two, three and four ahead; their hit rates show it too."""
    model = tiny_llama()
    model.requires_grad_(True)
    texts = torch.tensor([one.ids for one in counting(30, 24)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        loss = F.cross_entropy(model(input_ids=texts).logits[:, :-1].flatten(0, 1), texts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.requires_grad_(False)
    assert loss < 0.2
    embedding = slots_for(model, rank=16, deep=False)
    held_out = counting(5, 24, name="held out")
    before = evaluate(model, embedding, held_out, 8)
    trainer = LookaheadTrainer(model, embedding, windows_of(counting(30, 24)), SETTINGS)
    frozen = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.run(40)
    after = evaluate(model, embedding, held_out, 8)
    assert sum(trainer.losses[-5:]) < 0.7 * sum(trainer.losses[:5])
    assert after["slots"][0]["top 8"] > before["slots"][0]["top 8"] + 0.2
    assert after["accepted"]["tree 8"] > before["accepted"]["tree 8"]
    assert after["places"] == 40
    assert all(torch.equal(frozen[name], value) for name, value in model.state_dict().items())


def test_the_learning_rate_rises_and_falls():
    curve = [rate_at(step, 100, 10) for step in range(100)]
    assert curve[0] == 0.1 and curve[10] == 1.0 and max(curve) == 1.0
    assert curve[10:] == sorted(curve[10:], reverse=True) and curve[-1] < 0.001


def test_a_model_that_bends_its_logits_is_refused():
    model = tiny_llama()
    check_head(model, torch.tensor([[1, 2, 3]]))
    plain = type(model).forward
    model.forward = lambda *a, **k: type("Out", (), {"logits": plain(model, *a, **k).logits.tanh()})()
    with pytest.raises(SystemExit, match="changes its logits"):
        check_head(model, torch.tensor([[1, 2, 3]]))


def test_a_model_in_bfloat16_trains_fp32_parameters():
    model = tiny_llama().to(torch.bfloat16)
    embedding = slots_for(tiny_llama())
    loss = step_loss(model, embedding, windows_of(counting(9, 24)).at(0), WEIGHTS)
    wide = step_loss(tiny_llama(), embedding, windows_of(counting(9, 24)).at(0), WEIGHTS)
    torch.testing.assert_close(loss, wide, rtol=0.05, atol=0.0)
    loss.backward()
    for parameter in embedding.parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.abs().max() > 0
    text = torch.tensor(counting(3, 24)[2].ids)
    assert hits_of(model, embedding, text, torch.tensor([2, 9])).ranks.shape == (2, 3)
