"""Benchmarks of pass_ext, one bench_<column>.py per kernel column, and the record of what ran on a GPU. See README.md.

Imported before torch, so the place to pin its threads: unpinned, two of them may share a core for milliseconds.
"""

import os
import sys

if "cuda" not in sys.argv and "torch" not in sys.modules:
    os.environ.setdefault("OMP_PROC_BIND", "true")
