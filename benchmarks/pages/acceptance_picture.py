"""The picture of docs/ops/accept.md: one small tree of words, verified by rule "rejection", with every number on the way."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

import pass_ext
from benchmarks.harness import picture
from benchmarks.pages.acceptance_means import draft
from pass_ext import Tree
from pass_ext.reference.accept import Judge
from pass_ext.reference.common.distribution import process
from pass_ext.reference.common.noise import coin

WORDS = [
    *("cat", "dog", "bird", "fox"),
    *("sings", "sleeps", "runs", "eats"),
    *("well", "here", "now", "again"),
]
STORY = {"root": "the", "branching": (3, 2), "seed": 2029, "position": 7}


def verify_story() -> dict[str, Any]:
    """A tree of words, the result of accept_tree, and every probability and coin that led to it."""
    tree, seed, position = Tree.from_branching(STORY["branching"]), STORY["seed"], STORY["position"]
    parents = list(tree.parents)
    generator = torch.Generator().manual_seed(seed)
    grammar = torch.full((len(parents), len(WORDS)), -math.inf)  # a noun, then a verb, then an adverb
    for node, depth in enumerate(tree.depths):
        grammar[node, 4 * depth : 4 * depth + 4] = 0.0
    target = grammar + torch.randn(grammar.shape, generator=generator)
    logits = target + 0.8 * torch.randn(grammar.shape, generator=generator)
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    tokens = draft("without", logits[None], tree, seeds, positions)[0]
    result = pass_ext.accept_tree(
        target, tokens, torch.tensor(parents), torch.tensor([0, len(parents)]), tree.max_depth,
        rule="rejection", draft_logits=logits, temperature=1.0, seeds=seeds, positions=positions,
    )  # fmt: skip
    path = [int(node) for node in result.path[0] if node >= 0]
    emitted = [int(token) for token in result.emitted[0] if token >= 0]

    nodes: list[dict[str, Any]] = [{"word": WORDS[int(token)], "state": "not looked at"} for token in tokens]
    nodes[0] = {"word": STORY["root"], "state": "accepted"}
    for depth, node in enumerate(path):
        judge = Judge(node, depth, process(target[node]), iter(()), process(logits[node]).probs)
        for child in tree.children(node):
            token = int(tokens[child])
            p, q, u = float(judge.p[token]), float(judge.q_at(token)[token]), coin(seed, position, child)
            state = "accepted" if u < p / q else "rejected"
            nodes[child] |= {"state": state, "p": round(p, 4), "q": round(q, 4), "coin": round(u, 4)}
            if state == "accepted":
                break
            judge.reject(token)
    accepted = [node for node, entry in enumerate(nodes) if entry["state"] == "accepted"]
    assert accepted == path, "reference and kernel accept other nodes"
    added = {"word": WORDS[emitted[-1]], "parent": path[-1], "p": round(float(judge.p[emitted[-1]]), 4)}
    return {"rule": "rejection", "parents": parents, "nodes": nodes, "path": path, "added": added}


def draw(story: dict[str, Any], path: Path) -> None:
    """The tree from left to right. `path` may end in .svg or .png."""
    picture.save(path, partial(_figure, story), title="A tree of drafts being verified", story=story)


def check(story: dict[str, Any], path: Path) -> bool:
    """True if the file shows this story and, where the same matplotlib is installed, is the file that `draw` writes."""
    return picture.tells(path, story) and picture.is_redrawn(path, partial(draw, story))


def _figure(story: dict[str, Any]) -> Any:
    from matplotlib import pyplot
    from matplotlib.patches import FancyBboxPatch

    style = {
        "accepted": dict(face="#cfe3f7", edge="#0b3d6e", text="#0b2545", width=2.2, line="solid"),
        "rejected": dict(face="#e4e4e4", edge="#8a8a8a", text="#4a4a4a", width=1.1, line="solid"),
        "not looked at": dict(face="#ffffff", edge="#b5b5b5", text="#777777", width=1.0, line=(0, (3, 2))),
        "added": dict(face="#0b3d6e", edge="#0b3d6e", text="#ffffff", width=2.2, line="solid"),
    }
    parents, nodes, added = story["parents"], story["nodes"], story["added"]
    tree = Tree(parents)
    height = {leaf: float(len(tree.leaves) - 1 - row) for row, leaf in enumerate(tree.leaves)}
    for node in reversed(range(len(parents))):
        below = [height[child] for child in tree.children(node)]
        height.setdefault(node, sum(below) / len(below) if below else 0.0)
    left = (0.0, 1.06, 3.06, 5.06)  # of the boxes at each depth
    half, tall = 0.34, 0.36  # half the width of a box, its height

    pyplot.rcParams["font.size"] = 9.5  # picture.save restores it
    figure = pyplot.figure(figsize=(7.3, 4.75))
    axes = figure.add_axes((0.005, 0.0, 0.99, 1.0))
    axes.set(xlim=(-0.08, 5.95), ylim=(-1.52, len(tree.leaves) - 0.05))
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

    for node, entry in enumerate(nodes):
        x, y, state = left[tree.depths[node]], height[node], entry["state"]
        box(x, y, entry["word"], state)
        if node:
            parent = parents[node]
            edge(left[tree.depths[parent]] + 2 * half + 0.03, height[parent], x - 0.03, y, state)
        if "coin" in entry:
            ratio, less = entry["p"] / entry["q"], "<" if state == "accepted" else "≥"
            shade = style[state]["text"]
            weight = "bold" if state == "accepted" else "normal"
            axes.text(
                x + 2 * half + 0.08, y + 0.235, f"p / q = {entry['p']:.2f} / {entry['q']:.2f}", fontsize=8.4,
                va="center", color=shade,
            )  # fmt: skip
            axes.text(
                x + 2 * half + 0.08, y - 0.24, f"coin {entry['coin']:.2f} {less} {ratio:.2f}", fontsize=8.4,
                va="center", color=shade, weight=weight,
            )  # fmt: skip
    last = added["parent"]
    y = height[last]
    edge(left[tree.depths[last]] + 2 * half + 0.03, y, left[3] - 0.03, y, "added")
    box(left[3], y, added["word"], "added")
    emitted = " ".join([*(nodes[node]["word"] for node in story["path"][1:]), added["word"]])
    for down, text in ((0.38, f"p = {added['p']:.2f}"), (1.1, "emitted"), (1.4, emitted)):
        weight = "bold" if text is emitted else "normal"
        axes.text(left[3] + half, y - down, text, fontsize=8.4, ha="center", va="center", weight=weight)

    for x, text in zip(left, ("root", "first draft", "second draft", "added"), strict=True):
        axes.text(x + half, len(tree.leaves) - 0.33, text, ha="center", va="center", color="#333333", style="italic")
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
    return figure
