"""Layers that keep a state, `pass_ext.layers.recurrent_tree`, `convolution_tree` and `state_commit_`, against the recurrence in
PyTorch node by node, transformers' own functions of one token with a state per node, and its functions of a chunk on chains.
`python -m benchmarks.ops.recurrent --help`.

A case is one layer of one request: a binary tree of so many rows, a chain of as many. A commit is that of the path to the
tree's last node in COMMITTED layers, because a step commits all its layers in one call. Cold: the caches are swept, as the
layers between two uses of a state sweep them. A cold call's own code and data are swept too: what that costs is the time of
a layer of one small head, whose state is nothing to read.
A tree's limit: its bytes, of which the state is most; or, if it takes longer, its arithmetic. A node takes three (delta: four)
vector operations for as many elements of the state as a vector has, at the speed of a large float32 product.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import pass_ext
from benchmarks.harness.aims import at_least, never_slower, rows_of_ours, share_of, times_of
from benchmarks.harness.cases import OURS, Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import line_name, lines_of
from pass_ext import reference
from pass_ext.testing import assert_error_within

LAYERS = {  # heads, key heads, dk, dv, K, form; Qwen3.5-4B's layers are Qwen3-Next's, decays of Kimi belong to channels
    "Qwen3-Next": (32, 16, 128, 128, 4, "delta"),
    "Kimi Linear": (32, 32, 128, 128, 4, "delta, channels"),
    "Mamba-2": (128, 8, 128, 64, 4, "additive"),
}
ONE_HEAD = "one small head"
SHAPES = LAYERS | {ONE_HEAD: (1, 1, 16, 16, 4, "delta")}
ROWS = (1, 4, 8, 16, 64)
CHAINS = (256, 1024)  # prompts: against the chunk alone
PLAIN = "PyTorch"
READ_AND_WRITE = "the state read and written"
TOKENS = "transformers, token by token"
CHUNK = "transformers, a chunk"
CHUNK_SIZE = 64
COMMITTED = 8
Inputs = tuple[Tensor, ...]  # q, k, v, log_decay, beta, state; of an additive layer also A: log_decay is beta A


# ---- the contenders ----


def scale_of(form: str, dk: int) -> float:
    """Of q: transformers' delta functions divide by the root of dk."""
    return 1.0 if form == "additive" else dk**-0.5


def tree(form: str, inputs: Inputs, step: tuple[Tensor, ...], parents: list[int]) -> Tensor:
    """pass_ext: all nodes in one call."""
    scale = scale_of(form, inputs[0].shape[-1])
    return pass_ext.layers.recurrent_tree(*inputs[:6], *step, form=form.split(",")[0], scale=scale)[0]


def plain_tree(form: str, inputs: Inputs, step: tuple[Tensor, ...], parents: list[int]) -> Tensor:
    """Node by node, each with a state of its own."""
    q, k, v, log_decay, beta, states = inputs[:6]
    group, scale = v.shape[1] // k.shape[1], scale_of(form, q.shape[-1])
    queries, keys = (x.to(states.dtype).repeat_interleave(group, 1) for x in (q * scale, k))
    after: list[Tensor] = []
    outs = []
    for node, parent in enumerate(parents):
        state = (states[0] if parent < 0 else after[parent]) * decay_of(log_decay[node])
        value = v[node].to(states.dtype)
        if form != "additive":
            value = value - (state * keys[node, :, :, None]).sum(-2)
        after.append(state + keys[node, :, :, None] * (value * beta[node][:, None])[:, None])
        outs.append((after[-1] * queries[node, :, :, None]).sum(-2))
    return torch.stack(outs).to(v.dtype)


def decay_of(log_decay: Tensor) -> Tensor:
    """Of a node, by which to multiply the state."""
    return log_decay.exp()[(..., *(None,) * (3 - log_decay.dim()))]


