"""What a drafting method of your own is made of, and what the built-in ones take.

``Drafter`` and ``DraftingMethod``, the protocols, are at the top of ``pass_ext``; docs/guide/speculative.md shows a method.
"""

from pass_ext.decoding.drafting.candidates import Batch, Candidates, Proposal
from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.planning.calibration import calibrate
from pass_ext.decoding.planning.plan import plan
from pass_ext.decoding.requests.corpus import Corpus
from pass_ext.decoding.synthetic import SyntheticAcceptance
from pass_ext.modules.decision import DecisionModel, DraftLevel
from pass_ext.modules.exit_adapter import ExitAdapter
from pass_ext.ops.recall import recall_scores

__all__ = [
    "Batch",
    "Candidates",
    "Corpus",
    "DecisionModel",
    "DraftContext",
    "DraftLevel",
    "ExitAdapter",
    "Proposal",
    "SyntheticAcceptance",
    "calibrate",
    "plan",
    "recall_scores",
]
