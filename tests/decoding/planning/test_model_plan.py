"""The tree that a draft model fills: planned from its hit rates, or from assumed ones."""

import pytest
import torch

import pass_ext
from pass_ext import MultiCandidate, NGram, Speculative, Tree
from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.drafting.from_draft_model import model_drafter
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.planning import plan as planning
from pass_ext.decoding.planning.step_times import StepTimes
from pass_ext.decoding.sampling import SamplingParams

pytest.importorskip("transformers")
from support.small_models import small_model


@pytest.fixture
def models(monkeypatch):
    """A target, and a draft whose calls cost almost nothing."""
    times = {"llama": StepTimes((1, 64), (1.0001, 1.0064)), "qwen2": StepTimes((1, 64), (1e-4, 64e-4))}
    monkeypatch.setattr(planning, "measured_times", lambda model, graphs: times[model.name])
    return packed_model(small_model("llama")), small_model("qwen2", seed=5, num_hidden_layers=1)


def planned(target, method, rule):
    sampling = SamplingParams(temperature=1.0).for_batch(1, torch.device("cpu"))
    return model_drafter(method, DraftContext(target, [[5, 9, 11]], sampling, rule))


def test_the_planned_tree_is_the_one_that_is_filled(models):
    target, draft = models
    sure = [[0.9, 0.05], [0.8, 0.1]]
    assert planned(target, Speculative(draft, "auto", hit_rates=sure), "rejection").tree == Tree.chain(2)
    filled = planned(target, MultiCandidate(draft, "auto", hit_rates=sure), "rejection").tree
    assert filled == Tree.from_branching((2, 2)), "every candidate is worth its row"


def test_no_drafts_where_they_gain_nothing(models):
    target, draft = models
    hopeless = [[1e-6, 1e-6]]
    for method in (Speculative(draft, "auto", hit_rates=hopeless), MultiCandidate(draft, "auto", hit_rates=hopeless)):
        assert planned(target, method, "rejection") is None


def test_the_approximate_rule_has_candidates_always(models):
    """Its texts differ from plain decoding, so it must not become plain decoding where drafts gain nothing."""
    target, draft = models
    method = MultiCandidate(draft, "auto", hit_rates=[[1e-6, 1e-6]])
    assert planned(target, method, "longest_branch").tree == Tree.chain(1)
    assert planned(target, method, "rejection") is None


def test_the_face_returns_the_plan_that_generate_follows(models):
    target, draft = models
    method = MultiCandidate(draft, "auto", hit_rates=[[0.9, 0.05], [0.8, 0.1]])
    made = pass_ext.drafting.plan(target, method)
    assert made.tree == Tree.from_branching((2, 2)) and "2 calls" in str(made)
    assert len(pass_ext.drafting.plan(target, method, requests=16).tree) < 7, "64 rows for 16 requests"


def test_methods_without_a_plan_are_refused(models):
    target, draft = models
    with pytest.raises(TypeError, match=r"method must be PaSS\(...\), .*, Eagle3\(...\) or Mtp\(...\), got NGram"):
        pass_ext.drafting.plan(target, NGram())
    with pytest.raises(ValueError, match="got a Speculative with a tree of its own"):
        pass_ext.drafting.plan(target, Speculative(draft, 3))
    with pytest.raises(ValueError, match="requests must be a whole number, 1 or more, got 0"):
        pass_ext.drafting.plan(target, Speculative(draft, "auto"), requests=0)
