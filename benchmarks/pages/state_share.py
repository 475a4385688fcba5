"""The share of a step that layers with a state spend in their ops, at hidden size 2,048, by torch's profiler.

`python -m benchmarks.pages.state_share` takes a model of random weights with four layers, one of which attends, and the widths
of Qwen3-Next's layers. Steps verify a binary tree and commit its path to the last node. The vocabulary is small, as a deep
model's output layer is a small part of it. Writes benchmarks/results/<device>/state-share.json and the page beside it.
`--render` and `--check` measure nothing.
"""

import sys
from statistics import median
from typing import Any

import torch
from torch.profiler import record_function

from benchmarks.harness import by_machine, machine
from benchmarks.harness.markdown import table
from benchmarks.harness.template import page
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.session.session import Session
from pass_ext.tree import Tree, pack_trees

ROWS, STEPS, PREFIX = (1, 4, 8, 16), 15, 256
SIZES: dict[str, Any] = dict(
    hidden_size=2048, num_hidden_layers=4, vocab_size=4096, intermediate_size=6144, num_attention_heads=16,
    num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
    layer_types=[*["linear_attention"] * 3, "full_attention"],
)  # fmt: skip
OPS = ("recurrent_tree", "convolution_tree", "state_commit_")
AIM = 0.1


def measure() -> dict[str, Any]:
    """The result: milliseconds of a step and of each op in it, by rows; medians over steps."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **SIZES)
    model = packed_model(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False))
    with torch.inference_mode(), model.attached():
        rows = [_step(model, count) for count in ROWS]
    return {
        **machine.describe_run(),
        "settings": {"sizes": SIZES, "prefix": PREFIX, "steps": STEPS},
        "rows": rows,
    }


def _step(model: Any, rows: int) -> dict[str, Any]:
    session = Session(model, 1, 2 * PREFIX)
    _advance(session, Tree.chain(PREFIX - 1))
    tree = Tree((node - 1) // 2 if node else -1 for node in range(rows))
    steps = []
    for number in range(3 + STEPS):
        with (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
            record_function("step"),
        ):
            _advance(session, tree)
        spent = {event.key.split("::")[-1]: event.cpu_time_total / 1e3 for event in profile.key_averages()}
        if number >= 3:
            steps.append([spent["step"], *(spent[op] for op in OPS)])
    whole, *ops = map(median, zip(*steps, strict=True))
    return {"rows": rows, "step_ms": whole, **{f"{op}_ms": value for op, value in zip(OPS, ops, strict=True)}}


def _advance(session: Session, tree: Tree) -> None:
    """Calls the model on the tree and commits the path to its last node."""
    trees = pack_trees([tree], session.device)
    session.call(trees, torch.arange(len(tree)))
    path = torch.tensor([tree.path(len(tree) - 1)], dtype=torch.int32)
    session.commit(trees, path, torch.tensor([path.shape[1] - 1], dtype=torch.int32))


def render(result: dict[str, Any]) -> str:
    """The page."""
    lines = []
    for row in result["rows"]:
        ops = [row[f"{op}_ms"] for op in OPS]
        lines.append(
            [str(row["rows"]), *(f"{ms:.2f}" for ms in (row["step_ms"], *ops)), f"{sum(ops) / row['step_ms']:.1%}"]
        )
    last = result["rows"][-1]
    share = last["recurrent_tree_ms"] / last["step_ms"]
    times = table(["rows", "step", *(f"`{op}`" for op in OPS), "the ops' share"], lines, left=0)
    met = "met" if share <= AIM else "not met"
    return page(__file__, result, times=times, aim=AIM, last=last, share=share, met=met)


def main() -> int:
    """Entry point of `python -m benchmarks.pages.state_share`."""
    return by_machine.command("state-share", by_machine.parser_of(__doc__).parse_args(), measure, render)


if __name__ == "__main__":
    sys.exit(main())
