"""The work between a model's products, `pass_ext.layers.step_rms_norm`, `step_rotary` and `step_gate`, against the ops that
a model's modules call in PyTorch. `python -m benchmarks.ops.step --help`.

The shapes are those of one layer of SmolLM2-135M and of Llama 3 8B; queries, keys, gate and up are views of joined products.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import pass_ext
from benchmarks.harness.aims import at_least, fastest_of, launches, never_slower
from benchmarks.harness.cases import OURS, Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import line_name, lines_of
from pass_ext.testing import assert_error_within

LAYERS = {"135M": (576, 9, 3, 64, 1536), "8B": (4096, 32, 8, 128, 14336)}  # d, heads, key heads, width of a head, inner
ROWS = (1, 8, 64)
EPS = 1e-5
PLAIN = "PyTorch"


# ---- the contenders: a model's lines as they are ----


def norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """pass_ext: the residual addition and the norm."""
    return pass_ext.layers.step_rms_norm(x, weight, eps=EPS, residual=residual)


def plain_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As LlamaRMSNorm after an addition."""
    s = residual + x
    wide = s.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + EPS)
    return weight * wide.to(s.dtype), s


def functional_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's own norm, which rounds once."""
    s = residual + x
    return functional.rms_norm(s, weight.shape, weight, EPS), s


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """pass_ext."""
    return pass_ext.layers.step_rotary(q, k, cos, sin)


def rotate_half(x: Tensor) -> Tensor:
    """As in transformers."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As apply_rotary_pos_emb."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def gate(joined: Tensor) -> Tensor:
    """pass_ext."""
    return pass_ext.layers.step_gate(joined)


def plain_gate(joined: Tensor) -> Tensor:
    """silu, and the product."""
    gate, up = joined.chunk(2, dim=-1)
    return functional.silu(gate) * up


CONTENDERS = {
    "norm": (Contender(OURS, norm), Contender(PLAIN, plain_norm), Contender("F.rms_norm", functional_norm)),
    "rotary": (Contender(OURS, rotary), Contender(PLAIN, plain_rotary)),
    "gate": (Contender(OURS, gate), Contender(PLAIN, plain_gate)),
}


# ---- the cases ----


def check_errors(case: Case) -> None:
    """Raises unless every contender is as close to float64 as PyTorch's lines are."""
    inputs = case.inputs[0]
    plain = case.contenders[1]
    results = [_tensors(contender(*inputs)) for contender in case.contenders]
    exact = _tensors(plain(*(tensor.double() for tensor in inputs)))
    for result in results:
        for value, near, truth in zip(result, results[1], exact, strict=True):
            assert_error_within(value, near, truth)


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def make_plan(options: argparse.Namespace) -> Plan:
    """Every layer with every number of rows; one row and the small layer with --quick."""
    layers = tuple(LAYERS)[: 1 if options.quick else None]
    sizes = [(layer, rows) for layer in layers for rows in ROWS[: 1 if options.quick else None]]
    labels = [f"{op}, {layer}, {rows} rows" for layer, rows in sizes for op in CONTENDERS]
    return Plan(labels, make_cases(options, sizes))


def make_cases(options: argparse.Namespace, sizes: list[tuple[str, int]]) -> Iterator[Case]:
    """The cases. Fewest bytes: each input and each result once."""
    dtype, device = DTYPES[options.dtype], torch.device(options.device)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    for layer, rows in sizes:
        d, heads, key_heads, width, inner = LAYERS[layer]
        angles = torch.arange(rows, device=device)[:, None] * 1e4 ** -(
            torch.arange(0, width, 2, device=device).repeat(2) / width
        )
        joined = random(rows, heads + 2 * key_heads, width)
        q, k = joined[:, :heads], joined[:, heads : heads + key_heads]
        inputs: dict[str, tuple[Tensor, ...]] = {
            "norm": (random(rows, d), random(rows, d), random(d)),
            "rotary": (q, k, angles.cos().to(dtype), angles.sin().to(dtype)),
            "gate": (random(rows, 2 * inner),),
        }
        numbers = {
            "norm": rows * d * 4 + d,
            "rotary": rows * width * (2 * (heads + key_heads) + 2),
            "gate": rows * inner * 3,
        }
        for op, contenders in CONTENDERS.items():
            labels: dict[str, str | int] = {"op": op, "layer": layer, "rows": rows}
            moved = numbers[op] * dtype.itemsize
            yield Case(labels, contenders, [inputs[op]], fewest_bytes=moved, check=check_errors)


# ---- the aims ----


def judge(rows: list[Row]) -> list[Aim]:
    """Norm and rotary twice as fast as the fastest other way up to 8 rows, nothing slower; on a GPU one launch."""
    lines = lines_of({"rows": rows})
    few = [line for line in lines if line[0]["labels"]["rows"] <= 8 and line[0]["labels"]["op"] != "gate"]
    warm = [line for line in few if line[0]["cache"] == "warm"]
    aims = [at_least("norm and rotary, warm, at most 8 rows: 2 × faster", 2, fastest_of(warm, name))]
    aims.append(never_slower(lines, name))
    if any(row["how"] == "graph" for row in rows):
        x, weight = torch.randn(8, 576, device="cuda"), torch.randn(576, device="cuda")
        aims.append(launches("one launch per norm", 1, norm, (x, x, weight)))
    return aims


def name(line: list[Row]) -> str:
    """A line in a few words."""
    labels = line[0]["labels"]
    return line_name(line, labels["op"], labels["layer"], f"{labels['rows']} rows")


if __name__ == "__main__":
    run("step", parse(__doc__ or ""), make_plan, judge)
