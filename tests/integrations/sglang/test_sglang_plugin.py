"""The entry point: nothing without PASS_EXT_SGLANG=on, one hook with it, and a warning instead of an error."""

import importlib.metadata
import subprocess
import sys

import pytest
import torch
from support.paths import ROOT

import pass_ext.integrations.sglang as plugin
from pass_ext.integrations.plugin import missing_kernels, untested_version
from pass_ext.integrations.sglang import eagle


@pytest.mark.parametrize("value", [None, "", "off", "OFF"])
def test_off_is_the_default_and_touches_nothing(engine, monkeypatch, caplog, value):
    if value is not None:
        monkeypatch.setenv("PASS_EXT_SGLANG", value)
    plugin.register()
    assert engine.hooks == [] and caplog.records == []


def test_on_replaces_one_function_once(engine, monkeypatch):
    monkeypatch.setenv("PASS_EXT_SGLANG", "on")
    plugin.register()
    plugin.register()
    ((target, hook, kind),) = engine.hooks
    assert target == "sglang.srt.speculative.eagle_utils.eagle_sample"
    assert hook is eagle.eagle_sample and kind.name == "REPLACE"


def test_an_unknown_value_is_a_warning_and_off(engine, monkeypatch, caplog):
    monkeypatch.setenv("PASS_EXT_SGLANG", "yes")
    plugin.register()
    assert engine.hooks == [] and "PASS_EXT_SGLANG must be on or off, got 'yes'" in caplog.text


@pytest.mark.parametrize("version", ["0.5.22", "0.5.230", "0.5.24", "0.6.23", "1.0", "0.0.0.dev0", "none"])
def test_other_versions_are_refused_by_name(engine, monkeypatch, caplog, version):
    monkeypatch.setenv("PASS_EXT_SGLANG", "on")
    engine.version = version
    plugin.register()
    assert engine.hooks == []
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"tested with sglang 0.5.23, and this is {version}" in record.getMessage()


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+cu130"])
def test_rebuilds_of_a_tested_version_are_taken(engine, monkeypatch, version):
    monkeypatch.setenv("PASS_EXT_SGLANG", "on")
    engine.version = version
    plugin.register()
    assert len(engine.hooks) == 1


def test_an_unknown_rule_is_refused_at_start_up(engine, monkeypatch, caplog):
    monkeypatch.setenv("PASS_EXT_SGLANG", "on")
    monkeypatch.setenv("PASS_EXT_SGLANG_RULE", "greedy")
    plugin.register()
    assert engine.hooks == []
    assert "PASS_EXT_SGLANG_RULE must be one of coupled, rejection" in caplog.text and "'greedy'" in caplog.text


def test_no_error_leaves_register(engine, monkeypatch, caplog):
    """A metadata that cannot be read, or a registry that refuses, is a warning."""
    monkeypatch.setenv("PASS_EXT_SGLANG", "on")

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    plugin.register()
    assert "stays SGLang's own" in caplog.text and "PackageNotFoundError" in caplog.text
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.23")
    monkeypatch.setattr(sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry, "register", missing)
    plugin.register()
    assert engine.hooks == [] and len(caplog.records) == 2


def test_importing_it_imports_no_sglang():
    code = "import sys, pass_ext.integrations.sglang as p; p.register(); assert 'sglang' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_entry_point_is_this_function():
    assert 'pass_ext = "pass_ext.integrations.sglang:register"' in (ROOT / "pyproject.toml").read_text()


def test_versions_are_compared_by_as_many_numbers_as_asked():
    assert untested_version("x", "1.2.3", ["1.2.9"]) == ""
    assert untested_version("x", "1.2.3", ["1.2.9"], numbers=3) != ""
    assert untested_version("x", "1.2", ["1.2.9"], numbers=3) != ""
    assert untested_version("x", "1.20", ["1.2"]) != ""


def test_devices_without_kernels():
    assert missing_kernels("cpu") == ""
    assert "xpu" in missing_kernels("xpu")
    if torch.version.cuda is None:
        assert "torch" in missing_kernels("cuda") or "CUDA" in missing_kernels("cuda")
