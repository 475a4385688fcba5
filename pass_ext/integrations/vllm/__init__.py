"""pass_ext inside vLLM: the accept step in the place of its sampler, chosen by PASS_EXT_VLLM=on. docs/guide/vllm.md."""

from __future__ import annotations

from pass_ext.integrations import plugin
from pass_ext.integrations.vllm.versions import LOG, TESTED


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
        from pass_ext.integrations.vllm.sampling import worker

        worker.replace_at_start()
    except Exception as error:  # an engine must not die from a plugin
        LOG.warning("pass_ext: nothing is replaced, because %s: %s", type(error).__name__, error)
