"""Puts the stand-ins in place if SGLang is installed here; without it the tests skip."""

import importlib.metadata

try:
    importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError:
    pass
else:
    from integrations.engines.sglang import stand_ins

    stand_ins.install()
