"""What texts recall, `pass_ext.drafting.recall_scores`, against the same in PyTorch without a host read: all places of a text
compared at once with the last tokens of each path, and all tokens after them with all candidates.
`python -m benchmarks.ops.recall --help`.

64 candidates after each path, texts of tokens that come as often as words do (Zipf's law). *nothing recalled*: the same op
with paths that have no tokens: what a call costs beside the search, also where PyTorch's ops have just swept the caches.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

import pass_ext
from benchmarks.harness.aims import launches, never_slower
from benchmarks.harness.cases import OURS, Case, Contender, Row
from benchmarks.harness.command import parse, run
from benchmarks.harness.plan import Aim, Plan
from benchmarks.harness.results import line_name, lines_of

VOCABULARY, COUNT, WINDOW, MOST = 49152, 64, 4096, 3
NOTHING = "nothing recalled"
SHAPES = ((1, 8, 256), (1, 8, 4096), (8, 32, 1024))  # texts, paths in all, tokens of each text


# ---- the contenders ----


def plain(tokens: Tensor, contexts: Tensor, requests: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
    """PyTorch ops on the device."""
    rows, long = text[requests.long()], lengths[requests.long()]  # [N, T]
    places = torch.arange(rows.shape[1], device=rows.device)
    after = rows[:, 1:, None] == tokens[:, None]  # [N, T - 1, K]
    is_inside = (places[:-1] + 1 < long[:, None]) & (places[:-1] >= long[:, None] - WINDOW)
    scores = torch.zeros(tokens.shape, device=tokens.device)
    shares = []
    matches = is_inside
    for n in range(MOST):
        last = contexts[:, MOST - 1 - n, None]
        before = torch.nn.functional.pad(rows, (n, 0), value=-1)[:, : rows.shape[1] - 1]
        inside = (places[:-1] - n >= long[:, None] - WINDOW) & (places[:-1] >= n)
        matches = matches & (before == last) & (last >= 0) & inside
        found = matches.sum(1, keepdim=True)
        followed = (matches[:, :, None] & after).sum(1)
        shares.append(followed / found.clamp(min=1))
    for share in reversed(shares):
        scores = scores + share
    return 2 * scores


CONTENDERS = (
    Contender(OURS, lambda nowhere, tokens, contexts, *text: pass_ext.drafting.recall_scores(tokens, contexts, *text)),
    Contender("PyTorch", lambda nowhere, tokens, contexts, *text: plain(tokens, contexts, *text)),
    Contender(
        NOTHING,
        lambda nowhere, tokens, contexts, *text: pass_ext.drafting.recall_scores(tokens, nowhere, *text),
        same_job=False,
    ),
)


def check_agreement(case: Case) -> None:
    """Raises unless both give the same scores."""
    ours, theirs = (contender(*case.inputs[0]) for contender in case.contenders if contender.same_job)
    if not torch.equal(ours, theirs):
        raise AssertionError(f"PyTorch and {OURS} differ on {dict(case.labels)}: nothing was timed")


# ---- the cases ----


def make_plan(options: argparse.Namespace) -> Plan:
    """Every shape; the smallest alone with --quick."""
    shapes = SHAPES[: 1 if options.quick else None]
    return Plan([f"{rows} × {length}" for _, rows, length in shapes], make_cases(options, shapes))


def make_cases(options: argparse.Namespace, shapes: tuple[tuple[int, int, int], ...]) -> Iterator[Case]:
    """The cases. Fewest bytes: the texts once, candidates and scores."""
    for requests, rows, length in shapes:
        yield make_case(requests, rows, length, torch.device(options.device))


def make_case(requests: int, rows: int, length: int, device: torch.device) -> Case:
    """A case: paths that end as their texts do at random places, so that most are found."""
    generator = torch.Generator().manual_seed(0)
    weights = 1 / torch.arange(1, VOCABULARY + 1).float()
    text = weights.multinomial(requests * length, replacement=True, generator=generator).view(requests, length)
    of = torch.arange(rows) % requests
    ends = torch.randint(3, length, (rows,), generator=generator)
    contexts = torch.stack([text[of, ends - back] for back in (2, 1, 0)], 1)
    tokens = torch.stack(
        [torch.randperm(2000, generator=generator)[:COUNT] for _ in range(rows)]
    )  # among the frequent ones
    arguments = torch.full_like(contexts, -1), tokens, contexts, of.int(), text, torch.full((requests,), length)
    moved = 8 * text.numel() + 12 * tokens.numel()
    labels: dict[str, str | int] = {"texts": requests, "paths": rows, "tokens": length}
    inputs = [tuple(x.to(device) for x in arguments)]
    return Case(labels, CONTENDERS, inputs, fewest_bytes=moved, check=check_agreement)


# ---- the aims ----


def judge(rows: list[Row]) -> list[Aim]:
    """Never slower than PyTorch's ops; searching a text of 4,096 tokens for 8 paths costs little; on a GPU one launch."""
    lines = lines_of({"rows": rows})
    aims = [never_slower(lines, name), *map(search, (x for x in lines if is_long(x)))]
    if any(row["how"] == "graph" for row in rows):
        case = make_case(1, 8, 256, torch.device("cuda"))
        aims.append(launches("one launch", 1, CONTENDERS[0], case.inputs[0]))
    return aims


def is_long(line: list[Row]) -> bool:
    """True for the line that the aim is about."""
    return line[0]["labels"]["tokens"] == 4096 and line[0]["cache"] == "warm"


def search(line: list[Row]) -> Aim:
    """What the search adds to a call."""
    median = {row["contender"]: row["median_us"] for row in line}
    added = median[OURS] - median[NOTHING]
    return Aim(
        "searching 4,096 tokens for 8 paths: at most 50 µs, warm", added <= 50, f"{added:.2f} µs more than a call"
    )


def name(line: list[Row]) -> str:
    """A line in a few words."""
    labels = line[0]["labels"]
    return line_name(line, f"{labels['paths']} paths, {labels['tokens']} tokens")


if __name__ == "__main__":
    run("recall", parse(__doc__ or ""), make_plan, judge)
