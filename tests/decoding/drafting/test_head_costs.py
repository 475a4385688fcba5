"""What a head computes and when: layers have the bits of their parts, nothing is computed in pauses, plans are followed."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from support.heads import MASKED, VARIANTS, eagle3_checkpoint
from support.recorded import PauseAt, Recorded
from support.small_models import ragged_prompts, small_model

from pass_ext import Tree, generate, load_drafter
from pass_ext.decoding.drafting.heads import fused
from pass_ext.decoding.drafting.heads.head import Head
from pass_ext.decoding.planning import plan as planning
from pass_ext.decoding.planning.step_times import StepTimes
from pass_ext.drafting import calibrate, plan

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target():
    return small_model("llama", num_hidden_layers=4)


@pytest.fixture
def method(target, tmp_path):
    eagle3_checkpoint(tmp_path / "head", target)
    return load_drafter(tmp_path / "head", target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", [*VARIANTS, "P-EAGLE"])
def test_one_op_has_the_bits_of_the_parts(variant, dtype, tmp_path, monkeypatch):
    """Drafts of three ragged texts, drawn from the head's own logits, and these; a hook has the head run part by part."""
    target = small_model("llama", num_hidden_layers=4, dtype=dtype)
    eagle3_checkpoint(tmp_path / "head", target, **(VARIANTS | {"P-EAGLE": MASKED})[variant])
    method = replace(load_drafter(tmp_path / "head", target), length=3)
    ids, mask = ragged_prompts(3, longest=12, seed=5)
    calls, op = [], torch.ops.pass_ext.layer_stack.default

    def drafts():
        recorded = Recorded(method)
        sampled = dict(rule="rejection", temperature=1.0, seeds=[1, 2, 3])
        generate(target, ids, recorded, attention_mask=mask, max_new_tokens=24, eos_token_id=[], **sampled)
        return recorded

    monkeypatch.setattr(fused, "_stack", lambda *arguments: calls.append(1) or op(*arguments))
    got = drafts()
    counted = len(calls)
    method.head.layers[0].mlp.register_forward_hook(lambda *_: None)
    expected = drafts()
    assert counted > 10 and len(calls) == counted
    assert got.tokens() == expected.tokens()


def test_nothing_is_computed_while_drafting_pauses(target, method, monkeypatch):
    taken, true = [], Head.take

    def take(self, states):
        taken.append(len(states))
        return true(self, states)

    monkeypatch.setattr(Head, "take", take)
    ids, mask = ragged_prompts(3, longest=12, seed=5)
    recorded = Recorded(method, pace=PauseAt(range(2, 12)))
    generate(target, ids, recorded, attention_mask=mask, max_new_tokens=24, eos_token_id=[])
    drafted = sum(any(parts) for _, parts in recorded.steps)
    assert len(taken) == drafted < len(recorded.steps) - 8 and max(taken[1:]) >= 30


def test_the_plan_of_a_head_is_that_which_it_follows(target, method, monkeypatch):
    """A call of the head takes a tenth of one of the model."""
    seconds = {True: (0.01, 0.02), False: (0.1, 0.2)}
    monkeypatch.setattr(
        planning, "measured_times", lambda model, **_: StepTimes((1, 64), seconds[isinstance(model, Head)])
    )
    method = replace(method, length="auto", hit_rates=[[0.95]] * 3)
    planned = plan(target, method)
    assert planned.tree == Tree.chain(3) and planned.tokens_per_call == pytest.approx(1 + 0.95 + 0.95**2 + 0.95**3)
    recorded = Recorded(method)
    generate(target, torch.tensor([[5, 6, 7, 8]]), recorded, max_new_tokens=4, eos_token_id=[])
    assert next(map(len, recorded.tokens())) == 2, "as many as the text still takes"
    with pytest.raises(ValueError, match="got a Eagle3 with a tree of its own"):
        plan(target, replace(method, length=3))
    with pytest.raises(TypeError, match="must be a model, got Eagle3: a head drafts from the model's states"):
        calibrate(target, method, [[1, 2, 3]])
