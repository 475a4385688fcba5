"""The accept rules: whether each is exact, and which drafts it can verify.

Formulas: csrc/core/accept_walk.h. How to choose a rule: docs/ops/accept.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AcceptRule:
    """One accept rule: whether it is exact, and which drafts it can verify."""

    exact: bool
    """True: the text has the target's distribution."""
    drafts: str
    """The mode of ``draft_sample`` that draws candidates for it: "coupled", "top", or "without" or "with" replacement."""
    needs_draft_logits: bool
    """True: it divides by the distribution that the candidates were drawn from, so every candidate needs one."""
    chains_only: bool = False
    """True: it verifies chains only, no branching trees."""
    threshold: float = 0.0
    alpha: float = 0.0
    """``threshold`` and ``alpha`` for None; 0 for a rule that does not use them."""

    @property
    def exactness(self) -> str:
        """The rule's entry in ``pass_ext.RULES``."""
        return "exact" if self.exact else "approximate"


ACCEPT_RULES = {
    "coupled": AcceptRule(exact=True, drafts="coupled", needs_draft_logits=False),
    "rejection": AcceptRule(exact=True, drafts="without", needs_draft_logits=True),
    "rejection_with_replacement": AcceptRule(exact=True, drafts="with", needs_draft_logits=True),
    "block": AcceptRule(exact=True, drafts="without", needs_draft_logits=True, chains_only=True),
    "traversal": AcceptRule(exact=True, drafts="without", needs_draft_logits=True),
    "kseq": AcceptRule(exact=True, drafts="with", needs_draft_logits=True),
    "typical": AcceptRule(exact=False, drafts="coupled", needs_draft_logits=False, threshold=0.09, alpha=0.3),
    "coupled_inverse": AcceptRule(exact=True, drafts="top", needs_draft_logits=False),
    "adaptive_rejection": AcceptRule(exact=False, drafts="without", needs_draft_logits=True, alpha=0.3),
    "joint": AcceptRule(exact=False, drafts="without", needs_draft_logits=True, threshold=0.5),
}
"""The rules by name, in the order of ``enum class Rule`` in csrc/core/accept.h: ops pass a rule as its index."""

RULES = {name: rule.exactness for name, rule in ACCEPT_RULES.items()}
"""Every accept rule and its exactness: "exact" emits the target's distribution, "approximate" does not."""
