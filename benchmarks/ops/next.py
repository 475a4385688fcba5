"""The rows of the next step, `pass_ext.next_tree_` where rows are kept, against the same in PyTorch without a host read:
gathers by the accepted node, and level by level a batched product of transition scores and a `topk`; and where it chooses among
16 rows, beside itself where it keeps as many, and with a text that recalls. `python -m benchmarks.ops.next --help`.

Greedy, 64 offered tokens below each parent, transition scores of rank 64 over 49,152 tokens; all nodes have look-ahead slots.
Both contenders write into the same buffers of a step, from an accept result that stays the same.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import pass_ext
from benchmarks.harness.aims import at_least, at_most, fastest_of, launches, never_slower
from benchmarks.harness.cases import OURS, Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import Aim, Plan
from benchmarks.harness.results import line_name, lines_of

VOCABULARY, RANK, COUNT = 49152, 64, 64
TREES = {"chain of 1": pass_ext.Tree.chain(1), "tree of 10": pass_ext.Tree.from_branching((3, 1, 1))}
CHOSEN = "16 chosen rows"
FIXED_TREE = pass_ext.Tree.from_branching((3, 1, 1)).with_lookahead({0: 3, 1: 3})  # 16 rows
BATCHES = (1, 8)
PLAIN, KEPT, RECALLING = "PyTorch", "rows kept", "with a text"
TEXT = 4096  # tokens of the text that recalls, which come as often as words do (Zipf's law)
BUFFERS = ("rows", "lengths", "prefix_lens", "report")

Step = dict[str, Any]


# ---- the contenders ----


def next_rows(step: Step, levels: list[tuple[Tensor, Tensor]]) -> None:
    """pass_ext: one op, which finds groups and depths itself."""
    pass_ext.next_tree_(**of_the_op(step))


def plain_rows(step: Step, levels: list[tuple[Tensor, Tensor]]) -> None:
    """PyTorch ops on the device."""
    ids, tokens, positions = step["rows"]
    accepted = step["num_accepted"][:, None].long()
    step["report"][:, 0], step["report"][:, 1] = step["num_accepted"], step["status"]
    step["report"][:, 2] = (tokens[:, 1:] >= 0).sum(1)
    step["report"][:, 3] = ids.shape[1]
    step["report"][:, 5:] = step["emitted"]
    tokens[:, :1] = step["emitted"].gather(1, accepted)
    step["lengths"] += accepted[:, 0] + 1
    step["prefix_lens"].copy_(step["lengths"] - 1)
    positions.copy_(step["lengths"][:, None] - 1 + step["depths"])
    first = step["groups"][step["path"].gather(1, accepted).long()].long()  # [B, 1]
    for depth, (parents, children) in enumerate(levels):
        row = (first + depth)[:, :, None].expand(-1, -1, COUNT)
        short, scores = step["offered"].gather(1, row), step["scores"].gather(1, row)  # [B, 1, K]
        before, near = step["left"][tokens[:, parents]], step["right"][short[:, 0]]  # [B, P, r], [B, K, r]
        summed = torch.baddbmm(scores, before, near.transpose(1, 2))
        best = summed.topk(children.shape[1]).indices
        tokens[:, children] = short.expand_as(summed).gather(2, best)
    ids[:, : step["first"]] = tokens[:, : step["first"]]
    step["report"][:, 4] = (tokens >= 0).sum(1)


def of_the_op(step: Step) -> Step:
    """The arguments of next_tree_."""
    return {name: value for name, value in step.items() if name not in ("depths", "groups")}


CONTENDERS = (
    Contender(OURS, next_rows),
    Contender(PLAIN, plain_rows),
)


def recalling(chosen: Step, kept: Step, recalled: Step) -> None:
    """next_tree_ with a text, which it writes to: so each call begins at the same length."""
    recalled["lengths"].fill_(TEXT - 1)
    pass_ext.next_tree_(**recalled)


CHOOSERS = (
    Contender(OURS, lambda chosen, kept, recalled: pass_ext.next_tree_(**chosen)),
    Contender(KEPT, lambda chosen, kept, recalled: pass_ext.next_tree_(**kept), same_job=False),
    Contender(RECALLING, recalling, same_job=False),
)


def check_agreement(case: Case) -> None:
    """Raises unless both leave the same tokens, positions and lengths."""
    step, levels = case.inputs[0]
    results = []
    for contender in case.contenders:
        fresh = {name: value.clone() if name in BUFFERS else value for name, value in step.items()}
        contender(fresh, levels)
        results.append([fresh[name] for name in BUFFERS])
    for ours, theirs in zip(*results, strict=True):
        if not torch.equal(ours, theirs):
            raise AssertionError(f"{PLAIN} and {OURS} differ on {dict(case.labels)}: nothing was timed")


# ---- the cases ----


def make_plan(options: argparse.Namespace) -> Plan:
    """Every tree with every batch; the chain alone with --quick."""
    sizes = [(tree, batch) for tree in (*TREES, CHOSEN) for batch in BATCHES][: 1 if options.quick else None]
    return Plan([f"{batch} × {tree}" for tree, batch in sizes], make_cases(options, sizes))


def make_cases(options: argparse.Namespace, sizes: list[tuple[str, int]]) -> Iterator[Case]:
    """The cases. Fewest bytes: the offered tokens' transition scores and those of the parents, once."""
    for tree, batch in sizes:
        make = make_chosen_case if tree == CHOSEN else make_case
        yield make(tree, batch, torch.device(options.device))


