"""The functions of vLLM that pass_ext replaces, each once a process.

A configuration is checked where it is made: an option that pass_ext cannot honour ends the engine's start in its first process.
No model is loaded then, and no worker has started. The sampling functions of a worker are replaced when it knows its
configuration, before its runner. vLLM's counters of drafts leave out look-ahead slots, which are no guesses:

    vllm:spec_decode_num_drafts       steps of a request that verified at least one guess
    vllm:spec_decode_num_draft_tokens guesses verified

vLLM subtracts from a request's drafts those that a grammar has struck out; slots join these. A step that verified no guess does
not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from pass_ext.integrations.vllm.sampling import runner_v1, runner_v2
from pass_ext.integrations.vllm.settings import LOG, Settings, check, refuse_options

_MARK = "replaced_by_pass_ext"


def replace_at_start() -> None:
    """Replaces what starts an engine and a worker, and the counters. A second call changes nothing."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    _replace(WorkerWrapperBase, "init_device", _with_our_sampling)
    replace_counters()
    _replace(EngineArgs, "create_engine_config", _checked)


def replace_counters() -> None:
    """Replaces three functions of vLLM's scheduler."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    _replace(Scheduler, "update_from_output", _without_slots)
    _replace(Scheduler, "make_spec_decoding_stats", _without_empty_drafts)
    _replace(RequestSpecDecodeMetrics, "observe", _without_empty_steps)


def replace_for(vllm_config: Any) -> None:
    """Replaces the functions of the runner that this configuration chooses; ValueError for an option that is refused."""
    settings = refuse_options(vllm_config)
    is_v2 = vllm_config.use_v2_model_runner
    replaced = runner_v2.replace_sampling(settings.rule) if is_v2 else runner_v1.replace_sampling()
    LOG.info("pass_ext replaces %s; rule %r", replaced, settings.rule)


def _replace(owner: type, name: str, around: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        replacement = wraps(original)(around(original))
        setattr(replacement, _MARK, True)
        setattr(owner, name, replacement)


def _with_our_sampling(start: Any) -> Any:
    def init_device(wrapper: Any) -> Any:
        replace_for(wrapper.vllm_config)
        return start(wrapper)

    return init_device


def _checked(create: Any) -> Any:
    def create_engine_config(engine: Any, *arguments: Any, **options: Any) -> Any:
        Settings.of(engine)  # first: vLLM looks at the model meanwhile, for as long as it takes to import vLLM again
        vllm_config = create(engine, *arguments, **options)
        check(vllm_config)
        return vllm_config

    return create_engine_config


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
