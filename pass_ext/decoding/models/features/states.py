"""Layers of a transformers model that keep a state (gated delta nets, Mamba, short convolutions), in the model's shadow.

What mixes rows in such a layer is a function of its module, such as ``causal_conv1d_fn``; without a cache the layer calls the
one for whole texts. In the shadow, copies of the layers' methods call functions of ours in their place, which give the packed
rows to the ops. Layers are found by the names of these functions, so a new model that calls them is found too.

A name says little about the numbers. So each function is compared first: on a few rows of a call, as one text, output and final
state must be those of the module's function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pass_ext.decoding.models.equivalence import difference_of
from pass_ext.decoding.models.features.feature import Feature
from pass_ext.decoding.models.layer_kinds import STATES, keeps_states, kinds_of
from pass_ext.decoding.models.modules import modules_of
from pass_ext.decoding.models.one_order import any_order
from pass_ext.decoding.models.parts import decoder_layers
from pass_ext.decoding.models.rebound import globals_of, rebound
from pass_ext.decoding.models.shadow import own_call
from pass_ext.decoding.models.step_states import StatePlace, StepStates
from pass_ext.ops.state import state_commit_

Arguments = Mapping[str, Any]

# ---- the functions ----


def _convolution(states: StepStates, place: StatePlace, given: Arguments) -> Tensor:
    """hidden_states ``[1, C, N]``, weight ``[C, K]`` -> ``[1, C, N]``."""
    from transformers.activations import ACT2FN

    hidden, weight, activation = given["hidden_states"], given["weight"], given.get("activation")
    x = hidden[0].T.to(weight.dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    is_silu = activation in ("silu", "swish")
    out = states.convolution(place, x, weight, given.get("bias"), "silu" if is_silu else None)
    if activation is not None and not is_silu:
        out = ACT2FN[activation](out)
    return out.to(hidden.dtype).T[None]


def _delta_rule(states: StepStates, place: StatePlace, given: Arguments) -> Tensor:
    """query, key, value ``[1, N, heads, D]``, g ``[1, N, H]`` or ``[1, N, H, dk]``, beta ``[1, N, H]`` -> ``[1, N, H, dv]``."""
    q, k, v, g, beta = (given[name][0].float() for name in ("query", "key", "value", "g", "beta"))
    if given.get("use_qk_l2norm_in_kernel"):
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    out = states.recurrent(place, q, k, v, g, beta, form="delta", scale=q.shape[-1] ** -0.5)
    return out.to(given["query"].dtype)[None]


def _mamba2(states: StepStates, place: StatePlace, given: Arguments) -> Tensor:
    """hidden_states ``[1, N, H, P]``, dt ``[1, N, H]``, A ``[H]``, B, C ``[1, N, groups, n]`` -> ``[1, N, H, P]`` fp32."""
    dt, limit = _steps(given, "dt_bias", "dt_softplus", 0)[0], given.get("dt_limit")
    if limit is not None and states.is_prompt:  # transformers' cached steps have no limits
        dt = dt.clamp(*limit)
    dt = dt.float()
    x, k, q = (given[name][0].float() for name in ("hidden_states", "B", "C"))
    out = states.recurrent(place, q, k, x, dt * given["A"].float(), dt, form="additive")
    skip = given.get("D")
    return (out if skip is None else out + skip[..., None] * x)[None]


def _mamba(states: StepStates, place: StatePlace, given: Arguments) -> Tensor:
    """hidden_states, dt, z ``[1, C, N]``, A ``[C, n]``, B, C ``[1, n, N]`` -> ``[1, C, N]``."""
    hidden, skip, gate = given["hidden_states"], given.get("D"), given.get("z")
    dt = _steps(given, "delta_bias", "delta_softplus", 1)[0].T.float()[:, None]
    k, q = (given[name][0].T.float()[:, None] for name in ("B", "C"))
    rates = given["A"].float().T[None]
    out = states.recurrent(place, q, k, dt * hidden[0].T[:, None].float(), dt, None, form="additive", decay_rates=rates)
    out = out[:, 0].T[None].to(hidden.dtype)
    if skip is not None:
        out = out + hidden * skip[:, None]
    return out if gate is None else out * functional.silu(gate)


def _steps(given: Arguments, bias: str, softplus: str, dims: int) -> Tensor:
    """The time steps dt, with their bias. dims: of dt after the heads or channels."""
    dt: Tensor = given["dt"]
    if given.get(bias) is not None:
        dt = dt + given[bias].to(dt.dtype)[(..., *(None,) * dims)]
    return functional.softplus(dt) if given.get(softplus) else dt


class StateFunction(NamedTuple):
    """A function of transformers' modules, and ours in its place."""

    compute: Callable[[StepStates, StatePlace, Arguments], Tensor]
    form: Any
    """Of its state in transformers, as ``StatePlace`` has it."""
    rows: Mapping[str, int]
    """The arguments that have rows, and in which dimension."""
    returns_state: str = ""
    """The argument by which it returns its final state too; "": none does."""
    is_pair: bool = False
    """It returns None where it returns no state."""


