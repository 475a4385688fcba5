"""The entry point in vLLM, without vLLM: off, on, untested versions, refused options, and errors that must not escape."""

import logging
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from pass_ext.integrations import vllm as plugin
from pass_ext.integrations.vllm import replacements
from pass_ext.integrations.vllm.settings import TESTED, refuse_options

ORIGINAL = "vLLM's own"


@pytest.fixture
def vllm(monkeypatch):
    """A stand-in for vLLM with the classes whose functions are replaced."""
    names = {
        "vllm.engine.arg_utils": dict(EngineArgs=type("EngineArgs", (), dict(create_engine_config=create))),
        "vllm.v1.worker.worker_base": dict(WorkerWrapperBase=type("WorkerWrapperBase", (), dict(init_device=start))),
        "vllm.v1.worker.gpu_model_runner": dict(GPUModelRunner=type("GPUModelRunner", (), dict(_sample=ORIGINAL))),
        "vllm.v1.core.sched.scheduler": dict(Scheduler=type("Scheduler", (), dict.fromkeys(COUNTERS, keep))),
        "vllm.v1.metrics.stats": dict(
            RequestSpecDecodeMetrics=type("RequestSpecDecodeMetrics", (), dict(observe=keep))
        ),
        "vllm.v1.worker.gpu.sample": dict(sampler=SimpleNamespace(gumbel_sample=ORIGINAL)),
        "vllm.v1.worker.gpu.spec_decode": dict(rejection_sampler=SimpleNamespace(rejection_sample=ORIGINAL)),
    }
    folders = {name.rsplit(".", depth)[0] for name in names for depth in range(1, 4)}
    for name in (*folders, *names):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(names.get(name, {}))
    sys.modules["vllm"].__version__ = TESTED[0]
    return SimpleNamespace(
        **{name: value for values in names.values() for name, value in values.items()}, root=sys.modules["vllm"]
    )


COUNTERS = ("update_from_output", "make_spec_decoding_stats")


def keep():
    """A function of vLLM's counters."""


def start(wrapper):
    return f"{ORIGINAL} start of {wrapper.vllm_config.name}"


def create(arguments, usage_context=None, headless=False):
    return arguments.config


def config(is_v2=False, speculative=None, **changes):
    return SimpleNamespace(
        name="engine", additional_config=changes.pop("additional_config", {}), use_v2_model_runner=is_v2,
        speculative_config=SimpleNamespace(**{"method": "ngram", "rejection_sample_method": "standard", **(speculative or {})}),
        model_config=SimpleNamespace(use_fp64_gumbel=changes.pop("use_fp64_gumbel", False)), **changes,
    )  # fmt: skip


@pytest.mark.parametrize("value", [None, "off", "OFF", ""])
def test_off_touches_nothing(vllm, monkeypatch, value):
    monkeypatch.delenv("PASS_EXT_VLLM", raising=False)
    if value is not None:
        monkeypatch.setenv("PASS_EXT_VLLM", value)
    plugin.register()
    assert vllm.WorkerWrapperBase.init_device is start and vllm.GPUModelRunner._sample == ORIGINAL
    assert vllm.EngineArgs.create_engine_config is create
    assert vllm.Scheduler.update_from_output is keep and vllm.RequestSpecDecodeMetrics.observe is keep


@pytest.mark.parametrize("version", [*TESTED, TESTED[0] + "+cpu", TESTED[0].rsplit(".", 1)[0] + ".7"])
def test_on_replaces_when_a_worker_starts_and_says_so_once(vllm, monkeypatch, caplog, version):
    monkeypatch.setenv("PASS_EXT_VLLM", "on")
    vllm.root.__version__ = version
    plugin.register()
    plugin.register()  # an engine may load its plugins twice
    assert vllm.GPUModelRunner._sample == ORIGINAL
    with caplog.at_level(logging.INFO):
        wrapper = vllm.WorkerWrapperBase()
        wrapper.vllm_config = config()
        assert wrapper.init_device() == f"{ORIGINAL} start of engine"
    assert vllm.GPUModelRunner._sample.__module__ == "pass_ext.integrations.vllm.sampling.runner_v1"
    assert vllm.rejection_sampler.rejection_sample == ORIGINAL
    assert vllm.Scheduler.update_from_output.__wrapped__ is keep, "replaced once"
    assert caplog.text.count("pass_ext replaces GPUModelRunner._sample (runner V1); rule 'coupled'") == 1


