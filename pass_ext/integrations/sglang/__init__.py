"""pass_ext inside SGLang: our accept step in the place of its verification of drafts, if ``PASS_EXT_SGLANG=on``.

    PASS_EXT_SGLANG      = off | on     off, the default, leaves SGLang as it is
    PASS_EXT_SGLANG_RULE = a rule       of pass_ext.RULES; without it the server's own arguments choose (rules.py)

SGLang gives its plugins no arguments of a server, so both are environment variables. Importing this package does not import
SGLang.
"""

from __future__ import annotations

import importlib.metadata
import logging

from pass_ext.integrations.plugin import is_wanted, untested_version
from pass_ext.integrations.sglang.rules import unknown_rule

TESTED = ("0.5.23",)
"""SGLang's versions that the tests ran with. Its internals change between any two of them, so all three numbers must agree."""
TARGET = "sglang.srt.speculative.eagle_utils.eagle_sample"
"""The function that is replaced."""

_log = logging.getLogger(__name__)
_registered = False


def register() -> None:
    """The entry point: an engine calls it in each of its processes. It never raises."""
    global _registered
    if _registered or not is_wanted("sglang", _log):
        return
    try:
        reason = unknown_rule() or untested_version("sglang", importlib.metadata.version("sglang"), TESTED, numbers=3)
        if reason:
            _log.warning("pass_ext: %s; %s stays SGLang's own", reason, TARGET)
            return
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from pass_ext.integrations.sglang.eagle import eagle_sample

        HookRegistry.register(TARGET, eagle_sample, HookType.REPLACE)
        _registered = True
    except Exception:
        _log.warning("pass_ext: %s stays SGLang's own", TARGET, exc_info=True)
