"""Finds the parts of a transformers model by their names: its layers, and the plan of its forward by our ops.

The plan is a guess: ``backend.py`` compares the numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn

from pass_ext.decoding.models.module_ops import Norm, are_of_torch, gate_of, is_plain_linear, is_untouched, norm_of
from pass_ext.decoding.models.modules import modules_of
from pass_ext.ops.linear import shape_of
from pass_ext.weights.layers import PackedLinear, is_whole

# ---- the model ----


def unwrapped(model: Any) -> Any:
    """The transformers model inside torch.compile's or peft's wrapper; its layers keep their adapters."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def configs_of(config: Any) -> Iterator[Any]:
    """A config and those within it."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from configs_of(part)


def decoder_of(model: Any) -> Any:
    """The module of a transformers model that has the layers and what is around them, without the output layer."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    inner = model._modules.get("model")
    if decoder is model and inner is not None:
        return inner
    if not has_encoder(model):
        return decoder
    return decoder._modules.get(
        "model", decoder
    ).get_decoder()  # of a causal model beside an encoder, or of a whole one


def has_encoder(model: Any) -> bool:
    """True for an encoder-decoder model."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def reads_whole(model: Any) -> bool:
    """True for a decoder of which some layers say that rows of a prompt attend to those after them too."""
    if has_encoder(model):
        return False
    lists = [part for part in decoder_of(model)._modules.values() if isinstance(part, nn.ModuleList)]
    own = (part for layers in lists for part in modules_of(layers) if "layer_idx" in vars(part))
    return any(getattr(part, "is_causal", True) is False for part in own)


def number_of_layers(config: Any) -> int | None:
    """Of the decoder of a model with this config; None: it does not say."""
    text = config.get_text_config(decoder=True)
    # A decoder alone, as WhisperForCausalLM, has the config of both.
    if getattr(config, "is_encoder_decoder", False) or text.attribute_map.get("num_hidden_layers") == "encoder_layers":
        for part in (config, text):  # the names of the second may be without "decoder"
            for name in ("decoder_layers", "num_decoder_layers"):
                if hasattr(part, name):
                    return int(getattr(part, name))
    count: int | None = getattr(text, "num_hidden_layers", None)
    return count


def text_parts(model: Any) -> list[nn.Module]:
    """The modules that a call on tokens runs: the decoder's, the output layer, and what is around these. Encoders of pictures
    and sound are none."""
    inner = unwrapped(model)
    ends = [part for part in (decoder_of(inner), inner.get_output_embeddings()) if isinstance(part, nn.Module)]
    inside, named = {part for end in ends for part in modules_of(end)}, dict(inner.named_modules())
    places = [name.split(".") for name, part in named.items() if part in ends]
    around = {".".join(place[:depth]) for place in places for depth in range(len(place))}
    return [part for name, part in named.items() if part in inside or name in around]


def decoder_layers(model: Any) -> nn.ModuleList:
    """The layers of a transformers decoder."""
    count = number_of_layers(model.config)
    for module in modules_of(decoder_of(model)):
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {count} layers whose inputs could be read or shifted")


def linear_at(layers: nn.ModuleList, place: str) -> nn.Module | None:
    """The module at a place such as "3.self_attn.q_proj"; None: there is none."""
    part: Any = layers
    for name in place.split("."):
        part = getattr(part, name, None)
    return part if isinstance(part, nn.Module) else None


def sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear layer; None for any other module."""
    for names in (("in_features", "out_features"), ("nx", "nf")):  # nn.Linear and wrappers of it, Conv1D
        inputs, outputs = (getattr(module, name, None) for name in names)
        if isinstance(inputs, int) and isinstance(outputs, int):
            return inputs, outputs
    return None


_CACHE_NAMES = ("cache", "past_key_values")  # since transformers 5.24, and before; other packages may keep the old name


def cache_name(takes: Callable[..., Any]) -> str:
    """The argument by which a model's forward, a layer's, or the class of an output takes the cache."""
    return next((name for name in _CACHE_NAMES if name in inspect.signature(takes).parameters), _CACHE_NAMES[1])


