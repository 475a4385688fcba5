"""The accept rules, and what each asks of the drafts that it judges.

Formulas: csrc/core/accept.h. Which one when: docs/ops/accept.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AcceptRule:
    """What a caller must know of a rule."""

    exact: bool
    """True: the text has the target's own distribution."""
    drafts: str
    """The mode of ``draft_sample`` that draws its candidates: "coupled", "without" or "with" replacement."""
    needs_draft_logits: bool
    """True: it divides by the distribution that the candidates were drawn from, so all of them must have one."""
    chains_only: bool = False

    @property
    def exactness(self) -> str:
        """As ``pass_ext.RULES`` says it."""
        return "exact" if self.exact else "approximate"


ACCEPT_RULES = {
    "coupled": AcceptRule(exact=True, drafts="coupled", needs_draft_logits=False),
    "rejection": AcceptRule(exact=True, drafts="without", needs_draft_logits=True),
    "rejection_with_replacement": AcceptRule(exact=True, drafts="with", needs_draft_logits=True),
    "block": AcceptRule(exact=True, drafts="without", needs_draft_logits=True, chains_only=True),
    "traversal": AcceptRule(exact=True, drafts="without", needs_draft_logits=True),
    "kseq": AcceptRule(exact=True, drafts="with", needs_draft_logits=True),
    "typical": AcceptRule(exact=False, drafts="coupled", needs_draft_logits=False),
}
"""By name, in the order of ``enum class Rule`` in csrc/core/accept.h."""

RULES = {name: rule.exactness for name, rule in ACCEPT_RULES.items()}
"""Every accept rule and its exactness: "exact" emits the target's own distribution, "approximate" does not."""
