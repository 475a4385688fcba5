"""vLLM's ``rejection_sample_method="synthetic"`` with pass_ext: drafts are accepted by coins of vLLM's
``synthetic_acceptance_rates``, and the token after them is the target's own. For measurements of speed alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, arange

from pass_ext.decoding.accept.synthetic import SyntheticAcceptance
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.integrations.vllm.sampling.chains import PackedChains


def synthetic_of(vllm_config: Any) -> SyntheticAcceptance | None:
    """The coins of an engine; None unless its configuration asks for them."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.rejection_sample_method != "synthetic":
        return None
    return SyntheticAcceptance(list(speculative.synthetic_acceptance_rates))


def accept_by_coins(
    synthetic: SyntheticAcceptance,
    chains: PackedChains,
    logits: Tensor,
    tokens: Tensor,
    sampling: BatchSampling,
    positions: Tensor,
) -> Tensor:
    """The tokens that one step gives to each request, as ``accept_chains`` returns them."""
    places = arange(chains.width, device=logits.device)
    spines = places.where(places <= chains.draft_counts[:, None], -1)
    emitted = synthetic.along(logits, tokens, spines, chains.cu_nodes[:-1].long(), positions, sampling).emitted
    emitted[:, 0].clamp_(min=0)
    return emitted
