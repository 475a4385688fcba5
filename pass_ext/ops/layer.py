"""``layer_before_attention`` and ``layer_after_attention``: a decoder layer around its attention, each half as one call over
the packed rows of a step. ``layer_stack``, on the CPU: decoder layers with their attention, all in one call. ``layer_pack``:
their weights, checked once for many calls.

    before   q, k, v = rotated(normed(products of normed(x)))
    after    m = residual + o(attended);  m + down(activation(gate(n)) up(n)),  n = normed(m)
             with adapters of look-ahead slots after each product
    stack    x = after(attention_tree(before(x)), x), layer by layer

Kernels: csrc/cpu/layer.h and csrc/cuda/layer.cuh, which chain and join those of ``linear_rows`` and the step ops.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from pass_ext import _library
from pass_ext._library import release_layers
from pass_ext.ops.adapter import check_adapter_ids
from pass_ext.ops.common.arguments import index_of, integers, typed
from pass_ext.ops.common.kernels import call, fake_kernel, refuse_gradients
from pass_ext.ops.linear import shape_of
from pass_ext.ops.step import ACTIVATIONS, NORM_FORMS

_before_op = _library.ops.layer_before_attention.default
_after_op = _library.ops.layer_after_attention.default
_pack_op = _library.ops.layer_pack.default
_stack_op = _library.ops.layer_stack.default


class LayerWeights(NamedTuple):
    """A decoder layer's tensors, as the arguments of ``layer_before_attention`` and ``layer_after_attention``."""

    q_weight: Tensor
    k_weight: Tensor
    v_weight: Tensor
    o_weight: Tensor
    gate_weight: Tensor
    up_weight: Tensor
    down_weight: Tensor
    input_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attention_norm: Tensor | None = None
    output_norm: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


_ORDER = (
    "input_norm", "q_weight", "q_bias", "k_weight", "k_bias", "v_weight", "v_bias", "q_norm", "k_norm", "o_weight", "o_bias",
    "attention_norm", "mlp_norm", "gate_weight", "gate_bias", "up_weight", "up_bias", "down_weight", "down_bias",
    "output_norm",
)  # fmt: skip
"""The order of a layer's tensors in the op's list: csrc/host/layer_stack.h, LayerPart."""


ADAPTED_BEFORE, ADAPTED_AFTER = ("q", "k", "v"), ("o", "gate", "up", "down")
ADAPTED = ADAPTED_BEFORE + ADAPTED_AFTER
"""The linear layers that may have adapters, in the order of the ops' lists: csrc/host/layer_adapters.h, AdapterLinear."""


