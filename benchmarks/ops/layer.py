"""A decoder layer around its attention, `pass_ext.layers.layer_before_attention` and `layer_after_attention`, and on the CPU
layers with their attention, `layer_stack`, against the same work as single ops of pass_ext, and as a model's lines
in PyTorch. `python -m benchmarks.ops.layer --help`.

The shapes are those of SmolLM2-135M. Warm: the same layer every time, from the cache that holds it. Cold: the caches are swept,
as the other layers of a model sweep them. `of_read`: the share of the memory's read bandwidth, by the fewest bytes.
"""

import argparse
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

import pass_ext
from benchmarks.harness.aims import at_least, never_slower, rows_of_ours, share_of, times_of
from benchmarks.harness.cases import OURS, Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import line_name, lines_of
from benchmarks.ops.step import plain_norm, plain_rotary

D, HEADS, KEY_HEADS, HEAD, INNER = 576, 9, 3, 64, 1536
ROWS = (1, 4, 8, 16, 32)
EPS = 1e-5
SINGLE, PLAIN = "single ops", "PyTorch"


# ---- before attention ----


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


# ---- after attention ----


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


# ---- four layers with attention ----

LAYERS, KEYS = 4, 256


def stack(x: Tensor, cos: Tensor, sin: Tensor, caches: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """pass_ext: one call."""
    layers = [
        pass_ext.layers.LayerWeights(*layer[2:], input_norm=layer[0], mlp_norm=layer[1])
        for layer in batched(weights, 9)
    ]
    lengths, bounds, visible = step_of(len(x))
    return pass_ext.layers.layer_stack(
        x, layers, caches, lengths, bounds, visible, len(x), head_dim=HEAD, cos=cos, sin=sin, eps=EPS
    )[:2]


def single_stack(x: Tensor, cos: Tensor, sin: Tensor, caches: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """pass_ext: three calls for each layer."""
    lengths, bounds, visible = step_of(len(x))
    new: list[Tensor] = []
    for pair, (first, second, q, k, v, o, gate, up, down) in zip(
        caches.unflatten(0, (-1, 2)), batched(weights, 9), strict=True
    ):
        queries, keys, values = before(x, first, q, k, v, cos, sin)
        new += keys, values
        attended, _ = pass_ext.attention_tree(
            queries, *pair, lengths, bounds, visible, len(x), k_new=keys, v_new=values
        )
        x = after(attended.flatten(1), x, second, o, gate, up, down)
    return x, torch.stack(new)


def plain_stack(x: Tensor, cos: Tensor, sin: Tensor, caches: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """As in transformers, with PyTorch's attention over the cache and a chain of rows."""
    new: list[Tensor] = []
    rows = torch.arange(len(x))
    seen = torch.cat([torch.ones(len(x), KEYS, dtype=torch.bool), rows[:, None] >= rows], dim=1)
    for pair, (first, second, q, k, v, o, gate, up, down) in zip(
        caches.unflatten(0, (-1, 2)), batched(weights, 9), strict=True
    ):
        queries, keys, values = plain_before(x, first, q, k, v, cos, sin)
        new += keys, values
        all_keys, all_values = (torch.cat([old[0], rows]) for old, rows in zip(pair, (keys, values), strict=True))
        attended = functional.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in (queries, all_keys, all_values)), attn_mask=seen, enable_gqa=True
        )
        x = plain_after(attended[0].transpose(0, 1).flatten(1), x, second, o, gate, up, down)
    return x, torch.stack(new)


@cache
def step_of(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths, bounds and visible rows of one text and a chain of rows after it."""
    trees = pass_ext.tree.pack_trees([pass_ext.Tree.chain(rows - 1)], torch.device("cpu"))
    return torch.tensor([KEYS], dtype=torch.int32), trees.cu_nodes, trees.visible


def batched(weights: tuple[Tensor, ...], size: int) -> list[tuple[Tensor, ...]]:
    """The weights by layer."""
    return [weights[i : i + size] for i in range(0, len(weights), size)]


CONTENDERS = {
    "before": (Contender(OURS, before), Contender(SINGLE, single_before), Contender(PLAIN, plain_before)),
    "after": (Contender(OURS, after), Contender(SINGLE, single_after), Contender(PLAIN, plain_after)),
    "stack": (Contender(OURS, stack), Contender(SINGLE, single_stack), Contender(PLAIN, plain_stack)),
}


# ---- the cases ----


def check_bits(case: Case) -> None:
    """Raises unless one call gives the bits of the single ones."""
    inputs = case.inputs[0]
    results = [contender(*inputs) for contender in case.contenders[:2]]
    ours, single = (result if isinstance(result, tuple) else (result,) for result in results)
    if not all(map(torch.equal, ours, single)):
        raise AssertionError(f"{case.labels}: one call and single ops differ")


def make_plan(options: argparse.Namespace) -> Plan:
    """Both halves with every number of rows; one row with --quick."""
    halves = [half for half in CONTENDERS if half != "stack" or options.device == "cpu"]  # the op is for the CPU
    sizes = [(half, rows) for half in halves for rows in ROWS[: 1 if options.quick else None]]
    return Plan([f"{half}, {rows} rows" for half, rows in sizes], make_cases(options, sizes))


def make_cases(options: argparse.Namespace, sizes: list[tuple[str, int]]) -> Iterator[Case]:
    """The cases. Fewest bytes: the weights and rows read, the results written."""
    dtype = DTYPES[options.dtype]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(options.device, dtype)

    def weight(outputs: int, inputs: int) -> Tensor:
        return random(outputs, inputs) * inputs**-0.5

    for half, rows in sizes:
        angles = torch.arange(rows)[:, None] * 1e4 ** -(torch.arange(0, HEAD, 2).repeat(2) / HEAD)
        rotation = angles.cos().to(options.device, dtype), angles.sin().to(options.device, dtype)
        products = [weight(heads * HEAD, D) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        inputs: dict[str, tuple[Tensor, ...]] = {
            "before": (random(rows, D), random(D), *products, *rotation),
            "after": (random(rows, HEADS * HEAD), random(rows, D), random(D), weight(D, HEADS * HEAD), weight(INNER, D),
                      weight(INNER, D), weight(D, INNER)),
        }  # fmt: skip
        if half == "stack":
            layers = [
                (random(D), random(D), *(weight(heads * HEAD, D) for heads in (HEADS, KEY_HEADS, KEY_HEADS)),
                 *inputs["after"][3:])
                for _ in range(LAYERS)
            ]  # fmt: skip
            layers = [tuple(tensor.clone() for tensor in layer) for layer in layers]
            caches = random(2 * LAYERS, 1, KEYS, KEY_HEADS, HEAD)
            inputs["stack"] = (random(rows, D), *rotation, caches, *(tensor for layer in layers for tensor in layer))
        written = {
            "before": rows * (HEADS + 2 * KEY_HEADS) * HEAD,
            "after": rows * D,
            "stack": rows * (D + 2 * LAYERS * KEY_HEADS * HEAD),
        }
        moved = (sum(tensor.numel() for tensor in inputs[half]) + written[half]) * dtype.itemsize
        labels: dict[str, str | int] = {"half": half, "rows": rows}
        yield Case(labels, CONTENDERS[half], [inputs[half]], fewest_bytes=moved, check=check_bits, reads=True)


# ---- the aims ----


def judge(rows: list[Row]) -> list[Aim]:
    """A row at the memory's speed; one call never slower than single ops, and faster than PyTorch."""
    lines = lines_of({"rows": rows})
    ours = [row for row in rows_of_ours(rows) if row["cache"] == "cold" and row["labels"]["rows"] == 1]
    return [
        share_of("one row at 70 % of the read bandwidth or more", "of_read", 0.7, ours, name),
        never_slower(lines, name),
        at_least(f"faster than {PLAIN}", 1.0, times_of(lines, PLAIN, name)),
    ]


def name(line: list[Row]) -> str:
    """A line in a few words."""
    return line_name(line, line[0]["labels"]["half"], f"{line[0]['labels']['rows']} rows")


if __name__ == "__main__":
    run("layer", parse(__doc__ or ""), make_plan, judge)
