"""``step_rms_norm``, ``step_rotary`` and ``step_gate`` on the emulator."""

from torch import Tensor

from emulator import session
from emulator.ops.launching import given, name_of, pointers, seeds


def groups_of(name: str, x: Tensor) -> tuple[Tensor, dict[str, int]]:
    """The tensor, or a contiguous copy, and the distances of its rows in groups."""
    levels: list[list[int]] = []  # [count, distance], inner first
    for size, stride in reversed(list(zip(x.shape[:-1], x.stride()[:-1], strict=True))):
        if size == 1:
            continue
        if not levels or stride != levels[-1][0] * levels[-1][1]:
            levels.append([1, stride])
        levels[-1][0] *= size
    if len(levels) > 2 or x.stride(-1) != 1:
        return groups_of(name, x.contiguous())
    levels += [[1, x.shape[-1]]] * (2 - len(levels))
    (count, row), (_, group) = levels
    return x, {f"{name}_rows_in_group": count, f"{name}_group_distance": group, f"{name}_row_distance": row}


def step_rms_norm(x, weight, residual, eps, form):
    weight = weight.contiguous()
    out, total = x.new_empty(x.shape), x.new_empty((0,) if residual is None else x.shape)
    if not out.numel():
        return out, total
    x, numbers = groups_of("x", x)
    if residual is not None:
        residual, more = groups_of("residual", residual)
        numbers |= more
    buffers = {name: (tensor, "in") for name, tensor in given(x=x, weight=weight, residual=residual).items()}
    buffers |= {"out": (out, "out")} | ({} if residual is None else {"sum": (total, "out")})
    with session(buffers, seed=next(seeds)) as machine:
        machine.step_rms_norm(dict(
            pointers(buffers), **numbers, dtype=name_of(x.dtype), rows=out.numel() // out.shape[-1], dim=out.shape[-1],
            eps=float(eps), form=form,
        ))  # fmt: skip
    return out, total


def step_rotary(q, k, cos, sin):
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    out = q.new_empty(q.shape), k.new_empty(k.shape)
    if not sum(x.numel() for x in out):
        return out
    buffers = {name: (tensor, "in") for name, tensor in dict(q=q, k=k, cos=cos, sin=sin).items()}
    buffers |= {"q_out": (out[0], "out"), "k_out": (out[1], "out")}
    numbers = {"cos_distance": cos.stride(0), "sin_distance": sin.stride(0)}
    for name, heads in (("q", q), ("k", k)):
        row, head, _ = heads.stride()
        numbers |= {f"{name}_heads": heads.shape[1], f"{name}_row_distance": row, f"{name}_head_distance": head}
    with session(buffers, seed=next(seeds)) as machine:
        machine.step_rotary(dict(
            pointers(buffers), **numbers, dtype=name_of(q.dtype), factor_dtype=name_of(cos.dtype), rows=q.shape[0],
            dim=q.shape[2], rotated=cos.shape[1],
        ))  # fmt: skip
    return out


def step_gate(gate, up, activation):
    dim = gate.shape[-1] // (2 if up is None else 1)
    out = gate.new_empty((*gate.shape[:-1], dim))
    if not out.numel():
        return out
    gate, numbers = groups_of("gate", gate)
    buffers = {"gate": (gate, "in"), "out": (out, "out")}
    if up is None:
        halves = {"up": gate.data_ptr() + dim * gate.element_size()}
        numbers |= {name.replace("gate", "up", 1): value for name, value in numbers.items()}
    else:
        halves = {}
        up, more = groups_of("up", up)
        numbers |= more
        buffers["up"] = (up, "in")
    with session(buffers, seed=next(seeds)) as machine:
        machine.step_gate(dict(
            pointers(buffers), **halves, **numbers, dtype=name_of(gate.dtype), rows=out.numel() // dim, dim=dim,
            activation=activation,
        ))  # fmt: skip
    return out


KERNELS = {"step_rms_norm": step_rms_norm, "step_rotary": step_rotary, "step_gate": step_gate}
