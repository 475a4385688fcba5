"""``layer_before_attention`` and ``layer_after_attention`` on the emulator: the launches of csrc/cuda/layer.cuh."""

import torch

from emulator import session
from emulator.ops.launching import given, name_of, pointers, seeds
from pass_ext.ops.layer import ADAPTED


class Arguments:
    """The tensors and numbers of a layer's weights."""

    def __init__(self, x) -> None:
        self.tensors: dict = {}
        self.numbers: dict = {"dtype": name_of(x.dtype), "rows": len(x)}

    def linear(self, name, weight, bias) -> None:
        self.tensors |= given(**{f"{name}_weight": weight, f"{name}_bias": bias})
        self.numbers |= {
            f"{name}_outputs": weight.shape[0],
            f"{name}_in": weight.shape[1],
            f"{name}_row": weight.stride(0),
        }

    def norm(self, name, weight) -> None:
        if weight is not None:
            self.tensors[name] = weight
            self.numbers[f"{name}_dim"] = len(weight)

    def adapters(self, names, ids, adapters, adapted, scale) -> None:
        """The half's adapters, for the linear layers `names`."""
        if not adapted:
            return
        there = [name for name in names if adapted >> ADAPTED.index(name) & 1]
        self.tensors["ids"] = ids
        self.numbers |= {"ids_are_int64": int(ids.dtype is torch.int64), "adapters": len(adapters[0])}
        self.numbers["adapter_scale"] = float(scale)
        for name, down, up in zip(there, adapters[::2], adapters[1::2], strict=True):
            if down.shape[1]:
                self.tensors |= {f"{name}_adapter_down": down, f"{name}_adapter_up": up}
                self.numbers[f"{name}_rank"] = down.shape[1]

    def run(self, name, outputs) -> None:
        """Launches with a workspace of as many numbers as `<half>_workspace` says."""
        first = next(iter(outputs.values()))
        addresses = {key: tensor.data_ptr() for key, tensor in self.tensors.items()}
        with session({}) as machine:
            size = getattr(machine, name.replace("_attention", "_workspace"))(addresses | self.numbers)
        buffers = {key: (tensor, "in") for key, tensor in self.tensors.items()}
        buffers |= {key: (tensor, "out") for key, tensor in outputs.items()}
        buffers["workspace"] = (first.new_empty(size), "out")
        with session(buffers, seed=next(seeds)) as machine:
            getattr(machine, name)(pointers(buffers) | self.numbers)


def layer_before_attention(
    x, input_norm, q_weight, q_bias, k_weight, k_bias, v_weight, v_bias, q_norm, k_norm, cos, sin, head_dim, eps, form, ids,
    adapters, adapted, adapter_scale,
):  # fmt: skip
    x = x.contiguous()
    arguments = Arguments(x)
    arguments.tensors |= given(x=x, cos=cos, sin=sin)
    for name, weight, bias in (("q", q_weight, q_bias), ("k", k_weight, k_bias), ("v", v_weight, v_bias)):
        arguments.linear(name, weight, bias)
    for name, weight in (("input_norm", input_norm), ("q_norm", q_norm), ("k_norm", k_norm)):
        arguments.norm(name, weight)
    arguments.numbers |= {"head_dim": head_dim, "eps": float(eps), "form": form, "scale": 1.0}
    if cos is not None:
        wide = int(cos.dtype is torch.float32 and x.dtype is not torch.float32)
        arguments.numbers |= {"cos_row": cos.stride(0), "sin_row": sin.stride(0), "cos_dim": cos.shape[1]}
        arguments.numbers["cos_is_float32"] = wide
    arguments.adapters("qkv", ids, adapters, adapted, adapter_scale)
    weights = {"q": q_weight, "k": k_weight, "v": v_weight}
    out = {name: x.new_empty((len(x), len(weight) // head_dim, head_dim)) for name, weight in weights.items()}
    if len(x):
        arguments.run("layer_before_attention", out)
    return tuple(out.values())


def layer_after_attention(
    attended, residual, o_weight, o_bias, attention_norm, mlp_norm, gate_weight, gate_bias, up_weight, up_bias, down_weight,
    down_bias, output_norm, eps, form, activation, scale, ids, adapters, adapted, adapter_scale,
):  # fmt: skip
    attended, residual = attended.contiguous(), residual.contiguous()
    arguments = Arguments(attended)
    arguments.tensors |= given(attended=attended, residual=residual)
    linears = {"o": (o_weight, o_bias), "gate": (gate_weight, gate_bias), "up": (up_weight, up_bias)}
    for name, (weight, bias) in (linears | {"down": (down_weight, down_bias)}).items():
        arguments.linear(name, weight, bias)
    norms = {"attention_norm": attention_norm, "mlp_norm": mlp_norm, "output_norm": output_norm}
    for name, weight in norms.items():
        arguments.norm(name, weight)
    arguments.numbers |= {"eps": float(eps), "form": form, "activation": activation, "scale": float(scale)}
    arguments.adapters(("o", "gate", "up", "down"), ids, adapters, adapted, adapter_scale)
    out = residual.new_empty(residual.shape)
    if out.numel():
        arguments.run("layer_after_attention", {"out": out})
    return out


KERNELS = {"layer_before_attention": layer_before_attention, "layer_after_attention": layer_after_attention}
