"""What a drafting method of your own is made of, what the built-in ones take, and the methods that ``load_drafter`` gives.

``Drafter``, the protocol of a method's drafters, is at the top of ``pass_ext``; docs/guide/speculative.md shows a method.
"""

from pass_ext.decoding.drafting.candidates import Batch, Candidates, Proposal
from pass_ext.decoding.drafting.device_rows import DeviceRows, HostDecides
from pass_ext.decoding.drafting.drafter import DraftContext, DraftingMethod
from pass_ext.decoding.drafting.drafting import drafters_of
from pass_ext.decoding.drafting.heads.keep_mtp import keep_mtp
from pass_ext.decoding.methods import Assistant, DFlash, Eagle3, Mtp
from pass_ext.decoding.planning.calibration import calibrate
from pass_ext.decoding.planning.plan import plan
from pass_ext.decoding.requests.corpus import Corpus
from pass_ext.decoding.synthetic import SyntheticAcceptance
from pass_ext.modules.decision import DecisionModel, DraftLevel
from pass_ext.modules.exit_adapter import ExitAdapter
from pass_ext.ops.recall import recall_scores

__all__ = [
    "Assistant",
    "Batch",
    "Candidates",
    "Corpus",
    "DFlash",
    "DecisionModel",
    "DeviceRows",
    "DraftContext",
    "DraftLevel",
    "DraftingMethod",
    "Eagle3",
    "ExitAdapter",
    "HostDecides",
    "Mtp",
    "Proposal",
    "SyntheticAcceptance",
    "calibrate",
    "drafters_of",
    "keep_mtp",
    "plan",
    "recall_scores",
]
