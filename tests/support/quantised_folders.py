"""``write_folder``: a small model with random weights as a quantised checkpoint, its integers packed as each format says."""

import json

import torch
from safetensors.torch import save_file
from support.small_models import BYTES, byte_tokenizer, small_model
from torch import nn

GROUP = 32
KINDS = {
    "gptq": dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=False, sym=True),
    "gptq, zeros": dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=False, sym=False),
    "gptq, act order": dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=True, sym=False),
    "gptq, 8 bits": dict(quant_method="gptq", bits=8, group_size=GROUP, desc_act=False, sym=True),
    "gptq, 3 bits": dict(quant_method="gptq", bits=3, group_size=GROUP, desc_act=False, sym=True),
    "gptq_v2": dict(quant_method="gptq", bits=4, group_size=GROUP, checkpoint_format="gptq_v2", sym=False),
    "awq": dict(quant_method="awq", bits=4, group_size=GROUP, version="gemm", zero_point=True),
    "compressed-tensors": dict(bits=4, symmetric=True),
    "compressed-tensors, zeros": dict(bits=4, symmetric=False),
    "compressed-tensors, act order": dict(bits=4, symmetric=False, actorder="group"),
    "compressed-tensors, channels": dict(bits=8, symmetric=True),
    "compressed-tensors, bytes": dict(bits=8, symmetric=True),
}


IDS = dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"), BYTES)
# 257 tokens: outputs of a head that are no whole groups of 16.
SHAPE = dict(IDS, sharpness=1.0, vocab_size=BYTES + 1, hidden_size=128, intermediate_size=192)
EXPERTS = {
    "qwen2_moe": dict(SHAPE, moe_intermediate_size=64, shared_expert_intermediate_size=64, use_sliding_window=False),
    "gpt_oss": dict(SHAPE, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, hidden_size=64),
}


