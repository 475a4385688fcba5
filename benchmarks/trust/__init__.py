"""Figures of trust: what the checks of this repository find, counted. docs/trust.md shows them.

Each module measures one thing and its ``measure()`` returns JSON values; `python -m benchmarks.trust NAME` writes
benchmarks/results/trust/NAME.json.
"""

import sys

from benchmarks import ROOT

sys.path.append(str(ROOT / "tests"))  # enumerations and random cases; at the end: an installed pass_ext stays
