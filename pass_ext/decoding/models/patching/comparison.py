"""``believed_plan``: a model's plan, if our ops give the model's own numbers, bit for bit.

Compared are logits and the new keys and values of some rows of a call, at their positions and at far ones: a model that scales
something by the length of the text differs there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.models.packed import Attend, StepAttend
from pass_ext.decoding.models.patching.model_plan import ModelPlan, Unlike, layers_of, plan_of
from pass_ext.decoding.models.patching.own_forward import OwnForward

MACHINE = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors that say nothing about the model."""
Forward = Callable[[Tensor, Tensor, Attend], Tensor]
_COMPARED = 8  # rows
_FAR = 1 << 20  # positions


class _Noting:
    """Attends, and notes the options of each layer."""

    def __init__(self, attend: StepAttend) -> None:
        self.attend, self.options = attend, list[dict[str, Any]]()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.options.append(options)
        return self.attend(layer, q, k, v, **options)


def believed_plan(
    model: Any,
    theirs: Forward,
    tail: Callable[[Tensor], Tensor],
    rows: Tensor,
    positions: Tensor,
    attend: StepAttend,
) -> ModelPlan:
    """The plan of a model. Raises ``Unlike`` with the reason if there is none.

    Args:
        theirs: the model's own forward of rows ``[N, d]`` at positions ``[N]``.
        tail: as ``OwnForward`` takes it.
        rows, positions, attend: of a call that has just run.
    """
    layers_of(model)  # before anything is computed
    count = min(len(rows), _COMPARED)
    rows, positions = rows[:count], positions[:count]
    plan: ModelPlan | None = None
    for places in (positions, positions + _FAR):
        noting = _Noting(attend.again(count))
        try:
            logits = theirs(rows, places, noting)
        except MACHINE:
            raise
        except Exception as error:
            raise Unlike(f"it cannot be called to be compared: {type(error).__name__}: {error}") from error
        if plan is None:
            plan = plan_of(model, noting.options)
        plan = _compared(plan, model, tail, rows, places, attend, logits, noting.attend.new_rows())
    assert plan is not None
    return plan


def _compared(
    plan: ModelPlan,
    model: Any,
    tail: Callable[[Tensor], Tensor],
    rows: Tensor,
    positions: Tensor,
    attend: StepAttend,
    logits: Tensor,
    new: Any,
) -> ModelPlan:
    """The plan, in which layers whose keys are the model's without a rotation do not rotate. Raises ``Unlike``."""
    rotates = list(plan.rotates)
    while True:
        again = attend.again(len(rows))
        plan = plan._replace(rotates=list(rotates))
        try:
            ours = OwnForward(plan, model, tail)(rows, positions, again, None, None)
        except MACHINE:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            raise Unlike(f"the layer ops refuse its parts: {error}") from error
        mine = again.new_rows()
        assert ours is not None and len(mine) == len(new)
        wrong = next((i for i, x in enumerate(new) if not torch.equal(x, mine[i])), None)
        if wrong is None:
            break
        layer, is_values = divmod(wrong, 2)
        if is_values or not rotates[layer]:
            raise Unlike(
                f"our ops give other {'values' if is_values else 'keys'} in layer {layer}, at position {int(positions[0])}"
            )
        rotates[layer] = 0
    if not torch.equal(ours, logits):
        raise Unlike(f"our ops give other logits, at position {int(positions[0])}")
    return plan
