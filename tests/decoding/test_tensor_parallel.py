"""generate under transformers' tensor parallelism: two ranks, started by torchrun, hold the columns of the logits; every method
gives on both the text of one process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

pytest.importorskip("transformers.distributed", reason="tensor parallelism needs transformers 5")
JOB = Path(__file__).with_name("tensor_parallel_job.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*torchrun, str(JOB), str(folder)], env=environment, capture_output=True, timeout=240)
    assert ended.returncode == 0, ended.stderr.decode()[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_no_rank_has_all_logits(ranks):
    (first, whole), (second, _) = (texts["columns"] for texts in ranks)
    assert first < whole and second < whole and first + second == whole


def test_every_method_gives_the_text_of_one_process(ranks):
    wrong = [
        (rank, name)
        for rank, texts in enumerate(ranks)
        for name, text in texts.items()
        if isinstance(text, list) and name not in ("columns", "tables", "fresh seeds") and text[0] != text[1]
    ]
    assert wrong == []
    assert ranks[0]["plain"] == ranks[1]["plain"] != ranks[0]["plain, warm"] == ranks[1]["plain, warm"]


def test_fresh_seeds_are_the_same_on_all_ranks(ranks):
    assert ranks[0]["fresh seeds"] == ranks[1]["fresh seeds"]


def test_trees_chosen_by_measured_times_are_refused(ranks):
    for texts in ranks:
        assert "rows must be a number under tensor parallelism" in texts["rows"]


def test_transitions_are_computed_from_a_divided_table(ranks):
    for texts in ranks:
        assert texts["tables"] == [True, True] and texts["drafts of all columns"]
        assert "not divided among the ranks as the logits are: use slots of rank 0" in texts["transitions"]


def test_another_models_slots_are_refused_by_every_rank(ranks):
    for texts in ranks:
        assert "belongs to another model; embedding table: it was trained with that of" in texts["another model's"]
