"""What a step costs the host: a model is searched for changes only after code of the caller's has run."""

import pytest

pytest.importorskip("transformers")

from support.small_models import ragged_prompts, small_model

from pass_ext import Drafter, NGram, Plain, Session, Tree, generate
from pass_ext.decoding.models.fused_forward import FusedForward
from pass_ext.drafting import Candidates, Proposal


class FromOutside(Drafter):
    """Proposes one token; runs ``act`` in its third step."""

    max_depth = 1

    def __init__(self, act=None):
        self.steps, self.act = 0, act

    def drafters(self, context):
        return [self]

    def propose(self, batch):
        self.steps += 1
        if self.act is not None and self.steps == 3:
            self.act()
        return Proposal([Candidates(Tree.chain(1), [5]) if levels else None for levels in batch.levels])


def run(model, method, **options):
    session = Session(model, run_ahead=False)
    prompt = ragged_prompts(1, longest=9)[0]
    return generate(model, prompt, method, max_new_tokens=12, session=session, eos_token_id=[], **options)


@pytest.mark.parametrize(
    ("method", "options", "searches"),
    [
        (Plain(), {}, False),
        (NGram(), {}, False),
        (FromOutside(), {}, True),
        (Plain(), {"logits_processor": lambda ids, logits: logits}, True),
        (Plain(), {"stopping": lambda ids, scores: False}, True),
    ],
)
def test_a_model_is_searched_for_changes_after_code_of_the_callers(monkeypatch, method, options, searches):
    searched, is_current = [], FusedForward.is_current
    monkeypatch.setattr(FusedForward, "is_current", lambda self: searched.append(self) or is_current(self))
    model = small_model("llama")
    run(model, method, **options)
    searched.clear()
    stats = run(model, method, **options).stats
    assert len(searched) == (stats.model_calls if searches else 1)


def test_a_hook_that_a_drafter_registers_runs():
    model, seen = small_model("llama"), []
    layer = model.model.layers[0]
    run(model, FromOutside())
    run(model, FromOutside(lambda: layer.register_forward_hook(lambda *arguments: seen.append(1))))
    assert seen
