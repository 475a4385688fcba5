"""``Backend``: how a model is run, and why so.

``backend_of`` compares our ops with the model's own forward, bit for bit: logits and the new keys and values of some rows of a
call, at their positions and at far ones, where a model differs that scales something by the length of the text.
``known_backend`` keeps the result from one generation to the next, as long as the model is the same in all that it may depend
on; outside the model, and with no reference to it: a copy has none, and the model ends as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from operator import is_
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.equivalence import MACHINE
from pass_ext.decoding.models.fused_forward import End, FusedForward
from pass_ext.decoding.models.module_ops import is_plain
from pass_ext.decoding.models.modules import modules_of
from pass_ext.decoding.models.packed import StepAttend
from pass_ext.decoding.models.parts import ModelPlan, Unlike, layers_of, plan_of

_COMPARED = 8  # rows
_FAR = 1 << 20  # positions


class Backend(NamedTuple):
    """A comparison's result."""

    plan: ModelPlan | None
    reason: str
    """Why there is none."""


# ---- the comparison ----


def backend_of(
    model: Any,
    theirs: Callable[[Tensor, Tensor, StepAttend], Tensor],
    ends: tuple[End, End],
    rows: Tensor,
    positions: Tensor,
    attend: StepAttend,
) -> Backend:
    """Compares.

    Args:
        theirs: the model's own forward of rows ``[N, d]`` at positions ``[N]``.
        ends: norm and head, as ``FusedForward`` takes them.
        rows, positions, attend: of a call that has just run.
    """
    rows, positions = rows[:_COMPARED], positions[:_COMPARED]
    plan: ModelPlan | None = None
    try:
        layers = layers_of(model)
        for places in (positions, positions + _FAR):
            called = attend.again(len(rows))
            try:
                logits = theirs(rows, places, called)
            except MACHINE:
                raise
            except Exception as error:
                raise Unlike(f"it cannot be called to be compared: {type(error).__name__}: {error}") from error
            if len(called.options) != len(layers):
                raise Unlike(f"it attends {len(called.options)} times with keys of its own in {len(layers)} layers")
            if plan is None:
                plan = plan_of(model, layers, called.options)
            plan = _compared(plan, model, ends, rows, places, attend, logits, called.new_rows())
    except Unlike as unlike:
        return Backend(None, str(unlike))
    return Backend(plan, "")


def _compared(
    plan: ModelPlan,
    model: Any,
    ends: tuple[End, End],
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
            ours = FusedForward(plan, model, *ends)(rows, positions, again, None, None)
        except MACHINE:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            raise Unlike(f"the layer ops refuse its parts: {error}") from error
        mine = again.new_rows()
        assert ours is not None and len(mine) == len(new)
        wrong = next(
            (i for i, x in enumerate(new) if not torch.equal(_bytes_if_8_bits(x), _bytes_if_8_bits(mine[i]))), None
        )
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


def _bytes_if_8_bits(rows: Tensor) -> Tensor:
    """Numbers that compare: of rows in 8 bits some bytes are no numbers as fp8."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


# ---- from one generation to the next ----

_VALUES = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device})
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class ModelState:
    """All by which a model's parts are found. Numbers may change inside a tensor, which is read in each call."""

    def __init__(self, model: nn.Module) -> None:
        self._objects: list[Any] = []
        """Weak references to classes, their code, weights and settings, to be compared by identity."""
        self._values: list[Any] = []
        """Settings, and where weights lie, and as what."""
        self._configs: set[int] = set()
        kinds: dict[type[nn.Module], None] = {}
        for part in modules_of(model):
            attributes = vars(part)
            self._note([value for name, value in attributes.items() if name not in _OF_EVERY_MODULE])
            for name in ("_parameters", "_buffers", "_modules"):
                self._note(attributes[name].values())
            kinds[type(part)] = None
            self._objects.append(ref(type(part)))
        for kind in kinds:
            self._note_code(kind.forward)

    def is_same(self, other: ModelState) -> bool:
        """True if nothing has changed."""
        if len(self._objects) != len(other._objects) or not all(map(is_, self._objects, other._objects)):
            return False
        return self._values == other._values

    def _note_code(self, forward: Any) -> None:
        """The functions after the decorators of a forward, and what their files have by the names that they use."""
        while forward is not None:
            code = getattr(forward, "__code__", None)
            self._note([forward, *([] if code is None else [code, *map(forward.__globals__.get, code.co_names)])])
            forward = getattr(forward, "__wrapped__", None)

    def _note(self, values: Iterable[Any]) -> None:
        for value in values:
            kind = type(value)
            if kind in _VALUES:
                self._values.append(value)
            elif isinstance(value, Tensor):
                self._objects.append(ref(value))
                if is_plain(value):  # others may have no place
                    self._values += (value.data_ptr(), value.dtype)
            elif kind is MethodType:
                self._note((value.__func__, value.__self__))
            elif kind in (list, tuple, dict):
                self._values.append(len(value))
                self._note(value)
                if kind is dict:
                    self._note(value.values())
            else:
                self._note_object(value)

    def _note_object(self, value: Any) -> None:
        try:
            self._objects.append(ref(value))
        except TypeError:
            self._values.append(id(value))
        if hasattr(type(value), "sub_configs") and id(value) not in self._configs:  # settings change inside a config
            self._configs.add(id(value))
            for name, entry in vars(value).items():
                if not name.startswith("_attn_implementation"):
                    self._note((entry,))


_kept: MutableMapping[nn.Module, tuple[ModelState, Backend]] = WeakKeyDictionary()


def known_backend(model: nn.Module, state: ModelState) -> Backend | None:
    """What is kept of a model that is still in this state."""
    former, backend = _kept.get(model, (None, None))
    return None if former is None or not former.is_same(state) else backend


def keep_backend(model: nn.Module, state: ModelState, backend: Backend) -> None:
    """Keeps the backend of a model in this state."""
    _kept[model] = state, backend