def token_by_token(form: str, inputs: Inputs, step: tuple[Tensor, ...], parents: list[int]) -> Tensor:
    """transformers' function of one token for each node, from its parent's state, which is kept."""
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
    from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    delta_rule = torch_recurrent_gated_delta_rule if form == "delta" else recurrent_kimi_delta_attention
    q, k, v, log_decay, beta, states = inputs[:6]
    after: list[Tensor] = []
    outs = []
    for node, parent in enumerate(parents):
        row = slice(node, node + 1)
        if form != "additive":
            state = states if parent < 0 else after[parent]
            out, state = delta_rule(
                q[None, row], k[None, row], v[None, row], log_decay[None, row], beta[None, row], state, True
            )
        else:  # its states are [dv, dk], and it overwrites them
            state = states.mT.contiguous() if parent < 0 else after[parent].clone()
            heads, dv, dk = state.shape[1:]
            out = mamba2_selective_state_update(
                state, v[row], beta[row, :, None].expand(1, heads, dv), inputs[6][:, None, None].expand(heads, dv, dk),
                k[row], q[row].to(state.dtype),
            )[None]  # fmt: skip
        after.append(state)
        outs.append(out[0, 0])
    return torch.stack(outs).to(v.dtype)


def chunk(form: str, inputs: Inputs, step: tuple[Tensor, ...], parents: list[int]) -> Tensor:
    """transformers' function of a chunk, on a chain."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    delta_rule = torch_chunk_gated_delta_rule if form == "delta" else chunk_kimi_delta_attention
    q, k, v, log_decay, beta, states = inputs[:6]
    if form != "additive":
        rows = (x[None] for x in (q, k, v, log_decay, beta))
        out: Tensor = delta_rule(*rows, CHUNK_SIZE, states, True)[0]
    else:
        out = mamba2_chunk_scan(
            v[None], beta[None], inputs[6], k[None], q[None], CHUNK_SIZE, initial_states=states.mT, return_final_states=True
        )[0]  # fmt: skip
    return out[0].to(v.dtype)


def convolution(inputs: tuple[Tensor, ...], step: tuple[Tensor, ...], windows: Tensor) -> Tensor:
    """pass_ext."""
    x, weight, state = inputs
    return pass_ext.layers.convolution_tree(x, weight, None, state, *step, activation="silu")


def plain_convolution(inputs: tuple[Tensor, ...], step: tuple[Tensor, ...], windows: Tensor) -> Tensor:
    """Gathers every node's window, then multiplies; the indices are ready."""
    x, weight, state = inputs
    past = torch.cat([state[0].T, x])  # [K - 1 + N, C]
    return functional.silu((past[windows] * weight.T).sum(1))


def commit(states: list[Tensor], updates: list[Any], step: tuple[Tensor, ...], rows: list[int]) -> None:
    """pass_ext: replays the path."""
    pass_ext.layers.state_commit_(states, updates, *step)


