"""The page of a trained head: its smallest measurement, with a random head, and commands that it refuses."""

import pytest
import torch
from support.paths import ROOT

if not (ROOT / "benchmarks").exists():
    pytest.skip("an sdist has no benchmarks", allow_module_level=True)

from benchmarks.decoding import random_heads
from benchmarks.pages import batches, heads, hybrid, trained_head
from pass_ext.checkpoint import demo_model, load_checkpoint


def test_a_head_is_measured_beside_plain_and_slots(tmp_path, monkeypatch):
    """One prompt of one kind, eight tokens, a round behind the one that warms up."""
    smallest = dict(
        KINDS=("chat",), PROMPTS=1, TOKENS=8, LENGTHS=(1, 2), WIDE=(1,), TREES=((2, 1),), BELOW=(1,), ROWS=(8,)
    )
    for name, value in smallest.items():
        monkeypatch.setattr(trained_head, name, value)
    torch.manual_seed(0)
    random_heads.eagle3(tmp_path, load_checkpoint(demo_model(), torch.bfloat16)[0], 8192)
    result = trained_head.measure(str(tmp_path), 1)
    assert [(row["kind"], row["method"]) for row in result["rows"]] == [
        ("chat", name)
        for name in (
            "Plain", "PaSS, slots", "head in bfloat16, 1 draft", "head, 1 draft", "head, 2 drafts", "head, tree 2 × 1",
            'head, "auto"', "head, 1 draft, slots below, 8 rows",
        )
    ]  # fmt: skip
    assert len(result["hit rates"]) == 2 and max(result["hit rates"]) < 0.5, "of a random head"
    for row in result["rows"]:
        assert row["texts"] == row["same"] == len(row["seconds"]) == len(row["plain"]) == 1
        assert row["calls"] <= 8 and (row["method"] != "Plain" or row["calls"] == 8)
        drafts = "draft" in row["method"] or "tree" in row["method"]
        assert (row["ms"]["draft"][0] > 0.2) >= drafts and row["ms"]["verify"][0] > 0.2
    page = trained_head.render(result)
    assert all(f"| {row['method']} |" in page for row in result["rows"])


@pytest.mark.parametrize("page", [batches, heads, hybrid, trained_head], ids=lambda page: page.__name__.split(".")[-1])
@pytest.mark.parametrize("rounds", ["0", "-1", "two"])
def test_no_rounds_are_refused(monkeypatch, capsys, page, rounds):
    monkeypatch.setattr("sys.argv", ["page", "folder", f"--rounds={rounds}"])
    with pytest.raises(SystemExit) as ended:
        page.main()
    assert ended.value.code == 2 and f"argument --rounds: must be 1 or more, got {rounds}" in capsys.readouterr().err