def make_case(name_of_tree: str, batch: int, device: torch.device) -> Case:
    """A case: every request has accepted its root alone."""
    generator = torch.Generator(device).manual_seed(0)
    candidates = TREES[name_of_tree]
    nodes, slots = candidates.num_nodes, candidates.max_depth
    tree = candidates.with_lookahead(dict.fromkeys(range(nodes), slots))
    integers: dict[str, Any] = dict(dtype=torch.int32, device=device)

    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator, device=device)

    places = batch * nodes * slots
    offered = torch.stack(
        [torch.randperm(VOCABULARY, generator=generator, device=device)[:COUNT] for _ in range(places)]
    )
    left, right = torch.randn(2, VOCABULARY, RANK, generator=generator, device=device).unbind()
    width = slots + 1
    step: Step = dict(
        rows=random(VOCABULARY, 3, batch, len(tree)), lengths=random(99, batch) + 1,
        prefix_lens=torch.zeros(batch, **integers), report=random(9, batch, 5 + width),
        limits=torch.full((batch,), 2**60, device=device), first=nodes,
        parents=torch.tensor([tree.parents] * batch, **integers),
        emitted=random(VOCABULARY, batch, width), path=torch.zeros(batch, width, **integers),
        num_accepted=torch.zeros(batch, **integers), status=torch.zeros(batch, **integers),
        groups=torch.arange(0, nodes * slots, slots, **integers), offered=offered.view(batch, -1, COUNT),
        scores=torch.randn(batch, nodes * slots, COUNT, generator=generator, device=device), left=left, right=right,
        depths=torch.tensor(tree.depths, device=device),
    )  # fmt: skip
    step["rows"][0, :, nodes:] = torch.tensor([-1 - slot for slot in tree.slots[nodes:]], device=device)
    step["rows"][1, :, nodes:] = -1
    levels = []
    for depth in range(slots):
        parents = [node for node in range(nodes) if candidates.depths[node] == depth]
        children = torch.tensor([candidates.children(node) for node in parents], device=device)
        levels.append((torch.tensor(parents, device=device), children))
    moved = batch * RANK * 4 * (slots * COUNT + nodes)
    labels: dict[str, str | int] = {"tree": name_of_tree, "B": batch}
    return Case(labels, CONTENDERS, [(step, levels)], fewest_bytes=moved, check=check_agreement)


def make_chosen_case(name_of_tree: str, batch: int, device: torch.device) -> Case:
    """A case: the slots after the root offer the next candidates, as surely as trained ones do."""
    case = make_case("tree of 10", batch, device)
    step: Step = of_the_op(case.inputs[0][0])
    nodes, rows = FIXED_TREE.num_nodes, len(FIXED_TREE)
    generator = torch.Generator(device).manual_seed(1)
    ids = [*range(nodes), *(-1 - slot for slot in FIXED_TREE.slots[nodes:])]
    slots = rows - nodes
    logits = 2 * torch.randn(batch, slots, COUNT, generator=generator, device=device)
    step |= dict(
        rows=torch.zeros(3, batch, rows, dtype=torch.int64, device=device),
        offered=step["offered"][:, :slots].contiguous(),
        scores=logits.log_softmax(-1).sort(descending=True).values,
        left=step["left"] / 4,
    )
    step["rows"][0] = torch.tensor(ids, device=device)
    step["rows"][1, :, nodes:] = -1
    integers: dict[str, Any] = dict(dtype=torch.int32, device=device)
    step |= dict(parents=torch.tensor([FIXED_TREE.parents] * batch, **integers), first=nodes)

    def copied() -> Step:
        return {name: value.clone() if name in (*BUFFERS, "parents") else value for name, value in step.items()}

    kept, chosen, recalled = copied(), copied(), copied()
    chosen["rates"] = recalled["rates"] = torch.tensor([0.6, 0.5, 0.4], device=device)
    frequency = 1 / torch.arange(1, VOCABULARY + 1, device=device).float()
    text = frequency.multinomial(batch * TEXT, replacement=True, generator=generator).view(batch, TEXT)
    # The root is a frequent token, and so are those that slots offer.
    recalled |= dict(text=text, emitted=torch.full_like(step["emitted"], 2), offered=step["offered"] % 512)
    return Case({"tree": name_of_tree, "B": batch}, CHOOSERS, [(chosen, kept, recalled)], check=lambda _: None)


# ---- the aims ----


def judge(rows: list[Row]) -> list[Aim]:
    """Three times as fast as PyTorch's ops where the cache is warm; never slower; choosing and recalling are cheap; on a GPU
    one launch."""
    of_chosen = [row for row in rows if row["labels"]["tree"] == CHOSEN]
    chosen = [row for row in of_chosen if row["contender"] == OURS]
    lines = lines_of({"rows": [row for row in rows if row["labels"]["tree"] != CHOSEN]})
    warm = [line for line in lines if line[0]["cache"] == "warm"]
    aims = [at_least("3 × faster, warm", 3, fastest_of(warm, name)), never_slower(lines, name)]
    one = [row for row in chosen if row["labels"]["B"] == 1 and row["cache"] == "warm"]
    aims.append(at_most("choosing the rows of one text: at most 100 µs, warm", 100, one, name))
    recalled = [row for row in of_chosen if row["contender"] == RECALLING and row["labels"]["B"] == 1]
    warm_one = [row for row in recalled if row["cache"] == "warm"]
    aims.append(at_most("the same with a text of 4,096 tokens: at most 100 µs, warm", 100, warm_one, name))
    if any(row["how"] == "graph" for row in rows):
        case = make_case("tree of 10", 1, torch.device("cuda"))
        aims.append(launches("one launch", 1, CONTENDERS[0], case.inputs[0]))
    return aims


def name(line: list[Row]) -> str:
    """A line in a few words."""
    labels = line[0]["labels"]
    return line_name(line, f"{labels['B']} × {labels['tree']}")


if __name__ == "__main__":
    run("next", parse(__doc__ or ""), make_plan, judge)
