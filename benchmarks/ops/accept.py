"""The accept step, `pass_ext.accept_chain` and `pass_ext.accept_tree`, against PyTorch and transformers and, on a GPU where
they are installed, vLLM and FlashInfer. `python -m benchmarks.ops.accept --help`.

Every contender starts from logits as models leave them. What is the same for all steps is prepared untimed. The contenders
(contenders/accept.py):

* log probabilities: ours with `return_logprobs=True`, and with 5 alternatives of each token: the price of log probabilities.
* torch: the obvious program. A chain: both distributions of all rows, one comparison of all coins, the first refusal, one draw
  from the residual; no loop over requests. A tree: level by level, child by child, all requests at once, only the rows
  reached.
* torch, lean: the fastest plain program. Level by level for chains too, top-k without a sort, draws by one cumulative sum. On
  the CPU both programs stop when no request walks on; a GPU would have to be waited for, so there they run to the end.
* transformers: `generation.utils._speculative_sampling`, one request. Before it, as in `_assisted_decoding`, the target's
  logits become float32 and pass the logits processors (temperature, top-k, top-p, min-p) position by position. The draft's
  logits come in float32 and processed, untimed, as its assistant leaves them. It cannot run in a CUDA graph.
* vLLM: softmax of both after `apply_top_k_top_p`, a bonus draw, `rejection_sample`. FlashInfer: softmax, `top_k_renorm_probs`,
  `top_p_renorm_probs`, `chain_speculative_sampling`.

The contenders draw different random numbers, so greedy steps alone are compared to the bit. For the others two checks replace
that: on the timed inputs each result must be a path of accepted drafts and one token; on 16,384 small requests the first token
must have the target's distribution, and the mean length must be ours. Rules that no other contender has are shown beside
"torch, rejection", which accepts fewer drafts per step.

Logits: distributions.py, temperature 0.8 for both, drafts drawn from the draft's processed distribution. Chance decides how
many drafts are accepted, so each set of inputs takes the first seeds under which its batch accepts a usual number, the same
with filters as without; `accepted` is the mean of ours. On lines with "fixed" the logits leave no choice: every contender
accepts exactly one draft.

Fewest bytes: the rows on the accepted path, of the target's logits and, where the rule needs them, of the draft's; for block
and traversal, which begin at a leaf, also the rows on the path to the first leaf.
"""

import argparse
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import pass_ext
from benchmarks.harness.aims import (
    at_least,
    at_most,
    fastest_of,
    filters_cost,
    launches,
    rows_of_ours,
    share_of,
    times_of,
)
from benchmarks.harness.cases import OURS, Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import DTYPES, Aim, Plan
from benchmarks.harness.results import line_name, lines_of
from benchmarks.ops.contenders.accept import (
    BRANCHING,
    CHAIN,
    LEAN_WALK,
    LIBRARIES,
    NEEDS_DRAFT,
    WALK,
    Accepted,
    Spec,
    Step,
    Topology,
    ours,
    prepare_transformers,
    usual_walk,
    with_transformers,
)
from benchmarks.ops.contenders.inputs.distributions import (
    FILTERS,
    TEMPERATURE,
    make_draft_logits,
    make_logits,
    per_row,
    require,
    require_drawn_from,
    require_same_mean,
    sets_of_inputs,
    usual_probs,
)

TORCH, LEAN, REFERENCE = "torch", "torch, lean", "torch, rejection"
LOGPROBS = {"log probabilities": 0, "log probabilities, 5 alternatives": 5}
TRANSFORMERS, VLLM, FLASHINFER = LIBRARIES
TRIES = 24  # seeds
ACCEPTED_SHARE = {"peaked": 0.75, "flat": 0.55}  # of the judged drafts, about the mean
FROM_A_LEAF = ("block", "traversal")
CERTAIN, NEVER = 60.0, -60.0  # logits
REQUESTS_CHECKED, VOCABULARY_CHECKED = 16384, 160
FEWEST_BYTES = {"cpu": 2**20, "cuda": 256 * 10**6}  # smaller steps are not compared with a bandwidth


# ---- the contenders of a line ----


