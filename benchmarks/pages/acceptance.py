"""How many drafted tokens every accept rule takes per step, measured with the package's own kernels on the CPU.

`python -m benchmarks.pages.acceptance` writes benchmarks/results/<device>/acceptance.json (into $OUT where the environment
has it), the table between the markers of docs/ops/accept.md, and docs/ops/accept-tree.svg, which needs matplotlib. `--render`
writes table and picture again from the committed result. `--check` writes nothing and fails where they are not what it says.
About a minute. The numbers depend on the seed alone; near ties aside, every machine gets the same.

Logits are random for each node of each request: target N(0, 2.5), draft = target + N(0, 0.8), 1,000 tokens, temperature 1. A
chain of 4 drafts and a tree with branching (4, 2, 2). Drafts of modes "without" and "with" have noise of their own at every
node, as docs/ops/accept.md asks for; those of mode "coupled" have the target's at their text position.
"""

import argparse
import json
import math
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pass_ext
from benchmarks import ROOT
from benchmarks.harness import machine
from benchmarks.harness.results import FORMAT, save
from pass_ext.ops.rules import ACCEPT_RULES
from pass_ext.reference.accept import Judge
from pass_ext.reference.distribution import process
from pass_ext.reference.noise import coin

PAGE, PICTURE = Path("docs/ops/accept.md"), Path("docs/ops/accept-tree.svg")
MARKERS = (
    "<!-- benchmarks.pages.acceptance: written by the script, do not edit -->",
    "<!-- /benchmarks.acceptance -->",
)

SEED, REQUESTS, CHUNK, VOCABULARY = 0, 20_000, 250, 1000
TARGET_SPREAD, DRAFT_NOISE, TEMPERATURE = 2.5, 0.8, 1.0
SHAPES = {"chain": (1, 1, 1, 1), "tree": (4, 2, 2)}

# rule, how its drafts are drawn, the shapes it is measured on, what it must read
CASES = [
    ("coupled", "coupled", ("chain", "tree"), "p on the path"),
    ("coupled", "without", ("chain", "tree"), "p on the path"),
    ("coupled", "top", ("chain", "tree"), "p on the path"),
    ("rejection", "without", ("chain", "tree"), "p and q on the path; again after a rejection, if a sibling is left"),
    ("rejection_with_replacement", "with", ("chain", "tree"), "as rejection"),
    ("kseq", "with", ("chain", "tree"), "p and q on the path; again up to four times at a node with siblings"),
    ("block", "without", ("chain",), "p and q of the whole chain; again for each draft taken back"),
    (
        "traversal",
        "without",
        ("tree",),
        "p and q of one branch above its leaf, then on; again for each node taken back",
    ),
    ("typical", "without", ("chain", "tree"), "p of all accepted nodes, on every branch; again for the entropy"),
]
FITS = {"block": "chain", "traversal": "tree; on a chain it is block"}  # the others: both


# ---- measuring ----


def parents_of(branching: tuple[int, ...]) -> list[int]:
    """A tree, breadth first: every node at depth d has branching[d] children."""
    parents, level = [-1], [0]
    for count in branching:
        first = len(parents)
        parents += [node for node in level for _ in range(count)]
        level = list(range(first, len(parents)))
    return parents


def depths_of(parents: list[int]) -> list[int]:
    """Edges from the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def draft(
    mode: str, logits: Tensor, parents: list[int], branching: tuple[int, ...], seeds: Tensor, positions: Tensor
) -> Tensor:
    """Tokens [B, nodes] drawn from logits [B, nodes, V]; a root's is 0."""
    requests, nodes, vocabulary = logits.shape
    depths = torch.tensor(depths_of(parents))
    inner = int((depths < len(branching)).sum())  # breadth first, so these have children
    position = positions[:, None] + (depths[:inner] if mode == "coupled" else torch.zeros(inner, dtype=torch.long))
    drawn, _ = pass_ext.draft_sample(
        logits[:, :inner].reshape(-1, vocabulary),
        max(branching),
        mode=mode,
        temperature=TEMPERATURE,
        seeds=seeds.repeat_interleave(inner),
        positions=position.flatten(),
        nodes=torch.arange(inner).repeat(requests),
    )
    of_parent = [parents[1:i].count(parents[i]) for i in range(1, nodes)]  # which of its parent's candidates
    tokens = torch.zeros(requests, nodes, dtype=torch.long)
    tokens[:, 1:] = drawn.view(requests, inner, -1)[:, parents[1:], of_parent]
    return tokens


