"""How drafts are judged: the rules by name, of the ops and of this folder, and accept functions."""

from __future__ import annotations

from typing import Any

from pass_ext.decoding.accept.function import AcceptFunction, DecodingRule, JudgedRows
from pass_ext.decoding.accept.longest_branch import LongestBranch
from pass_ext.ops.common.rules import ACCEPT_RULES

__all__ = ["DECODING_RULES", "AcceptFunction", "JudgedRows", "accept_function"]

DECODING_RULES: dict[str, DecodingRule] = {
    **{name: DecodingRule(**vars(rule), name=name) for name, rule in ACCEPT_RULES.items()},
    LongestBranch.name: LongestBranch(),
}
"""A new rule of the ops belongs into ops/common/rules.py."""


def accept_function(rule: Any) -> AcceptFunction:
    """The accept function that a caller asks for, by its name or itself."""
    if isinstance(rule, AcceptFunction):
        return rule
    if not isinstance(rule, str) or rule not in DECODING_RULES:
        raise ValueError(f"generate: rule must be one of {', '.join(DECODING_RULES)}, got {rule!r}")
    return DECODING_RULES[rule]
