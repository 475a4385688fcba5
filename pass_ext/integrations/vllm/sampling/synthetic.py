"""vLLM's ``rejection_sample_method="synthetic"`` with pass_ext: drafts are accepted by coins of vLLM's
``synthetic_acceptance_rates``, and the token behind them is the target's own. For measurements of speed alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.loop.synthetic import Synthetic
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.integrations.vllm.sampling.chains import PackedChains


def synthetic_of(vllm_config: Any, device: torch.device) -> Synthetic | None:
    """The coins of an engine; None unless its configuration asks for them."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.rejection_sample_method != "synthetic":
        return None
    rates = list(speculative.synthetic_acceptance_rates)
    return Synthetic(rates, device, len(rates))


def accept_by_coins(
    synthetic: Synthetic,
    chains: PackedChains,
    logits: Tensor,
    tokens: Tensor,
    sampling: BatchSampling,
    positions: Tensor,
) -> Tensor:
    """The tokens that one step gives to each request, as ``accept_chains`` returns them."""
    places = torch.arange(chains.width, device=logits.device)
    spines = places.where(places <= chains.draft_counts[:, None], -1)
    emitted = synthetic.accept(logits, tokens, spines, chains.cu_nodes[:-1].long(), positions, sampling).emitted
    emitted[:, 0].clamp_(min=0)
    return emitted
