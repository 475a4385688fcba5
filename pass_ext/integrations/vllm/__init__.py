"""pass_ext inside vLLM, if ``PASS_EXT_VLLM=on``: the accept step in the place of its sampler, and ``PaSS``, a proposer.

docs/guide/vllm.md.
"""

from __future__ import annotations

from typing import Any

from pass_ext.integrations import plugin
from pass_ext.integrations.vllm.settings import LOG, TESTED


def register() -> None:
    """The entry point: an engine calls it in each of its processes. It never raises."""
    if not plugin.is_wanted("vllm", LOG):
        return
    try:
        import vllm

        refusal = plugin.untested_version("vllm", vllm.__version__, TESTED)
        if refusal:
            LOG.warning("%s; nothing is replaced", refusal)
            return
        from pass_ext.integrations.vllm.replacements import replace_at_start

        replace_at_start()
    except Exception as error:  # an engine must not die from a plugin
        LOG.warning("pass_ext: nothing is replaced, because %s: %s", type(error).__name__, error)


def __getattr__(name: str) -> Any:
    if name == "PaSS":  # loaded at first use: the plugin is imported in every process, and most need no decoder
        from pass_ext.integrations.vllm.proposer import PaSS

        return PaSS
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
