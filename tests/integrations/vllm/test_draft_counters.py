"""The counters that vLLM exports, with look-ahead slots among the drafts: guesses count, slots do not."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

VOCABULARY = 100


class Scheduler:
    """vLLM 0.32.0's way from drafts to counters, in short."""

    def __init__(self):
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY))
        self.metrics = {
            "a": RequestSpecDecodeMetrics(),
            "b": RequestSpecDecodeMetrics(),
            "c": RequestSpecDecodeMetrics(),
        }

    def update_from_output(self, scheduler_output, model_runner_output):
        stats = None
        for request, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            accepted = model_runner_output[request]
            struck = scheduler_output.num_invalid_spec_tokens
            stats = self.make_spec_decoding_stats(
                stats,
                num_draft_tokens=len(drafts),
                num_accepted_tokens=accepted,
                num_invalid_spec_tokens=struck,
                request_id=request,
            )
            judged = len(drafts) - (struck or {}).get(request, 0)
            self.metrics[request].observe(num_draft_tokens=judged, num_accepted=accepted, detailed=False)
        return stats

    def make_spec_decoding_stats(
        self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
    ):
        stats = spec_decoding_stats or SimpleNamespace(drafts=0, tokens=0, accepted=0)
        stats.drafts += 1
        stats.tokens += num_draft_tokens - (num_invalid_spec_tokens or {}).get(request_id, 0)
        stats.accepted += num_accepted_tokens
        return stats


class RequestSpecDecodeMetrics:
    def __init__(self):
        self.steps = 0

    def observe(self, num_draft_tokens, num_accepted, detailed=False):
        self.steps += 1


@pytest.fixture
def replaced(monkeypatch):
    modules = {"vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler}}
    modules["vllm.v1.metrics.stats"] = {"RequestSpecDecodeMetrics": RequestSpecDecodeMetrics}
    for name, members in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        vars(sys.modules[name]).update(members)
    for owner, method in ((Scheduler, "update_from_output"), (Scheduler, "make_spec_decoding_stats"),
                          (RequestSpecDecodeMetrics, "observe")):  # fmt: skip
        monkeypatch.setattr(owner, method, getattr(owner, method))
    from pass_ext.integrations.vllm.replacements import replace_counters

    replace_counters()
    return replace_counters


def output(**drafts):
    return SimpleNamespace(scheduled_spec_decode_tokens=drafts, num_invalid_spec_tokens=None)


def test_guesses_count_and_slots_do_not(replaced):
    scheduler = Scheduler()
    stats = scheduler.update_from_output(
        output(a=[7, 8, VOCABULARY, VOCABULARY + 1], b=[VOCABULARY, VOCABULARY + 1], c=[1, 2, 3]),
        {"a": 1, "b": 0, "c": 3},
    )
    assert (stats.drafts, stats.tokens, stats.accepted) == (2, 5, 4)
    assert [scheduler.metrics[name].steps for name in "abc"] == [1, 0, 1]


def test_drafts_that_a_grammar_struck_out_stay_struck_out(replaced):
    scheduler_output = output(a=[7, -1, -1], b=[VOCABULARY])
    scheduler_output.num_invalid_spec_tokens = {"a": 2}
    stats = Scheduler().update_from_output(scheduler_output, {"a": 1, "b": 0})
    assert (stats.drafts, stats.tokens, stats.accepted) == (1, 1, 1)


def test_slots_alone_make_no_counters(replaced):
    assert Scheduler().update_from_output(output(b=[VOCABULARY]), {"b": 0}) is None


def test_replacing_twice_is_replacing_once(replaced):
    first = Scheduler.update_from_output
    replaced()
    assert Scheduler.update_from_output is first