def given_cache(named: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments, by either name; None: there is none."""
    return next((named[name] for name in _CACHE_NAMES if named.get(name) is not None), None)


# ---- a layer ----

# Which norm is where, by the names of a layer's norms: in front of attention, after it, in front of the MLP, after it.
_NORMS: dict[frozenset[str], tuple[str, str, str, str]] = {
    frozenset({"input_layernorm", "post_attention_layernorm"}):
        ("input_layernorm", "", "post_attention_layernorm", ""),
    frozenset({"post_attention_layernorm", "post_feedforward_layernorm"}):
        ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    frozenset({"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}):
        ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}  # fmt: skip
_INERT = (nn.Dropout, nn.Identity)  # in eval mode
Linear = tuple[Tensor, Tensor | None]


class LayerParts(NamedTuple):
    """What the layer ops need of a layer."""

    before: tuple[Tensor | None, ...]
    """Weights that ``layer_before_attention`` takes, in its order."""
    after: tuple[Tensor | None, ...]
    """Those that ``layer_after_attention`` takes."""
    head_dim: int
    eps: float
    form: int
    activation: int
    scale: float
    """Of what is added to the residual."""


def parts_of(layer: nn.Module, number: int) -> LayerParts | None:
    """The layer, taken apart by the names of its parts; None if it has others, or if its products are PyTorch's."""
    attention, mlp = layer._modules.get("self_attn"), layer._modules.get("mlp")
    if attention is None or mlp is None or "forward" in vars(layer):
        return None
    if not (is_untouched(attention) and is_untouched(mlp)):  # hooks on the layer itself are called all the same
        return None
    norms = {name: norm for name, part in layer._modules.items() if (norm := _untouched_norm(part)) is not None}
    places = _NORMS.get(frozenset(norms))
    rest = set(layer._modules) - set(norms) - {"self_attn", "mlp"}
    if places is None or not all(isinstance(layer._modules[name], _INERT) for name in rest):
        return None
    gated, head_dim = gate_of(mlp), getattr(attention, "head_dim", None)
    if gated is None or not isinstance(head_dim, int) or getattr(attention, "layer_idx", None) != number:
        return None
    products = _attention_products(attention), _mlp_products(mlp, joined=gated.joined)
    heads: dict[str, Any] = {
        name: _untouched_norm(part) for name, part in attention._modules.items() if name in ("q_norm", "k_norm")
    }
    if any(None in parts for parts in (*products, heads.values())):
        return None
    (q, k, v, o), (gate, up, down) = products
    weight_at = {name: norm.weight for name, norm in (norms | heads).items()}
    options = {(norm.eps, norm.form) for norm in (norms | heads).values()}
    if len(options) != 1:  # the ops take one eps and one form
        return None
    eps, form = options.pop()
    input_norm, attention_norm, mlp_norm, output_norm = (weight_at.get(name) for name in places)
    scale = float(vars(layer).get("residual_multiplier", 1.0))
    if scale != 1.0 and (attention_norm is not None or output_norm is not None):
        return None
    if len({tensor.device for tensor in layer.parameters()}) != 1 or are_of_torch(layer):
        return None
    before = input_norm, *q, *k, *v, weight_at.get("q_norm"), weight_at.get("k_norm")
    after = *o, attention_norm, mlp_norm, *gate, *up, *down, output_norm
    return LayerParts(before, after, head_dim, eps, form, gated.activation, scale)


def _untouched_norm(part: nn.Module | None) -> Norm | None:
    if part is None or type(type(part).forward) is not FunctionType or not is_untouched(part):
        return None
    return norm_of(part)


def _linear_at(parent: nn.Module, name: str) -> Linear | None:
    return weights_of(parent._modules.get(name))


def weights_of(part: nn.Module | None) -> Linear | None:
    """Weight and bias of a linear layer that the layer ops compute; None: they do not."""
    if isinstance(part, PackedLinear):
        return (part.weight, part.bias) if is_untouched(part) and is_whole(part) else None
    return (part.weight, part.bias) if is_plain_linear(part) else None


def _attention_products(attention: nn.Module) -> tuple[Any, ...]:
    """q, k, v and o, the first three of which may be parts of one; None for one that is missing."""
    o, joined = _linear_at(attention, "o_proj"), _linear_at(attention, "qkv_proj")
    if joined is not None and o is not None:
        queries = shape_of(o[0])[1]
        keys = (shape_of(joined[0])[0] - queries) // 2
        return (*_split(joined, (queries, keys, keys)), o) if keys > 0 else (None,)
    return *(_linear_at(attention, name) for name in ("q_proj", "k_proj", "v_proj")), o


def _mlp_products(mlp: nn.Module, *, joined: bool) -> tuple[Any, ...]:
    """gate, up and down; None for one that is missing."""
    down = _linear_at(mlp, "down_proj")
    if not joined:
        return _linear_at(mlp, "gate_proj"), _linear_at(mlp, "up_proj"), down
    both = _linear_at(mlp, "gate_up_proj")
    return (None,) if both is None or down is None else (*_split(both, (shape_of(down[0])[1],) * 2), down)


def _split(linear: Linear, sizes: tuple[int, ...]) -> list[Linear | None]:
    weight, bias = linear
    each = shape_of(weight)[0] // max(1, len(weight))  # outputs that lie together in a packed weight
    if any(size % each for size in sizes):
        return [None]
    rows = [size // each for size in sizes]
    weights = weight.detach().split(rows)
    return list(zip(weights, [None] * len(sizes) if bias is None else bias.detach().split(sizes), strict=True))


# ---- the plan ----


class Unlike(Exception):
    """The reason why our ops do not compute a model's forward."""


class StackArguments(NamedTuple):
    """What ``layer_stack`` takes of all layers, which are alike."""

    weights: list[Tensor]
    parts: int
    windows: list[int]
    numbers: tuple[Any, ...]
    """Head size, eps, form, activation, scale, attention's scale and softcap."""
    key_heads: int


class ModelPlan(NamedTuple):
    """A model's parts: tensors and numbers, no modules."""

    layers: list[LayerParts]
    attention: list[dict[str, Any]]
    """Options of each layer's attention: scale, softcap, window, sinks and chunk."""
    kinds: list[tuple[str, ...]]
    """What the rotary embedding takes after rows and positions, kind by kind of layers."""
    rotates: list[int]
    """The kind of each layer, from 1; 0: it does not rotate."""
    stack: StackArguments | None
    """None: layers are computed one by one."""
    norm: Tensor | None
    """The final norm's weight, if the op of the layers knows the norm and the head; else None."""
    head: Tensor | None
    rows_scale: float
    divisor: float
    cap: float


def plan_of(model: Any, layers: list[LayerParts], attention: Sequence[dict[str, Any]]) -> ModelPlan:
    """The plan of a model with these layers, which attend with these options. Raises ``Unlike``."""
    decoder, config = decoder_of(model), model.config.get_text_config(decoder=True)
    stack = stack_of(layers, attention)
    return ModelPlan(
        layers,
        list(attention),
        *_kinds(decoder, config, len(layers)),
        stack,
        *_ends(decoder.norm, model.get_output_embeddings(), stack),
        float(vars(decoder).get("embedding_multiplier", 1.0)),
        float(getattr(config, "logits_scaling", None) or 1.0),
        float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )


def layers_of(model: Any) -> list[LayerParts]:
    """The layers taken apart. Raises ``Unlike``, before anything was computed."""
    decoder = decoder_of(model)
    if not all(isinstance(getattr(decoder, name, None), nn.Module) for name in ("rotary_emb", "norm")):
        raise Unlike("it has no rotary embedding and final norm by Llama's names")
    if not isinstance(model.get_output_embeddings(), nn.Module):
        raise Unlike("it has no output layer")
    try:
        layers = decoder_layers(model)
    except ValueError as error:
        raise Unlike(str(error)) from error
    found: list[LayerParts] = []
    for number, layer in enumerate(layers):
        parts = parts_of(layer, number)
        if parts is None:
            raise Unlike(f"layer {number} ({type(layer).__name__}) has other parts than the layer ops")
        found.append(parts)
    replaced = next((part for part in (model, decoder, decoder.rotary_emb) if "forward" in vars(part)), None)
    if replaced is not None:
        raise Unlike(f"somebody has replaced {type(replaced).__name__}.forward")
    return found


def _kinds(decoder: Any, config: Any, count: int) -> tuple[list[tuple[str, ...]], list[int]]:
    """The kinds of layers by rotary embedding, and each layer's, from 1."""
    if "layer_type" not in inspect.signature(type(decoder.rotary_emb).forward).parameters:
        return [()], [1] * count
    types = list(getattr(config, "layer_types", None) or [])[:count]
    if len(types) != count:
        raise Unlike("its rotary embedding asks for kinds of layers, which its config does not give")
    names = sorted(set(types), key=types.index)
    return [(name,) for name in names], [1 + names.index(name) for name in types]


def _ends(norm: nn.Module, head: Any, stack: StackArguments | None) -> tuple[Tensor | None, Tensor | None]:
    """The weights of final norm and head, if the op of the layers knows both; else (None, None)."""
    known = None if "forward" in vars(norm) else norm_of(norm)
    if stack is None or known is None or known[1:] != stack.numbers[1:3]:
        return None, None
    product = weights_of(head)
    if product is None or product[1] is not None or are_of_torch(head):
        return None, None
    return known.weight, product[0]


def stack_of(layers: Sequence[LayerParts], attention: Sequence[dict[str, Any]]) -> StackArguments | None:
    """The arguments for all layers; None on a GPU, with sinks or chunks, or if they differ in what the op takes once."""
    weights: list[Tensor] = []
    alike = set()
    for parts, options in zip(layers, attention, strict=True):
        tensors = *parts.before, *parts.after
        weights += [tensor for tensor in tensors if tensor is not None]
        present = sum(1 << i for i, tensor in enumerate(tensors) if tensor is not None)
        alike.add((present, (*parts[2:], options["scale"], options["softcap"])))
    if len(alike) != 1 or not all(weight.is_cpu for weight in weights):  # the op is for the CPU
        return None
    if any(options["sinks"] is not None or options["chunk"] >= 0 for options in attention):
        return None
    present, numbers = alike.pop()
    keys = layers[0].before[3]
    assert keys is not None
    return StackArguments(
        weights, present, [options["window"] for options in attention], numbers, shape_of(keys)[0] // numbers[0]
    )
