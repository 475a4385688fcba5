"""A GPU run keeps its evidence however it ends: tried with stand-ins for its stages, and by killing it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support.paths import ROOT

# Tests that pass and fail, one that hangs in C, one that aborts its process, a module that cannot be imported, and a benchmark
# that dies half way. Each test writes its name into another file when it ends: the witness.
MODULES = {
    "accept": """
        @pytest.mark.parametrize("backend", ["cuda"])
        @pytest.mark.parametrize("number", range(12))
        def test_many(backend, number):
            time.sleep(0.05)
            witness(number)
            assert number != 5
    """,
    "cache": """
        @pytest.mark.parametrize("backend", ["cuda"])
        @pytest.mark.parametrize("number", range(3))
        def test_middle_one_hangs(backend, number):
            if number == 1:
                ctypes.CDLL(None).sleep(600)
            witness(number)
    """,
    "draft": """
        @pytest.mark.parametrize("backend", ["cuda"])
        @pytest.mark.parametrize("number", range(3))
        def test_middle_one_aborts(backend, number):
            if number == 1:
                os.abort()
            witness(number)
    """,
    "recall": """
        import sys, types
        made = {"allocation.all.allocated": 0}
        gpu = types.SimpleNamespace(memory_stats=lambda: made, is_available=lambda: False)
        sys.modules["torch"] = types.SimpleNamespace(cuda=gpu)

        @pytest.mark.parametrize("backend", ["cuda"])
        @pytest.mark.parametrize("number", range(2))
        def test_first_one_makes_no_tensor(backend, number):
            made["allocation.all.allocated"] += number
            witness(number)
    """,
    "tree": """
        raise ImportError("no such library")
    """,
}
HEAD = """
import ctypes, os, time
import pytest

def witness(number):
    with open(os.environ["WITNESS"], "a") as file:
        file.write(f"{__name__} {number}\\n")
"""
BENCH = """
import os
from benchmarks.harness import evidence
for rows in range(1, 4):
    evidence.add_here("bench", file="bench_accept.json", result={"quick": False, "rows": list(range(rows))})
os._exit(3)
"""
RUN = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu import record
from benchmarks.harness import evidence
from benchmarks.gpu.runner import Runner, Stage
CORES = "import os; print(len(os.sched_getaffinity(0)) > 1, 'OMP_PROC_BIND' in os.environ)"
folder = Path(sys.argv[1])
tests = lambda name: [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.outcomes", "-p", "no:cacheprovider",
                      "--continue-on-collection-errors", "-q", f"tests/test_{name}.py"]
path = folder / f"evidence-{sys.argv[2]}.jsonl"
machine = {"gpu": {"name": "Some GPU"}}
evidence.add(path, "run", date="2031-02-03T04:05:06Z", commit="0123456789ab", machine=machine, versions={},
             kernels=record.describe_kernels(Path(sys.argv[3])))
stages = [
    Stage("tests", {name: tests(name) for name in ("accept", "cache", "draft", "recall", "tree")}, 60,
          {"PASS_EXT_TEST_SECONDS": "2"}, restarts=3, fine=(0, 5), ended=(0, 5, 10)),
    Stage("bench_accept", {"accept": [sys.executable, "bench.py"]}, 10),
    Stage("sleeps", {"sleep": ["sleep", "600"]}, 1),
    Stage("elsewhere", {"x": ["false"]}, 1, impossible="no such tool"),
    Stage("cores", {"x": [sys.executable, "-c", CORES]}, 10, keeps_output=True),
    Stage("prints", {"x": ["echo", "a number: 7"]}, 10, keeps_output=True),
]
stages = [stage for stage in stages if stage.name in (sys.argv[4:] or [stage.name])]
os.environ["OMP_PROC_BIND"] = "true"  # what importing benchmarks does, and torch then binds this thread
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
sys.exit(0 if Runner(path, folder / "run.log", time.monotonic() + 100).run(stages) else 1)
"""


@pytest.fixture
def benchmarks_gpu():
    from benchmarks.gpu import record
    from benchmarks.harness import evidence

    return evidence, record


@pytest.fixture
def stand_in(tmp_path):
    """Makes a folder with the stand-ins and starts runs there."""
    (tmp_path / "tests").mkdir()
    for name, text in MODULES.items():
        lines = [line.removeprefix("        ") for line in text.splitlines()]
        (tmp_path / f"tests/test_{name}.py").write_text(HEAD + "\n".join(lines))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "bench.py").write_text(BENCH)
    (tmp_path / "run.py").write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WITNESS": str(tmp_path / "witness")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins take seconds to load

    def start(label="1", *stages):
        """Runs these stages, or all."""
        command = [sys.executable, "run.py", tmp_path, label, ROOT, *stages]
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
        )

    return start


def outcomes_of(folder, evidence):
    outcomes = {}
    for path in sorted(folder.glob("evidence-*.jsonl")):
        outcomes |= evidence.outcomes(evidence.read(path), "tests")
    return outcomes


def witnessed(folder):
    text = (folder / "witness").read_text() if (folder / "witness").exists() else ""
    return [line.split() for line in text.splitlines()]


