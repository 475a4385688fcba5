"""vLLM's counters of drafts without look-ahead slots, which are no guesses.

    vllm:spec_decode_num_drafts       steps of a request that judged at least one guess
    vllm:spec_decode_num_draft_tokens guesses judged

vLLM subtracts from a request's drafts those that a grammar has struck out; slots join these. A step that judged no guess is not
counted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

_MARK = "replaced_by_pass_ext"


def replace_counters() -> str:
    """Replaces three functions of vLLM's scheduler in this process, once; returns their names."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    _replace(Scheduler, "update_from_output", _without_slots)
    _replace(Scheduler, "make_spec_decoding_stats", _without_empty_drafts)
    _replace(RequestSpecDecodeMetrics, "observe", _without_empty_steps)
    return "Scheduler.update_from_output, Scheduler.make_spec_decoding_stats and RequestSpecDecodeMetrics.observe"


def _replace(owner: type, name: str, around: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        replacement = wraps(original)(around(original))
        setattr(replacement, _MARK, True)
        setattr(owner, name, replacement)


def _without_slots(original: Any) -> Any:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        vocabulary = self.vllm_config.model_config.get_vocab_size()
        struck = dict(scheduler_output.num_invalid_spec_tokens or {})
        for request, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            if slots := sum(token >= vocabulary for token in drafts):
                struck[request] = struck.get(request, 0) + slots
        scheduler_output.num_invalid_spec_tokens = struck
        return original(self, scheduler_output, model_runner_output)

    return update_from_output


def _without_empty_drafts(original: Any) -> Any:
    def make_spec_decoding_stats(
        self: Any,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        if num_draft_tokens == (num_invalid_spec_tokens or {}).get(request_id, 0):
            return spec_decoding_stats
        return original(
            self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )

    return make_spec_decoding_stats


def _without_empty_steps(original: Any) -> Any:
    def observe(self: Any, num_draft_tokens: int, num_accepted: int, detailed: bool) -> None:
        if num_draft_tokens:
            original(self, num_draft_tokens=num_draft_tokens, num_accepted=num_accepted, detailed=detailed)

    return observe
