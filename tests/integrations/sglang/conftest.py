"""``engine``: the modules of SGLang 0.5.23 that the plugin reads, made up, so that its tests need no SGLang."""

import enum
import importlib.metadata
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

import pass_ext.integrations.sglang as plugin
from pass_ext.integrations.sglang import eagle


class Group:
    """A tensor-parallel group that records its broadcasts."""

    def __init__(self, world_size):
        self.world_size, self.sent = world_size, []

    def broadcast(self, tensor, src):
        self.sent.append((tensor, src))


class Engine:
    """What a test sets and what it sees."""

    def __init__(self):
        self.spec = SimpleNamespace(
            speculative_use_rejection_sampling=False,
            speculative_use_block_verification=False,
            speculative_accept_threshold_single=1.0,
            speculative_accept_threshold_acc=1.0,
        )
        self.parallel = SimpleNamespace(tp_group=Group(1), attn_tp_group=Group(1))
        self.dp_attention = False
        self.version = "0.5.23"
        self.calls = []  # of SGLang's own eagle_sample
        self.hooks = []  # registered

    def eagle_sample(
        self,
        verify_input,
        batch,
        logits_output,
        grammar_mask=None,
        uno_target_max_top_k=None,
        *,
        watermark_state=None,
        watermark_full_mask=True,
    ):
        arguments = verify_input, batch, logits_output, grammar_mask, uno_target_max_top_k
        self.calls.append((*arguments, watermark_state, watermark_full_mask))
        return "SGLang's own"

    def modules(self):
        """name -> what the module holds"""

        def scale(logits, scaling):
            logits[:] = logits.where(logits < 0, logits / scaling).where(logits >= 0, logits * scaling)

        return {
            "sglang.srt.runtime_context": {"get_spec": lambda: self.spec, "get_parallel": lambda: self.parallel},
            "sglang.srt.speculative.eagle_utils": {"eagle_sample": self.eagle_sample},
            "sglang.srt.speculative.spec_utils": {"SIMULATE_ACC_LEN": -1.0},
            "sglang.srt.layers.dp_attention": {"is_dp_attention_enabled": lambda: self.dp_attention},
            "sglang.srt.sampling.penaltylib.repetition_penalty": {"apply_scaling_penalties": scale},
            "sglang.srt.utils.async_probe": {
                "sanitize_nan_logits": lambda logits, text: logits.nan_to_num_(-1e30, 1e30, -1e30)
            },
            "sglang.srt.plugins.hook_registry": {
                "HookType": enum.Enum("HookType", ["BEFORE", "AFTER", "AROUND", "REPLACE"]),
                "HookRegistry": SimpleNamespace(register=lambda *hook: self.hooks.append(hook)),
            },
        }


@pytest.fixture
def engine(monkeypatch, caplog):
    """A made-up SGLang, and a plugin that has not run."""
    engine, version = Engine(), importlib.metadata.version
    for name, contents in engine.modules().items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            if end == len(parts) or not isinstance(sys.modules.get(".".join(parts[:end])), MadeUp):
                monkeypatch.setitem(sys.modules, ".".join(parts[:end]), MadeUp(".".join(parts[:end])))
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[".".join(parts[:end])])
        vars(sys.modules[name]).update(contents)
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: engine.version if name == "sglang" else version(name)
    )
    monkeypatch.setattr(plugin, "_registered", False)
    for variable in ("PASS_EXT_SGLANG", "PASS_EXT_SGLANG_RULE"):
        monkeypatch.delenv(variable, raising=False)
    eagle._warn_once.cache_clear()
    eagle._say_once.cache_clear()
    caplog.set_level(logging.INFO, "pass_ext.integrations.sglang")
    return engine


class MadeUp(ModuleType):
    """A module of the made-up SGLang; a package as well, so that ``import`` finds modules below it."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