def measure(requests: int) -> list[dict[str, Any]]:
    """Mean accepted drafts of every case."""
    generator = torch.Generator().manual_seed(SEED)
    cases = [(shape, rule, mode) for rule, mode, shapes, _ in CASES for shape in shapes]
    counts: dict[tuple[str, str, str], list[Tensor]] = {case: [] for case in cases}
    for first in range(0, requests, CHUNK):
        size = min(CHUNK, requests - first)
        seeds, positions = torch.arange(first, first + size), torch.full((size,), 100)
        for shape, branching in SHAPES.items():
            parents = parents_of(branching)
            target = torch.randn(size, len(parents), VOCABULARY, generator=generator).mul_(TARGET_SPREAD)
            noise = torch.randn(size, len(parents), VOCABULARY, generator=generator)
            logits = noise.mul_(DRAFT_NOISE).add_(target)
            drawn = {
                mode: draft(mode, logits, parents, branching, seeds, positions)
                for mode in {mode for one, _, mode in cases if one == shape}
            }
            for rule, mode in [(rule, mode) for one, rule, mode in cases if one == shape]:
                result = pass_ext.accept_tree(
                    target.flatten(0, 1),
                    drawn[mode].flatten(),
                    torch.tensor(parents).repeat(size),
                    torch.arange(size + 1) * len(parents),
                    len(branching),
                    rule=rule,
                    draft_logits=logits.flatten(0, 1) if ACCEPT_RULES[rule].needs_draft_logits else None,
                    temperature=TEMPERATURE,
                    seeds=seeds,
                    positions=positions,
                )
                assert (result.status == 0).all()
                counts[shape, rule, mode].append(result.num_accepted)
    rows = []
    for (shape, rule, mode), parts in counts.items():
        accepted = torch.cat(parts).double()
        error = float(accepted.std()) / math.sqrt(len(accepted))
        labels = {"shape": shape, "rule": rule, "drafts": mode}
        rows.append({**labels, "mean_accepted": round(float(accepted.mean()), 5), "standard_error": round(error, 5)})
    return rows


# ---- the picture: one small tree, verified by rule "rejection" ----

WORDS = [
    *("cat", "dog", "bird", "fox"),
    *("sings", "sleeps", "runs", "eats"),
    *("well", "here", "now", "again"),
]
STORY = {"root": "the", "branching": (3, 2), "seed": 2029, "position": 7}


def verify_story() -> dict[str, Any]:
    """A tree of words, what accept_tree makes of it, and every number on the way."""
    branching, seed, position = STORY["branching"], STORY["seed"], STORY["position"]
    parents = parents_of(branching)
    depths = depths_of(parents)
    generator = torch.Generator().manual_seed(seed)
    grammar = torch.full((len(parents), len(WORDS)), -math.inf)  # a noun, then a verb, then an adverb
    for node, depth in enumerate(depths):
        grammar[node, 4 * depth : 4 * depth + 4] = 0.0
    target = grammar + torch.randn(grammar.shape, generator=generator)
    logits = target + 0.8 * torch.randn(grammar.shape, generator=generator)
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    tokens = draft("without", logits[None], parents, branching, seeds, positions)[0]
    result = pass_ext.accept_tree(
        target, tokens, torch.tensor(parents), torch.tensor([0, len(parents)]), len(branching),
        rule="rejection", draft_logits=logits, temperature=1.0, seeds=seeds, positions=positions,
    )  # fmt: skip
    path = [int(node) for node in result.path[0] if node >= 0]
    emitted = [int(token) for token in result.emitted[0] if token >= 0]

    nodes: list[dict[str, Any]] = [{"word": WORDS[int(token)], "state": "not looked at"} for token in tokens]
    nodes[0] = {"word": STORY["root"], "state": "accepted"}
    for depth, node in enumerate(path):
        judge = Judge(node, depth, process(target[node]), iter(()), process(logits[node]).probs)
        for child in [i for i, parent in enumerate(parents) if parent == node]:
            token = int(tokens[child])
            p, q, u = float(judge.p[token]), float(judge.q_at(token)[token]), coin(seed, position, child)
            state = "accepted" if u < p / q else "rejected"
            nodes[child] |= {"state": state, "p": round(p, 4), "q": round(q, 4), "coin": round(u, 4)}
            if state == "accepted":
                break
            judge.reject(token)
    accepted = [node for node, told in enumerate(nodes) if told["state"] == "accepted"]
    assert accepted == path, "the reference tells another story than the kernel"
    added = {"word": WORDS[emitted[-1]], "parent": path[-1], "p": round(float(judge.p[emitted[-1]]), 4)}
    return {"rule": "rejection", "parents": parents, "nodes": nodes, "path": path, "added": added}


