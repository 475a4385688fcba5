"""``refusal``: the steps that SGLang's own ``eagle_sample`` verifies, because ours would not do as the server was told."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pass_ext.integrations.plugin import missing_kernels
from pass_ext.integrations.sglang.rules import rule_refusal
from pass_ext.integrations.sglang.verification import Drafts

MOST_NODES = 1024
"""The nodes of a request that the accept step takes."""


def refusal(spec: Any, drafts: Drafts, logits: Tensor, has_watermark: bool, rule: str) -> str:
    """The reason why our accept step cannot take this step, or "".

    Args:
        spec: SGLang's ``get_spec()``, the server's arguments about speculation.
        has_watermark: a request of the batch has a watermark.
    """
    from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

    if reason := missing_kernels(logits.device.type):
        return reason
    if SIMULATE_ACC_LEN > 0:
        return "SGLANG_SIMULATE_ACC_LEN is set"
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if getattr(spec, name) != 1.0:
            return f"--{name.replace('_', '-')} is not 1, and asks for another distribution than the target's"
    if has_watermark:
        return "a request has a watermark"
    if drafts.tokens.shape[1] > MOST_NODES:
        return f"--speculative-num-draft-tokens is more than {MOST_NODES}"
    if drafts.drawn and not drafts.is_chain:
        return "drafts with distributions are not a chain"
    if drafts.drawn and (drafts.probs is None or drafts.probs.shape[-1] != logits.shape[-1]):
        return "the drafts' distributions are missing, or not over the target's vocabulary"
    return rule_refusal(rule, drafts.drawn, drafts.is_chain)
