"""Lightning attention (MiniMax-01), in a model's shadow: a state for each head, which fades by a constant.

    S_t = e^(-slope) S_(t-1) + k_t v_t^T        o_t = S_t^T q_t

The module computes this in code of its own, by blocks of one text. In the shadow its forward is ours, which gives the rows of a
call to ``recurrent_tree``. It is compared first, on a few rows as one text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.equivalence import difference_of
from pass_ext.decoding.models.features.feature import Feature
from pass_ext.decoding.models.modules import modules_of
from pass_ext.decoding.models.shadow import own_call
from pass_ext.decoding.models.step_states import StatePlace, StepStates
from pass_ext.ops.state import state_commit_

_COMPARED = 6  # rows


class Lightning(Feature):
    def unserved(self, model: Any) -> str | None:
        for part in _parts(model):
            form = (
                part.num_attention_heads,
                part.head_dim,
                part.block_size,
                part.out_proj.weight.dtype,
                type(part.act_fn),
            )
            difference = difference_of(type(part).forward, form, partial(_computes_alike, part))
            if difference is not None:
                return (
                    f"has {type(part).__name__}, which {difference}; pass_ext knows the layer of transformers 5.24, so it "
                    "cannot decode this model"
                )
        return None

    def untrained(self, model: Any, length: int) -> str | None:
        return "its lightning attention keeps states in a cache of its own class" if _parts(model) else None

    def states(self, model: Any) -> Mapping[nn.Module, list[StatePlace]]:
        return {part: [_place(part)] for part in _parts(model)}

    def computed_by(self, model: Any) -> list[str]:
        return sorted({type(part).__name__ for part in _parts(model)})

    def serve(self, shadow: Any, embedded: Callable[[Tensor], Tensor]) -> None:
        for part in _parts(shadow):
            part.forward = torch.compiler.disable(partial(_attended, _states_of_call, part))


def _parts(model: nn.Module) -> list[Any]:
    return [part for part in modules_of(model) if {"slope_rate", "diagonal_decay"} <= part._buffers.keys()]


def _place(part: Any) -> StatePlace:
    return StatePlace(part.layer_idx, "plain")


def _states_of_call() -> Any:
    return own_call("this attention is").attend.states


def _attended(
    states: Callable[[], Any], part: Any, /, hidden_states: Tensor, *_: Any, **others: Any
) -> tuple[Tensor, None]:
    """``[1, N, d]`` -> ``[1, N, d]``."""
    heads = part.act_fn(part.qkv_proj(hidden_states))[0].unflatten(-1, (part.num_attention_heads, -1)).float()
    q, k, v = (x.contiguous() for x in heads.split(part.head_dim, 2))
    fades = -part.slope_rate.view(1, -1).float().expand(len(q), -1).contiguous()
    out = states().recurrent(_place(part), q, k, v, fades, None, form="additive")
    normed = part.norm(out.flatten(1).to(hidden_states.dtype)[None])
    return part.out_proj(torch.sigmoid(part.output_gate(hidden_states)) * normed), None


@torch.no_grad()
def _computes_alike(part: Any) -> bool:
    """Compares a few rows as one text, output and final state."""
    like = part.out_proj.weight
    hidden = torch.randn(1, _COMPARED, len(like), generator=torch.Generator().manual_seed(0)).to(like)
    parents = torch.arange(-1, _COMPARED - 1, dtype=torch.int32, device=like.device)
    states, bounds, path = list[Tensor](), parents.new_tensor([0, _COMPARED]), (parents + 1)[None]
    step = StepStates(states, [], 1, parents, bounds, is_first=True, is_prompt=True)
    ours, theirs = _attended(lambda: step, part, hidden)[0], part(hidden, None, None)
    state_commit_(states, step.updates, bounds, path, path[:, -1])
    most = 1e-4 if like.dtype == torch.float32 else 5e-2
    return all(
        torch.allclose(mine.float(), its.float(), rtol=0.0, atol=most * float(its.abs().max()) + 1e-6)
        for mine, its in zip((ours, states[0]), theirs, strict=True)
    )
