"""Several processes of one training command: the result of one process, to float32's rounding; other numbers of them go on with
a run; what a rank that fails or is told to stop leaves.
"""

import json
import os
import shlex
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support.paths import ROOT
from support.small_models import save_byte_model

from pass_ext import LookaheadEmbedding
from pass_ext.__main__ import main
from pass_ext.drafting import DecisionModel, ExitAdapter
from pass_ext.training.common.options import PACKAGES
from pass_ext.training.common.ranks import Ranks
from pass_ext.training.common.run import Window

pytest.importorskip("transformers")
for package in PACKAGES:
    pytest.importorskip(package)

STEPS = 30
TEXTS = "--continuations 150 --sample-tokens 16 --length 24"
COMMANDS = {
    "train": "--lookahead 3 --transition-rank 2 --deep --adapter-rank 2 --anchors 4 --batch 3 --checkpoint-every 20 "
    f"--steps {STEPS}",
    "train-draft": f"--layers 1 2 --rank 4 --vocabulary 60 --batch 32 --document-tokens 500 --steps {STEPS}",
    "train-decision": "--draft exit:1 --kind hidden --texts 9 --places 6 --epochs 2 --batch 7 --levels 2",
}
FILES = {
    "train": ("lookahead", LookaheadEmbedding),
    "train-draft": ("exit", ExitAdapter),
    "train-decision": ("decision-hidden", DecisionModel),
}
NAMES = {name: file for name, (file, _) in FILES.items()}


def line_of(name, folder, out, *more):
    line = [name, "--model", str(folder / "model"), "--data", str(folder / "texts"), "--out", str(folder / out)]
    return [*line, *shlex.split(TEXTS), *shlex.split(COMMANDS[name]), *more]


def result_of(name, folder, out):
    return FILES[name][1].load(folder / out / f"{NAMES[name]}.safetensors")


def state_of(folder, out):
    return torch.load(folder / out / "checkpoint.pt", weights_only=True)


def assert_near(state, other):
    """The same run to float32's rounding: thirty steps of Adam move a parameter by 0.01 and more."""
    assert len(state["losses"]) == len(other["losses"])
    assert max(abs(a - b) for a, b in zip(state["losses"], other["losses"], strict=True)) < 1e-5
    for name, tensor in state["module"].items():
        torch.testing.assert_close(tensor, other["module"][name], rtol=0, atol=2e-5)


def free_ports(count):
    with ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in free]


def start_ranks(count, *job):
    """A Python process for each rank."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **{"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count)},
        **{"MASTER_ADDR": "127.0.0.1", "HF_HUB_OFFLINE": "1"},
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen([sys.executable, *job], env=environment | {"RANK": str(rank)}, **pipes)
        for rank in range(count)
    ]


def run_ranks(count, lines, folder):
    """How the lines ended, by rank."""
    file = folder / f"lines of {count}.json"
    ports = free_ports(len(lines))
    file.write_text(json.dumps([(planted, port, line) for (planted, line), port in zip(lines, ports, strict=True)]))
    started = start_ranks(count, str(Path(__file__).parent / "ranks_job.py"), str(file))
    errors = [process.communicate(timeout=400)[1] for process in started]
    assert [process.returncode for process in started] == [0] * count, "\n".join(errors)
    return [json.loads(Path(f"{file}.{rank}").read_text()) for rank in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, texts, and the results of one process: whole runs, and one that stopped after its first step."""
    path = tmp_path_factory.mktemp("ranks")
    save_byte_model(path / "model")
    (path / "texts").mkdir()
    for number in range(120):
        (path / f"texts/part {number}.txt").write_text(f"line {number} of a text\n" * 40)
    for name in COMMANDS:
        main(line_of(name, path, f"whole {name}"))
    main(line_of("train", path, "begun alone", "--minutes", "1e-9"))
    return path


# Two ranks show it; with four, which are more than a step's texts, ranks share the anchors of a text.
@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda count: f"{count}-ranks")
def ranks(request, folder):
    count = request.param
    lines = [("", line_of(name, folder, f"{name} of {count}")) for name in COMMANDS]
    lines += [("", line_of("train", folder, "begun alone")), ("SIGTERM", line_of("train", folder, f"told {count}"))]
    lines.append(("", line_of("train", folder, f"divided {count}", "--fsdp")))
    # The last line: ranks hear of a failure when the others' processes end.
    lines.append(("raises", line_of("train", folder, f"failed {count}", "--rank-timeout", "2")))
    return count, run_ranks(count, lines, folder)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_result_is_that_of_one_process(ranks, folder, name):
    count, ends = ranks
    assert [rank[list(COMMANDS).index(name)] for rank in ends] == [0] * count
    if name == "train":
        assert_near(state_of(folder, f"train of {count}"), state_of(folder, "whole train"))
    one, several = (result_of(name, folder, out) for out in (f"whole {name}", f"{name} of {count}"))
    for mine, theirs in zip(several.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=2e-5)
    facts, wanted = several.training_record, one.training_record
    assert facts["data"] == wanted["data"], "the same samples, and the same texts held out"
    assert facts["evaluation"]["places"] == wanted["evaluation"]["places"] > 0
    assert (wanted["ranks"], facts["ranks"]) == (1, count)
    assert [rank["rank"] for rank in facts["by_rank"]] == list(range(count))
    work = {
        "train": ("groups", STEPS * 12),
        "train-draft": ("rows", 2 * STEPS * 32),
        "train-decision": ("places", None),
    }[name]
    done = [rank[work[0]] for rank in facts["by_rank"]]
    assert all(done) and work[1] in (None, sum(done))
    assert sum(rank.get("texts of samples.jsonl", 0) for rank in facts["by_rank"]) > 48
    assert all(rank.get("texts of samples.jsonl", 0) for rank in facts["by_rank"][:2]), "both wrote samples"
    assert f"{count} ranks" in (folder / f"{name} of {count}" / f"{NAMES[name]}.md").read_text()


