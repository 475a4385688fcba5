"""``python -m pass_ext bench``: every row is printed, and a result that differs from PyTorch's ends the run."""

import pytest
import torch

from pass_ext import bench
from pass_ext.__main__ import main


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_every_op_is_measured_beside_pytorch(dtype, capsys, monkeypatch):
    monkeypatch.setattr(bench, "_COLD_BYTES", 0)
    monkeypatch.setattr(bench, "_ROUNDS", (1, 1))
    assert main(["bench", "--dtype", dtype]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if line.endswith("×")]
    assert [row[0] for row in rows] == [
        *("lookahead_embed", "linear_rows", "attention_tree", "draft_sample", "accept_chain", "cache_commit_")
    ]
    assert dtype in said and all(float(row[-2]) > 0 for row in rows)


def test_a_result_that_is_not_pytorchs_ends_the_run(monkeypatch):
    monkeypatch.setattr(bench.pass_ext.layers, "linear_rows", lambda x, weight: torch.zeros(8, 4096, dtype=x.dtype))
    with pytest.raises(AssertionError, match=r"linear_rows: the op and PyTorch differ by \d"):
        main(["bench", "--seconds", "0"])


def test_cuda_without_its_library_is_refused():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit, match="pass_ext bench: no CUDA kernels here: "):
        main(["bench", "--device", "cuda"])
