"""The accept rules that ``generate`` takes: those of the ops, and "longest_branch", which only a decoding loop can follow.

A new rule of the ops belongs into ops/common/rules.py.
"""

from pass_ext.ops.common.rules import ACCEPT_RULES, AcceptRule

LONGEST_BRANCH = "longest_branch"
DECODING_RULES = {**ACCEPT_RULES, LONGEST_BRANCH: AcceptRule(exact=False, drafts="without", needs_draft_logits=True)}
