"""Benchmarks of pass_ext: ops, whole texts, the kernels' machine code, and the record of what ran on a GPU. See README.md.

Imported before torch, so the place to pin its threads: unpinned, two of them may share a core for milliseconds.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
"""Those that this process was given; pinning will leave its main thread only one of them, and child processes inherit that."""
if "cuda" not in sys.argv and "torch" not in sys.modules:
    os.environ.setdefault("OMP_PROC_BIND", "true")