_DELTA_RULE = StateFunction(
    _delta_rule, "plain", dict.fromkeys(("query", "key", "value", "g", "beta"), 1), "output_final_state", is_pair=True
)
FUNCTIONS = {
    "causal_conv1d_fn": StateFunction(_convolution, "window", {"hidden_states": 2}),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": StateFunction(
        _mamba2, "transposed", dict.fromkeys(("hidden_states", "dt", "B", "C"), 1), "return_final_states"
    ),
    "mamba_selective_scan": StateFunction(
        _mamba, "channels", dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 2), "return_last_state"
    ),
}
"""By their names in transformers 5.24."""
_REFUSED = ("initial_state", "initial_states", "cu_seqlens", "seq_idx")
_COMPARED = 4  # rows


class _Served:
    """What a layer calls in place of its module's function ``theirs``."""

    def __init__(self, name: str, theirs: Callable[..., Any], place: StatePlace) -> None:
        self._name, self._theirs, self._place, self._function = name, theirs, place, FUNCTIONS[name]
        self._names = tuple(inspect.signature(theirs).parameters)
        self._is_compared = False

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        call, function = own_call(f"this {self._name} is"), self._function
        given = {**dict(zip(self._names, inputs, strict=False)), **named}
        asked = (name for name in (*_REFUSED, function.returns_state) if given.get(name) is not None)
        refused = [name for name in asked if given[name] is not False]
        if refused:
            raise self._refusal(call.model, f"is called with {', '.join(refused)}")
        if not self._is_compared:
            with any_order():
                self._compare(call.model, {name: given[name] for name in self._names if name in given})
            self._is_compared = True
        out = function.compute(call.attend.states, self._place, given)
        return (out, None) if function.is_pair else out

    def _refusal(self, model: str, reason: str) -> ValueError:
        return ValueError(
            f"{model}: {self._name} of {self._theirs.__module__} {reason}; pass_ext knows the function of transformers 5.24, "
            "so it cannot decode this model"
        )

    def _compare(self, model: str, given: dict[str, Any]) -> None:
        """Refuses a function that computes otherwise, by a few rows as one text."""
        rows = {name: dim for name, dim in self._function.rows.items() if given.get(name) is not None}
        difference = difference_of(self._theirs, _form(given, rows), partial(self._computes_alike, given, rows))
        if difference is not None:
            raise self._refusal(model, difference)

    def _computes_alike(self, given: dict[str, Any], rows: Mapping[str, int]) -> bool:
        function = self._function
        device = next(value.device for value in given.values() if isinstance(value, Tensor))
        numbers = torch.arange(_COMPARED, device=device)
        for name, dim in rows.items():
            given[name] = given[name].index_select(dim, numbers % given[name].shape[dim])
        states, parents = list[Tensor](), (numbers - 1).int()
        step = StepStates(states, [], 1, parents, parents.new_tensor([0, _COMPARED]), is_first=True, is_prompt=True)
        ours = [function.compute(step, self._place, given)]
        if function.returns_state:
            path = (parents + 1)[None]
            state_commit_(states, step.updates, parents.new_tensor([0, _COMPARED]), path, path[:, -1])
            ours.append(self._place.to_theirs(states[0]))
            theirs = self._theirs(**{**given, function.returns_state: True})
        else:
            theirs = [self._theirs(**given)]
        most = 1e-4 if given[next(iter(rows))].dtype == torch.float32 else 5e-2
        return len(ours) == len(theirs) and all(map(partial(_is_near, most), ours, theirs))


def _form(given: Arguments, rows: Mapping[str, int]) -> frozenset[Any]:
    """The arguments without the numbers and the rows of tensors."""
    return frozenset(
        (name, (value.device.type, value.dtype, tuple(n for dim, n in enumerate(value.shape) if dim != rows.get(name))))
        if isinstance(value, Tensor)
        else (name, str(value))
        for name, value in given.items()
    )