def draw(story: dict[str, Any], path: Path) -> None:
    """The tree from left to right. `path` may end in .svg or .png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import FancyBboxPatch

    style = {
        "accepted": dict(face="#cfe3f7", edge="#0b3d6e", text="#0b2545", width=2.2, line="solid"),
        "rejected": dict(face="#e4e4e4", edge="#8a8a8a", text="#4a4a4a", width=1.1, line="solid"),
        "not looked at": dict(face="#ffffff", edge="#b5b5b5", text="#777777", width=1.0, line=(0, (3, 2))),
        "added": dict(face="#0b3d6e", edge="#0b3d6e", text="#ffffff", width=2.2, line="solid"),
    }
    parents, nodes, added = story["parents"], story["nodes"], story["added"]
    depths = depths_of(parents)
    leaves = [i for i in range(len(parents)) if i not in parents]
    height = {leaf: float(len(leaves) - 1 - row) for row, leaf in enumerate(leaves)}
    for node in reversed(range(len(parents))):
        below = [height[i] for i, parent in enumerate(parents) if parent == node]
        height.setdefault(node, sum(below) / len(below) if below else 0.0)
    left, half, tall = (0.0, 1.06, 3.06, 5.06), 0.34, 0.36  # of the boxes in each column

    with pyplot.rc_context(
        {"svg.hashsalt": "pass_ext", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 9.5}
    ):
        figure = pyplot.figure(figsize=(7.3, 4.75), facecolor="white")
        axes = figure.add_axes((0.005, 0.0, 0.99, 1.0))
        axes.set(xlim=(-0.08, 5.95), ylim=(-1.52, len(leaves) - 0.05))
        axes.axis("off")

        def box(x: float, y: float, word: str, state: str) -> None:
            look = style[state]
            shape = FancyBboxPatch(
                (x, y - tall / 2), 2 * half, tall, boxstyle="round,pad=0.03,rounding_size=0.08", zorder=3,
                facecolor=look["face"], edgecolor=look["edge"], linewidth=look["width"], linestyle=look["line"],
            )  # fmt: skip
            axes.add_patch(shape)
            weight = "bold" if state in ("accepted", "added") else "normal"
            axes.text(x + half, y - 0.015, word, ha="center", va="center", color=look["text"], weight=weight, zorder=5)
            if state == "rejected":
                cross(x, y, 2 * half, tall)

        def cross(x: float, y: float, wide: float, tall: float) -> None:
            for end in (1, -1):
                axes.plot([x, x + wide], [y - end * tall / 2, y + end * tall / 2], color="#ababab", lw=1.4, zorder=4)

        def edge(x0: float, y0: float, x1: float, y1: float, state: str) -> None:
            look = style["accepted" if state == "added" else state]
            bend = x1 - 0.13
            axes.plot(
                [x0, bend, bend, x1], [y0, y0, y1, y1], color=look["edge"], linewidth=look["width"],
                linestyle=look["line"], zorder=2 if state in ("accepted", "added") else 1, solid_joinstyle="round",
            )  # fmt: skip

        for node, told in enumerate(nodes):
            x, y, state = left[depths[node]], height[node], told["state"]
            box(x, y, told["word"], state)
            if node:
                parent = parents[node]
                edge(left[depths[parent]] + 2 * half + 0.03, height[parent], x - 0.03, y, state)
            if "coin" in told:
                ratio, less = told["p"] / told["q"], "<" if state == "accepted" else "≥"
                shade = style[state]["text"]
                weight = "bold" if state == "accepted" else "normal"
                axes.text(
                    x + 2 * half + 0.08, y + 0.235, f"p / q = {told['p']:.2f} / {told['q']:.2f}", fontsize=8.4,
                    va="center", color=shade,
                )  # fmt: skip
                axes.text(
                    x + 2 * half + 0.08, y - 0.24, f"coin {told['coin']:.2f} {less} {ratio:.2f}", fontsize=8.4,
                    va="center", color=shade, weight=weight,
                )  # fmt: skip
        last = added["parent"]
        y = height[last]
        edge(left[depths[last]] + 2 * half + 0.03, y, left[3] - 0.03, y, "added")
        box(left[3], y, added["word"], "added")
        emitted = " ".join([*(nodes[node]["word"] for node in story["path"][1:]), added["word"]])
        for down, text in ((0.38, f"p = {added['p']:.2f}"), (1.1, "emitted"), (1.4, emitted)):
            weight = "bold" if text is emitted else "normal"
            axes.text(left[3] + half, y - down, text, fontsize=8.4, ha="center", va="center", weight=weight)

        for x, text in zip(left, ("root", "first draft", "second draft", "added"), strict=True):
            axes.text(x + half, len(leaves) - 0.33, text, ha="center", va="center", color="#333333", style="italic")
        legend = [
            (0.0, "accepted", "coin < p / q: accepted, go on at its children"),
            (0.0, "rejected", "rejected: p becomes norm((p − q)₊), q loses the token"),
            (3.62, "not looked at", "not judged, its row decides nothing"),
            (3.62, "added", "drawn from the target's p"),
        ]
        for index, (x, state, text) in enumerate(legend):
            y = -0.88 - 0.38 * (index % 2)
            look = style[state]
            shape = FancyBboxPatch(
                (x, y - 0.09), 0.24, 0.18, boxstyle="round,pad=0.02,rounding_size=0.05", facecolor=look["face"],
                edgecolor=look["edge"], linewidth=look["width"], linestyle=look["line"],
            )  # fmt: skip
            axes.add_patch(shape)
            if state == "rejected":
                cross(x, y, 0.24, 0.18)
            axes.text(x + 0.34, y, text, va="center", fontsize=8.8, color="#222222")
        if path.suffix == ".svg":
            told = {"Title": "A tree of drafts being verified", "Description": json.dumps(story, ensure_ascii=False)}
            figure.savefig(path, metadata={"Date": None, "Creator": None, **told})
            path.write_text(re.sub(r"[ \t]+$", "", path.read_text(), flags=re.MULTILINE))
        else:
            figure.savefig(path, dpi=96)
        pyplot.close(figure)


def story_in(svg: str) -> Any:
    """What a picture was drawn from."""
    import html

    found = re.search(r"<dc:description>(.*?)</dc:description>", svg, flags=re.DOTALL)
    return json.loads(html.unescape(found[1])) if found else None


# ---- the page ----


def render(result: dict[str, Any]) -> str:
    """What stands between the markers."""
    found = {(row["shape"], row["rule"], row["drafts"]): row for row in result["rows"]}

    def mean(shape: str, rule: str, mode: str) -> str:
        row = found.get((shape, rule, mode))
        return "–" if row is None else f"{row['mean_accepted']:.3f}"

    heads = ["rule", "exactness", "needs q", "shape", "must read", "drafts", "chain", "tree"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * 6 + "---:|---:|"]
    for rule, mode, _, reads in CASES:
        needs_q, shape = "yes" if ACCEPT_RULES[rule].needs_draft_logits else "no", FITS.get(rule, "both")
        cells = [f"`{rule}`", pass_ext.RULES[rule], needs_q, shape, reads, f"`{mode}`"]
        lines.append("| " + " | ".join([*cells, mean("chain", rule, mode), mean("tree", rule, mode)]) + " |")
    settings, worst = result["settings"], max(row["standard_error"] for row in result["rows"])
    words = (
        "*drafts*: the mode of `draft_sample`. *chain*, *tree*: mean accepted drafts of a step, standard error at most "
        f"{math.ceil(worst * 1000) / 1000:.3f}. A chain of {len(settings['shapes']['chain'])} drafts, a tree with branching "
        f"({', '.join(map(str, settings['shapes']['tree']))}); {settings['requests']:,} requests; "
        f"{settings['vocabulary']:,} tokens, temperature {settings['temperature']:g}; logits random for every node: target "
        f"N(0, {settings['target_spread']:g}), draft = target + N(0, {settings['draft_noise']:g}). Measured on "
        f"{result['date'][:10]}, commit {result['commit']}, {result['machine']['cpu']['model']}, "
        f"{result['machine']['kernels']['cpu_isa']}, torch {result['versions']['torch']}, by "
        "[benchmarks/pages/acceptance.py](../../benchmarks/pages/acceptance.py)."
    )
    lines += ["", *textwrap.wrap(words, 130, break_long_words=False, break_on_hyphens=False)]
    return "\n".join(lines)


def with_table(page: str, table: str) -> str:
    """The page with this between its markers."""
    before, rest = page.split(MARKERS[0])
    _, after = rest.split(MARKERS[1])
    return f"{before}{MARKERS[0]}\n{table}\n{MARKERS[1]}{after}"


def committed_result(root: Path) -> dict[str, Any] | None:
    """The newest benchmarks/results/*/acceptance.json."""
    results = [json.loads(path.read_text()) for path in root.glob("benchmarks/results/*/acceptance.json")]
    return max(results, key=lambda result: result["date"], default=None)


