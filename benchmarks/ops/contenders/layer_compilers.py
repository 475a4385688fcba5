"""The decoder layers of a call without their attention, 30 layers of SmolLM2-135M: PyTorch as it is, PyTorch compiled
(`torch.compile`, AOTInductor), the single ops of pass_ext, and its layer ops.
`python -m benchmarks.ops.contenders.layer_compilers --help`.

Every layer has weights of its own, so they come from memory as in a model. All ways run in turn; medians of the rounds.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch.nn import functional

import pass_ext
from benchmarks import ROOT
from benchmarks.harness.machine import commit, describe_machine, describe_versions, device_slug, now
from benchmarks.harness.markdown import table

D, HEADS, KEY_HEADS, HEAD, INNER = 576, 9, 3, 64, 1536
LAYERS, ROWS, ROUNDS, EPS = 30, (1, 8), 15, 1e-5
torch._inductor.config.compile_threads = 1  # no processes that compile, or start, beside the measurement
Way = Callable[..., Any]


# ---- the ways, as transformers does it and by our ops ----


def plain_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As LlamaRMSNorm after an addition."""
    s = residual + x
    wide = s.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + EPS)
    return weight * wide.to(s.dtype), s


def rotate_half(x: Tensor) -> Tensor:
    """As in transformers."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As apply_rotary_pos_emb."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def before(x: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """pass_ext: one call."""
    return pass_ext.layers.layer_before_attention(x, q, k, v, head_dim=HEAD, input_norm=norm, cos=cos, sin=sin, eps=EPS)


def single_before(
    x: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:
    """pass_ext: five calls."""
    x, _ = pass_ext.layers.step_rms_norm(x, norm, eps=EPS)
    queries, keys, values = (pass_ext.layers.linear_rows(x, weight).unflatten(1, (-1, HEAD)) for weight in (q, k, v))
    return *pass_ext.layers.step_rotary(queries, keys, cos, sin), values


def plain_before(
    x: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:
    """As in transformers."""
    x = plain_norm(x, torch.zeros_like(x), norm)[0]
    queries, keys, values = (functional.linear(x, weight).unflatten(1, (-1, HEAD)) for weight in (q, k, v))
    return *plain_rotary(queries, keys, cos, sin), values


def after(attended: Tensor, x: Tensor, norm: Tensor, o: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """pass_ext: one call."""
    return pass_ext.layers.layer_after_attention(attended, x, o, gate, up, down, mlp_norm=norm, eps=EPS)


def single_after(
    attended: Tensor, x: Tensor, norm: Tensor, o: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """pass_ext: six calls, and an addition."""
    normed, middle = pass_ext.layers.step_rms_norm(pass_ext.layers.linear_rows(attended, o), norm, eps=EPS, residual=x)
    hidden = pass_ext.layers.step_gate(
        pass_ext.layers.linear_rows(normed, gate), pass_ext.layers.linear_rows(normed, up)
    )
    return middle + pass_ext.layers.linear_rows(hidden, down)


def plain_after(attended: Tensor, x: Tensor, norm: Tensor, o: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """As in transformers."""
    normed, middle = plain_norm(functional.linear(attended, o), x, norm)
    hidden = functional.silu(functional.linear(normed, gate)) * functional.linear(normed, up)
    return middle + functional.linear(hidden, down)


# ---- the measurement ----


def weights_of_layer(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """(norm, q, k, v) and (norm, o, gate, up, down)."""

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape) * shape[-1] ** -0.5).to(dtype)

    heads = [random(n * HEAD, D) for n in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [random(D), *heads], [
        random(D),
        random(D, HEADS * HEAD),
        random(INNER, D),
        random(INNER, D),
        random(D, INNER),
    ]


def inputs_of(rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, attended, cos, sin."""
    x, attended = torch.randn(rows, D).to(dtype), torch.randn(rows, HEADS * HEAD).to(dtype)
    angles = torch.rand(rows, HEAD)
    return x, attended, angles.cos().to(dtype), angles.sin().to(dtype)