def _is_near(most: float, ours: Tensor, theirs: Any) -> bool:
    """True if they differ by ``most`` of the largest number, or less."""
    if not isinstance(theirs, Tensor) or ours.shape != theirs.shape:
        return False
    ours, theirs = ours.float(), theirs.float()
    largest = float(theirs.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(ours, theirs, rtol=0.0, atol=most * largest + 1e-6, equal_nan=True)


# ---- the layers ----

_STORES = {"update_conv_state": True, "update_recurrent_state": False}
"""The methods by which a layer gives a cache its states -> whether they are windows."""


class RecurrentStates(Feature):
    """
    Args:
        of_their_own: the features whose layers keep states in code of their own.
    """

    def __init__(self, of_their_own: Sequence[Feature]) -> None:
        self._of_their_own = of_their_own

    def unserved(self, model: Any) -> str | None:
        """Describes the first layer whose state is out of reach."""
        text = model.config.get_text_config(decoder=True)
        if not keeps_states(text):
            return None
        known = _Known()
        apart = [(feature, part) for feature in self._of_their_own for part in feature.states(model)]
        inside = {module for _, part in apart for module in modules_of(part)}
        served = {part for feature, part in apart if feature.computed_by(model)}
        own = None
        for part in modules_of(model):
            if part in inside:
                continue
            uses = known.of(type(part))
            windows = {FUNCTIONS[name].form == "window" for name in uses.functions}
            if any(method in uses.names and is_window not in windows for method, is_window in _STORES.items()):
                own = type(part).__name__
        for layer, kind in zip(decoder_layers(model), kinds_of(text), strict=False):
            if kind in STATES and not any(
                known.of(type(part)).functions or part in served for part in modules_of(layer)
            ):
                own = own or f"{type(layer).__name__}, a layer of the kind {kind}"
        if own is None:
            return None
        return (
            f"has {own}, which computes its state in code of its own: it calls none of {', '.join(FUNCTIONS)}, so pass_ext "
            "cannot continue the state along the branches of a tree"
        )

    def states(self, model: Any) -> Mapping[nn.Module, list[StatePlace]]:
        known = _Known()
        names = {part: known.of(type(part)).functions for part in modules_of(model)}
        return {
            part: [_place(name, part) for name in FUNCTIONS if name in used] for part, used in names.items() if used
        }

    def computed_by(self, model: Any) -> list[str]:
        known, kinds = _Known(), {type(part) for part in modules_of(model)}
        return [name for name in FUNCTIONS if any(name in known.of(kind).functions for kind in kinds)]

    def serve(self, shadow: Any, embedded: Callable[[Tensor], Tensor]) -> None:
        if keeps_states(shadow.config.get_text_config(decoder=True)):
            serve_states(shadow)


def _place(name: str, part: nn.Module) -> StatePlace:
    return StatePlace(getattr(part, "layer_idx", -1), FUNCTIONS[name].form, getattr(part, "conv_idx", 0))


def serve_states(shadow: nn.Module) -> list[nn.Module]:
    """Gives a shadow's layers that keep a state methods that call our functions; returns them."""
    known, served_parts = _Known(), list[nn.Module]()
    for part in modules_of(shadow):
        for method, (function, names) in known.of(type(part)).methods.items():
            theirs = globals_of(function)
            ours = rebound(function, {name: _Served(name, theirs[name], _place(name, part)) for name in names})
            if ours is None:
                raise ValueError(f"a decorator of {function.__qualname__} hides what it calls")
            _bind(part, method, function, ours)
        if known.of(type(part)).methods:
            served_parts.append(part)
    return served_parts


def _bind(part: nn.Module, method: str, function: FunctionType, ours: FunctionType) -> None:
    """Has a shadow's module call ``ours`` as its method."""
    # A compiled graph would keep the session of its first call, and one for all copies of the method.
    bound = MethodType(torch.compiler.disable(ours), part)
    if method not in vars(part):
        setattr(part, method, bound)
        return
    kept = [name for name, value in vars(part).items() if getattr(value, "__func__", None) is function]
    if not kept:
        raise ValueError(f"somebody has replaced {type(part).__name__}.{method}, in which it keeps a state")
    for name in kept:  # accelerate's hooks call the method by another name
        vars(part)[name] = bound


class _Uses(NamedTuple):
    """What a class of modules uses."""

    names: set[str]
    """In its methods."""
    methods: dict[str, tuple[FunctionType, list[str]]]
    """Its methods that call some of ``FUNCTIONS``, and these."""

    @property
    def functions(self) -> set[str]:
        return {name for _, called in self.methods.values() for name in called}


class _Known:
    """``_Uses`` by class."""

    def __init__(self) -> None:
        self._uses: dict[type, _Uses] = {}

    def of(self, kind: type) -> _Uses:
        if kind not in self._uses:
            uses = self._uses[kind] = _Uses(set(), {})
            bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
            members = {name: value for base in reversed(bases) for name, value in vars(base).items()}
            for method, function in members.items():
                if isinstance(function, FunctionType) and method != "__init__":
                    found = set(_names_in(function))
                    uses.names.update(found)
                    called = [name for name in FUNCTIONS if name in found and callable(globals_of(function).get(name))]
                    if called:
                        uses.methods[method] = function, called
        return self._uses[kind]


def _names_in(function: FunctionType) -> Iterator[str]:
    """The names in the code of a function and of those that its decorators have wrapped."""
    codes = [inspect.unwrap(function).__code__]
    for code in codes:
        yield from code.co_names
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