def test_a_run_goes_on_with_another_number_of_ranks(ranks, folder):
    count, ends = ranks
    assert [rank[3] for rank in ends] == [0] * count
    assert_near(state_of(folder, "begun alone"), state_of(folder, "whole train"))
    # rank 1 alone had a SIGTERM in its tenth step: all ended after the same step, with status 0
    assert [rank[4] for rank in ends] == [0] * count and len(state_of(folder, f"told {count}")["losses"]) == 10
    main(line_of("train", folder, f"told {count}"))
    assert_near(state_of(folder, f"told {count}"), state_of(folder, "whole train"))


def test_a_rank_that_fails_ends_the_others_with_its_reason(ranks, folder):
    count, ends = ranks
    assert ends[1][6] == "RuntimeError: planted in rank 1"
    for rank in set(range(count)) - {1}:
        assert ends[rank][6] == f"rank {rank} stops, because rank 1 ended: RuntimeError: planted in rank 1"
    assert len(state_of(folder, f"failed {count}")["losses"]) == 7, "the steps before are kept"
    main(line_of("train", folder, f"failed {count}"))
    assert_near(state_of(folder, f"failed {count}"), state_of(folder, "whole train"))


# Ranks that fail, and one that is killed; exchanges, and what transformers imports, as in a command.
ENDING = """
import os, sys, torch
from pass_ext.training.common.ranks import launched

for port, failing, is_killed in zip(sys.argv[1:], (1, 0, 2), (False, False, True)):
    os.environ["MASTER_PORT"] = port
    try:
        with launched(30) as ranks:
            import torch.distributed.nn.functional
            for exchange in range(9):
                ranks.total_([torch.ones(1000)])
                ranks.gather(exchange)
                if ranks.rank == failing and exchange == 5:
                    os.kill(os.getpid(), 9) if is_killed else 1 / 0
    except (SystemExit, ArithmeticError) as error:
        print(error, flush=True)
"""


def test_all_ranks_hear_why_one_of_three_ends():
    started = start_ranks(3, "-c", ENDING, *map(str, free_ports(3)))
    try:
        ends = [process.communicate(timeout=100)[0].splitlines() for process in started]
    finally:
        for process in started:
            process.kill()
    for run, failing in enumerate((1, 0)):
        for rank in range(3):
            why = "" if rank == failing else f"rank {rank} stops, because rank {failing} ended: ZeroDivisionError: "
            assert ends[rank][run] == f"{why}division by zero"
    for rank in (0, 1):
        assert ends[rank][2].startswith(f"rank {rank} stops, because another rank is gone: ")


def test_a_model_whose_layers_are_divided_gives_the_same_result(ranks, folder):
    count, ends = ranks
    assert [rank[5] for rank in ends] == [0] * count
    assert_near(state_of(folder, f"divided {count}"), state_of(folder, "whole train"))
    facts, wanted = (result_of("train", folder, out).training_record for out in (f"divided {count}", "whole train"))
    assert facts["data"] == wanted["data"]
    assert facts["evaluation"]["places"] == wanted["evaluation"]["places"] > 0
    assert sum(rank["groups"] for rank in facts["by_rank"]) == STEPS * 12, "each rank takes its share of the steps"
    with pytest.raises(SystemExit, match="--fsdp divides the model among the ranks of torchrun, and there is one"):
        main(line_of("train", folder, "alone", "--fsdp"))


@pytest.mark.parametrize(("texts", "anchors"), [(1, 8), (3, 4), (4, 5), (2, 7)])
def test_shares_of_a_window_hold_each_group_once(texts, anchors):
    window = Window(torch.arange(texts * 3).view(texts, 3), torch.arange(texts * anchors).view(texts, anchors))
    for count in (1, 2, 3, 4, texts * anchors // 2):
        shares = [window.share(Ranks(rank, count)) for rank in range(count)]
        found = torch.cat([share.anchors.flatten() for share in shares])
        assert found.sort().values.equal(window.anchors.flatten())
        for share in shares:
            assert share.ids[:, 0].div(3, rounding_mode="floor").equal(share.anchors[:, 0] // anchors)
