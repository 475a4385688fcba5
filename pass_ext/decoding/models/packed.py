"""``PackedModel``: the interface that decoding needs from a model. ``Adapted``: a PackedModel with its properties.

The rows of all requests in a step are packed back to back, without padding. The model computes row by row, and calls ``attend``
once per layer, where rows mix.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pass_ext.decoding.models.layer_attention import Attending
from pass_ext.decoding.models.module_ops import is_plain
from pass_ext.decoding.models.one_order import OneOrder
from pass_ext.decoding.models.slots import CallSlots, PlacedAdapters
from pass_ext.decoding.models.step_states import StepStates
from pass_ext.decoding.models.taps import Tap, Taps
from pass_ext.decoding.models.vocabulary import LogitShards
from pass_ext.modules.files import HitRates
from pass_ext.ops.lookahead import lookahead_embed

NewRows = list[Tensor] | Tensor
"""Keys and values of a call's rows, ``[N, KV heads, D]`` of layer 0, of layer 1 …; or all in one tensor."""


class Attend(Protocol):
    """Attention of a step's rows to their request's text and to their ancestors in the tree."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        window: int = -1,
        sinks: Tensor | None = None,
        chunk: int = -1,
    ) -> Tensor:
        """q ``[N, heads, D]``, k, v ``[N, KV heads, D]``, positions applied -> ``[N, heads, D of v]``.

        Args:
            layer: 0 in the first layer that attends, 1 in the next …: each calls once, in this order.
            q, k, v: of all rows, in one dtype: bfloat16, float16 or float32. heads is a multiple of KV heads, D at most
                576, that of v at most 512. If v is a view of the first numbers of k, one cache holds both.
            scale: factor of the logits; None is ``D ** -0.5``.
            softcap: logits become ``softcap * tanh(logits / softcap)``; 0 is off.
            window: a row sees keys at ``position - window < key position`` only, its own among them; -1 is off. Each layer
                may have another.
            sinks: ``[heads]``, a logit of each head that takes weight like a key and has no value.
            chunk: a row sees keys of its own chunk only, at ``position // chunk * chunk`` and after; -1 is off.
        """


class StepAttend(Attend, Protocol):
    """``Attend`` of a session's call, as our own models take it: layer by layer, or for all layers at once."""

    is_first: bool
    """The session has no caches yet; this call makes them."""
    batch_invariant: bool
    """As ``Session`` takes it."""
    cache_dtype: torch.dtype | None
    """As ``Session`` takes it."""
    may_have_changed: bool
    """The caller's code may have run since the session's last call."""
    options: list[dict[str, Any]]
    """Scale, softcap, window, sinks and chunk of each layer that has attended by itself."""
    layers: int
    """How many have attended."""
    states: StepStates
    """The states of the layers that keep one."""
    ids: Tensor
    """``[N]``, of the rows; -1 - i is look-ahead slot i."""
    taps: Taps | None
    """Takes the hidden states that are wanted; None: none are."""
    encoded: Any
    """The ``Encoded`` that rows attend to besides their text; None: nothing."""
    heard: int
    """How many layers have attended to it."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        window: int = -1,
        sinks: Tensor | None = None,
        chunk: int = -1,
        visible: Tensor | None = None,
        by: Attending | None = None,
    ) -> Tensor:
        """As ``Attend``.

        Args:
            k, v: None: those that layer ``layer``, an earlier one, has had in this call.
            visible: ``[N, W]``, which rows of its request each row sees in this layer, as in ``attention_tree``. None: those of
                its tree.
            by: attends in place of all keys that a row sees. None: these.
        """

    @property
    def text_rows(self) -> int:
        """The most rows of one text, look-ahead slots' not counted: so the text has the same bits alone and in a batch, and
        with slots after it. On a GPU all rows."""

    def of_encoder(self, layer: int, q: Tensor, *, scale: float | None) -> Tensor:
        """Attention of queries ``[N, heads, D]`` to what an encoder has made of their requests' inputs, in this layer."""

    def of_all_layers(self, layers: int, rows: Tensor, heads: int, head_dim: int) -> tuple[Any, ...] | None:
        """The arguments of ``layer_stack`` from ``caches`` to ``depths``; None if the caches are not of so many layers with
        keys ``[N, KV heads, D]`` in the dtype of these rows. A first call makes the caches."""

    def take(self, new: Tensor) -> None:
        """Takes the keys and values ``[2 * layers, N, KV heads, D]`` that ``layer_stack`` made."""

    def again(self, rows: int) -> StepAttend:
        """The attention of the first rows once more, after the call; what it makes reaches no cache."""

    def new_rows(self) -> NewRows:
        """Keys and values of the rows, of all layers that have attended."""


