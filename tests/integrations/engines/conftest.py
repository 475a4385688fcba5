"""Tests of engines run in the environments of these engines (`make test-engines`) and are not collected elsewhere.

With ``--sittings FILE`` they go on where they stopped: a test that passes gets a line in the file, its seconds and its name,
and is not run again. make deletes the file where a source has changed.
"""

import time
from importlib.util import find_spec
from pathlib import Path

import pytest


def is_installed(engine):
    spec = find_spec(engine)  # a folder of tests of the same name has no origin
    return spec is not None and spec.origin is not None


collect_ignore = [engine for engine in ("vllm", "sglang") if not is_installed(engine)]


def pytest_addoption(parser):
    parser.addoption("--sittings", type=Path, help="the file of the tests that have passed")


def passed(config):
    """Test -> seconds."""
    file = config.getoption("--sittings", None)  # unknown where all tests run
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    return {name: float(seconds) for seconds, name in (line.split(" ", 1) for line in lines)}


def pytest_collection_modifyitems(config, items):
    before = passed(config)
    for item in items:
        if item.nodeid in before:
            item.add_marker(pytest.mark.skip(reason=f"passed before, in {before[item.nodeid]:.0f} s"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    failed, begun = item.session.testsfailed, time.monotonic()
    result = yield
    file, is_new = item.config.getoption("--sittings", None), item.get_closest_marker("skip") is None
    if file is not None and is_new and item.session.testsfailed == failed:
        with file.open("a") as lines:
            lines.write(f"{time.monotonic() - begun:.1f} {item.nodeid}\n")
    return result


def pytest_terminal_summary(terminalreporter, config):
    if found := passed(config):
        terminalreporter.write_line(
            f"In all sittings {len(found)} tests have passed, in {sum(found.values()) / 60:.0f} minutes"
        )
