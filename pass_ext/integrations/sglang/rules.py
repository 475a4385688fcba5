"""The accept rule of one step: the user's, or the one that the server's arguments ask for.

    --speculative-use-rejection-sampling     rejection   SGLang keeps the distributions that its drafts were drawn from
    --speculative-use-block-verification     block       the same
    without                                  coupled     the drafts are fixed proposals, whatever drew them

For fixed proposals "coupled" and "rejection" accept equally often, as often as SGLang's own tree verification.
"""

from __future__ import annotations

import os

from pass_ext.ops.common.rules import ACCEPT_RULES, RULES

RULE_VARIABLE = "PASS_EXT_SGLANG_RULE"
"""The environment variable with the user's rule."""
NEED_DRAFT_LOGITS = ("rejection_with_replacement", "kseq")
"""Rules that cannot verify fixed proposals alone."""


def unknown_rule() -> str:
    """ "" if the user's rule exists or there is none, else the error."""
    rule = os.environ.get(RULE_VARIABLE, "")
    return f"{RULE_VARIABLE} must be one of {', '.join(RULES)}, got {rule!r}" if rule and rule not in RULES else ""


def rule_of_step(drawn: bool, block: bool) -> str:
    """The user's rule, or without one the server's.

    Args:
        drawn: the drafts come with the distributions that they were drawn from.
        block: ``--speculative-use-block-verification``.
    """
    if rule := os.environ.get(RULE_VARIABLE, ""):
        return rule
    if not drawn:
        return "coupled"
    return "block" if block else "rejection"


def rule_refusal(rule: str, drawn: bool, chain: bool) -> str:
    """The reason why the rule cannot verify these drafts, or ""."""
    if rule in NEED_DRAFT_LOGITS and not drawn:
        return f"rule {rule} needs --speculative-use-rejection-sampling"
    if ACCEPT_RULES[rule].chains_only and not chain:
        return f"rule {rule} verifies chains only, and --speculative-eagle-topk is not 1"
    return ""