@typed("pass_ext::", page="ops/layer")
def layer_before_attention(
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    *,
    head_dim: int,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    input_norm: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 1e-6,
    form: str = "llama",
    ids: Tensor | None = None,
    adapters: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    adapter_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of rows ``x [N, d]``, ready for attention: ``step_rms_norm``, three ``linear_rows``, the norms
    of heads, and ``step_rotary``, with their bits.

    Args:
        x: ``[N, d]`` bfloat16, float16 or float32.
        q_weight, k_weight, v_weight: ``[heads * head_dim, d]`` in x's dtype; rows may be strided, so parts of a joined weight
            will do. On the CPU each may be packed (``pack_weight``).
        head_dim: D, numbers of a head.
        q_bias, k_bias, v_bias: ``[heads * head_dim]``.
        input_norm: ``[d]``, the weight of a norm in front; None: none.
        q_norm, k_norm: weights of norms after the products: ``[D]`` norms each head, ``[heads * D]`` the whole row.
        cos, sin: ``[N, D']`` as in ``step_rotary``; None: no rotary embedding.
        eps, form: of all norms, as in ``step_rms_norm``.
        ids: ``[N]`` integers of the rows, where negative ones are look-ahead slots; only with adapters.
        adapters: for "q", "k", "v", or some of them, ``down [K, r, d]`` and ``up [K, r, out]``: what ``adapter_rows_`` adds
            after the product for rows whose id is negative, with its bits. Contiguous, and K the same in all.
        adapter_scale: of their products.

    Returns:
        ``(q [N, Hq, D], k [N, Hk, D], v [N, Hk, D])``, contiguous.

    A row has the same bits whatever the other rows are; those of tokens are as without adapters. On a GPU it is one launch,
    two where heads are normed, four where whole rows of queries and keys are, and one more where a block has no room for
    its normed rows; adapters add none. Slots below -K are refused, or on CUDA have no adapter, as in ``adapter_rows_``. No
    gradients, reverse or forward: the op raises if an input requires one.

    Example:

        >>> x, weight = torch.ones(3, 8), torch.eye(8)
        >>> q, k, v = pass_ext.layers.layer_before_attention(x, weight, weight[:4], weight[:4], head_dim=4)
        >>> list(q.shape), list(k.shape), list(v.shape)
        ([3, 2, 4], [3, 1, 4], [3, 1, 4])
    """
    op = "layer_before_attention"
    ids, added, adapted = _adapted(op, ids, adapters, ADAPTED_BEFORE)
    refuse_gradients(
        op, x, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, input_norm, q_norm, k_norm, cos, sin, *added
    )
    q, k, v = call(
        _before_op, x, input_norm, q_weight, q_bias, k_weight, k_bias, v_weight, v_bias, q_norm, k_norm, cos, sin, head_dim,
        eps, index_of(op, "form", form, NORM_FORMS), ids, added, adapted, adapter_scale,
    )  # fmt: skip
    return q, k, v


@typed("pass_ext::", page="ops/layer")
def layer_after_attention(
    attended: Tensor,
    residual: Tensor,
    o_weight: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    o_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    attention_norm: Tensor | None = None,
    mlp_norm: Tensor | None = None,
    output_norm: Tensor | None = None,
    eps: float = 1e-6,
    form: str = "llama",
    activation: str = "silu",
    scale: float = 1.0,
    ids: Tensor | None = None,
    adapters: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    adapter_scale: float = 1.0,
) -> Tensor:
    """A decoder layer's output from its attention's: ``linear_rows``, ``step_rms_norm``, ``step_gate`` and the residual
    additions, with their bits.

    Args:
        attended: ``[N, heads * D]`` bfloat16, float16 or float32.
        residual: ``[N, d]``, the layer's input.
        o_weight: ``[d, heads * D]``.
        gate_weight, up_weight: ``[I, d]``; rows may be strided.
        down_weight: ``[d, I]``.
        o_bias, gate_bias, up_bias, down_bias: one number per output.
        attention_norm, output_norm: ``[d]``, weights of norms after o and down, in front of the addition (gemma2, olmo2).
        mlp_norm: ``[d]``, weight of the norm in front of the MLP; None: none.
        eps, form: of all norms, as in ``step_rms_norm``.
        activation: as in ``step_gate``.
        scale: factor of both products before they are added (granite's ``residual_multiplier``); 1 beside norms after them.
        ids, adapters, adapter_scale: as in ``layer_before_attention``, for "o", "gate", "up", "down". The residual's ``scale``
            multiplies what they add, too.

    Returns:
        ``[N, d]``.

    A row has the same bits whatever the other rows are; rows of tokens have those of a call without adapters. On a GPU it is
    three launches, two more for each norm after a product, and one more where a block has no room for its normed rows;
    adapters add none. No gradients, reverse or forward: the op raises if an input requires one.

    Example:

        >>> attended, residual, eye = torch.ones(1, 4), torch.ones(1, 4), torch.eye(4)
        >>> down = torch.zeros(4, 4)
        >>> pass_ext.layers.layer_after_attention(attended, residual, eye, eye, eye, down)  # 1 + 1, and an MLP of zeros
        tensor([[2., 2., 2., 2.]])
    """
    op = "layer_after_attention"
    ids, added, adapted = _adapted(op, ids, adapters, ADAPTED_AFTER)
    refuse_gradients(op, attended, residual, o_weight, gate_weight, up_weight, down_weight, o_bias, gate_bias, up_bias,
                     down_bias, attention_norm, mlp_norm, output_norm, *added)  # fmt: skip
    out: Tensor = call(
        _after_op, attended, residual, o_weight, o_bias, attention_norm, mlp_norm, gate_weight, gate_bias, up_weight, up_bias,
        down_weight, down_bias, output_norm, eps, index_of(op, "form", form, NORM_FORMS),
        index_of(op, "activation", activation, ACTIVATIONS), scale, ids, added, adapted, adapter_scale,
    )  # fmt: skip
    return out


def _adapted(
    op: str, ids: Tensor | None, adapters: Mapping[str, tuple[Tensor, Tensor]] | None, names: Sequence[str]
) -> tuple[Tensor | None, list[Tensor], int]:
    """The adapters of a half in the op's order. Under ``set_debug`` the ids are checked on any device."""
    if ids is not None and ids.dtype not in (torch.int32, torch.int64):
        ids = integers(op, "ids", ids, torch.int64)
    adapted, added = adapter_list(op, adapters, names)
    if ids is not None and added and _library.debug_enabled() and not torch.compiler.is_compiling():
        check_adapter_ids(ids, added[0].shape[0] if added[0].dim() else 0, op)
    return ids, added, adapted


class PackedLayers:
    """Decoder layers' weights as ``layer_stack`` takes them without checking each. ``layer_pack`` makes it; do not call its
    constructor.

    It keeps the tensors, not copies of them: numbers that change inside a tensor are those of the next call. A tensor whose
    data was replaced (``weight.data = …``) or whose memory was freed is refused by the next call; pack the layers again. It
    belongs to its process, and to those that fork from it: it can be neither copied nor pickled.

    Attributes:
        key: what stands for the layers in ``torch.ops.pass_ext.layer_stack``, as the one tensor of ``weights``, while this
            object lives: ``[layers, parts]`` int64.
        parts: which tensors the layers have, as bits.
        head_dim: D.
        weights: the tensors.
    """

    def __init__(self, weights: list[Tensor], parts: int, head_dim: int) -> None:
        self.key: Tensor = call(_pack_op, weights, parts, head_dim)
        self.parts, self.head_dim, self.weights = parts, head_dim, weights
        finalize(self, release_layers, self.key.data_ptr()).atexit = False

    def __len__(self) -> int:
        return len(self.key)

    def __reduce__(self) -> Any:
        raise TypeError(
            "PackedLayers cannot be copied or pickled: pack the copied weights with pass_ext.layers.layer_pack"
        )


@typed("pass_ext::", page="ops/layer")
def layer_pack(layers: Sequence[LayerWeights], *, head_dim: int) -> PackedLayers:
    """Checks decoder layers' weights once for many calls of ``layer_stack``, which then takes the result in their place.

    Args:
        layers: the weights, all with the same optional parts, in one dtype.
        head_dim: D.

    Returns:
        The packed layers. They keep the tensors as long as they live, and read them in each call.

    For the CPU only. No gradients, reverse or forward: the op raises if a weight requires one.

    Example:

        >>> eye = torch.eye(4)
        >>> weights = pass_ext.layers.LayerWeights(eye, eye, eye, eye, eye, eye, eye)
        >>> len(pass_ext.layers.layer_pack([weights] * 2, head_dim=4))
        2
    """
    op = "layer_pack"
    weights, parts = _listed(op, layers)
    if not weights:
        raise ValueError(f"pass_ext::{op}: layers must be 1 or more, got none")
    refuse_gradients(op, *weights)
    return PackedLayers(weights, parts, head_dim)


def _listed(op: str, layers: Sequence[LayerWeights]) -> tuple[list[Tensor], int]:
    """The layers' tensors in the op's order, and which parts they have, as bits."""
    layers = [LayerWeights(*layer) for layer in layers]
    present = {tuple(getattr(layer, name) is not None for name in _ORDER) for layer in layers}
    if len(present) > 1:
        raise ValueError(f"pass_ext::{op}: layers must all have the same optional parts, got layers that differ")
    parts = sum(1 << i for i, is_there in enumerate(present.pop() if present else ()) if is_there)
    listed = [getattr(layer, name) for layer in layers for name in _ORDER]
    return [tensor for tensor in listed if tensor is not None], parts


@typed("pass_ext::", page="ops/layer")
def layer_stack(
    x: Tensor,
    layers: Sequence[LayerWeights] | PackedLayers,
    caches: Sequence[tuple[Tensor, Tensor]] | Tensor,
    prefix_lens: Tensor,
    cu_nodes: Tensor,
    visible: Tensor,
    max_nodes: int,
    *,
    head_dim: int,
    first_input: Tensor | None = None,
    depths: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    rotates: Sequence[int] | None = None,
    windows: Sequence[int] | None = None,
    ids: Tensor | None = None,
    deep: Tensor | None = None,
    adapters: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    adapter_scale: float = 1.0,
    final_norm: Tensor | None = None,
    head: Tensor | None = None,
    wanted: Tensor | None = None,
    taps: Sequence[int] = (),
    eps: float = 1e-6,
    form: str = "llama",
    activation: str = "silu",
    scale: float = 1.0,
    attention_scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """A model's decoder layers over the packed rows of a step: ``layer_before_attention``, ``attention_tree`` and
    ``layer_after_attention`` of every layer, and ``step_rms_norm`` and ``linear_rows`` after them, with their bits; for rows
    of look-ahead slots with those of ``adapter_rows_`` after each product.

    Args:
        x: ``[N, d]`` bfloat16, float16 or float32.
        layers: the weights, all with the same optional parts; or those of ``layer_pack``.
        caches: keys and values ``[B, S, Hk, D]`` of each layer, for ``attention_tree``; they are only read. Or one tensor of
            all, ``[2 * layers, B, S, Hk, D]``, a layer's keys in front of its values. In x's dtype, or in 8 bits,
            ``[..., 16 + D]`` as ``quantize_rows`` makes them.
        prefix_lens, cu_nodes, visible, max_nodes, depths: the step's trees, as in ``attention_tree``.
        head_dim: D.
        first_input: ``[N, in]``, what q, k and v of layer 0 multiply in place of its normed input, as in drafters' heads that
            read an embedding and a state: their weights there are ``[heads * D, in]``. None: x, as in the other layers.
        cos, sin: ``[N, D']`` as in ``step_rotary``, or ``[K, N, D']`` of K rotary embeddings; None: no rotary embedding.
        positions: ``[N]`` int64, each row's place in ``cos`` and ``sin``, which then have P rows in place of N; None: its own
            number.
        rotates: the rotary embedding of each layer: 1 for the first, 2 for the second, …, 0 for none; None: all have the first.
        windows: each layer's window as in ``attention_tree``, -1 for none; None: no layer has one.
        ids, deep: ``[N]`` and ``[layers, L, d]``: rows whose id is -1 - i add ``deep[l, i]`` to the input of layer l.
        adapters: for the linear layers "q", "k", "v", "o", "gate", "up", "down", or some of them, the adapters of all layers,
            ``down [layers, K, r, in]`` and ``up [layers, K, r, out]``: a layer's are those of ``adapter_rows_``, for rows
            whose id is negative. Contiguous, and K the same in all. Beside those of o or down ``scale`` must be 1.
        adapter_scale: of their products.
        final_norm: ``[d]``, weight of a norm after the last layer; None: none.
        head: ``[V, d]``, weight of the output layer; None: none.
        wanted: ``[W]`` int64, the rows that norm and output layer are computed of; None: all.
        taps: layers whose inputs are returned too; the number of layers stands for the rows after the last one.
        eps, form, activation, scale: as in both other ops, the same for all layers.
        attention_scale, softcap: ``scale`` and ``softcap`` of ``attention_tree``.

    Returns:
        ``(out [N or W, V or d], new [2 * layers, N, Hk, D], states [taps, N, d])``: new: the new rows' keys and values of each
        layer, as ``cache_commit_`` takes them: in the caches' dtype, in 8 bits ``[..., 16 + D]`` with the bits of
        ``quantize_rows``. states: the rows of x that go into each of ``taps``.

    A row has the same bits whatever the other requests are. For the CPU only. No gradients, reverse or forward: the op raises
    if an input requires one.

    Example:

        >>> eye, rows = torch.eye(64), torch.ones(2, 64)
        >>> weights = pass_ext.layers.LayerWeights(eye, eye, eye, eye, eye, eye, torch.zeros(64, 64))
        >>> trees, caches = pass_ext.pack_trees([pass_ext.Tree.chain(1)]), torch.zeros(2, 1, 8, 1, 64)
        >>> step = torch.tensor([0]), trees.cu_nodes, trees.visible, 2
        >>> out, new, _ = pass_ext.layers.layer_stack(rows, [weights], caches, *step, head_dim=64)
        >>> out[:, 0], list(new.shape)  # 1 + 1, and the keys and values of both rows
        (tensor([2., 2.]), [2, 2, 1, 64])
    """
    op = "layer_stack"
    prefix_lens, cu_nodes = integers(op, "prefix_lens", prefix_lens), integers(op, "cu_nodes", cu_nodes)
    depths = integers(op, "depths", depths)
    positions, ids, wanted = (
        integers(op, name, tensor, torch.int64)
        for name, tensor in (("positions", positions), ("ids", ids), ("wanted", wanted))
    )
    flat = [caches] if isinstance(caches, Tensor) else [cache for pair in caches for cache in pair]
    if isinstance(layers, PackedLayers):
        weights, parts, listed = [layers.key], layers.parts, layers.weights
    else:
        listed, parts = _listed(op, layers)
        weights = listed
    adapted, added = adapter_list(op, adapters)
    refuse_gradients(op, x, first_input, cos, sin, deep, final_norm, head, *listed, *flat, *added)
    count = len(layers)
    out, new, states = call(
        _stack_op, x, first_input, weights, parts, flat, prefix_lens, cu_nodes, visible, max_nodes, depths, cos, sin, positions,
        [1] * count if rotates is None else [int(each) for each in rotates],
        [-1] * count if windows is None else list(windows), ids, deep, added, adapted, adapter_scale,
        final_norm, head, wanted, list(taps), head_dim, eps, index_of(op, "form", form, NORM_FORMS),
        index_of(op, "activation", activation, ACTIVATIONS), scale,
        head_dim**-0.5 if attention_scale is None else attention_scale, softcap,
    )  # fmt: skip
    return out, new, states


def adapter_list(
    op: str, adapters: Mapping[str, tuple[Tensor, Tensor]] | None, names: Sequence[str] = ADAPTED
) -> tuple[int, list[Tensor]]:
    """Which linear layers have adapters, as bits, and the adapters' tensors. names: those that may have some."""
    adapters = adapters or {}
    if unknown := set(adapters).difference(names):
        raise ValueError(f"pass_ext::{op}: adapters must be of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    there = [name for name in ADAPTED if name in adapters]
    return sum(1 << ADAPTED.index(name) for name in there), [side for name in there for side in adapters[name]]


@fake_kernel("layer_before_attention")
def _before_shape(
    x: Tensor, input_norm: Tensor | None, q_weight: Tensor, q_bias: Tensor | None, k_weight: Tensor, k_bias: Tensor | None,
    v_weight: Tensor, v_bias: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, head_dim: int, eps: float, form: int, ids: Tensor | None, adapters: list[Tensor], adapted: int,
    adapter_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = (x.new_empty((x.shape[0], shape_of(w)[0] // head_dim, head_dim)) for w in (q_weight, k_weight, v_weight))
    return q, k, v


@fake_kernel("layer_after_attention")
def _after_shape(
    attended: Tensor, residual: Tensor, o_weight: Tensor, o_bias: Tensor | None, attention_norm: Tensor | None,
    mlp_norm: Tensor | None, gate_weight: Tensor, gate_bias: Tensor | None, up_weight: Tensor, up_bias: Tensor | None,
    down_weight: Tensor, down_bias: Tensor | None, output_norm: Tensor | None, eps: float, form: int, activation: int,
    scale: float, ids: Tensor | None, adapters: list[Tensor], adapted: int, adapter_scale: float,
) -> Tensor:  # fmt: skip
    return residual.new_empty(residual.shape)


@fake_kernel("layer_pack")
def _key_shape(weights: list[Tensor], parts: int, head_dim: int) -> Tensor:
    each = max(1, parts.bit_count())
    return weights[0].new_empty((len(weights) // each, len(_ORDER)), dtype=torch.int64)


@fake_kernel("layer_stack")
def _stack_shape(
    x: Tensor, first_input: Tensor | None, weights: list[Tensor], parts: int, caches: list[Tensor], prefix_lens: Tensor,
    cu_nodes: Tensor, visible: Tensor, max_nodes: int, depths: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    positions: Tensor | None, rotates: list[int], windows: list[int], ids: Tensor | None, deep: Tensor | None,
    adapters: list[Tensor], adapted: int, adapter_scale: float, final_norm: Tensor | None, head: Tensor | None,
    wanted: Tensor | None, taps: list[int], head_dim: int, eps: float, form: int, activation: int, scale: float,
    attention_scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows = x.shape[0] if wanted is None else wanted.shape[0]
    width = x.shape[1] if head is None else shape_of(head)[0]
    new = caches[0].new_empty((2 * len(windows), x.shape[0], *caches[0].shape[-2:]))
    return x.new_empty((rows, width)), new, x.new_empty((len(taps), *x.shape))
