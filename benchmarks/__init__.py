"""Benchmarks of pass_ext: ops, whole texts, the kernels' machine code, and records of GPU runs. See README.md.

This module is imported before torch, so it pins torch's threads: two threads that are not pinned may share a core for
milliseconds.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
"""The cores of this process. Pinning leaves its main thread one of them, and child processes inherit that one."""
if "cuda" not in sys.argv and "torch" not in sys.modules:
    os.environ.setdefault("OMP_PROC_BIND", "true")