class Adapt(Protocol):
    """Adds the adapters of look-ahead slots to the output of a linear layer, in place."""

    def __call__(self, place: str, out: Tensor, x: Tensor) -> Tensor:
        """place: the layer's number and a name, as "3.self_attn.q_proj"; out ``[N, out]``: the layer's output for x
        ``[N, in]``. Returns out; rows of tokens, and places without an adapter, keep their bits."""


class PackedModel(Protocol):
    """A decoder-only model for ``generate`` that is not a transformers model. ``examples/plain_decoder.py`` has an example.

    Look-ahead slots with adapters need a model whose ``__call__`` has a parameter ``adapt`` too, which is an ``Adapt`` or None:
    it calls ``adapt(place, out, x)`` after each linear layer that has a place in the file. Drafters that read hidden states
    need one with a parameter ``tap``, a callable or None: it calls ``tap(place, rows)`` with the rows ``[N, d]`` that go into
    layer ``place`` (0, 1, …), after the last layer with the number of layers, and after the final norm with "last".
    """

    embedding: Tensor | nn.Embedding
    """``[V, d]``, the table of input embeddings."""

    def __call__(self, rows: Tensor, positions: Tensor, attend: Attend, wanted: Tensor | None) -> Tensor:
        """Computes logits.

        Args:
            rows: ``[N, d]``, input embeddings.
            positions: ``[N]`` int64, positions in the text.
            attend: attention, to be called once per layer.
            wanted: int64, the rows whose logits are needed; None: all.

        Returns:
            Logits ``[N or len(wanted), V]``.
        """


class KeptHidden:
    """The input rows of a model's output layer, from its last call."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def keep(self, rows: Tensor) -> None:
        """Keeps the rows ``[..., d]``."""
        self._rows = rows.flatten(0, -2)

    @property
    def rows(self) -> Tensor:
        """``[rows, d]``, one for each row of the last call's logits. Valid until the next call."""
        if self._rows is None:
            raise RuntimeError(
                "no hidden rows are kept: the model was not called yet, or it does not call its output layer (a replayed "
                "CUDA graph calls none)"
            )
        return self._rows