def write_folder(folder, kind, *, architecture="llama", dtype=torch.float16, damage=lambda tensors: None, **settings):
    """Writes it; returns the model of its exact numbers, in float32.

    damage: changes the tensors before they are written. settings: of the quantization config.
    """
    model = small_model(architecture, **EXPERTS.get(architecture, SHAPE))
    tensors = {
        name: weight.to(dtype)
        for name, weight in model.state_dict().items()
        if "_proj" not in name or name.endswith(("_bias", ".bias"))
    }
    exact = {name: weight.float() for name, weight in tensors.items()}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.endswith("_proj"):
            parts, exact[f"{name}.weight"] = quantised_layer(kind, layer.out_features, layer.in_features, dtype)
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        elif name.endswith(".experts"):
            count, both, width = layer.gate_up_proj.shape
            numbers = {part: [] for part in ("gate", "up", "down")}
            for number in range(count):
                for part, found in numbers.items():
                    size = (width, both // 2) if part == "down" else (both // 2, width)
                    parts, weight = quantised_layer(kind, *size, dtype)
                    found.append(weight)
                    tensors |= {f"{name}.{number}.{part}_proj.{own}": each.contiguous() for own, each in parts.items()}
            gate, up, down = map(torch.stack, numbers.values())
            exact |= {f"{name}.gate_up_proj": torch.cat([gate, up], dim=1), f"{name}.down_proj": down}
    model.load_state_dict(exact)
    damage(tensors)
    _write(folder, model, tensors, quantization_config(kind) | settings)
    return model


def write_fp4_folder(folder, *, damage=lambda tensors: None):
    """gpt-oss as it is published: experts in blocks of 32 numbers of 4 bits; returns the model of its exact numbers."""
    model = small_model("gpt_oss", **EXPERTS["gpt_oss"])
    exact = {name: weight.bfloat16().float() for name, weight in model.state_dict().items()}
    tensors = {name: weight.bfloat16() for name, weight in exact.items()}
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    for name in [name for name in exact if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, width, outputs = tensors.pop(name).shape
        codes = torch.randint(0, 16, (count, outputs, width // 32, 32), dtype=torch.uint8)
        exponents = torch.randint(118, 123, codes.shape[:3], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4, f"{name}_scales": exponents}
        numbers = table[codes.long()] * 2.0 ** (exponents.float() - 127)[..., None]
        exact[name] = numbers.flatten(-2).transpose(1, 2)
    model.load_state_dict(exact)
    damage(tensors)
    _write(folder, model, tensors, dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"]))
    return model


def quantised_layer(kind, outputs, width, dtype):
    """Random integers as a layer's tensors, by the last part of their names -> ``(tensors, exact numbers)``."""
    return _LAYOUTS[kind.split(",")[0]](kind, outputs, width, dtype)


def _write(folder, model, tensors, settings):
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = model.config.to_dict() | {"quantization_config": settings, "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save_pretrained(folder)


def quantization_config(kind):
    """The config's entry."""
    settings = KINDS[kind]
    if not kind.startswith("compressed"):
        return settings
    is_grouped = "channels" not in kind and "bytes" not in kind
    weights = dict(num_bits=settings["bits"], type="int", symmetric=settings["symmetric"], dynamic=False)
    weights |= dict(strategy="group", group_size=GROUP) if is_grouped else dict(strategy="channel")
    return dict(
        quant_method="compressed-tensors", format="int-quantized" if "bytes" in kind else "pack-quantized",
        config_groups={"group_0": dict(targets=["Linear"], weights=weights, input_activations=None)}, ignore=["lm_head"],
    )  # fmt: skip


def _words(integers, bits):
    """Integers along the last axis as a stream of bits in words of 32, bit by bit."""
    shape = integers.shape[:-1]
    stream = (integers[..., None] >> torch.arange(bits) & 1).flatten(-2)
    each = stream.view(*shape, -1, 32).long() << torch.arange(32)
    return each.sum(-1).to(torch.int32)


def _numbers(outputs, width, groups, bits, dtype, *, symmetric):
    codes = torch.randint(0, 1 << bits, (outputs, width))
    scale = (torch.rand(outputs, groups) / (4 << bits) + 1e-3).to(dtype)
    zero = torch.randint(1, 1 << bits, (outputs, groups))
    return codes, scale, torch.full_like(zero, 1 << (bits - 1)) if symmetric else zero


def _exact(codes, scale, zero, group):
    return ((codes - zero[:, group]).double() * scale.double()[:, group]).float()


def _order(kind, width):
    """The group of each input."""
    group = torch.arange(width) // GROUP
    return group[torch.randperm(width)] if "act order" in kind else group


def _gptq(kind, outputs, width, dtype):
    settings, group = KINDS[kind], _order(kind, width)
    bits = settings["bits"]
    codes, scale, zero = _numbers(outputs, width, width // GROUP, bits, dtype, symmetric=settings["sym"])
    parts = dict(
        qweight=_words(codes, bits).t(),
        qzeros=_words(zero.t() - int(kind != "gptq_v2"), bits),
        scales=scale.t(),
        g_idx=group.to(torch.int32),
        bias=torch.zeros(outputs, dtype=dtype),  # as some tools write it for layers without
    )
    return parts, _exact(codes, scale, zero, group)


def _awq(kind, outputs, width, dtype):
    codes, scale, zero = _numbers(outputs, width, width // GROUP, 4, dtype, symmetric=False)
    places = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # of the outputs in a word, from the lowest bits

    def words(integers):
        return _words(integers.t().unflatten(-1, (-1, 8))[..., places].flatten(-2), 4)

    parts = dict(qweight=words(codes), qzeros=words(zero), scales=scale.t())
    return parts, _exact(codes, scale, zero, _order(kind, width))


def _compressed(kind, outputs, width, dtype):
    settings, group = KINDS[kind], _order(kind, width)
    bits, is_symmetric = settings["bits"], settings["symmetric"]
    if "channels" in kind or "bytes" in kind:
        group = torch.zeros_like(group)
    groups = int(group.max()) + 1
    codes, scale, zero = _numbers(outputs, width, groups, bits, dtype, symmetric=is_symmetric)
    exact = _exact(codes, scale, zero, group)
    if "bytes" in kind:
        return dict(weight=(codes - 128).to(torch.int8), weight_scale=scale), exact
    parts = dict(weight_packed=_words(codes, bits), weight_scale=scale, weight_shape=torch.tensor([outputs, width]))
    if not is_symmetric:
        parts["weight_zero_point"] = _words(zero.t(), bits).t()
    if "act order" in kind:
        parts["weight_g_idx"] = group.to(torch.int32)
    return parts, exact


_LAYOUTS = {"gptq": _gptq, "gptq_v2": _gptq, "awq": _awq, "compressed-tensors": _compressed}