def test_runner_v2(vllm):
    for rule in ("rejection", "coupled"):  # a second engine in the process has its own rule
        replacements.replace_for(config(is_v2=True, additional_config={"pass_ext": {"rule": rule}}))
        accept, draw = vllm.rejection_sampler.rejection_sample, vllm.sampler.gumbel_sample
        assert accept.rule == rule and accept.vllm == ORIGINAL and draw.vllm == ORIGINAL
    assert vllm.GPUModelRunner._sample == ORIGINAL


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "0.320.0", "dev"])
def test_untested_versions_are_refused_by_name(vllm, monkeypatch, caplog, version):
    monkeypatch.setenv("PASS_EXT_VLLM", "on")
    vllm.root.__version__ = version
    plugin.register()
    assert vllm.WorkerWrapperBase.init_device is start
    assert caplog.text.count(f"tested with vllm {', '.join(TESTED)}, and this is {version}; nothing is replaced") == 1


def test_errors_do_not_escape(vllm, monkeypatch, caplog):
    monkeypatch.setenv("PASS_EXT_VLLM", "on")
    del sys.modules["vllm.v1.worker.worker_base"].WorkerWrapperBase
    plugin.register()
    assert "pass_ext: nothing is replaced, because ImportError" in caplog.text


REFUSED = pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("speculative_config.rejection_sample_method='block'", dict(speculative=dict(rejection_sample_method="block"))),
        ("enable_adaptive_verification", dict(speculative=dict(enable_adaptive_verification=True))),
        ("watermark_config", dict(watermark_config=object())),
        ("use_fp64_gumbel", dict(use_fp64_gumbel=True)),
        ("rule must be one of", dict(additional_config={"pass_ext": {"rule": "fast"}})),
        ("'rules' is not one of rule, slots, pause", dict(additional_config={"pass_ext": {"rules": "coupled"}})),
    ],
)  # fmt: skip


@pytest.fixture
def start_of(vllm, monkeypatch):
    """Makes the configuration of an engine, as its first process does before it loads a model."""
    monkeypatch.setenv("PASS_EXT_VLLM", "on")
    plugin.register()
    plugin.register()
    assert vllm.EngineArgs.create_engine_config.__wrapped__ is create

    def start(config, additional_config):
        arguments = vllm.EngineArgs()
        arguments.config, arguments.additional_config = config, additional_config
        return arguments.create_engine_config("a server", headless=True)

    return start


@REFUSED
def test_options_are_refused_when_the_configuration_is_made(start_of, option, changes):
    right, wrong = config(), config(**changes)
    assert start_of(right, {}) is right
    with pytest.raises(ValueError, match=re.escape(option)):
        start_of(wrong, wrong.additional_config)


def test_settings_are_refused_before_vllm_looks_at_the_model(start_of):
    with pytest.raises(ValueError, match="rule must be one of"):
        start_of("not made yet", {"pass_ext": {"rule": "fast"}})


@REFUSED
def test_options_that_cannot_be_honoured(vllm, option, changes):
    with pytest.raises(ValueError, match=re.escape(option)):
        replacements.replace_for(config(**changes))
    assert vllm.GPUModelRunner._sample == ORIGINAL


def test_options_that_are_honoured():
    speculative = dict(rejection_sample_method="standard", enable_adaptive_verification=False)
    assert refuse_options(config(speculative=speculative, watermark_config=None)).rule == "coupled"
    assert refuse_options(config(speculative=dict(rejection_sample_method="synthetic"))).rule == "coupled"
    plain = config()
    plain.speculative_config = None
    assert refuse_options(plain).rule == "coupled"


def test_importing_the_plugin_imports_no_engine():
    code = "import sys, pass_ext.integrations.vllm as p; p.register(); print('vllm' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert out.stdout.strip() == "False"