@functools.cache
def why_absent(library: str, device: str) -> str | None:
    """The reason why a library is not measured here; None if it is."""
    if device != "cuda" and library in (VLLM, FLASHINFER):
        return "runs on a GPU only"
    try:
        step = make_small_step(Spec("chain", "rejection", 1 if library == TRANSFORMERS else 2, 3, 64), device)
        if library == TRANSFORMERS:
            step.transformers = prepare_transformers(step)
        LIBRARIES[library](step)
        if device == "cuda":
            torch.cuda.synchronize()
    except ImportError:
        return "not installed"
    except Exception as error:  # of a library at any version
        return f"{type(error).__name__}: {error}".split("\n")[0][:100]
    return None


def contenders_of(spec: Spec, device: str) -> list[Contender]:
    """The contenders that have the rule, ours first; where only ours has it, plain rejection for comparison."""
    usual = (CHAIN if spec.shape == "chain" else WALK).get(spec.rule)
    lean = LEAN_WALK.get(spec.rule)
    contenders = [Contender(OURS, ours)]
    if spec.logprobs:  # the others have none
        priced = [(name, functools.partial(ours, logprobs=count)) for name, count in LOGPROBS.items()]
        return [*contenders, *(Contender(name, function, same_job=False) for name, function in priced)]
    if usual is not None:
        contenders.append(Contender(TORCH, usual))
    if lean is not None and lean is not usual:
        contenders.append(Contender(LEAN, lean))
    if spec.shape == "chain" and spec.rule == "rejection":
        if spec.batch == 1 and why_absent(TRANSFORMERS, device) is None:
            contenders.append(Contender(TRANSFORMERS, with_transformers, capturable=False))
        for library in (VLLM, FLASHINFER):
            if "min_p" not in FILTERS[spec.filters] and why_absent(library, device) is None:
                contenders.append(Contender(library, LIBRARIES[library], capturable=False))
    if usual is None:
        contenders.append(Contender(REFERENCE, usual_walk, same_job=False))
    return contenders


# ---- inputs ----


def make_step(
    spec: Spec, topology: Topology, target: Tensor, draft: Tensor, seeds: Tensor, tables: tuple[Tensor, Tensor]
) -> Step:
    """A step with drafts drawn from draft [B, I, V] by `seeds`, in the mode that the rule needs."""
    batch, nodes = target.shape[:2]
    device, inner = target.device, len(topology.inner)
    width = max(topology.branching)
    coupled = spec.rule in ("coupled", "greedy")
    with_replacement = spec.rule in ("kseq", "rejection_with_replacement")
    depths = torch.tensor([topology.depths[node] for node in topology.inner], device=device)
    positions = torch.full((batch,), 100, device=device)
    drawn, _ = pass_ext.draft_sample(
        draft.flatten(0, 1),
        width,
        mode="coupled" if coupled else "with" if with_replacement else "without",
        seeds=seeds.repeat_interleave(inner),
        positions=(positions[:, None] + (depths if coupled else 0 * depths)).flatten(),
        nodes=torch.tensor(topology.inner, dtype=torch.int32, device=device).repeat(batch),
        **per_row(batch * inner, device, spec.temperature, spec.filters),
    )
    drawn = drawn.view(batch, inner, width)
    tokens = torch.zeros(batch, nodes, dtype=torch.int64, device=device)
    for row, node in enumerate(topology.inner):
        for place, child in enumerate(topology.children[node]):
            tokens[:, child] = drawn[:, row, place]
    sampling = per_row(batch, device, spec.temperature, spec.filters) if spec.rule != "greedy" else {}
    step = Step(spec, topology, target, draft, tokens, sampling, seeds, positions, *tables)
    return describe(step)


def describe(step: Step) -> Step:
    """Adds the tree as pass_ext takes it."""
    batch, nodes = step.tokens.shape
    device, topology = step.tokens.device, step.topology
    if step.spec.shape == "chain":
        step.tree = (step.chain.contiguous(),)
        return step
    parents = torch.tensor(topology.parents, dtype=torch.int32, device=device).repeat(batch)
    cu_nodes = torch.arange(batch + 1, dtype=torch.int32, device=device) * nodes
    step.tree = (step.tokens.flatten(), parents, cu_nodes, topology.depth)
    rows = [topology.inner.index(node) if node in topology.inner else -1 for node in range(nodes)]
    local = torch.tensor(rows, dtype=torch.int32, device=device)
    base = torch.arange(batch, dtype=torch.int32, device=device)[:, None] * len(topology.inner)
    step.draft_rows = torch.where(local >= 0, base + local, -1).flatten().to(torch.int32)
    return step


