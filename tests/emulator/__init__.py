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
TRACED = " -fsanitize-coverage=trace-pc"
TORCH = Path(torch.__file__).parent


# True, set before the module is loaded: critical paths count the instructions of all kernels, not of primitives.cpp alone.
# A call at every basic block makes the tests' kernels slower.
counts_instructions = False


@cache
def load() -> ModuleType:
    """The compiled module, built if need be."""
    # Plain ones first: the linker takes the first copy of std::string and its like, and the engine must not check itself.
    # At -O2, which leaves no copy of std::max and its like: kernels would read shared memory in it unchecked.
    # -O1 keeps accesses as the kernel wrote them; the instrumentation is the sanitizer's, the functions it calls are ours.
    sources = dict.fromkeys(PLAIN, "-O2") | {
        path: f"-O1 -fsanitize=thread{TRACED if counts_instructions or path.stem == 'primitives' else ''} "
        f"-fno-threadsafe-statics -include {quote(HERE / 'checked_memory.h')}{' -x c++' if path.suffix == '.cu' else ''}"
        for path in CHECKED
    }
    return build_module(
        "_emulator",
        sources,
        f"-Wall -Wno-unknown-pragmas -I{quote(HERE)} -I{quote(ROOT / 'csrc')} "
        f"-isystem {quote(TORCH / 'include')} -DTORCH_TARGET_VERSION=0x020a000000000000 -DTORCH_EXTENSION_NAME={NAMESPACE}",
        f"-L{quote(TORCH / 'lib')} -ltorch_cpu",
        place="_emulator_counting" if counts_instructions else "_emulator",
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
