"""Checks that a library that was built elsewhere fits this GPU: `python -m benchmarks.gpu.prebuilt 9.0`.

With PASS_EXT_PREBUILT=1 no minute of a GPU goes into compiling: pass_ext/_C.so, _C_cuda.so, _build_info.py and build/variants/
are carried to its machine.
"""

from __future__ import annotations

import sys

from benchmarks.gpu.variants import VARIANTS, folder_of


def trouble(architecture: str, loaded: bool, reason: str, built: tuple[str, ...]) -> str:
    """A sentence about why the library cannot be used; empty if it can."""
    if not loaded:
        return f"the CUDA library must be built and carried to pass_ext/_C_cuda.so: {reason}"
    if architecture in (name.removesuffix("+PTX") for name in built):
        return ""
    if any(name.endswith("+PTX") for name in built):
        return f"the library has only PTX for {architecture}, which each process would compile: build it for {architecture}"
    return f"the library must have machine code for {architecture}, it has {', '.join(built)}"


def main() -> int:
    """Entry point of `python -m benchmarks.gpu.prebuilt`."""
    import pass_ext

    status = pass_ext.status()
    found = trouble(sys.argv[1], status.cuda_loaded, status.cuda_reason or "", tuple(status.cuda_architectures))
    variants = [name for name in VARIANTS if (folder_of(name) / "pass_ext" / "_C_cuda.so").exists()]
    print(f"prebuilt: {found or 'fits'}; variants: {', '.join(variants) or 'none'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
