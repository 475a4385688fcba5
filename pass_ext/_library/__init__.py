"""Loads the two compiled libraries and reports what is loaded.

``_C.so`` (schemas, CPU kernels) must load. ``_C_cuda.so`` is loaded if torch has CUDA. If it is not loaded, ``status()`` gives
the reason, and an op raises with that reason when it gets a CUDA tensor.
"""

import ctypes
import hashlib
import logging
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch

from pass_ext._library.elf import damage_of

CPU_ISAS: tuple[str, ...] = ("portable", "avx2", "avx512", "avx512_bf16")
"""Levels of instruction sets of the CPU kernels on this kind of processor, the best last."""
if platform.machine() == "aarch64":
    CPU_ISAS = ("portable", "neon_dot")
CPU_ONLY = {
    "layer_pack": "it checks weights for layer_stack, which is for the CPU",
    "layer_stack": "this op is for the CPU; on a GPU attention_tree goes between layer_before_attention and _after_attention",
    "linear_packed": "packed weights are for the CPU; on a GPU load the model with weights='dense', or by a quantised class of "
    "transformers",
}
"""Ops without a CUDA kernel, and the reason."""
_HERE = Path(__file__).parent.parent
_LIMITS = f"{', '.join(CPU_ISAS)}, amx or amx_emulated"
_REBUILD = "pip install --no-build-isolation -e ."
_log = logging.getLogger("pass_ext")
_debug = os.environ.get("PASS_EXT_DEBUG", "0") == "1"


@dataclass(frozen=True)
class Status:
    """The compiled kernels that this process uses."""

    cpu_isa: str
    """Instruction set of the CPU kernels: one of ``CPU_ISAS``."""
    cpu_products: str
    """What multiplies bfloat16 weights on the CPU: fp32, pairs of them or Intel's amx, whichever was measured to be the
    fastest here; or amx_emulated, in tests."""
    cuda_loaded: bool
    cuda_reason: str
    """The reason why the CUDA kernels are not loaded; empty if they are."""
    cuda_architectures: tuple[str, ...]
    """The GPU architectures in the binary; empty for a CPU-only build."""
    cuda_compiler: str | None
    """The version of nvcc that built the CUDA kernels; None for a CPU-only build."""
    sanitize: str
    """The sanitizers that the CPU kernels were built with (setup.py's SANITIZE); empty in every ordinary build."""


def set_debug(enabled: bool) -> bool:
    """Turns value checks of CUDA tensors, such as ids in range, on or off; returns the former setting.

    Off by default, because the checks synchronise with the GPU: with them ops are slow and cannot be captured in a CUDA
    graph. They also report a kernel that failed before the op as such, not as a failure of the op. The environment
    variable ``PASS_EXT_DEBUG=1`` turns them on from the start.
    """
    global _debug
    former, _debug = _debug, enabled
    if _cuda_native is not None:
        _cuda_native.pass_ext_check_earlier_cuda_errors(int(enabled))
    return former


def debug_enabled() -> bool:
    """True after ``set_debug(True)``, or with ``PASS_EXT_DEBUG=1``."""
    return _debug


def status() -> Status:
    """The loaded CPU and CUDA kernels: their instruction set and architectures, or the reason why CUDA kernels are missing."""
    info = _build_info()
    if not (_HERE / "_C_cuda.so").exists():  # a failed build, or someone, deleted it after _build_info was written
        info = info | {"architectures": (), "cuda": None}
    return Status(
        cpu_isa=_native.pass_ext_cpu_isa().decode(),
        cpu_products=_native.pass_ext_cpu_products().decode(),
        cuda_loaded=not _cuda_reason,
        cuda_reason=_cuda_reason,
        cuda_architectures=tuple(info.get("architectures", ())),
        cuda_compiler=info.get("cuda"),
        sanitize=info.get("sanitize", ""),
    )


def limit_cpu_isa(name: str) -> str:
    """Limits the CPU kernels to an instruction set from now on; returns the one in use. For tests and benchmarks.

    ``"amx"`` allows all and multiplies bfloat16 weights by AMX where there is one, ``"amx_emulated"`` as AMX would, slowly.
    ``""`` restores the limit that the process started with: ``PASS_EXT_CPU_ISA``, or none.
    """
    if _native.pass_ext_limit_cpu_isa((name or os.environ.get("PASS_EXT_CPU_ISA", "")).encode()) != 0:
        raise ValueError(f"CPU instruction set must be {_LIMITS}, or '', got {name!r}")
    return str(_native.pass_ext_cpu_isa().decode())


def thread_count() -> int:
    """The threads of the CPU kernels: ``torch.get_num_threads()``, but no more than the quota of a container fills."""
    return int(_native.pass_ext_thread_count())


def always_pool(enabled: bool) -> bool:
    """Runs every CPU job in the pool of csrc/cpu/workers.cpp, as on a busy machine; returns the former setting. For tests."""
    return bool(_native.pass_ext_always_pool(int(enabled)))


