"""The accept step in vLLM's runner V2: ``rejection_sample`` by ``accept_tree``, and ``gumbel_sample`` by the same noise.

vLLM hands over logits that it has processed: divided by the temperature, and -inf where a filter removed a token. The draft's
logits are those before the temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pass_ext.integrations.vllm.settings import LOG
from pass_ext.ops.accept import accept_chain, accept_tree
from pass_ext.ops.common.rules import ACCEPT_RULES
from pass_ext.ops.draft import draft_sample

# vLLM's optional arguments after num_speculative_steps, in its order
OPTIONS = (
    "synthetic_conditional_rates", "use_fp64", "use_block_verification", "contexts", "watermarking",
    "watermarking_skip_mask", "watermark_key", "fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k",
)  # fmt: skip
FLY_DETAILS = ("fly_entropy_threshold", "fly_entropy_top_k")  # mean nothing while fly_window_size is 0


def is_off(value: Any) -> bool:
    """Whether an optional argument has the value that leaves it out."""
    return value is None or value is False or (isinstance(value, int) and value == 0)


def replace_sampling(rule: str) -> str:
    """Replaces both functions in the modules that call them, and says so in words. A second call changes the rule only."""
    from vllm.v1.worker.gpu.sample import sampler
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    accept, draw = rejection_sampler.rejection_sample, sampler.gumbel_sample
    rejection_sampler.rejection_sample = PackedAccept(rule, accept.vllm if isinstance(accept, PackedAccept) else accept)
    sampler.gumbel_sample = SeededDraw(rule, draw.vllm if isinstance(draw, SeededDraw) else draw)
    return "rejection_sample and gumbel_sample (runner V2)"


class PackedAccept:
    """``rejection_sample`` of runner V2 by one rule. What it cannot honour goes to vLLM's own function, with one warning."""

    def __init__(self, rule: str, vllm: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.rule, self.vllm = rule, vllm
        self._warned: set[str] = set()

    def __call__(
        self,
        target_logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        cu_num_logits: Tensor,
        pos: Tensor,
        idx_mapping: Tensor,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        temperature: Tensor,
        seed: Tensor,
        num_speculative_steps: int,
        *others: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """(sampled int64 ``[B, num_speculative_steps + 1]``, num_sampled int32 ``[B]``).

        Args:
            target_logits: ``[N, V]``, each request's rows back to back, the root's first.
            draft_logits: ``[max_num_reqs, num_speculative_steps, V]`` or None.
            draft_sampled: ``[N]``: each row's input token; a draft of -1 is rejected.
            pos: ``[N]``: the text position of each row's input token.
            idx_mapping, expanded_idx_mapping: each request's and each row's place in the tensors ``[max_num_reqs, …]``.
        """
        unknown = self._cannot_honour(others, options)
        if unknown:
            if unknown not in self._warned:
                self._warned.add(unknown)
                LOG.warning("pass_ext: %s is set, so vLLM's own rejection_sample decides", unknown)
            return self.vllm(
                target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, expanded_idx_mapping,
                expanded_local_pos, temperature, seed, num_speculative_steps, *others, **options,
            )  # fmt: skip
        warm, roots = temperature[idx_mapping], cu_num_logits[:-1]
        draft: dict[str, Any] = {}
        if ACCEPT_RULES[self.rule].needs_draft_logits:
            if draft_logits is None:
                draft = dict(draft_logits=target_logits[:1], draft_rows=torch.full_like(expanded_local_pos, -1))
            else:
                vocabulary = min(target_logits.shape[-1], draft_logits.shape[-1])  # either may be padded
                target_logits, draft_logits = target_logits[:, :vocabulary], draft_logits[..., :vocabulary]
                # No draft follows a last row, so its row of the draft is never read.
                step = expanded_local_pos.clamp(max=draft_logits.shape[1] - 1)
                rows = expanded_idx_mapping * draft_logits.shape[1] + step
                draft = dict(draft_logits=draft_logits.flatten(0, 1), draft_rows=rows)
                draft |= dict(draft_temperature=warm)
        result = accept_tree(
            target_logits, draft_sampled, expanded_local_pos - 1, cu_num_logits, num_speculative_steps, rule=self.rule,
            temperature=(warm > 0).float(), seeds=seed[idx_mapping], positions=pos[roots] + 1, **draft,
        )  # fmt: skip
        result.emitted[:, 0].clamp_(min=0)  # a root without a usable row gives token 0: vLLM needs one
        return result.emitted, result.num_accepted + 1

    @staticmethod
    def _cannot_honour(others: tuple[Any, ...], options: dict[str, Any]) -> str:
        """The name of an option that changes the decision, or ""."""
        for name, value in {**dict(zip(OPTIONS, others, strict=False)), **options}.items():
            if name not in FLY_DETAILS and not is_off(value):
                return name
        return ""


class SeededDraw:
    """``gumbel_sample`` of runner V2 for the target's own tokens, steps without drafts: with the noise of rule
    "coupled_inverse" if that is the rule, else with that of "coupled"."""

    def __init__(self, rule: str, vllm: Callable[..., Tensor]) -> None:
        self.rule, self.vllm = rule, vllm

    def __call__(
        self,
        logits: Tensor,
        expanded_idx_mapping: Tensor,
        temperature: Tensor,
        seed: Tensor,
        pos: Tensor,
        apply_temperature: bool,
        is_drafting: bool,
        *others: Any,
        **options: Any,
    ) -> Tensor:
        """int64 ``[N]``: a token for each row of processed logits."""
        if apply_temperature or is_drafting or not all(map(is_off, [*others, *options.values()])):
            return self.vllm(
                logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting, *others, **options
            )
        law: dict[str, Any] = dict(
            temperature=(temperature[expanded_idx_mapping] > 0).float(),
            seeds=seed[expanded_idx_mapping],
            positions=pos + 1,
        )
        if self.rule == "coupled_inverse":
            lone = torch.zeros(len(logits), 0, dtype=torch.int64, device=logits.device)
            tokens = accept_chain(logits[:, None], lone, rule=self.rule, **law).emitted
        else:
            tokens, _ = draft_sample(logits, 1, mode="coupled", **law)
        return tokens[:, 0].clamp(min=0)