def check(root: Path) -> list[str]:
    """What is out of date."""
    result = committed_result(root)
    if result is None:
        return ["there is no benchmarks/results/*/acceptance.json"]
    page = (root / PAGE).read_text()
    wrong = (
        [] if with_table(page, render(result)) == page else [f"the table in {PAGE} is not what acceptance.json says"]
    )
    if story_in((root / PICTURE).read_text()) != result["story"]:
        wrong.append(f"{PICTURE} does not show the tree of acceptance.json")
    return wrong


def run(requests: int) -> dict[str, Any]:
    """Measures everything."""
    date, commit, load = machine.now(), machine.commit(), os.getloadavg()[0]  # before: the tree may change meanwhile
    rows, story = measure(requests), verify_story()
    return {
        "bench": "acceptance",
        "format": FORMAT,
        "date": date,
        "commit": commit,
        "quick": requests < REQUESTS,
        "device": "cpu",
        "machine": machine.describe_machine(),
        "versions": machine.describe_versions(),
        "load_average": {"before": load, "after": os.getloadavg()[0]},
        "settings": {
            "seed": SEED,
            "requests": requests,
            "vocabulary": VOCABULARY,
            "target_spread": TARGET_SPREAD,
            "draft_noise": DRAFT_NOISE,
            "temperature": TEMPERATURE,
            "shapes": SHAPES,
            "dtype": "float32",
        },
        "story": story,
        "rows": rows,
    }


def main() -> int:
    """Entry point of `python -m benchmarks.pages.acceptance`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where page or picture is out of date"
    )
    parser.add_argument("--render", action="store_true", help="measure nothing; write page and picture")
    parser.add_argument("--quick", action="store_true", help="few requests, on the screen only")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    if options.check:
        wrong = check(options.root)
        if wrong:
            print("; ".join(wrong), ": run python -m benchmarks.pages.acceptance", sep="", file=sys.stderr)
        return 1 if wrong else 0
    result = committed_result(options.root) if options.render else run(1000 if options.quick else REQUESTS)
    if result is None:
        parser.error("--render: there is no benchmarks/results/*/acceptance.json")
    print(render(result))
    if options.quick:
        return 0
    if not options.render:
        folder = os.environ.get("OUT") or options.root / "benchmarks" / "results" / machine.device_slug("cpu")
        save(result, Path(folder) / "acceptance.json")
        if os.environ.get("OUT"):
            return 0
    page = options.root / PAGE
    page.write_text(with_table(page.read_text(), render(result)))
    draw(result["story"], options.root / PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
