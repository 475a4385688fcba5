"""Stand-ins for what SGLang imports on a CPU and the tests do not need for real.

sgl_kernel     compiled kernels: the folder beside this file, made of SGLang's own Triton kernels in Triton's interpreter
torchvision    image preprocessing: empty modules
"""

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType


class Empty(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision and all modules in it, if no real one is installed: it comes last."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


def install():
    """Puts the stand-ins in place, before anything of ``sglang.srt`` is imported."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ["TRITON_INTERPRET"] = "1"
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # remembered before the stand-in can be seen: transformers must not use it
    sys.path.insert(0, str(Path(__file__).parent))
    sys.meta_path.append(EmptyModules())
