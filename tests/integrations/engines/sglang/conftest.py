"""Puts the stand-ins for what SGLang imports and a CPU cannot load in place, before any test imports SGLang."""

from integrations.engines.sglang import stand_ins

stand_ins.install()
