"""pass_ext.distributed on gloo groups of 2 and 4 processes: results of the op on all columns, named disagreements, a dead
rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

HERE = Path(__file__).parent
JOBS = {2: "equality,chains,disagreements,death", 4: "equality,chains"}


def run_group(folder, ranks, jobs):
    """What each rank saw, and the exit codes."""
    paths = [str(ROOT), str(HERE), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "group_job.py")]
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks), str(folder), jobs], env=environment, stderr=subprocess.PIPE)
        for rank in range(ranks)
    ]
    errors = [process.communicate(timeout=150)[1].decode() for process in processes]
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    seen = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    return seen, [process.returncode for process in processes], errors


# test_shard.py shows four ranks in one process; a group of two shows the exchange between processes.
@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda ranks: f"{ranks}-ranks")
def group(request, tmp_path_factory):
    ranks = request.param
    seen, codes, errors = run_group(tmp_path_factory.mktemp("group"), ranks, JOBS[ranks])
    expected = [0] * ranks if "death" not in JOBS[ranks] else [0] * (ranks - 1) + [3]
    assert codes == expected, "\n".join(errors)
    return seen


def of_two(group):
    if len(group) != 2:
        pytest.skip("two ranks show it")


def test_steps_and_drafts_are_those_of_all_columns(group):
    assert [seen["equality"]["wrong"] for seen in group if seen] == [[]] * len([seen for seen in group if seen])


def test_chains_from_parts_padding_and_dtensors(group):
    assert [seen["chains"]["wrong"] for seen in group if seen] == [[]] * len([seen for seen in group if seen])


def test_disagreeing_ranks_are_named(group):
    of_two(group)
    messages = group[0]["disagreements"]["messages"]
    shape = "the shape or dtype of target_logits"
    for name in ("rule", "seeds", "temperature", "positions", "gather_below", shape, "k"):
        assert f"{name} must be the same on all ranks, got another on rank 1" in messages[name], messages
    assert "vocab_start must be 150 on rank 1" in messages["vocab_start"]
    assert "vocab_start or vocab_size must be the same on all ranks" in messages["layout"]
    for seen in group:
        messages = seen["disagreements"]["messages"] if seen else messages
        assert "draft_logits must be a DTensor sharded on its last dimension alone" in messages["placements"]
        assert "vocab_start must have a first column for each of 2 ranks, got [0]" in messages["too few first columns"]
        assert "draft_logits must have 150 columns on rank" in messages["narrow drafts"]
    assert "seeds must be given, the same on all ranks" in messages["no seeds"]


def test_a_dead_rank_ends_the_others(group):
    of_two(group)
    message = group[0]["death"]["message"]
    assert "pass_ext.distributed: rank 0 of 2 waits in vain" in message and "a rank has ended" in message