def plain_commit(states: list[Tensor], updates: list[Any], step: tuple[Tensor, ...], rows: list[int]) -> None:
    """The same updates of the state, one after the other."""
    for state, update in zip(states, updates, strict=True):
        keys = update.k.to(state.dtype).repeat_interleave(state.shape[1] // update.k.shape[1], 1)
        for row in rows:
            state[0].mul_(decay_of(update.log_decay[row])).add_(keys[row, :, :, None] * update.u[row, :, None])


def read_and_write(states: list[Tensor], updates: list[Any], step: tuple[Tensor, ...], rows: list[int]) -> None:
    """What every commit must do."""
    for state in states:
        state.mul_(1.0)


CONTENDERS = {
    "tree": (Contender(OURS, tree), Contender(PLAIN, plain_tree), Contender(TOKENS, token_by_token)),
    "chain": (Contender(OURS, tree), Contender(PLAIN, plain_tree), Contender(CHUNK, chunk, capturable=False)),
    "convolution": (Contender(OURS, convolution), Contender(PLAIN, plain_convolution)),
    "commit": (
        Contender(OURS, commit),
        Contender(PLAIN, plain_commit),
        Contender(READ_AND_WRITE, read_and_write, same_job=False),
    ),
}


# ---- the cases ----


def check_errors(case: Case) -> None:
    """Raises unless ours is as close to float64 as PyTorch is."""
    inputs = case.inputs[0]
    if case.labels["op"] == "commit":
        ours, near, exact = ([state.clone() for state in inputs[0]] for _ in range(3))
        commit(ours, *inputs[1:])
        plain_commit(near, *inputs[1:])
        exact = [state.double() for state in exact]
        reference.state_commit_(exact, inputs[1], *inputs[2])
        return assert_error_within(ours[0], near[0], exact[0])
    plain: Callable[..., Tensor] = plain_convolution if case.labels["op"] == "convolution" else plain_tree
    tensors = next(part for part in inputs if isinstance(part, tuple))
    doubled = [tuple(x.double() for x in part) if part is tensors else part for part in inputs]
    expected = plain(*doubled)
    assert_error_within(case.contenders[0](*inputs), plain(*inputs), expected)
    for other in case.contenders[1:]:  # they do the same job, by other roundings
        torch.testing.assert_close(other(*inputs).double(), expected, rtol=0.05, atol=0.05)
    return None


def make_plan(options: argparse.Namespace) -> Plan:
    """Every layer with every number of rows, and long chains; four rows of the first layer with --quick."""
    sizes = [(layer, rows) for layer in LAYERS for rows in (*ROWS, *CHAINS)]
    sizes = [*(sizes[1:2] if options.quick else sizes), (ONE_HEAD, 1)]
    labels = [f"{op}, {layer}, {rows} rows" for layer, rows in sizes for op in ops_of(layer, rows)]
    return Plan(labels, make_cases(options, sizes), counts_flops=True)


def ops_of(layer: str, rows: int) -> dict[str, tuple[Contender, ...]]:
    """The jobs of so many rows, and who does them."""
    if layer == ONE_HEAD:
        return {"tree": CONTENDERS["tree"]}
    if rows in ROWS:
        return CONTENDERS
    return {"chain": tuple(contender for contender in CONTENDERS["chain"] if contender.name != PLAIN)}


def make_cases(options: argparse.Namespace, sizes: list[tuple[str, int]]) -> Iterator[Case]:
    """The cases. Fewest bytes: a tree reads the state and its rows once, a commit reads and writes the state."""
    dtype, device = DTYPES[options.dtype], torch.device(options.device)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def integers(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    for layer, rows in sizes:
        heads, key_heads, dk, dv, taps, form = SHAPES[layer]
        parents = [(i - 1) // 2 if i else -1 for i in range(rows)]
        q, k = (functional.normalize(random(rows, key_heads, dk), dim=-1).to(dtype) for _ in range(2))
        v, channels = random(rows, heads, dv).to(dtype), 2 * key_heads * dk + heads * dv
        beta, state, rates = random(rows, heads).sigmoid(), random(1, heads, dk, dv), -random(heads).abs()
        log_decay = beta * rates
        if "channels" in form:
            log_decay = log_decay[..., None] * random(heads, dk).sigmoid()
        bounds = (integers(parents), integers([0, rows]))
        chain = list(range(-1, rows - 1))
        layer_inputs = (q, k, v, log_decay, beta, state, rates)
        x, weight, window = (
            random(rows, channels).to(dtype),
            random(channels, taps).to(dtype),
            random(1, channels, taps - 1),
        )
        path = [rows - 1]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        update = pass_ext.layers.RecurrentUpdate(k, v.float(), log_decay)
        accepted = (bounds[1], integers([path]), integers([len(path) - 1]))
        inputs: dict[str, tuple[Any, ...]] = {
            "tree": (form, layer_inputs, bounds, parents),
            "chain": (form, layer_inputs, (integers(chain), bounds[1]), chain),
            "convolution": ((x, weight, window.to(dtype)), bounds, windows_of(parents, taps).to(device)),
            "commit": ([state.clone() for _ in range(COMMITTED)], [update] * COMMITTED, accepted, path),
        }
        rows_bytes = (2 * q.numel() + 2 * v.numel()) * dtype.itemsize + 4 * v.numel()
        fewest = {
            "tree": 4 * state.numel() + rows_bytes,
            "chain": 4 * state.numel() + rows_bytes,
            "convolution": (2 * x.numel() + weight.numel() + window.numel()) * dtype.itemsize,
            "commit": 8 * COMMITTED * state.numel(),
        }
        flops = dict.fromkeys(("tree", "chain"), (6 if form == "additive" else 8) * rows * state.numel())
        for op, contenders in ops_of(layer, rows).items():
            labels: dict[str, str | int] = {"op": op, "layer": layer, "rows": rows}
            yield Case(
                labels, contenders, [inputs[op]], fewest_bytes=fewest[op], check=check_errors,
                fewest_flops=flops.get(op), flops_dtype="float32",
            )  # fmt: skip


def windows_of(parents: list[int], taps: int) -> Tensor:
    """[N, K]: each node's inputs, oldest first, among those of the state and of the nodes."""
    windows: list[list[int]] = []
    for node, parent in enumerate(parents):
        before = list(range(taps - 1)) if parent < 0 else windows[parent][1:]
        windows.append([*before, taps - 1 + node])
    return torch.tensor(windows)


# ---- the aims ----


def judge(rows: list[Row]) -> list[Aim]:
    """A tree of 16 three times as fast as node by node, in PyTorch and by transformers, trees at half of their limit, commits
    little slower than reading and writing; nothing slower but a chain."""
    lines = lines_of({"rows": rows})
    cold = [line for line in lines if line[0]["cache"] == "cold"]
    commits = [line for line in cold if line[0]["labels"]["op"] == "commit"]
    trees = [line for line in lines if line[0]["labels"]["op"] == "tree" and line[0]["labels"]["rows"] == 16]
    steps = [line for line in lines if line[0]["labels"]["op"] != "chain"]
    ours = [row for row in rows_of_ours(rows) if row["labels"]["op"] == "tree" and row["cache"] == "cold"]
    call = min((row["median_us"] for row in ours if row["labels"]["layer"] == ONE_HEAD), default=0.0)
    cold_trees = [row for row in ours if row["labels"]["layer"] != ONE_HEAD]
    without_call = [
        row | {"of_limit": row["of_limit"] * row["median_us"] / max(row["median_us"] - call, 1.0)} for row in cold_trees
    ]
    costs = {
        f"{line[0]['labels']['layer']}, {line[0]['labels']['rows']} rows": 1 / row["times_ours"]
        for line in commits
        for row in line
        if row["contender"] == READ_AND_WRITE
    }
    return [
        at_least("a tree of 16 rows: 3 × faster than node by node", 3, times_of(trees, PLAIN, name)),
        at_least("a tree of 16 rows: 3 × faster than transformers' function", 3, times_of(trees, TOKENS, name)),
        share_of("trees, cold: at least 50 % of the limit", "of_limit", 0.5, cold_trees, name),
        share_of(f"the same without {call:.0f} us, a call on one small head", "of_limit", 0.5, without_call, name),
        Aim(
            "commits, cold: at most 1.2 × reading and writing the state",
            all(value <= 1.2 for value in costs.values()),
            "; ".join(f"{key}: {value:.2f} ×" for key, value in costs.items()),
        ),
        never_slower(steps, name),
    ]


def name(line: list[Row]) -> str:
    """A line in a few words."""
    labels = line[0]["labels"]
    return line_name(line, labels["op"], labels["layer"], f"{labels['rows']} rows")


if __name__ == "__main__":
    run("recurrent", parse(__doc__ or ""), make_plan, judge)
