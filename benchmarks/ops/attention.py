"""Attention of trees to long prefixes, `pass_ext.ops.attention.attention_tree`, against PyTorch's SDPA with a dense mask,
FlexAttention, PyTorch's flash kernel merged with a small attention over the nodes, and, on a GPU where they are installed,
FlashInfer, vLLM and SGLang. `python -m benchmarks.ops.attention --help`.

The job is one layer of one step: B requests, each with a prefix in the cache and a random tree of nodes after it. All requests
have the same lengths, which SDPA needs and ours does not. The cache is [B, Hkv, slots, D]. What all layers of a step share is
made untimed: the `visible` words of ours; for SDPA a dense mask [B, 1, nodes, keys] in the type of the queries, more than a
decoder would give it; for FlexAttention its block mask and compiled kernel; for FlashInfer its plan; a copy in pages for the
libraries that need pages. The contenders (contenders/attention.py, contenders/attention_libraries.py):

* SDPA: `enable_gqa`, with the kernel that PyTorch chooses. "folded": the query heads of a key head as its rows, so that no
  kernel needs to know of groups. "repeated": every key head copied for each of its query heads. On a GPU each with every
  kernel that may take a mask.
* FlexAttention: compiled as it is, and "tuned" with max-autotune-no-cudagraphs. COMPILE_SECONDS limits the time to compile;
  lines after that have no number for it.
* torch flash + merge: the prefix by PyTorch's flash kernel, which returns the lse, the nodes by `attention_tree`, then
  `attention_merge`: the best without a kernel for both.

Before timing, each result is compared with attention in float64 within a bound for a few roundings. A visible node weighs
about a quarter of the prefix, so a wrong bit of a mask shows. A contender that is wrong, fails, or takes longer than
MOST_SECONDS for one call is not timed on that line, and the result gives the reason.

Fewest bytes: keys and values of prefix and nodes, queries, results. Fewest flops: 4 D per query head and visible key. The
limit is the longer of reading those bytes, at the faster of a large read and a large copy of this run, and computing those
flops, at the speed of a large product of this run in float32 or in the type of the queries, whichever is faster.
"""

import argparse
import functools
import time
import warnings
from collections.abc import Iterator, Sequence

import torch

from benchmarks.harness.aims import at_least, at_most, fastest_of, share_of, times_of
from benchmarks.harness.cases import OURS, Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import line_name, lines_of
from benchmarks.ops.contenders.attention import (
    CONTENDERS,
    DENSE,
    FLEX,
    FLEX_TUNED,
    MERGED,
    SDPA,
    AttentionContender,
)
from benchmarks.ops.contenders.attention_libraries import FLASHINFER, LIBRARIES, XQA, why_absent
from benchmarks.ops.contenders.inputs.attention_steps import Spec, Step, excess, make_step, make_trees, reference
from benchmarks.ops.contenders.inputs.distributions import require

