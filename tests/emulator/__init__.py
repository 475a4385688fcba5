"""The emulator from Python: ``with session({...}) as machine: machine.<plan>(...)``; the ops are in ops.py. See README.md."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from support.native import ROOT, build_module, quote
from torch import Tensor

HERE = Path(__file__).parent
NAMESPACE = "pass_ext_emulated"
CUDA = sorted(path for path in (ROOT / "csrc/cuda").glob("*.cu") if path.stem != "debug")
# These hold kernels: every access is reported.
CHECKED = (*(HERE / name for name in ("primitives.cpp", "planted_faults.cpp", "plans.cpp")), *CUDA)
PLAIN = (
    *(HERE / name for name in ("engine.cpp", "memory.cpp", "critical_path.cpp", "hooks.cpp", "module.cpp")),
    ROOT / "csrc/schema.cpp",
)
TORCH = Path(torch.__file__).parent


@cache
def load() -> ModuleType:
    """The compiled module, built if need be."""
    # Plain ones first: the linker takes the first copy of std::string and its like, and the engine must not check itself.
    # -O1 keeps accesses as the kernel wrote them; the instrumentation is the sanitizer's, the functions it calls are ours.
    sources = dict.fromkeys(PLAIN, "-O2") | {
        path: "-O1 -fsanitize=thread -fsanitize-coverage=trace-pc -fno-threadsafe-statics "
        f"-include {quote(HERE / 'checked_memory.h')}{' -x c++' if path.suffix == '.cu' else ''}"
        for path in CHECKED
    }
    return build_module(
        "_emulator",
        sources,
        f"-g1 -Wall -Wno-unknown-pragmas -I{quote(HERE)} -I{quote(ROOT / 'csrc')} "
        f"-isystem {quote(TORCH / 'include')} -DTORCH_TARGET_VERSION=0x020a000000000000 -DTORCH_EXTENSION_NAME={NAMESPACE}",
        f"-L{quote(TORCH / 'lib')} -ltorch_cpu",
    )


@contextmanager
def session(buffers: Mapping[str, tuple[Tensor, str]], seed: int = 0) -> Iterator[ModuleType]:
    """Declares what a launch may touch: name -> (tensor, "in" | "out" | "inout"), and in which order threads run.

    "in" may only be read; "out" is poisoned and may not be read before it is written; "inout" has its contents.
    """
    machine = load()
    machine.begin_session(seed)
    try:
        for name, (tensor, content) in buffers.items():
            if tensor.numel() > 0:
                extent = 1 + sum(
                    (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
                )
                machine.add_buffer(name, tensor.data_ptr(), extent * tensor.element_size(), content)
        yield machine
    finally:
        machine.end_session()
