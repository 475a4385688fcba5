"""Tests of engines run in the environments of these engines (`make test-engines`) and are not collected elsewhere."""

from importlib.util import find_spec


def is_installed(engine):
    spec = find_spec(engine)  # a folder of tests of the same name has no origin
    return spec is not None and spec.origin is not None


collect_ignore = [engine for engine in ("vllm", "sglang") if not is_installed(engine)]