def fix(step: Step) -> Step:
    """Changes the logits so that the first draft is accepted for certain, and its children never."""
    first = step.topology.children[0][0]
    requests = torch.arange(len(step.target), device=step.target.device)
    for child in step.topology.children[first]:
        token = step.tokens[:, child]
        step.target[requests, first, token.clamp(min=0)] = NEVER
    step.target[requests, 0, step.tokens[:, first].clamp(min=0)] = CERTAIN
    return step


def make_steps(spec: Spec, dtype: torch.dtype, device: str, generator: torch.Generator, quick: bool) -> list[Step]:
    """Sets of inputs, each with seeds under which it accepts about the usual number of drafts."""
    topology = Topology(spec.shape, spec.drafts)
    tables = topology.tables(torch.device(device))
    set_bytes = spec.batch * topology.nodes * spec.vocabulary * dtype.itemsize
    usual = sum(ACCEPTED_SHARE[spec.logits] ** depth for depth in range(1, topology.depth + 1))
    usual = round(usual) if spec.batch == 1 else usual
    is_chance = not spec.fixed and spec.rule != "greedy" and spec.batch * topology.nodes <= 512
    steps = []
    for _ in range(sets_of_inputs(set_bytes, device, quick)):
        target = torch.empty(spec.batch, topology.nodes, spec.vocabulary, dtype=dtype, device=device)
        draft = torch.empty(spec.batch, len(topology.inner), spec.vocabulary, dtype=dtype, device=device)
        for request in range(spec.batch):
            logits = make_logits(spec.logits, topology.nodes, spec.vocabulary, generator)
            target[request] = logits
            draft[request] = make_draft_logits(spec.logits, logits[topology.inner], generator)
        best, distance = None, float("inf")
        for _ in range(TRIES if is_chance else 1):
            seeds = torch.randint(2**62, (spec.batch,), generator=generator, device=device)
            step = make_step(spec, topology, target, draft, seeds, tables)
            missed = abs(ours(step).num_accepted.float().mean().item() - usual)
            if missed < distance:
                best, distance = step, missed
            if missed * spec.batch < 0.5:
                break
        assert best is not None
        steps.append(fix(best) if spec.fixed else best)
    return steps


def make_small_step(spec: Spec, device: str) -> Step:
    """Many requests with the same logits, a small vocabulary, and drafts of their own: for the check of distributions."""
    generator = torch.Generator(device).manual_seed(3)
    topology = Topology(spec.shape, spec.drafts)
    target = make_logits(spec.logits, topology.nodes, spec.vocabulary, generator)
    draft = make_draft_logits(spec.logits, target[topology.inner], generator)
    seeds = torch.arange(spec.batch, device=device)
    same = [logits.expand(spec.batch, *logits.shape).contiguous() for logits in (target, draft)]
    return make_step(spec, topology, *same, seeds, topology.tables(torch.device(device)))


def needed_bytes(step: Step) -> int:
    """Bytes of the rows that decide the step."""
    topology, rule = step.topology, step.spec.rule
    paths = ours(step).path.tolist()
    p_rows = q_rows = 0
    for path in paths:
        needed = {node for node in path if node >= 0}
        if rule in FROM_A_LEAF:
            needed |= set(topology.first_path)
        p_rows += len(needed)
        if rule in NEEDS_DRAFT:
            q_rows += len(needed.intersection(topology.inner))
    return (p_rows + q_rows) * step.spec.vocabulary * step.target.element_size()


# ---- the checks ----


def read(contender: Contender, step: Step) -> Accepted:
    """A contender's result: emitted tokens, and the numbers of accepted drafts."""
    result = contender(step)
    if contender.name == OURS:
        require(not result.status.any(), f"{OURS} returns a status other than 0")
        return result.emitted, result.num_accepted
    if contender.name == TRANSFORMERS:
        tokens, count = result
        emitted = torch.full((1, step.tokens.shape[1]), -1, device=tokens.device)
        emitted[:, : tokens.shape[1]] = tokens
        return emitted, count.reshape(1)
    if contender.name in (VLLM, FLASHINFER):
        emitted = (result[0] if isinstance(result, tuple) else result).long()
        return emitted, (emitted >= 0).sum(1) - 1
    return result


