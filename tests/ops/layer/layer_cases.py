"""Arguments of layer_before_attention and layer_after_attention, and the same results by the ops one by one."""

import torch

import pass_ext


class Numbers:
    """Random tensors of one dtype, on the default device."""

    def __init__(self, seed, dtype):
        self._generator, self._dtype = torch.Generator("cpu").manual_seed(seed), dtype

    def __call__(self, *shape, dtype=None):
        scale = shape[1] ** -0.5 if len(shape) == 2 else 1.0
        numbers = torch.randn(shape, generator=self._generator, dtype=torch.float64, device="cpu") * scale
        return numbers.to(torch.get_default_device(), dtype or self._dtype)


def before_case(
    rows, dtype, *, width=72, heads=3, key_heads=2, head_dim=16, whole=False, plain=False, fp32_cos=False, rotated=0
):
    random = Numbers(rows + width, dtype)
    sizes = heads * head_dim, key_heads * head_dim, key_heads * head_dim
    tensors = dict(x=random(rows, width) * width**0.5)
    tensors |= {f"{name}_weight": random(size, width) for name, size in zip("qkv", sizes, strict=True)}
    if not plain:
        tensors |= {f"{name}_bias": random(size) for name, size in zip("qkv", sizes, strict=True)}
        widths = sizes[:2] if whole else (head_dim, head_dim)
        tensors |= dict(input_norm=random(width), q_norm=random(widths[0]), k_norm=random(widths[1]))
    angles = random(rows, rotated or head_dim, dtype=torch.float64)
    wide = torch.float32 if fp32_cos else dtype
    return tensors | dict(cos=angles.cos().to(wide), sin=angles.sin().to(wide))


def after_case(rows, dtype, *, width=72, attended=96, inner=100, norms=("mlp_norm",), biases=True):
    random = Numbers(rows + inner, dtype)
    shapes = dict(o=(width, attended), gate=(inner, width), up=(inner, width), down=(width, inner))
    tensors = dict(attended=random(rows, attended) * attended**0.5, residual=random(rows, width) * width**0.5)
    tensors |= {f"{name}_weight": random(*shape) for name, shape in shapes.items()}
    if biases:
        tensors |= {f"{name}_bias": random(shape[0]) for name, shape in shapes.items()}
    return tensors | {name: random(width) for name in norms}


def adapters_for(case, ranks, count, ids, *, scale=0.7, id_dtype=torch.int64):
    """Adapters of the case's linear layers by name, of these ranks."""
    random = Numbers(sum(ranks.values()) + count, next(iter(case.values())).dtype)
    adapters = {}
    for name, rank in ranks.items():
        outputs, inputs = case[f"{name}_weight"].shape
        adapters[name] = random(count, rank, inputs) * inputs**-0.5, random(count, rank, outputs)
    return dict(ids=torch.tensor(ids, dtype=id_dtype), adapters=adapters, adapter_scale=scale)


# ---- the ops one by one ----


def linear(x, weight, bias=None):
    """Of a dense weight or a packed one."""
    if weight.dtype == torch.uint8:
        return pass_ext.layers.linear_packed(x, weight, bias, outputs=len(weight) * 16)
    return pass_ext.layers.linear_rows(x, weight, bias)


def with_adapter(name, out, x, ids, adapters, scale):
    if adapters and name in adapters:
        pass_ext.layers.adapter_rows_(out, x, ids, *adapters[name], scale)
    return out


def before_by_ops(x, q_weight, k_weight, v_weight, *, head_dim, q_bias=None, k_bias=None, v_bias=None, input_norm=None,
                  q_norm=None, k_norm=None, cos=None, sin=None, ids=None, adapters=None, adapter_scale=1.0,
                  **norm):  # fmt: skip
    if input_norm is not None:
        x = pass_ext.layers.step_rms_norm(x, input_norm, **norm)[0]
    products = []
    parts = ((q_weight, q_bias, q_norm), (k_weight, k_bias, k_norm), (v_weight, v_bias, None))
    for name, (weight, bias, scale) in zip("qkv", parts, strict=True):
        rows = with_adapter(name, linear(x, weight, bias), x, ids, adapters, adapter_scale)
        if scale is not None:
            rows = pass_ext.layers.step_rms_norm(rows.unflatten(1, (-1, len(scale))), scale, **norm)[0].flatten(1)
        products.append(rows.unflatten(1, (-1, head_dim)))
    if cos is not None:
        products[:2] = pass_ext.layers.step_rotary(*products[:2], cos, sin)
    return products


def after_by_ops(attended, residual, o_weight, gate_weight, up_weight, down_weight, *, o_bias=None, gate_bias=None,
                 up_bias=None, down_bias=None, attention_norm=None, mlp_norm=None, output_norm=None, activation="silu",
                 scale=1.0, ids=None, adapters=None, adapter_scale=1.0, **norm):  # fmt: skip
    def product(name, rows, weight, bias):
        return with_adapter(name, linear(rows, weight, bias), rows, ids, adapters, adapter_scale)

    def added(before, product, weight):
        if weight is not None:
            product = pass_ext.layers.step_rms_norm(product, weight, **norm)[0]
        return before + product * scale

    middle = added(residual, product("o", attended, o_weight, o_bias), attention_norm)
    x = middle if mlp_norm is None else pass_ext.layers.step_rms_norm(middle, mlp_norm, **norm)[0]
    gate, up = product("gate", x, gate_weight, gate_bias), product("up", x, up_weight, up_bias)
    hidden = pass_ext.layers.step_gate(gate, up, activation=activation)
    return added(middle, product("down", hidden, down_weight, down_bias), output_norm)


def doubled(case):
    def wide(value):
        if isinstance(value, dict):
            return {name: tuple(map(wide, pair)) for name, pair in value.items()}
        return value.double() if torch.is_tensor(value) and value.is_floating_point() else value

    return {name: wide(value) for name, value in case.items()}