def packaged(function: Way, arguments: tuple[Tensor, ...], folder: Path) -> Way:
    """The function, compiled by AOTInductor for these shapes."""

    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            return function(*tensors)

    program = torch.export.export(Module(), arguments)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / f"{function.__name__}.pt2"))
    loaded: Way = torch._inductor.aoti_load_package(path)
    return loaded


def ways_for(rows: int, dtype: torch.dtype, layer: Any, folder: Path) -> dict[str, tuple[Way, Way, float]]:
    """Name -> the two halves, and the seconds that compiling them took."""
    x, attended, cos, sin = inputs_of(rows, dtype)
    first, second = (x, *layer[0], cos, sin), (attended, x, *layer[1])

    def timed(make: Callable[[], tuple[Way, Way]]) -> tuple[Way, Way, float]:
        begin = time.perf_counter()
        one, other = make()
        one(*first), other(*second)
        return one, other, time.perf_counter() - begin

    torch._dynamo.reset()
    compiled = torch.compile(plain_before, dynamic=False), torch.compile(plain_after, dynamic=False)
    folder.mkdir()
    return {
        "PyTorch": (plain_before, plain_after, 0.0),
        "torch.compile": timed(lambda: compiled),
        "AOTInductor": timed(lambda: (packaged(plain_before, first, folder), packaged(plain_after, second, folder))),
        "pass_ext, single ops": (single_before, single_after, 0.0),
        "pass_ext, layer ops": (before, after, 0.0),
    }


def measure(dtype: torch.dtype) -> list[dict[str, Any]]:
    """One entry per way and number of rows."""
    results = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        layers = [weights_of_layer(dtype) for _ in range(LAYERS)]
        for rows in ROWS:
            x, attended, cos, sin = inputs_of(rows, dtype)
            ways = ways_for(rows, dtype, layers[0], Path(folder) / str(rows))
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(ROUNDS + 1):
                for name, (one, other, _) in ways.items():
                    time.sleep(0.05)  # threads of the way before may still spin
                    begin = time.perf_counter()
                    for first, second in layers:
                        one(x, *first, cos, sin)
                        other(attended, x, *second)
                    seconds[name].append(time.perf_counter() - begin)
            for name, (_, _, compiling) in ways.items():
                median = statistics.median(seconds[name][1:])
                results.append(dict(way=name, rows=rows, milliseconds=1e3 * median, compile_seconds=compiling))
    return results


def page(result: dict[str, Any]) -> str:
    """The result as a table."""
    machine, entries = result["machine"], result["entries"]
    by_way: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        by_way.setdefault(entry["way"], []).append(entry)
    lines = table(
        ["way", *(f"{rows} row{'s' * (rows > 1)}, ms" for rows in ROWS), "compiling, s"],
        (
            [
                way,
                *(f"{entry['milliseconds']:.1f}" for entry in of_way),
                f"{sum(e['compile_seconds'] for e in of_way):.0f}",
            ]
            for way, of_way in by_way.items()
        ),
    )
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    head = f"{machine['cpu']['model']}, {machine['cpu']['torch_threads']} threads, {versions}, {result['date'][:10]}"
    note = (
        "Written by `python -m benchmarks.ops.contenders.layer_compilers`: 30 layers of SmolLM2-135M without attention, "
        "bfloat16, medians."
    )
    return "\n".join(["# A layer's halves, compiled or fused by hand", "", note, "", head, "", *lines, ""])


def main() -> None:
    """Entry point of `python -m benchmarks.ops.contenders.layer_compilers`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder; default: benchmarks/results/<machine>")
    options = parser.parse_args()
    torch.manual_seed(0)
    result = {
        "date": now(),
        "commit": commit(),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "entries": measure(torch.bfloat16),
    }
    folder = options.out or ROOT / "benchmarks" / "results" / device_slug("cpu")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "layer-compilers.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "layer-compilers.md").write_text(page(result))
    print(page(result))


if __name__ == "__main__":
    main()
