"""``replace_at_start``: the sampling functions of a worker are replaced when it knows its configuration, before its runner."""

from __future__ import annotations

import functools
from typing import Any

from pass_ext.integrations.vllm.sampling import runner_v1, runner_v2
from pass_ext.integrations.vllm.sampling.options import refuse_options
from pass_ext.integrations.vllm.versions import LOG


def replace_at_start() -> None:
    """Wraps ``WorkerWrapperBase.init_device``. A second call changes nothing."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    start = WorkerWrapperBase.init_device
    if hasattr(start, "__wrapped__"):
        return

    @functools.wraps(start)
    def init_device(wrapper: Any) -> Any:
        replace_for(wrapper.vllm_config)
        return start(wrapper)

    WorkerWrapperBase.init_device = init_device


def replace_for(vllm_config: Any) -> None:
    """Replaces the functions of the runner that this configuration chooses; ValueError for an option that is refused."""
    settings = refuse_options(vllm_config)
    is_v2 = vllm_config.use_v2_model_runner
    replaced = runner_v2.replace_sampling(settings.rule) if is_v2 else runner_v1.replace_sampling()
    LOG.info("pass_ext replaces %s; rule %r", replaced, settings.rule)
