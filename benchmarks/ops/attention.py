"""Attention of trees to long prefixes, `pass_ext.ops.attention.attention_tree`, against PyTorch's SDPA with a dense mask,
FlexAttention, PyTorch's flash kernel merged with a small attention over the nodes, and, on a GPU where they are installed,
FlashInfer, vLLM and SGLang. `python -m benchmarks.ops.attention --help`.

One layer of one step: B requests, each with a prefix in the cache and a random tree of nodes behind it (a node's parent is any
node before it). All requests have the same lengths, which ours does not need but SDPA does. The cache is [B, Hkv, slots, D].
Everybody gets for nothing what all layers of a step share: ours its `visible` words, SDPA a dense mask [B, 1, nodes, keys] in
the type of the queries (made from the same words, prebuilt, shared by all layers: more than a decoder would give it),
FlexAttention its block mask and compiled kernel, FlashInfer its plan, libraries that want pages a copy in pages. The contenders
(attention_ways.py, attention_libraries.py):

* SDPA: `enable_gqa`, the kernel that PyTorch chooses; "folded": the query heads of a key head as its rows, so that no kernel
  needs to know of groups; "repeated": every key head copied for each of its query heads. On a GPU each with every kernel that
  may take a mask.
* FlexAttention: compiled as it is, and "tuned" with max-autotune-no-cudagraphs. Compiling takes its time, so there is a limit
  (COMPILE_SECONDS): lines behind it have no number for it.
* torch flash + merge: the prefix by PyTorch's flash kernel, which gives the lse, the nodes by `attention_tree`, then
  `attention_merge`: what one gets without a kernel for both.

Before anything is timed each result is compared with attention in float64, whose bound allows a few roundings; each node seen
weighs about as much as a quarter of the prefix, so a wrong bit of a mask shows. Who is wrong, fails, or takes longer than
MOST_SECONDS for one call is not timed on that line, and the result says why.

Bytes needed: keys and values of the prefix and the nodes, queries, results. Flops needed: 4 D per query head and visible key.
The limit is the longer of reading those bytes, at the faster of a large read and a large copy of this run, and computing those
flops, at the speed of a large product of this run, in float32 or in the type of the queries, whichever is faster.
"""

import argparse
import functools
import time
import warnings
from collections.abc import Iterator, Sequence

import torch

from benchmarks.harness.aims import NOT_MEASURED, at_least, fastest_of, share_of, times_of
from benchmarks.harness.cases import Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import lines_of
from benchmarks.ops.attention_libraries import FLASHINFER, LIBRARIES, XQA, why_absent
from benchmarks.ops.attention_ways import DENSE, FLEX, FLEX_TUNED, MERGED, OURS, SDPA, WAYS, Way
from benchmarks.ops.inputs.attention_steps import Spec, Step, excess, make_step, make_trees, reference
from benchmarks.ops.inputs.distributions import require

HEADS = [(32, 8, 128), (28, 4, 128), (9, 3, 64)]  # query heads, key heads, their size
# A layer with a sliding window. FlashAttention 2 does not split the keys of several queries: published, 45 to 49 µs.
WINDOWED = Spec(*HEADS[0], 1, 8192, 8, window=2048)
BATCHES = {"cpu": (1, 8), "cuda": (1, 8, 64)}
PREFIXES = {"cpu": (1024, 8192, 32768), "cuda": (1024, 8192, 32768, 131072)}
NOT_PLANNED = {
    "cpu": ["64 requests, prefixes of 131072 (on a GPU only)", "4, 16 and 64 nodes of other heads than 32/8 × 128"],
    "cuda": [],
}
NODES = {"cpu": (4, 8, 16, 33, 64), "cuda": (4, 16, 64)}
NODES_OF_OTHERS = {"cpu": (8, 33), "cuda": NODES["cuda"]}  # of all heads but the first
FIRST = {  # lines, before all others: those that aims speak of, and an odd group before there is no time left to compile for it
    "cpu": [],
    "cuda": [
        Spec(*HEADS[0], 1, 131072, 16),
        Spec(*HEADS[1], 1, 131072, 4),
        *(Spec(*HEADS[0], 1, prefix, 16) for prefix in (1024, 8192, 32768)),
        WINDOWED,
        Spec(*HEADS[0], 8, 8192, 16),
        Spec(*HEADS[1], 1, 8192, 4),
    ],
}
USUAL_NODES = {"cpu": 8, "cuda": 16}  # then lines with those
SETS = {"cpu": (2, 3), "cuda": (2, 64)}  # of inputs: at least, at most
INPUT_BYTES = {"cpu": 2**27, "cuda": 10**9}  # of the caches of all sets, within those
MOST_FLOPS = {"cpu": 4.7e9, "cuda": 2e12}  # of one call
MOST_CACHE_BYTES = {"cpu": 10**9, "cuda": 10**10}
MOST_SECONDS = {"cpu": 0.35, "cuda": 0.005}  # for one call of somebody else
COMPILE_SECONDS = {"cpu": 40, "cuda": 30}
SMALL_TILES = 64  # rows of a key head up to which a GPU only reads
LARGE_CACHE, MIDDLE_CACHE = 256 * 10**6, 134 * 10**6
TIMES_SDPA = {"bfloat16": 3.0, "float16": 3.0, "float32": 1.5}  # on a CPU


