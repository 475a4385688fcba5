"""The emulator from Python: ``with session({...}) as machine: machine.<launch>(...)``. See README.md."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from support.native import ROOT, build_module, quote
from torch import Tensor

HERE = Path(__file__).parent
# These hold kernels: every access is reported.
CHECKED = (
    "primitives.cpp",
    "planted_faults.cpp",
    *sorted(f"launches/{path.name}" for path in HERE.glob("launches/*.cpp")),
)
PLAIN = ("engine.cpp", "memory.cpp", "critical_path.cpp", "hooks.cpp", "module.cpp")


@cache
def load() -> ModuleType:
    """The compiled module, built if need be."""
    # Plain ones first: the linker takes the first copy of std::string and its like, and the engine must not check itself.
    # -O1 keeps accesses as the kernel wrote them; the instrumentation is the sanitizer's, the functions it calls are ours.
    sources = {HERE / name: "-O2" for name in PLAIN} | {
        HERE / name: "-O1 -fsanitize=thread -fsanitize-coverage=trace-pc -fno-threadsafe-statics "
        f"-include {quote(HERE / 'checked_memory.h')}"
        for name in CHECKED
    }
    return build_module(
        "_emulator",
        sources,
        f"-g1 -Wall -Wno-unknown-pragmas -I{quote(HERE)} -I{quote(HERE / 'launches')} -I{quote(ROOT / 'csrc')}",
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