HEADS = [(32, 8, 128), (28, 4, 128), (9, 3, 64)]  # query heads, key heads, their size
# A layer with a sliding window; FlashAttention 2, which does not split the keys of several queries, publishes 45 to 49 µs.
WINDOWED = Spec(*HEADS[0], 1, 8192, 8, window=2048)
# Forms of newer models: sinks (gpt-oss), two widths, and one latent (DeepSeek-V3 expanded, and absorbed, 16 of its 128 heads),
# of which rows see 2,048 keys (DeepSeek-V3.2); and a cache in 8 bits.
FORMS = [
    Spec(64, 8, 64, 1, 8192, 8, has_sinks=True),
    Spec(16, 16, 192, 1, 8192, 8, width_of_values=128),
    Spec(16, 1, 576, 1, 8192, 8, width_of_values=512, is_latent=True),
    Spec(16, 1, 576, 1, 8192, 1, width_of_values=512, is_latent=True),
    Spec(16, 1, 576, 1, 32768, 4, width_of_values=512, is_latent=True, listed=2048),
    Spec(*HEADS[0], 1, 8192, 8, codes=torch.int8),
]
BATCHES = {"cpu": (1, 8), "cuda": (1, 8, 64)}
PREFIXES = {"cpu": (1024, 8192, 32768), "cuda": (1024, 8192, 32768, 131072)}
NOT_PLANNED = {
    "cpu": ["64 requests, prefixes of 131072 (on a GPU only)", "4 and 16 nodes of other heads than 32/8 × 128"],
    "cuda": [],
}
NODES = {"cpu": (1, 4, 8, 16, 33), "cuda": (4, 16, 64)}
NODES_OF_OTHERS = {"cpu": (1, 8, 33), "cuda": NODES["cuda"]}  # of the second and third line of HEADS
FIRST = {  # measured before all others: the lines of the aims, and an odd group while there is time to compile for it
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
USUAL_NODES = {"cpu": 8, "cuda": 16}  # lines with these nodes come next
SETS = {"cpu": (2, 3), "cuda": (2, 64)}  # of inputs: at least, at most
INPUT_BYTES = {"cpu": 2**27, "cuda": 10**9}  # of the caches of all sets, within these numbers
MOST_FLOPS = {"cpu": 4.7e9, "cuda": 2e12}  # of one call
MOST_CACHE_BYTES = {"cpu": 10**9, "cuda": 10**10}
MOST_SECONDS = {"cpu": 0.35, "cuda": 0.005}  # for one call of another contender
COMPILE_SECONDS = {"cpu": 40, "cuda": 30}
TUNED_FROM = 100  # --seconds of a run: tuning takes a minute
SMALL_TILES = 64  # rows of a key head up to which reading sets a GPU's time
LARGE_CACHE, MIDDLE_CACHE = 256 * 10**6, 134 * 10**6
TIMES_SDPA = {"bfloat16": 3.0, "float16": 3.0, "float32": 1.5}  # on a CPU


# ---- the lines ----


def specs_for(options: argparse.Namespace) -> tuple[list[Spec], list[str]]:
    """The lines of the table, the most important first; and the lines left out of the grid, with the reason."""
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
    grid += [WINDOWED, *FORMS]
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
    """The reason why a line is left out; None if it is measured."""
    if spec.cache_bytes(dtype) > MOST_CACHE_BYTES[device]:
        return f"more than {MOST_CACHE_BYTES[device] / 1e9:g} GB of keys and values"
    if spec.flops() > MOST_FLOPS[device]:
        return f"more than {MOST_FLOPS[device] / 1e9:g} GFLOP a call"
    return None


def sizes(spec: Spec) -> str:
    """A line in a few words, without its nodes."""
    return f"{heads_of(spec)}, {spec.batch} × {spec.prefix}"


def heads_of(spec: Spec) -> str:
    """The heads of a layer, and what is special about it."""
    width = str(spec.head_dim) if spec.value_dim == spec.head_dim else f"{spec.head_dim}/{spec.value_dim}"
    special = {
        f", window {spec.window}": spec.window >= 0,
        ", latent": spec.is_latent,
        ", sinks": spec.has_sinks,
        f", lists of {spec.listed}": spec.listed > 0,
        f", {str(spec.codes).removeprefix('torch.')}": spec.codes is not None,
    }
    return f"{spec.heads}/{spec.kv_heads} × {width}{''.join(name for name, has in special.items() if has)}"


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan of the lines."""
    specs, left_out = specs_for(options)
    labels = [f"{sizes(spec)}, {spec.nodes} nodes" for spec in specs]
    return Plan(labels, make_cases(options, specs), counts_flops=True, left_out=left_out)


def make_cases(options: argparse.Namespace, specs: Sequence[Spec]) -> Iterator[Case]:
    """The cases of the specs."""
    device, dtype = options.device, DTYPES[options.dtype]
    is_short = options.seconds is not None and options.seconds < TUNED_FROM
    left = {c.name: 0 if options.quick else COMPILE_SECONDS[device] for c in CONTENDERS if c.compiles}
    left |= {FLEX_TUNED: 0} if is_short else {}
    for spec in specs:
        yield make_case(spec, dtype, device, left)
        if device == "cuda":
            torch.cuda.empty_cache()


def make_case(spec: Spec, dtype: torch.dtype, device: str, compile_seconds_left: dict[str, float]) -> Case:
    """A case: layers of one step, all with the same trees, and the contenders that are right on them."""
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
        check_ours,
        spec.cache_bytes(dtype) + spec.rows_bytes(dtype),
        reads=True,
        fewest_flops=spec.flops(int(trees.seen.sum())),
        absent=absent,
    )


# ---- the contenders of a line ----


def check_ours(case: Case) -> None:
    """Raises unless ours is right on the last set of inputs. `choose` checks all contenders on the first."""
    (step,) = case.inputs[-1]
    with torch.inference_mode():
        worst = excess(step, case.contenders[0](step), reference(step))
    require(
        worst <= 1, f"{OURS} differs from the reference by {worst:.3g} × the bound for rounding on {dict(case.labels)}"
    )


@torch.inference_mode()
def choose(
    steps: Sequence[Step], device: str, compile_seconds_left: dict[str, float]
) -> tuple[list[Contender], dict[str, str]]:
    """The contenders that agree with the reference on the first set of inputs, ours first; and why others are absent."""
    expected = reference(steps[0])
    contenders: list[Contender] = []
    absent: dict[str, str] = {}
    for contender in [*CONTENDERS, *LIBRARIES]:
        if device not in contender.devices:
            continue
        reason = why_not_tried(contender, steps[0].spec, device, compile_seconds_left) or why_not_timed(
            contender, steps, expected, device, compile_seconds_left
        )
        if reason is None:
            contenders.append(contender)
        else:
            require(contender.name != OURS, f"{OURS}: {reason}")
            absent[contender.name] = reason
    return contenders, absent


def why_not_tried(
    contender: AttentionContender, spec: Spec, device: str, compile_seconds_left: dict[str, float]
) -> str | None:
    """The reason why a contender cannot do the job; None if it may."""
    if contender.package is not None and (reason := why_absent(contender.name, contender.package)) is not None:
        return reason
    if contender.one_request and spec.batch > 1:
        return "one tree for all requests"
    if spec.window >= 0 and not contender.has_window:
        return "no window that goes by depth"
    if spec.has_sinks and not contender.has_sinks:
        return "no sinks"
    if spec.listed and not contender.has_lists:
        return "no lists of keys"
    if contender.compiles and compile_seconds_left[contender.name] <= 0:
        return f"the time to compile it, {COMPILE_SECONDS[device]} s, is spent, or the run is a short one"
    return None


def why_not_timed(
    contender: AttentionContender,
    steps: Sequence[Step],
    expected: tuple[torch.Tensor, torch.Tensor],
    device: str,
    compile_seconds_left: dict[str, float],
) -> str | None:
    """The reason why a contender is not timed: a wrong result, too much time, any exception; None if it is timed."""

    def call() -> object:
        result = contender(steps[0])
        if device == "cuda":
            torch.cuda.synchronize()
        return result

    reason, started = None, time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if contender.prepare is not None:
                contender.prepare(steps)
            worst = excess(steps[0], call(), expected)
        if worst > 1:
            reason = f"differs from the reference by {worst:.3g} × the bound for rounding"
        elif contender.name != OURS:
            began = time.perf_counter()
            call()
            if time.perf_counter() - began > MOST_SECONDS[device]:
                reason = f"more than {MOST_SECONDS[device] * 1000:g} ms a call"
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:100]
    if contender.compiles:
        compile_seconds_left[contender.name] -= time.perf_counter() - started
    if reason is not None and device == "cuda":
        torch.cuda.empty_cache()
    return reason


# ---- the aims ----


def judge(rows: list[Row], dtype: str) -> list[Aim]:
    """The aims of attention."""
    forms = {heads_of(spec) for spec in FORMS}  # without aims
    lines = [line for line in lines_of({"rows": rows}) if line[0]["labels"]["heads"] not in forms]
    if any(row["how"] == "graph" for row in rows):
        return judge_gpu(rows, [line for line in lines if (line[0]["how"], line[0]["cache"]) == ("graph", "cold")])
    long = [line for line in lines if line[0]["labels"]["prefix"] >= 1024]
    few = [line for line in long if 8 <= line[0]["labels"]["nodes"] <= 33]
    least = TIMES_SDPA[dtype]
    cold = [line[0] for line in long if line[0]["cache"] == "cold"]
    where = f"{dtype}, 8 to 33 nodes, prefix ≥ 1k: at least {least:g} × faster than"
    fastest = fastest_of(few, name, [OURS, *(contender.name for contender in DENSE)])
    return [
        at_least(f"{where} SDPA with a dense mask", least, times_of(few, SDPA, name)),
        at_least(f"{where} SDPA in the fastest form", least, fastest),
        share_of("cold, prefix ≥ 1k: at least 50 % of the limit", "of_limit", 0.5, cold, name),
    ]


def judge_gpu(rows: list[Row], lines: list[list[Row]]) -> list[Aim]:
    """The aims on a GPU: cold replays of a graph, trees with at most SMALL_TILES rows per key head."""
    few = [line for line in lines if group_of(line[0]) * line[0]["labels"]["nodes"] <= SMALL_TILES]
    ours = [line[0] for line in few]
    large = [row for row in ours if row["fewest_bytes"] >= LARGE_CACHE]
    middle = [row for row in ours if MIDDLE_CACHE <= row["fewest_bytes"] < LARGE_CACHE]
    first = [row for row in ours if row["labels"]["heads"] == "32/8 × 128" and row["labels"]["requests"] == 1]
    windowed = [row for row in ours if row["labels"]["heads"] == heads_of(WINDOWED)]
    even = [line for line in few if group_of(line[0]) in (1, 2, 4, 8)]
    odd = [line for line in few if group_of(line[0]) == 7]

    def faster(least: float, other: str, lines: list[list[Row]], where: str = "") -> Aim:
        aim = f"{f'at least {least:g} × faster' if least > 1 else 'not slower'} than {other}{where}"
        return at_least(aim, least, times_of(lines, other, name), reason_of(rows, other))

    return [
        share_of("at least 256 MB: at least 85 % of the bandwidth of a copy", "of_copy", 0.85, large, name),
        share_of("134 to 256 MB: at least 70 % of the bandwidth of a copy", "of_copy", 0.7, middle, name),
        at_most(
            "1 request, 1k, 32/8: at most 7 µs", 7, [row for row in first if row["labels"]["prefix"] == 1024], name
        ),
        at_most(
            "1 request, 8k, 32/8: at most 16 µs", 16, [row for row in first if row["labels"]["prefix"] == 8192], name
        ),
        at_most("1 request, 32/8, window 2048, 8 nodes: at most 10 µs", 10, windowed, name),
        at_least(
            "at least 4 × faster than SDPA with a dense mask, in the fastest form and on the fastest kernel",
            4,
            fastest_of(few, name, [OURS, *(contender.name for contender in DENSE)]),
        ),
        faster(2.5, FLEX, even, ", 1, 2, 4 or 8 query heads to a key head"),
        faster(8, FLEX, odd, ", 7 query heads to a key head"),
        faster(1, FLEX_TUNED, few),
        faster(1, MERGED, few),
        faster(1.8, FLASHINFER, few),
        faster(1, XQA, few),
    ]


def reason_of(rows: list[Row], contender: str) -> str | None:
    """The reason why a contender has no number."""
    return next((row["reason"] for row in rows if row["contender"] == contender and "reason" in row), None)


def group_of(row: Row) -> int:
    """Query heads per key head."""
    heads, kv_heads = row["labels"]["heads"].split(" ")[0].split("/")
    return int(heads) // int(kv_heads)


def name(line: list[Row]) -> str:
    """A line in a few words."""
    labels = line[0]["labels"]
    sizes = f"{labels['requests']} × {labels['prefix']}"
    return line_name(line, labels["heads"], sizes, f"{labels['nodes']} nodes")


if __name__ == "__main__":
    options = parse(__doc__ or "")
    run("attention", options, make_plan, functools.partial(judge, dtype=options.dtype))