# ---- the lines ----


def specs_for(options: argparse.Namespace) -> tuple[list[Spec], list[str]]:
    """The lines of the table, the most important first; and those of the grid that are left out, with the reason."""
    device, dtype = options.device, DTYPES[options.dtype]
    if options.quick:
        few = [Spec(9, 3, 64, 2, 300, 33), Spec(*HEADS[0], 1, 1024, 8)]
        return few if options.device == "cuda" else [*few, Spec(*HEADS[0], 1, 8192, 16)], []
    grid = [
        Spec(*heads, batch, prefix, nodes)
        for heads in HEADS
        for batch in BATCHES[device]
        for prefix in PREFIXES[device]
        for nodes in (NODES if heads == HEADS[0] else NODES_OF_OTHERS)[device]
    ]
    grid.append(WINDOWED)
    specs = [spec for spec in grid if why_left_out(spec, dtype, device) is None]
    first = FIRST[device]
    specs.sort(key=lambda spec: (first.index(spec) if spec in first else len(first), spec.nodes != USUAL_NODES[device]))
    left_out: dict[str, list[int]] = {}
    for spec in grid:
        reason = why_left_out(spec, dtype, device)
        if reason is not None:
            left_out.setdefault(f"{sizes(spec)} ({reason})", []).append(spec.nodes)
    by_line = [f"{', '.join(map(str, nodes))} nodes of {line}" for line, nodes in left_out.items()]
    return specs, NOT_PLANNED[device] + by_line


def why_left_out(spec: Spec, dtype: torch.dtype, device: str) -> str | None:
    """None for what a run measures."""
    if spec.cache_bytes(dtype) > MOST_CACHE_BYTES[device]:
        return f"more than {MOST_CACHE_BYTES[device] / 1e9:g} GB of keys and values"
    if spec.flops() > MOST_FLOPS[device]:
        return f"more than {MOST_FLOPS[device] / 1e9:g} GFLOP a call"
    return None


def sizes(spec: Spec) -> str:
    """A line in few words, without its nodes."""
    return f"{heads_of(spec)}, {spec.batch} × {spec.prefix}"


def heads_of(spec: Spec) -> str:
    """The kind of layer: its heads, and its window if it has one."""
    window = "" if spec.window < 0 else f", window {spec.window}"
    return f"{spec.heads}/{spec.kv_heads} × {spec.head_dim}{window}"


def make_plan(options: argparse.Namespace) -> Plan:
    """The lines of the table, and their cases one by one."""
    specs, left_out = specs_for(options)
    labels = [f"{sizes(spec)}, {spec.nodes} nodes" for spec in specs]
    return Plan(labels, make_cases(options, specs), counts_flops=True, left_out=left_out)


def make_cases(options: argparse.Namespace, specs: Sequence[Spec]) -> Iterator[Case]:
    """The cases of the specs, each with those contenders that do the job."""
    device, dtype = options.device, DTYPES[options.dtype]
    left = {way.name: 0 if options.quick else COMPILE_SECONDS[device] for way in WAYS if way.compiles}
    for spec in specs:
        yield make_case(spec, dtype, device, left)
        if device == "cuda":
            torch.cuda.empty_cache()