def check(case: Case) -> None:
    """Checks that results are possible on the first and last timed inputs, and that distributions are right on small ones."""
    contenders = [contender for contender in case.contenders if contender.same_job]
    for (step,) in (case.inputs[0], case.inputs[-1]):
        expected = read(contenders[0], step)
        for contender in contenders:
            emitted, counts = read(contender, step)
            require_possible(contender.name, step, emitted, counts)
            if step.spec.fixed:
                require((counts == 1).all(), f"{contender.name} must accept one draft, it accepts {counts.tolist()}")
            if step.spec.rule == "greedy":
                same = torch.equal(emitted, expected[0]) and torch.equal(counts, expected[1].to(counts.dtype))
                require(same, f"{contender.name} and {OURS} differ on {dict(case.labels)}")
    spec = case.inputs[0][0].spec
    if spec.rule != "greedy":
        check_distribution(spec.shape, spec.rule, spec.logits, spec.filters, str(case.inputs[0][0].target.device.type))


def require_possible(name: str, step: Step, emitted: Tensor, counts: Tensor) -> None:
    """Raises unless each row holds accepted drafts, one token of the vocabulary, and -1 after it."""
    place = torch.arange(emitted.shape[1], device=emitted.device)
    inside = place <= counts[:, None]
    good = torch.where(inside, (emitted >= 0) & (emitted < step.spec.vocabulary), emitted == -1)
    require(good.all(), f"{name} emits ids outside the vocabulary")
    node = torch.zeros_like(counts, dtype=torch.int64)
    requests = torch.arange(len(node), device=node.device)
    for depth in range(step.topology.depth):
        children = step.children[node]
        fits = (step.tokens[requests[:, None], children.clamp(min=0)] == emitted[:, depth, None]) & (children >= 0)
        matches, place_of = fits.max(1)
        require((matches | (depth >= counts)).all(), f"{name} accepts tokens that are no drafts")
        node = children.gather(1, place_of[:, None])[:, 0].where(matches, node)


@functools.cache
def check_distribution(shape: str, rule: str, logits: str, filters: str, device: str) -> None:
    """Raises unless each contender's first token has the target's distribution and its mean of accepted drafts is ours."""
    small = Spec(shape, rule, REQUESTS_CHECKED, 7 if shape == "tree" else 3, VOCABULARY_CHECKED, logits, filters)
    step = make_small_step(small, device)
    contenders = [contender for contender in contenders_of(small, device) if contender.same_job]
    results = {contender.name: read(contender, step) for contender in contenders}
    if shape == "chain" and rule == "rejection" and why_absent(TRANSFORMERS, device) is None:
        results[TRANSFORMERS] = [torch.cat(parts) for parts in zip(*one_by_one(step), strict=True)]
    probs = usual_probs(step.target[0, 0].double(), TEMPERATURE, filters)
    for name, (emitted, counts) in results.items():
        if pass_ext.RULES[rule] == "exact":
            require_drawn_from(f"{name}, {rule}, {filters}", emitted[:, 0], probs)
        if rule != "coupled":  # its length depends on noise that only ours shares with the drafts
            require_same_mean(
                f"{name} and {OURS}, {rule}, {filters}, accepted", counts, results[OURS][1][: len(counts)]
            )


