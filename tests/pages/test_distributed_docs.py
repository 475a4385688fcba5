"""docs/distributed.md: its tables are those of the script, whose counts are those of the protocol; its examples run
under torchrun.
"""

import ast
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from support.paths import ROOT

from benchmarks.pages import shards
from pass_ext.distributed.accept import chain_steps
from pass_ext.distributed.exchange import Add, Gather, Move, run_together
from pass_ext.distributed.layout import equal_parts

needs_examples = pytest.mark.skipif(not (ROOT / "examples").exists(), reason="an sdist has no examples")


def test_the_page_has_the_tables_of_the_script():
    assert shards.tables() in shards.PAGE.read_text()


@pytest.mark.parametrize(("ranks", "filters"), [(2, False), (3, True)])
def test_counts_are_those_of_the_protocol(ranks, filters):
    vocabulary, requests = 17000, 2
    layout, generator = equal_parts(vocabulary, ranks), torch.Generator().manual_seed(0)
    target, draft = (torch.randn(requests, n, vocabulary, generator=generator).bfloat16() for n in (4, 3))
    tokens = torch.zeros(requests, 3, dtype=torch.int64)
    law = (0.8, 5, 0.9, None) if filters else (0.8, None, None, None)
    steps = [
        chain_steps(
            rank, layout, target[..., first:last], tokens, draft_logits=draft[..., first:last], rule="rejection",
            target=law, seeds=1, positions=0,
        )
        for rank, (first, last) in enumerate(zip(layout.starts, layout.ends, strict=True))
    ]  # fmt: skip
    _, exchanges = run_together(steps)
    rounds = shards.FILTERED if filters else shards.REJECTION
    counted = shards.count_shards(layout, 4 * requests, rounds)
    assert counted.exchanges == len(exchanges)
    sent = {kind: sum(w[0].tensor.nbytes for w in exchanges if isinstance(w[0], kind)) for kind in (Gather, Add)}
    received = sent[Gather] * (ranks - 1) + sent[Add] * 2 * (ranks - 1) / ranks
    moved = counted.bytes - received
    assert isinstance(exchanges[0][0], Move) and 0 < moved < vocabulary * 4 * requests * 4


# tests/decoding/test_tensor_parallel.py runs ranks that generate, under torchrun too.
@needs_examples
@pytest.mark.parametrize("name", ["data_parallel", pytest.param("tensor_parallel", marks=pytest.mark.slow)])
def test_examples_run_under_torchrun(name):
    pytest.importorskip("transformers.distributed", reason="tensor parallelism needs transformers 5")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(ROOT / "examples" / f"{name}.py")], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    if name == "tensor_parallel":
        assert done.stdout.count("equals one process's text") == 2, done.stdout  # ranks may share a line
    else:
        assert [line.split(":")[0] for line in lines] == list("01234")


# ---- launch lines ----

SRUN_FLAGS = {"--nodes", "--ntasks-per-node"}  # of srun(1), which is no Python program


def launch_lines():
    """The commands of the page's console block, each in one line."""
    block = shards.PAGE.read_text().split("```console\n")[1].split("```")[0]
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


def torchrun_words(line):
    """The words after torchrun, without shell expressions."""
    words = shlex.split(re.sub(r"\$\(.*?\)|\$\w+", "0", line))
    inner = next((word for word in words if word.startswith("torchrun ")), None)
    return shlex.split(inner) if inner else words


def test_launch_lines_name_files_and_flags_that_exist():
    from torch.distributed.run import get_args_parser

    parser, lines = get_args_parser(), launch_lines()
    assert [line.split()[0] for line in lines] == ["torchrun", "torchrun", "srun"]
    for line in lines:
        program, *arguments = torchrun_words(line)
        assert program == "torchrun"
        options = parser.parse_args(arguments)  # ends the test at an unknown flag
        assert (ROOT / options.training_script).is_file() or not (ROOT / "examples").exists(), line
    flags = {word for word in lines[2].split(" bash ")[0].split() if word.startswith("--")}
    assert flags == SRUN_FLAGS


def test_the_ray_program_is_python_and_ray_is_an_extra():
    program = shards.PAGE.read_text().split("<!-- ray -->\n```text\n")[1].split("```")[0]
    names = {node.value for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Constant)}
    files = [name for name in names if isinstance(name, str) and name.endswith(".py")]
    assert files and all((ROOT / name).is_file() for name in files if (ROOT / "examples").exists())
    assert '\nray = ["ray"]\n' in (ROOT / "pyproject.toml").read_text() and "pass_ext[ray]" in shards.PAGE.read_text()
    variables = set(re.findall(r"(\w+)=", program.split("update(")[1].split(")\n")[0]))
    assert {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"} <= variables