def make_case(spec: Spec, dtype: torch.dtype, device: str, compile_seconds_left: dict[str, float]) -> Case:
    """Layers of one step, all with the same trees."""
    generator = torch.Generator(device).manual_seed(0)
    trees = make_trees(spec, dtype, device)
    fewest, most = SETS[device]
    sets = max(fewest, min(most, -(-INPUT_BYTES[device] // spec.cache_bytes(dtype))))
    steps = [make_step(trees, dtype, device, generator) for _ in range(sets)]
    contenders, absent = choose(steps, device, compile_seconds_left)
    labels: dict[str, str | int] = {
        "heads": heads_of(spec),
        "requests": spec.batch,
        "prefix": spec.prefix,
        "nodes": spec.nodes,
    }
    return Case(
        labels,
        contenders,
        [(step,) for step in steps],
        spec.cache_bytes(dtype) + spec.rows_bytes(dtype),
        check=check_ours,
        reads=True,
        fewest_flops=spec.flops(int(trees.seen.sum())),
        absent=absent,
    )


# ---- who runs on a line ----


def check_ours(case: Case) -> None:
    """Ours must be right on the last set of inputs too; the others' turn is when they are chosen."""
    (step,) = case.inputs[-1]
    with torch.inference_mode():
        worst = excess(step, case.contenders[0].function(step), reference(step))
    require(
        worst <= 1, f"{OURS} differs from the reference by {worst:.3g} × what rounding explains on {dict(case.labels)}"
    )


@torch.inference_mode()
def choose(
    steps: Sequence[Step], device: str, compile_seconds_left: dict[str, float]
) -> tuple[list[Contender], dict[str, str]]:
    """Those that agree with the reference on the first set of inputs, ours first; and why the others are absent."""
    expected = reference(steps[0])
    contenders: list[Contender] = []
    absent: dict[str, str] = {}
    for way in [*WAYS, *LIBRARIES]:
        if device not in way.devices:
            continue
        reason = why_not_tried(way, steps[0].spec, device, compile_seconds_left) or why_not_timed(
            way, steps, expected, device, compile_seconds_left
        )
        if reason is None:
            contenders.append(Contender(way.name, way.function))
        else:
            require(way.name != OURS, f"{OURS}: {reason}")
            absent[way.name] = reason
    return contenders, absent


def why_not_tried(way: Way, spec: Spec, device: str, compile_seconds_left: dict[str, float]) -> str | None:
    """None for who may do the job."""
    if way.package is not None and (reason := why_absent(way.name, way.package)) is not None:
        return reason
    if way.one_request and spec.batch > 1:
        return "one tree for all requests"
    if spec.window >= 0 and not way.has_window:
        return "no window that goes by depth"
    if way.compiles and compile_seconds_left[way.name] <= 0:
        return f"the time to compile it, {COMPILE_SECONDS[device]} s, is spent, or the run is a quick one"
    return None


def why_not_timed(
    way: Way,
    steps: Sequence[Step],
    expected: tuple[torch.Tensor, torch.Tensor],
    device: str,
    compile_seconds_left: dict[str, float],
) -> str | None:
    """None for who does the job right, in reasonable time. Whatever somebody else's code raises is a reason."""

    def call() -> object:
        result = way.function(steps[0])
        if device == "cuda":
            torch.cuda.synchronize()
        return result

    reason, started = None, time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if way.prepare is not None:
                way.prepare(steps)
            worst = excess(steps[0], call(), expected)
        if worst > 1:
            reason = f"differs from the reference by {worst:.3g} × what rounding explains"
        elif way.name != OURS:
            began = time.perf_counter()
            call()
            if time.perf_counter() - began > MOST_SECONDS[device]:
                reason = f"more than {MOST_SECONDS[device] * 1000:g} ms a call"
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:100]
    if way.compiles:
        compile_seconds_left[way.name] -= time.perf_counter() - started
    if reason is not None and device == "cuda":
        torch.cuda.empty_cache()
    return reason


# ---- what was promised ----


def judge(rows: list[Row], dtype: str) -> list[Aim]:
    """The aims of attention, from these rows alone."""
    lines = lines_of({"rows": rows})
    if any(row["how"] == "graph" for row in rows):
        return judge_gpu(rows, [line for line in lines if (line[0]["how"], line[0]["cache"]) == ("graph", "cold")])
    long = [line for line in lines if line[0]["labels"]["prefix"] >= 1024]
    few = [line for line in long if 8 <= line[0]["labels"]["nodes"] <= 33]
    least = TIMES_SDPA[dtype]
    cold = [line[0] for line in long if line[0]["cache"] == "cold"]
    where = f"{dtype}, 8 to 33 nodes, prefix ≥ 1k: at least {least:g} × faster than"
    fastest = fastest_of(few, [OURS, *(way.name for way in DENSE)], name)
    return [
        at_least(f"{where} SDPA with a dense mask", least, times_of(few, SDPA, name)),
        at_least(f"{where} SDPA in the fastest form", least, fastest),
        share_of("cold, prefix ≥ 1k: at least 50 % of the limit", "of_limit", 0.5, cold, name),
    ]


def judge_gpu(rows: list[Row], lines: list[list[Row]]) -> list[Aim]:
    """Of cold replays of a graph, trees of which a key head has at most SMALL_TILES rows."""
    few = [line for line in lines if group_of(line[0]) * line[0]["labels"]["nodes"] <= SMALL_TILES]
    ours = [line[0] for line in few]
    large = [row for row in ours if row["fewest_bytes"] >= LARGE_CACHE]
    middle = [row for row in ours if MIDDLE_CACHE <= row["fewest_bytes"] < LARGE_CACHE]
    first = [row for row in ours if row["labels"]["heads"] == "32/8 × 128" and row["labels"]["requests"] == 1]
    windowed = [row for row in ours if row["labels"]["heads"] == heads_of(WINDOWED)]
    even = [line for line in few if group_of(line[0]) in (1, 2, 4, 8)]
    odd = [line for line in few if group_of(line[0]) == 7]

    def faster(least: float, way: str, lines: list[list[Row]], where: str = "") -> Aim:
        aim = f"{f'at least {least:g} × faster' if least > 1 else 'not slower'} than {way}{where}"
        return at_least(aim, least, times_of(lines, way, name), reason_of(rows, way))

    return [
        share_of("at least 256 MB: at least 85 % of the bandwidth of a copy", "of_copy", 0.85, large, name),
        share_of("134 to 256 MB: at least 70 % of the bandwidth of a copy", "of_copy", 0.7, middle, name),
        at_most("1 request, 1k, 32/8: at most 7 µs", 7, [row for row in first if row["labels"]["prefix"] == 1024]),
        at_most("1 request, 8k, 32/8: at most 16 µs", 16, [row for row in first if row["labels"]["prefix"] == 8192]),
        at_most("1 request, 32/8, window 2048, 8 nodes: at most 10 µs", 10, windowed),
        at_least(
            "at least 4 × faster than SDPA with a dense mask, in the fastest form and on the fastest kernel",
            4,
            fastest_of(few, [OURS, *(way.name for way in DENSE)], name),
        ),
        faster(2.5, FLEX, even, ", 1, 2, 4 or 8 query heads to a key head"),
        faster(8, FLEX, odd, ", 7 query heads to a key head"),
        faster(1, FLEX_TUNED, few),
        faster(1, MERGED, few),
        faster(1.8, FLASHINFER, few),
        faster(1, XQA, few),
    ]


def at_most(aim: str, most: float, rows: list[Row]) -> Aim:
    """Met if none of ours takes longer, in microseconds."""
    if not rows:
        return Aim(aim, None, NOT_MEASURED)
    slowest = max(rows, key=lambda row: row["median_us"])
    return Aim(aim, slowest["median_us"] <= most, f"at most {slowest['median_us']:.2f} µs ({name([slowest])})")


def reason_of(rows: list[Row], contender: str) -> str | None:
    """Why somebody has no number."""
    return next((row["reason"] for row in rows if row["contender"] == contender and "reason" in row), None)


def group_of(row: Row) -> int:
    """Query heads to a key head."""
    heads, kv_heads = row["labels"]["heads"].split(" ")[0].split("/")
    return int(heads) // int(kv_heads)


def name(line: list[Row]) -> str:
    """A line of the table in few words."""
    labels, how = line[0]["labels"], line[0]["how"]
    way = "" if how == "call" else f", {how}"
    sizes = f"{labels['requests']} × {labels['prefix']}, {labels['nodes']} nodes"
    return f"{labels['heads']}, {sizes}, {line[0]['cache']}{way}"


if __name__ == "__main__":
    options = parse(__doc__ or "")
    run("attention", options, make_plan, functools.partial(judge, dtype=options.dtype))
