"""``eagle_sample``: takes the place of SGLang's function of this name, which verifies the drafts of EAGLE, NEXTN, STANDALONE,
FROZEN_KV_MTP, NGRAM and UNO.

Ours decides from logits. A sampled request is sampled on a CPU too, where SGLang takes the arg-max, and min-p is applied, which
SGLang's verification leaves out. Whatever we cannot honour goes to SGLang's own function, with one warning.
"""

from __future__ import annotations

import inspect
import logging
from functools import cache
from typing import Any

from torch import Tensor

from pass_ext.decoding.sampling import BatchSampling
from pass_ext.integrations.plugin import missing_kernels
from pass_ext.integrations.sglang.rules import rule_of_step, rule_refusal
from pass_ext.integrations.sglang.verification import Drafts, verify
from pass_ext.ops.common.rules import RULES

MOST_NODES = 1024
"""The nodes of a request that the accept step takes."""
_log = logging.getLogger(__name__)


def refusal(spec: Any, drafts: Drafts, logits: Tensor, rule: str, *, has_watermark: bool, keeps_states: bool) -> str:
    """The reason why our accept step cannot take this step, or "".

    Args:
        spec: SGLang's ``get_spec()``, the server's arguments about speculation.
        has_watermark: a request of the batch has a watermark.
        keeps_states: the model has layers that keep a state.
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
    if keeps_states:
        return "the model has layers that keep a state, with which nobody has seen this run"
    if drafts.tokens.shape[1] > MOST_NODES:
        return f"--speculative-num-draft-tokens is more than {MOST_NODES}"
    if drafts.drawn and not drafts.is_chain:
        return "drafts with distributions are not a chain"
    if drafts.drawn and (drafts.probs is None or drafts.probs.shape[-1] != logits.shape[-1]):
        return "the drafts' distributions are missing, or not over the target's vocabulary"
    return rule_refusal(rule, drafts.drawn, drafts.is_chain)


def eagle_sample(
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    uno_target_max_top_k: int | None = None,
    *,
    watermark_state: Any = None,
    watermark_full_mask: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """SGLang's arguments and results: predict ``[B * N]``, each request's number of tokens (its accepted drafts and the added
    one), and accept_index ``[B, max_tree_depth]``, all int32.
    """
    from sglang.srt.runtime_context import get_spec

    if not batch.forward_mode.is_idle():
        spec, sampling_info = get_spec(), batch.sampling_info
        drafts = drafts_of(verify_input, len(batch.seq_lens), bool(spec.speculative_use_rejection_sampling))
        rule = rule_of_step(drafts.drawn, bool(spec.speculative_use_block_verification))
        has_watermark = watermark_state is not None and sampling_info.has_watermark_candidates
        keeps_states = hasattr(getattr(batch, "req_to_token_pool", None), "mamba_pool")
        logits = logits_output.next_token_logits
        reason = refusal(spec, drafts, logits, rule, has_watermark=has_watermark, keeps_states=keeps_states)
        if not reason:
            _say_once(rule)
            logits = processed_logits(logits_output, sampling_info, grammar_mask, verify_input.draft_token_num)
            sampling = sampling_of(sampling_info)
            predict, accept_index, accepted = verify(logits, drafts, batch.seq_lens, sampling, rule)
            if not sampling.is_greedy:
                _broadcast(predict, accept_index, accepted)
            return predict, accepted + 1, accept_index
        _warn_once(reason)
    result: tuple[Tensor, Tensor, Tensor] = _sglangs_own()(
        verify_input,
        batch,
        logits_output,
        grammar_mask,
        uno_target_max_top_k,
        watermark_state=watermark_state,
        watermark_full_mask=watermark_full_mask,
    )
    return result


def drafts_of(verify_input: Any, batch: int, rejection: bool) -> Drafts:
    """The drafts in an ``EagleVerifyInput`` or ``NgramVerifyInput``; ``rejection``: the server samples by rejection."""
    nodes = verify_input.draft_token_num
    drawn = rejection and nodes > 1
    return Drafts(
        tokens=verify_input.draft_token.reshape(batch, nodes),
        retrieve_index=verify_input.retrieve_index,
        first_child=verify_input.retrieve_next_token,
        next_sibling=verify_input.retrieve_next_sibling,
        max_depth=verify_input.max_tree_depth - 1,
        branching=verify_input.tree_topk,
        drawn=drawn,
        probs=verify_input.draft_probs if drawn else None,
    )


def sampling_of(info: Any) -> BatchSampling:
    """The parameters in a ``SamplingBatchInfo``. SGLang writes a greedy request as top_k 1, so that is temperature 0."""
    if info.is_all_greedy:
        return BatchSampling(None, None, None, None, None)
    return BatchSampling(
        temperature=info.temperatures.view(-1).masked_fill(info.top_ks <= 1, 0.0),
        top_k=info.top_ks if info.need_top_k_sampling else None,
        top_p=info.top_ps if info.need_top_p_sampling else None,
        min_p=info.min_ps if info.need_min_p_sampling else None,
        seeds=info.sampling_seed,
    )


def processed_logits(logits_output: Any, info: Any, grammar_mask: Any, nodes: int) -> Tensor:
    """The logits after SGLang's own processors, in place: SGLang computes log-probabilities from them later."""
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
    from sglang.srt.utils.async_probe import sanitize_nan_logits

    logits: Tensor = logits_output.next_token_logits
    sanitize_nan_logits(logits, "verify: target model logits")
    if info.acc_additive_penalties is not None:
        logits.add_(info.acc_additive_penalties.repeat_interleave(nodes, dim=0))
    if info.acc_scaling_penalties is not None:
        apply_scaling_penalties(logits, info.acc_scaling_penalties.repeat_interleave(nodes, dim=0))
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(nodes, dim=0))
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    return logits


def _broadcast(*tensors: Tensor) -> None:
    """Rank 0's decisions on every rank, as SGLang does it: the last bits of logits may differ, and so do fresh seeds."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    group = parallel.attn_tp_group if is_dp_attention_enabled() else parallel.tp_group
    if group.world_size > 1:
        for tensor in tensors:
            group.broadcast(tensor, src=0)


def _sglangs_own() -> Any:
    """The replaced function: SGLang's registry keeps it after its wrapper."""
    from sglang.srt.speculative import eagle_utils

    return inspect.unwrap(eagle_utils.eagle_sample)


@cache
def _warn_once(reason: str) -> None:
    _log.warning("pass_ext: %s; SGLang's own eagle_sample verifies such steps", reason)


@cache
def _say_once(rule: str) -> None:
    _log.info(
        "pass_ext: verifies drafts in the place of sglang.srt.speculative.eagle_utils.eagle_sample, rule %s (%s)",
        rule,
        RULES[rule],
    )