def release_layers(key: int) -> None:
    """Lets go of the weights whose ``layer_pack`` key begins at this address."""
    _native.pass_ext_release_layers(key)


def op_names() -> list[str]:
    """The names of all operators in the namespace, without overload names."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    prefix = NAMESPACE + "::"
    return sorted({name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)})


@lru_cache
def kernels_hash(device: str) -> str:
    """A hash of the libraries that compute on this type of device; it changes with every build of other code."""
    names = ["_C.so"] if device == "cpu" else ["_C.so", "_C_cuda.so"]
    digest = hashlib.sha256()
    for path in (_HERE / name for name in names):
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()[:16]


def _build_info() -> dict[str, Any]:
    try:
        return vars(import_module(".._build_info", __package__))
    except ImportError:
        return {}


def _has_kernels(device: str) -> bool:
    # Checks one op only: listing all ops takes longer than the rest of the import.
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::lookahead_embed", device))


def _path_of(name: str) -> Path:
    """A compiled library; on the Hugging Face Hub a build has one for all devices, and that build's name."""
    return next(_HERE.glob("*.abi3.so"), _HERE / name)


def _misfit(path: Path, error: OSError) -> str:
    from pass_ext._library.misfit import misfit

    return misfit(str(path), torch.__version__, str(error.__cause__ or error), _REBUILD)


def _load_cpu() -> ctypes.CDLL:
    path = _path_of("_C.so")
    if not path.exists() and sys.platform != "linux":
        raise ImportError(f"pass_ext is for Linux, and this is {platform.system()}")
    if not path.exists():
        raise ImportError(f"pass_ext is not built: {path} is missing. Run: {_REBUILD}")
    if damage := damage_of(path):
        raise ImportError(f"{path} {damage}. Build it again: {_REBUILD}")
    try:
        torch.ops.load_library(path)
        native = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(_misfit(path, error)) from None
    if not hasattr(native, "pass_ext_namespace"):
        raise ImportError(f"{path} is another library: it has no pass_ext kernels. Build it again: {_REBUILD}")
    for text in ("pass_ext_namespace", "pass_ext_cpu_isa", "pass_ext_cpu_products"):
        if not hasattr(native, text):
            raise ImportError(f"{path} is of other code than this Python: it has no {text}. Build it again: {_REBUILD}")
        getattr(native, text).restype = ctypes.c_char_p
    native.pass_ext_limit_cpu_isa.argtypes = [ctypes.c_char_p]
    native.pass_ext_release_layers.argtypes, native.pass_ext_release_layers.restype = [ctypes.c_void_p], None
    limit = os.environ.get("PASS_EXT_CPU_ISA", "")
    if native.pass_ext_limit_cpu_isa(limit.encode()) != 0:
        raise ImportError(f"PASS_EXT_CPU_ISA must be {_LIMITS}, got {limit!r}")
    return native


def _load_cuda() -> str:
    """Loads the CUDA library; returns '', or the reason why it was not loaded."""
    path = _HERE / "_C_cuda.so"
    if not path.exists() and _has_kernels("CUDA"):  # one library for all devices
        return ""
    if not path.exists():
        return (
            "this build of pass_ext has no CUDA kernels. Install the CUDA toolkit (nvcc), and rebuild in a checkout of "
            f"pass_ext: PASS_EXT_CUDA=1 {_REBUILD}"
        )
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) has no CUDA; pass_ext's CUDA kernels are built and need a torch with CUDA"
    if damage := damage_of(path):
        return f"{path} {damage}. Build it again: {_REBUILD}"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        _log.info("CUDA kernels not loaded from %s", path, exc_info=error)
        return _misfit(path, error)
    if not _has_kernels("CUDA"):
        return f"{path} is another library: it has no pass_ext kernels. Build it again: {_REBUILD}"
    return ""


def _refusal(op: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise RuntimeError(f"pass_ext::{op}: got a CUDA tensor, but {reason}")

    return refuse


def _refuse_cuda_tensors(reason: str) -> torch.library.Library:
    """Registers CUDA kernels that raise: for every op if no CUDA kernels are loaded, else for the ops without one."""
    library = torch.library.Library(NAMESPACE, "IMPL")
    for op in op_names() if reason else CPU_ONLY:
        library.impl(op, _refusal(op, CPU_ONLY.get(op, reason)), "CUDA")
    return library


_native = _load_cpu()
NAMESPACE: str = _native.pass_ext_namespace().decode()
"""``pass_ext``; on the Hugging Face Hub each build has its own, so that several may be loaded beside each other."""
ops = getattr(torch.ops, NAMESPACE)
_cuda_reason = _load_cuda()
_cuda_native = None if _cuda_reason else ctypes.CDLL(str(_path_of("_C_cuda.so")))
_refusals = _refuse_cuda_tensors(_cuda_reason)  # a global: torch removes the kernels when the Library is freed