class Adapted:
    """A PackedModel with the properties that decoding reads; ``TransformersModel`` is a subclass."""

    name = ""
    generation_config: Any = None
    has_table: bool = True
    """False: ``table`` has shape, dtype and device but no values, because the model's table is quantised, offloaded or
    divided among ranks."""
    shared_model: Any = None
    """The model whose first ``shares_layers`` layers this model runs, so that their keys and values are equal."""
    shares_layers: int = 0
    caches: int | None = None
    """The number of caches of a session, of keys and values each, if every layer attends at most once; None: unknown, as of a
    callable. Calls may make more or fewer: the first one's number holds for all."""
    attends_again: bool = False
    """A layer has attended several times in a call, and has caches that transformers' cache does not have in this order."""
    numbers: Mapping[int, int] | None = None
    """The number of each layer that attends among those that do; None: all layers attend."""
    widths_after: Mapping[int, int] = MappingProxyType({})
    """The layers that keep more of a text than keys and values, by their number among those that attend -> how many numbers
    they keep after the keys of each KV head."""
    has_encoder: bool = False
    """Rows attend to an encoder's outputs too, so prompts must come with what it reads."""
    reads_whole: bool = False
    """Rows of a prompt attend to those after them too, so that its own forward must read prompts."""
    keeps_states: bool = False
    """Some layers keep a state."""
    most_positions: int = sys.maxsize
    """The longest text that the model is made for."""
    rope_limit: int | None = None
    """The longest text with unchanged rotary frequencies; None: any length."""
    logit_shards: LogitShards | None = None
    """Under tensor parallelism, the ranks that hold the columns of the logits; None: this process has all."""
    known_positions: int | None = None
    """Rows of the model's table of positions, the most that it can embed; None: it has no such table."""
    hit_rates: HitRates | None = None
    """How often it is right as a draft, if that was counted when it was trained."""
    beside: tuple[Tensor, ...] = ()
    """What the next call reads beside rows and caches; a recorded call reads a copy."""
    left: tuple[Tensor, ...] = ()
    """What the last call has left beside its logits, until the next one."""

    def __init__(self, model: PackedModel) -> None:
        self.model: Any = model
        embedding = model.embedding
        self.table: Tensor = embedding.weight if isinstance(embedding, nn.Module) else embedding
        if self.table.dim() != 2:
            raise ValueError(
                f"model.embedding must be [V, d], the table of input embeddings, got {list(self.table.shape)}"
            )
        if not is_plain(self.table):
            raise ValueError(
                "model.embedding must be a plain tensor with its numbers in memory, got "
                f"{type(self.table).__name__} on {self.table.device}"
            )

    @property
    def backend(self) -> str:
        """How its calls are computed, and why so, in words."""
        return "its own __call__"

    @property
    def stored_table(self) -> Tensor | None:
        """The numbers of the table, ``[V, d]`` or packed; None where they cannot be read."""
        return self.table if self.has_table else None

    def embed(self, ids: Tensor, slots: Tensor) -> Tensor:
        """The embedding rows of ids ``[N]``; -1 - i is look-ahead slot i."""
        return lookahead_embed(ids, self.table, slots)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """The embedding rows of tokens ``[N]``."""
        return self.embed(ids, self.table.new_empty(0, self.table.shape[1]))

    def attached(self) -> AbstractContextManager[Any]:
        """The context in which the model is called; patches nothing here."""
        return nullcontext()

    @contextmanager
    def keeping_hidden(self) -> Iterator[KeptHidden]:
        """Inside, where the model is attached too, the input rows of its output layer are kept from each call."""
        head, hidden = self._output_layer(), KeptHidden()
        with self.attached(), head.register_forward_pre_hook(lambda _, inputs: hidden.keep(inputs[0])):
            yield hidden

    def _output_layer(self) -> nn.Module:
        get_head = getattr(self.model, "get_output_embeddings", None)
        head = get_head() if get_head is not None else None
        if not isinstance(head, nn.Module):
            raise ValueError(
                f"hidden rows are the input of the module that get_output_embeddings() gives, and {type(self.model).__name__} "
                "has none: use a decision model of kind 'entropy', or give the model that method"
            )
        return head

    def __call__(
        self, rows: Tensor, positions: Tensor, attend: StepAttend, wanted: Tensor | None, slots: CallSlots | None = None
    ) -> Tensor:
        """Calls the model as a ``PackedModel``.

        slots: what look-ahead rows have beside their embeddings; None: nothing.
        """
        if slots is not None and slots.deep is not None:
            raise TypeError(
                "these look-ahead embeddings shift the input of every layer, which decoding can do in transformers models "
                "only: train some without (--deep)"
            )
        more: dict[str, Any] = {} if slots is None or slots.adapters is None else {"adapt": slots.adapt_}
        if attend.taps is not None:
            more["tap"] = attend.taps.keep
        with OneOrder() if attend.batch_invariant else nullcontext():
            logits = self.model(rows, positions, _checked(attend, len(rows)), wanted, **more)
        count, shape = len(rows if wanted is None else wanted), list(getattr(logits, "shape", ()))
        if len(shape) != 2 or shape[0] != count:
            which = (
                "of all rows"
                if wanted is None
                else f"of rows[wanted] alone: wanted has {count} of the {len(rows)} rows"
            )
            raise ValueError(
                f"{type(self.model).__name__} must return logits [{count}, V], {which}; got {shape or type(logits).__name__}"
            )
        return logits

    def check_adapters(self, adapters: PlacedAdapters) -> None:
        """Refuses adapters that calls of this model would leave out."""
        if not self._takes("adapt"):
            raise TypeError(
                "these look-ahead embeddings have adapters, which a callable model must add itself: give its __call__ a "
                "parameter adapt (pass_ext.PackedModel), or train some without (--adapter-rank 0)"
            )

    def check_taps(self, taps: Sequence[Tap]) -> None:
        """Refuses places whose hidden states calls of this model cannot give."""
        if not self._takes("tap"):
            raise TypeError(
                "this drafter reads hidden states, which a callable model must give itself: give its __call__ a parameter tap "
                "(pass_ext.PackedModel)"
            )

    def _takes(self, parameter: str) -> bool:
        call = self.model if inspect.isroutine(self.model) else type(self.model).__call__
        if isinstance(self.model, nn.Module):
            call = type(self.model).forward
        return parameter in inspect.signature(call).parameters


def _checked(attend: Attend, rows: int) -> Attend:
    """``attend``, whose refusals name what the model gave it."""

    def checked(layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if not q.dtype == k.dtype == v.dtype:
            expected = "q, k and v must have one dtype: convert them before the call"
        elif any(x.dim() != 3 or len(x) != rows for x in (q, k, v)):
            expected = f"q must be [{rows}, heads, D], k and v [{rows}, KV heads, D]: the call has {rows} rows"
        elif k.shape[1] != v.shape[1] or q.shape[2] != k.shape[2] or not k.shape[1] or q.shape[1] % k.shape[1]:
            expected = "k must have the D of q and the heads of v, and q a multiple of these heads"
        else:
            return attend(layer, q, k, v, **options)
        given = ", ".join(f"{name} {x.dtype} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"attend, layer {layer}: {expected}; got {given}")

    return checked