def test_a_run_gets_past_hanging_aborting_and_broken_tests(stand_in, tmp_path, benchmarks_gpu):
    evidence, record = benchmarks_gpu
    assert stand_in().wait(timeout=90) == 1
    outcomes = outcomes_of(tmp_path, evidence)
    assert outcomes == {
        **{f"tests/test_accept.py::test_many[{n}-cuda]": "failed" if n == 5 else "passed" for n in range(12)},
        **{f"tests/test_cache.py::test_middle_one_hangs[{n}-cuda]": "begun" if n == 1 else "passed" for n in range(3)},
        **{f"tests/test_draft.py::test_middle_one_aborts[{n}-cuda]": "begun" if n == 1 else "passed" for n in range(3)},
        **{
            f"tests/test_recall.py::test_first_one_makes_no_tensor[{n}-cuda]": ("nothing", "passed")[n]
            for n in range(2)
        },
        "tests/test_tree.py": "failed",
    }
    (merged,) = record.write(tmp_path)
    assert {name: state.split(",")[0] for name, state in merged["stages"].items()} == {
        "tests": "accept: failed with status 10; tree: failed with status 10",
        "bench_accept": "accept: failed with status 3",
        "sleeps": "sleep: cut off",
        "elsewhere": "left out: no such tool",
        "cores": "passed",
        "prints": "passed",
    }
    failed = {name: merged["kernels"][f"{name}.cuh"]["tests_failed"] for name in MODULES}
    assert failed == {"accept": 1, "cache": 1, "draft": 1, "recall": 0, "tree": 1}
    assert merged["kernels"]["recall.cuh"]["tests_passed"] == 1
    assert json.loads((tmp_path / "bench_accept.json").read_text())["rows"] == [0, 1, 2]
    texts = [fact["text"] for fact in evidence.read(tmp_path / "evidence-1.jsonl") if fact["kind"] == "text"]
    assert texts == [f"{len(os.sched_getaffinity(0)) > 1} False\n", "a number: 7\n"]
    assert "no such library" in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize("seconds", [0.6, *(pytest.param(late, marks=pytest.mark.slow) for late in (1.2, 1.8))])
def test_a_killed_run_leaves_its_outcomes(stand_in, tmp_path, benchmarks_gpu, seconds):
    evidence, record = benchmarks_gpu
    process = stand_in()
    while len(witnessed(tmp_path)) < 4:  # pytest starts slowly, and on a busy machine its tests do
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.3)
    finished = witnessed(tmp_path)
    assert len(finished) > 3
    outcomes = outcomes_of(tmp_path, evidence)
    time.sleep(0.5)
    assert witnessed(tmp_path) == finished, "the tests died with the run"
    last = dict(finished)  # of each process: it may have been killed between witness and outcome
    for module, number in finished:
        (outcome,) = [o for test, o in outcomes.items() if f"{module}.py" in test and f"[{number}-" in test]
        other = {("test_accept", "5"): "failed", ("test_recall", "0"): "nothing"}
        assert outcome == other.get((module, number), "passed") or last[module] == number
    (merged,) = record.write(tmp_path)
    assert merged["kernels"]["accept.cuh"]["tests_passed"] > 0

    # The page shows the record, and the next run of this commit goes on.
    results = tmp_path / "root/benchmarks/results/some-gpu"
    results.mkdir(parents=True)
    (tmp_path / "root/csrc").symlink_to(ROOT / "csrc")
    (tmp_path / "verified-0123456789ab.json").rename(results / "verified-0123456789ab.json")
    page = [sys.executable, "-m", "benchmarks.pages.gpu_status", "--root", tmp_path / "root"]
    assert subprocess.run(page, cwd=ROOT).returncode == 0
    assert "accept.cuh" in (tmp_path / "root/benchmarks/results/gpu-status.md").read_text()
    stand_in("2", "tests").wait(timeout=90)
    again = witnessed(tmp_path)[len(finished) :]
    passed = {tuple(line) for line in finished if line[1] != last[line[0]]} - {("test_accept", "5")}
    assert not passed & set(map(tuple, again)), "tests that passed are not run again"
    (merged,) = record.write(tmp_path)
    assert merged["kernels"]["accept.cuh"]["tests_passed"] == 11


def test_half_a_line_damages_no_other(tmp_path, benchmarks_gpu):
    evidence, _ = benchmarks_gpu
    path = tmp_path / "evidence-1.jsonl"
    evidence.add(path, "test", id="a")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    evidence.add(path, "test", id="b")
    assert [fact["id"] for fact in evidence.read(path)] == ["a", "b"]


def test_a_tree_that_differs_from_its_commit_shares_nothing(tmp_path, benchmarks_gpu):
    evidence, _ = benchmarks_gpu
    for number, commit in enumerate(["0123456789ab", "0123456789ab-dirty", "unknown", "0123456789ab"]):
        evidence.add(tmp_path / f"evidence-{number}.jsonl", "run", commit=commit)
    names = [path.stem for path in evidence.of_commit(tmp_path, "0123456789ab")]
    assert names == ["evidence-0", "evidence-3"]
    assert evidence.of_commit(tmp_path, "0123456789ab-dirty") == evidence.of_commit(tmp_path, "unknown") == []


def test_the_stages_name_existing_files_and_commands(benchmarks_gpu):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--list"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    from benchmarks.gpu.stages import BENCHES, FAMILIES, all_stages, files_of_families

    assert set(FAMILIES) == {path.stem.split("_")[0] for path in ROOT.glob("csrc/cuda/*.cu")} - {"debug"}
    assert all((ROOT / f"benchmarks/ops/{family}.py").exists() for family in BENCHES)
    files = files_of_families()
    assert all(files.values()) and "tests/decoding/test_generate.py" not in files["tree"]
    names = [stage.name for stage in all_stages("9.0")]
    assert names.index("smoke") < names.index("tests") < names.index("memcheck") < names.index("racecheck")
    assert len(set(names)) == len(names)
    from benchmarks.gpu.__main__ import chosen

    with pytest.raises(SystemExit, match="no stage ncx; there are versions"):
        chosen(all_stages("9.0"), "smoke,ncx")