def one_by_one(step: Step) -> Iterator[Accepted]:
    """transformers' results on the first eighth of the requests, one after the other."""
    contender = Contender(TRANSFORMERS, with_transformers)
    scores = None
    for request in range(len(step.tokens) // 8):
        some = slice(request, request + 1)
        single = replace(step, target=step.target[some], draft=step.draft[some], tokens=step.tokens[some])
        single.transformers = scores = scores or prepare_transformers(single)
        yield read(contender, single)


# ---- the cases ----


def specs_for(options: argparse.Namespace) -> list[Spec]:
    """The lines of the table, the most important first."""
    if options.quick:
        small = [Spec("chain", rule, 2, 3, 4096) for rule in ("coupled", "block")]
        small += [
            Spec("chain", "rejection", 1, 3, 4096),
            Spec("chain", "rejection", 1, 3, 4096, filters="top-k 50, top-p 0.9"),
        ]
        small += [Spec("chain", "rejection", 1, 3, 8192, logprobs=True)]
        return [*small, Spec("tree", "rejection", 2, 7, 4096), Spec("tree", "traversal", 2, 7, 4096)]
    return cuda_specs() if options.device == "cuda" else cpu_specs()


def cpu_specs() -> list[Spec]:
    """The lines of a CPU: few requests, every size of the vocabulary."""
    usual = 128256
    specs = [Spec("chain", rule, 1, 3, usual) for rule in ("rejection", "coupled", "block", "greedy", "typical")]
    specs += [Spec("chain", "rejection", 1, 3, usual, filters=filters) for filters in FILTERS if filters != "off"]
    specs += [
        Spec("chain", "rejection", 1, 3, usual, "flat", filters)
        for filters in ("off", "top-p 0.9", "top-k 50, top-p 0.9")
    ]
    specs += [Spec("chain", "coupled", 1, 3, usual, filters="top-k 50, top-p 0.9")]
    tree_rules = ("rejection", "coupled", "traversal", "rejection_with_replacement", "kseq", "greedy")
    specs += [Spec("tree", rule, 1, 15, usual) for rule in tree_rules]
    specs += [Spec("chain", rule, 8, 3, usual) for rule in ("rejection", "coupled")]
    specs += [Spec("chain", "rejection", 1, 7, vocabulary) for vocabulary in (32000, 49152, 128256, 151936, 262144)]
    specs += [Spec("tree", "rejection", 1, drafts, 32000, fixed=True) for drafts in BRANCHING]
    specs += [Spec("chain", "rejection", 64, 3, 32000), Spec("tree", "coupled", 64, 7, 32000)]
    return [*specs, *logprob_specs(1)]


def logprob_specs(batch: int) -> list[Spec]:
    """The lines with log probabilities: rules that know a sum and rules that do not, laws that need a second one or none."""
    rules = ("rejection", "coupled", "greedy")
    specs = [Spec("chain", rule, batch, 4, 128256, logprobs=True) for rule in rules]
    specs += [Spec("chain", rule, batch, 4, 128256, heat=1.0, logprobs=True) for rule in rules[:2]]
    return [*specs, Spec("chain", "rejection", batch, 4, 128256, filters="top-k 50, top-p 0.9", logprobs=True)]


def cuda_specs() -> list[Spec]:
    """The lines of a GPU: 1 to 256 requests, whose logits are gigabytes. Filters with 8: torch's sorts take long."""
    usual, both = 128256, "top-k 50, top-p 0.9"
    specs = [Spec("chain", rule, 1, 4, usual) for rule in ("rejection", "coupled")]
    specs += [Spec("chain", rule, 256, 3, usual) for rule in ("rejection", "coupled")]
    specs += [Spec("chain", "rejection", batch, 3, usual) for batch in (1, 8, 64)]
    specs += [Spec("chain", "rejection", 8, 3, usual, filters=filters) for filters in FILTERS if filters != "off"]
    specs += [Spec("tree", rule, 64, 15, usual) for rule in ("rejection", "coupled", "traversal")]
    specs += [Spec("chain", "rejection", 8, 3, usual, "flat", filters) for filters in ("off", "top-p 0.9", both)]
    specs += [Spec("chain", "block", 64, 7, usual), Spec("tree", "rejection", 1, 63, usual)]
    specs += [Spec("chain", "rejection", 1, 3, usual, filters=both)]
    specs += [Spec("chain", "coupled", 8, 3, usual, filters=filters) for filters in ("off", both)]
    specs += [Spec("chain", "rejection", 64, 3, usual, filters=both)]
    specs += [Spec("chain", "rejection", 64, 7, vocabulary) for vocabulary in (32000, 49152, 151936, 262144)]
    specs += [Spec("tree", "rejection", 64, drafts, 32000, fixed=True) for drafts in BRANCHING]
    specs += [Spec("tree", rule, 64, 15, usual) for rule in ("kseq", "rejection_with_replacement", "greedy")]
    specs += [Spec("tree", "coupled", 256, 63, 32000), Spec("chain", "typical", 64, 3, usual)]
    return [*specs, *logprob_specs(1), *logprob_specs(64)]


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan of the lines."""
    specs = specs_for(options)
    return Plan([brief(spec) for spec in specs], make_cases(options, specs))


def brief(spec: Spec) -> str:
    """A line in a few words."""
    filters = "" if spec.filters == "off" else f", {spec.filters}"
    prices = ", log probabilities" if spec.logprobs else ""
    sizes = f"{spec.batch} × (1 + {spec.drafts}) × {spec.vocabulary}"
    return f"{spec.shape}, {spec.rule}, {sizes}, {logits_of(spec)}{filters}{prices}"


def logits_of(spec: Spec) -> str:
    """The logits of a line in a few words, and a temperature that is not the usual one."""
    words = [spec.logits, *(["fixed"] if spec.fixed else []), *(["temperature 1"] if spec.heat == 1.0 else [])]
    return ", ".join(words)


def make_cases(options: argparse.Namespace, specs: Sequence[Spec]) -> Iterator[Case]:
    """The cases of the specs, with the inputs that transformers needs."""
    generator = torch.Generator(options.device).manual_seed(0)
    for spec in specs:
        steps = make_steps(spec, DTYPES[options.dtype], options.device, generator, options.quick)
        contenders = contenders_of(spec, options.device)
        if any(contender.name == TRANSFORMERS for contender in contenders):
            for step in steps:
                step.transformers = prepare_transformers(step)
        accepted = torch.cat([ours(step).num_accepted for step in steps]).float().mean().item()
        labels: dict[str, str | int] = {
            "shape": spec.shape,
            "rule": spec.rule,
            "requests": spec.batch,
            "nodes": f"1 + {spec.drafts}",
            "V": spec.vocabulary,
            "logits": logits_of(spec),
            "filters": spec.filters,
            "accepted": f"{accepted:.2f}",
        }
        bytes_of = [needed_bytes(step) for step in steps]
        yield Case(labels, contenders, [(step,) for step in steps], check, bytes_of, reads=True)


# ---- the aims ----


def judge(rows: list[Row]) -> list[Aim]:
    """The aims of the accept step."""
    on_gpu = any(row["how"] == "graph" for row in rows)
    device, least = ("cuda", 10) if on_gpu else ("cpu", 4)
    lines = lines_of({"rows": rows})
    timed = [line for line in lines if line[0]["how"] in ("call", "graph")]
    aims = [
        at_least(f"at least {least} × faster than torch", least, times_of(timed, TORCH, name)),
        at_least(
            f"at least {least} × faster than the fastest plain way",
            least,
            fastest_of(timed, name, (OURS, TORCH, LEAN)),
        ),
        faster_than(TRANSFORMERS, least, lines, device),
    ]
    large = [line[0] for line in timed if line[0]["labels"]["filters"] == "off" and line[0]["cache"] == "cold"]
    large = [row for row in large if row["fewest_bytes"] >= FEWEST_BYTES[device]]
    if not on_gpu:
        aim = "cold, at least 1 MiB needed, no filters: at least 60 % of the bandwidth of reading"
        return [*aims, share_of(aim, "of_read", 0.6, large, name), filters_cost(2.0, timed, ("accepted",), name)]
    aims += [faster_than(VLLM, 4, lines, device), faster_than(FLASHINFER, 3, lines, device)]
    aim = "cold, at least 256 MB needed, no filters: at least 80 % of the bandwidth of a copy"
    aims += [share_of(aim, "of_copy", 0.8, large, name), small_step(rows)]
    aims.append(filters_cost(1.5, timed, ("accepted",), name))
    step = make_small_step(Spec("chain", "rejection", 8, 3, 32000), "cuda")
    return [*aims, launches("at most two launches per step", 2, ours, (step,))]


def faster_than(library: str, least: int, lines: list[list[Row]], device: str) -> Aim:
    """The aim against a library, by the times of a Python loop: it cannot be captured in a graph."""
    times = times_of([line for line in lines if line[0]["how"] in ("call", "eager")], library, name)
    return at_least(f"at least {least} × faster than {library}", least, times, why_absent(library, device))


def small_step(rows: list[Row]) -> Aim:
    """The aim for the smallest step of one request."""
    labels = {"requests": 1, "nodes": "1 + 4", "V": 128256, "filters": "off"}
    small = [row for row in rows_of_ours(rows, ("graph",)) if labels.items() <= row["labels"].items()]
    return at_most("1 request, 4 drafts, V = 128,256: at most 8 µs", 8, small, name)


def name(line: list[Row]) -> str:
    """A line in a few words."""
    labels = line[0]["labels"]
    filters = "" if labels["filters"] == "off" else labels["filters"]
    sizes = f"{labels['requests']} × ({labels['nodes']}) × {labels['V']}"
    return line_name(line, labels["shape"], labels["rule"], sizes, labels["logits"], filters)


if __name__ == "__main__":
    run("accept", parse(__doc__ or ""), make_plan, judge)
